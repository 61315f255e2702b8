"""What a directory of checkpoints holds is known by its files, and one attempt of a job writes to it."""

import json
import os
import re

import pytest
import torch

import torchstrategy as ts
from torchstrategy.checkpoint import directory, fencing
from torchstrategy.errors import DataLossError, FailedPreconditionError
from torchstrategy.testing.faults import clock_jump


def start(folder, max_to_keep=5, **options):
    step = torch.tensor(0)
    return step, ts.train.CheckpointManager(ts.train.Checkpoint(step=step), folder, max_to_keep, **options)


def save(folder, numbers, **options):
    step, manager = start(folder, **options)
    for number in numbers:
        step.fill_(number)
        manager.save()
    return step, manager


def in_other_process(monkeypatch, name="another"):
    """Let what follows be written as if by another process."""
    monkeypatch.setattr(fencing, "_writer", lambda: name)


def edit_index(folder, **changes):
    path = folder / "checkpoint"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


class TestIndex:
    def test_none(self, tmp_path):
        assert directory.read_index(str(tmp_path)) is None
        assert directory.read_index(str(tmp_path / "missing")) is None
        ts.train.Checkpoint(step=torch.tensor(1)).write(tmp_path / "x")  # which is not listed
        torch.save({"weight": torch.zeros(1)}, tmp_path / "plain.pt")
        assert directory.read_index(str(tmp_path)) is None

    def test_says_what_was_saved(self, tmp_path):
        save(tmp_path, (1, 2))
        index = directory.read_index(str(tmp_path))
        assert (index.latest, list(index.written), index.order) == ("ckpt-2", ["ckpt-1", "ckpt-2"], (1, 2))
        assert json.loads((tmp_path / "checkpoint").read_text())["latest"] == "ckpt-2"

    @pytest.mark.parametrize(
        "text",
        [None, "", "[]", '"ck-1"', '{"latest": "ck-1"}', '{"written": [1], "last_preserved": 0}', '{"written": {'],
    )
    def test_lost_or_torn(self, tmp_path, text, caplog):
        save(tmp_path, (1, 2, 3))
        (tmp_path / "checkpoint").unlink()
        if text is not None:
            (tmp_path / "checkpoint").write_text(text)
        assert ts.train.latest_checkpoint(tmp_path) == str(tmp_path / "ckpt-3")
        assert re.search(r"checkpoint is (lost|damaged)\. .* known by their files: ckpt-1, ckpt-2, ckpt-3", caplog.text)
        step, manager = start(tmp_path)
        assert manager.restore_or_initialize() == str(tmp_path / "ckpt-3")
        assert step == 3
        assert manager.save() == str(tmp_path / "ckpt-4")
        assert list(directory.read_index(str(tmp_path)).written) == [f"ckpt-{i}" for i in (1, 2, 3, 4)]

    def test_torn_without_checkpoints(self, tmp_path):
        (tmp_path / "checkpoint").write_text("")
        with pytest.raises(DataLossError, match=r"none are there\. Delete it to start anew"):
            ts.train.latest_checkpoint(tmp_path)

    def test_older_than_the_files(self, tmp_path):
        save(tmp_path, (1, 2))
        before = (tmp_path / "checkpoint").read_bytes()
        save_on(tmp_path, 3)
        (tmp_path / "checkpoint").write_bytes(before)
        assert list(directory.read_index(str(tmp_path)).written) == ["ckpt-1", "ckpt-2", "ckpt-3"]
        step, manager = start(tmp_path)
        assert manager.restore_or_initialize() == str(tmp_path / "ckpt-3")
        assert step == 3

    def test_order_is_not_that_of_a_clock(self, tmp_path, monkeypatch):
        monkeypatch.setattr("time.time", iter([1e9, 5e8, 9e8, 4e8, 3e8, 2e8, 1e8]).__next__)
        save(tmp_path, (1, 2, 3))
        (tmp_path / "checkpoint").unlink()
        assert ts.train.latest_checkpoint(tmp_path) == str(tmp_path / "ckpt-3")

    def test_those_kept_for_good_stay_after_a_loss(self, tmp_path, monkeypatch):
        hours = iter(range(100))
        monkeypatch.setattr("time.time", lambda: next(hours) * 3600.0)
        save(tmp_path, range(8), max_to_keep=2, keep_checkpoint_every_n_hours=3)
        kept = {"ckpt-3.pt", "ckpt-6.pt"}
        assert kept < set(os.listdir(tmp_path))
        (tmp_path / "checkpoint").unlink()
        step, manager = start(tmp_path, max_to_keep=2, keep_checkpoint_every_n_hours=3)
        manager.restore_or_initialize()
        assert step == 7
        manager.save()
        assert set(os.listdir(tmp_path)) == {*kept, "checkpoint", "ckpt-8.pt", "ckpt-9.pt"}
        for name in ("ckpt-8.pt", "ckpt-9.pt"):
            os.truncate(tmp_path / name, 10)
        step, manager = start(tmp_path, max_to_keep=2, keep_checkpoint_every_n_hours=3)
        assert manager.restore_or_initialize() == str(tmp_path / "ckpt-6")

    def test_of_a_release_before_seals(self, tmp_path):
        for number in (1, 2):
            content = {"step": {"kind": "tensor", "state": torch.tensor(number)}}
            old = {"format": "torchstrategy.checkpoint", "version": 1, "save_counter": number, "objects": content}
            torch.save(old, tmp_path / f"ckpt-{number}.pt")
        torch.save({**old, "save_counter": None}, tmp_path / "written.pt")
        with_index = {"latest": "ckpt-1", "written": {"ckpt-1": 1.0}, "last_preserved": None}
        (tmp_path / "checkpoint").write_text(json.dumps(with_index))
        assert ts.train.latest_checkpoint(tmp_path) == str(tmp_path / "ckpt-1")
        (tmp_path / "checkpoint").unlink()
        os.utime(tmp_path / "ckpt-2.pt", (1e9, 1e9))  # as a copy may have it
        step, manager = start(tmp_path)
        assert [os.path.basename(path) for path in manager.checkpoints] == ["ckpt-1", "ckpt-2"]
        manager.restore_or_initialize()
        assert step == 2
        assert manager.save() == str(tmp_path / "ckpt-3")

    def test_what_a_killed_save_did_not_delete_goes_with_the_next(self, tmp_path, monkeypatch):
        def killed(*args):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(fencing, "delete_file", killed)
            with pytest.raises(KeyboardInterrupt):
                save(tmp_path, (1, 2, 3), max_to_keep=2)
        assert sorted(os.listdir(tmp_path)) == ["checkpoint", "ckpt-1.pt", "ckpt-2.pt", "ckpt-3.pt"]
        ts.train.Checkpoint(step=torch.tensor(9)).write(tmp_path / "ckpt-0")
        edit_index(tmp_path, superfluous=["ckpt-0", "ckpt-1"])
        _, manager = start(tmp_path, max_to_keep=2)
        manager.restore_or_initialize()
        manager.save()
        assert sorted(os.listdir(tmp_path)) == ["checkpoint", "ckpt-0.pt", "ckpt-3.pt", "ckpt-4.pt"]


def save_on(folder, number, **options):
    step, manager = start(folder, **options)
    manager.restore_or_initialize()
    step.fill_(number)
    return manager.save()


class TestDamage:
    def test_the_newest_whole_one_is_restored(self, tmp_path, caplog):
        save(tmp_path, (1, 2, 3))
        for name, size in (("ckpt-3.pt", 100), ("ckpt-2.pt", 0)):
            os.truncate(tmp_path / name, size)
        step, manager = start(tmp_path)
        assert manager.restore_or_initialize() == str(tmp_path / "ckpt-1")
        assert step == 1
        for part in ("ckpt-3.pt is damaged", "Going on from the checkpoint before it", "ckpt-1"):
            assert part in caplog.text

    def test_none_is_whole(self, tmp_path):
        save(tmp_path, (1, 2))
        for name in ("ckpt-1.pt", "ckpt-2.pt"):
            os.truncate(tmp_path / name, 100)
        step, manager = start(tmp_path)
        with pytest.raises(DataLossError, match=r"ckpt-1\.pt is damaged"):
            manager.restore_or_initialize()
        assert step == 0

    def test_a_checkpoint_of_a_later_release_is_not_passed_over(self, tmp_path):
        save(tmp_path, (1, 2))
        torch.save({"format": "torchstrategy.checkpoint", "version": 99}, tmp_path / "ckpt-2.pt")
        _, manager = start(tmp_path)
        with pytest.raises(DataLossError, match="format version 99"):
            manager.restore_or_initialize()

    def test_nothing_matches(self, tmp_path):
        save(tmp_path, (1,))
        other = torch.tensor(5)
        manager = ts.train.CheckpointManager(ts.train.Checkpoint(other=other), tmp_path, 1)
        with pytest.raises(ValueError, match="It holds step; the objects are other"):
            manager.restore_or_initialize()
        assert other == 5
        renamed = ts.train.Checkpoint(step=torch.tensor(1), other=other)
        assert ts.train.CheckpointManager(renamed, tmp_path, 1).restore_or_initialize() is not None

    def test_later_objects_may_match(self, tmp_path):
        save(tmp_path, (4,))
        checkpoint = ts.train.Checkpoint()
        ts.train.CheckpointManager(checkpoint, tmp_path, 1).restore_or_initialize()
        checkpoint.step = torch.tensor(0)
        assert checkpoint.step == 4


class TestOneWriter:
    def test_an_earlier_attempt_is_refused(self, tmp_path, monkeypatch):
        step, old = save(tmp_path, (1, 2))
        with monkeypatch.context() as patch:
            in_other_process(patch)
            save_on(tmp_path, 3)
        before = {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}
        step.fill_(9)
        for _ in range(2):
            with pytest.raises(FailedPreconditionError, match=r"another has saved ckpt-3 .* as attempt 2 of the job"):
                old.save()
        assert {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)} == before
        assert old.latest_checkpoint == str(tmp_path / "ckpt-2")
        assert save_on(tmp_path, 4) == str(tmp_path / "ckpt-4")  # after it has taken up what is there
        assert directory.read_index(str(tmp_path)).order == (3, 4)

    @pytest.mark.parametrize("moment", ["file", "index"])
    def test_an_attempt_that_is_overtaken_in_its_save(self, tmp_path, monkeypatch, moment):
        """It wakes up when its file has its name, or just before: the latest stays its successor's."""
        step, old = save(tmp_path, (1, 2), max_to_keep=1)
        replace, seen = os.replace, []

        def overtaken(source, target):
            seen.append(os.path.basename(target))
            if len(seen) == {"file": 1, "index": 2}[moment]:
                with monkeypatch.context() as patch:
                    patch.setattr(os, "replace", replace)
                    in_other_process(patch)
                    save_on(tmp_path, 7)
                    save_on(tmp_path, 8)
            replace(source, target)

        step.fill_(3)
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", overtaken)
            if moment == "file":
                with pytest.raises(FailedPreconditionError, match=r"another has saved ckpt-[45]"):
                    old.save()
            else:
                old.save()  # it is told at its next save
        with pytest.raises(FailedPreconditionError, match=r"another has saved ckpt-[45]"):
            old.save()
        assert directory.read_index(str(tmp_path)).latest == {"file": "ckpt-4", "index": "ckpt-5"}[moment]
        step, manager = start(tmp_path)
        # Which the earlier attempt has written over, or the later one has restored.
        assert (str(tmp_path / "ckpt-3") in manager.checkpoints) == (moment == "index")
        manager.restore_or_initialize()
        assert step == 8

    def test_jobs_that_start_together(self, tmp_path, monkeypatch):
        save(tmp_path, (1,))
        with monkeypatch.context() as patch:
            in_other_process(patch, "first")
            first = save_by(start(tmp_path), 0)
            in_other_process(patch, "second")
            second = save_by(start(tmp_path), 0)
            in_other_process(patch, "first")
            first(5)
            in_other_process(patch, "second")
            with pytest.raises(
                FailedPreconditionError,
                match=r"give each a directory of its own.*save within `with strategy\.scope\(\):`",
            ):
                second(6)

    def test_save_without_a_manager(self, tmp_path, monkeypatch):
        checkpoint = ts.train.Checkpoint(step=torch.tensor(1))
        checkpoint.save(tmp_path / "ckpt")
        with monkeypatch.context() as patch:
            in_other_process(patch)
            other = ts.train.Checkpoint(step=torch.tensor(5))
            other.restore(ts.train.latest_checkpoint(tmp_path))
            other.save(tmp_path / "ckpt")
        with pytest.raises(FailedPreconditionError, match="attempt 2"):
            checkpoint.save(tmp_path / "ckpt")
        assert checkpoint.save_counter == 1
        checkpoint.restore(ts.train.latest_checkpoint(tmp_path))  # takes up what is there
        assert checkpoint.save(tmp_path / "ckpt") == str(tmp_path / "ckpt-3")

    def test_managers_of_one_process(self, tmp_path):
        first = save(tmp_path, (1,))[1]
        second = save(tmp_path, (2,), checkpoint_name="other")[1]
        first.save()
        second.save()
        assert directory.read_index(str(tmp_path)).order == (1, 4)

    def test_old_checkpoints_of_a_successor_are_not_deleted(self, tmp_path, monkeypatch):
        _, old = save(tmp_path, (1, 2), max_to_keep=2)
        with monkeypatch.context() as patch:
            in_other_process(patch)
            ts.train.Checkpoint(step=torch.tensor(50)).save(tmp_path / "ckpt")  # another ckpt-1
        fencing._delete(str(tmp_path / "ckpt-1.pt"), directory.Order(1, 3))
        assert ts.train.load_variable(tmp_path / "ckpt-1", "step") == 50
        assert old.checkpoints


def save_by(started, number):
    step, manager = started

    def go_on(number):
        step.fill_(number)
        return manager.save()

    return go_on


class TestOtherFiles:
    """What is no checkpoint of ``save`` is left alone."""

    def test_files_of_write_of_earlier_releases(self, tmp_path):
        content = {"step": {"kind": "tensor", "state": torch.tensor(1)}}
        old = {"format": "torchstrategy.checkpoint", "version": 1, "save_counter": 7, "objects": content}
        for name in ("best", "final", "epoch-3"):
            torch.save(old, tmp_path / f"{name}.pt")
        assert ts.train.latest_checkpoint(tmp_path) is None
        save(tmp_path, (1, 2), max_to_keep=1)
        assert sorted(os.listdir(tmp_path)) == ["best.pt", "checkpoint", "ckpt-2.pt", "epoch-3.pt", "final.pt"]

    def test_are_not_read_again_and_again(self, tmp_path, monkeypatch):
        for name in ("data", "more-3"):
            torch.save({"weight": torch.zeros(1)}, tmp_path / f"{name}.pt")
        checkpoint = ts.train.Checkpoint(step=torch.tensor(1))
        checkpoint.write(tmp_path / "x")
        read = []
        monkeypatch.setattr(directory, "read_unchecked", read.append)
        checkpoint.read(tmp_path / "x")
        checkpoint.save(tmp_path / "ckpt")
        assert read == []

    def test_a_folder_with_the_name_of_the_index(self, tmp_path):
        (tmp_path / "checkpoint").mkdir()
        checkpoint = ts.train.Checkpoint(step=torch.tensor(1))
        checkpoint.write(tmp_path / "x")
        checkpoint.step.zero_()
        checkpoint.read(tmp_path / "x")
        assert checkpoint.step == 1
        with pytest.raises(OSError, match="directory"):
            checkpoint.save(tmp_path / "ckpt")
        assert sorted(os.listdir(tmp_path)) == ["checkpoint", "x.pt"]  # nothing of the save that failed

    def test_an_unfinished_file_of_another_host(self, tmp_path):
        """Whose locks may not be seen here: it is deleted when it is old."""
        other = tmp_path / f".ckpt-1.pt.{'0' * 32}.tmp"
        other.write_bytes(b"partial")
        save(tmp_path, (1,))
        assert other.exists()
        with clock_jump(5 * 3600):  # here, and not on the host that writes it
            save(tmp_path, (1,))
        assert other.exists()
        os.utime(other, (1e9, 1e9))
        save(tmp_path, (2,))
        assert not other.exists()

    def test_weights_beside_files_that_are_gone(self, tmp_path):
        model = ts.Model(torch.nn.Linear(1, 1))
        model.save_weights(tmp_path / "w-1")
        os.unlink(tmp_path / "w-1.pt")
        model.save_weights(tmp_path / "w-2")
        assert ts.train.latest_checkpoint(tmp_path) == str(tmp_path / "w-2")

    def test_a_manager_that_only_saves(self, tmp_path):
        save(tmp_path, (1,))
        os.unlink(tmp_path / "ckpt-1.pt")
        _, manager = start(tmp_path)
        with pytest.raises(DataLossError, match="names ckpt-1, but no checkpoint is in"):
            manager.restore_or_initialize()
        manager.save()
        assert ts.train.latest_checkpoint(tmp_path) == str(tmp_path / "ckpt-1")

    def test_a_relative_path_with_a_slash_at_its_end(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        os.makedirs("elsewhere")
        step, manager = start("run/")
        path = manager.save(options=ts.train.CheckpointOptions(enable_async=True))
        os.chdir("elsewhere")
        manager.sync()
        os.chdir("..")
        assert path == "run/ckpt-1"
        assert ts.train.latest_checkpoint("run") == "run/ckpt-1"
        with monkeypatch.context() as patch:
            in_other_process(patch)
            save_on(tmp_path / "run", 5)
        with pytest.raises(FailedPreconditionError):
            manager.save()
        assert step == 0

    def test_an_index_that_was_replaced_while_it_was_read(self, tmp_path, monkeypatch, caplog):
        """An evaluator that polls sees no gap."""
        save(tmp_path, (1,), max_to_keep=1)
        list_files, moved = directory.list_files, []

        def slow(folder):
            if not moved:
                moved.append(1)
                save_on(folder, 2, max_to_keep=1)
            return list_files(folder)

        monkeypatch.setattr(directory, "list_files", slow)
        assert ts.train.latest_checkpoint(tmp_path) == str(tmp_path / "ckpt-2")
        assert "which is gone" not in caplog.text

    @pytest.mark.parametrize("is_new", [True, False])
    def test_an_index_that_can_not_be_written(self, tmp_path, monkeypatch, is_new):
        """The new file is taken back; what has replaced another one stays, for there is no other."""
        save(tmp_path, (1,))
        step, manager = start(tmp_path)
        step.fill_(7)
        write_file = fencing.write_file

        def full(*args, **kwargs):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(fencing, "write_file", full)
        with pytest.raises(OSError, match="No space left"):
            manager.save(checkpoint_number=2 if is_new else 1)
        assert sorted(os.listdir(tmp_path)) == ["checkpoint", "ckpt-1.pt"]
        assert ts.train.load_variable(tmp_path, "step") == (1 if is_new else 7)
        monkeypatch.setattr(fencing, "write_file", write_file)
        assert manager.save(checkpoint_number=3) == str(tmp_path / "ckpt-3")

    def test_an_index_that_is_there_after_all(self, tmp_path, monkeypatch):
        """The disk fails after the index has its name: the file that it names must stay."""
        _, manager = save(tmp_path, (1,))
        write_file = fencing.write_file

        def failing(*args, **kwargs):
            write_file(*args, **kwargs)
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(fencing, "write_file", failing)
        with pytest.raises(OSError, match="Input/output"):
            manager.save()
        assert ts.train.latest_checkpoint(tmp_path) == str(tmp_path / "ckpt-2")

    def test_another_attempt_whose_files_are_gone(self, tmp_path, monkeypatch):
        _, manager = save(tmp_path, (1,))
        with monkeypatch.context() as patch:
            in_other_process(patch)
            save_on(tmp_path, 2)
        for path in tmp_path.glob("*.pt"):
            path.unlink()
        with pytest.raises(FailedPreconditionError, match="another has saved ckpt-2"):
            manager.save()
