"""SidecarEvaluator: evaluates the checkpoints of a training that runs beside it, each once, until the last."""

import logging
import os
import threading
import time

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import torchstrategy as ts
from torchstrategy.callbacks import Callback, LambdaCallback, ModelCheckpoint, TensorBoard
from torchstrategy.fit import sidecar

X = torch.arange(12.0).reshape(6, 2) / 10
Y = X.sum(1, keepdim=True)


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(sidecar, "_POLL_S", 0.01)


def make_model(devices=None):
    with (ts.MirroredStrategy(devices) if devices else ts.get_strategy()).scope():
        torch.manual_seed(0)
        model = ts.Model(nn.Linear(2, 1))
        model.compile("sgd", "mse", metrics=["mae"])
    return model


def train(folder, epochs=3, name="ckpt-{epoch}", callbacks=()):
    save = ModelCheckpoint(os.path.join(folder, name), save_weights_only=True)
    arguments = {"validation_data": (X, Y), "shuffle": False, "verbose": 0}  # the validation is what evaluators find
    return make_model().fit(X, Y, 2, epochs, callbacks=[save, *callbacks], **arguments).history


class Noting(Callback):
    """Notes the results of evaluations, and the step that the model was trained for."""

    def __init__(self):
        super().__init__()
        self.losses, self.steps = [], []

    def on_test_end(self, logs=None):
        self.losses.append(logs["loss"])
        self.steps.append(self.model.iterations)


def evaluate(folder, *callbacks, data=(X, Y), devices=None, **kwargs):
    noting = Noting()
    ts.SidecarEvaluator(make_model(devices), data, folder, callbacks=[noting, *callbacks], **kwargs).start()
    return noting


@pytest.mark.parametrize("devices", [None, ["cpu:0", "cpu:1"]])
def test_the_last_checkpoint_of_a_training_that_is_done(tmp_path, devices):
    history = train(tmp_path)
    noting = evaluate(tmp_path, devices=devices)
    assert noting.losses == [pytest.approx(history["val_loss"][-1])]
    assert noting.steps == [9]


def test_every_checkpoint_beside_the_training(tmp_path):
    """The training waits for the evaluator, so that none is passed over."""
    noting = Noting()
    waiting = LambdaCallback(on_epoch_end=lambda epoch, logs: wait_for(lambda: len(noting.losses) > epoch))
    histories = []
    thread = threading.Thread(target=lambda: histories.append(train(tmp_path, callbacks=[waiting])))
    thread.start()
    ts.SidecarEvaluator(make_model(), (X, Y), tmp_path, callbacks=[noting]).start()
    thread.join()
    assert noting.losses == pytest.approx(histories[0]["val_loss"])
    assert noting.steps == [3, 6, 9]


def wait_for(condition, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_name_that_is_used_again_is_another_checkpoint(tmp_path):
    noting = Noting()
    waiting = LambdaCallback(on_epoch_end=lambda epoch, logs: wait_for(lambda: len(noting.losses) > epoch))
    thread = threading.Thread(target=lambda: train(tmp_path, name="same", callbacks=[waiting]))
    thread.start()
    ts.SidecarEvaluator(make_model(), (X, Y), tmp_path, callbacks=[noting]).start()
    thread.join()
    assert noting.steps == [3, 6, 9]


def test_max_evaluations_is_the_number_of_the_last_checkpoint(tmp_path):
    train(tmp_path, epochs=3)
    os.unlink(tmp_path / "training_finished")
    assert len(evaluate(tmp_path, max_evaluations=3).losses) == 1
    assert len(evaluate(tmp_path, max_evaluations=2).losses) == 1


def test_max_evaluations_counts_where_there_are_no_numbers(tmp_path):
    train(tmp_path, epochs=1, name="weights-{loss:.3f}")
    os.unlink(tmp_path / "training_finished")
    assert len(evaluate(tmp_path, max_evaluations=1).losses) == 1


def test_checkpoints_of_a_manager(tmp_path):
    model = make_model()
    checkpoint = ts.train.Checkpoint(model=model, optimizer=model.optimizer)
    manager = ts.train.CheckpointManager(checkpoint, tmp_path, max_to_keep=1)
    nn.init.zeros_(model.module.weight)
    nn.init.zeros_(model.module.bias)
    manager.save()
    assert evaluate(tmp_path, max_evaluations=1).losses == pytest.approx([float(Y.square().mean())])


def test_a_checkpoint_that_is_deleted_under_it(tmp_path, monkeypatch, caplog):
    """The training deletes old checkpoints while the evaluator reads the one that was the latest."""
    train(tmp_path, epochs=1)
    load, deleted = ts.Model.load_weights, []

    def load_too_late(self, path, strict=True):
        if not deleted:
            deleted.append(path)
            train(tmp_path, epochs=2)
            os.unlink(f"{path}.pt")
        load(self, path, strict=strict)

    monkeypatch.setattr(ts.Model, "load_weights", load_too_late)
    monkeypatch.setattr(logging.getLogger("torchstrategy"), "propagate", True)
    with caplog.at_level(logging.INFO, "torchstrategy"):
        noting = evaluate(tmp_path)
    assert noting.steps == [6]
    assert f"{deleted[0]} was deleted before it could be read" in caplog.text


def test_a_checkpoint_that_does_not_fit(tmp_path):
    with ts.get_strategy().scope():
        other = ts.Model(nn.Linear(3, 1))
    other.save_weights(tmp_path / "ckpt-1")
    with pytest.raises(ValueError, match="shapes differ"):
        evaluate(tmp_path)


def test_it_says_that_it_waits(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(sidecar, "_PROGRESS_S", 0.05)
    monkeypatch.setattr(logging.getLogger("torchstrategy"), "propagate", True)
    timer = threading.Timer(0.4, lambda: train(tmp_path, epochs=1))
    with caplog.at_level(logging.INFO, "torchstrategy"):
        timer.start()
        evaluate(tmp_path)
        timer.join()
    assert f"no new checkpoint in {tmp_path} for 0 s" in caplog.text
    assert "ckpt-1: loss=" in caplog.text


def test_tensorboard_over_the_training_steps(tmp_path):
    train(tmp_path / "ckpt")
    evaluate(tmp_path / "ckpt", TensorBoard(tmp_path / "logs"))
    (folder,) = {os.path.dirname(path) for path in map(str, (tmp_path / "logs").rglob("events*"))}
    events = EventAccumulator(folder)
    events.Reload()
    (tag,) = [tag for tag in events.Tags()["scalars"] + events.Tags()["tensors"] if "evaluation_loss" in tag]
    found = events.Scalars(tag) if tag in events.Tags()["scalars"] else events.Tensors(tag)
    assert [event.step for event in found] == [9]


def test_data_as_evaluate_takes_it(tmp_path):
    train(tmp_path)
    weighted = evaluate(tmp_path, data=(X, Y, torch.ones(6))).losses
    dataset = evaluate(tmp_path, data=ts.data.Dataset.from_tensor_slices((X, Y)).batch(4)).losses
    assert weighted == pytest.approx(dataset)
    assert weighted == pytest.approx(evaluate(tmp_path).losses)
    assert evaluate(tmp_path, data=ts.data.Dataset.from_tensor_slices((X, Y)).batch(4), steps=1).losses != dataset


def test_bad_arguments():
    with pytest.raises(RuntimeError, match="compile"):
        ts.SidecarEvaluator(ts.Model(nn.Linear(1, 1)), (X, Y), "folder")
    with pytest.raises(ValueError, match="max_evaluations"):
        ts.SidecarEvaluator(make_model(), (X, Y), "folder", max_evaluations=0)


def train_or_evaluate(folder, task):
    """What the tasks of a job run: one program."""
    if task == "evaluator":
        return evaluate(folder).steps
    return train(folder, epochs=5)["val_loss"]


def test_a_job_with_an_evaluator(process_pool, tmp_path):
    """A training in one process and its evaluator in this one."""
    pool = process_pool(1)
    results = []
    thread = threading.Thread(target=lambda: results.extend(pool.run(train_or_evaluate, str(tmp_path), "worker")))
    thread.start()
    steps = train_or_evaluate(str(tmp_path), "evaluator")
    thread.join()
    assert len(results[0]) == 5
    assert steps == sorted(set(steps))
    assert steps[-1] == 15
