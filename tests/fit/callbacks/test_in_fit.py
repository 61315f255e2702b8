"""Callbacks in ``ts.Model.fit``: what they do is the same for one replica and for many."""

import contextlib
import csv
import functools
import io
import math
import os
import pty
import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.optim import lr_scheduler

import torchstrategy as ts
from tests.programs import strategy_for
from torchstrategy.callbacks import (
    Callback,
    CSVLogger,
    EarlyStopping,
    LambdaCallback,
    LearningRateScheduler,
    ReduceLROnPlateau,
    TensorBoard,
    TerminateOnNaN,
    TorchLRScheduler,
)
from torchstrategy.replicas.mirrored import bodies

NUM_EXAMPLES = 10  # in batches of 4: the last one has 2
LAYOUTS = [[], ["cpu:0", "cpu:1"], ["cpu:0", "cpu:1", "cpu:2"]]


def data():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(NUM_EXAMPLES, 2, generator=generator, dtype=torch.float64)
    return x, x.sum(1, keepdim=True) + 0.1 * torch.randn(NUM_EXAMPLES, 1, generator=generator, dtype=torch.float64)


def make_model(strategy, optimizer="sgd", **arguments):
    with strategy.scope():
        torch.manual_seed(1)
        model = ts.Model(nn.Linear(2, 1, dtype=torch.float64))
        if optimizer == "torch":
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model.compile(optimizer, "mse", metrics=["mae"], **arguments)
    return model


def train(devices, callbacks, *, epochs=6, model=None, optimizer="sgd", validation=True, **arguments):
    """Train; return the history, the weights of every replica, and the model."""
    model = make_model(strategy_for(devices), optimizer) if model is None else model
    x, y = data()
    validation_data = (x[:7] + 1, y[:7]) if validation else None
    history = model.fit(
        x, y, batch_size=4, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks,
        validation_data=validation_data, **arguments,
    )  # fmt: skip
    if len(bodies(model)) > 1:
        model.distribute_strategy.run(lambda: None)  # the replicas take up what was changed outside
    weights = [body.weight.detach().clone() for body in bodies(model.module)]
    return history.history, weights, model


def learning_rates(model):
    return [body.param_groups[0]["lr"] for body in bodies(model.optimizer)]


def assert_equal(results, expected, *, rtol=1e-12):
    history, weights = results[:2]
    assert list(history) == list(expected[0])
    for name, values in expected[0].items():
        np.testing.assert_allclose(history[name], values, rtol=rtol, err_msg=name)
    for own in weights:
        torch.testing.assert_close(own, expected[1][0], rtol=rtol, atol=0)


def stopping():
    return [EarlyStopping("val_mae", patience=1, restore_best_weights=True, min_delta=0.05)]


def plateau():
    return [ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=0.5)]


def schedule():
    return [LearningRateScheduler(lambda epoch, lr: lr * 0.5 if epoch else 0.2)]


def torch_epochs():
    return [TorchLRScheduler(functools.partial(lr_scheduler.StepLR, step_size=2, gamma=0.1))]


def torch_steps():
    one_cycle = functools.partial(lr_scheduler.OneCycleLR, max_lr=0.3, total_steps=40, cycle_momentum=True)
    return [TorchLRScheduler(one_cycle, interval="step")]


MAKERS = [stopping, plateau, schedule, torch_epochs, torch_steps]


@pytest.mark.parametrize("make", MAKERS)
def test_replicas_train_as_one(make):
    expected = train([], make(), optimizer="torch")
    for devices in LAYOUTS[1:]:
        result = train(devices, make(), optimizer="torch")
        assert_equal(result, expected)
        assert len(result[1]) == len(devices)
        assert len(set(learning_rates(result[2]))) == 1
        assert learning_rates(result[2])[0] == learning_rates(expected[2])[0]


def train_in_process(name):
    history, weights, _ = train(None, globals()[name](), optimizer="torch")
    return history, weights


@pytest.mark.slow
@pytest.mark.parametrize("make", MAKERS)
def test_processes_train_as_one(make, process_pool):
    expected = train([], make(), optimizer="torch")
    for result in process_pool(2).run(train_in_process, make.__name__):
        assert_equal(result, expected)


def test_early_stopping_stops_and_restores():
    (stop,) = callbacks = stopping()
    history, weights, _ = train([], callbacks, epochs=40)
    unbroken, _, _ = train([], None, epochs=40)
    stopped = len(history["val_mae"])
    assert 1 < stopped < 40
    assert history["val_mae"] == unbroken["val_mae"][:stopped]
    assert stop.best == history["val_mae"][stop.best_epoch]
    _, at_best, _ = train([], None, epochs=stop.best_epoch + 1)
    torch.testing.assert_close(weights, at_best)


def test_rates_in_the_logs_are_those_of_the_epochs():
    history, _, model = train(["cpu:0", "cpu:1"], torch_epochs(), optimizer="torch")
    assert history["learning_rate"] == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001, 0.001])
    assert learning_rates(model) == pytest.approx([1e-4, 1e-4])
    history, _, _ = train([], plateau(), optimizer="torch")
    assert history["learning_rate"][0] == 0.1
    assert history["learning_rate"][-1] < 0.1


@pytest.mark.parametrize("devices", LAYOUTS)
def test_a_scheduler_itself_made_in_the_scope(devices):
    strategy = strategy_for(devices)
    model = make_model(strategy, "torch")
    with strategy.scope():
        scheduler = lr_scheduler.ExponentialLR(model.optimizer, 0.5)
    history, _, _ = train(devices, [scheduler], model=model, epochs=3)
    assert history["learning_rate"] == [0.1, 0.05, 0.025]
    assert learning_rates(model) == [0.0125] * max(1, len(devices))


@pytest.mark.parametrize("devices", LAYOUTS)
def test_a_rate_that_is_a_tensor(devices):
    strategy = strategy_for(devices)
    with strategy.scope():
        model = make_model(strategy)
        rate = torch.tensor(0.1, dtype=torch.float64)
        model.compile(torch.optim.Adam(model.parameters(), lr=rate), "mse", metrics=["mae"])
    history, weights, _ = train(devices, schedule(), model=model, epochs=3)
    expected = train([], schedule(), model=_compiled_adam(), epochs=3)
    assert history["learning_rate"] == pytest.approx([0.2, 0.1, 0.05])
    assert_equal((history, weights), expected, rtol=1e-7)
    assert [float(own) for own in learning_rates(model)] == pytest.approx([0.05] * max(1, len(devices)))


def _compiled_adam():
    model = make_model(ts.get_strategy())
    model.compile(torch.optim.Adam(model.parameters(), lr=0.1), "mse", metrics=["mae"])
    return model


@pytest.mark.parametrize("devices", LAYOUTS)
def test_steps_of_schedulers_with_accumulation_and_executions(devices):
    for arguments, num_steps in [({"gradient_accumulation_steps": 2}, 2), ({"steps_per_execution": 2}, 3)]:
        model = make_model(strategy_for(devices), "torch", **arguments)
        halve = TorchLRScheduler(functools.partial(lr_scheduler.ExponentialLR, gamma=0.5), interval="step")
        train(devices, [halve], model=model, epochs=1, validation=False)
        assert learning_rates(model) == [0.1 * 0.5**num_steps] * max(1, len(devices))


def _train_on_nan(devices):
    x, y = data()
    x[5] = math.nan  # in the second batch
    model = make_model(strategy_for(devices))
    batches = []
    count = LambdaCallback(on_train_batch_end=lambda batch, logs: batches.append(batch))
    history = model.fit(x, y, batch_size=4, epochs=3, shuffle=False, verbose=0, callbacks=[TerminateOnNaN(), count])
    return batches, history.epoch


@pytest.mark.parametrize("devices", LAYOUTS)
@pytest.mark.filterwarnings("ignore:.*nan.*")
def test_nan_ends_the_training(devices, capsys):
    assert _train_on_nan(devices) == ([0, 1], [0])
    assert "Batch 1: the loss is nan, the training ends.\n" in capsys.readouterr().out


@pytest.mark.parametrize("devices", LAYOUTS)
def test_csv(devices, tmp_path):
    log = CSVLogger(tmp_path / "log.csv")
    history, _, _ = train(devices, [*plateau(), log], epochs=3)
    with (tmp_path / "log.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["epoch", "learning_rate", "loss", "mae", "val_loss", "val_mae"]
    for name, values in history.items():
        assert [float(row[name]) for row in rows] == values


@pytest.mark.parametrize("devices", LAYOUTS)
def test_tensorboard(devices, tmp_path):
    board = TensorBoard(tmp_path, update_freq=1, histogram_freq=1)
    history, _, model = train(devices, [board], epochs=2)
    read = EventAccumulator(str(tmp_path / "train")).Reload()
    assert [event.value for event in read.Scalars("epoch_loss")] == pytest.approx(history["loss"])
    assert [event.step for event in read.Scalars("batch_mae")] == [1, 2, 3, 4, 5, 6]
    assert read.Scalars("batch_mae")[-1].value == pytest.approx(history["mae"][-1])
    assert set(read.Tags()["histograms"]) == {"module.weight/histogram", "module.bias/histogram"}
    assert "linear" in [node.op for node in read.Graph().node]
    validation = EventAccumulator(str(tmp_path / "validation")).Reload()
    assert [event.value for event in validation.Scalars("epoch_mae")] == pytest.approx(history["val_mae"])
    assert [event.step for event in validation.Scalars("evaluation_loss_vs_iterations")] == [3, 6]
    x, y = data()
    model.evaluate(x, y, verbose=0, callbacks=[board])
    assert len(list((tmp_path / "validation").iterdir())) == 2


class Writing(ts.Model):
    """Writes a summary in its training step."""

    def train_step(self, data):
        result = super().train_step(data)
        ts.summary.scalar("size", len(data[0]))
        return result


@pytest.mark.parametrize("devices", LAYOUTS)
def test_summaries_of_a_training_step(devices, tmp_path):
    with strategy_for(devices).scope():
        model = Writing(nn.Linear(2, 1, dtype=torch.float64))
        model.compile("sgd", "mse")
    x, y = data()
    model.fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=[TensorBoard(tmp_path, update_freq=2)])
    read = EventAccumulator(str(tmp_path / "train")).Reload()
    assert [event.step for event in read.Scalars("size")] == [2, 4, 6]
    assert read.Scalars("size")[1].value == len(x[:4].chunk(max(1, len(devices)))[0])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(2, 1, dtype=torch.float64)
        self.seen = []

    def forward(self, x):
        self.seen.append(x.shape)
        return self.dense(x)


@pytest.mark.parametrize("devices", LAYOUTS)
def test_finding_the_graph_leaves_no_trace(devices, tmp_path):
    strategy = strategy_for(devices)
    with strategy.scope():
        model = ts.Model(Net())
        model.compile("sgd", "mse")
    x, y = data()
    model.fit(x, y, batch_size=4, verbose=0, callbacks=[TensorBoard(tmp_path)])
    for body in bodies(model.module):
        assert all(isinstance(shape, torch.Size) for shape in body.seen)
    nodes = EventAccumulator(str(tmp_path / "train")).Reload().Graph().node
    assert [node.name for node in nodes] == ["x", "dense", "output"]


class Logs(Callback):
    """Notes the logs that its hooks get."""

    def __init__(self):
        super().__init__()
        self.train, self.test, self.epochs = [], [], []

    def on_train_batch_end(self, batch, logs=None):
        self.train.append(dict(logs))

    def on_test_batch_end(self, batch, logs=None):
        self.test.append(dict(logs))

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(dict(logs))


@pytest.mark.parametrize("devices", LAYOUTS[1:])
def test_the_logs_of_batches_are_running_means(devices):
    expected, logs = Logs(), Logs()
    train([], [expected], epochs=2)
    train(devices, [logs], epochs=2)
    for own, right in [(logs.train, expected.train), (logs.test, expected.test), (logs.epochs, expected.epochs)]:
        assert len(own) == len(right) > 0
        for one, other in zip(own, right, strict=True):
            assert one == pytest.approx(other)
    assert logs.train[2] == pytest.approx({name: logs.epochs[0][name] for name in ("loss", "mae")})


@pytest.mark.parametrize("devices", LAYOUTS)
def test_lines(devices, capsys):
    model = make_model(strategy_for(devices))
    x, y = data()
    model.fit(x, y, batch_size=4, epochs=2, validation_data=(x, y))
    model.evaluate(x, y, batch_size=4)
    model.predict(x, batch_size=4)
    number = r"\d+\.\d{4}"
    train_line = f"3/3 - .*/step - loss: {number} - mae: {number} - val_loss: {number} - val_mae: {number}\n"
    test_line = f"3/3 - .*/step - loss: {number} - mae: {number}\n"
    expected = f"Epoch 1/2\n{train_line}Epoch 2/2\n{train_line}{test_line}3/3 - .*/step\n"
    assert re.fullmatch(expected, capsys.readouterr().out)


@pytest.mark.slow
def test_a_bar_on_a_real_terminal():
    program = (
        "import torch, torchstrategy as ts\n"
        "model = ts.Model(torch.nn.Linear(1, 1)); model.compile('sgd', 'mse')\n"
        "x = torch.ones(6, 1)\n"
        "model.fit(x, x, batch_size=2, epochs=2)\n"
    )
    ours, theirs = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", program], stdout=theirs, stderr=subprocess.PIPE)
    os.close(theirs)
    shown = b""
    try:
        while block := os.read(ours, 4096):
            shown += block
    except OSError:  # how Linux says that the other side is closed
        pass
    os.close(ours)
    errors = process.communicate(timeout=60)[1]
    assert (process.returncode, errors) == (0, b"INFO:torchstrategy:Tuned for cpu: freed memory is kept.\n")
    lines = [line.rsplit("\r", 1)[-1] for line in shown.decode().replace("\r\n", "\n").split("\n")]
    assert re.match(r"Epoch 1/2: 100%.* 3/3 \[.*loss=\d\.\d{4}\]", lines[0])
    assert re.match(r"Epoch 2/2: 100%.* 3/3 \[.*loss=\d\.\d{4}\]", lines[1])
    assert lines[2:] == [""]


def test_the_callbacks_of_interrupted_fits_are_closed(tmp_path):
    def fail(epoch, logs):
        raise ArithmeticError("mine")

    board = TensorBoard(tmp_path, update_freq=1, profile_batch=(1, 100))
    with pytest.raises(ArithmeticError, match="mine"):
        train([], [board, LambdaCallback(on_epoch_begin=fail)])
    assert Path(tmp_path).exists()
    assert not ts.summary.should_record_summaries()
    history, _, _ = train([], [board], epochs=1)
    assert len(history["loss"]) == 1


class Interrupt(Callback):
    """Ends the program after some batches, of all epochs together."""

    def __init__(self, after):
        super().__init__()
        self.left = after

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def everything(folder):
    decay = functools.partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 0.98**step)
    return [
        CSVLogger(folder / "log.csv"),
        EarlyStopping("loss", patience=2, min_delta=0.05, restore_best_weights=True),
        ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=0.2, cooldown=1),
        LearningRateScheduler(lambda epoch, lr: lr * 0.9),
        TorchLRScheduler(decay, interval="step"),
        TensorBoard(folder, write_graph=False, update_freq=2),
    ]


@pytest.mark.parametrize("devices", LAYOUTS[:2])
def test_interrupted_trainings_go_on_as_the_unbroken_one(devices, tmp_path):
    (tmp_path / "unbroken").mkdir()
    expected = train(devices, everything(tmp_path / "unbroken"), epochs=20, optimizer="torch")
    num_batches = 3 * len(expected[0]["loss"])
    assert 9 < num_batches < 60  # it was stopped early
    for after in range(2, num_batches, 5):
        folder = tmp_path / str(after)
        folder.mkdir()

        def callbacks(*last, folder=folder):
            backup = ts.callbacks.BackupAndRestore(folder / "backup", save_freq=2)
            return [backup, *everything(folder), *last]

        with pytest.raises(KeyboardInterrupt):
            train(devices, callbacks(Interrupt(after)), epochs=20, optimizer="torch")
        result = train(devices, callbacks(), epochs=20, optimizer="torch")
        # The sums of metrics of several replicas go on from their total, in another order of additions.
        assert_equal(result, expected, rtol=1e-14 if devices else 0)
        assert torch.equal(result[1][0], expected[1][0])
        rows, right = (
            np.loadtxt(path / "log.csv", delimiter=",", skiprows=1) for path in (folder, tmp_path / "unbroken")
        )
        np.testing.assert_allclose(rows, right, rtol=1e-14 if devices else 0)
        assert learning_rates(result[2]) == learning_rates(expected[2])


def fit_in_process(folder):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        model = make_model(ts.MirroredStrategy())
        x, y = data()
        board, log = TensorBoard(f"{folder}/board", update_freq=2), CSVLogger(f"{folder}/log.csv")
        history = model.fit(x, y, batch_size=4, epochs=2, shuffle=False, callbacks=[board, log], validation_data=(x, y))
        x[5] = math.nan
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*nan.*")
            stopped = model.fit(x, y, batch_size=4, epochs=3, callbacks=[TerminateOnNaN()], shuffle=False, verbose=0)
    return history.history, len(stopped.epoch), printed.getvalue()


def test_processes_print_and_write_once(process_pool, tmp_path):
    (first, num_epochs, printed), second = process_pool(2).run(fit_in_process, str(tmp_path))
    assert second == (first, num_epochs, "")
    assert num_epochs == 1
    lines = printed.splitlines()
    assert lines[0] == "Epoch 1/2"
    assert [line.split(" - ")[0] for line in lines[1:4]] == ["3/3", "Epoch 2/2", "3/3"]
    assert lines[4:] == ["Batch 1: the loss is nan, the training ends."]
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 3
    assert len(list((tmp_path / "board" / "train").iterdir())) == 1
    read = EventAccumulator(str(tmp_path / "board" / "train")).Reload()
    logs = Logs()
    x, y = data()
    make_model(strategy_for([])).fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0, callbacks=[logs])
    expected = [(step, pytest.approx(logs.train[step - 1]["loss"])) for step in (2, 4, 6)]
    assert [(event.step, event.value) for event in read.Scalars("batch_loss")] == expected
