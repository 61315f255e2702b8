import json
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import torchstrategy as ts
from tests.fit.callbacks.loops import Model, fit
from torchstrategy.callbacks import CallbackList, TensorBoard
from torchstrategy.fit.callbacks.tensorboard import model_graph, parse_profile_batch
from torchstrategy.summary.writer import default_writer


def events(folder):
    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0}).Reload()


def scalars(folder):
    read = events(folder)
    return {tag: [(event.step, event.value) for event in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


LOGS = [{"loss": 2.0, "val_loss": 4.0}, {"loss": 1.0, "val_loss": 3.0}]


def test_epochs(tmp_path):
    fit(TensorBoard(tmp_path, write_graph=False), LOGS, model=Model(lr=0.25))
    assert scalars(tmp_path / "train") == {
        "epoch_loss": [(0, 2.0), (1, 1.0)],
        "epoch_learning_rate": [(0, 0.25), (1, 0.25)],
    }
    assert scalars(tmp_path / "validation") == {"epoch_loss": [(0, 4.0), (1, 3.0)]}
    assert default_writer() is None


def test_a_run_without_validation_has_no_folder_for_it(tmp_path):
    fit(TensorBoard(tmp_path, write_graph=False), [{"loss": 1.0}])
    assert [path.name for path in tmp_path.iterdir()] == ["train"]


@pytest.mark.parametrize(("update_freq", "steps"), [("batch", [1, 2, 3, 4, 5, 6]), (2, [2, 4, 6])])
def test_batches(tmp_path, update_freq, steps):
    board = TensorBoard(tmp_path, write_graph=False, update_freq=update_freq)
    assert board.log_interval == (1 if update_freq == "batch" else update_freq)
    fit(board, LOGS, steps=3)
    assert [step for step, _ in scalars(tmp_path / "train")["batch_loss"]] == steps


def test_executions_of_several_batches(tmp_path):
    board = TensorBoard(tmp_path, write_graph=False, update_freq=4)
    callbacks = CallbackList(board, Model(), {})
    callbacks.on_train_begin()
    callbacks.on_epoch_begin(0)
    for first in (0, 3, 6):
        callbacks.on_train_batch_begin(first)
        callbacks.on_train_batch_end(first + 2, {"loss": 1.0})
    callbacks.close()
    assert [step for step, _ in scalars(tmp_path / "train")["batch_loss"]] == [6, 9]


def test_counts_go_on_after_a_restore(tmp_path):
    every, _ = fit(TensorBoard(tmp_path / "a", write_graph=False), LOGS, steps=3)
    board = TensorBoard(tmp_path / "b", write_graph=False, update_freq=1)
    fit(board, [{"loss": 0.5}], steps=2, initial_epoch=2, state=every.state_dict())
    assert scalars(tmp_path / "b" / "train")["batch_loss"] == [(7, 0.5), (8, 0.5)]


def test_batches_that_come_again_after_a_restore_are_shown_once(tmp_path):
    board = TensorBoard(tmp_path, write_graph=False, update_freq=1)
    callbacks = CallbackList([board], model=Model())
    callbacks.on_train_begin()
    for batch, loss in enumerate([9.0, 8.0, 7.0]):
        callbacks.on_train_batch_begin(batch)
        callbacks.on_train_batch_end(batch, {"loss": loss})
        if batch == 0:
            state = callbacks.state_dict()
    callbacks.load_state_dict(state)
    callbacks.on_train_batch_begin(1)
    callbacks.on_train_batch_end(1, {"loss": 5.0})
    callbacks.on_train_end()
    assert scalars(tmp_path / "train")["batch_loss"] == [(1, 9.0), (2, 5.0)]


def test_summaries_of_steps_go_to_the_same_run(tmp_path):
    board = TensorBoard(tmp_path, write_graph=False, update_freq=2)
    model = Model()
    step = model.optimizer.step
    model.optimizer.step = lambda: (ts.summary.scalar("mine", 7.0), step())
    fit(board, [{"loss": 1.0}], model=model, steps=5)
    assert scalars(tmp_path / "train")["mine"] == [(2, 7.0), (4, 7.0)]


def test_a_failed_training_leaves_no_default_writer(tmp_path):
    board = TensorBoard(tmp_path, write_graph=False, update_freq=1)
    model = Model()

    def fail():
        raise ArithmeticError

    model.optimizer.step = fail
    with pytest.raises(ArithmeticError):
        fit(board, [{"loss": 1.0}], model=model)
    assert default_writer() is None


def test_steps_per_second(tmp_path):
    fit(TensorBoard(tmp_path, write_graph=False, write_steps_per_second=True, update_freq=1), LOGS)
    read = scalars(tmp_path / "train")
    assert all(value > 0 for _, value in read["epoch_steps_per_second"])
    assert len(read["batch_steps_per_second"]) == 4


def test_evaluations(tmp_path):
    model = Model()
    model.iterations = 17
    callbacks = CallbackList(TensorBoard(tmp_path), model, {}, add_history=False)
    callbacks.on_test_begin()
    callbacks.on_test_end({"loss": 0.5})
    callbacks.close()
    assert scalars(tmp_path / "validation") == {"evaluation_loss_vs_iterations": [(17, 0.5)]}


def test_histograms(tmp_path):
    model = Model()
    with torch.no_grad():
        model.bias.fill_(float("nan"))
    fit(TensorBoard(tmp_path, histogram_freq=2, write_graph=False), [{"loss": 1.0}] * 3, model=model)
    read = events(tmp_path / "train")
    assert [event.step for event in read.Histograms("weight/histogram")] == [0, 2]
    assert read.Histograms("weight/histogram")[0].histogram_value.sum == pytest.approx(model.weight.item())
    assert read.Histograms("bias/histogram")[0].histogram_value.num == 0


def test_values_that_are_no_scalars_are_left_out(tmp_path):
    fit(TensorBoard(tmp_path, write_graph=False), [{"loss": 1.0, "recalls": torch.ones(3), "s": "text"}])
    assert set(scalars(tmp_path / "train")) == {"epoch_loss", "epoch_learning_rate"}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())

    def forward(self, x):
        self.kept = x
        return self.inner(self.inner(x)) + x


class Branch(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


def test_graph():
    block = Block()
    graph, _ = model_graph(block)
    nodes = {node.name: (node.op, list(node.input)) for node in graph.node}
    assert nodes == {
        "x": ("Input", []),
        "inner/0": ("Linear", ["x"]),
        "inner/1": ("ReLU", ["inner/0"]),
        "inner/0_2": ("Linear", ["inner/1"]),
        "inner/1_2": ("ReLU", ["inner/0_2"]),
        "add": ("add", ["inner/1_2", "x"]),
        "output": ("Output", ["add"]),
    }
    assert not hasattr(block, "kept")
    assert model_graph(Branch()) is None


def test_the_graph_is_written(tmp_path):
    fit(TensorBoard(tmp_path), [{"loss": 1.0}])
    assert "linear" in [node.op for node in events(tmp_path / "train").Graph().node]


def test_profile(tmp_path):
    fit(TensorBoard(tmp_path, write_graph=False, profile_batch=(2, 3)), [{"loss": 1.0}] * 2, steps=3)
    (trace,) = Path(tmp_path / "train").glob("*.pt.trace.json")
    names = [event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]]
    assert sum(name.startswith("Optimizer.step") for name in names) == 2


def test_a_profile_of_a_training_that_ends_early(tmp_path):
    fit(TensorBoard(tmp_path, write_graph=False, profile_batch=(2, 300)), [{"loss": 1.0}], steps=3)
    assert len(list(Path(tmp_path / "train").glob("*.pt.trace.json"))) == 1


@pytest.mark.parametrize(
    ("given", "expected"), [(0, None), ("0", None), (3, (3, 3)), ((2, 5), (2, 5)), ([2, 2], (2, 2)), ("2,5", (2, 5))]
)
def test_profile_batch(given, expected):
    assert parse_profile_batch(given) == expected


@pytest.mark.parametrize("given", [-1, (5, 2), (1, 2, 3), "a", 1.5, None, (0, 3)])
def test_wrong_profile_batch(given):
    with pytest.raises(ValueError, match="profile_batch"):
        parse_profile_batch(given)


@pytest.mark.parametrize("given", [0, -1, "epochs", 1.5, True])
def test_wrong_update_freq(tmp_path, given):
    with pytest.raises(ValueError, match=r"update_freq=...\) must be 'epoch', 'batch' or a positive number of batches"):
        TensorBoard(tmp_path, update_freq=given)


def test_what_is_not_supported(tmp_path):
    with pytest.raises(ts.errors.UnimplementedError, match=r"TensorBoard\(write_images=...\) is not supported"):
        TensorBoard(tmp_path, write_images=True)
    with pytest.raises(ts.errors.UnimplementedError, match="embeddings_freq"):
        TensorBoard(tmp_path, embeddings_freq=1)


def test_only_the_chief_writes(tmp_path):
    board = TensorBoard(tmp_path, update_freq=1, histogram_freq=1, profile_batch=1)
    fit(board, LOGS, model=Model(is_chief=False))
    assert list(tmp_path.iterdir()) == []
