"""Asynchronous saves: values of the moment of the call, and a failure that is told and never counts."""

import os
import signal
import threading

import numpy as np
import pytest
import torch

import torchstrategy as ts
from torchstrategy.checkpoint import background
from torchstrategy.checkpoint import checkpoint as checkpoints
from torchstrategy.testing.faults import file_fault

ASYNC = ts.train.CheckpointOptions(enable_async=True)


class Gate:
    """Lets the writing thread wait until it is opened."""

    def __init__(self, patch):
        self.opened, self.reached, self.num_at_once, self.most = threading.Event(), threading.Event(), 0, 0
        write = checkpoints.write_checkpoint

        def wait(*args):
            self.num_at_once += 1
            self.most = max(self.most, self.num_at_once)
            self.reached.set()
            assert self.opened.wait(60)
            write(*args)
            self.num_at_once -= 1

        patch.setattr(checkpoints, "write_checkpoint", wait)


@pytest.fixture
def gate(monkeypatch):
    gate = Gate(monkeypatch)
    yield gate
    gate.opened.set()


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(300, 300, bias=False)
        self.second = torch.nn.Linear(300, 300, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("part", torch.arange(1000.0)[10:20:2])
        self.register_buffer("complex", torch.tensor([1 + 2j]).conj())


@pytest.mark.parametrize("strategy", [None, ["cpu:0"], ["cpu:0", "cpu:1"]], ids=str)
def test_values_of_the_moment(tmp_path, gate, strategy):
    strategy = ts.get_strategy() if strategy is None else ts.MirroredStrategy(strategy)
    with strategy.scope():
        model = Tied()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step = ts.Variable(0)
    numbers = torch.arange(5)
    checkpoint = ts.train.Checkpoint(model=model, optimizer=optimizer, step=step, numbers=numbers)

    def train():
        optimizer.zero_grad()
        model.first(torch.ones(2, 300)).sum().backward()
        optimizer.step()
        step.assign_add(1)

    strategy.run(train)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    momentum = optimizer.state_dict()["state"][0]["momentum_buffer"].clone()
    path = checkpoint.save(tmp_path / "ckpt", ASYNC)
    assert gate.reached.wait(60)
    strategy.run(train)  # in place, while the file is written
    with torch.no_grad():
        numbers.add_(7)
        model.part.zero_()
    gate.opened.set()
    checkpoint.sync()
    reader = ts.train.load_checkpoint(path)
    for name, value in expected.items():
        assert torch.equal(reader.get_tensor(f"model.{name}"), value), name
    assert torch.equal(reader.get_tensor("optimizer.state.0.momentum_buffer"), momentum)
    assert (int(reader.get_tensor("step")), reader.get_tensor("numbers").tolist()) == (1, [0, 1, 2, 3, 4])
    assert os.path.getsize(path + ".pt") < 3 * 300 * 300 * 4  # tied weights once, the buffer's part alone


def test_the_next_save_is_of_its_own_moment(tmp_path):
    value = torch.zeros(1000)
    manager = ts.train.CheckpointManager(ts.train.Checkpoint(value=value), tmp_path, 3)
    paths = []
    for number in range(5):  # into the memory of the one before
        value.fill_(number)
        paths.append(manager.save(options=ASYNC))
    value.fill_(99)
    manager.sync()
    assert [os.path.basename(path) for path in manager.checkpoints] == ["ckpt-3", "ckpt-4", "ckpt-5"]
    for number, path in list(enumerate(paths))[2:]:
        assert torch.equal(ts.train.load_variable(path, "value"), torch.full((1000,), float(number)))
    assert manager.restore_or_initialize() == paths[-1]
    assert value[0] == 4


def test_one_at_a_time(tmp_path, gate):
    value = torch.zeros(3)
    checkpoint = ts.train.Checkpoint(value=value)
    checkpoint.save(tmp_path / "ckpt", ASYNC)
    timer = threading.Timer(0.2, gate.opened.set)
    timer.start()
    for _ in range(4):
        path = checkpoint.save(tmp_path / "ckpt", ASYNC)
    checkpoint.restore(path)  # waits, too
    assert checkpoint.save_counter == 5
    assert gate.most == 1
    timer.join()


def save_to_full_disk(folder, manager):
    with file_fault("full", 1, folder):
        manager.save(options=ASYNC)
        if manager.checkpoint._background._write is not None:  # of the chief
            manager.checkpoint._background._write._future.exception()


@pytest.mark.parametrize("where", ["run", "save", "sync", "restore_or_initialize"])
def test_a_failure_is_told_once_and_does_not_count(tmp_path, where):
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        value = ts.Variable(1.0)
    manager = ts.train.CheckpointManager(ts.train.Checkpoint(value=value), tmp_path, 2)
    first = manager.save(options=ASYNC)
    manager.sync()
    value.assign(2.0)
    save_to_full_disk(tmp_path, manager)
    act = {
        "run": lambda: strategy.run(lambda: None),
        "save": manager.save,
        "sync": manager.sync,
        "restore_or_initialize": manager.restore_or_initialize,
    }[where]
    with pytest.raises((OSError, RuntimeError), match="No space left on device"):
        act()
    assert ts.train.latest_checkpoint(tmp_path) == first
    strategy.run(lambda: None)
    manager.sync()
    assert manager.checkpoints == [first]
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", "ckpt-1.pt"]
    assert manager.save() == str(tmp_path / "ckpt-2")  # the number of the one that failed
    value.assign(0.0)
    manager.restore_or_initialize()
    assert value.numpy() == 2.0


def save_from_two(folder):
    strategy = ts.MirroredStrategy()
    with strategy.scope():
        value = ts.Variable(1.0)
        total = ts.Variable(
            1.0, synchronization=ts.VariableSynchronization.ON_READ, aggregation=ts.VariableAggregation.SUM
        )
    manager = ts.train.CheckpointManager(ts.train.Checkpoint(value=value, total=total), folder, 2)
    path = manager.save(options=ASYNC)
    value.assign(5.0)
    manager.sync()
    saved = [float(ts.train.load_variable(path, name)) for name in ("value", "total")]
    save_to_full_disk(folder, manager)
    with pytest.raises(RuntimeError) as raised:
        manager.sync()
    again = manager.save()
    return saved, str(raised.value), os.path.basename(again), float(ts.train.load_variable(again, "value"))


def test_a_failure_of_the_chief_is_told_on_every_rank(process_pool, tmp_path):
    for saved, message, again, value in process_pool(2).run(save_from_two, str(tmp_path)):
        assert saved == [1.0, 2.0]
        assert message.startswith("Rank 0 could not write the checkpoint")
        assert "No space left on device" in message
        assert (again, value) == ("ckpt-2", 5.0)


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_failure_is_told_at_the_end_of_a_program_that_does_not_ask(tmp_path, monkeypatch, caplog, is_asked):
    registered = []
    monkeypatch.setattr(background.atexit, "register", lambda *call: registered.append(call))
    checkpoint = ts.train.Checkpoint(value=torch.ones(1))
    with file_fault("full", at=2, folder=tmp_path):
        checkpoint.save(tmp_path / "ckpt", ASYNC)
        checkpoint._background._threads.shutdown()  # as a program's end does
    if is_asked:
        with pytest.raises(OSError, match="No space left"):
            checkpoint.sync()
    ((tell, *arguments),) = registered
    tell(*arguments)
    assert ("ckpt-1, which was saved a while ago, could not be written: OSError" in caplog.text) != is_asked
    if not is_asked:  # else the next test's `run` would raise it
        with pytest.raises(OSError, match="No space left"):
            checkpoint.sync()


def test_other_options(tmp_path):
    checkpoint = ts.train.Checkpoint(value=torch.zeros(1))
    with pytest.raises(ValueError, match=r"options must be None or ts.train.CheckpointOptions\(\.\.\.\)"):
        checkpoint.save(tmp_path / "ckpt", {"enable_async": True})
    checkpoint.save(tmp_path / "ckpt", ts.train.CheckpointOptions())
    assert checkpoint.save_counter == 1


def test_memory_that_is_not_torchs(tmp_path):
    """Parts of one NumPy array, and a file that the program has mapped."""
    array = np.arange(10.0)
    mapped = torch.from_file(str(tmp_path / "mapped"), shared=True, size=1 << 20, dtype=torch.float32)
    parts = {"part": torch.from_numpy(array[:3]), "whole": torch.from_numpy(array), "end": torch.from_numpy(array[7:])}
    checkpoint = ts.train.Checkpoint(mapped=mapped, **parts)
    path = checkpoint.save(tmp_path / "ckpt", ASYNC)
    array += 100
    mapped.fill_(7)
    checkpoint.sync()
    reader = ts.train.load_checkpoint(path)
    assert reader.get_tensor("whole").tolist() == list(range(10))
    assert reader.get_tensor("part").tolist() == [0, 1, 2]
    assert reader.get_tensor("end").tolist() == [7, 8, 9]
    assert reader.get_tensor("mapped").sum() == 0


def test_a_forked_process_does_not_wait(tmp_path, gate):
    checkpoint = ts.train.Checkpoint(value=torch.ones(3))
    gate.opened.set()
    first = checkpoint.write(tmp_path / "first")
    gate.opened.clear()
    checkpoint.save(tmp_path / "ckpt", ASYNC)
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        checkpoint.restore(first)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    gate.opened.set()
    checkpoint.sync()


@pytest.mark.parametrize("strategy", [None, ["cpu:0", "cpu:1"]], ids=str)
def test_a_failure_is_told_by_run_of_any_strategy(tmp_path, strategy):
    strategy = ts.get_strategy() if strategy is None else ts.MirroredStrategy(strategy)
    manager = ts.train.CheckpointManager(ts.train.Checkpoint(value=torch.ones(3)), tmp_path, 2)
    save_to_full_disk(tmp_path, manager)
    with pytest.raises(RuntimeError, match="which was saved a while ago, could not be written: OSError"):
        strategy.run(lambda: None)
    manager.sync()


def begin_where_one_cannot(folder):
    strategy = ts.MirroredStrategy()
    with strategy.scope():
        value = ts.Variable(1.0)
    checkpoint = ts.train.Checkpoint(value=value)
    own = os.path.join(folder, str(strategy.workers.rank), "ckpt")
    start = checkpoint._background.start
    if strategy.workers.rank == 1:
        checkpoint._background.start = lambda *args: start(*args[:1], {"value": lambda: 0}, lambda _: 1 / 0) or 1 / 0
    with pytest.raises(RuntimeError, match=r"Rank 1 could not write .*ZeroDivisionError"):
        checkpoint.save(own, ASYNC)
    checkpoint._background.start = start
    value.assign(2.0)
    path = checkpoint.save(own, ASYNC)
    checkpoint.sync()
    return float(ts.train.load_variable(path, "value")), checkpoint.save_counter


def test_one_rank_that_cannot_begin(process_pool, tmp_path):
    assert process_pool(2).run(begin_where_one_cannot, str(tmp_path)) == [(2.0, 1)] * 2


def test_the_number_of_a_failed_save_is_used_once(tmp_path):
    checkpoint = ts.train.Checkpoint(value=torch.ones(3))
    with file_fault("full", 1, tmp_path):
        checkpoint.save(tmp_path / "ckpt", ASYNC)
        checkpoint._background._write._future.exception()
    with pytest.raises(RuntimeError, match="could not be written"):
        ts.get_strategy().run(lambda: None)
    paths = [checkpoint.save(tmp_path / "ckpt") for _ in range(2)]
    assert [os.path.basename(path) for path in paths] == ["ckpt-1", "ckpt-2"]
