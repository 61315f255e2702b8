"""What is logged of strangers and damage, so that neither can fill the disk."""

from __future__ import annotations

import threading
import time

from torchstrategy.base.log import logger

__all__ = ["RefusalLog"]

_INTERVAL_S = 60.0
_MAX_LINES = 64  # an interval


class RefusalLog:
    """One line a minute for each host and kind of refusal, the first one at once.

    Args:
        who: who refuses, to begin the line with.
    """

    def __init__(self, who: str) -> None:
        self._who = who
        self._lock = threading.Lock()
        self._started = -_INTERVAL_S
        self._said: set[tuple[str, str]] = set()
        self._num_suppressed = 0

    def add(self, host: str, kind: str, detail: str = "") -> None:
        """Log a refusal, or count it.

        Args:
            host: where it came from, without the port, which differs each time.
            kind: one of a few phrases.
            detail: what differs between two of a kind.
        """
        with self._lock:
            now = time.monotonic()
            if now - self._started >= _INTERVAL_S:
                if self._num_suppressed:
                    logger.warning("%s refused %d more such messages or connections.", self._who, self._num_suppressed)
                self._said.clear()
                self._num_suppressed = 0
                self._started = now
            if (host, kind) in self._said or len(self._said) >= _MAX_LINES:
                self._num_suppressed += 1
                return
            self._said.add((host, kind))
        logger.warning("%s refused %s: %s%s", self._who, host, kind, f" ({detail})" if detail else "")
