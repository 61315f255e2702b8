"""A full disk during a save: an error, or a warning and training goes on; what was saved before stays."""

import os
import signal

import pytest
import torch

import torchstrategy as ts
from torchstrategy.callbacks import BackupAndRestore, Callback, ModelCheckpoint
from torchstrategy.fit.callbacks.model_checkpoint import passing_over_write_errors
from torchstrategy.testing.faults import file_fault


class FullDisk(Callback):
    """Fills the disk from an epoch on, before what is called after it."""

    def __init__(self, folder, epoch, rank=0):
        super().__init__()
        self.folder, self.epoch, self.rank, self.fault = folder, epoch, rank, None

    def on_epoch_begin(self, epoch, logs=None):
        workers = self.model.distribute_strategy.workers
        if epoch == self.epoch and (workers is None or workers.rank == self.rank):
            self.fault = file_fault("full", 1, self.folder)
            self.fault.__enter__()

    def end(self):
        if self.fault is not None:
            self.fault.__exit__(None, None, None)


def fit(folder, make, on_write_error, full_from=2, *, workers=False):
    strategy = ts.MultiWorkerMirroredStrategy() if workers else ts.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        torch.manual_seed(0)
        model = ts.Model(torch.nn.Linear(2, 1))
    model.compile("sgd", "mse")
    full = FullDisk(folder, full_from)
    x = torch.arange(8.0).view(4, 2) / 8
    try:
        history = model.fit(
            x, x.sum(1, keepdim=True), epochs=4, callbacks=[full, make(folder, on_write_error)], verbose=0
        )
    except (OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        full.end()
    return history.history["loss"]


def make_backup(folder, on_write_error):
    return BackupAndRestore(folder, delete_checkpoint=False, on_write_error=on_write_error)


def make_checkpoint(folder, on_write_error):
    return ModelCheckpoint(os.path.join(folder, "weights-{epoch}"), on_write_error=on_write_error)


def make_model(folder, on_write_error):
    path = os.path.join(folder, "weights-{epoch}.pt")
    return ModelCheckpoint(path, save_weights_only=False, on_write_error=on_write_error)


@pytest.mark.parametrize("make", [make_backup, make_checkpoint, make_model])
def test_one_process(tmp_path, make, caplog):
    folder = str(tmp_path / "raise")
    assert "No space left on device" in fit(folder, make, "raise")
    names = sorted(name for name in os.listdir(folder) if name != "training_finished")
    assert len([name for name in names if name.endswith(".pt")]) == 2
    whole = fit(str(tmp_path / "whole"), make, "raise", full_from=None)
    assert fit(str(tmp_path / "warn"), make, "warn") == whole
    assert sum("training goes on" in message for message in caplog.messages) >= 2
    assert sorted(name for name in os.listdir(tmp_path / "warn") if name != "training_finished") == names
    if make is make_backup:  # what is left is good
        assert fit(str(tmp_path / "warn"), make, "raise", full_from=None) == whole


@pytest.mark.parametrize("make", [make_backup, make_checkpoint])
def test_two_processes(process_pool, tmp_path, make):
    for outcome in process_pool(2).run(fit, str(tmp_path / "raise"), make, "raise", workers=True):
        assert outcome.startswith("WriteFailedError: Rank 0 could not write the checkpoint")
    first, second = process_pool(2).run(fit, str(tmp_path / "warn"), make, "warn", workers=True)
    assert first == second
    assert len(first) == 4


def test_other_errors_are_raised():
    with pytest.raises(ts.errors.FailedPreconditionError), passing_over_write_errors("warn", "ModelCheckpoint"):
        raise ts.errors.FailedPreconditionError("another attempt has saved")


@pytest.mark.parametrize("make", [make_backup, make_checkpoint])
def test_bad_arguments(tmp_path, make):
    with pytest.raises(ValueError, match=r"on_write_error=\.\.\.\) must be 'raise' or 'warn'. Received: 'ignore'"):
        make(str(tmp_path), "ignore")


def test_the_best_model_is_the_best_on_the_disk(tmp_path):
    save = ModelCheckpoint(tmp_path / "best-{epoch}", "loss", save_best_only=True, on_write_error="warn")
    model = ts.Model(torch.nn.Linear(2, 1))
    model.compile("sgd", "mse")
    full = FullDisk(tmp_path, 1)

    class Free(Callback):
        def on_epoch_end(self, epoch, logs=None):
            full.end()
            full.fault = None

        runs_last = True

    class Given(Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["loss"] = [5.0, 1.0, 2.0, 3.0][epoch]

    model.fit(torch.ones(2, 2), torch.ones(2, 1), epochs=4, verbose=0, callbacks=[Given(), full, save, Free()])
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == ["best-1.pt", "best-3.pt"]
    assert save.best == 2.0


def test_preemption_does_not_say_that_it_has_saved(tmp_path):
    backup = BackupAndRestore(tmp_path, save_before_preemption=True, on_write_error="warn")
    model = ts.Model(torch.nn.Linear(2, 1))
    model.compile("sgd", "mse")
    send = ts.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: os.kill(os.getpid(), signal.SIGTERM))
    caught = []
    before = signal.signal(signal.SIGTERM, lambda *_: caught.append(1))
    full = FullDisk(tmp_path, 0)
    try:
        with pytest.raises(OSError, match="No space left"):
            model.fit(torch.ones(2, 2), torch.ones(2, 1), verbose=0, callbacks=[full, send, backup])
    finally:
        full.end()
        signal.signal(signal.SIGTERM, before)
    assert caught
