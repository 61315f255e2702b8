import json
import subprocess
import sys
from pathlib import Path

import pytest

RECIPE = Path(__file__).parents[3] / "recipes" / "benchmarks" / "optimizer_memory.py"
WIDTH, LAYERS = 64, 4


@pytest.mark.slow
def test_split_states_take_a_share_and_steps_have_traces(tmp_path):
    options = [f"width={WIDTH}", f"layers={LAYERS}", "steps=2", "rounds=1", "processes=[2]", "hydra.run.dir=run"]
    process = subprocess.run(
        [sys.executable, str(RECIPE), *options, "profile=true", "profile_steps={skip: 1, record: 2}"],
        cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    rows = {row["way"]: row for row in json.loads((tmp_path / "run" / "results.json").read_text())}
    counts = 2 * LAYERS * 4  # of steps, a number for each parameter
    whole = 2 * 4 * LAYERS * (WIDTH**2 + WIDTH) + counts
    assert rows["whole"]["bytes"] == [whole, whole]
    for way in ("split", "ZeroRedundancyOptimizer"):
        assert sum(rows[way]["bytes"]) == whole
        assert max(rows[way]["bytes"]) < 0.6 * whole
    found = sorted(path.parent.parent.name for path in (tmp_path / "run").rglob("profile/*.json"))
    assert found == ["split", "split", "whole", "whole"]
