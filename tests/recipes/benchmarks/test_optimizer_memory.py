import json

import pytest

WIDTH, LAYERS = 64, 4


@pytest.mark.slow
def test_split_states_take_a_share_and_steps_have_traces(run_benchmark, tmp_path):
    options = [f"width={WIDTH}", f"layers={LAYERS}", "steps=2", "rounds=1", "processes=[2]"]
    run_benchmark(*options, "profile=true", "profile_steps={skip: 1, record: 2}")
    rows = {row["way"]: row for row in json.loads((tmp_path / "run" / "results.json").read_text())}
    counts = 2 * LAYERS * 4  # of steps, a number for each parameter
    whole = 2 * 4 * LAYERS * (WIDTH**2 + WIDTH) + counts
    assert rows["whole"]["bytes"] == [whole, whole]
    for way in ("split", "ZeroRedundancyOptimizer"):
        assert sum(rows[way]["bytes"]) == whole
        assert max(rows[way]["bytes"]) < 0.6 * whole
    found = sorted(path.parent.parent.name for path in (tmp_path / "run").rglob("profile/*.json"))
    assert found == ["split", "split", "whole", "whole"]
