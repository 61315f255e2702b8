"""The object that ``strategy.scope()`` returns."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Any

from torchstrategy.base.context import Frame, pop_frame, push_frame
from torchstrategy.replicas.caller_modes import on_device
from torchstrategy.replicas.record import start_recording, stop_recording

__all__ = ["Scope"]


class Scope:
    """Makes a strategy current and records what is made inside; usable once.

    Args:
        strategy: what ``with strategy.scope() as s`` gives.
        frame: pushed on entry; ``None`` for the default strategy, whose scope changes nothing.
        device: the default device inside, as tensors report it; ``None`` leaves it.
    """

    def __init__(self, strategy: Any, frame: Frame | None, device: Any) -> None:
        self._strategy = strategy
        self._frame = frame
        self._device = device
        self._stack: ExitStack | None = None
        self._used = False

    def __enter__(self) -> Any:
        if self._used:
            raise RuntimeError(
                "This scope was entered before. Call `strategy.scope()` anew: `with strategy.scope(): ...`."
            )
        self._strategy._check_can_enter()
        self._used = True
        stack = ExitStack()
        stack.enter_context(on_device(self._device))
        if self._frame is not None:
            push_frame(self._frame)
            start_recording(self._strategy)
        self._stack = stack
        return self._strategy

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stack is None:
            raise RuntimeError("Strategy scope nesting error: this scope is not open. Use `with strategy.scope():`.")
        if self._frame is not None:
            pop_frame(self._frame)
            stop_recording()
            self._strategy.hosting.leave_scope()
        stack, self._stack = self._stack, None
        stack.close()
