"""The callback that lets an interrupted ``fit`` go on, to the weights and the history of one that was not.

No generator's state is saved, of which there is one for each replica: the random numbers begin anew at each save, from
a seed made of the run's seed and the step, whether the run is interrupted or not. So do, within an epoch, the states of
metrics: what all replicas have summed up is one replica's from then on, as after a restore.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import weakref
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from torchstrategy.base.log import logger, warning_once
from torchstrategy.checkpoint.archive import SUFFIX
from torchstrategy.checkpoint.checkpoint import Checkpoint
from torchstrategy.checkpoint.directory import check_own, index_path
from torchstrategy.checkpoint.manager import CheckpointManager
from torchstrategy.checkpoint.objects import track_object
from torchstrategy.checkpoint.preemption import AgreedStop, PreemptionWatcher, TerminationConfig
from torchstrategy.checkpoint.storage import absolute, delete_file, delete_leftovers, list_files
from torchstrategy.fit.callbacks.callback import Callback, Logs
from torchstrategy.fit.callbacks.model_checkpoint import (
    check_on_write_error,
    check_save_freq,
    passing_over_write_errors,
)
from torchstrategy.fit.trainer import Trainer, trainer_of

__all__ = ["BackupAndRestore"]

_NAME = "backup"
_FILE = re.compile(rf"{_NAME}-(\d+){re.escape(SUFFIX)}")
#: So that there is one if the newest is damaged.
_NUM_KEPT = 2
#: Directories of fits of this program that are done, with their models.
_done: dict[str, weakref.ref[Any]] = {}


class BackupAndRestore(Callback):
    """Saves all that ``fit`` depends on, and goes on from there when the program is run again.

    A run that is killed at any time, on any number of processes, and started again ends with the weights and the
    history of one that was not, bit for bit on the same replicas: the model, optimizer, metrics, callbacks, the order
    of the data and the random numbers go on as they would have. Start all processes again, with the same program.
    Random numbers of torch, numpy and Python begin anew at each save, so a run with this callback draws others than
    one without, or with another ``save_freq``.

    What is saved of a callback is its ``state_dict``; it is called after all other callbacks.

    Args:
        backup_dir: a directory for these files alone, which all processes share; one for each ``fit``.
        save_freq: ``"epoch"`` saves after each epoch, a number every so many batches.
        double_checkpoint: taken because Keras has it. Two backups are kept in any case: with one, a damaged file would
            lose all.
        delete_checkpoint: delete the files when ``fit`` is done. If they are kept, another run of the program
            continues after the last epoch: ``fit`` returns at once, with the complete history, or trains further epochs
            if it is asked for more.
        save_before_preemption: when a process of the job gets SIGTERM, SIGUSR1 or SIGUSR2, finish the batch (of the
            training or of the validation) on all, save, and end the program with status 143. The random numbers begin
            anew then, too, so the rest differs from that of an unbroken run if it draws any.
        on_write_error: what follows if there is no room on the disk, or no right to write: ``"raise"`` ends ``fit``,
            ``"warn"`` logs a warning and trains on; what was saved before is as it was.
        termination_config: what else is a notice, how long training may go on after it, when the process ends in any
            case, and how; for ``save_before_preemption``, which it turns on.

    Raises:
        ValueError: ``save_freq`` is out of range, or the directory holds checkpoints of something else.
        InvalidArgumentError: the interrupted ``fit`` had another batch size, amount of data or number of steps.
        RuntimeError: the processes see different directories; or ``save_before_preemption`` outside the main thread.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> model = ts.Model(torch.nn.Linear(1, 1))
        >>> model.compile("sgd", "mse")
        >>> backup = ts.callbacks.BackupAndRestore(folder.name, delete_checkpoint=False)
        >>> x = y = torch.ones(4, 1)
        >>> first = model.fit(x, y, epochs=2, callbacks=[backup], verbose=0)
        >>> again = model.fit(x, y, epochs=3, callbacks=[backup], verbose=0)  # trains one more epoch
        >>> again.epoch, again.history["loss"][:2] == first.history["loss"]
        ([0, 1, 2], True)
        >>> folder.cleanup()
    """

    runs_last = True

    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
        save_freq: str | int = "epoch",
        double_checkpoint: bool = False,  # noqa: ARG002, FBT001, FBT002 - Keras' signature
        delete_checkpoint: bool = True,  # noqa: FBT001, FBT002
        *,
        save_before_preemption: bool = False,
        on_write_error: str = "raise",
        termination_config: TerminationConfig | None = None,
    ) -> None:
        super().__init__()
        self.backup_dir = os.fspath(backup_dir)
        self.save_freq = check_save_freq(save_freq, "BackupAndRestore")
        self.delete_checkpoint = delete_checkpoint
        self.save_before_preemption = save_before_preemption or termination_config is not None
        self.on_write_error = check_on_write_error(on_write_error, "BackupAndRestore")
        self.termination_config = termination_config
        self._manager: CheckpointManager | None = None
        self._stop: AgreedStop | None = None
        self._num_batches = 0  # since the last save
        self._last_batch = -1
        self._is_saved = False
        self._stops_at: int | None = None  # the batch to leave after, if the loop asks

    @override
    def on_train_begin(self, logs: Logs = None) -> None:
        self._num_batches, self._is_saved, self._stops_at = 0, False, None
        check_own(self.backup_dir, _NAME, "BackupAndRestore: backup_dir")
        objects = self._objects()
        # The position first: it refuses a fit with other arguments.
        checkpoint = Checkpoint(position=objects.pop("position"), **objects)
        self._manager = CheckpointManager(checkpoint, self.backup_dir, _NUM_KEPT, checkpoint_name=_NAME)
        restored = self._manager._restore_newest(lambda path: self._restore(checkpoint, path))
        if restored is None and self._position.seed is None:
            self._position.seed = self._agree(torch.initial_seed(), "seed of BackupAndRestore")[0]
        self._last_batch = self._position.step - 1
        if self.model.distribute_strategy.is_chief:
            self._note_earlier_fit(is_restored=restored is not None)
            delete_leftovers(self.backup_dir)
        if self.save_before_preemption:
            self._stop = AgreedStop(self._agree, PreemptionWatcher(self._termination), checkpoint)
            self._leave_if_preempted(at_once=True)

    @override
    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._last_batch = self._position.step - 1

    @override
    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        self._num_batches += batch - self._last_batch
        self._last_batch = batch
        self._is_saved = False
        if self._is_time() and batch + 1 != (self.params or {}).get("steps"):  # else the end of the epoch comes now
            self._save()
        if self._stops_at is None or self._stops_at == batch:
            self._leave_if_preempted(at_once=False)

    @override
    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self._is_saved = False
        if self.save_freq == "epoch" or self._is_time():
            self._save()
        self._leave_if_preempted(at_once=True)

    @override
    def on_test_batch_end(self, batch: int, logs: Logs = None) -> None:
        if self._stops_at is None:  # a loop with steps under way is asked at the end of its epoch
            self._leave_if_preempted(at_once=False)

    @override
    def on_train_end(self, logs: Logs = None) -> None:
        if self.delete_checkpoint:
            self._delete()
        elif not self._is_saved:
            self._save()
        _done[absolute(self.backup_dir)] = weakref.ref(self.model)
        self._release()

    def saves_after(self, batch: int) -> bool:
        """Say whether ``on_train_batch_end`` will save, so that a loop with steps under way can wait for them before.

        Args:
            batch: the batch that it will be called with; from then on it saves only after such batches.
        """
        got_signal = self._stop is not None and self._stop.watcher.preemption_message is not None
        self._stops_at = batch if got_signal else -1
        num_batches = self._num_batches + batch - self._last_batch
        return got_signal or (isinstance(self.save_freq, int) and num_batches >= self.save_freq)

    @override
    def _release(self) -> None:
        """Let signals mean again what they meant before."""
        stop, self._stop = self._stop, None
        if stop is not None:
            stop.watcher.close(resend=True)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"num_batches": self._num_batches}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._num_batches = state["num_batches"]

    @property
    def _termination(self) -> TerminationConfig | None:
        return self.termination_config

    # --- what there is to save

    @property
    def _trainer(self) -> Trainer:
        return trainer_of(self.model)

    @property
    def _position(self) -> Any:
        return self._trainer.position

    def _objects(self) -> dict[str, Any]:
        trainer = self._trainer
        objects: dict[str, Any] = trainer.checkpoint_objects(self.model, trainer.dataset)
        return objects

    # --- saving and restoring

    def _is_time(self) -> bool:
        return isinstance(self.save_freq, int) and self._num_batches >= self.save_freq

    def _save(self, *, is_in_turn: bool = True, on_write_error: str | None = None) -> None:
        if is_in_turn:
            self._num_batches = 0
        manager = self._current_manager
        metrics = self._objects().get("metrics", {})
        if metrics.keys() != manager.checkpoint._objects.get("metrics", {}).keys():  # some come with the first batch
            manager.checkpoint.metrics = metrics
        with passing_over_write_errors(on_write_error or self.on_write_error, "BackupAndRestore"):
            manager.save()
            self._is_saved = True
        if self._position.step > 0:
            self._join(metrics)
        self._begin_random_numbers()

    def _restore(self, checkpoint: Checkpoint, path: str) -> None:
        status = checkpoint.restore(path)
        status.assert_existing_objects_matched()
        unused = [name for name in status.unused if not name.startswith("metrics")]
        if unused:
            raise ValueError(
                f"The backup {path} is of another model or compile(): it holds {', '.join(unused[:8])}, which this one "
                "lacks. Use the program that wrote it, or start anew with another directory."
            )
        position = self._position
        logger.info(
            "BackupAndRestore: going on in epoch %d after %d batches, from %s.", position.epoch + 1, position.step, path
        )
        self._is_saved = True
        self._begin_random_numbers()

    def _join(self, metrics: dict[str, Any]) -> None:
        """Let metrics go on as after a restore: with one replica's state for all."""
        strategy = self.model.distribute_strategy
        for name, metric in metrics.items():
            tracked = track_object(name, metric)
            tracked.plan(tracked.capture(strategy), strategy).apply()
        self._trainer.outputs = None  # else only the process that has the states would show them in logs

    def _begin_random_numbers(self) -> None:
        position = self._position
        seed = int(np.random.SeedSequence([position.seed, position.iterations]).generate_state(1)[0])
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)  # each replica draws its own from here

    def _agree(self, value: Any, what: str) -> list[Any]:
        """Return every process's value."""
        workers = self.model.distribute_strategy.workers
        return [value] if workers is None else list(workers.exchange(what, value))

    # --- the directory

    def _note_earlier_fit(self, *, is_restored: bool) -> None:
        """Say if a fit of this program that is done had the same directory, and this one does not go on with it."""
        earlier = _done.get(absolute(self.backup_dir))
        if earlier is None or (is_restored and earlier() is self.model):
            return
        follows = (
            "This one, of another model, goes on from its state and does not begin anew."
            if is_restored
            else "If the program is interrupted now and started again, the earlier one takes up what this one has "
            "saved, and this one begins anew."
        )
        warning_once(
            f"An earlier fit of this program had the same {type(self).__name__}({self.backup_dir!r}). {follows} Give "
            "each fit a directory of its own."
        )

    @property
    def _current_manager(self) -> CheckpointManager:
        if self._manager is None:
            raise RuntimeError("BackupAndRestore saves during fit only: pass it to fit(callbacks=[...]).")
        return self._manager

    def _delete(self) -> None:
        """Delete the files, when all processes are done."""
        self._agree(None, "end of fit")
        if self.model.distribute_strategy.is_chief:
            # Also what a killed save has not deleted. Without the index the newest is still found, until it goes last.
            numbers = (_FILE.fullmatch(name) for name in list_files(self.backup_dir))
            files = [found[0] for found in sorted(filter(None, numbers), key=lambda found: int(found[1]))]
            for path in (index_path(self.backup_dir), *(os.path.join(self.backup_dir, name) for name in files)):
                with contextlib.suppress(FileNotFoundError):
                    delete_file(path)
            with contextlib.suppress(OSError):  # it is missing, or holds something else
                os.rmdir(self.backup_dir)

    # --- preemption

    def _leave_if_preempted(self, *, at_once: bool) -> None:
        if self._stop is None or not self._stop.is_due(at_once=at_once):
            return
        self._stop.save_and_end(self._save_if_new, f"epoch {self._position.epoch + 1} in {self.backup_dir}")
        self._stop = None  # the program's own exit_fn has not ended it

    def _save_if_new(self) -> None:
        if not self._is_saved:
            self._save(is_in_turn=False, on_write_error="raise")  # after it there is no training to go on with
