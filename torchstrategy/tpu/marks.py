"""Which plain tensors of the device are local: a note on the tensor itself, of the line where it was computed."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from torch import Tensor
from torch.autograd.graph import _engine_run_backward

from torchstrategy.base.log import is_of_library

__all__ = [
    "MARK",
    "Site",
    "any_local",
    "any_on_device",
    "describe_site",
    "find_site",
    "forget_backward",
    "get_mark",
    "is_on_device",
    "with_defaults",
]

_is_users: dict[str, bool] = {}
_BACKWARD = _engine_run_backward.__code__


class Site:
    """An operation, and the innermost frame of the user's that called it: its code and the instruction there.

    Each call has its own, so that a tensor that is marked with it is still alive as long as the site is.
    """

    __slots__ = ("__weakref__", "code", "instruction", "operation")

    def __init__(self, operation: Any, code: CodeType | None, instruction: int) -> None:
        self.operation = operation
        self.code = code
        self.instruction = instruction


class _Backward(threading.local):
    """The running backward pass, all of whose operations have one call site."""

    frame: FrameType | None = None
    site: tuple[CodeType | None, int] = (None, 0)


_backward = _Backward()


def find_site(operation: Any) -> Site:
    """Note the innermost frame outside this library and torch."""
    frame = sys._getframe(2)
    if frame.f_code is not _BACKWARD:
        return Site(operation, *_find_users(frame))
    if _backward.frame is not frame:
        _backward.frame, _backward.site = frame, _find_users(frame)
    return Site(operation, *_backward.site)


def forget_backward() -> None:
    """Let go of the last backward pass."""
    _backward.frame = None


def _find_users(frame: FrameType | None) -> tuple[CodeType | None, int]:
    while frame is not None:
        code = frame.f_code
        file = code.co_filename  # whose hash is kept, where that of a code object is computed each time
        try:
            known = _is_users[file]
        except KeyError:
            known = _is_users[file] = _is_users_file(file)
        if known:
            return code, frame.f_lasti
        frame = frame.f_back
    return None, 0


def describe_site(site: Site) -> str:
    """Return for example ``aten.relu at train.py:12 (step)``."""
    name = "its use" if site.operation is None else str(site.operation).removesuffix(".default")
    code = site.code
    if code is None:
        return name
    line = next(
        (line for start, end, line in code.co_lines() if start <= site.instruction < end and line), code.co_firstlineno
    )
    return f"{name} at {Path(code.co_filename).name}:{line} ({code.co_name})"


def _is_users_file(file: str) -> bool:
    return not is_of_library(file) and "/torch_xla/" not in file


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
