"""Where in the user's program a collective was called."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import FrameType

__all__ = ["call_site"]

_PACKAGE = str(Path(__file__).parents[1])
_TORCH = f"{Path('torch')}/"


def call_site() -> str:
    """Return ``file:line (function)`` of the innermost frame outside this library and torch."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = _users_file(frame.f_code.co_filename)
        if name is not None:
            return f"{name}:{frame.f_lineno} ({frame.f_code.co_name})"
        frame = frame.f_back
    return "unknown call site"


@functools.lru_cache(maxsize=1024)
def _users_file(file: str) -> str | None:
    """Return the name of a file of the user's; ``None`` for files of this library, of torch, and generated code."""
    is_ours = file.startswith((_PACKAGE, "<")) or f"/{_TORCH}" in file
    return None if is_ours else Path(file).name
