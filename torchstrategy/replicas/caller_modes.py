"""What holds on the thread that calls ``run`` and must hold for the replicas: modes, thread count, default device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _python_dispatch

__all__ = ["CallerModes", "on_device", "refuse_modes"]

_DEVICE_CONTEXT = "DeviceContext"


class CallerModes:
    """Grad mode, inference mode, autocast and thread count of the thread that calls ``run``."""

    def __init__(self) -> None:
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.num_threads = torch.get_num_threads()
        self.autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
            for kind in ("cpu", "cuda", "xla")
            if torch.is_autocast_enabled(kind)
        ]

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Enter them on another thread."""
        if self.grad and not self.inference and not self.autocast:
            yield  # a fresh thread is like this
            return
        with contextlib.ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            if not self.grad:
                stack.enter_context(torch.no_grad())
            for kind, dtype, cache in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=cache))
            yield


@contextlib.contextmanager
def _entered_device(device: torch.device) -> Iterator[None]:
    with torch.device(device):
        if device.type == "cuda":
            with torch.cuda.device(device):
                yield
        else:
            yield


def on_device(device: torch.device | None) -> contextlib.AbstractContextManager[Any]:
    """Make a device the default one, unless it is; ``None`` leaves the default.

    Args:
        device: as tensors report it, of ``tensor_device``.
    """
    if device is None or device == torch.get_default_device():
        return contextlib.nullcontext()
    return _entered_device(device)


def refuse_modes() -> None:
    """Refuse function and dispatch modes of the caller: they would silently not apply on the replicas' threads."""
    modes = [
        type(mode).__name__
        for mode in torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        if type(mode).__name__ != _DEVICE_CONTEXT
    ]
    modes += [type(mode).__name__ for mode in _python_dispatch._get_current_dispatch_mode_stack()]
    if modes:
        raise RuntimeError(
            f"`run` was called inside {', '.join(modes)}, which would not apply to the replicas' threads. Enter it "
            "inside the replica function instead."
        )
