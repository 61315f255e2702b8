"""Memory for what arrives, used again: the page faults of fresh memory cost as much as receiving into it."""

from __future__ import annotations

import weakref

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["BufferPool"]

_MIN_BYTES = 1 << 20
_MAX_IDLE_BYTES = 512 << 20

_Block = npt.NDArray[np.uint8]


class BufferPool:
    """Blocks that come back by themselves when the last tensor over them is gone.

    Needs no lock, which a garbage collection could find taken by its own thread: single operations on a dict are
    atomic.

    Args:
        max_idle_bytes: what is kept at most for later messages.
    """

    def __init__(self, max_idle_bytes: int = _MAX_IDLE_BYTES) -> None:
        self._idle: dict[int, _Block] = {}
        self._max_idle_bytes = max_idle_bytes

    def empty(self, num_bytes: int) -> Tensor:
        """Return ``[num_bytes]`` of type uint8 with any content."""
        if num_bytes < _MIN_BYTES:
            return torch.empty(num_bytes, dtype=torch.uint8)
        block = self._take(num_bytes)
        lease = block.view()
        weakref.finalize(lease, self._give_back, block).atexit = False
        return torch.from_numpy(lease)

    @property
    def idle_bytes(self) -> int:
        """Bytes that are kept for later messages."""
        return sum(block.nbytes for block in list(self._idle.values()))

    def _take(self, num_bytes: int) -> _Block:
        for key, block in list(self._idle.items()):
            if block.nbytes == num_bytes and self._idle.pop(key, None) is not None:
                return block
        return np.empty(num_bytes, np.uint8)

    def _give_back(self, block: _Block) -> None:
        self._idle[id(block)] = block
        for key in list(self._idle):
            if self.idle_bytes <= self._max_idle_bytes:
                break
            self._idle.pop(key, None)
