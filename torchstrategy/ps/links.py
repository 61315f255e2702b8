"""The connection to one parameter server, of the coordinator or of a worker."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from torchstrategy.base.log import logger
from torchstrategy.base.names import dtype_name
from torchstrategy.errors import DeadlineExceededError, UnavailableError
from torchstrategy.ps.states import PeerState
from torchstrategy.ps.transport.channel import TensorChannel
from torchstrategy.ps.transport.control_loop import ControlLoop, Peer
from torchstrategy.ps.transport.messages import Message, RefusedError
from torchstrategy.ps.transport.wires import Into

__all__ = [
    "SECONDS_BETWEEN_LINES",
    "SECONDS_TO_FIRST_LINE",
    "ServerLink",
    "grace_seconds",
    "number_from",
    "wait_for_servers",
]

#: When a process that waits for another one logs what it waits for.
SECONDS_TO_FIRST_LINE, SECONDS_BETWEEN_LINES = 10.0, 30.0
#: The same of a server that was there: it is seldom away for long.
_SECONDS_TO_LINE_OF_AWAY = 3.0
_ASK_S = 1.0
_POLL_S = 0.05
_MAX_TRIES = 3
_GRACE_S = 30.0
#: Requests that change something. A server does one that was sent again, because its reply was lost, once.
_CHANGES = frozenset({"create", "update", "scatter", "write", "push", "load_state", "optimizer", "hyper"})
_T = TypeVar("_T")
_REMEDY = "Start the coordinator's program again, and restore the last checkpoint."


def number_from(variable: str, default: float) -> float:
    """Return the number that an environment variable has.

    Raises:
        ValueError: it is none, or negative.
    """
    text = os.environ.get(variable, "")
    try:
        value = float(text or default)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ValueError(f"{variable} must be a number, at least 0. Received: {text!r}")
    return value


def grace_seconds(seconds: float | None = None) -> float:
    """Return for how long a parameter server that is out of reach is waited for.

    Args:
        seconds: what the program says; ``None`` takes ``TORCHSTRATEGY_PS_GRACE_S``, by default 30.

    Raises:
        ValueError: it is no number, or negative.
    """
    if seconds is None:
        return number_from("TORCHSTRATEGY_PS_GRACE_S", _GRACE_S)
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < float("inf"):
        raise ValueError(f"ps_grace_s must be None or a number of seconds, at least 0. Received: {seconds!r}")
    return float(seconds)


class ServerLink:
    """Sends requests to a parameter server; its tensor channel is made anew after the server was out of reach.

    To a server process that has taken another one's place nothing is sent, unless it has that one's variables, from its
    checkpoint.

    With a grace time the calling thread waits for a server that is out of reach, and asks again what was not answered.
    What changes something carries a number, ``once``, so that the server does it once.

    Args:
        index: the server's index in the job ``ps``.
        address: its address.
        incarnation: of the process that has the variables; ``None`` takes the first one that answers.
        grace_s: for how many seconds the server is waited for when it is out of reach; 0 for not at all.
        reconnect_s: the same where nothing is asked for again: what is sent waits for the connection, which is often
            there in a moment.
    """

    peer: Peer
    #: What to do when the server's variables are gone.
    remedy = _REMEDY

    def __init__(
        self,
        index: int,
        address: str,
        incarnation: str | None = None,
        *,
        grace_s: float = 0.0,
        reconnect_s: float = 0.0,
    ) -> None:
        self.address = address
        self.name = f"/job:ps/task:{index} at {address}"
        self.incarnation = incarnation
        #: Set when the server has answered in any way.
        self.answered = threading.Event()
        #: How often it went on from a checkpoint that lacks what was changed last.
        self.num_losses = 0
        #: Why it does not want this client.
        self.refusal: str | None = None
        self._task = f"/job:ps/task:{index}"
        self._gone: str | None = None
        #: Why the connection was lost, while it is.
        self._lost: str | None = None
        self._lost_at = 0.0
        self._grace_s = grace_s
        self._reconnect_s = reconnect_s
        self._asked_at: float | None = None
        self._calling = threading.Lock()
        #: Whether the server is saved, so that a process which takes its place has its variables.
        self._is_saved = False
        self._channel: TensorChannel | None = None
        self._numbers = itertools.count(1)
        self._request: Message | None = None

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
        """Why the server can't be used, or ``None``, also while it is waited for."""
        if self._gone is not None:
            return UnavailableError(f"{self.name} {self._gone.rstrip('.')}.")
        lost = self._lost  # read once: the loop's thread notes meanwhile that the server is back
        if lost is None or time.monotonic() < self._away_until(lost):
            return None
        why = lost.rstrip(".")
        if self.peer.is_gone:
            why += "; nothing listens there any more"
        if self._grace_s and not self._has_ended:
            why += f". It was waited for in vain for {self._grace_s:g} seconds"
        return UnavailableError(f"{self.name} can't be reached: {why}. {self.remedy}")

    @property
    def is_away(self) -> bool:
        """Whether the server is out of reach, but may be back in time with its variables."""
        return self._gone is None and time.monotonic() < self._away_until(self._lost)

    def _away_until(self, lost: str | None) -> float:
        """Until when it is waited for the server, by the monotonic clock, if it was lost for such a reason."""
        since = self._asked_at if lost is None else self._lost_at
        if since is None or not self._grace_s or (lost is not None and self._has_ended):
            return 0.0
        return since + self._grace_s

    @property
    def _has_ended(self) -> bool:
        """Whether the server's process has ended, and its variables with it."""
        return self.peer.is_gone and not self._is_saved

    def ask(self) -> None:
        """Ask whether the server is there, which a worker can't reach; it is away until it has answered."""
        if self._grace_s and self._asked_at is None:
            self._asked_at = time.monotonic()
            self.peer.request(Message("ping", {}), self._was_asked)

    def _was_asked(self, _: Message | Exception) -> None:
        self._asked_at = None  # if it was lost meanwhile, that is known

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
        message = self._numbered(message)
        self._persist(lambda: self._send(message))
        self._request = message if self._grace_s else None

    def receive(self, timeout_seconds: float | None = None, into: Into | None = None) -> Message:
        """Wait for the reply, see ``TensorChannel``."""
        if self._channel is None:
            raise RuntimeError("There is nothing to receive: no request was sent.")
        request, self._request = self._request, None  # whose tensors nothing must hold when this returns
        try:
            return self._channel.receive(timeout_seconds, into)
        except DeadlineExceededError:  # it may be received later
            self._request = request
            raise
        except UnavailableError as error:
            if not self._may_persist(error) or request is None:
                raise
            lost = error
        return self._persist(lambda: self._send(request).receive(timeout_seconds, into), lost)

    def call(self, message: Message) -> Message:
        """Send a request over the control connection and wait for the reply, see ``Peer.call``."""
        self._check()
        with self._calling:  # changes come in the order of their numbers
            message = self._numbered(message)
            return self._persist(lambda: self.peer.call(message))

    def discard(self) -> None:
        """Take the reply to a request for which nobody waits any more; it is not asked for again."""
        self._request = None
        with contextlib.suppress(Exception):
            self.receive()

    def _numbered(self, message: Message) -> Message:
        if not self._grace_s or message.kind not in _CHANGES:
            return message
        return message._replace(fields={**message.fields, "once": next(self._numbers)})

    def _persist(self, act: Callable[[], _T], error: UnavailableError | None = None) -> _T:
        """Do something, and again when a server that was out of reach is back.

        Args:
            act: what to do.
            error: which it has ended with already.
        """
        num_tries = 0
        while True:
            if error is not None:
                num_tries = 0 if self._wait_until_back(error) else num_tries + 1
                if num_tries > _MAX_TRIES:
                    raise error
            try:
                return act()
            except UnavailableError as new:
                if not self._may_persist(new):
                    raise
                error = new

    def _may_persist(self, error: UnavailableError) -> bool:
        """Say whether it may be waited for the server after an error that is not its answer; raise what says more."""
        if isinstance(error, RefusedError):
            return False
        self._check()
        return self._grace_s > 0 and not self.peer.loop.is_current

    def _wait_until_back(self, error: UnavailableError) -> bool:
        """Wait until the server answers, and say whether it was lost.

        Raises:
            UnavailableError: it is gone, or the grace time is over.
        """
        start, seconds = time.monotonic(), _SECONDS_TO_LINE_OF_AWAY
        was_lost = self._lost is not None
        while not self._is_there():
            was_lost = was_lost or self._lost is not None
            failure = self.failure
            if failure is not None:
                raise failure from error
            if self.peer.state is PeerState.CLOSED:
                raise self.failure or error
            if not was_lost and time.monotonic() - start >= self._grace_s:  # its connection stands, but nobody answers
                text = f"{self.name} was asked in vain for {self._grace_s:g} seconds: it is stuck. {self.remedy}"
                raise UnavailableError(text) from error
            if time.monotonic() - start >= seconds:
                logger.info("Waiting for %s, which is out of reach, for up to %g seconds", self.name, self._grace_s)
                seconds += SECONDS_BETWEEN_LINES
            time.sleep(_POLL_S)
        return was_lost

    def _is_there(self) -> bool:
        replies: queue.SimpleQueue[Message | Exception] = queue.SimpleQueue()
        self.peer.request(Message("ping", {}), replies.put)
        try:
            return isinstance(replies.get(timeout=_ASK_S), Message)
        except queue.Empty:
            return False

    def _send(self, message: Message) -> TensorChannel:
        self._check()
        if (channel := self._channel) is not None:
            try:
                channel.send(message)
            except UnavailableError:
                self._channel = None  # it broke since the last request; the server may be back
            else:
                return channel
        self._wait_for_connection()
        try:
            channel = self._channel = TensorChannel(self.peer)
        except UnavailableError:
            self._ask_why()
            raise
        channel.send(message)
        return channel

    def _wait_for_connection(self) -> None:
        deadline = time.monotonic() + self._reconnect_s
        while self.peer.state is PeerState.LOST and not self._has_ended and time.monotonic() < deadline:
            self._check()
            time.sleep(_POLL_S)

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
        if (job := welcome.get("job", "ps")) != "ps":
            peer.close()
            self.refused(peer, f"it is a {job} and no parameter server; do all tasks have the same cluster?")
            return
        before = self.incarnation or welcome["server"]
        restored = {welcome["server"]: None, **welcome.get("restored", {})}
        self._is_saved = welcome.get("is_saved", False)
        values, lost_since = "its variables are as they were", restored.get(before)
        self.incarnation = welcome["server"] if before in restored else before  # which workers are told to look for
        if before not in restored:
            self._gone = f"was restarted, and its variables are gone. {self.remedy}"
            peer.close()
        elif lost_since is not None:
            self.num_losses += 1
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(lost_since))
            values = f"it was restarted from its checkpoint of {when}, and what changed after that is lost"
        if self._lost is not None and (self._grace_s or lost_since is not None) and self._gone is None:
            logger.warning("%s is back after %.1f s; %s.", self.name, time.monotonic() - self._lost_at, values)
        self._lost = None
        self.answered.set()

    def lost(self, peer: Peer, reason: str) -> None:  # noqa: ARG002 - of the protocol
        """Note that the connection is gone; the channel breaks by itself."""
        self._lost_at = time.monotonic()
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
        names = ", ".join(link.name for link in missing)
        if (left := end - time.monotonic()) <= 0:
            raise DeadlineExceededError(f"No answer from {names} within {timeout_seconds:g} seconds. {hint}")
        if not missing[0].wait(min(left, seconds)):
            logger.info("Waiting for %s", names)
            seconds = SECONDS_BETWEEN_LINES
