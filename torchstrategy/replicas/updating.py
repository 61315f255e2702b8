"""Whether this thread is in an optimizer's step on the host, where nothing is summed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

__all__ = ["is_updating", "updating"]


class _Updating(threading.local):
    value = False


_updating = _Updating()


def is_updating() -> bool:
    """Say whether this thread is in an optimizer's step on the host."""
    return _updating.value


@contextlib.contextmanager
def updating() -> Iterator[None]:
    """Carry out an optimizer's step on the host."""
    _updating.value = True
    try:
        yield
    finally:
        _updating.value = False
