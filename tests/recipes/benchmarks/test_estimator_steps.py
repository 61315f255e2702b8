import json

import pytest


@pytest.mark.slow
def test_each_piece_of_advice_is_measured_and_has_a_trace(run_benchmark, tmp_path):
    options = ["batch_size=4", "other_batch_sizes=[8]", "skip=1", "steps=2", "rounds=1"]
    run_benchmark(*options, "profile=true", "profile_steps={skip: 1, record: 1}")
    rows = json.loads((tmp_path / "run" / "results.json").read_text())
    assert [row["way"] for row in rows] == ["as in the tutorial", "batches of 8", "bfloat16", "RING"]
    assert rows[0]["ratio"] == 1.0
    for row in rows:
        examples = 2 * (8 if row["way"] == "batches of 8" else 4)
        assert row["examples_a_second"] == pytest.approx(1000 * examples / row["ms"])
    traces = {path.parent.parent.name for path in (tmp_path / "run").rglob("profile/*.json")}
    assert traces == {"as_in_the_tutorial", "batches_of_8", "bfloat16", "RING"}
