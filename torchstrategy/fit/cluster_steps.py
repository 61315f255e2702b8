"""The steps of a model on the workers of a cluster: scheduled some way ahead, sent, and run by a worker."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from torchstrategy.base import tree
from torchstrategy.base.devices import tensor_device
from torchstrategy.fit.batch_parts import unpack_x_y_sample_weight
from torchstrategy.fit.steps import StepState, Windows, run_windows
from torchstrategy.fit.trainer import Trainer, is_metric, trainer_of

__all__ = ["Coordinator", "ScheduledSteps", "WorkerSteps", "forget_worker_steps", "named_outputs", "worker_steps"]

#: For each worker: one that runs, one that it has, and as many that wait.
_NUM_FOR_WORKER = 4


class RemoteResult(Protocol):
    """What stands for the result of a scheduled function."""

    def get(self) -> Any:
        """Wait for the result and return it, with tensors."""


class Coordinator(Protocol):
    """What schedules functions on a strategy's workers."""

    @property
    def strategy(self) -> Any:
        """The strategy whose workers run the functions."""

    def schedule(self, fn: Callable[..., Any], args: Any = None) -> RemoteResult:
        """Queue a function for the next free worker."""

    def join(self) -> None:
        """Wait for all functions, and raise what one of them raised."""

    def create_per_worker_dataset(self, dataset: Any) -> Any:
        """Let every worker make a dataset."""


class ScheduledSteps:
    """Schedules functions some way ahead of the results that the program takes.

    So a long epoch takes little memory, and what a callback changes acts soon. With ``max_staleness`` the program waits
    for a result as often as the workers do: with 0 it schedules a function when the one before has ended.

    Args:
        coordinator: the strategy's.
        is_training: whether staleness matters.
    """

    def __init__(self, coordinator: Coordinator, *, is_training: bool) -> None:
        strategy = coordinator.strategy
        limit = _NUM_FOR_WORKER * strategy.cluster_spec.num_tasks("worker")
        if is_training and strategy.max_staleness is not None:
            limit = min(limit, strategy.max_staleness + 1)
        self._limit = limit
        self._coordinator = coordinator
        self._waiting: deque[tuple[Any, RemoteResult]] = deque()

    def results(
        self, executions: Iterator[tuple[Any, Callable[..., Any], tuple[Any, ...]]], must_wait: Callable[[], bool]
    ) -> Iterator[tuple[Any, Any]]:
        """Schedule functions and yield their results in the same order, with tensors.

        Args:
            executions: gives a tag, a function and its arguments.
            must_wait: called while there are results to come: whether to take these before more is scheduled.

        Yields:
            A tag, and the function's result.

        Raises:
            Exception: what a function raised.
            UnavailableError: a parameter server was lost.
        """
        is_at_end = False
        while True:
            while not is_at_end and len(self._waiting) < self._limit and not (self._waiting and must_wait()):
                execution = next(executions, None)
                is_at_end = execution is None
                if execution is not None:
                    tag, fn, args = execution
                    self._waiting.append((tag, self._coordinator.schedule(fn, args)))
            if not self._waiting:
                return
            tag, value = self._waiting.popleft()
            try:
                result = value.get()
            except Exception:
                self._coordinator.join()  # raises what came first; the program can go on then
                raise
            yield tag, result

    def wait(self) -> None:
        """Wait for all functions that were scheduled.

        Raises:
            Exception: what a function raised.
        """
        self._coordinator.join()


_METHODS = {"train": "fit", "test": "evaluate", "predict": "predict", "outputs": "fit"}
#: The attribute of a trainer with the steps of its model.
_KNOWN = "_worker_steps"
#: What a step needs of a trainer.
_PARTS = ("strategy", "optimizer", "loss", "metrics", "loss_tracker", "autocast")
_Prepare = Callable[[Any], Any]


class WorkerSteps:
    """A function for workers: runs some batches with the worker's own model, optimizer and metrics.

    It is sent once. What was made in the strategy's scope is a reference in it, so each worker puts its own in.

    Args:
        model: the model.
        prepare: what is done to a batch before a training step; ``None`` for nothing.
    """

    def __init__(self, model: Any, prepare: _Prepare | None = None) -> None:
        self.model = model
        self._prepare = prepare
        self._parts = {name: getattr(trainer_of(model), name) for name in _PARTS}
        self._loss = trainer_of(model).arguments.get("loss")

    def is_for(self, trainer: Trainer) -> bool:
        """Say whether it is still what a trainer needs, which ``compile`` changes."""
        is_same = all(getattr(trainer, name) is part for name, part in self._parts.items())
        return is_same and trainer.arguments.get("loss") is self._loss

    def __call__(self, mode: str, windows: Windows, is_checked: bool) -> Any:  # noqa: FBT001 - never called by name
        """Run batches. On a worker.

        Args:
            mode: ``"train"``, ``"test"``, ``"predict"``, or ``"outputs"`` of one batch.
            windows: batches, or the worker's iterators, of which each gives one.
            is_checked: whether to look at the data closely.

        Returns:
            The predictions of each batch; an example's labels and outputs; of training and tests what the last step
            returned, for ``named_outputs``.
        """
        model, strategy = self.model, self._parts["strategy"]
        trainer = trainer_of(model)
        vars(trainer).update(self._parts, is_compiled=True, arguments={"loss": self._loss})
        trainer.layer_losses.begin()  # the model may be a new one
        own = [[_batch_of(batch) for batch in window] for window in windows]
        device = tensor_device(strategy.placement.devices[0])
        state = StepState(method=_METHODS[mode], autocast=self._parts["autocast"], is_checked=is_checked)

        def run(windows: Windows, step: Callable[[Any], Any], prepare: _Prepare | None = None) -> Any:
            to = None if device.type == "cpu" else device
            return strategy.run(run_windows, args=(windows, step, prepare, None, state, to))

        if mode == "train":
            return _in_rows(run(own, model.train_step, self._prepare), model)
        with torch.no_grad():
            if mode == "test":
                return _in_rows(run(own, model.test_step), model)
            if mode == "predict":
                return [run([window], model.predict_step) for window in own]
            return run(own, self._outputs)

    def _outputs(self, batch: Any) -> Any:
        """Return the labels and outputs of the first example. Replica context."""
        x, y, _ = unpack_x_y_sample_weight(batch)
        y_pred = self.model(x)
        for module in self.model.modules():
            if is_metric(module):  # what its forward counted
                module.reset()
        return tree.map_leaves(lambda leaf: leaf[:1] if isinstance(leaf, Tensor) else None, (y, y_pred))


def worker_steps(model: Any, prepare: _Prepare | None = None) -> WorkerSteps:
    """Return the steps of a model, the same object as long as they are the same, so that workers get them once."""
    if prepare is not None:
        return WorkerSteps(model, prepare)
    trainer = trainer_of(model)
    known: WorkerSteps | None = vars(trainer).get(_KNOWN)
    if known is None or not known.is_for(trainer):
        known = vars(trainer)[_KNOWN] = WorkerSteps(model)
    return known


def forget_worker_steps(model: Any) -> None:
    """Let ``worker_steps`` make them anew: what they hold has changed."""
    vars(trainer_of(model)).pop(_KNOWN, None)


def named_outputs(rows: Any, named: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what a step returned on a worker, with the program's own metrics in it.

    Args:
        rows: the result of the scheduled function.
        named: the model's metrics by name.
    """
    return rows and {key: value if name is None else named[name] for key, name, value in rows}


def _batch_of(batch: Any) -> Any:
    if not isinstance(batch, Iterator):
        return batch
    try:
        return next(batch)
    except StopIteration:
        raise ValueError(
            "The dataset that a worker made by the DatasetCreator's function has ended, but it is to give batches as "
            "long as there are steps: let the function return dataset.repeat()."
        ) from None


def _in_rows(returned: Any, model: Any) -> Any:
    """Return what a step returned as rows of its name, and the name of a metric or a value."""
    if not isinstance(returned, Mapping):
        return None if returned is None else dict(returned)
    names = {id(metric): name for name, metric in model._named_metrics().items()}
    rows = []
    for key, value in returned.items():
        if not is_metric(value):
            rows.append((str(key), None, value))
        elif id(value) in names:
            rows.append((str(key), names[id(value)], None))
        else:
            raise ValueError(
                f"A step of the model returned a {type(value).__name__} as {key!r} that the model does not know, so "
                "what it counts on a worker would be lost. Make it in the model's __init__, as an attribute."
            )
    return rows
