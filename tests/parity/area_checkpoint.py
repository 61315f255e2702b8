"""Area 9: checkpoints and their manager.

TF writes an index and a data file for each checkpoint and this library one file; the families give TF's names to it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile

import torch

import torchstrategy as ts
from tests.parity.driver import Raw, family, mirrored, replica_id, strategy_for

checkpoint_family = functools.partial(family, 9)


@contextlib.contextmanager
def folder():
    with tempfile.TemporaryDirectory() as path:
        yield path


def shown(value, path):
    """Return a structure with the working folder's name replaced, as in the figures."""
    if isinstance(value, str):
        return value.replace(path, "<dir>")
    if isinstance(value, (list, tuple)):
        return type(value)(shown(item, path) for item in value)
    if isinstance(value, dict):
        return {key: shown(item, path) for key, item in value.items()}
    return value


def tf_files(path):
    """Return the names of a folder's files as TF would have named them."""
    names = []
    for name in os.listdir(path):
        stem, suffix = os.path.splitext(name)
        names += [f"{stem}.data-00000-of-00001", f"{stem}.index"] if suffix == ".pt" else [name]
    return sorted(names)


def outcome(fn):
    """Return what a function returns, or its exception in the form of the figures."""
    try:
        return fn()
    except Exception as error:  # noqa: BLE001 - the figures hold exceptions of any type
        return Raw({"dict": {"exception": error}})


def check(method):
    """Say whether an assertion of a status holds."""
    return outcome(lambda: "ok" if method() is not None else None)


def variable(s, value=1.0, **options):
    with s.scope():
        return ts.Variable(value, **options)


def checkpoint_of(s, value=1.0):
    return ts.train.Checkpoint(v=variable(s, value))


def local_values(s, value):
    return [v.item() for v in s.experimental_local_results(value)]


@checkpoint_family()
def save_path(s, case):
    with folder() as path:
        checkpoint = checkpoint_of(s)
        first = checkpoint.save(f"{path}/ck"), tf_files(path), checkpoint.save_counter
        return shown((*first, checkpoint.save(f"{path}/ck"), tf_files(path)), path)


@checkpoint_family()
def write_path(s, case):
    with folder() as path:
        return shown((checkpoint_of(s).write(f"{path}/ck"), tf_files(path)), path)


@checkpoint_family()
def latest(s, case):
    with folder() as path, folder() as written:
        found = [ts.train.latest_checkpoint(path), ts.train.latest_checkpoint(f"{path}/missing")]
        checkpoint = checkpoint_of(s)
        for _ in range(2):
            checkpoint.save(f"{path}/ck")
        checkpoint_of(s).write(f"{written}/ck")
        found += [ts.train.latest_checkpoint(path), ts.train.latest_checkpoint(written)]
        return shown(tuple(found), path)


@checkpoint_family()
def restore_elsewhere(s, case):
    restored = {}
    with folder() as path:
        saved = checkpoint_of(s, 3.0).save(f"{path}/ck")
        for n in range(4):
            other = mirrored(n) if n else strategy_for("none")
            checkpoint = checkpoint_of(other, 0.0)
            checkpoint.restore(saved).assert_consumed()
            restored[str(n)] = local_values(other, checkpoint.v)
    return restored


@checkpoint_family()
def on_read(s, case):
    def stored_and_restored(aggregation):
        options = {"synchronization": ts.VariableSynchronization.ON_READ, "aggregation": aggregation}
        v = variable(s, 0.0, **options)
        s.run(lambda: v.assign(torch.tensor(replica_id() + 1.0)))
        with folder() as path:
            saved = ts.train.Checkpoint(v=v).save(f"{path}/ck")
            stored = ts.train.load_variable(saved, "v").item()
            fresh = variable(s, 0.0, **options)
            ts.train.Checkpoint(v=fresh).restore(saved).assert_consumed()
            return {"stored": stored, "after_restore_local": local_values(s, fresh)}

    return {
        name: outcome(functools.partial(stored_and_restored, ts.VariableAggregation[name]))
        for name in ("SUM", "MEAN", "ONLY_FIRST_REPLICA", "NONE")
    }


@checkpoint_family()
def ckpt_has_less(s, case):
    with folder() as path:
        saved = checkpoint_of(s, 4.0).save(f"{path}/ck")
        fresh = ts.train.Checkpoint(v=variable(s, 0.0), u=variable(s, 7.0))
        status = fresh.restore(saved)
        return {
            "assert_consumed": check(status.assert_consumed),
            "existing": check(status.assert_existing_objects_matched),
            "nontrivial": check(status.assert_nontrivial_match),
            "v": fresh.v.item(),
            "u": fresh.u.item(),
        }


@checkpoint_family()
def dtype_mismatch(s, case):
    with folder() as path:
        saved = ts.train.Checkpoint(v=variable(s, 1, dtype=torch.int32)).save(f"{path}/ck")
        return outcome(lambda: checkpoint_of(s).restore(saved))


@checkpoint_family()
def restore_dir(s, case):
    with folder() as path:
        checkpoint = checkpoint_of(s)
        checkpoint.save(f"{path}/ck")
        return outcome(lambda: checkpoint.restore(path))


# the manager


@checkpoint_family("mgr_keep(2|None|neg)")
def keep(s, case):
    def save():
        manager = ts.train.CheckpointManager(checkpoint_of(s), path, max_to_keep)
        return {
            "returned": [manager.save() for _ in range(num_saves)],
            "checkpoints": manager.checkpoints,
            "latest": manager.latest_checkpoint,
            "files": tf_files(path),
            "directory": manager.directory,
        }

    max_to_keep, num_saves = {"2": (2, 5), "None": (None, 4), "neg": (-1, 0)}[case.groups[0]]
    with folder() as path:
        return shown(outcome(save), path)


@checkpoint_family()
def mgr_missing_keep(s, case):
    return outcome(lambda: ts.train.CheckpointManager(checkpoint_of(s), "unused"))


@checkpoint_family()
def mgr_interval_nostep(s, case):
    return outcome(lambda: ts.train.CheckpointManager(checkpoint_of(s), "unused", 1, checkpoint_interval=2))


def saved_every_third_step(s, save):
    """Call save in each of nine steps, with a manager whose interval is three."""
    step = variable(s, 0, dtype=torch.int64)
    with folder() as path:
        manager = ts.train.CheckpointManager(
            ts.train.Checkpoint(step=step), path, None, step_counter=step, checkpoint_interval=3
        )
        saved = []
        for i in range(9):
            step.assign(i)
            saved.append(save(i, manager))
        return shown(saved, path)


@checkpoint_family()
def mgr_interval3_nocheck(s, case):
    return saved_every_third_step(s, lambda i, manager: [i, manager.save(check_interval=False)])


@checkpoint_family()
def mgr_init_fn(s, case):
    called = []
    with folder() as path:
        manager = ts.train.CheckpointManager(checkpoint_of(s), path, 2, init_fn=lambda: called.append(1))
        return manager.restore_or_initialize(), called


@checkpoint_family()
def mgr_latest_empty(s, case):
    with folder() as path:
        manager = ts.train.CheckpointManager(checkpoint_of(s), path, 2)
        return manager.latest_checkpoint, manager.checkpoints


@checkpoint_family()
def state(s, case):
    with folder() as path:
        checkpoint_of(s).save(f"{path}/ck")
        return shown(ts.train.get_checkpoint_state(path).all_model_checkpoint_paths, path)


# in replica context


@checkpoint_family()
def save_in_run(s, case):
    checkpoint = checkpoint_of(s)
    with folder() as path:
        return s.run(lambda: checkpoint.save(f"{path}/ck").replace(path, "WORKTMPDIR"))


@checkpoint_family()
def restore_in_run(s, case):
    checkpoint = checkpoint_of(s)
    with folder() as path:
        saved = checkpoint.save(f"{path}/ck")
        return s.run(lambda: type(checkpoint.restore(saved)).__name__)


# rules that TF's measurements gave in words


@checkpoint_family("deferred")
def deferred(s, case):
    with folder() as path:
        saved = checkpoint_of(s, 3.0).save(f"{path}/ck")
        checkpoint = ts.train.Checkpoint()
        status = checkpoint.restore(saved)
        before = check(status.assert_consumed), check(status.assert_existing_objects_matched)
        checkpoint.v = variable(s, 0.0)
        return {
            "assert_consumed": before[0],
            "existing": before[1],
            "local": local_values(s, checkpoint.v),
            "assert_consumed_after": check(status.assert_consumed),
        }


@checkpoint_family("ckpt_has_more")
def ckpt_has_more(s, case):
    with folder() as path:
        saved = ts.train.Checkpoint(v=variable(s, 4.0), u=variable(s, 7.0)).save(f"{path}/ck")
        status = checkpoint_of(s).restore(saved)
        return {
            "assert_consumed": check(status.assert_consumed),
            "existing": check(status.assert_existing_objects_matched),
        }


@checkpoint_family("nothing_matches")
def nothing_matches(s, case):
    with folder() as path:
        saved = checkpoint_of(s).save(f"{path}/ck")
        status = ts.train.Checkpoint(other=variable(s)).restore(saved)
        return check(status.assert_nontrivial_match)


@checkpoint_family("restore_none")
def restore_none(s, case):
    status = checkpoint_of(s).restore(None)
    asserts = (status.assert_consumed, status.assert_existing_objects_matched, status.assert_nontrivial_match)
    return type(status).__name__, [check(method) for method in asserts], check(status.expect_partial)


@checkpoint_family("restore_missing")
def restore_missing(s, case):
    with folder() as path:
        return checkpoint_of(s).restore(f"{path}/missing")


@checkpoint_family("shape_mismatch")
def shape_mismatch(s, case):
    with folder() as path:
        saved = checkpoint_of(s, [1.0, 2.0]).save(f"{path}/ck")
        return checkpoint_of(s, [1.0, 2.0, 3.0]).restore(saved)


@checkpoint_family("nested")
def nested(s, case):
    def make(value):
        inner = checkpoint_of(s, value)
        return ts.train.Checkpoint(a=[variable(s, value + 1)], b={"k": variable(s, value + 2)}, c=inner)

    with folder() as path:
        fresh = make(0.0)
        fresh.restore(make(3.0).save(f"{path}/ck")).assert_consumed()
        return [local_values(s, v) for v in (fresh.c.v, fresh.a[0], fresh.b["k"])]


@checkpoint_family("mgr_interval3")
def mgr_interval3(s, case):
    return saved_every_third_step(s, lambda i, manager: manager.save())


@checkpoint_family("mgr_number")
def mgr_number(s, case):
    with folder() as path:
        manager = ts.train.CheckpointManager(checkpoint_of(s), path, None)
        return shown([manager.save(checkpoint_number=7), manager.save()], path)


@checkpoint_family("mgr_reopen(_unrestored)?")
def mgr_reopen(s, case):
    with folder() as path:
        manager = ts.train.CheckpointManager(checkpoint_of(s, 3.0), path, 3 if case.groups[0] is None else None)
        for _ in range(3 if case.groups[0] is None else 2):
            manager.save()
        fresh = checkpoint_of(s, 0.0)
        manager = ts.train.CheckpointManager(fresh, path, 5)
        restored = None if case.groups[0] else manager.restore_or_initialize()
        return shown(
            (manager.checkpoints, restored, local_values(s, fresh.v), manager.save(), manager.checkpoints), path
        )
