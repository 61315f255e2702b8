"""Making a model: a call of ``model_fn``, then a checkpoint's values; and what its training step does."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from torchstrategy.base.devices import accelerator_type, kind_of, local_devices
from torchstrategy.base.log import logger
from torchstrategy.checkpoint.checkpoint import Checkpoint
from torchstrategy.errors import NotFoundError
from torchstrategy.estimator.model_fn import call_model_fn
from torchstrategy.estimator.run_config import RunConfig
from torchstrategy.estimator.specs import EstimatorSpec, ModeKeys
from torchstrategy.estimator.warm_start import (
    GLOBAL_STEP,
    MODEL,
    OPTIMIZER,
    VARIABLE_NAMES,
    OptimizerNames,
    as_current,
    make_global_step,
)
from torchstrategy.optimizers.by_name import check_takes_no_closure
from torchstrategy.replicas.mirrored import bodies
from torchstrategy.replicas.variables import Variable
from torchstrategy.strategies.default import DefaultStrategy, get_strategy
from torchstrategy.strategies.one_device import OneDeviceStrategy
from torchstrategy.strategies.strategy import Strategy

__all__ = ["Built", "Definition", "build", "build_restored", "plain_strategy", "restore", "seeded"]


@contextlib.contextmanager
def seeded(seed: int | None, strategy: Strategy) -> Iterator[None]:
    """Let random numbers begin at a seed inside, and go on as before after it; ``None`` changes nothing.

    Args:
        seed: the seed.
        strategy: whose replicas draw: an evaluation amid a training must not change what the training draws.
    """
    if seed is None:
        yield
        return
    type_ = accelerator_type() or "cuda"
    has_generators = hasattr(kind_of(type_).module, "default_generators")
    devices = range(torch.accelerator.device_count()) if has_generators else ()
    with torch.random.fork_rng(devices, device_type=type_), strategy.hosting.keeping_streams():
        torch.manual_seed(seed)
        yield


class TrainOps:
    """The elements of a spec's ``train_op``.

    Args:
        ops: optimizers, schedulers, at most one gradient scaler, and functions without arguments.
        module: the model.

    Raises:
        ValueError: there are several gradient scalers.
        TypeError: a scheduler needs the loss, or an optimizer computes losses itself.
    """

    def __init__(self, ops: Sequence[Any], module: nn.Module) -> None:
        self._module = module
        self.optimizers = [op for op in ops if isinstance(op, Optimizer)]
        for optimizer in self.optimizers:
            check_takes_no_closure(optimizer)
        self._schedulers = [op for op in ops if isinstance(op, LRScheduler)]
        scalers = [op for op in ops if isinstance(op, torch.amp.GradScaler)]
        if len(scalers) > 1:
            raise ValueError(f"train_op holds {len(scalers)} gradient scalers. One scales the loss for all optimizers.")
        if any(isinstance(op, ReduceLROnPlateau) for op in ops):
            raise TypeError(
                "train_op holds a ReduceLROnPlateau, whose step needs a metric. Call its step in a hook: in "
                "SessionRunHook.after_run or a saving listener."
            )
        own = {id(p) for p in bodies(module)[0].parameters()}
        trained = {id(p) for one in self.optimizers for group in one.param_groups for p in group["params"]}
        if own and not own & trained:
            logger.warning(
                "No optimizer in train_op has parameters of EstimatorSpec(module=): training will not change the "
                "module. Give the optimizer module.parameters()."
            )
        self._scaler = scalers[0] if scalers else None
        self._in_turn = [op for op in ops if not isinstance(op, (LRScheduler, torch.amp.GradScaler))]

    def apply(self, loss: Tensor) -> None:
        """Compute the gradients of a replica's share of the loss and update the parameters. Replica context only."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        if self._scaler is None:
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            if len(self._in_turn) > len(self.optimizers):  # a function, such as one that clips, sees true gradients
                for optimizer in self.optimizers:
                    self._scaler.unscale_(optimizer)
        for op in self._in_turn:
            if not isinstance(op, Optimizer):
                op()
            elif self._scaler is None:
                op.step()
            else:
                self._scaler.step(op)
        if self._scaler is not None:
            self._scaler.update()
        for scheduler in self._schedulers:
            scheduler.step()

    def saved(self) -> dict[str, Any]:
        """Return what belongs in a checkpoint, by names."""
        parts: dict[str, Any] = {VARIABLE_NAMES: OptimizerNames(self._module, self.optimizers)}
        for i, optimizer in enumerate(self.optimizers):
            parts[_numbered(OPTIMIZER, i)] = optimizer
        for i, scheduler in enumerate(self._schedulers):
            parts[_numbered("scheduler", i)] = scheduler
        if self._scaler is not None:
            parts["scaler"] = self._scaler
        return parts


def _numbered(name: str, i: int) -> str:
    return f"{name}_{i}" if i else name


class Definition(NamedTuple):
    """What an estimator is made of.

    Args:
        model_fn: the program's function.
        config: the configuration, which has the directory.
        params: the hyper-parameters.
    """

    model_fn: Callable[..., Any]
    config: RunConfig
    params: Any

    @property
    def model_dir(self) -> str:
        """Where checkpoints are."""
        return str(self.config.model_dir)


@dataclasses.dataclass
class Built:
    """A model, and what belongs to it.

    Args:
        spec: what ``model_fn`` returned.
        strategy: the strategy in whose scope it was called.
        global_step: the number of training steps.
        train_ops: what a training step does with the gradients; ``None`` outside training.
        checkpoint: what is saved and restored.
    """

    spec: EstimatorSpec
    strategy: Strategy
    global_step: Variable
    train_ops: TrainOps | None
    checkpoint: Checkpoint

    @property
    def module(self) -> nn.Module:
        """The model."""
        return cast(nn.Module, self.spec.module)


def build(definition: Definition, strategy: Strategy, example: tuple[Any, Any], mode: str) -> Built:
    """Call a ``model_fn`` in a strategy's scope.

    Args:
        definition: has the function.
        strategy: whose replicas get the model.
        example: features and labels of one replica's batch.
        mode: what the model is for.
    """
    features, labels = example
    with strategy.scope():
        global_step = make_global_step()
        with as_current(global_step):
            spec = call_model_fn(
                definition.model_fn, features, labels, mode, copy.deepcopy(definition.params), definition.config
            )
        module: Any = spec.module
        module.train(mode == ModeKeys.TRAIN)
    checkpoint = Checkpoint(**{MODEL: module, GLOBAL_STEP: global_step})
    train_ops = None
    if mode == ModeKeys.TRAIN:
        train_ops = TrainOps(spec.train_ops, module)
        for name, part in train_ops.saved().items():
            setattr(checkpoint, name, part)
    return Built(spec, strategy, global_step, train_ops, checkpoint)


def restore(built: Built, path: str) -> None:
    """Give the model, the global step and the optimizers the values of a checkpoint.

    Raises:
        NotFoundError: there is no such checkpoint, or it lacks some of the model's variables.
        DataLossError: its file is damaged.
        ValueError: it holds variables of other shapes, or other kinds of optimizers.
    """
    logger.info("Restoring parameters from %s", path)
    try:
        status = built.checkpoint.restore(path)
    except ValueError as error:
        raise ValueError(f"{error} {_OTHER_MODEL}") from error
    try:
        status.assert_existing_objects_matched()
    except ValueError as error:
        raise NotFoundError(f"{error} {_OTHER_MODEL}") from error


_OTHER_MODEL = (
    "The checkpoint is of another model than model_fn makes. Give the estimator another model_dir, or take values from "
    "the checkpoint by warm_start_from=."
)


def build_restored(
    model_fn: Callable[..., Any],
    features: Any,
    labels: Any,
    mode: str,
    params: Any,
    config: Any,
    checkpoint_path: str | None,
) -> EstimatorSpec:
    """Make a model on the CPU, without replicas, and give it the values of a checkpoint.

    Args:
        model_fn: the program's function.
        features: of one batch.
        labels: of the batch, or ``None``.
        mode: what the model is for.
        params: the estimator's hyper-parameters.
        config: the estimator's configuration.
        checkpoint_path: the checkpoint; ``None`` leaves the initial values.
    """
    strategy = _default_strategy()
    with seeded(config.tf_random_seed, strategy):  # an export amid a training draws nothing of the training's
        built = build(Definition(model_fn, config, params), strategy, (features, labels), mode)
    if checkpoint_path is not None:
        restore(built, checkpoint_path)
    return built.spec


def plain_strategy() -> Strategy:
    """Return where models run without a strategy of the program's: the first accelerator, else the CPU.

    Raises:
        RuntimeError: called in another strategy's scope.
    """
    strategy = _default_strategy()
    device = local_devices(None)[0]
    return strategy if device.type == "cpu" else OneDeviceStrategy(device)


def _default_strategy() -> Strategy:
    strategy = get_strategy()
    if not isinstance(strategy, DefaultStrategy):
        raise RuntimeError(
            f"An estimator was used inside the scope of a {type(strategy).__name__}. Leave the scope, and give the "
            "strategy to the estimator: RunConfig(train_distribute=strategy, eval_distribute=strategy)."
        )
    return strategy
