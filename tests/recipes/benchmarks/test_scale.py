import json

import pytest


@pytest.mark.slow
def test_processes_and_simulated_ranks_send_the_same_and_rank_0_no_more_in_a_large_job(run_benchmark, tmp_path):
    """The recipe itself fails where what processes have sent is not what simulated ranks send."""
    options = ["processes=[2,3]", "ranks=[2,17,256]", "parameters=50", "steps=3", "per_host=4"]
    run_benchmark(*options, "profile=true", "profile_steps={skip: 1, record: 2}")
    rows = json.loads((tmp_path / "run" / "results.json").read_text())
    for case in ("equal", "different"):
        sent = {row["ranks"]: row for row in rows if row["case"] == case and row["how"] == "simulated"}
        assert sent[2]["messages"] == 1
        assert sent[256]["bytes"] < 2 * sent[17]["bytes"]
        assert sent[256]["most"] < 17 * 2 * sent[2]["bytes"]
        assert sent[256]["hops"] <= 8
    for case in ("one fails", "all fails"):
        news = {row["ranks"]: row for row in rows if row["case"] == case and row["how"] == "simulated"}
        assert case != "one fails" or news[256]["news"] == 255
        assert news[256]["most"] < 256  # in pairs each would tell it to each
        assert news[256]["knows_s"] < 0.1
    starts = {row["ranks"]: row for row in rows if row["case"] == "start"}
    assert starts[256]["requests"] < 9 * 256
    assert starts[256]["bytes"] < 1000 * 256
    found = sorted(path.parent.parent.name for path in (tmp_path / "run").rglob("profile/*.json"))
    assert found == [name for name in ("2_different", "2_equal", "3_different", "3_equal") for _ in range(int(name[0]))]
