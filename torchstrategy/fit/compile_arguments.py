"""The arguments of ``compile`` that are numbers and switches."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from torchstrategy.base.log import logger

__all__ = ["COUNTS", "check_flag", "parse_amp", "parse_count", "parse_jit"]

#: Arguments that are numbers of batches.
COUNTS = ("steps_per_execution", "gradient_accumulation_steps")

#: Names of torch's and of Keras' mixed precision -> dtype of the forward pass.
_AMP = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "mixed_bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "mixed_float16": torch.float16,
}


def parse_count(name: str, value: Any) -> int:
    """Return a number of batches; Keras' default for gradient accumulation is ``None``."""
    if value is None and name == "gradient_accumulation_steps":
        return 1
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1:
        raise ValueError(f"compile({name}=...) must be a positive integer. Received: {value!r}")
    return int(value)


def check_flag(name: str, value: Any) -> None:
    """Refuse what is neither True nor False."""
    if not isinstance(value, bool):
        raise TypeError(f"compile({name}=...) must be True or False. Received: {value!r}")


def parse_amp(amp: Any) -> torch.dtype | None:
    """Return what forward passes compute in; ``None`` is the parameters' dtype."""
    if amp is None or amp is False:
        return None
    dtype = _AMP.get(amp) if isinstance(amp, str) else amp
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"compile(amp=...) must be 'bf16', 'fp16' or None. Received: {amp!r}")
    return dtype


def parse_jit(jit_compile: Any) -> bool:
    """Return whether the model is compiled by ``torch.compile``."""
    if jit_compile == "auto" or jit_compile is None:
        return False
    if not isinstance(jit_compile, bool):
        raise TypeError(f"compile(jit_compile=...) must be True, False or 'auto'. Received: {jit_compile!r}")
    if jit_compile:
        logger.info("compile(jit_compile=True): the model is compiled by torch.compile in the second step.")
    return jit_compile
