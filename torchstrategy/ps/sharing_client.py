"""The parameter servers for a task that shares their variables with others, without a coordinator.

All tasks run the same program, so their variables have the same numbers. The chief makes them; the others wait until it
has published what there is, compare that with their own, and use it. See ``sharing_service`` for what travels.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from typing_extensions import override

from torchstrategy.base.log import logger
from torchstrategy.errors import DeadlineExceededError, InvalidArgumentError, UnavailableError
from torchstrategy.ps.client import ParameterClient
from torchstrategy.ps.layout import VariableSpec
from torchstrategy.ps.links import (
    SECONDS_BETWEEN_LINES,
    SECONDS_TO_FIRST_LINE,
    ServerLink,
    grace_seconds,
    wait_for_servers,
)
from torchstrategy.ps.sharing_service import CHIEF, TASK
from torchstrategy.ps.transport.control_loop import ControlLoop
from torchstrategy.ps.transport.messages import FencedError, Message
from torchstrategy.ps.transport.secret import Secret

__all__ = ["SharedLayout", "SharingClient", "SharingLink", "connect", "finish"]

_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.02, 0.5


class SharingLink(ServerLink):
    """The connection to one parameter server."""

    remedy = "Start all tasks of the cluster again; the chief goes on from its last checkpoint."


class _NewTrainingError(Exception):
    """The chief has begun another training, so that the request makes no sense any more."""


class SharedLayout(NamedTuple):
    """What the chief has put on the servers, in the order in which it was made."""

    variables: list[VariableSpec]
    #: Class and ids of the parameters of each group, for each optimizer.
    optimizers: list[tuple[str, list[list[int]]]]

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return {
            "variables": [spec.to_json() for spec in self.variables],
            "optimizers": [[name, groups] for name, groups in self.optimizers],
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> SharedLayout:
        """Return what ``to_json`` was made of."""
        variables = [VariableSpec.from_json(spec) for spec in fields["variables"]]
        return cls(variables, [(str(name), groups) for name, groups in fields["optimizers"]])

    def is_part_of(self, chiefs: SharedLayout) -> bool:
        """Say whether the chief has made all this.

        Raises:
            InvalidArgumentError: it has made something else.
        """
        for number, (own, other) in enumerate(zip(self.variables, chiefs.variables, strict=False)):
            if own != other:
                raise InvalidArgumentError(
                    f"Variable {number} is {_describe(own)} in this task and {_describe(other)} in the chief. Every "
                    "task must run the same program, which makes the same modules and variables in the same order."
                )
        for number, (own_optimizer, other_optimizer) in enumerate(
            zip(self.optimizers, chiefs.optimizers, strict=False)
        ):
            if own_optimizer != other_optimizer:
                raise InvalidArgumentError(
                    f"Optimizer {number} is a {own_optimizer[0]} of the variables {own_optimizer[1]} in this task and "
                    f"a {other_optimizer[0]} of the variables {other_optimizer[1]} in the chief. Every task must run "
                    "the same program."
                )
        return len(self.variables) <= len(chiefs.variables) and len(self.optimizers) <= len(chiefs.optimizers)


class SharingClient(ParameterClient):
    """Reads and changes variables of which other tasks do the same.

    A task that is not the chief attaches itself when it first asks for something, and waits for the chief then.

    Args:
        links: one to each parameter server.
        chief: the chief's name, for messages.
        is_chief: whether this task is the chief: it begins a training now.
        timeout_seconds: how long to wait for the chief.
        after: number of a training that this task has finished already.
    """

    def __init__(
        self,
        links: Sequence[SharingLink],
        chief: str,
        *,
        is_chief: bool,
        timeout_seconds: float,
        after: int | None = None,
    ) -> None:
        super().__init__(links)
        self.links = list(links)
        self._chief = chief
        self._is_chief = is_chief
        self._timeout_s = timeout_seconds
        self._after = after
        #: What this task has made.
        self.layout = SharedLayout([], [])
        #: The training that it takes part in.
        self.number: int | None = None
        if is_chief:
            self.number = time.time_ns()
            for link in self.links:
                _call(link, Message("begin", {"number": self.number}))

    def publish(self) -> None:
        """Tell the others, as the chief, that the variables have their values."""
        message = Message("publish", {"layout": self.layout.to_json()})
        try:
            _call(self.links[0], message)
        except FencedError:  # the connection is new
            self._attach()
            _call(self.links[0], message)

    def attach(self, timeout_seconds: float | None = None) -> None:
        """Wait until the chief has published all that this task has made, unless that was done.

        Args:
            timeout_seconds: how long; ``None`` means the client's limit.

        Raises:
            DeadlineExceededError: it does not in time.
            InvalidArgumentError: it has published something else.
            UnavailableError: a parameter server is gone.
        """
        if not self._is_chief and self.number is None:
            self._attach(timeout_seconds)

    def confirm(self, timeout_seconds: float) -> None:
        """Wait until the chief, too, has made what this task has made since it attached itself."""
        if self._is_chief or self.number is None:
            return
        number = self.number
        self._wait(
            lambda status: status["number"] != number or self._fits(status),
            "to make the new variables",
            timeout_seconds,
        )

    @override
    def pull(
        self, specs: Sequence[VariableSpec], known: Mapping[int, tuple[int, ...]]
    ) -> dict[int, tuple[tuple[int, ...], Tensor]]:
        """Return those variables that have changed; behind the versions of the parts stands the training's number."""
        while True:
            self.attach()
            number = self.number or 0
            own = {key: versions[:-1] for key, versions in known.items() if versions[-1] == number}
            try:
                pulled = super().pull(specs, own)
            except _NewTrainingError:
                continue
            return {key: ((*versions, number), value) for key, (versions, value) in pulled.items()}

    @override
    def push(
        self, optimizer_id: int, gradients: Mapping[int, Tensor], hyper: Sequence[Mapping[str, Any]] | None = None
    ) -> dict[int, tuple[int, ...]]:
        try:
            return super().push(optimizer_id, gradients, hyper)
        except _NewTrainingError:
            logger.info("A step of this task is left out: its gradients are those of variables from before.")
            return {}

    @override
    def _collect(self, messages: Mapping[int, Message], replies: dict[int, Message], *args: Any) -> None:
        while True:
            self.attach()
            try:
                return super()._collect(messages, replies, *args)
            except FencedError:
                before = self.number
                self._attach()
                if self.number == before:
                    continue  # the servers that have done it already are not asked again
                if any(message.kind in ("push", "pull") for message in messages.values()):
                    raise _NewTrainingError from None
                replies.clear()
            except UnavailableError as error:
                if SharingLink.remedy in str(error):
                    raise
                raise UnavailableError(f"{str(error).rstrip('.')}. {SharingLink.remedy}") from error

    def _attach(self, timeout_seconds: float | None = None) -> None:
        """Attach to the present training; the connections may be new, or the training."""
        if self._is_chief:
            self._join(self.number)
            return
        before = self.number
        numbers: list[int] = []

        def can_join(status: dict[str, Any]) -> bool:
            if status["number"] == self._after or not self._fits(status, is_first=True):
                return False
            try:
                self._join(status["number"])
            except FencedError:  # the chief is just beginning another one
                return False
            numbers.append(status["number"])
            return True

        limit = self._timeout_s if timeout_seconds is None else timeout_seconds
        self._wait(can_join, "to make the variables, or to restore them", limit)
        self.number = numbers[0]
        if before not in (None, self.number):
            logger.info("%s has begun anew, and this task goes on with its variables.", self._chief)

    def _fits(self, status: dict[str, Any], *, is_first: bool = False) -> bool:
        if status["layout"] is None:
            return False
        chiefs = SharedLayout.from_json(status["layout"])
        fits = self.layout.is_part_of(chiefs)
        if is_first and self.number is None and not fits:
            names = [spec.name for spec in self.layout.variables[len(chiefs.variables) :]]
            raise InvalidArgumentError(
                f"This task has {len(self.layout.variables)} variables and {len(self.layout.optimizers)} optimizers, "
                f"the chief {len(chiefs.variables)} and {len(chiefs.optimizers)}; it lacks {', '.join(names)}. Every "
                "task must run the same program, which makes the same modules and variables in the same order."
            )
        return fits

    def _join(self, number: int | None) -> None:
        for link in self.links:
            try:
                _call(link, Message("attach", {"number": number}))
            except FencedError as error:
                if not self._is_chief:
                    raise
                raise UnavailableError(
                    f"{link.name} has begun another training: another chief of the same cluster was started. {error}"
                ) from error

    def _wait(self, is_done: Callable[[dict[str, Any]], bool], what: str, timeout_seconds: float) -> None:
        start = time.monotonic()
        pause_s, next_line_s = _FIRST_PAUSE_S, SECONDS_TO_FIRST_LINE
        while not is_done(dict(_call(self.links[0], Message("status", {})).fields)):
            waited_s = time.monotonic() - start
            if waited_s > timeout_seconds:
                raise DeadlineExceededError(
                    f"{self._chief} has not come {what} within {timeout_seconds:g} seconds. Does it run, with the same "
                    "cluster in TF_CONFIG?"
                )
            if waited_s > next_line_s:
                logger.info("Waiting for %s %s", self._chief, what)
                next_line_s = waited_s + SECONDS_BETWEEN_LINES
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)


def connect(
    addresses: Sequence[str],
    task: str,
    *,
    is_chief: bool,
    loop: ControlLoop,
    secret: Secret,
    timeout_seconds: float,
) -> list[SharingLink]:
    """Connect to all parameter servers.

    Args:
        addresses: theirs, in the order of their indices.
        task: this task's full name.
        is_chief: whether it is the chief.
        loop: the process's loop.
        secret: the cluster's.
        timeout_seconds: how long to wait for the servers.

    Raises:
        UnavailableError: one refuses this task.
        DeadlineExceededError: one does not answer.
    """
    grace_s = grace_seconds()
    links = [SharingLink(index, address, grace_s=grace_s) for index, address in enumerate(addresses)]
    hello = {"role": CHIEF if is_chief else TASK, "incarnation": 0, "task": task}
    for link in links:
        link.connect(loop, hello, secret=secret)
    hint = "Does a task with the type 'ps' run there, with the same cluster in TF_CONFIG and the same secret?"
    wait_for_servers(links, task, hint, timeout_seconds)
    return links


def finish(links: Sequence[SharingLink]) -> None:
    """Tell the servers that this task needs them no longer; one that is gone need not be told."""
    for link in links:
        with contextlib.suppress(UnavailableError):
            _call(link, Message("finish", {}))


def _call(link: SharingLink, message: Message) -> Message:
    failure = link.failure
    if failure is not None:
        raise failure
    return link.call(message)


def _describe(spec: VariableSpec) -> str:
    return f"{spec.name!r} of shape {list(spec.shape)} and {str(spec.dtype).removeprefix('torch.')}"
