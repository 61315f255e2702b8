"""Connections in a forked child, such as a loader's worker: closed at once, and never used.

Otherwise the child would keep them open after its parent has died, and a dead server's port in use.
"""

from __future__ import annotations

import contextlib
import os
import socket
import weakref
from collections.abc import Callable, Mapping
from typing import Protocol

__all__ = ["Forkable", "close_in_child", "close_sockets"]


class Forkable(Protocol):
    """What holds connections."""

    def release(self) -> None:
        """Close this process's descriptors, without telling the other ends anything."""


_owners: weakref.WeakSet[Forkable] = weakref.WeakSet()


def close_in_child(owner: Forkable) -> None:
    """Call the owner's ``release`` in each forked child, as long as the owner lives."""
    _owners.add(owner)


def close_sockets(ports: Mapping[int, int]) -> None:
    """Close sockets that ZeroMQ has opened.

    Args:
        ports: by descriptor the port of either end, by which it is known: the number may stand for something else by
            now, which is left alone.
    """
    for descriptor, port in list(ports.items()):
        with contextlib.suppress(OSError):  # closed, or no socket
            found = socket.socket(fileno=descriptor)
            if port in (_port(found.getsockname), _port(found.getpeername)):
                found.close()
            else:
                found.detach()


def _port(name: Callable[[], object]) -> int:
    with contextlib.suppress(OSError):
        found = name()
        return int(found[1]) if isinstance(found, tuple) else -1
    return -1


def _release_in_child() -> None:
    for owner in list(_owners):
        owner.release()


if hasattr(os, "register_at_fork"):  # not on Windows, which can't fork
    os.register_at_fork(after_in_child=_release_in_child)
