"""What is known of single gradients: states, and the hook by which a backward pass tells of one."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from torchstrategy.base.devices import kind_of
from torchstrategy.base.log import call_site
from torchstrategy.replicas.object_hooks import own_hook

__all__ = ["LOCAL", "UNKNOWN", "Note", "State", "are_cleared", "is_traced", "nothing", "refusal"]


class State(enum.Enum):
    """What a gradient is known to be."""

    #: Nothing: there was none when last seen, or the program has put it there.
    UNKNOWN = enum.auto()
    #: This replica's own, from its backward passes in ``run``, or assigned by the program.
    LOCAL = enum.auto()
    #: The sum over replicas, which no step has used.
    SUMMED = enum.auto()
    #: A sum that a step has used.
    APPLIED = enum.auto()
    #: From a backward pass outside ``run``.
    OUTSIDE = enum.auto()
    #: A sum to which a later backward pass has added a replica's own.
    MIXED = enum.auto()
    #: A sum that was changed or replaced before its use, if all replicas hold the same; else a replica's own.
    EDITED = enum.auto()
    #: A sum that was used, or new gradients that happen to be the same on all replicas; else a replica's own.
    DOUBTFUL = enum.auto()


#: Names of enumerations are looked up slowly, and these are needed for each gradient of each step.
UNKNOWN, LOCAL = State.UNKNOWN, State.LOCAL


class Note:
    """What is known of one parameter's gradient.

    Args:
        parameter: a replica's.
        local_id: the replica's position in the process.
        ledger: a weak reference to where the note is.
    """

    __slots__ = (
        *("fingerprint", "gradient", "ledger", "local_id", "num_computed", "parameter", "passes", "run", "state"),
        *("version", "written"),
    )

    def __init__(self, parameter: weakref.ref[Tensor], local_id: int, ledger: Callable[[], Any]) -> None:
        self.parameter = parameter
        self.local_id = local_id
        self.ledger = ledger
        self.state = UNKNOWN
        #: The tensor that it was when last seen, and its version then.
        self.gradient: Callable[[], Tensor | None] = nothing
        self.version = 0
        #: The parameter's version then.
        self.written = 0
        #: Counts backward passes: another number is another gradient.
        self.passes = 0
        #: The call of ``run`` in which a sum was made, as a weak reference to the replica's context.
        self.run: weakref.ref[Any] | None = None
        #: How often the replica had computed gradients without giving them to parameters, by ``torch.autograd.grad``.
        self.num_computed = 0
        #: Of a sum that was not used in its run, or of one that may be used again.
        self.fingerprint: int | None = None

    @own_hook
    def note_backward(self, tensor: Tensor) -> None:
        """Take notice of a backward pass that has added to the gradient: a hook of the parameter.

        Raises:
            RuntimeError: the pass is another replica's, or the gradient was a sum that no step has used.
        """
        ledger = self.ledger()
        if ledger is None or tensor is not self.parameter():  # a program's hook returned it; torch is about to refuse
            return
        current, grad = ledger.current(), tensor.grad
        ledger.note_backward(self, grad, current)
        if current is not None and (early := ledger.early()) is not None:
            early.note_backward(tensor)

    def set(self, state: State, gradient: Tensor, passes: int) -> None:
        """Know of a new gradient."""
        self.state, self.gradient, self.version = state, weakref.ref(gradient), gradient._version
        self.passes, self.run, self.num_computed, self.fingerprint = passes, None, 0, None
        parameter = self.parameter()
        self.written = 0 if parameter is None else parameter._version

    def follow(self, other: Note, gradient: Tensor) -> None:
        """Know what another note says, of a tensor that stands for its gradient and may be the gradient itself."""
        self.set(other.state, gradient, other.passes)
        self.run, self.num_computed = other.run, other.num_computed
        before = other.gradient()
        if gradient is before:
            self.version, self.fingerprint = other.version, other.fingerprint
        elif before is not None and before._version != other.version:
            self.version -= 1  # it was changed since, such as cleared, and so was what stands for it


def nothing() -> None:
    """Stand for a weak reference to what is gone, or for no replica."""


def refusal(state: State, k: int, parameter: Tensor) -> str:
    """Return what to say of a gradient that can't be summed.

    Args:
        state: ``OUTSIDE`` or ``MIXED``.
        k: the parameter's position in its optimizer.
        parameter: the parameter.
    """
    if state is State.OUTSIDE:
        return (
            f"The gradient of parameter {k} (shape {tuple(parameter.shape)}) was computed outside `run`, so it is not "
            "known which replica's part it is. Call `backward` inside the function that you give to `strategy.run`, or "
            f"clear it with `optimizer.zero_grad()`. (The sum was to be made at {call_site()}.)"
        )
    return (
        f"`backward` has added to the gradient of parameter {k} (shape {tuple(parameter.shape)}) that an earlier "
        "`optimizer.step()` applied or that was made from a sum, so that replicas' own gradients can't be told from "
        "the sum over replicas. Call `optimizer.zero_grad()` between a step and the next backward. (The sum was to be "
        f"made at {call_site()}.)"
    )


def are_cleared(pairs: Iterable[tuple[Note, Tensor]]) -> list[bool]:
    """Say of each gradient whether it is all zeros, given what was known of it; waits once for each device."""
    answers: list[bool] = []
    by_device: dict[torch.device, list[int]] = {}
    values: list[Tensor] = []
    for k, (note, grad) in enumerate(pairs):
        values.append(grad._values() if grad.is_sparse else grad)
        # Where the values of a graph can't be looked at, a used sum that was written to counts as cleared.
        answers.append(note.state is State.APPLIED and note.version != grad._version)
        if not is_traced(grad):
            by_device.setdefault(grad.device, []).append(k)
    for indices in by_device.values():
        with torch.no_grad():
            found = torch.stack([values[k].detach().any() for k in indices]).tolist()
        for k, has_some in zip(indices, found, strict=True):
            answers[k] = not has_some
    return answers


def is_traced(grad: Tensor) -> bool:
    """Say whether a gradient may be a part of a graph that is still to be computed."""
    return kind_of(grad.device).is_traced
