"""Traces a replica function for replicas whose share of the batch is empty.

XLA can't compute some operations on tensors without elements (views by strides, gathering), and torch's formula for
``layer_norm`` on XLA forgets the gradient there. What has no elements need not be computed: its shape is enough.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import Self, override

from torchstrategy.base import tree
from torchstrategy.tpu.marks import is_on_device
from torchstrategy.tpu.operations import COMPUTATIONS, HANDLERS, handler_of
from torchstrategy.tpu.region import Region
from torchstrategy.xla.runtime import TpuRuntime

__all__ = ["make_region"]


def make_region(runtime: TpuRuntime, num_replicas: int, *, is_empty: bool) -> Region:
    """Return what watches one trace of a replica function.

    Args:
        runtime: the devices.
        num_replicas: how many replicas the trace is for.
        is_empty: whether these replicas have no examples.
    """
    return (_EmptyRegion if is_empty else Region)(runtime, num_replicas)


class _EmptyRegion(Region):
    """Computes what has elements, and of the rest only the shapes."""

    def __init__(self, runtime: TpuRuntime, num_replicas: int) -> None:
        super().__init__(runtime, num_replicas)
        self._layer_norms: list[_LayerNorms] = []

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = (*args, *(kwargs or {}).values())
        tensors = [leaf for leaf in tree.all_leaves(given) if isinstance(leaf, Tensor)]
        empty = [tensor for tensor in tensors if is_on_device(tensor) and not tensor.numel()]
        if empty and (HANDLERS[id(func)] if id(func) in HANDLERS else handler_of(func)) in COMPUTATIONS:
            shapes = _shapes(func, args, kwargs or {})
            if shapes is not None:
                result = tree.map_leaves(lambda shape: empty[0].new_zeros(shape.shape, dtype=shape.dtype), shapes)
                return self.marked(result, func, given)
        return super().__torch_dispatch__(func, types, args, kwargs)

    @override
    def __enter__(self) -> Self:
        super().__enter__()
        self._layer_norms.append(_LayerNorms())
        self._layer_norms[-1].__enter__()  # type: ignore[no-untyped-call]
        return self

    @override
    def __exit__(self, *exception: Any) -> None:
        self._layer_norms.pop().__exit__(*exception)  # type: ignore[no-untyped-call]
        super().__exit__(*exception)


class _LayerNorms(TorchFunctionMode):
    """Lets results of ``layer_norm`` without elements depend on its parameters."""

    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.layer_norm, torch.nn.functional.layer_norm):
            names = ("input", "normalized_shape", "weight", "bias")
            given = dict(zip(names, args, strict=False)) | (kwargs or {})
            value, weight, bias = given["input"], given.get("weight"), given.get("bias")
            if isinstance(value, Tensor) and is_on_device(value) and not value.numel():
                result = value if weight is None else value * weight
                return result if bias is None else result + bias
        return func(*args, **(kwargs or {}))


def _shapes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return an operation's results as tensors without memory; ``None`` if some have elements, or it is not known."""
    with contextlib.suppress(Exception):  # an operation that torch can only run; what is wrong shows when it does
        results = func(*_without_memory(args), **_without_memory(kwargs))
        leaves = tree.all_leaves(results)
        if leaves and all(isinstance(leaf, Tensor) and not leaf.numel() for leaf in leaves):
            return results
    return None


def _without_memory(values: Any) -> Any:
    return tree.map_leaves(
        lambda leaf: torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") if isinstance(leaf, Tensor) else leaf,
        values,
    )
