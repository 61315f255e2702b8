"""The benchmarks are scripts beside the library: their folder is where Python finds what they share."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "recipes" / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))


@pytest.fixture
def run_benchmark(request, tmp_path):
    """Run the benchmark that a file of tests is named after; its files are in ``tmp_path / "run"``."""

    def run(*options, timeout=100):
        recipe = BENCHMARKS / request.path.name.removeprefix("test_")
        process = subprocess.run(
            [sys.executable, str(recipe), *options, "hydra.run.dir=run"],
            cwd=tmp_path, capture_output=True, text=True, timeout=timeout, check=False,
        )  # fmt: skip
        assert process.returncode == 0, process.stderr
        return process.stdout

    return run
