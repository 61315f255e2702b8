"""What hooks see of a running train, evaluate or predict and its steps, and where processes in step agree.

**``model_fn`` is called once for each ``train``, ``evaluate`` or ``predict``**, in the strategy's scope and with the
first batch as an example, as tf builds one graph for each. Without a graph, what is to happen at each step must be
given as functions of the module's outputs. The alternative, calling it in each step with that step's batch, reads
more like tf's programs, but modules that it makes would have to be recognised and replaced by those of the step
before: by the order of construction, say, which a condition in the function would break in silence.

**Each replica reads a batch of its own** (``distribute_datasets_from_function``), and its loss is divided by the
number of replicas, so that the sum which ``optimizer.step()`` makes is tf.estimator's mean. A round in which a
replica of any process has no batch is dropped in training, as all processes know from the batch's tags; evaluations
count every batch.

**Processes that train in step agree twice in each step**: after the step on its loss and on the stops and saves that
hooks asked for before it, and after the hooks on stops that they asked for then. So a hook may run on the chief only,
and ``save_checkpoints_secs`` needs no common clock.

**The global step is a ``ts.Variable``**, because on parameter servers all workers count with it.

**What a checkpoint holds** is a ``ts.train.Checkpoint`` numbered by the global step. The position in the data is part
of it only if a ``CheckpointInputPipelineHook`` asks for that: tf's ``input_fn`` starts anew in each ``train``.

**Feature columns** are descriptions; the parameters that they need stand directly on the model's module under tf's
names, because names of submodules are separated by dots. Strings stay on the host up to the column that looks them
up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchstrategy.base import tree
from torchstrategy.checkpoint.checkpoint import Checkpoint
from torchstrategy.estimator.building import Built, Definition
from torchstrategy.estimator.session_hooks import resolve_fetches
from torchstrategy.estimator.specs import EstimatorSpec
from torchstrategy.estimator.warm_start import named_buffers, named_parameters
from torchstrategy.strategies.strategy import Strategy

__all__ = ["Session", "StepResult", "compute_loss", "detached", "is_first_here", "mean", "total"]


class StepResult(NamedTuple):
    """What a step gives to the loop.

    Args:
        loss: the mean over this process's replicas, ``None`` if there is none.
        outputs: what the model returned on the first replica.
        global_step: its new value; ``None`` if the step did not train.
    """

    loss: Tensor | None
    outputs: Any
    global_step: int | None = None


def compute_loss(loss_fn: Any, outputs: Any, labels: Any) -> Tensor:
    """Return the loss of a replica's batch as a scalar.

    Raises:
        TypeError: it is no tensor.
        ValueError: it has several elements, or can't be computed without labels.
    """
    try:
        loss = loss_fn(outputs, labels)
    except (TypeError, AttributeError, KeyError) as error:
        if labels is not None:
            raise
        raise ValueError(
            "EstimatorSpec(loss=) failed because input_fn returned features alone, without labels. Let it return "
            "batches (features, labels)."
        ) from error
    if not isinstance(loss, Tensor):
        raise TypeError(f"EstimatorSpec(loss=) must return a tensor. Received a {type(loss).__name__}: {loss!r}")
    if loss.shape not in ((), (1,)):
        raise ValueError(
            f"EstimatorSpec(loss=) must return a scalar: the mean, or the sum, over the batch. Received a tensor of "
            f"shape {tuple(loss.shape)}. Did the loss have reduction='none'?"
        )
    return loss.reshape(())


def detached(outputs: Any) -> Any:
    """Return outputs without the graph that they come from."""
    return tree.map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, outputs)


def is_first_here(context: Any) -> bool:
    """Say whether a replica is this process's first one."""
    return bool(context.replica_id_in_sync_group == context.strategy.placement.local_replica_ids[0])


def total(values: Sequence[float]) -> float:
    """Return the sum of losses; where infinite ones cancel, or it is too large, what plain addition gives."""
    try:
        return math.fsum(values)
    except (ValueError, OverflowError):
        return sum(values)


def mean(losses: Sequence[Tensor]) -> Tensor:
    """Return the mean of the losses of replicas, which may be on several devices."""
    return losses[0] if len(losses) == 1 else torch.stack([loss.to(losses[0].device) for loss in losses]).mean()


class Session:
    """A running ``train``, ``evaluate`` or ``predict``: what tf calls the monitored session, and its coordinator.

    Hooks get it. It is made by the estimator.

    Args:
        built: the model and what belongs to it.
        definition: what the estimator is made of.
        dataset: where in its data it is, which has ``state_dict`` and ``load_state_dict``.
        saver: has ``save(step)``, which writes a checkpoint; ``None`` where nothing is saved.
    """

    def __init__(self, built: Built, definition: Definition, dataset: Any = None, saver: Any = None) -> None:
        self._built = built
        self.config = definition.config
        self.params = definition.params
        self.model_dir = definition.model_dir
        self.dataset = dataset
        self.saver = saver
        self._step = 0
        self._step_before = 0
        self._loss: Any = None
        self._outputs: Any = None
        self._wants_stop = False
        self._is_stopped = False
        self._wants_save = False
        self._save_agreed = False

    @property
    def mode(self) -> str:
        """What the model is used for, a value of ``ModeKeys``."""
        return str(self._built.spec.mode)

    @property
    def strategy(self) -> Strategy:
        """The strategy whose replicas run the model."""
        return self._built.strategy

    @property
    def spec(self) -> EstimatorSpec:
        """What ``model_fn`` returned."""
        return self._built.spec

    @property
    def module(self) -> nn.Module:
        """The model."""
        module: nn.Module = self._built.module
        return module

    @property
    def checkpoint(self) -> Checkpoint:
        """What is saved; further objects may be attached to it."""
        return self._built.checkpoint

    @property
    def is_chief(self) -> bool:
        """Whether this process writes checkpoints and summaries."""
        return self.strategy.extended.should_checkpoint

    @property
    def is_synchronous_group(self) -> bool:
        """Whether several processes make each step together."""
        return self.strategy.workers is not None

    @property
    def global_step(self) -> int:
        """Number of training steps, with the last one."""
        return self._step

    @property
    def last_loss(self) -> float | None:
        """The last step's loss, the mean over all replicas; ``None`` before the first step, and in a prediction."""
        if isinstance(self._loss, Tensor):
            self._loss = float(self._loss)
        return self._loss  # type: ignore[no-any-return]

    @property
    def save_agreed(self) -> bool:
        """Whether a process asked, before this step, for a checkpoint after it."""
        return self._save_agreed

    def should_stop(self) -> bool:
        """Say whether the loop ends after this step."""
        return self._is_stopped or (self._wants_stop and not self.is_synchronous_group)

    def request_stop(self) -> None:
        """Let the loop end after this step, on all processes that step together."""
        self._wants_stop = True

    def request_save(self) -> None:
        """Ask, in ``before_run``, for a checkpoint after this step, which all processes learn of."""
        self._wants_save = True

    def fetch(self, fetches: Any) -> Any:
        """Return the present values of fetches, as ``SessionRunArgs`` takes them.

        Args:
            fetches: a name, a tensor such as a parameter or the global step, a function of the session, or a nesting of
                these in lists, tuples and dicts.

        Raises:
            KeyError: a name is none of the session's.
            TypeError: a leaf is none of these.
        """
        return resolve_fetches(fetches, lambda leaf: self._value(leaf, self._step))

    def resolve(self, leaf: Any) -> Any:
        """Return the value of one fetch of the last step; the global step is the one before it.

        Raises:
            KeyError: the name is none of the session's.
        """
        return self._value(leaf, self._step_before)

    def _value(self, leaf: Any, step: int) -> Any:
        if leaf is self._built.global_step:
            return step
        if callable(leaf):
            return leaf(self)
        if isinstance(leaf, str):
            if leaf == "loss":
                return self.last_loss
            if leaf == "global_step":
                return step
            if leaf == "outputs":
                return self._outputs
        variables = {**named_parameters(self.module), **named_buffers(self.module)}
        for name, value in variables.items():
            if value is leaf or (isinstance(leaf, str) and name == leaf):
                return value.detach().clone()
        if isinstance(leaf, Tensor):
            raise ValueError(
                "A tensor that is fetched must be a parameter or a buffer of the module, or the global step: any other "
                "has the same value at each step. Fetch a name, or a function of the session that computes the value. "
                f"Received a tensor of shape {tuple(leaf.shape)}."
            )
        raise KeyError(
            f"There is nothing to fetch under the name {leaf!r}. Names are 'loss', 'global_step', 'outputs', and those "
            f"of the module's parameters and buffers: {', '.join(variables)}"
        )

    def note_restored(self) -> None:
        """Take the global step from the variable, which was restored."""
        self._step = self._step_before = int(self._built.global_step)

    def end_step(self, loss: Any, outputs: Any, global_step: int | None) -> None:
        """Take a step's results, and agree with the other processes on its loss and on what was asked for before it.

        Args:
            loss: the mean over this process's replicas, a tensor; ``None`` if no replica had a batch.
            outputs: what the model returned on the first replica.
            global_step: its new value; ``None`` if the step did not train.
        """
        self._outputs = outputs
        self._step_before = self._step
        self._step = self._step if global_step is None else global_step
        if not self.is_synchronous_group:
            self._loss = loss
            self._save_agreed, self._wants_save = self._wants_save, False
            return
        record = [None if loss is None else float(loss), self._wants_stop, self._wants_save]
        self._wants_save = False
        losses, stops, saves = zip(*self._exchange("losses and wishes of a step", record), strict=True)
        known = [value for value in losses if value is not None]
        self._loss = total(known) / len(known) if known else None
        self._is_stopped = any(stops)
        self._save_agreed = any(saves)

    def agree_to_stop(self) -> None:
        """Let the loop end everywhere if a hook of any process has asked for it."""
        if self.is_synchronous_group:
            self._is_stopped = any(self._exchange("whether to stop", self._wants_stop or self._is_stopped))

    def _exchange(self, what: str, value: Any) -> list[Any]:
        workers = self.strategy.workers
        return [value] if workers is None else workers.exchange(f"Estimator: {what}", value)
