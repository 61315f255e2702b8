"""Batches of tensors of different shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchstrategy.data.pipeline.batches import collate
from torchstrategy.data.pipeline.elements import describe, parts, rebuild
from torchstrategy.errors import InvalidArgumentError

__all__ = ["PaddedStack"]


class PaddedStack:
    """Pads tensors and stacks them.

    Args:
        shapes: in the structure of the elements, a list for each component; ``None`` means the longest.
        values: in the structure of the elements, or one number for all; ``None`` means 0.
    """

    def __init__(self, shapes: Any, values: Any) -> None:
        self._shapes = shapes
        self._values = values

    def __call__(self, elements: list[Any], first_number: int) -> Any:
        """Return a batch."""
        return self._stack(elements, self._shapes, self._values, first_number)

    def _stack(self, elements: Sequence[Any], shapes: Any, values: Any, number: int) -> Any:
        first = parts(elements[0])
        if first is None:
            padded = _pad(elements, shapes, 0 if values is None else values, number)
            return collate(padded, number)
        keys = first[0]
        columns = [[_component(element, key, i) for element in elements] for i, key in enumerate(keys)]
        return rebuild(
            elements[0],
            [
                self._stack(column, _argument(shapes, key, i), _argument(values, key, i), number)
                for i, (key, column) in enumerate(zip(keys, columns, strict=True))
            ],
        )


def _component(element: Any, key: Any, index: int) -> Any:
    found = parts(element)
    if found is None or key not in found[0]:
        raise InvalidArgumentError(f"padded_batch() needs elements of one structure. Received: {describe(element)}")
    return element[key] if isinstance(element, dict) else found[1][index]


def _argument(argument: Any, key: Any, index: int) -> Any:
    """Return a component's part of a structure; a single value is for all."""
    found = None if isinstance(argument, torch.Size) else parts(argument)
    if found is None:
        return argument
    return argument[key] if isinstance(argument, dict) else found[1][index]


def _pad(tensors: Sequence[Any], shape: Any, value: Any, number: int) -> Sequence[Any]:
    if not all(isinstance(tensor, Tensor) for tensor in tensors):
        return tensors
    num_dims = tensors[0].dim()
    if any(tensor.dim() != num_dims for tensor in tensors) or (shape is not None and len(shape) != num_dims):
        found = sorted({tuple(tensor.shape) for tensor in tensors})
        raise InvalidArgumentError(
            f"padded_batch() needs tensors with one number of dimensions{'' if shape is None else f', that of {shape}'}"
            f". Elements {number} to {number + len(tensors) - 1} have the shapes {found}."
        )
    longest = [max(tensor.shape[i] for tensor in tensors) for i in range(num_dims)]
    wanted = [None] * num_dims if shape is None else [None if size in (None, -1) else int(size) for size in shape]
    sizes = [long if size is None else size for size, long in zip(wanted, longest, strict=True)]
    if any(long > size for long, size in zip(longest, sizes, strict=True)):
        raise InvalidArgumentError(
            f"An element of {number} to {number + len(tensors) - 1} is larger than its padded shape {shape}: {longest}."
        )
    return [_padded(tensor, sizes, value) for tensor in tensors]


def _padded(tensor: Tensor, sizes: list[int], value: Any) -> Tensor:
    if list(tensor.shape) == sizes:
        return tensor
    filler = torch.as_tensor(value, device="cpu")
    if not (tensor.is_floating_point() or tensor.is_complex()) and filler.to(tensor.dtype) != filler:
        raise InvalidArgumentError(f"The padding value {value} does not fit tensors of {tensor.dtype}.")
    result = tensor.new_full(sizes, filler.item())
    result[tuple(slice(0, size) for size in tensor.shape)] = tensor
    return result
