import json
import subprocess
import sys
from pathlib import Path

import pytest

RECIPE = Path(__file__).parents[3] / "recipes" / "benchmarks" / "estimator_steps.py"


@pytest.mark.slow
def test_each_piece_of_advice_is_measured_and_has_a_trace(tmp_path):
    options = ["batch_size=4", "other_batch_sizes=[8]", "skip=1", "steps=2", "rounds=1", "hydra.run.dir=run"]
    process = subprocess.run(
        [sys.executable, str(RECIPE), *options, "profile=true", "profile_steps={skip: 1, record: 1}"],
        cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    rows = json.loads((tmp_path / "run" / "results.json").read_text())
    assert [row["way"] for row in rows] == ["as in the tutorial", "batches of 8", "bfloat16", "RING"]
    assert rows[0]["ratio"] == 1.0
    for row in rows:
        examples = 2 * (8 if row["way"] == "batches of 8" else 4)
        assert row["examples_a_second"] == pytest.approx(1000 * examples / row["ms"])
    traces = {path.parent.parent.name for path in (tmp_path / "run").rglob("profile/*.json")}
    assert traces == {"as_in_the_tutorial", "batches_of_8", "bfloat16", "RING"}
