import json

import pytest

WIDTH = 256
SMALL = [f"width={WIDTH}", "layers=2", "steps=3", "replicas=[2]", "processes=[2]"]


@pytest.mark.slow
def test_table_says_where_memory_is(run_benchmark, tmp_path):
    output = run_benchmark(*SMALL)
    rows = json.loads((tmp_path / "run" / "results.json").read_text())
    assert [(row["kind"], row["where"]) for row in rows] == [
        (kind, where) for where in ("2 in one process", "1 in each of 2") for kind in ("mirrored", "central")
    ]
    size = 4 * 2 * (WIDTH**2 + WIDTH)
    page = 4096 * 8  # tensors share their first and last pages
    for row in rows:
        device, host = row["device"], row["host"]
        assert abs(device["gradients"] - size) <= page
        if row["kind"] == "mirrored":
            assert abs(device["parameters"] - size) <= page
            assert abs(device["state"] - 2 * size) <= page
            assert host["parameters"] == host["state"] == 0
        else:
            assert device["parameters"] <= page
            assert device["state"] <= page
            assert abs(host["parameters"] - size) <= page
            assert abs(host["state"] - 2 * size) <= page
        assert row["where"] in output


@pytest.mark.slow
def test_every_case_has_traces(run_benchmark, tmp_path):
    output = run_benchmark(*SMALL, "profile=true", "profile_steps={skip: 1, record: 2}")
    found = sorted(str(path.relative_to(tmp_path / "run")) for path in (tmp_path / "run").rglob("profile/*.json"))
    assert found == sorted(
        f"{strategy}_{where}/profile/rank_{rank}.json"
        for strategy in ("CentralStorageStrategy", "MirroredStrategy")
        for where, ranks in (("2_in_one_process", (0,)), ("1_in_each_of_2", (0, 1)))
        for rank in ranks
    )
    for where in ("2 in one process", "1 in each of 2"):
        assert f"MirroredStrategy, {where}\nWhere the time of a step goes" in output
