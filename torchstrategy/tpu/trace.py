"""One call of ``run``: what is traced in it, and which of it differs between replicas.

XLA can't compute some operations on tensors without elements (views by strides, gathering), and torch's formula for
``layer_norm`` on XLA forgets the gradient there. What has no elements need not be computed: its shape is enough.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import Self, override

from torchstrategy.base import tree
from torchstrategy.base.values import PerReplica
from torchstrategy.tpu.device_values import SplitValues
from torchstrategy.tpu.groups import Groups
from torchstrategy.tpu.marks import is_on_device
from torchstrategy.tpu.operations import COMPUTATIONS, HANDLERS, handler_of
from torchstrategy.tpu.region import Region
from torchstrategy.xla.runtime import TpuRuntime

__all__ = ["Trace", "join_results", "make_region"]


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


class Trace:
    """What belongs to one call of ``run``.

    Args:
        runtime: the devices.
        groups: which replicas are traced together.
        had_examples: for each replica, whether its share of the batch is not empty.
    """

    def __init__(self, runtime: TpuRuntime, groups: Groups, had_examples: Sequence[bool]) -> None:
        self.groups = groups
        self.had_examples = list(had_examples)
        self.regions = [
            make_region(runtime, len(groups.group_of), is_empty=not self.had_examples[groups.first_member(group)])
            for group in range(groups.count)
        ]
        self.runtime = runtime

    @property
    def region(self) -> Region:
        """The first group's region; all know the same local values."""
        return self.regions[0]

    def enter(self, rows: Tensor) -> Tensor:
        """Return what each replica has of ``[num_replicas, ...]``."""
        with self.region.paused():
            value = self.runtime.enter(rows, split=True).reshape(rows.shape[1:]).clone()  # no view, see ReplicaState
        return self.region.mark_local(value)

    def stack(self, values: Sequence[Tensor]) -> Tensor:
        """Return the replicas' values ``[num_replicas, ...]``, given each group's, of equal shape."""
        with self.region.paused():
            return self.rows(values[0]) if len(values) == 1 else self.runtime.stack(self.select(values))

    def rows(self, value: Tensor) -> Tensor:
        """Return what a group has as if all replicas had it, ``[num_replicas, ...]``. To be called in ``paused``."""
        if self.is_local(value):
            return self.runtime.stack(value.detach())
        num = len(self.groups.group_of)
        rows = value.detach().unsqueeze(0).expand(num, *value.shape).clone()
        return self.runtime.split(rows, [num, *[1] * value.dim()])  # else the compiler might divide it otherwise

    def select(self, values: Sequence[Tensor]) -> Tensor:
        """Return each replica's own value, given each group's, of equal shape. To be called in ``paused``."""
        own = [
            value.detach() if self.is_local(value) else self.runtime.enter(value.detach(), split=False)
            for value in values
        ]
        return own[0] if len(own) == 1 else self.groups.select(own)

    def is_local(self, value: Tensor) -> bool:
        """Say whether a tensor differs between replicas."""
        return self.region.is_local(value)

    def forget(self) -> None:
        """Let go of what was entered: tensors that live when a graph is cut are computed by it and kept."""
        for region in self.regions:
            region.forget()

    def has_local_values(self) -> bool:
        """Say whether any tensor that differs between replicas is alive, if only in a graph of autograd; fast."""
        return any(region.has_living_local_values() for region in self.regions)

    def local_values(self) -> list[Tensor]:
        """Return the living tensors that differ between replicas."""
        found = {id(value): value for region in self.regions for value in region.local_values()}
        return list(found.values())


def join_results(runtime: TpuRuntime, trace: Trace, results: Sequence[Any], *, is_traced: bool = False) -> Any:
    """Return one structure for all replicas, given what each group returned.

    Tensors become ``SplitValues``; an object that all groups returned stays plain.

    Args:
        runtime: the devices.
        trace: the call of ``run``.
        results: one for each group.
        is_traced: whether the result is for a function that is traced itself.

    Raises:
        ValueError: the groups returned different structures.
    """
    of_local = trace.groups.of_local

    def join(*leaves: Any) -> Any:
        first = leaves[0]
        if isinstance(first, nn.Parameter) and all(leaf is first for leaf in leaves):
            return first
        if all(isinstance(leaf, Tensor) and leaf.device.type == runtime.device.type for leaf in leaves):
            if len({(leaf.shape, leaf.dtype) for leaf in leaves}) == 1:
                return SplitValues(runtime, [trace.stack(leaves)], (0,) * len(of_local), is_traced=is_traced)
            with trace.region.paused():
                stacks = [trace.rows(leaf) for leaf in leaves]
            return SplitValues(runtime, stacks, of_local, is_traced=is_traced)
        if all(leaf is first for leaf in leaves):
            return first
        return PerReplica([leaves[group] for group in of_local])

    specs = [tree.flatten(result)[1] for result in results]
    for spec in specs[1:]:
        if spec != specs[0]:  # said without the values, which can't be printed here
            raise ValueError(
                "The replicas' values must have the same nested structure (types and lengths of containers, keys of "
                f"dicts). Received values{tree.describe(specs[0])} and values{tree.describe(spec)}"
            )
    return tree.map_structure(join, results) if len(results) > 1 else tree.map_leaves(join, results[0])
