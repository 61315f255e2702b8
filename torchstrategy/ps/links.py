"""The connection to one parameter server, of the coordinator or of a worker."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torchstrategy.base.log import logger
from torchstrategy.base.names import dtype_name
from torchstrategy.errors import DeadlineExceededError, UnavailableError
from torchstrategy.ps.transport.channel import TensorChannel
from torchstrategy.ps.transport.control_loop import ControlLoop, Peer
from torchstrategy.ps.transport.messages import Message
from torchstrategy.ps.transport.wires import Into

__all__ = [
    "SECONDS_BETWEEN_LINES",
    "SECONDS_TO_FIRST_LINE",
    "ServerLink",
    "set_default_dtype",
    "wait_for_servers",
]

#: When a process that waits for another one logs what it waits for.
SECONDS_TO_FIRST_LINE, SECONDS_BETWEEN_LINES = 10.0, 30.0
_ASK_S = 1.0
_REMEDY = "Start the coordinator's program again, and restore the last checkpoint."


def set_default_dtype(name: Any) -> None:
    """Take the coordinator's default dtype: what its functions and optimizers make has it in this process, too.

    Raises:
        ValueError: it is none.
    """
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"The default dtype must be a floating-point dtype. Received: {name!r}")
    torch.set_default_dtype(dtype)


class ServerLink:
    """Sends requests to a parameter server; its tensor channel is made anew after the server was out of reach.

    A server process that has taken another one's place has none of the variables: to it nothing is sent.

    Args:
        index: the server's index in the job ``ps``.
        address: its address.
        incarnation: of the process that has the variables; ``None`` takes the first one that answers.
    """

    peer: Peer
    #: What to do when the server's variables are gone.
    remedy = _REMEDY

    def __init__(self, index: int, address: str, incarnation: str | None = None) -> None:
        self.address = address
        self.name = f"/job:ps/task:{index} at {address}"
        self.incarnation = incarnation
        #: Set when the server has answered in any way.
        self.answered = threading.Event()
        #: Why it does not want this client.
        self.refusal: str | None = None
        self._task = f"/job:ps/task:{index}"
        self._gone: str | None = None
        #: Why the connection was lost, while it is.
        self._lost: str | None = None
        self._channel: TensorChannel | None = None

    def connect(self, loop: ControlLoop, hello: Mapping[str, Any], **options: Any) -> None:
        """Begin to connect.

        Args:
            loop: the process's loop.
            hello: what to say of this client.
            options: further arguments of ``ControlLoop.connect``.
        """
        # An optimizer's state may have the default dtype.
        said = {"dtype": dtype_name(torch.get_default_dtype()), **hello}
        self.peer = loop.connect(self.address, said, self, name=self._task, **options)

    @property
    def failure(self) -> UnavailableError | None:
        """Why the server can't be used now, or ``None``."""
        if self._gone is not None:
            return UnavailableError(f"{self.name} {self._gone.rstrip('.')}.")
        if self._lost is not None:
            return UnavailableError(f"{self.name} can't be reached: {self._lost.rstrip('.')}. {self.remedy}")
        return None

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until the server has answered in any way, and say whether it has."""
        return self.answered.wait(max(0.0, timeout_seconds))

    def give_up(self) -> None:
        """Send nothing any more, and end ``wait``; from any thread."""
        self._gone = self._gone or "was given up: this process has closed the connection"
        self.answered.set()

    def send(self, message: Message) -> None:
        """Send a request, see ``TensorChannel``.

        Raises:
            UnavailableError: the server is gone, or another one is in its place.
        """
        self._check()
        if self._channel is not None:
            try:
                return self._channel.send(message)
            except UnavailableError:
                self._channel = None  # it broke since the last request; the server may be back
        try:
            self._channel = TensorChannel(self.peer)
        except UnavailableError:
            self._ask_why()
            raise
        return self._channel.send(message)

    def receive(self, timeout_seconds: float | None = None, into: Into | None = None) -> Message:
        """Wait for the reply, see ``TensorChannel``."""
        if self._channel is None:
            raise RuntimeError("There is nothing to receive: no request was sent.")
        try:
            return self._channel.receive(timeout_seconds, into)
        except UnavailableError:
            self._check()
            raise

    def _ask_why(self) -> None:
        """Raise the error of the control connection, which knows more, such as that there is a newer coordinator."""
        with contextlib.suppress(ValueError, DeadlineExceededError):  # it answers, or says nothing
            self.peer.call(Message("ping", {}), _ASK_S)

    def _check(self) -> None:
        if self._gone is not None:
            raise UnavailableError(f"{self.name} {self._gone.rstrip('.')}.")

    # --- on the loop's thread

    def ready(self, peer: Peer, welcome: dict[str, Any]) -> None:
        """Note that the server is there, or another one in its place."""
        job = welcome.get("job", "ps")
        if job != "ps":
            peer.close()
            self.refused(peer, f"it is a {job} and no parameter server; do all tasks have the same cluster?")
            return
        if self.incarnation is None:
            self.incarnation = welcome["server"]
        if welcome["server"] != self.incarnation:
            self._gone = f"was restarted, and its variables are gone. {self.remedy}"
            peer.close()
        self._lost = None
        self.answered.set()

    def lost(self, peer: Peer, reason: str) -> None:  # noqa: ARG002 - of the protocol
        """Note that the connection is gone; the channel breaks by itself."""
        self._lost = reason
        logger.warning("Lost %s: %s", self.name, reason)

    def refused(self, peer: Peer, reason: str) -> None:  # noqa: ARG002 - of the protocol
        """Note that the server does not want this client."""
        self.refusal = reason
        self._gone = f"refuses this process: {reason}"
        self.answered.set()

    def message(self, peer: Peer, message: Message) -> None:
        """Nothing comes without being asked for."""


def wait_for_servers(links: Sequence[ServerLink], who: str, hint: str, timeout_seconds: float) -> None:
    """Wait until all parameter servers have answered.

    Args:
        links: the connections, which are being made.
        who: this process's name, for messages.
        hint: what to look at when a server does not answer.
        timeout_seconds: how long to wait.

    Raises:
        UnavailableError: one refuses this process.
        DeadlineExceededError: one does not answer.
    """
    end, seconds = time.monotonic() + timeout_seconds, SECONDS_TO_FIRST_LINE
    while True:
        missing = [link for link in links if not link.answered.is_set()]
        for link in links:
            if link.refusal is not None:
                raise UnavailableError(f"{link.name} refuses {who}: {link.refusal}")
        if not missing:
            return
        left = end - time.monotonic()
        names = ", ".join(link.name for link in missing)
        if left <= 0:
            raise DeadlineExceededError(f"No answer from {names} within {timeout_seconds:g} seconds. {hint}")
        if not missing[0].wait(min(left, seconds)):
            logger.info("Waiting for %s", names)
            seconds = SECONDS_BETWEEN_LINES
