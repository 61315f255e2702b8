"""An optimizer's state of one parameter: how it travels, and how it is cut into the states of the parameter's parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from torchstrategy.checkpoint.spilling import new_tensor
from torchstrategy.errors import InvalidArgumentError
from torchstrategy.ps.layout import VariableSpec

__all__ = ["JoinedState", "cut_state", "pack_state", "unpack_state"]


class JoinedState:
    """The state of a whole variable, put together part by part; large tensors may be in files, see ``spilling``.

    Args:
        spec: the variable.
    """

    def __init__(self, spec: VariableSpec) -> None:
        self.state: dict[str, Any] = {}
        self._spec = spec

    def add(self, index: int, state: Mapping[str, Any]) -> None:
        """Add the state of one part; one that has made no step has none, which stands for zeros."""
        shape = self._spec.part_shape(index)
        for name, value in state.items():
            has_rows = isinstance(value, Tensor) and value.dim() > 0 and value.shape[:1] == shape[:1]
            if not has_rows:
                self.state.setdefault(name, value)
                continue
            if name not in self.state:
                self.state[name] = new_tensor((self._spec.shape[0], *value.shape[1:]), value.dtype)
            self._spec.cut(self.state[name], index).copy_(value)


def cut_state(spec: VariableSpec, state: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return what one part needs of the state of a whole variable.

    Raises:
        InvalidArgumentError: the variable has several parts and a tensor does not have a row for each of its rows.
    """
    if not spec.is_sharded:
        return dict(state)
    cut = {}
    for name, value in state.items():
        has_rows = isinstance(value, Tensor) and value.dim() > 0
        if has_rows and len(value) != spec.shape[0]:
            raise InvalidArgumentError(
                f"The state {name!r} of variable {spec.name!r} has {len(value)} rows instead of {spec.shape[0]}, so it "
                f"can't be cut into {len(spec.parts)} parts."
            )
        cut[name] = spec.cut(value, index) if has_rows else value
    return cut


def pack_state(state: Mapping[str, Any], tensors: list[Tensor]) -> dict[str, Any]:
    """Return the state of one parameter as JSON can hold it; tensors are added to ``tensors``.

    Raises:
        TypeError: a value is no tensor, number, text, bool or ``None``.
    """
    packed: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            packed[name] = {"tensor": len(tensors)}
            tensors.append(value)
        elif value is None or isinstance(value, (bool, int, float, str)):
            packed[name] = {"value": value}
        else:
            raise TypeError(
                f"The state {name!r} of an optimizer is a {type(value).__name__}; only tensors, numbers, texts, bools "
                "and None can be moved between a program and its parameter servers."
            )
    return packed


def unpack_state(packed: Mapping[str, Any], tensors: Sequence[Tensor]) -> dict[str, Any]:
    """Return what ``pack_state`` was given.

    Raises:
        ValueError: it is something else.
    """
    try:
        return {
            name: tensors[value["tensor"]] if "tensor" in value else value["value"] for name, value in packed.items()
        }
    except (AttributeError, TypeError, KeyError, IndexError) as error:
        raise ValueError(f"This is no state of an optimizer: {packed!r:.200} ({error})") from error
