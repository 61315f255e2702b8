"""Refuses calls that a dispatch mode does not see, while a replica function is traced."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._tensor_str

from torchstrategy.tpu.protocols import AnyRegion
from torchstrategy.tpu.refusals import describe_symbol, is_logged, refuse_collective, refuse_cut, refuse_printing
from torchstrategy.xla.kernels import CUTS, functions_to_refuse

__all__ = ["allowed_calls", "current_region", "refused_calls"]


class _Thread(threading.local):
    region: AnyRegion | None = None


_thread = _Thread()
_lock = threading.Lock()
_num_regions = 0  # of all threads
_originals: list[tuple[Any, str, Any]] = []


def current_region() -> AnyRegion | None:
    """Return what watches the function that this thread traces, ``None`` outside, and while the library works."""
    return _thread.region


@contextlib.contextmanager
def refused_calls(region: AnyRegion) -> Iterator[None]:
    """Refuse these calls in this thread."""
    global _num_regions
    outer, _thread.region = _thread.region, region
    with _lock:
        _num_regions += 1
        if _num_regions == 1:
            _replace()
    try:
        yield
    finally:
        _thread.region = outer
        with _lock:
            _num_regions -= 1
            if not _num_regions:
                _restore()


@contextlib.contextmanager
def allowed_calls() -> Iterator[None]:
    """Allow these calls again in this thread, for the library's own use."""
    outer, _thread.region = _thread.region, None
    try:
        yield
    finally:
        _thread.region = outer


def _replace() -> None:
    printing = torch._tensor_str._str
    _originals.append((torch._tensor_str, "_str", printing))
    torch._tensor_str._str = _unless_on_device(printing)
    for module, name in functions_to_refuse():
        original = getattr(module, name)
        _originals.append((module, name, original))
        setattr(module, name, _unless_traced(original, name))


def _restore() -> None:
    while _originals:
        module, name, original = _originals.pop()
        setattr(module, name, original)


def _unless_on_device(original: Callable[..., str]) -> Callable[..., str]:
    @functools.wraps(original)
    def to_string(value: Any, *args: Any, **kwargs: Any) -> str:
        if _thread.region is not None and value.is_xla:
            if is_logged():
                return describe_symbol(_thread.region, value)
            refuse_printing(_thread.region, value)
        return original(value, *args, **kwargs)

    return to_string


def _unless_traced(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _thread.region is None:
            return original(*args, **kwargs)
        return refuse_cut(name) if name in CUTS else refuse_collective(f"xm.{name}")

    return call
