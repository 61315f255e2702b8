"""What a process does when its machine is taken away: it is told, all processes agree on a step, save, and end.

A notice may reach one process only, and each at another step. So what was noticed is exchanged about once a second, at
points that all processes pass equally often; the first exchange after a notice tells all to save there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from torchstrategy.base.later import explains_absent
from torchstrategy.base.log import logger

if TYPE_CHECKING:
    from torchstrategy.checkpoint.checkpoint import Checkpoint

__all__ = ["EXIT_STATUS", "AgreedStop", "PreemptionWatcher", "TerminationConfig", "check_positive"]

#: As a process that SIGTERM has ended; what starts jobs again takes it for an interruption, and not for a failure.
EXIT_STATUS = 128 + signal.SIGTERM
_OF_PROGRAMS = tuple(
    getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name)
)  # none on Windows
_SIGNALS = (signal.SIGTERM, *_OF_PROGRAMS)
_POLL_S = 1.0
_MOST_STEPS_BETWEEN = 100


class TerminationConfig(NamedTuple):
    """How a job learns that it will be ended, and what it does then.

    Args:
        termination_watcher_fn: asked about once a second, in a thread; returns whether this machine will be taken away.
            ``None`` asks nobody; signals are noticed in any case.
        exit_fn: called when all is saved; ``None`` ends the program with status 143.
        grace_period: seconds between a notice and the end of the machine, during which training may go on: it is saved
            just before they are over, with time for twice what the last save took. As long as none was made, half of
            them is left for it. 0 saves at once.
        save_fn: called instead of saving a checkpoint.
        signals: those that are a notice, beside what the watcher says. SLURM sends SIGUSR1 or SIGUSR2 if it is told to
            (``--signal``), all others SIGTERM. Leave out one that ``faulthandler.register`` has.
        deadline: seconds after a notice when the process ends with status 143 in any case, though it could not save: a
            step or a read of data takes too long, or another process does not answer. ``None`` means never.

    Example:
        >>> ts.experimental.TerminationConfig(grace_period=60, deadline=110).deadline
        110
    """

    termination_watcher_fn: Callable[[], bool] | None = None
    exit_fn: Callable[[], Any] | None = None
    grace_period: float = 0.0
    save_fn: Callable[[], Any] | None = None
    signals: tuple[int, ...] = _SIGNALS
    deadline: float | None = None


@explains_absent("experimental.PreemptionWatcher")
class PreemptionWatcher:
    """Notices that this process will be ended. Main thread only; ``close`` undoes the handling of signals.

    A second signal of the same kind does what it did before. A forked process watches nothing.

    Args:
        config: what is noticed.

    Raises:
        RuntimeError: made outside the main thread, where Python handles no signals.
        ValueError: a signal can't be handled, or a time is negative.

    Example:
        >>> import os, signal
        >>> with ts.experimental.PreemptionWatcher() as watcher:
        ...     before = watcher.preemption_message
        ...     os.kill(os.getpid(), signal.SIGTERM)
        ...     before, watcher.preemption_message
        (None, 'SIGTERM')
    """

    def __init__(self, config: TerminationConfig | None = None) -> None:
        self._config = TerminationConfig() if config is None else config
        _check(self._config)
        self._pid = os.getpid()
        self._message: str | None = None
        self._noticed_at = 0.0
        self._closed = threading.Event()
        self._timer: threading.Timer | None = None
        self._handlers: dict[int, Any] = {}
        self._lock = threading.RLock()
        try:
            for number in dict.fromkeys(self._config.signals):
                if signal.getsignal(number) is not None:  # a handler in C, which could not be given back
                    self._handlers[number] = signal.signal(number, self._handle)
        except (ValueError, OSError) as error:
            self._restore_handlers()
            if threading.current_thread() is threading.main_thread():
                raise ValueError(f"TerminationConfig(signals=...): can't handle {number}: {error}") from error
            raise RuntimeError(
                "Signals are handled in the main thread only, as Python has it. Make the PreemptionWatcher there (or "
                "call fit there); with TerminationConfig(signals=(), termination_watcher_fn=...) any thread will do."
            ) from error
        self._wakeup = _Wakeup(self) if self._config.deadline is not None and self._handlers else None
        _watchers.add(self)
        if self._config.termination_watcher_fn is not None:
            threading.Thread(target=self._ask, name="preemption watcher", daemon=True).start()

    @property
    def preemption_message(self) -> str | None:
        """What has told that the process will be ended; ``None`` as long as nothing has."""
        return self._message

    @property
    def elapsed(self) -> float:
        """Seconds since the notice; 0 if there was none."""
        return 0.0 if self._message is None else time.monotonic() - self._noticed_at

    @property
    def config(self) -> TerminationConfig:
        """What is noticed, and what follows."""
        return self._config

    def close(self, *, resend: bool = False) -> None:
        """Let signals mean what they meant before.

        Args:
            resend: whether a signal that was noticed is sent again, because nobody has acted on it.
        """
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
            if self._timer is not None:
                self._timer.cancel()
        _watchers.discard(self)
        if self._wakeup is not None:
            self._wakeup.close()
        self._restore_handlers()
        number = next((number for number in self._config.signals if _name(number) == self._message), None)
        if resend and number is not None:
            error = sys.exc_info()[1]
            if isinstance(error, Exception):  # which nobody would see
                logger.error("%s came, and this error ended the training:", self._message, exc_info=error)
            os.kill(os.getpid(), number)

    def __enter__(self) -> PreemptionWatcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def note(self, message: str) -> None:
        """Notice, the first time.

        Args:
            message: what has told it.
        """
        with self._lock:
            if self._message is not None or self._closed.is_set() or os.getpid() != self._pid:
                return
            self._noticed_at = time.monotonic()
            self._message = message
            if self._config.deadline is not None:
                self._timer = threading.Timer(self._config.deadline, self._give_up)
                self._timer.daemon = True
                self._timer.start()

    def _handle(self, number: int, frame: Any) -> None:
        before = self._handlers[number]
        if self._closed.is_set():  # another watcher was closed later, and has put this one back
            if callable(before):
                before(number, frame)
            elif before == signal.SIG_DFL:
                signal.signal(number, before)
                os.kill(os.getpid(), number)
            return
        self.note(_name(number))
        signal.signal(number, before)  # a second one does what it did before

    def _ask(self) -> None:
        asks = self._config.termination_watcher_fn
        while asks is not None and not self._closed.wait(_POLL_S):
            try:
                is_noticed = asks()
            except Exception as error:  # noqa: BLE001 - it may be a server that does not answer for a while
                logger.warning("TerminationConfig.termination_watcher_fn failed: %s: %s", type(error).__name__, error)
                continue
            if is_noticed:
                self.note("termination_watcher_fn")
                return

    def _give_up(self) -> None:
        if self._closed.is_set():
            return
        logger.error(
            "Nothing could be saved within %g s after %s: a step or a read of data takes longer, or another process "
            "does not answer. The process ends with status %d; a new start goes on from the last checkpoint.",
            self._config.deadline,
            self._message,
            EXIT_STATUS,
        )
        sys.stderr.flush()
        os._exit(EXIT_STATUS)

    def _restore_handlers(self) -> None:
        with contextlib.suppress(ValueError):  # closed by another thread, which can't
            for number, before in self._handlers.items():
                if signal.getsignal(number) == self._handle:  # else the program has its own since
                    signal.signal(number, before)

    def _forget_in_child(self) -> None:
        """Watch nothing in a forked process: SIGUSR1 and SIGUSR2 are ignored there, other signals as they were."""
        self._closed.set()
        for number, before in self._handlers.items():
            signal.signal(number, signal.SIG_IGN if number in _OF_PROGRAMS else before)


class _Wakeup:
    """Lets a thread notice signals though the main thread is in a call that does not come back."""

    def __init__(self, watcher: PreemptionWatcher) -> None:
        self._watcher = weakref.ref(watcher)
        self._own, self._other = socket.socketpair()
        self._other.settimeout(0.0)
        before = signal.set_wakeup_fd(self._other.fileno(), warn_on_full_buffer=False)
        self.is_in_place = before == -1
        if not self.is_in_place:  # such as asyncio's: Python's handler has to do
            signal.set_wakeup_fd(before)
            return
        threading.Thread(target=self._listen, name="preemption signals", daemon=True).start()

    def close(self) -> None:
        """Undo it."""
        if self.is_in_place:
            with contextlib.suppress(ValueError):
                signal.set_wakeup_fd(-1)
        self._other.close()

    def _listen(self) -> None:
        with self._own:
            while data := self._own.recv(1):
                watcher = self._watcher()
                if watcher is not None and data[0] in watcher.config.signals:
                    watcher.note(_name(data[0]))


_watchers: weakref.WeakSet[PreemptionWatcher] = weakref.WeakSet()


def _after_fork() -> None:
    for watcher in list(_watchers):
        if watcher._wakeup is not None and watcher._wakeup.is_in_place:
            signal.set_wakeup_fd(-1)  # a signal to this process is none to its parent
        watcher._forget_in_child()
    _watchers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class AgreedStop:
    """Lets all processes agree at which point they save and end.

    Args:
        agree: given a value and what it is, returns every process's.
        watcher: this process's.
        checkpoint: what is saved; ``None`` if this process takes no part in it.
    """

    def __init__(
        self,
        agree: Callable[[Any, str], list[Any]],
        watcher: PreemptionWatcher,
        checkpoint: Checkpoint | None,
    ) -> None:
        self._agree = agree
        self._checkpoint = checkpoint
        self.watcher = watcher
        self._num_to_wait = 0
        self._last_time = time.monotonic()
        self._num_since = 0
        self._is_over = False

    def is_due(self, *, at_once: bool) -> bool:
        """Say whether to save and end here; all processes call it equally often, and hear the same.

        Args:
            at_once: ask now, not only if it is time to.
        """
        if self._is_over:
            return False
        self._num_since += 1
        if self._num_since <= self._num_to_wait and not at_once:
            return False
        seconds = (time.monotonic() - self._last_time) / self._num_since
        save_s = 0.0 if self._checkpoint is None else self._checkpoint._background.write_s
        own = [self.watcher.preemption_message, self.watcher.elapsed, seconds, save_s]
        reports = self._agree(own, "preemption")
        messages = [(rank, report[0]) for rank, report in enumerate(reports) if report[0] is not None]
        step_s = max(report[2] for report in reports)
        # The first step may be much quicker than those that follow, such as one whose data was there already.
        most = min(_MOST_STEPS_BETWEEN, 2 * self._num_to_wait + 1)
        self._num_to_wait = 0 if len(reports) == 1 else min(most, int(_POLL_S / max(step_s, 1e-3)))
        self._last_time, self._num_since = time.monotonic(), 0
        if not messages:
            return False
        for rank, message in messages:
            if self.watcher.preemption_message is None:
                self.watcher.note(f"{message} of rank {rank}")
        self._num_to_wait = 0  # from now on each step may be the last
        elapsed = max(report[1] for report in reports)
        grace_s = self.watcher.config.grace_period
        saves = [report[3] for report in reports if report[3] is not None]  # those that don't write know nothing
        return bool(elapsed + 2 * step_s + (2 * max(saves) if saves else grace_s / 2) >= grace_s)

    def save_and_end(self, save: Callable[[], Any], what: str) -> None:
        """Save, which all processes do at this point, and end the program.

        Args:
            save: saves, unless the configuration has its own function.
            what: what is saved, for the log.
        """
        config = self.watcher.config
        (save if config.save_fn is None else config.save_fn)()
        logger.warning(
            "%s: saved %s, and leave %.1f s later.", self.watcher.preemption_message, what, self.watcher.elapsed
        )
        self._is_over = True
        self.watcher.close()
        if config.exit_fn is None:
            raise SystemExit(EXIT_STATUS)
        config.exit_fn()


def _check(config: TerminationConfig) -> None:
    for name in ("grace_period", "deadline"):
        value = getattr(config, name)
        if value is not None and not value >= 0:
            raise ValueError(f"TerminationConfig({name}=...) must be a number of seconds, from 0. Received: {value!r}")
    if config.deadline is not None and config.deadline < config.grace_period:
        raise ValueError(
            f"TerminationConfig: the deadline of {config.deadline:g} s is before the end of the grace_period of "
            f"{config.grace_period:g} s."
        )


def check_positive(value: Any, argument: str, expected: str) -> None:
    """Check that an argument is an integer from 1.

    Raises:
        ValueError: it is not; with what was expected, as the caller says it.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{argument} must be {expected}. Received: {value!r}")


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
