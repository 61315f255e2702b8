"""Checkpoints of a job of several processes: written once, and all ranks succeed or fail together."""

import os
import shutil

import pytest
import torch
from torchmetrics import SumMetric

import torchstrategy as ts


def make(strategy):
    with strategy.scope():
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return {"model": model, "optimizer": optimizer, "metric": SumMetric(), "step": torch.tensor(0)}


def train_step(objects):
    rank = ts.get_replica_context().replica_id_in_sync_group
    loss = objects["model"](torch.tensor([[1.0, rank + 1.0]])).sum()
    objects["optimizer"].zero_grad()
    loss.backward()
    objects["optimizer"].step()
    objects["metric"].update(rank + 1.0)
    objects["step"].add_(1)


def save_and_go_on(directory):
    strategy = ts.MirroredStrategy()
    objects = make(strategy)
    manager = ts.train.CheckpointManager(ts.train.Checkpoint(**objects), directory, max_to_keep=2)
    paths = []
    for _ in range(3):
        strategy.run(train_step, args=(objects,))
        paths.append(manager.save())
    kept, saved = manager.checkpoints, objects["model"].weight.tolist()
    strategy.run(train_step, args=(objects,))
    return paths, kept, saved, objects["model"].weight.tolist()


def restore_and_go_on(directory, strategy=None):
    strategy = strategy or ts.MirroredStrategy()
    objects = make(strategy)
    manager = ts.train.CheckpointManager(ts.train.Checkpoint(**objects), directory, max_to_keep=2)
    path = manager.restore_or_initialize()
    restored = objects["model"].weight.tolist()
    strategy.run(train_step, args=(objects,))
    return path, restored, objects["metric"].compute().item(), objects["model"].weight.tolist()


def test_saved_by_processes_and_restored_with_any_strategy(process_pool, tmp_path):
    directory = str(tmp_path / "run")
    results = process_pool(2).run(save_and_go_on, directory)
    paths, kept, saved, final = results[0]
    assert results[1] == results[0]
    assert paths == [f"{directory}/ckpt-{i}" for i in (1, 2, 3)]
    assert kept == paths[1:]
    assert sorted(os.listdir(directory)) == ["checkpoint", "ckpt-2.pt", "ckpt-3.pt"]
    threads = restore_and_go_on(directory, ts.MirroredStrategy(["cpu:0", "cpu:1"]))
    for path, restored, total, continued in (*process_pool(2).run(restore_and_go_on, directory), threads):
        assert path == paths[-1]
        assert restored == saved
        assert total == 4 * (1.0 + 2.0)  # both replicas' values of all steps
        assert continued == [pytest.approx(final[0])]


def save_into_own_directories(directory):
    strategy = ts.MirroredStrategy()
    objects = make(strategy)
    own = os.path.join(directory, f"of_rank_{strategy.workers.rank}")
    torch.nn.init.constant_(objects["model"].weight, strategy.workers.rank)
    manager = ts.train.CheckpointManager(ts.train.Checkpoint(**objects), own, max_to_keep=2)
    manager.save()
    initial = ts.train.load_variable(own, "model.weight").tolist()
    for _ in range(2):
        strategy.run(train_step, args=(objects,))
        manager.save()
    objects["model"].weight.data.zero_()
    assert manager.restore_or_initialize() == os.path.join(own, "ckpt-3")
    saved = ts.train.load_variable(own, "model.weight")
    return sorted(os.listdir(own)), initial, saved.tolist(), objects["model"].weight.tolist()


def test_ranks_with_directories_of_their_own(process_pool, tmp_path):
    """As tf's programs for several workers want it: each rank's directory is complete."""
    first, second = process_pool(2).run(save_into_own_directories, str(tmp_path))
    assert first == second
    files, initial, saved, restored = first
    assert initial == [[0.0, 0.0]]  # the chief's
    assert files == ["checkpoint", "ckpt-2.pt", "ckpt-3.pt"]
    assert saved == restored


def save_where_the_chief_cannot(directory):
    objects = make(ts.MirroredStrategy())
    checkpoint = ts.train.Checkpoint(**objects)
    with pytest.raises(RuntimeError) as raised:
        checkpoint.save(os.path.join(directory, "file", "ck"))
    path = checkpoint.save(os.path.join(directory, "ck"))  # the job goes on
    return str(raised.value), checkpoint.save_counter, path


def test_a_failed_write_raises_on_every_rank(process_pool, tmp_path):
    (tmp_path / "file").write_text("in the way")
    for message, counter, path in process_pool(2).run(save_where_the_chief_cannot, str(tmp_path)):
        assert message.startswith("Rank 0 could not write the checkpoint")
        assert "FileExistsError" in message or "NotADirectoryError" in message
        assert (counter, path) == (1, str(tmp_path / "ck-1"))


class Meets:
    """Its state asks the other ranks, whose copies are not asked for theirs."""

    def __init__(self, strategy):
        self.strategy = strategy

    def state_dict(self):
        return {"total": self.strategy.reduce("SUM", torch.ones(()))}

    def load_state_dict(self, state):
        pass


def save_what_meets_other_ranks(directory):
    strategy, messages = ts.MirroredStrategy(), []
    for options in (None, ts.train.CheckpointOptions(enable_async=True)):
        checkpoint = ts.train.Checkpoint(own=Meets(strategy))
        with strategy.scope(), pytest.raises(ts.errors.DisagreementError) as raised:
            checkpoint.write(f"{directory}/checkpoint", options=options)
        messages.append(str(raised.value))
    return messages, strategy.reduce("SUM", torch.ones(())).item()


def test_a_state_that_meets_other_ranks_is_refused_on_all(process_pool, tmp_path):
    for messages, total in process_pool(2).run(save_what_meets_other_ranks, str(tmp_path), timeout_s=20):
        assert all("test_several_processes.py:" in message and "(state_dict)" in message for message in messages)
        assert total == 2.0


def restore_where_one_rank_cannot(directory):
    strategy = ts.MirroredStrategy()
    objects = make(strategy)
    path = ts.train.Checkpoint(**objects).save(os.path.join(directory, "ck"))
    own = os.path.join(directory, str(strategy.workers.rank))
    os.makedirs(own)
    shutil.copy(path + ".pt", own)
    if strategy.workers.rank == 1:
        os.truncate(os.path.join(own, "ck-1.pt"), 100)
    objects["step"].fill_(7)
    with pytest.raises(RuntimeError) as raised:
        ts.train.Checkpoint(**objects).restore(os.path.join(own, "ck-1"))
    is_loss = isinstance(raised.value, ts.errors.DataLossError)
    if strategy.workers.rank == 1:
        del objects["optimizer"]
    with pytest.raises(RuntimeError, match=r"(?s)would restore different objects.* 0: optimizer.* 1: nothing"):
        ts.train.Checkpoint(**objects).restore(path)
    return is_loss, str(raised.value), objects["step"].item()


def test_all_ranks_restore_or_none(process_pool, tmp_path):
    first, second = process_pool(2).run(restore_where_one_rank_cannot, str(tmp_path))
    assert first[0]
    assert second[0]
    assert "Rank 1 could not restore the checkpoint ck-1, so no rank did: DamagedError" in first[1]
    assert "ck-1.pt is damaged" in second[1]
    assert first[2] == second[2] == 7


class Moody(torch.nn.Module):
    """Can't be saved, or take up what was saved, on some ranks."""

    ranks, what = (), ""

    def __init__(self, rank):
        super().__init__()
        self.weight, self.rank = torch.nn.Parameter(torch.ones(1)), rank

    def get_extra_state(self):
        return self._refuse("save")

    def set_extra_state(self, state):
        self._refuse("restore")

    def _refuse(self, what):
        if what == self.what and self.rank in self.ranks:
            raise ValueError(f"rank {self.rank} is in no mood")


def save_and_restore_moodily(directory, what, ranks):
    """Return what is said of a save and a restore, which the program survives, and of a sum after them."""
    strategy = ts.MirroredStrategy()
    rank = strategy.workers.rank
    Moody.what, Moody.ranks = what, ranks
    with strategy.scope():
        checkpoint = ts.train.Checkpoint(model=Moody(rank))
    messages = []
    try:
        checkpoint.restore(checkpoint.save(f"{directory}/ckpt"))
    except (ValueError, ts.errors.OpError) as error:
        messages.append(str(error))
    try:
        messages.append(float(strategy.reduce("SUM", torch.ones(()))))
    except ts.errors.OpError as error:
        messages.append(str(error))
    return messages


@pytest.mark.parametrize("what", ["save", "restore"])
def test_what_one_rank_cannot_save_or_take_up_is_told_to_the_others(tmp_path, what):
    with ts.testing.ProcessPool(2) as pool:
        first, (own, refused) = pool.run(save_and_restore_moodily, str(tmp_path), what, [1])
    operation = {"save": "writing of checkpoint", "restore": "restoring model of"}[what] + f" {tmp_path}/ckpt-1"
    assert len(first) == (2 if what == "save" else 1)
    assert all(f"Rank 1 failed in {operation}: ValueError: rank 1 is in no mood" in text for text in first)
    assert own == "rank 1 is in no mood"
    assert "this rank failed earlier, and others did not" in refused


def test_what_no_rank_can_take_up_is_survived_by_all(process_pool, tmp_path):
    texts = process_pool(2).run(save_and_restore_moodily, str(tmp_path), "restore", [0, 1])
    assert texts == [["rank 0 is in no mood", 2.0], ["rank 1 is in no mood", 2.0]]


def restore_from_different_directories(directory):
    strategy = ts.MirroredStrategy()
    own = os.path.join(directory, str(strategy.workers.rank))
    if strategy.workers.rank == 0:  # without objects of the strategy, this process saves by itself
        ts.train.Checkpoint(step=torch.tensor(1)).save(os.path.join(own, "ckpt"))
    manager = ts.train.CheckpointManager(ts.train.Checkpoint(**make(strategy)), own, max_to_keep=1)
    with pytest.raises(RuntimeError) as raised:
        manager.restore_or_initialize()
    return str(raised.value)


def test_managers_that_see_different_directories(process_pool, tmp_path):
    for message in process_pool(2).run(restore_from_different_directories, str(tmp_path)):
        assert "rank 0: ckpt-1\n  rank 1: None" in message


def restore_before_the_objects_exist(directory):
    strategy = ts.MirroredStrategy()
    saved = make(strategy)
    strategy.run(train_step, args=(saved,))
    path = ts.train.Checkpoint(**saved).save(os.path.join(directory, "ck"))
    checkpoint = ts.train.Checkpoint()
    with strategy.scope():
        status = checkpoint.restore(path)
    fresh = make(strategy)
    # No rank waits for another while it attaches: the ranks may do so in any order.
    for name in sorted(fresh, reverse=strategy.workers.rank == 1):
        setattr(checkpoint, name, fresh[name])
    status.assert_consumed()
    later = ts.train.Checkpoint()
    later.restore(path)
    with pytest.raises(ValueError, match="has shape"):
        later.step = torch.zeros(2)
    for objects in (saved, fresh):
        strategy.run(train_step, args=(objects,))
    return (
        fresh["model"].weight.tolist() == saved["model"].weight.tolist(),
        fresh["metric"].compute().item(),
        fresh["step"].item(),
    )


def test_objects_that_are_attached_later(process_pool, tmp_path):
    assert process_pool(2).run(restore_before_the_objects_exist, str(tmp_path)) == [(True, 6.0, 2)] * 2


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        on_read = {"synchronization": ts.VariableSynchronization.ON_READ, "aggregation": ts.VariableAggregation.SUM}
        self.register_buffer("seen", ts.Variable(0, **on_read))
        self.total = ts.Variable(0.0, **on_read)

    def forward(self):
        number = ts.get_replica_context().replica_id_in_sync_group + 1
        self.seen.assign_add(torch.tensor(number))
        self.total.assign_add(torch.tensor(float(number)))


def on_read_variables(directory, devices=None, *, restore_only=False):
    strategy = ts.MirroredStrategy(devices)
    path = os.path.join(directory, "ck")
    if not restore_only:
        with strategy.scope():
            saved = Counting()
        strategy.run(lambda: saved())
        ts.train.Checkpoint(model=saved).write(path)
    with strategy.scope():
        fresh = Counting()
        # Before the processes take the chief's initial values, which must not replace what was restored.
        ts.train.Checkpoint(model=fresh).read(path).assert_consumed()
    restored = [int(fresh.seen), float(fresh.total)]
    strategy.run(lambda: fresh())
    return [*restored, int(fresh.seen), float(fresh.total)]


@pytest.mark.parametrize("devices", [None, ["cpu:0", "cpu:1"]], ids=["one_replica_each", "two_replicas_each"])
def test_variables_that_are_aggregated_when_read(process_pool, tmp_path, devices):
    total = 3 if devices is None else 10
    results = process_pool(2).run(on_read_variables, str(tmp_path), devices)
    assert results == [[total, total, 2 * total, 2 * total]] * 2
    alone = on_read_variables(str(tmp_path), ["cpu:0", "cpu:1", "cpu:2"], restore_only=True)
    assert alone == pytest.approx([total, total, total + 6, total + 6])
