"""The steps of a model on the workers of a cluster: what travels, and what a worker does with a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from torchstrategy.base import tree
from torchstrategy.base.devices import tensor_device
from torchstrategy.fit.batch_parts import unpack_x_y_sample_weight
from torchstrategy.fit.steps import StepState, Windows, run_windows
from torchstrategy.fit.trainer import Trainer, is_metric, trainer_of

__all__ = ["WorkerSteps", "forget_worker_steps", "named_outputs", "worker_steps"]

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
