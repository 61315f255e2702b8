import json
import subprocess
import sys
from pathlib import Path

import benchmark
import pytest

RECIPE = Path(__file__).parents[2] / "recipes" / "benchmark.py"


def test_bootstrap_interval_encloses_the_median_ratio():
    ratio = benchmark.bootstrap_median_ratio([1.0, 2.0, 3.3, 4.0], [1.0, 2.0, 3.0, 5.0])
    assert ratio["median"] == pytest.approx(1.0)
    assert ratio["low"] == pytest.approx(0.8)
    assert ratio["high"] == pytest.approx(1.1)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_benchmark_prints_and_writes_every_figure(tmp_path):
    options = ["model=mlp", "pairs=2", "steps_per_block=2", "calls=20", "hydra.run.dir=run"]
    options += ["collective_processes=[2]", "collective_sizes=[1,5000,70000]", "most_collectives=20"]
    process = subprocess.run(
        [sys.executable, str(RECIPE), *options], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert process.returncode == 0, process.stderr
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert len(results["step_s"]) == 6
    for name, times in results["step_s"].items():
        assert name in process.stdout
        assert len(times) == 2
        assert all(seconds > 0 for seconds in times)
    for name in ("ours_over_ddp", "with_over_without_records"):
        assert 0 < results[name]["low"] <= results[name]["median"] <= results[name]["high"]
    collectives = results["collective_s"]["2"]
    assert {way: list(by_size) for way, by_size in collectives.items()} == {
        "gloo": ["1", "5000", "70000"],
        "message": ["1", "5000"],
        "shared memory": ["1", "5000", "70000"],
        "a user's all_reduce": ["1", "5000", "70000"],
    }
    assert all(len(times) >= 15 and min(times) > 0 for way in collectives.values() for times in way.values())
    assert "All-reduce of float32 between 2 processes" in process.stdout
    assert set(results["run_s"]) == {"default", "2 replicas"}
