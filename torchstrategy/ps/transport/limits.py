"""How large a message may be, and how long a connection may be silent."""

from __future__ import annotations

import dataclasses
import os

__all__ = ["Limits"]

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
