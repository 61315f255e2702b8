"""Where in the user's program a collective was called."""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["call_site"]

_PACKAGE = str(Path(__file__).parents[1])
_TORCH = f"{Path('torch')}/"


def call_site() -> str:
    """Return ``file:line (function)`` of the innermost frame outside this library and torch."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_PACKAGE) and f"/{_TORCH}" not in file and not file.startswith("<"):
            return f"{Path(file).name}:{frame.f_lineno} ({frame.f_code.co_name})"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return "unknown call site"
