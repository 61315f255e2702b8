"""What ``compile`` makes of a model: all that a step needs beside it. One object, shared by the replicas' copies."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchstrategy.base import tree
from torchstrategy.base.context import has_strategy, in_cross_replica_context
from torchstrategy.base.values import get_shares
from torchstrategy.fit.arguments import COUNTS, check_flag, parse_amp, parse_count, parse_jit
from torchstrategy.fit.batch_parts import unpack_x_y_sample_weight
from torchstrategy.fit.steps import FitPosition, current_step
from torchstrategy.losses.layer_losses import LayerLosses
from torchstrategy.replicas.adapters import is_a
from torchstrategy.replicas.dtensors import reshard
from torchstrategy.replicas.mirrored import bodies, resolve
from torchstrategy.strategies.default import DefaultStrategy, get_strategy

if TYPE_CHECKING:
    from torchstrategy.fit.compiled_loss import CompiledLoss, LossTracker
    from torchstrategy.fit.compiled_metrics import CompiledMetrics
    from torchstrategy.strategies.strategy import Strategy

__all__ = ["Trainer", "is_metric", "trainer_of"]

ATTRIBUTE = "_ts_trainer"
#: The name of the loss's tracker where a metric of the model's own is called "loss".
_HIDDEN = "compiled_loss"


class Trainer:
    """The optimizer, loss and metrics of a model, and how far its training is.

    It holds the program's own objects, which stand for each replica's inside ``run``, so copies of the model for other
    replicas share it. Any other copy of the model is one that was never compiled.

    Args:
        strategy: what the model was made in the scope of; ``None`` means the current one.
    """

    def __init__(self, strategy: Strategy | None = None) -> None:
        self.strategy: Strategy = get_strategy() if strategy is None else strategy
        self.is_compiled = self.is_tuned = False
        #: What ``compile`` was given, by argument.
        self.arguments: dict[str, Any] = {}
        self.optimizer: Any = None
        self.scaler: Any = None
        self.loss: CompiledLoss | None = None
        self.metrics: CompiledMetrics | None = None
        self.loss_tracker: LossTracker | None = None
        self.layer_losses = LayerLosses()
        self.autocast: torch.dtype | None = None
        self.steps_per_execution = 1
        self.accumulation = 1
        #: How many examples a replica has room for, while a callback says so.
        self.max_replica_batch_size: int | None = None
        self._step_check: Any = None
        self.jit_compile = False
        self.position = FitPosition()
        self.history: Any = None
        self.stop_training = False
        #: Shapes and dtypes of the first example that the model saw, for ``export`` and ``summary``.
        self.example_input: Any = None
        #: What the running ``fit`` reads.
        self.dataset: Any = None
        #: What the last step returned on each replica, and how its batch was split.
        self.outputs: Any = None
        self.shares: tuple[int, ...] = (1,)

    @property
    def iterations(self) -> int:
        """Optimizer steps that the model has made since it was compiled."""
        return self.position.iterations

    def compile(self, model: Any, arguments: dict[str, Any]) -> None:
        """Make the optimizer, loss and metrics in the scope of the model's strategy.

        Args:
            model: the model.
            arguments: those of ``Model.compile``.
        """
        # Metrics import torchmetrics, which takes a second.
        from torchstrategy.fit.compiled_loss import CompiledLoss, LossTracker  # noqa: PLC0415
        from torchstrategy.fit.compiled_metrics import CompiledMetrics  # noqa: PLC0415
        from torchstrategy.optimizers.by_name import make_optimizer  # noqa: PLC0415

        self._check_scope(model)
        self._check_idle("compile", "change param_groups of model.optimizer")
        counts = {name: parse_count(name, arguments[name]) for name in COUNTS}
        autocast = parse_amp(arguments["amp"])
        jit_compile = parse_jit(arguments["jit_compile"])
        check_flag("tune", arguments["tune"])
        with self.strategy.scope():
            self.strategy.replicate(model)  # if it is a copy, which no constructor has recorded
            loss = None if arguments["loss"] is None else CompiledLoss(arguments["loss"], arguments["loss_weights"])
            metrics = CompiledMetrics(arguments["metrics"], arguments["weighted_metrics"], loss)
            optimizer = None
            if arguments["optimizer"] is not None:
                reshard([model])
                optimizer = make_optimizer(arguments["optimizer"], list(model.parameters()))
                if counts["gradient_accumulation_steps"] > 1:
                    optimizer.register_step_pre_hook(_refuse_early_step)
            scaler = None
            if autocast is torch.float16:
                scaler = torch.amp.GradScaler(self.device_of(model).type)
            tracker = LossTracker()
        self.arguments = dict(arguments)
        self.loss, self.metrics, self.optimizer, self.scaler = loss, metrics, optimizer, scaler
        self.loss_tracker, self.autocast, self.jit_compile = tracker, autocast, jit_compile
        self.steps_per_execution, self.accumulation = (
            counts["steps_per_execution"],
            counts["gradient_accumulation_steps"],
        )
        self.position = FitPosition()
        self.is_compiled, self.is_tuned = True, False

    def limit_replica_batches(self, max_examples: int | None) -> None:
        """Let steps work in parts of which no replica gets more examples than this; ``None`` ends it."""
        if self._step_check is not None:
            self._step_check.remove()
        self._step_check = None
        if max_examples is not None:  # of any optimizer, since a step may have its own
            self._step_check = register_optimizer_step_pre_hook(_refuse_early_step)
        self.max_replica_batch_size = max_examples

    def begin_fit(self, position: FitPosition, callbacks: Any, dataset: Any) -> None:
        """Note what a ``fit`` that begins is about.

        Args:
            position: where it begins.
            callbacks: its ``CallbackList``.
            dataset: what it reads.

        Raises:
            RuntimeError: another one is running.
        """
        self._check_idle("fit", "call train_on_batch")
        self.position, self.dataset = position, dataset
        position.callbacks = callbacks
        position.is_stopped = lambda: self.stop_training
        self.history = callbacks.history
        self.stop_training = False

    def end_fit(self) -> None:
        """Let go of what only a running ``fit`` needs."""
        self.position.callbacks = self.dataset = self.position.is_stopped = None

    def device_of(self, model: Any) -> torch.device:
        """Return where the model computes: on the strategy's first device, or without a strategy where it is."""
        parameter = next(model.parameters(), None) if isinstance(self.strategy, DefaultStrategy) else None
        return self.strategy.placement.devices[0] if parameter is None else parameter.device

    def require_compiled(self, method: str) -> None:
        """Raise unless ``compile`` was called."""
        if not self.is_compiled:
            raise RuntimeError(
                f"Call model.compile(optimizer=..., loss=...) before model.{method}(): the model has no optimizer, no "
                "loss and no metrics yet."
            )

    def check_parameters(self, model: Any) -> None:
        """Refuse to train with an optimizer that ``compile`` made for parameters which the model has no longer.

        Raises:
            ValueError: it is such an optimizer.
        """
        if self.optimizer is None or isinstance(resolve(self.arguments["optimizer"]), torch.optim.Optimizer):
            return
        reshard([model])
        own = {id(parameter) for parameter in model.parameters()}
        old = sum(id(parameter) not in own for group in self.optimizer.param_groups for parameter in group["params"])
        if old:
            raise ValueError(
                f"fit: the optimizer would train {old} parameters that are not the model's any more, and not those in "
                "their place: layers were replaced after compile(). Replace layers in the strategy's scope, and call "
                "compile() again afterwards."
            )

    def named_metrics(self, own: Iterable[Any]) -> dict[str, Any]:
        """Return all metrics by their names in logs.

        Args:
            own: the model's own metrics, which ``compile`` does not know.
        """
        named: dict[str, Any] = {}
        if self.loss_tracker is not None:
            named["loss"] = self.loss_tracker
        for metric in () if self.loss is None else self.loss.metrics:
            named.setdefault(metric.name, metric)
        if self.metrics is not None:
            named.update(self.metrics.named())
        known = {id(metric) for metric in named.values()}
        for metric in own:
            if id(metric) not in known:
                name = getattr(metric, "name", None) or type(resolve(metric)).__name__
                # As in Keras, a tracker of the model's own is shown in the place of ours, if it was updated.
                named[name if name == "loss" else _free_name(name, named)] = metric
        return named

    def reset_metrics(self, named: Mapping[str, Any]) -> None:
        """Let all metrics start anew. Cross-replica context only."""
        self.outputs = None
        for metric in self._with_hidden(named).values():
            metric.reset()

    def read_logs(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """Return the numbers of the epoch so far, over all replicas; with several processes all must call it.

        These are the metrics that were updated, and what the last step returned besides.
        """
        shown, outputs = self.shown_metrics(named), self.outputs or {}
        logs: dict[str, Any] = {}
        if _HIDDEN in shown and "loss" not in shown:
            logs["loss"] = to_number(self._with_hidden(named)[_HIDDEN].compute())
        for name, metric in named.items():
            if name in shown:
                logs.update(_results(name, metric))
        for name, value in outputs.items():
            if name not in shown and name not in logs:  # also "loss", if a step with optimizers of its own tracked none
                logs.update(_results(name, value) if is_metric(value) else [(name, self._mean(name, value))])
        return logs

    def shown_metrics(self, named: Mapping[str, Any]) -> Collection[str]:
        """Return the names of the metrics that logs show; where no step was made yet, those of a continued ``fit``.

        With several processes all must call it: some metrics are not updated by a replica without examples.
        """
        if self.outputs is None:
            return named if self.position.shown is None else self.position.shown
        strategy, named = self.strategy, self._with_hidden(named)
        shown = [name for name, metric in named.items() if any(own._update_count > 0 for own in bodies(metric))]
        if strategy.workers is None:
            return shown
        of_all = set().union(*strategy.workers.exchange("updated metrics", shown))
        return [name for name in named if name in of_all]

    def note_outputs(self, outputs: Any, batch: Any) -> None:
        """Keep what the last step returned, and how its batch was split."""
        self.outputs = {} if outputs is None else outputs
        if outputs:
            shares = [shares for shares in map(get_shares, tree.all_leaves(batch)) if shares is not None]
            self.shares = shares[0].shares if shares else (1,) * self.strategy.num_replicas_in_sync

    def note_example(self, batch: Any) -> None:
        """Remember what the inputs of a batch look like."""
        self.example_input = tree.map_leaves(self._describe, unpack_x_y_sample_weight(batch)[0])

    def checkpoint_objects(self, model: Any, dataset: Any = None) -> dict[str, Any]:
        """Return what the next step of ``fit`` depends on, for ``ts.train.Checkpoint``.

        Args:
            model: the model.
            dataset: what ``fit`` is reading; ``None`` leaves it out.
        """
        objects = {
            "model": model,
            "optimizer": self.optimizer,
            "scaler": self.scaler,
            "position": self.position,
            "metrics": dict(self._with_hidden(model._named_metrics())),
            "dataset": dataset,
        }
        return {name: value for name, value in objects.items() if value is not None}

    def _with_hidden(self, named: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return metrics by name, and the loss's tracker if one of the model's own has its name."""
        tracker = self.loss_tracker
        is_hidden = tracker is not None and all(metric is not tracker for metric in named.values())
        return {**named, _HIDDEN: tracker} if is_hidden else named

    def _mean(self, name: str, value: Any) -> Any:
        """Return the mean over all replicas' examples of what each one's last step returned by a name."""
        strategy, shares = self.strategy, self.shares
        own = strategy.experimental_local_results(value)
        if len(own) == 1:  # also what is one and the same object on all replicas
            own *= strategy.placement.num_local
        if len(shares) == strategy.num_replicas_in_sync:
            shares = tuple(shares[i] for i in strategy.placement.local_replica_ids)
        try:
            parts = [
                torch.as_tensor(part, dtype=torch.float64, device="cpu") * share
                for part, share in zip(own, shares, strict=True)
                if share > 0
            ]
        except TypeError:
            raise TypeError(
                f"The model's step must return metrics and numbers by name, which logs show. Received for {name!r}: "
                f"{own[0]!r:.80}"
            ) from None
        total = torch.stack(parts).sum(0) if parts else torch.zeros((), dtype=torch.float64)
        if strategy.workers is not None:
            total = strategy.reduce("SUM", total)
        return to_number(total / max(sum(self.shares), 1))

    def _describe(self, leaf: Any) -> Any:
        first = self.strategy.experimental_local_results(leaf)[0]
        return (tuple(first.shape), first.dtype) if isinstance(first, torch.Tensor) else first

    def _check_idle(self, method: str, instead: str) -> None:
        if self.position.callbacks is not None:
            raise RuntimeError(
                f"{method} was called while a fit of the same model is running, such as by one of its callbacks. Let "
                f"the callback {instead}, or set model.stop_training = True and call {method} when fit has ended; "
                "fit(initial_epoch=...) then goes on."
            )

    def _check_scope(self, model: Any) -> None:
        current = get_strategy()
        if not in_cross_replica_context() and has_strategy():
            raise RuntimeError("A model's compile must be called outside of strategy.run, where there is one model.")
        if current is not self.strategy and has_strategy():
            raise ValueError(
                f"The model {model.name!r} was not made in the scope of the {type(current).__name__} in whose scope "
                f"compile() was called, but under the {type(self.strategy).__name__}, so the strategy's replicas have "
                "no copies of it. Make the model inside `with strategy.scope():` too."
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Trainer:
        # Copies for replicas are made with a memo that knows the strategy.
        return self if id(self.strategy) in memo else Trainer()

    def __reduce__(self) -> Any:
        return Trainer, ()


def trainer_of(model: Any) -> Trainer:
    """Return the trainer of a model, or of a replica's copy of it."""
    try:
        trainer: Trainer = resolve(model).__dict__[ATTRIBUTE]
    except KeyError:
        raise RuntimeError(
            f"Call super().__init__() first in the constructor of {type(resolve(model)).__name__}, as in any module."
        ) from None
    return trainer


def is_metric(value: Any) -> bool:
    """Say whether a value is a torchmetrics metric, without importing torchmetrics."""
    return isinstance(value, torch.nn.Module) and is_a(resolve(value), "torchmetrics.metric.Metric")


def _refuse_early_step(*_: Any) -> None:
    if not current_step().is_last:
        raise RuntimeError(
            "The optimizer was stepped before the last of the batches that make one step together, by "
            "compile(gradient_accumulation_steps=) or ElasticTraining(max_replica_batch_size=). In a train_step of "
            "your own call self.minimize(loss), which steps when it is time, in place of backward(), step() and "
            "zero_grad()."
        )


def _results(name: str, metric: Any) -> list[tuple[str, Any]]:
    value = metric.compute()
    if isinstance(value, Mapping):
        return [(str(key), to_number(item)) for key, item in value.items()]
    return [(name, to_number(value))]


def _free_name(name: str, named: Mapping[str, Any]) -> str:
    number = 1
    free = name
    while free in named:
        free, number = f"{name}_{number}", number + 1
    return free


def to_number(value: Any) -> Any:
    """Return a scalar as a Python number and another tensor as an array."""
    if isinstance(value, Tensor):
        value = value.detach().float() if value.dtype.itemsize < 4 and value.is_floating_point() else value.detach()
        return value.item() if value.numel() == 1 else value.cpu().numpy()
    return value.item() if isinstance(value, np.ndarray | np.generic) and value.size == 1 else value
