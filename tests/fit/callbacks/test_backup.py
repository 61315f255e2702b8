"""BackupAndRestore: a run that is killed, and started again, ends with exactly what one that is not ends with."""

import contextlib
import functools
import os
import random
import signal

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchstrategy as ts
from tests.fit.callbacks.interrupted import EPOCHS, STEPS, data, make_model, train
from torchstrategy.callbacks import BackupAndRestore, Callback, LambdaCallback

ONE, TWO = ["cpu:0"], ["cpu:0", "cpu:1"]


class Interruption(Exception):
    pass


@pytest.fixture(scope="module")
def process_pool():
    """Pools of this module's own: their processes are killed."""
    with contextlib.ExitStack() as stack:
        yield functools.cache(lambda size: stack.enter_context(ts.testing.ProcessPool(size)))


def run_until_done(pool, folder, *args, **kwargs):
    """Run the training again and again until it ends; return what it ends with, and how many runs it took."""
    folder.mkdir(exist_ok=True)
    for number in range(1, 20):
        outcomes = pool.outcomes(train, str(folder), *args, **kwargs)
        if all(outcome.error is None for outcome in outcomes):
            return [outcome.value for outcome in outcomes], number
    pytest.fail(f"It never ended: {outcomes[0].traceback}")


@pytest.fixture(scope="module")
def unbroken(process_pool, tmp_path_factory):
    """What a training ends with that is not interrupted."""

    @functools.cache
    def run(size, devices, save_freq):
        folder = tmp_path_factory.mktemp("unbroken")
        results, num_runs = run_until_done(process_pool(size), folder, devices and list(devices), save_freq)
        assert num_runs == 1
        return results

    return run


KILLS = [{"step": 3}, {"step": 6}, {"step": STEPS}, {"epoch": 1}, {"write": 2}]
QUICK = [(TWO, 3, {"step": STEPS + 3})]


@pytest.mark.end_to_end
@pytest.mark.parametrize(("devices", "save_freq", "kill"), QUICK)
def test_killed_and_started_again(process_pool, unbroken, tmp_path, devices, save_freq, kill):
    check_killed(process_pool, unbroken, tmp_path, devices, save_freq, kill)


@pytest.mark.slow
@pytest.mark.parametrize("kill", KILLS)
@pytest.mark.parametrize(("devices", "save_freq"), [(ONE, "epoch"), (TWO, "epoch"), (TWO, 1), (TWO, 3)])
def test_killed_anywhere(process_pool, unbroken, tmp_path, devices, save_freq, kill):
    check_killed(process_pool, unbroken, tmp_path, devices, save_freq, kill)


def check_killed(process_pool, unbroken, tmp_path, devices, save_freq, kill):
    broken, num_runs = run_until_done(process_pool(1), tmp_path / "broken", devices, save_freq, kill)
    assert num_runs == 2
    assert broken == unbroken(1, tuple(devices), save_freq)
    (result,) = broken
    assert result["epoch"] == [0, 1, 2, 3]
    assert result["iterations"] == EPOCHS * STEPS
    assert sorted(os.listdir(tmp_path / "broken" / "backup"))[0].startswith("backup-")
    assert len(os.listdir(tmp_path / "broken" / "backup")) <= 3  # two backups and the index: no partial file is left


@pytest.mark.end_to_end
@pytest.mark.parametrize(
    ("kill", "save_freq"),
    [({"step": 7, "rank": 1}, 3), pytest.param({"epoch": 1, "rank": 0}, "epoch", marks=pytest.mark.slow)],
)
def test_one_of_two_processes_is_killed(process_pool, unbroken, tmp_path, kill, save_freq):
    broken, num_runs = run_until_done(process_pool(2), tmp_path / "broken", None, save_freq, kill)
    assert num_runs == 2
    assert broken == unbroken(2, None, save_freq)
    assert broken[0] == broken[1]


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [{"gradient_accumulation_steps": 2}, {"steps_per_execution": 3}, {"amp": "bf16"}])
def test_other_ways_to_step(process_pool, tmp_path, compiled):
    unbroken, _ = run_until_done(process_pool(1), tmp_path / "unbroken", TWO, 2, compiled=compiled)
    broken, num_runs = run_until_done(process_pool(1), tmp_path / "broken", TWO, 2, {"epoch": 1}, compiled=compiled)
    assert num_runs == 2
    assert broken == unbroken


class UnknownLength:
    """Batches that don't say how many they are: an epoch's last one is not known to be it."""

    def __iter__(self):
        x, y = data()
        return ((x[rows], y[rows]) for rows in torch.randperm(22).split(6))


def train_from(folder, kind, kill=None):
    x, y = data()
    devices = TWO
    if kind == "loader":
        options = {"x": DataLoader(TensorDataset(x, y), 6, shuffle=True), "y": None, "batch_size": None}
    elif kind == "pipeline":
        options = {"x": ts.data.Dataset.from_tensor_slices((x, y)).shuffle(22).batch(6), "y": None, "batch_size": None}
    elif kind == "unknown":
        devices, options = None, {"x": UnknownLength(), "y": None, "batch_size": None}
    else:
        endless = ts.data.Dataset.from_tensor_slices((x, y)).shuffle(22).repeat().batch(6)
        options = {"x": endless, "y": None, "batch_size": None, "steps_per_epoch": 5}
    return train(folder, devices, 2, kill, options)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "size"), [("loader", 1), ("pipeline", 1), ("endless", 1), ("unknown", 2)])
def test_other_kinds_of_data(process_pool, tmp_path, kind, size):
    results = []
    for name, kills in (("unbroken", [None]), ("broken", [{"step": 7}, {"step": 8}, {"epoch": 2}])):
        (tmp_path / name).mkdir()
        for kill in kills:
            outcomes = process_pool(size).outcomes(train_from, str(tmp_path / name), kind, kill)
            assert (kill is None) == (outcomes[0].error is None), outcomes[0].traceback
        if kills != [None]:
            outcomes = process_pool(size).outcomes(train_from, str(tmp_path / name), kind)
        results.append([outcome.value or outcome.traceback for outcome in outcomes])
    assert results[0] == results[1]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("size", "devices"), [(1, TWO), (2, None)])
def test_killed_at_random_times(process_pool, unbroken, tmp_path, size, devices):
    """Also while it restores, writes or deletes files, and several times in one training."""
    expected = unbroken(size, devices and tuple(devices), 1)
    seed = random.randrange(10**6)
    print(f"{seed=}")
    generator = random.Random(seed)
    for number in range(6):
        folder = tmp_path / f"broken-{number}"
        folder.mkdir()
        for _ in range(3):
            process_pool(size).outcomes(train, str(folder), devices, 1, {"after": generator.uniform(0.1, 2.0)})
        broken, _ = run_until_done(process_pool(size), folder, devices, 1)
        assert broken == expected


# ------------------------------------------------------------------------------------------------- in this process


def fit(folder, *callbacks, model=None, epochs=3, batch_size=6, num_examples=22, **kwargs):
    strategy = kwargs.pop("strategy", None) or ts.get_strategy()
    torch.manual_seed(0)
    model = make_model(strategy) if model is None else model
    x, y = data()
    backup = kwargs.pop("backup", None) or BackupAndRestore(folder, delete_checkpoint=False)
    history = model.fit(
        x[:num_examples], y[:num_examples], batch_size, epochs, 0, [*callbacks, backup], **{"shuffle": False, **kwargs}
    )
    return model, history


def stop_at(step):
    def interrupt(batch, logs):
        if callback.model.iterations == step:
            raise Interruption

    callback = LambdaCallback(on_train_batch_end=interrupt)
    return callback


def test_finished_training_returns_the_history_at_once(tmp_path):
    model, history = fit(tmp_path)
    called = []
    again, same = fit(tmp_path, LambdaCallback(on_epoch_begin=lambda epoch, logs: called.append(epoch)))
    assert called == []
    assert same.history == history.history
    assert same.epoch == history.epoch == [0, 1, 2]
    assert again.iterations == model.iterations
    _, longer = fit(tmp_path, epochs=4)
    assert longer.epoch == [0, 1, 2, 3]
    assert longer.history["loss"][:3] == history.history["loss"]


def test_finished_training_that_saved_by_batches(tmp_path):
    _, history = fit(tmp_path, backup=BackupAndRestore(tmp_path, 5, delete_checkpoint=False))
    _, same = fit(tmp_path, backup=BackupAndRestore(tmp_path, 5, delete_checkpoint=False))
    assert same.history == history.history


def test_files_are_deleted_when_all_is_done(tmp_path):
    folder = tmp_path / "backup"
    there = []
    fit(
        folder,
        LambdaCallback(on_epoch_begin=lambda epoch, logs: there.append(folder.exists())),
        backup=BackupAndRestore(folder),
    )
    assert there == [False, True, True]
    assert not folder.exists()


def test_a_directory_for_two_fits_is_told(tmp_path, caplog):
    model, _ = fit(tmp_path / "kept")
    fit(tmp_path / "kept", model=model, epochs=4)  # it goes on
    fit(tmp_path, backup=BackupAndRestore(tmp_path / "one"))
    fit(tmp_path, backup=BackupAndRestore(tmp_path / "other"))
    assert not caplog.records
    fit(tmp_path, backup=BackupAndRestore(tmp_path / "one"))
    fit(tmp_path / "kept")  # with another model, as where folds are trained one after the other
    told = [record.getMessage() for record in caplog.records]
    assert f"had the same BackupAndRestore('{tmp_path}/one'). If the program is interrupted now" in told[0]
    assert f"had the same BackupAndRestore('{tmp_path}/kept'). This one, of another model, goes on from" in told[1]
    assert len(told) == 2


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"batch_size": 5}, "batch_size: 6 then, 5 now"),
        ({"num_examples": 20}, "num_examples: 22 then, 20 now"),
        ({"steps_per_epoch": 2}, "steps_per_epoch: None then, 2 now"),
    ],
)
def test_changed_arguments_are_refused(tmp_path, changed, message):
    with pytest.raises(Interruption):
        fit(tmp_path, stop_at(6))
    model = make_model(ts.get_strategy())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ts.errors.InvalidArgumentError, match=message):
        fit(tmp_path, model=model, **changed)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_changed_accumulation_is_refused(tmp_path):
    with pytest.raises(Interruption):
        fit(tmp_path, stop_at(6))
    with pytest.raises(ts.errors.InvalidArgumentError, match="gradient_accumulation_steps: 1 then, 2 now"):
        fit(tmp_path, model=make_model(ts.get_strategy(), gradient_accumulation_steps=2))


class Other(ts.Model):
    def __init__(self):
        super().__init__()
        self.other = nn.Linear(3, 1)

    def forward(self, x):
        return self.other(x)


def test_another_model_is_refused(tmp_path):
    with pytest.raises(Interruption):
        fit(tmp_path, stop_at(6))
    with pytest.raises(ValueError, match="parameter"):
        fit(tmp_path, model=make_model(ts.get_strategy(), model=Other))


def test_another_number_of_replicas_goes_on(tmp_path):
    with pytest.raises(Interruption):
        fit(tmp_path, stop_at(6))
    with pytest.raises(Interruption):
        fit(tmp_path, stop_at(10), strategy=ts.MirroredStrategy(TWO))
    _, history = fit(tmp_path, strategy=ts.MirroredStrategy([*TWO, "cpu:2"]))
    assert history.epoch == [0, 1, 2]


def test_a_directory_of_others_is_refused(tmp_path):
    ts.train.Checkpoint(step=torch.tensor(1)).save(str(tmp_path / "ckpt"))
    with pytest.raises(ValueError, match="holds other checkpoints, such as 'ckpt-1'"):
        fit(tmp_path)
    assert ts.train.latest_checkpoint(tmp_path) is not None


def test_two_saves_are_kept_and_partial_files_go(tmp_path):
    partial = tmp_path.joinpath(f".backup-7.pt.{'0' * 32}.tmp")
    partial.write_bytes(b"partial")
    os.utime(partial, (1e9, 1e9))  # one of another host, long ago
    fit(tmp_path, backup=BackupAndRestore(tmp_path, 2, delete_checkpoint=False))
    assert sorted(os.listdir(tmp_path)) == ["backup-5.pt", "backup-6.pt", "checkpoint"]


class Counting(Callback):
    """Has a state, and comes after BackupAndRestore in the list."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def on_train_batch_end(self, batch, logs=None):
        self.count += 1

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def test_states_of_callbacks_are_those_after_the_batch(tmp_path):
    backup, counting = BackupAndRestore(tmp_path, 5, delete_checkpoint=False), Counting()
    with pytest.raises(Interruption):
        fit(tmp_path, stop_at(7), backup, backup=counting)
    counting = Counting()
    backup = BackupAndRestore(tmp_path, 5, delete_checkpoint=False)
    fit(tmp_path, backup, backup=counting)
    assert counting.count == 12


def test_initial_epoch_is_that_of_the_interrupted_run(tmp_path):
    with pytest.raises(Interruption):
        fit(tmp_path, stop_at(6))
    _, history = fit(tmp_path)
    assert history.epoch == [0, 1, 2]
    assert {len(values) for values in history.history.values()} == {3}


def test_bad_save_freq():
    for save_freq in ("batch", 0, True, 1.5):
        with pytest.raises(ValueError, match="'epoch' or a positive number of batches"):
            BackupAndRestore("folder", save_freq)


# ------------------------------------------------------------------------------------------------------ preemption


def preempted(folder, step, *, workers=False):
    """Send SIGTERM to this process in a step; return how fit ended, or what it ended with."""
    before = signal.getsignal(signal.SIGTERM)
    strategy = ts.MultiWorkerMirroredStrategy() if workers else ts.get_strategy()
    sends = not workers or strategy.workers.rank == 1

    def send(batch, logs):
        if sends and callback.model.iterations == step:
            os.kill(os.getpid(), signal.SIGTERM)

    callback = LambdaCallback(on_train_batch_begin=send)
    backup = BackupAndRestore(folder, save_before_preemption=True, delete_checkpoint=False)
    try:
        model, history = fit(folder, callback, backup=backup, strategy=strategy)
    except SystemExit as error:
        return error.code, signal.getsignal(signal.SIGTERM) is before
    return model.iterations, history.epoch


def test_preemption_finishes_the_batch_and_saves(tmp_path):
    assert preempted(tmp_path, 5) == (143, True)
    assert ts.train.load_variable(tmp_path, "optimizer.state.0.step").item() == 6
    assert preempted(tmp_path, None) == (12, [0, 1, 2])


def test_preemption_of_one_process_ends_all(process_pool, tmp_path):
    first, second = process_pool(2).run(preempted, str(tmp_path), 5, workers=True)
    assert first == second == (143, True)
    assert ts.train.load_variable(tmp_path, "optimizer.state.0.step").item() in (
        6,
        7,
        8,
    )  # at the latest after the epoch
    first, second = process_pool(2).run(preempted, str(tmp_path), None, workers=True)
    assert first == second == (12, [0, 1, 2])


def test_the_handler_is_given_back_when_fit_fails(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interruption):
        fit(tmp_path, stop_at(6), backup=BackupAndRestore(tmp_path, save_before_preemption=True))
    assert signal.getsignal(signal.SIGTERM) is before


def test_all_files_go_with_the_last_one(tmp_path, monkeypatch):
    """Also one that a save was killed before it could delete: a later run must not begin with it."""
    with monkeypatch.context() as patch:
        patch.setattr("torchstrategy.checkpoint.fencing.delete_file", lambda path: None)
        fit(tmp_path, backup=BackupAndRestore(tmp_path / "backup", 2, delete_checkpoint=False))
    assert len(os.listdir(tmp_path / "backup")) > 3
    fit(tmp_path, backup=BackupAndRestore(tmp_path / "backup", 2))
    assert not (tmp_path / "backup").exists()


class StopAfter(Callback):
    """Stops the training, without a state of its own."""

    def __init__(self, step=None, epoch=None):
        super().__init__()
        self.step, self.epoch = step, epoch

    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training |= self.model.iterations == self.step

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training |= epoch == self.epoch


class EndAt(Callback):
    """Ends the program as a signal may, after the backup was made or in the validation."""

    def __init__(self, where):
        super().__init__()
        self.where = where

    def on_test_batch_end(self, batch, logs=None):
        if self.where == "validation":
            os.kill(os.getpid(), signal.SIGTERM)
            self.where = None

    def on_train_end(self, logs=None):
        if self.where == "end":
            raise Interruption


@pytest.mark.parametrize("stop", [{"step": 2}, {"step": 6}, {"epoch": 0}, {"epoch": 1}], ids=str)
@pytest.mark.parametrize("where", ["validation", "end"])
def test_a_fit_that_a_callback_has_stopped_stays_stopped(tmp_path, stop, where):
    def train(folder, *callbacks):
        torch.manual_seed(0)
        model = ts.Model(torch.nn.Linear(2, 1))
        model.compile("sgd", "mse")
        x = torch.arange(16.0).view(8, 2) / 16
        y = x.sum(1, keepdim=True)
        backup = BackupAndRestore(folder, 1, delete_checkpoint=False, save_before_preemption=True)
        every = [StopAfter(**stop), *callbacks, backup]
        history = model.fit(x, y, validation_data=(x, y), batch_size=2, epochs=5, callbacks=every, verbose=0)
        return history.history, model.module.weight.tolist()

    whole = train(tmp_path / "whole")
    with pytest.raises((SystemExit, Interruption)):
        train(tmp_path / "cut", EndAt(where))
    assert train(tmp_path / "cut") == whole
    assert train(tmp_path / "cut") == whole  # it is done


def test_arguments_are_in_keras_order(tmp_path):
    for double in (False, True):
        folder = tmp_path / str(double)
        fit(tmp_path, backup=BackupAndRestore(folder, "epoch", double, False))  # delete_checkpoint=False
        assert len(list(folder.glob("backup-*.pt"))) == 2
