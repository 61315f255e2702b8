"""What a parameter server does for tasks that share its variables without a coordinator.

The chief *begins* a training with a number that grows with each one, makes the variables and publishes their list on
server 0 when they have their values. The others wait for that and *attach* to it; whoever is attached to an earlier
training is refused, finds out that there is a newer one, and attaches anew. Requests on control connections:

- ``begin`` ``number``: drops all that is there; of the chief
- ``publish`` ``layout``: what ``SharedLayout.to_json`` returns; of the chief, on server 0
- ``status``: ``number``, ``None`` before the first training, and ``layout``, ``None`` before it was published
- ``attach`` ``number``
- ``finish``: the task needs no server any more, or never did; it need not be attached. The chief's ends the training.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from typing import Any

from torchstrategy.ps.transport.client_session import Session
from torchstrategy.ps.transport.messages import FencedError, Message

__all__ = ["CHIEF", "SHARING_ROLES", "TASK", "SharedTraining"]

#: Roles of clients that share variables; a coordinator and its workers have others.
CHIEF, TASK = "chief", "task"
SHARING_ROLES = (CHIEF, TASK)


class SharedTraining:
    """The training that a server takes part in, and who else does. Any thread may ask; one changes it."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._layout: Any = None
        self._attached: set[str] = set()
        self._lock = threading.Lock()
        #: Names of the tasks that are connected, by client, and of all that ever were.
        self._connected: dict[str, str] = {}
        self._seen: set[str] = set()
        #: Clients that have finished and are still connected, and when tasks were lost that had not.
        self._done: set[str] = set()
        self._lost_at: dict[str, float] = {}
        self._finished_at: float | None = None

    def control(self, session: Session, message: Message) -> Message | None:
        """Answer a request, ``begin`` excepted; ``None`` if it is none of these.

        Raises:
            FencedError: the client belongs to an earlier training.
        """
        if message.kind == "status":
            return Message("status", {"number": self.number, "layout": self._layout})
        if message.kind == "attach":
            self._check_number(message.fields.get("number"))
            self._attached.add(session.id)
        elif message.kind == "publish":
            self.check(session)
            self._layout = message.fields.get("layout")
        elif message.kind == "finish":
            with self._lock:
                self._done.add(str(session.hello["client"]))
                if session.role == CHIEF:
                    self._finished_at = time.monotonic()
        else:
            return None
        return Message("ok", {})

    def begin(self, session: Session, number: Any) -> None:
        """Begin a training.

        Raises:
            ValueError: it has no number.
            FencedError: a newer one has begun.
        """
        if type(number) is not int:
            raise ValueError(f"A training has a number. Received: {number!r:.80}")
        if self.number is not None and number < self.number:
            raise FencedError("Another chief has begun a newer training on this parameter server.")
        self.number, self._layout, self._attached = number, None, {session.id}
        with self._lock:
            self._finished_at = None

    def check(self, session: Session) -> None:
        """Check that a client is attached to the present training.

        Raises:
            FencedError: it is not.
        """
        if session.id not in self._attached:
            raise FencedError("This connection is not attached to the training that this parameter server serves.")

    def joined(self, hello: dict[str, Any]) -> None:
        """Note that a task has connected."""
        task = str(hello.get("task"))
        with self._lock:
            self._connected[str(hello["client"])] = task
            self._seen.add(task)
            self._lost_at.pop(task, None)

    def left(self, session: Session) -> None:
        """Note that a task's connection is gone; unless it has finished, it may come back."""
        self._attached.discard(session.id)
        client = str(session.hello["client"])
        with self._lock:
            task = self._connected.pop(client, None)
            if task is not None and client not in self._done:
                self._lost_at[task] = time.monotonic()
            self._done.discard(client)

    def waits_for(self, tasks: Collection[str], linger_s: float, grace_s: float) -> list[str] | None:
        """Return who still needs the server when the chief has finished, ``None`` while it has not.

        Args:
            tasks: names of those that take part; one that never came is waited for.
            linger_s: for how long after the chief's end.
            grace_s: for how long after its loss one is waited for that has not finished.
        """
        with self._lock:
            if self._finished_at is None:
                return None
            now = time.monotonic()
            late = set(tasks) - self._seen if now - self._finished_at < linger_s else set()
            lost = {task for task, since in self._lost_at.items() if now - since < grace_s}
            return sorted({*self._connected.values(), *late, *lost})

    def _check_number(self, number: Any) -> None:
        if number != self.number:
            raise FencedError(f"This parameter server serves training {self.number} now, not {number!r:.80}.")
