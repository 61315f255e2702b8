"""Which plain tensors of the device are local: a note on the tensor itself, of where it was computed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from torchstrategy.tpu.call_sites import Site

__all__ = ["MARK", "any_local", "any_on_device", "get_mark", "is_on_device", "with_defaults"]

#: Attribute of a plain tensor: its `Site` if it is local.
MARK = "_torchstrategy_local"


def get_mark(value: Any) -> Site | None:
    """Return where a local tensor was computed, ``None`` for a shared one."""
    site: Site | None = getattr(value, MARK, None)
    return site


def is_on_device(value: Tensor) -> bool:
    """Say whether a tensor is on an XLA device."""
    return bool(value.is_xla)  # type: ignore[attr-defined] # torch's stubs lack it


def any_local(values: Iterable[Any]) -> bool:
    """Say whether a tensor among the values, or in a list among them, is local."""
    for value in values:
        if isinstance(value, Tensor):
            if get_mark(value) is not None:
                return True
        elif isinstance(value, (list, tuple)) and any_local(value):
            return True
    return False


def any_on_device(values: Iterable[Any]) -> bool:
    """Say whether a tensor among the values, or in a list among them, is on an XLA device."""
    for value in values:
        if isinstance(value, Tensor):
            if is_on_device(value):
                return True
        elif isinstance(value, (list, tuple)) and any_on_device(value):
            return True
    return False


def with_defaults(args: tuple[Any, ...], num_required: int, defaults: tuple[Any, ...]) -> list[Any]:
    """Return all arguments of an operation, whose trailing ones the dispatcher leaves out if they are the defaults."""
    return [*args, *defaults[len(args) - num_required :]]
