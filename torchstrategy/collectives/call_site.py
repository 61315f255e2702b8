"""Where in the user's program a collective was called."""

from __future__ import annotations

import functools
import logging
import sys
from pathlib import Path
from types import FrameType
from typing import NamedTuple

__all__ = ["CallSite", "call_site", "is_users_file", "users_frame"]

_PACKAGE = str(Path(__file__).parents[1])
_TORCH = f"{Path('torch')}/"


class CallSite(NamedTuple):
    """A line of the user's program: the file's path, the number and the function."""

    path: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{Path(self.path).name}:{self.line} ({self.function})" if self.path else "unknown call site"


def call_site() -> str:
    """Return ``file:line (function)`` of the innermost frame outside this library and torch."""
    return str(users_frame())


def users_frame() -> CallSite:
    """Return the innermost frame outside this library and torch."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_users_file(frame.f_code.co_filename):
            return CallSite(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return CallSite("", 0, "")


@functools.lru_cache(maxsize=1024)
def is_users_file(file: str) -> bool:
    """Say whether a file is the user's, and not of this library, of torch or of ``logging``, or generated code."""
    return not (file.startswith((_PACKAGE, "<")) or f"/{_TORCH}" in file or file == logging.__file__)
