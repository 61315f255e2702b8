"""Going on with a custom training loop whose machine was taken away."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchstrategy.base.context import current_replica_context
from torchstrategy.base.log import logger
from torchstrategy.checkpoint.checkpoint import Checkpoint
from torchstrategy.checkpoint.directory import check_own
from torchstrategy.checkpoint.manager import CheckpointManager
from torchstrategy.checkpoint.preemption import AgreedStop, PreemptionWatcher, TerminationConfig, check_positive
from torchstrategy.replicas.record import owned_by

__all__ = ["PreemptionCheckpointHandler"]

_NAME = "preemption"


class PreemptionCheckpointHandler:
    """Saves a custom loop, and ends the program, when a process of the job is told that it will be ended.

    All processes make one and call its methods alike. Making it restores the newest checkpoint, so a program that is
    started again goes on by itself; ``total_run_calls`` tells where.

    Args:
        cluster_resolver: not needed here, since the strategy knows its processes; may be ``None``.
        checkpoint_or_checkpoint_manager: a ``ts.train.Checkpoint``, or a ``CheckpointManager``, whose directory is then
            for this handler alone or for the program's own saves, too. What the loop depends on belongs into it: model,
            optimizer, scheduler, and a distributed dataset if the data shall go on where it was.
        checkpoint_dir: where to save, for a ``Checkpoint``.
        termination_config: what is a notice, and what follows.
        save_freq: also save after every so many calls of ``run``, for a process that ends without a word; ``None``
            leaves that to the program.

    Raises:
        ValueError: a ``Checkpoint`` without a directory, or a manager with one.
        RuntimeError: made outside the main thread, or in replica context.
        DataLossError: there are checkpoints, but none that is whole.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> with strategy.scope():
        ...     step = ts.Variable(0)
        >>> checkpoint = ts.train.Checkpoint(step=step)
        >>> with ts.experimental.PreemptionCheckpointHandler(None, checkpoint, folder.name) as handler:
        ...     for _ in range(handler.total_run_calls, 3):
        ...         _ = handler.run(lambda: strategy.run(lambda: step.assign_add(1)))
        ...     handler.total_run_calls
        3
        >>> folder.cleanup()
    """

    def __init__(
        self,
        cluster_resolver: Any,  # noqa: ARG002 - tf's signature
        checkpoint_or_checkpoint_manager: Checkpoint | CheckpointManager,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        termination_config: TerminationConfig | None = None,
        *,
        save_freq: int | None = None,
    ) -> None:
        if save_freq is not None:
            check_positive(
                save_freq, "PreemptionCheckpointHandler(save_freq=...)", "a positive number of calls, or None"
            )
        self._save_freq = save_freq
        given = checkpoint_or_checkpoint_manager
        if isinstance(given, CheckpointManager):
            if checkpoint_dir is not None:
                raise ValueError(
                    "PreemptionCheckpointHandler: a CheckpointManager has its directory, so checkpoint_dir must be "
                    f"None. Received: {os.fspath(checkpoint_dir)!r}"
                )
            self._manager = given
        elif isinstance(given, Checkpoint):
            if checkpoint_dir is None:
                raise ValueError("PreemptionCheckpointHandler: pass checkpoint_dir=..., where the checkpoint is saved.")
            otherwise = ", or the CheckpointManager that wrote them"
            check_own(os.fspath(checkpoint_dir), _NAME, "PreemptionCheckpointHandler: checkpoint_dir", otherwise)
            self._manager = CheckpointManager(given, checkpoint_dir, max_to_keep=2, checkpoint_name=_NAME)
        else:
            raise TypeError(
                "PreemptionCheckpointHandler needs a ts.train.Checkpoint or a ts.train.CheckpointManager. Received a "
                f"{type(given).__name__}."
            )
        self._calls = _Calls()
        self._manager.checkpoint.preemption_handler = self._calls
        self._manager.restore_or_initialize()
        self._stop = AgreedStop(self._agree, PreemptionWatcher(termination_config), self._manager.checkpoint)
        self._is_inside = False

    @property
    def total_run_calls(self) -> int:
        """How often ``run`` was called, in all attempts of the job."""
        return self._calls.number

    @property
    def checkpoint_manager(self) -> CheckpointManager:
        """What saves."""
        return self._manager

    def run(self, distributed_train_function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function that makes a step, or several; then save and end the program if a process is to be ended.

        What belongs to a step, such as a scheduler's, goes into the function: what the loop does after ``run`` is not
        done any more if the program ends here.

        Args:
            distributed_train_function: what makes the step.
            args: its arguments.
            kwargs: its keyword arguments.

        Returns:
            What the function returns.

        Raises:
            RuntimeError: called in replica context, inside of itself, or within ``watch_preemption_scope``.
        """
        self._require_outside("run")
        if not callable(distributed_train_function):
            raise TypeError(
                "PreemptionCheckpointHandler.run takes a function and its arguments, which it calls: "
                f"handler.run(strategy.run, step, args=batch). Received: {distributed_train_function!r}"
            )
        if self._calls.number == self._calls.restored:  # before the first step, there is nothing to save
            self._end_if_due(is_saved=True)
            self._note_left_out()
        with self._inside():
            result = distributed_train_function(*args, **kwargs)
        self._calls.number += 1
        self._end_if_due()
        if self._save_freq is not None and self._calls.number % self._save_freq == 0:
            self._save()
        return result

    @contextlib.contextmanager
    def watch_preemption_scope(self) -> Iterator[None]:
        """Let ``save_checkpoint_if_preempted`` be called in a ``with`` block."""
        self._require_outside("watch_preemption_scope")
        with self._inside():
            yield

    def save_checkpoint_if_preempted(self, *args: Any, **kwargs: Any) -> None:
        """Save and end the program if a process is to be ended; within ``watch_preemption_scope``, after each step.

        Args:
            args: for the manager's ``save``.
            kwargs: for the manager's ``save``.

        Raises:
            ValueError: called outside ``watch_preemption_scope``.
        """
        if not self._is_inside:
            raise ValueError("save_checkpoint_if_preempted must be called within handler.watch_preemption_scope().")
        if self._calls.number == self._calls.restored:
            self._note_left_out()
        self._calls.number += 1
        self._end_if_due(args=args, kwargs=kwargs)

    def close(self) -> None:
        """Let signals mean what they meant before, after a last look whether a process is to be ended."""
        try:
            self._end_if_due(at_once=True)
        finally:
            self._stop.watcher.close()

    def __enter__(self) -> PreemptionCheckpointHandler:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._stop.watcher.close(resend=True)  # nobody has acted on it

    def _end_if_due(self, *, at_once: bool = False, is_saved: bool = False, args: Any = (), kwargs: Any = None) -> None:
        if self._stop.is_due(at_once=at_once or is_saved):
            self._stop.save_and_end(
                lambda: None if is_saved else self._save(*args, **(kwargs or {})),
                f"the state after {self.total_run_calls} calls in {self._manager.directory}",
            )

    def _note_left_out(self) -> None:
        """Say what the checkpoint does not hold though the program trains with it."""
        checkpoint = self._manager.checkpoint
        strategy, tracked = checkpoint._strategy(), [item.obj for item in checkpoint._track().values()]
        known = {id(obj) for part in tracked for obj in (part, getattr(part, "_dataset", None))}
        missing = [
            f"the {kind} {type(obj).__name__}"
            for obj in getattr(strategy, "record", ())
            for kind, cls in (("optimizer", Optimizer), ("scheduler", LRScheduler), ("scaler", GradScaler))
            if isinstance(obj, cls) and id(obj) not in known
        ]
        datasets = [obj for obj in owned_by(strategy) if id(obj) not in known and hasattr(type(obj), "_is_under_way")]
        with contextlib.suppress(Exception):  # of a user's own data, whose state nobody has asked for
            missing += ["the dataset that is read"] * any(dataset._is_under_way for dataset in datasets)
        if missing and strategy.is_chief:
            logger.warning(
                "PreemptionCheckpointHandler: the checkpoint does not hold %s. If the program is interrupted and "
                "started again, that begins anew, and the steps are not those of an unbroken run: give it to "
                "ts.train.Checkpoint(...).",
                ", ".join(missing),
            )

    def _save(self, *args: Any, **kwargs: Any) -> None:
        if not args and "checkpoint_number" not in kwargs:
            kwargs.setdefault("check_interval", False)
        self._manager.save(*args, **kwargs)
        self._manager.sync()

    def _agree(self, value: Any, what: str) -> list[Any]:
        workers = self._manager.checkpoint._strategy().workers
        return [value] if workers is None else list(workers.exchange(what, value))

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        self._is_inside = True
        try:
            yield
        finally:
            self._is_inside = False

    def _require_outside(self, method: str) -> None:
        if current_replica_context() is not None or self._is_inside:
            raise RuntimeError(
                f"PreemptionCheckpointHandler.{method} was called inside of the step. Call it in the training loop, "
                "around strategy.run."
            )


class _Calls:
    """The number of calls, as a part of the checkpoint."""

    def __init__(self) -> None:
        self.number = self.restored = 0

    def state_dict(self) -> dict[str, Any]:
        return {"total_run_calls": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = self.restored = state["total_run_calls"]
