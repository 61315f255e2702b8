"""How values are shown in log lines: as tf shows its float32 numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

__all__ = ["show_value"]


def show_value(value: Any) -> str:
    """Return a value as text; floats with the digits that float32 has, which is what they come from.

    Args:
        value: a number, a tensor, an array, or anything else.
    """
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = value.float().numpy() if value.dtype is torch.bfloat16 else value.numpy()
    elif isinstance(value, float) and (not math.isfinite(value) or abs(value) <= torch.finfo(torch.float32).max):
        value = np.float32(value)
    with np.printoptions(suppress=True):
        return str(value)
