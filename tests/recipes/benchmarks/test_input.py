import json
import subprocess
import sys
from pathlib import Path

import input
import pytest

RECIPE = Path(__file__).parents[3] / "recipes" / "benchmarks" / "input.py"


def test_hidden_part_is_what_of_the_shorter_goes_on_behind_the_longer():
    assert input.hidden_part({"load": 2.0, "compute": 4.0, "both": 6.0}) == 0
    assert input.hidden_part({"load": 2.0, "compute": 4.0, "both": 4.0}) == 1


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read as Linux tells it")
def test_peak_memory_is_that_of_the_call_alone():
    # In a process of its own: memory that other tests have freed would be used again.
    program = """
import input, torch
big = torch.ones(16 << 20)
del big
print(*(input.peak_memory_mb(lambda: torch.ones(n << 20)) for n in (1, 24)))
"""
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=RECIPE.parent, capture_output=True, text=True, check=True, timeout=60
    )
    small, large = map(float, run.stdout.split())
    assert large - small > 60


SMALL = ["num_examples=40", "num_files=2", "batch_sizes=[8]", "overlap_repeats=1"]


@pytest.mark.slow
def test_benchmark_prints_and_writes_every_figure(run_benchmark, tmp_path):
    output = run_benchmark(*SMALL, "num_workers=[0,1]", "pairs=2")
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert len(results["epoch_s"]) == 5 * 3, "five kinds of data, each for 1 replica, 2 replicas and 2 processes"
    for name, result in results["epoch_s"].items():
        assert name in output
        assert len(result["torch"]) == len(result["ours"]) == 2
        assert result["ratio"]["low"] <= result["ratio"]["median"] <= result["ratio"]["high"]
    assert [len(peaks) for peaks in results["peak_mb"].values()] == [3, 3, 3]
    assert len(results["step_ms"]) == 4
    assert (tmp_path / "run" / "rates.png").stat().st_size > 0


@pytest.mark.slow
def test_reading_has_traces(run_benchmark, tmp_path):
    """More batches than an epoch has, of every source in every hosting."""
    options = ["pairs=1", "memory_epochs=1", "num_workers=[1]", "profile=true", "profile_steps={skip: 2, record: 5}"]
    output = run_benchmark(*SMALL, *options)
    folders = sorted((tmp_path / "run").glob("*/profile"))
    assert len(folders) == 4 * 3, "four sources, each for 1 replica, 2 replicas and 2 processes"
    assert output.count("Where the time of a step goes, in ms (means of 5 steps):") == len(folders)
    for folder in folders:
        ranks = ["rank_0.json", "rank_1.json"] if "processes" in folder.parent.name else ["rank_0.json"]
        assert sorted(path.name for path in folder.iterdir()) == ranks
        for rank in ranks:
            names = [event["name"] for event in json.loads((folder / rank).read_text())["traceEvents"]]
            assert names.count("ts::input") >= 5
    assert "ts.data.Dataset, shuffled, batch 8, 2 processes\n" in output
