"""Unchanged scripts: planted mistakes are found in both hostings, and right programs are called right."""

import os
from pathlib import Path

import pytest

import torchstrategy as ts
from tests.testing.verification import right
from tests.testing.verification.planted import CAUSES
from torchstrategy.testing.verification.script import verify_script
from torchstrategy.testing.verification.script_process import run_script

SCRIPT = str(Path(__file__).parent / "scripts/planted_script.py")
DDP_SCRIPT = str(Path(__file__).parent / "scripts/ddp_script.py")
TITLES = ["2 replicas in one process", "2 replicas in 2 processes"]
QUICK = [("mlp", "not divided"), ("mlp", "metric"), ("right", "gan")]
CASES = [(kind, mistake) for kind in ("mlp", "conv", "transformer") for mistake in CAUSES]
CASES += [("right", name) for name in right.NAMES]


def _run_on_rank(setups):
    run_script(setups[int(os.environ["RANK"])])


def _start(pool, setups, timeout_s):
    pool.run(_run_on_rank, setups, timeout_s=timeout_s)
    return [None] * len(setups)


@pytest.fixture(scope="module")
def start():
    """Run scripts in processes that are kept, because new interpreters take seconds; the command's test has those."""
    with ts.testing.ProcessPool(1, 60.0) as one, ts.testing.ProcessPool(2, 60.0) as two:
        yield lambda setups, timeout_s: _start(one if len(setups) == 1 else two, setups, timeout_s)


def start_anew(setups, timeout_s):
    """Run a script in new processes: those of torch.distributed can't come together a second time."""
    with ts.testing.ProcessPool(len(setups), timeout_s) as pool:
        return _start(pool, setups, timeout_s)


def names(kind, mistake):
    return pytest.param(
        kind, mistake, marks=[] if (kind, mistake) in QUICK else pytest.mark.slow, id=f"{kind}-{mistake}"
    )


@pytest.mark.end_to_end
@pytest.mark.parametrize(("kind", "mistake"), [names(*case) for case in CASES])
def test_cause_is_named(kind, mistake, start):
    report = verify_script(SCRIPT, [kind, mistake], start=start, timeout_s=60)
    if kind == "right":
        assert report.ok, str(report)
        assert [part.title for part in report.comparisons] == TITLES
        return
    assert not report.ok
    assert report.kinds == {CAUSES[mistake]}, str(report)
    wrong = [part.title for part in report.comparisons if not part.ok]
    # A constant divisor is wrong with any number of replicas, and is so alike.
    assert wrong == (["1 replica in one process"] if mistake == "constant divisor" else TITLES), str(report)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "kinds"),
    [
        ((12, "share", "padded"), set()),
        ((11, "share", "every"), {"each replica's mean weighs alike"}),
        ((11, "share", "padded"), {"example seen twice"}),
        ((11, "own", "every"), {"global batch grew", "each replica's mean weighs alike"}),
        ((11, "own", "padded"), {"global batch grew", "example seen twice"}),
    ],
)
def test_uneven_last_batch_of_ddp_is_named(arguments, kinds):
    report = verify_script(DDP_SCRIPT, [str(argument) for argument in arguments], start=start_anew, timeout_s=60)
    assert report.kinds == kinds, str(report)


@pytest.mark.slow
def test_a_batch_for_each_replica_may_be_meant():
    report = verify_script(DDP_SCRIPT, ["16", "own", "padded"], per_replica_batch=True, start=start_anew, timeout_s=60)
    assert report.ok, str(report)
