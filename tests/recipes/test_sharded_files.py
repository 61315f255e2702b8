"""A run that ends within an epoch and goes on with other replicas sees every example once in each epoch."""

import re

import numpy as np
import pytest

from tests.recipes import layouts

RECIPE = "sharded_files.py"
SMALL = ["global_batch_size=500", "shuffle_buffer=100", "save_every=3", "epochs=1", "folder=run"]
SUMMARY = re.compile(
    r"^Epoch (?P<epoch>\d), loss: [\d.]+, accuracy: (?P<accuracy>[\d.]+); (?P<seen>\d+) examples were seen in "
    r"(?P<starts>\d) start\(s\): (?P<never>\d+) of (?P<total>\d+) never, (?P<repeated>\d+) more than once$",
    re.MULTILINE,
)
EXACTLY_ONCE = {"seen": "6000", "never": "0", "total": "6000", "repeated": "0"}


def summaries(output):
    return [match.groupdict() for match in SUMMARY.finditer(output)]


def two_processes(*options):
    return layouts.torchrun(RECIPE, *options, nproc=2)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_processes_are_stopped_and_three_replicas_of_one_go_on(tmp_path):
    first = layouts.run_all(two_processes(*SMALL, "stop_at_step=5"), tmp_path)
    assert "FILE: asked for; of 8 files each process reads its own (process 0: 4, process 1: 4)" in first
    assert first.count("Stopped after step 5. Start again to go on from the last checkpoint.") == 1
    assert not summaries(first)
    assert len(list((tmp_path / "run").glob("*/*.npz"))) == 8, "what the other process has written is gone"

    second = layouts.run_all(layouts.alone(RECIPE, *SMALL, "strategy.devices=[cpu:0,cpu:1,cpu:2]"), tmp_path)
    assert "Going on with epoch 1 after step 3: 1500 of 6000 examples were seen." in second
    (summary,) = summaries(second)
    assert summary.items() >= {**EXACTLY_ONCE, "epoch": "1", "starts": "2"}.items()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_that_is_stopped_again_and_again(tmp_path):
    """Three replicas of one process, two processes twice, one: every example once in each epoch."""
    layouts.run_all(layouts.alone(RECIPE, *SMALL, "strategy.devices=[cpu:0,cpu:1,cpu:2]", "stop_at_step=4"), tmp_path)
    second = layouts.run_all(two_processes(*SMALL, "stop_at_step=8"), tmp_path)  # one reads on, the other has no files
    assert "Going on with epoch 1 after step 3: 1500 of 6000 examples were seen." in second
    (summary,) = summaries(layouts.run_all(two_processes(*SMALL), tmp_path))
    assert summary.items() >= {**EXACTLY_ONCE, "epoch": "1", "starts": "3"}.items()
    fourth = layouts.run_all(layouts.alone(RECIPE, *SMALL, "epochs=2"), tmp_path)
    assert re.search(r"Going on with epoch 2 after step \d+: 0 of 6000 examples were seen\.", fourth)
    (summary,) = summaries(fourth)
    assert summary.items() >= {**EXACTLY_ONCE, "epoch": "2", "starts": "1"}.items()
    assert float(summary["accuracy"]) > 0.5


@pytest.mark.slow
def test_files_of_another_format(tmp_path):
    """They hold what the recipe would write, so the figures are the same."""
    expected = layouts.run_all(layouts.alone(RECIPE, *SMALL), tmp_path)
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "parquet").mkdir()
    for path in sorted((tmp_path / "run" / "8_shards").iterdir()):
        columns = dict(np.load(path))
        columns["images"] = pyarrow.FixedShapeTensorArray.from_numpy_ndarray(columns["images"])
        parquet.write_table(pyarrow.table(columns), tmp_path / "parquet" / f"{path.stem}.parquet")
    options = [f"shards={tmp_path / 'parquet'}", "reader._target_=torchstrategy.data.readers.parquet", "folder=again"]
    found = layouts.run_all(layouts.alone(RECIPE, *SMALL[:-1], *options), tmp_path)
    assert summaries(found) == summaries(expected) != []
