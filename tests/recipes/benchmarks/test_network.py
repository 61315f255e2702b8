"""The benchmark on a slow network, and its model of the step time."""

import json

import pytest
from network_model import Costs, Traffic, fit
from slow_network import Link, SlowNetwork

SHAPES = [[512, 1024], [1024], [256, 512]]
COMPUTE = Costs(forward=0.01, backward=0.02, optimizer=0.005)


def test_what_travels():
    assert Traffic(overlaps=False).buckets(SHAPES) == [(1.0, 4 * (512 * 1024 + 1024 + 256 * 512))]
    shares, sizes = zip(*Traffic(bits=16).buckets(SHAPES), strict=True)
    assert sizes == (2 * 256 * 512, 2 * 1024, 2 * 512 * 1024)
    assert shares == pytest.approx((0.199, 0.201, 1.0), abs=1e-3)
    assert Traffic(rank=2).buckets(SHAPES)[0][1] == 4 * 2 * (256 + 512)
    assert Traffic(rank=300).buckets(SHAPES)[0][1] == 4 * 256 * 512, "never more than the matrix"


def test_a_sum_takes_what_a_ring_sends_and_waits_for():
    costs = Costs(0, 0, 0, efficiency=0.5, waits=3)
    # 2 (P - 1) / P of 4 MiB, at half of 8 MiB a second; and 6 steps and 3 times 6 MiB of waiting for 2 ms
    assert costs.sum(4 * 2**20, 4, Link(mbit=8 * 1.048576 * 8, delay_ms=2)) == pytest.approx(1.5 + 24 * 0.002)


def test_only_what_backward_does_not_hide_takes_time():
    link = Link(mbit=1e9, delay_ms=0)
    assert COMPUTE.step("", Traffic(), SHAPES, 2, link) == pytest.approx(0.035, rel=1e-3)
    last = COMPUTE.sum(4 * 512 * 1024, 2, Link(1000, 0))
    assert COMPUTE.step("", Traffic(), SHAPES, 2, Link(1000, 0)) == pytest.approx(0.035 + last)
    whole = COMPUTE.sum(4 * (512 * 1024 + 1024 + 256 * 512), 2, Link(1000, 0))
    assert COMPUTE.step("", Traffic(overlaps=False), SHAPES, 2, Link(1000, 0)) == pytest.approx(0.035 + whole)


def test_the_fit_finds_what_the_figures_were_made_with():
    truth = Costs(0.01, 0.02, 0.005, efficiency=0.9, waits=1.2, own_work={"a": 0.004, "b": 0.0})
    traffic = {"a": Traffic(), "b": Traffic(bits=16, overlaps=False)}
    links = [Link(1000, 0.1), Link(200, 5), Link(50, 1)]
    paces = dict(zip(links, (1.0, 1.5, 0.8), strict=True))
    measured = {
        link: {way: truth.step(way, traffic[way], SHAPES, 2, link, paces[link]) for way in traffic} for link in links
    }
    found = fit(COMPUTE, traffic, SHAPES, 2, measured, paces)
    assert (found.efficiency, found.waits) == pytest.approx((0.9, 1.2))
    assert found.own_work == pytest.approx(truth.own_work, abs=1e-9)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_benchmark_compares_ways_and_checks_its_model(run_benchmark, tmp_path):
    try:
        with SlowNetwork(2, Link(1000, 0)):
            pass
    except RuntimeError as error:
        pytest.skip(str(error))
    options = ["model=mlp", "rounds=2", "steps=1", "compute_steps=2"]
    options += ["profile=true", "profile_steps={skip: 1, record: 1}"]
    options += ["ways=[DDP,ours,'ours, no overlap','ours, bf16','ours, PowerSGD','DDP, PowerSGD']"]
    options += ["links=[{mbit: 20, delay_ms: 1}, {mbit: 5, delay_ms: 4}, {mbit: 20, delay_ms: 4}]"]
    output = run_benchmark(*options, timeout=250)
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert [one["link"] for one in results["links"]] == results["options"]["links"]
    for one in results["links"]:
        assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in one["step_s"].values())
        sent = {way: min(num_bytes) for way, num_bytes in one["sent_bytes"].items()}
        gradients = 4 * (784 * 32 + 32 + 32 * 10 + 10)
        for way in ("DDP", "ours", "ours, no overlap"):
            assert gradients < sent[way] < 1.5 * gradients
        assert gradients / 2 < sent["ours, bf16"] < 0.8 * gradients
        assert sent["ours, PowerSGD"] < gradients / 4
        slowest = one["link"]["mbit"] * 1e6
        assert min(one["step_s"]["ours"]) > 0.9 * gradients * 8 / slowest
        assert sent["one replica alone"] < 1000
    assert set(results["model"]["own_work"]) == set(one["step_s"]) - {"one replica alone"}
    assert "20 Mbit/s, 4 ms" in output
    assert "fitted" in output
    assert "32 hosts" in output
    assert (tmp_path / "run" / "tables.md").exists()
    folders = [tmp_path / "run" / way / "profile" for way in ("ours", "ours_no_overlap", "ours_bf16", "ours_PowerSGD")]
    for folder in folders:
        for path in (folder / "rank_0.json", folder / "rank_1.json"):
            names = [event["name"] for event in json.loads(path.read_text())["traceEvents"]]
            assert any(name.startswith("ts::move the sum of gradients") for name in names), path
    assert set((tmp_path / "run").glob("*/profile")) == set(folders)
    assert output.count("rank 0      rank 1\n") == len(folders)
