"""Keeping the last few checkpoints: tf's numbering, and what is deleted when."""

import json
import os

import pytest
import torch

import torchstrategy as ts


@pytest.fixture
def value():
    return torch.tensor(0)


@pytest.fixture
def checkpoint(value):
    return ts.train.Checkpoint(value=value)


@pytest.mark.parametrize("name", ["../victim", "{parent}/victim", "sub/victim", "..", ""])
def test_an_index_names_files_of_its_directory_only(tmp_path, name):
    folder, victim = tmp_path / "job", tmp_path / "victim.pt"
    folder.mkdir()
    victim.write_text("something else")
    written = {name.format(parent=tmp_path): 1.0, "ckpt-1": 2.0}
    (folder / "checkpoint").write_text(json.dumps({"latest": "ckpt-1", "written": written, "last_preserved": None}))
    with pytest.raises(ts.errors.DataLossError, match="is no checkpoint of its directory"):
        ts.train.CheckpointManager(ts.train.Checkpoint(step=torch.tensor(1)), folder, max_to_keep=1)
    with pytest.raises(ts.errors.DataLossError, match="is no checkpoint of its directory"):
        ts.train.latest_checkpoint(folder)
    assert victim.read_text() == "something else"


def names(paths):
    return [os.path.basename(path) for path in paths]


def files(directory):
    return sorted(os.listdir(directory))


def test_keeps_the_latest(checkpoint, tmp_path):
    manager = ts.train.CheckpointManager(checkpoint, tmp_path, max_to_keep=2)
    assert manager.latest_checkpoint is None
    assert manager.checkpoints == []
    assert names(manager.save() for _ in range(5)) == [f"ckpt-{i}" for i in range(1, 6)]
    assert manager.checkpoints == [str(tmp_path / "ckpt-4"), str(tmp_path / "ckpt-5")]
    assert manager.latest_checkpoint == ts.train.latest_checkpoint(tmp_path) == str(tmp_path / "ckpt-5")
    assert files(tmp_path) == ["checkpoint", "ckpt-4.pt", "ckpt-5.pt"]
    assert manager.directory == str(tmp_path)
    assert manager.checkpoint is checkpoint


def test_keeps_all(checkpoint, tmp_path):
    manager = ts.train.CheckpointManager(checkpoint, tmp_path / "new" / "folder", None, checkpoint_name="run")
    for _ in range(3):
        manager.save()
    assert files(tmp_path / "new" / "folder") == ["checkpoint", "run-1.pt", "run-2.pt", "run-3.pt"]


@pytest.mark.parametrize("max_to_keep", [0, -1])
def test_max_to_keep_must_be_positive(checkpoint, tmp_path, max_to_keep):
    with pytest.raises(ValueError, match="Expected a positive integer or None for max_to_keep"):
        ts.train.CheckpointManager(checkpoint, tmp_path, max_to_keep)


def test_takes_a_checkpoint(tmp_path):
    with pytest.raises(TypeError, match=r"ts.train.Checkpoint\(model=model\). Received a Linear"):
        ts.train.CheckpointManager(torch.nn.Linear(1, 1), tmp_path, max_to_keep=1)


def test_max_to_keep_is_required(checkpoint, tmp_path):
    with pytest.raises(TypeError, match="max_to_keep"):
        ts.train.CheckpointManager(checkpoint, tmp_path)


def test_interval(checkpoint, tmp_path):
    step = torch.tensor(0)
    manager = ts.train.CheckpointManager(checkpoint, tmp_path, None, step_counter=step, checkpoint_interval=3)
    assert manager.checkpoint_interval == 3
    saved = []
    for i in range(9):
        step.fill_(i)
        if manager.save() is not None:
            saved.append(i)
    assert saved == [0, 3, 6]
    assert manager.save(check_interval=False) is not None
    assert manager.save() is None

    again = ts.train.CheckpointManager(checkpoint, tmp_path, None, step_counter=step, checkpoint_interval=3)
    again.restore_or_initialize()
    assert again.save() is None  # no step was made since
    step.fill_(11)
    assert again.save() is not None


@pytest.mark.parametrize("kind", ["tensor", "variable", "on_read", "object"])
def test_what_counts_steps(checkpoint, tmp_path, kind):
    class Trainer:
        step = 0

        def __int__(self):
            return self.step

    strategy = ts.MirroredStrategy(devices=["cpu:0", "cpu:1"])
    on_read = {"synchronization": ts.VariableSynchronization.ON_READ, "aggregation": ts.VariableAggregation.SUM}
    with strategy.scope():
        make = {
            "tensor": lambda: torch.tensor(0),
            "variable": lambda: ts.Variable(0),
            "on_read": lambda: ts.Variable(0, **on_read),
            "object": Trainer,
        }
        counter = make[kind]()
    manager = ts.train.CheckpointManager(checkpoint, tmp_path, None, step_counter=counter, checkpoint_interval=4)

    def count():
        if kind == "object":
            counter.step += 2
        elif kind == "tensor":
            counter.add_(2)
        elif kind == "variable":
            counter.assign_add(2)
        else:
            strategy.run(lambda: counter.assign_add(torch.tensor(1)))

    saved = []
    for _ in range(5):
        saved.append(manager.save() is not None)
        count()
    assert saved == [True, False, True, False, True]


def test_a_number_counts_no_steps(checkpoint, tmp_path):
    with pytest.raises(TypeError, match="step_counter is the number 0, which stays what it is"):
        ts.train.CheckpointManager(checkpoint, tmp_path, None, step_counter=0, checkpoint_interval=3)


def test_options(checkpoint, tmp_path):
    manager = ts.train.CheckpointManager(checkpoint, tmp_path, None)
    manager.save(options=None)
    with pytest.raises(ValueError, match="options must be None or ts"):
        manager.save(options={})
    assert checkpoint.save_counter == 1


def test_interval_needs_a_counter(checkpoint, tmp_path):
    with pytest.raises(ValueError, match="checkpoint_interval needs a step_counter"):
        ts.train.CheckpointManager(checkpoint, tmp_path, 1, checkpoint_interval=2)


def test_given_number(checkpoint, tmp_path):
    manager = ts.train.CheckpointManager(checkpoint, tmp_path, None)
    assert names([manager.save(checkpoint_number=7), manager.save()]) == ["ckpt-7", "ckpt-2"]
    assert names(manager.checkpoints) == ["ckpt-7", "ckpt-2"]
    assert names([manager.save(checkpoint_number=torch.tensor(2))]) == ["ckpt-2"]
    assert names(manager.checkpoints) == ["ckpt-7", "ckpt-2"]


def test_reopened_manager_goes_on(value, tmp_path):
    manager = ts.train.CheckpointManager(ts.train.Checkpoint(value=value), tmp_path, 2)
    for i in range(3):
        value.fill_(i)
        manager.save()
    value.fill_(100)
    manager = ts.train.CheckpointManager(ts.train.Checkpoint(value=value), tmp_path, 2)
    assert names(manager.checkpoints) == ["ckpt-2", "ckpt-3"]
    assert manager.restore_or_initialize() == str(tmp_path / "ckpt-3")
    assert value == 2
    assert names([manager.save()]) == ["ckpt-4"]
    assert files(tmp_path) == ["checkpoint", "ckpt-3.pt", "ckpt-4.pt"]


def test_reopened_manager_without_restoring_numbers_anew(value, tmp_path):
    manager = ts.train.CheckpointManager(ts.train.Checkpoint(value=value), tmp_path, None)
    manager.save()
    manager.save()
    manager = ts.train.CheckpointManager(ts.train.Checkpoint(value=value), tmp_path, None)
    assert names([manager.save()]) == ["ckpt-1"]
    assert names(manager.checkpoints) == ["ckpt-2", "ckpt-1"]


def test_knows_what_save_wrote_without_a_manager(checkpoint, tmp_path):
    checkpoint.save(tmp_path / "ckpt")
    manager = ts.train.CheckpointManager(checkpoint, tmp_path, 1)
    assert names(manager.checkpoints) == ["ckpt-1"]
    manager.save()
    assert files(tmp_path) == ["checkpoint", "ckpt-2.pt"]


def test_files_that_are_gone_are_not_listed(checkpoint, tmp_path):
    manager = ts.train.CheckpointManager(checkpoint, tmp_path, None)
    manager.save()
    manager.save()
    os.unlink(tmp_path / "ckpt-2.pt")
    assert names(ts.train.CheckpointManager(checkpoint, tmp_path, None).checkpoints) == ["ckpt-1"]


def test_a_latest_checkpoint_that_is_gone_leaves_the_one_before_and_is_said_once(checkpoint, tmp_path, caplog):
    manager = ts.train.CheckpointManager(checkpoint, tmp_path, None)
    first = manager.save()
    os.unlink(manager.save() + ".pt")
    assert [ts.train.latest_checkpoint(tmp_path) for _ in range(2)] == [first, first]
    (line,) = caplog.messages
    assert line.endswith("names ckpt-2, which is gone. The latest checkpoint that is there is ckpt-1.")
    os.unlink(first + ".pt")
    with pytest.raises(ts.errors.DataLossError, match="names ckpt-1, ckpt-2, but no checkpoint is in"):
        ts.train.latest_checkpoint(tmp_path)
    with pytest.raises(ts.errors.DataLossError, match=r"Put the files back\. To start without them, delete"):
        ts.train.CheckpointManager(checkpoint, tmp_path, None).restore_or_initialize()


def test_initialize(checkpoint, tmp_path):
    called = []
    manager = ts.train.CheckpointManager(checkpoint, tmp_path, 1, init_fn=lambda: called.append(1))
    assert manager.restore_or_initialize() is None
    assert called == [1]
    manager.save()
    assert manager.restore_or_initialize() == str(tmp_path / "ckpt-1")
    assert called == [1]


def test_some_are_kept_for_good(checkpoint, tmp_path, monkeypatch):
    hours = iter(range(100))
    monkeypatch.setattr("time.time", lambda: next(hours) * 3600.0)
    manager = ts.train.CheckpointManager(checkpoint, tmp_path, 1, keep_checkpoint_every_n_hours=3)  # at hour 0
    for _ in range(8):  # at hours 1, 2, ...
        manager.save()
    assert names(manager.checkpoints) == ["ckpt-8"]
    assert files(tmp_path) == ["checkpoint", "ckpt-3.pt", "ckpt-6.pt", "ckpt-8.pt"]


def test_a_failed_save_changes_nothing(checkpoint, tmp_path):
    manager = ts.train.CheckpointManager(checkpoint, tmp_path, 1)
    manager.save()
    checkpoint.broken = Broken()
    with pytest.raises(OSError, match="no state"):
        manager.save()
    assert names(manager.checkpoints) == ["ckpt-1"]
    assert files(tmp_path) == ["checkpoint", "ckpt-1.pt"]
    assert checkpoint.save_counter == 1


class Broken:
    def state_dict(self):
        raise OSError("no state")

    def load_state_dict(self, state):
        raise OSError("no state")


def test_managers_with_one_directory_are_told(tmp_path, caplog):
    checkpoint = ts.train.Checkpoint(step=torch.tensor(0))
    usual, best = (
        ts.train.CheckpointManager(checkpoint, tmp_path, 2, checkpoint_name=name) for name in ("ckpt", "best")
    )
    usual.save()
    usual.save()
    assert not caplog.records
    for manager in (best, usual, best):
        manager.save()
    (record,) = caplog.records
    assert record.getMessage().startswith(
        f"Checkpoints best-... and ckpt-... are saved to one directory, {tmp_path}, whose"
    )
