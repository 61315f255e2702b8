"""Where the threads of this process are."""

from __future__ import annotations

import sys
import threading
import traceback

__all__ = ["all_stacks"]

_MAX_CHARS = 100_000


def all_stacks() -> str:
    """Return the stack of every thread of this process, innermost call last; the calling thread is left out."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [
        f"Thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    ]
    text = "\n".join(sorted(parts))
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}\n[...]"
