"""Signals that end torch's elastic launcher, wherever they find it.

torch's handler raises a ``SignalException`` in whatever code runs at that moment. Some of that code catches all
exceptions (``logging``), and some replaces it by one of its own (the launcher's metrics), so that the launcher would
go on, or seem to have failed.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TypeVar

from torch.distributed.elastic.multiprocessing import SignalException, api

__all__ = ["SignalReceived", "until_signal"]

#: Those for which torch's launcher registers its handler.
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_AGAIN_S = 1.0
_PATIENCE_S = 30.0  # torch's own with workers that do not end
_Result = TypeVar("_Result")


class SignalReceived(Exception):
    """A launcher has ended because of a signal.

    Args:
        number: the signal.
    """

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"{number.name} received")
        self.number = number


def until_signal(launch: Callable[[], _Result]) -> _Result:
    """Call torch's launcher; however a signal disturbs it, say so in one way, and leave no worker behind.

    Args:
        launch: calls ``elastic_launch``.

    Returns:
        What it returns.

    Raises:
        SignalReceived: the launcher received a signal that ends it.
    """
    handler, others = _Handler(), set(multiprocessing.active_children())
    error: BaseException | None = None
    with _registered(handler):
        try:
            try:
                result = launch()
            except BaseException as raised:  # noqa: BLE001 - is raised again below
                error = raised
            handler.is_over = True
        except BaseException as raised:  # noqa: BLE001 - a signal between the lines above
            error = raised
        handler.stop()
        number = handler.number or _cause(error)
        if number is not None:
            # One that was just being started is not known to torch yet.
            _end(set(multiprocessing.active_children()) - others)
    if number is not None:
        raise SignalReceived(number) from None
    if error is not None:
        raise error
    return result


class _Handler:
    """Raises what torch's handler raises, until it is heeded; further signals do not interrupt the workers' end."""

    def __init__(self) -> None:
        self.number: signal.Signals | None = None
        self.is_over = False
        self._alarm_before: tuple[Any, tuple[float, float]] | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        del frame
        if number != signal.SIGALRM:
            self.number = self.number or signal.Signals(number)
        if self.is_over or self.number is None:
            return
        self._call_again()
        if _cause(sys.exc_info()[1]) is None:
            raise SignalException(f"{self.number.name} received", sigval=self.number)

    def stop(self) -> None:
        """Only note signals from now on."""
        self.is_over = True
        if self._alarm_before is not None:
            previous, timer = self._alarm_before
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL if previous is None else previous)
            signal.setitimer(signal.ITIMER_REAL, *timer)

    def _call_again(self) -> None:
        # No thread: it might be one that is just being started which the signal has interrupted.
        timer = signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
        if self._alarm_before is None:
            self._alarm_before = signal.signal(signal.SIGALRM, self), timer


@contextlib.contextmanager
def _registered(handler: _Handler) -> Iterator[None]:
    """Put the handler in the place of torch's, which torch registers when it starts workers and leaves there."""
    if threading.current_thread() is not threading.main_thread():  # where torch registers none
        yield
        return
    before: list[tuple[int, Any]] = [(number, signal.getsignal(number)) for number in _SIGNALS]
    name = "_terminate_process_handler"
    torch_handler = getattr(api, name)
    setattr(api, name, handler)
    try:
        yield
    finally:
        setattr(api, name, torch_handler)
        for number, previous in before:
            if previous is not None:  # else it was not registered by Python
                signal.signal(number, previous)


def _cause(error: BaseException | None) -> signal.Signals | None:
    """Return the signal that led to an exception, if one did."""
    while error is not None:
        if isinstance(error, SignalException):
            return signal.Signals(error.sigval)
        if isinstance(error, KeyboardInterrupt):  # before torch has registered its handler
            return signal.SIGINT
        error = error.__cause__ or error.__context__
    return None


def _end(processes: set[Any]) -> None:
    for process in processes:
        process.terminate()
    end = time.monotonic() + _PATIENCE_S
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
