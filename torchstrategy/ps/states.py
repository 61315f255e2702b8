"""The states of a server as a client sees it, and of a worker as its coordinator does; only ``follow`` changes them."""

from __future__ import annotations

import enum
from typing import TypeVar

__all__ = ["PeerState", "WorkerState", "follow"]


class PeerState(enum.Enum):
    """Of the connection to a server."""

    #: It has not been there yet.
    CONNECTING = "connecting"
    #: It has admitted this client; requests are sent.
    READY = "ready"
    #: It was ready; the connection is made again.
    LOST = "lost"
    #: It does not admit this client, for good.
    REFUSED = "refused"
    #: This process has closed the connection, or is a fork of the one that has it.
    CLOSED = "closed"


class WorkerState(enum.Enum):
    """Of a worker; the values are what is told of it."""

    #: It has not been there yet.
    AWAITED = "not connected"
    #: It is connected, and learns what it is to work with.
    PREPARING = "being prepared"
    #: It runs functions, unless it waits for something.
    READY = "ready"
    #: It was connected, and may come back.
    LOST = "lost"
    #: It takes nothing of this coordinator, unless it starts anew.
    REFUSED = "refused this coordinator"


_State = TypeVar("_State", PeerState, WorkerState)

_FOLLOWING: dict[enum.Enum, set[enum.Enum]] = {
    PeerState.CONNECTING: {PeerState.READY, PeerState.REFUSED, PeerState.CLOSED},
    PeerState.READY: {PeerState.LOST, PeerState.REFUSED, PeerState.CLOSED},
    PeerState.LOST: {PeerState.READY, PeerState.REFUSED, PeerState.CLOSED},
    PeerState.REFUSED: {PeerState.CLOSED},
    PeerState.CLOSED: set(),
    WorkerState.AWAITED: {WorkerState.PREPARING, WorkerState.REFUSED},
    # It may be connected anew without a loss that was noticed.
    WorkerState.PREPARING: {WorkerState.PREPARING, WorkerState.READY, WorkerState.LOST, WorkerState.REFUSED},
    WorkerState.READY: {WorkerState.PREPARING, WorkerState.LOST, WorkerState.REFUSED},
    WorkerState.LOST: {WorkerState.PREPARING, WorkerState.REFUSED},
    WorkerState.REFUSED: {WorkerState.PREPARING, WorkerState.REFUSED},
}


def follow(state: _State, following: _State) -> _State:
    """Return the state that follows another one.

    Args:
        state: as it is.
        following: as it is to be.

    Raises:
        RuntimeError: there is no way from the one to the other.

    Example:
        >>> from torchstrategy.ps.states import PeerState, follow
        >>> follow(PeerState.READY, PeerState.LOST).value
        'lost'
    """
    if following not in _FOLLOWING[state]:
        raise RuntimeError(f"{type(state).__name__} {state.name} can't become {following.name}.")
    return following
