"""A training that kills itself once, and goes on when it is called again."""

import os
import random
import signal
import threading
from pathlib import Path

import numpy as np
import torch
from torch import nn

import torchstrategy as ts
from torchstrategy.callbacks import (
    BackupAndRestore,
    Callback,
    CSVLogger,
    EarlyStopping,
    LambdaCallback,
    LearningRateScheduler,
    ReduceLROnPlateau,
)

STEPS = 4  # of an epoch: 22 examples in batches of 6, 6, 6 and 4
EPOCHS = 4


class Noisy(ts.Model):
    """Draws from every source of random numbers, in the forward pass."""

    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(3, 4), nn.Dropout(0.4), nn.Linear(4, 1)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        h = self.drop(torch.tanh(self.norm(self.first(x))))
        if self.training:
            h = h + 0.01 * random.random() + 0.01 * float(np.random.rand())
        return self.last(h)


class KillAt(Callback):
    """Ends the process as a crash or the kernel does, if it was not done before: after a step or an epoch."""

    def __init__(self, folder, step=None, epoch=None, rank=0):
        super().__init__()
        self.step, self.epoch, self.rank = step, epoch, rank
        self.mark = Path(folder) / f"killed_{step}_{epoch}"

    def on_train_batch_end(self, batch, logs=None):
        if self.model.iterations == self.step:
            self.kill()

    def on_epoch_end(self, epoch, logs=None):
        if epoch == self.epoch:
            self.kill()

    def kill(self):
        workers = self.model.distribute_strategy.workers
        if self.rank == (0 if workers is None else workers.rank) and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def kill_in_write(folder, number):
    """Kill this process in the middle of a write, which has written part of a temporary file."""
    mark, save, counts = Path(folder) / "killed_in_write", torch.save, []

    def dying_save(content, file):
        counts.append(None)
        if len(counts) == number and not mark.exists():
            mark.touch()
            file.write(b"the beginning")
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        save(content, file)

    torch.save = dying_save


def kill_after(seconds):
    """Kill this process some time from now, unless the event that is returned was set before."""
    is_done = threading.Event()

    def wait():
        if not is_done.wait(seconds):
            os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()
    return is_done


def data():
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(22, 3, generator=generator)
    return x, x.sum(1, keepdim=True)


def make_model(strategy, optimizer="adam", model=Noisy, **kwargs):
    with strategy.scope():
        made = model()
        made.compile(optimizer, "mse", metrics=["mae", ts.metrics.RootMeanSquaredError(name="rmse")], **kwargs)
    return made


def _state(optimizer):
    """Return an optimizer's state without whether its steps are fused: `fit` sees to that only if it has one to do."""
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        del group["fused"]
    return state


def train(folder, devices=None, save_freq="epoch", kill=None, options=None, epochs=EPOCHS, compiled=None, **backup):
    """Train with every callback that has a state; return all that it ends with.

    Args:
        folder: for the backup, the log and the marks.
        devices: ``None`` for processes that a launcher has started.
        save_freq: of BackupAndRestore.
        kill: arguments of ``KillAt``; ``{"write": n}`` and ``{"after": seconds}`` kill elsewhere.
        options: other arguments of ``fit``.
        epochs: how many.
        compiled: arguments of ``compile``.
        backup: arguments of BackupAndRestore.
    """
    strategy = ts.MultiWorkerMirroredStrategy() if devices is None else ts.MirroredStrategy(devices)
    folder = Path(folder)
    ts.utils.set_random_seed(3)
    model = make_model(strategy, **(compiled or {}))
    kill = kill or {}
    is_done = kill_after(kill["after"]) if "after" in kill else threading.Event()
    if "write" in kill:
        kill_in_write(folder, kill["write"])
    callbacks = [
        BackupAndRestore(folder / "backup", save_freq, **{"delete_checkpoint": False, **backup}),
        LearningRateScheduler(lambda epoch, lr: lr * 0.9),
        ReduceLROnPlateau(monitor="val_loss", factor=0.5, patience=1, min_delta=0.5, mode="min"),
        EarlyStopping(monitor="val_loss", patience=2, min_delta=10.0, restore_best_weights=True, start_from_epoch=1),
        CSVLogger(folder / "log.csv"),
        LambdaCallback(on_epoch_end=lambda epoch, logs: (folder / "epochs").open("a").write(f"{epoch} ")),
        *([] if kill.keys() & {"write", "after"} else [KillAt(folder, **kill)]),
    ]
    x, y = data()
    arguments = {"batch_size": 6, "epochs": epochs, "validation_data": (x[:7], y[:7]), "verbose": 0, **(options or {})}
    arguments = {"x": x, "y": y, **arguments}
    try:
        history = model.fit(callbacks=callbacks, **arguments)
    finally:
        is_done.set()
    return {
        "history": history.history,
        "epoch": history.epoch,
        "weights": {name: value.tolist() for name, value in model.state_dict().items()},
        "optimizer": str(_state(model.optimizer)),
        "iterations": model.iterations,
        "log": (folder / "log.csv").read_text(),
    }
