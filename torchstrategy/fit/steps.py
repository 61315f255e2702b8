"""What a replica does with the batches of one execution: the function that the loops give to ``strategy.run``.

And how far a fit has come, for one that goes on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchstrategy import errors
from torchstrategy.base import tree
from torchstrategy.base.context import set_within
from torchstrategy.base.values import known_counts
from torchstrategy.gradients.lone_values import serve_lone_values, trains_on_one
from torchstrategy.strategies.default import get_replica_context

__all__ = ["FitPosition", "StepState", "Windows", "current_step", "run_windows"]


class FitPosition:
    """Where ``fit`` is. Anything with ``state_dict`` can be saved by ``ts.train.Checkpoint``, and so can this.

    Args:
        epoch: the epoch that is running, from 0.
        step: batches done in it.
        iterations: optimizer steps that the model has made since it was compiled.
        seed: what the random numbers of ``fit`` derive from; ``None`` until a callback draws one.
        program: what must be the same in a rerun, such as the number of batches.
    """

    def __init__(
        self,
        epoch: int = 0,
        step: int = 0,
        iterations: int = 0,
        seed: int | None = None,
        program: dict[str, Any] | None = None,
    ) -> None:
        self.epoch = epoch
        self.step = step
        self.iterations = iterations
        self.seed = seed
        self.program = {} if program is None else program
        #: Whether the epoch's last batches are done, after which its data was at its end.
        self.is_at_end = False
        #: The logs of the epoch, while it is validated.
        self.logs: dict[str, Any] | None = None
        #: Whether a callback had stopped the training that goes on here.
        self.was_stopped = False
        #: Says whether a callback has stopped the running ``fit`` by now.
        self.is_stopped: Callable[[], bool] | None = None
        #: Names of the metrics that logs show, once a step was made.
        self.shown: list[str] | None = None
        #: The callbacks of the running ``fit``, whose states belong to the position.
        self.callbacks: Any = None

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the callbacks' states as plain data."""
        return {
            "epoch": self.epoch,
            "step": self.step,
            "iterations": self.iterations,
            "seed": self.seed,
            "program": dict(self.program),
            "is_at_end": self.is_at_end,
            "logs": self.logs,
            "is_stopped": self.was_stopped if self.is_stopped is None else self.is_stopped(),
            "shown": self.shown,
            "callbacks": {} if self.callbacks is None else self.callbacks.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a saved position.

        Args:
            state: what ``state_dict`` returned.

        Raises:
            InvalidArgumentError: it was saved by a ``fit`` with other arguments, so the rest of it can't be repeated.
        """
        different = [
            f"{name}: {state['program'].get(name)!r} then, {self.program.get(name)!r} now"
            for name in sorted({*state["program"], *self.program})
            if state["program"].get(name) != self.program.get(name)
        ]
        if different:
            raise errors.InvalidArgumentError(
                "The interrupted fit was called with other arguments, so it can't be continued exactly. Different are "
                f"{'; '.join(different)}. Use the same ones, or start anew with another directory."
            )
        self.epoch, self.step, self.is_at_end = state["epoch"], state["step"], state["is_at_end"]
        self.logs, self.was_stopped = state.get("logs"), state.get("is_stopped", False)  # earlier releases have neither
        self.iterations, self.seed, self.shown = state["iterations"], state["seed"], state["shown"]
        if self.callbacks is not None:
            self.callbacks.load_state_dict(state["callbacks"])


#: The batches of one execution; each inner list makes one optimizer step.
Windows = Sequence[Sequence[Any]]


@dataclass(frozen=True)
class StepState:
    """Where in an optimizer step a replica is, and how the model is called in it.

    Args:
        is_last: whether this is the last batch of the optimizer step, after which the parameters are updated.
        method: the method of the model that is running, such as ``"fit"``; for messages.
        autocast: what forward passes compute in; ``None`` means the parameters' dtype.
        is_checked: whether labels, predictions and shapes are looked at closely, as in the first batch.
        labels_on_host: the labels of each of the process's replicas, where a step can't look at its own.
        tracked: the losses that were counted as the step's; the last one is.
        gradients: those that the batches before this one have added, with their versions.
    """

    is_last: bool = True
    method: str = ""
    autocast: torch.dtype | None = None
    is_checked: bool = False
    labels_on_host: Sequence[Any] = ()
    tracked: list[Tensor] = field(default_factory=list)
    gradients: list[tuple[Tensor, Tensor, int]] = field(default_factory=list)


_PLAIN = StepState()
_current: ContextVar[StepState] = ContextVar("torchstrategy_training_step", default=_PLAIN)


def current_step() -> StepState:
    """Return the state of this replica's step; outside ``fit`` and its kin, each batch is a step of its own."""
    return _current.get()


def run_windows(
    windows: Windows,
    step: Callable[[Any], Any],
    prepare: Callable[[Any], Any] | None,
    divide: Callable[[int, list[Any]], contextlib.AbstractContextManager[Any]] | None,
    state: StepState,
    device: torch.device | None = None,
    num_parts: int = 1,
) -> Any:
    """Give a step function each batch in turn. Replica context only.

    Args:
        windows: this replica's shares of the batches.
        step: takes a batch's data and returns a dict, or ``None``.
        prepare: what is done to a batch's data before, such as class weights; ``None`` for nothing.
        divide: given a window's number and batches, makes their losses' divisors known; ``None`` leaves that to
            the losses.
        state: the first batch's; the others are not checked.
        device: where the data is moved to; ``None`` if it is where the model is.
        num_parts: how many of the last batches are parts of one.

    Returns:
        What the last step returned; of several parts, the means of the numbers over their examples.
    """
    context: Any = get_replica_context()
    given = context._inputs
    result = None
    results: list[tuple[int, Any]] = []
    serve_lone_values(context.strategy)
    token = trains_on_one.set(True)
    try:
        for number, window in enumerate(windows):
            batches = window if device is None else [_moved(batch, device) for batch in window]
            batches = batches if prepare is None else [prepare(batch) for batch in batches]
            with contextlib.nullcontext() if divide is None else divide(number, list(batches)):
                gradients: list[tuple[Tensor, Tensor, int]] = []
                for i, (batch, data) in enumerate(zip(window, batches, strict=True)):
                    context._work_on(batch)
                    is_last = i == len(window) - 1
                    own = StepState(
                        is_last,
                        state.method,
                        state.autocast,
                        state.is_checked,
                        state.labels_on_host,
                        gradients=gradients,
                    )
                    with set_within(_current, own):
                        result = step(data)
                    if num_parts > 1:
                        results = [*results[1 - num_parts :], (context._num_own_examples or 0, result)]
                    if state.method == "predict":
                        _check_predictions(result)  # of each batch: a later share may be a single example
                    elif state.is_checked:
                        _check_returned(result, state.method)
                    if state.is_checked:
                        state = StepState(method=state.method, autocast=state.autocast)
    finally:
        trains_on_one.reset(token)
        context._work_on(given)  # a batch must not outlive its run
    return result if num_parts == 1 else _of_parts(results)


def _of_parts(results: Sequence[tuple[int, Any]]) -> Any:
    """Return what the parts of a batch gave as if it had been one: the means of numbers over its examples."""
    total, last = sum(count for count, _ in results), results[-1][1]
    if total == 0 or not isinstance(last, Mapping):
        return last
    joined = dict(last)
    for name, value in last.items():
        if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.ndim == 0):
            own = [(count, result[name]) for count, result in results if count]  # of none, a mean is not a number
            joined[name] = sum(count / total * number for count, number in own)
    return joined


def _moved(batch: Any, device: torch.device) -> Any:
    return tree.map_leaves(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batch)


def _check_returned(result: Any, method: str) -> None:
    if result is not None and not isinstance(result, Mapping):
        raise TypeError(
            f"{method}: the model's step must return a dict by name of what logs show, metrics and numbers, or "
            f"None. Received: a {type(result).__name__}. (A loss is given to self.minimize(loss), which also shows "
            "it.)"
        )


def _check_predictions(result: Any) -> None:
    num_examples = known_counts(get_replica_context())[0]
    for leaf in tree.all_leaves(result):
        if isinstance(leaf, Tensor) and (leaf.ndim == 0 or len(leaf) != num_examples):
            raise ValueError(
                f"predict(x=...): the model returned {tuple(leaf.shape)} for a batch of {num_examples} examples. The "
                "first axis of x and of the predictions is the batch: for one example pass x[None], and name the axis "
                "in squeeze(-1), which else drops that of a replica's single example."
            )
