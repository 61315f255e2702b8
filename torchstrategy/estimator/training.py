"""``Estimator.train``: the model is made once, and every replica makes steps with batches of its own."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from torchstrategy.base.context import reporting_failures
from torchstrategy.base.log import logger
from torchstrategy.checkpoint.archive import DamagedError
from torchstrategy.checkpoint.directory import read_index
from torchstrategy.checkpoint.manager import CheckpointManager, restore_newest
from torchstrategy.errors import NotFoundError
from torchstrategy.estimator.building import Built, Definition, build, plain_strategy, restore, seeded
from torchstrategy.estimator.run_config import RunConfig
from torchstrategy.estimator.saver_hook import CheckpointInputPipelineHook, CheckpointSaverHook
from torchstrategy.estimator.session import Session, StepResult, compute_loss, detached, is_first_here, mean
from torchstrategy.estimator.session_hooks import CheckpointSaverListener, SessionRunHook
from torchstrategy.estimator.session_loop import open_batches, run_steps
from torchstrategy.estimator.specs import EstimatorSpec, ModeKeys
from torchstrategy.estimator.stopping_hooks import NanTensorHook
from torchstrategy.estimator.summary_hooks import LoggingTensorHook, StepCounterHook, SummarySaverHook
from torchstrategy.estimator.warm_start import WarmStartSettings, load_global_step, warm_start
from torchstrategy.losses.loss import replica_means
from torchstrategy.ps.between_graph import BetweenGraphParameterServerStrategy
from torchstrategy.strategies.default import get_replica_context
from torchstrategy.strategies.strategy import Strategy

__all__ = ["Saver", "has_saved", "make_step", "skip_training", "train_model"]


class Saver:
    """Writes the checkpoints of a training. Every process that takes part in saving calls it; the chief writes.

    Args:
        built: what is saved.
        definition: says where, and how many checkpoints are kept.
    """

    def __init__(self, built: Built, definition: Definition) -> None:
        config = definition.config
        self._manager = CheckpointManager(
            built.checkpoint,
            definition.model_dir,
            max_to_keep=config.keep_checkpoint_max or None,
            keep_checkpoint_every_n_hours=config.keep_checkpoint_every_n_hours,
            checkpoint_name="model.ckpt",
        )

    def save(self, step: int) -> str | None:
        """Write ``model.ckpt-<step>``, and delete the checkpoints that are too many."""
        return self._manager.save(checkpoint_number=step)


def train_model(
    definition: Definition,
    input_fn: Callable[..., Any],
    hooks: Sequence[SessionRunHook],
    saving_listeners: Sequence[CheckpointSaverListener],
    warm_start_settings: WarmStartSettings | None,
) -> float | None:
    """Train until the data or a hook ends it, and return the last loss."""
    strategy, is_distributed = training_strategy(definition.config)
    with (
        reporting_failures(strategy, "Estimator"),
        seeded(definition.config.tf_random_seed, strategy),
        _connected(strategy),
    ):
        batches = open_batches(input_fn, definition, strategy, ModeKeys.TRAIN, is_distributed=is_distributed)
        example = batches.example()
        if example is None:
            logger.warning(_NO_STEPS)
            return None
        built = build(definition, strategy, example, ModeKeys.TRAIN)
        session = Session(built, definition, batches, Saver(built, definition))
        all_hooks = _all_hooks(session, built.spec, hooks, saving_listeners)
        prepare = functools.partial(_restore_or_warm_start, built, definition.config, warm_start_settings)
        num_steps = sum(1 for _ in run_steps(session, batches, all_hooks, prepare, make_step(built)))
        if num_steps == 0:
            logger.warning(_NO_STEPS)
        return session.last_loss


def training_strategy(config: RunConfig) -> tuple[Strategy, bool]:
    """Return the strategy that trains, and whether the program chose it."""
    chosen = config.train_distribute
    if chosen is not None:
        return chosen, True
    if config.num_ps_replicas > 0:
        return BetweenGraphParameterServerStrategy(timeout_seconds=config.session_creation_timeout_secs), False
    return plain_strategy(), False


def has_saved(config: RunConfig, step: int) -> bool:
    """Say whether the latest checkpoint, the chief's for processes that train together, is of a step or a later one."""
    strategy = config.train_distribute
    if strategy is None or strategy.workers is None:
        return _latest_step(config) >= step
    with reporting_failures(strategy, "Estimator"):
        reached = strategy.is_chief and _latest_step(config) >= step
        return bool(strategy.workers.broadcast_object("Estimator: whether max_steps has already saved", reached))


def _latest_step(config: RunConfig) -> int:
    for path in reversed(_paths(str(config.model_dir))):
        try:
            return load_global_step(path)
        except (NotFoundError, DamagedError):  # another process has just replaced it, or training goes on before it
            continue
    return -1


def _paths(directory: str) -> list[str]:
    """Return the checkpoints that a training may go on from, the latest last."""
    index = read_index(directory)
    return [] if index is None else [os.path.join(directory, name) for name in (*index.unlisted, *index.written)]


def skip_training(config: RunConfig) -> None:
    """Let parameter servers know that this process has nothing to train, so that they don't wait for it."""
    strategy, _ = training_strategy(config)
    if isinstance(strategy, BetweenGraphParameterServerStrategy):
        strategy.leave()


@contextlib.contextmanager
def _connected(strategy: Strategy) -> Iterator[None]:
    """Leave the parameter servers at the end; without an error, as the chief, for good."""
    if not isinstance(strategy, BetweenGraphParameterServerStrategy):
        yield
        return
    try:
        yield
    except BaseException:
        strategy.close(finished=False)
        raise
    strategy.close()


_NO_STEPS = "Training with estimator made no steps. Perhaps input is empty or misspecified."


def make_step(built: Built) -> Callable[[Any, Any], StepResult]:
    """Return what makes one training step on this process's replicas."""
    strategy, spec = built.strategy, built.spec
    module: Any = spec.module
    train_ops: Any = built.train_ops
    loss_fn: Any = spec.loss
    outputs_of_first: list[Any] = []

    def replica_step(features: Any, labels: Any) -> Tensor:
        context: Any = get_replica_context()
        outputs = module(features)
        with replica_means():
            loss = compute_loss(loss_fn, outputs, labels)
        train_ops.apply(loss / context.num_replicas_in_sync)
        if is_first_here(context):
            outputs_of_first[:] = [detached(outputs)]
        return loss.detach()

    def step(features: Any, labels: Any) -> StepResult:
        losses = strategy.experimental_local_results(strategy.run(replica_step, args=(features, labels)))
        global_step = int(built.global_step.assign_add(1))
        return StepResult(mean(losses), outputs_of_first.pop(), global_step)

    return step


def _all_hooks(
    session: Session,
    spec: EstimatorSpec,
    hooks: Sequence[SessionRunHook],
    saving_listeners: Sequence[CheckpointSaverListener],
) -> list[SessionRunHook]:
    """Return a training's hooks in tf's order: those of the chief, the program's, and those that watch the loss."""
    config, model_dir = session.config, session.model_dir
    of_chief = _hooks_of_chief(session, spec)
    saver_hooks = [hook for hook in (*hooks, *spec.training_hooks, *of_chief) if isinstance(hook, CheckpointSaverHook)]
    saves_here = session.is_chief or session.is_synchronous_group
    own: list[SessionRunHook] = []
    if (config.save_checkpoints_secs or config.save_checkpoints_steps) and not saver_hooks and saves_here:
        saver = CheckpointSaverHook(model_dir, config.save_checkpoints_secs, config.save_checkpoints_steps)
        saver_hooks.append(saver)
        own.append(saver)
    if saving_listeners and saves_here and not saver_hooks:
        raise ValueError(
            "There should be a CheckpointSaverHook to use saving_listeners. Please set one of the "
            "RunConfig.save_checkpoints_steps or RunConfig.save_checkpoints_secs."
        )
    if session.is_chief and saving_listeners:
        listeners = saver_hooks[0].listeners  # a hook of the program's may have them from the training before
        listeners.extend(listener for listener in saving_listeners if listener not in listeners)
    own += of_chief
    if session.is_chief:
        if config.log_step_count_steps:
            own.append(StepCounterHook(config.log_step_count_steps, output_dir=model_dir))
        if config.save_summary_steps:
            own.append(SummarySaverHook(config.save_summary_steps, output_dir=model_dir))
    loss_hooks: list[SessionRunHook] = [NanTensorHook("loss")]
    if config.log_step_count_steps:
        fetches = {"loss": "loss", "step": "global_step"}
        loss_hooks.append(LoggingTensorHook(fetches, every_n_iter=config.log_step_count_steps))
    # Its position must be part of the first checkpoint, and come from the one that is restored.
    ordered = [*own, *hooks, *loss_hooks, *spec.training_hooks]
    return sorted(ordered, key=lambda hook: not isinstance(hook, CheckpointInputPipelineHook))


def _hooks_of_chief(session: Session, spec: EstimatorSpec) -> list[SessionRunHook]:
    """Return a spec's hooks of the chief; elsewhere those that save, which processes that step together do together."""
    if session.is_chief:
        return list(spec.training_chief_hooks)
    savers = [hook for hook in spec.training_chief_hooks if isinstance(hook, CheckpointSaverHook)]
    for hook in savers:
        hook.listeners.clear()  # which are called where checkpoints are written
    return list(savers) if session.is_synchronous_group else []


def _restore_or_warm_start(built: Built, config: RunConfig, settings: WarmStartSettings | None) -> None:
    """Go on from the newest checkpoint that is whole, else from the given values; all processes from the chief's."""
    strategy = built.strategy
    if isinstance(strategy, BetweenGraphParameterServerStrategy) and not strategy.is_chief:
        strategy.wait_until_ready(config.session_creation_timeout_secs)  # for the chief's values
        return
    paths = _paths(str(config.model_dir))
    if strategy.workers is not None:
        paths = list(strategy.workers.broadcast_object("Estimator: the checkpoints to go on from", paths))
    if restore_newest(paths, lambda path: restore(built, path)) is None and settings is not None:
        warm_start(built.module, strategy, settings)
    if isinstance(strategy, BetweenGraphParameterServerStrategy):
        strategy.wait_until_ready()
