"""How large a message may be, how long a connection may be silent, and what is logged of strangers and damage."""

from __future__ import annotations

import dataclasses
import os
import threading
import time

from torchstrategy.base.log import logger

__all__ = ["Limits", "RefusalLog"]

_PREFIX = "TORCHSTRATEGY_"


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a message may have at most; one that has more is refused before its memory is allocated.

    Args:
        max_message_bytes: tensors of one message on a tensor connection.
        max_control_bytes: everything of one message on a control connection. ZeroMQ holds such a message in memory
            before it can be looked at.
        max_header_bytes: its header, in JSON.
        max_header_depth: how deep lists and objects of the header may be nested.
        max_frames: its tensors and blobs together.
        max_tensor_dims: dimensions of one tensor.
    """

    max_message_bytes: int = 64 << 30
    max_control_bytes: int = 512 << 20
    max_header_bytes: int = 16 << 20
    max_header_depth: int = 64
    max_frames: int = 1 << 16
    max_tensor_dims: int = 64

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{field.name} must be a positive integer. Received: {value!r}")

    def of_control(self) -> Limits:
        """Return the limits of messages on a control connection."""
        return dataclasses.replace(self, max_message_bytes=self.max_control_bytes)

    @classmethod
    def from_environment(cls) -> Limits:
        """Return the limits that variables such as ``TORCHSTRATEGY_MAX_MESSAGE_BYTES`` give, else the defaults.

        Raises:
            ValueError: a variable is no positive integer.
        """
        given = {}
        for field in dataclasses.fields(cls):
            name = _PREFIX + field.name.upper()
            text = os.environ.get(name)
            if text is None:
                continue
            if not text.isdecimal() or int(text) < 1:
                raise ValueError(f"{name} must be a positive integer. Received: {text!r}")
            given[field.name] = int(text)
        return cls(**given)


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
