"""Large values in files instead of memory, for checkpoints of models that don't fit into the coordinator's memory."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar

import torch
from torch import Tensor

from torchstrategy.base.context import set_within

__all__ = ["new_tensor", "spilled_to"]

#: Smaller tensors stay in memory.
_MIN_BYTES = 1 << 20
_directory: ContextVar[str | None] = ContextVar("directory", default=None)


def spilled_to(directory: str) -> AbstractContextManager[None]:
    """Let ``new_tensor`` make tensors in files without a name in a directory."""
    return set_within(_directory, directory or os.curdir)


def new_tensor(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor of zeros on the CPU.

    Within ``spilled_to`` a large one is a file's content, which the kernel may write out and drop from memory. The file
    has no name and is gone with the tensor.
    """
    size = math.prod(shape)
    directory = _directory.get()
    if directory is None or size * dtype.itemsize < _MIN_BYTES:
        return torch.zeros(tuple(shape), dtype=dtype)
    os.makedirs(directory, exist_ok=True)
    handle, path = tempfile.mkstemp(prefix=".spilled-", dir=directory)
    try:
        os.close(handle)
        return torch.from_file(path, shared=True, size=size, dtype=dtype).view(tuple(shape))
    finally:
        os.unlink(path)
