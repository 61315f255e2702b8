import json
import sys

import pytest
import servers as benchmark

SMALL = {
    "floats": 2000,
    "table": "[1000,4]",
    "rows": 10,
    "batch_size": 4,
    "repeats": 2,
    "closures": 20,
    "latencies": 5,
    "steps": 3,
    "row_steps": 4,
    "train_steps": 3,
}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_benchmark_prints_and_writes_every_figure(run_benchmark, tmp_path):
    options = [f"work.{name}={value}" for name, value in SMALL.items()]
    output = run_benchmark(*options, "rounds=1", "ps=1", "workers=[1,2]", timeout=110)
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert (results["ps"], results["work"]["table"]) == (1, [1000, 4])
    assert set(results["rounds"]) == {"limits", "ours, 1 workers", "ours, 2 workers"}
    for side, rounds in results["rounds"].items():
        assert len(rounds) == 1
        for figures in rounds:
            names = [name for name in figures if name != "version"]
            assert all(min(figures[name]) > 0 for name in names)
            if side != "limits":
                assert set(names) == set(benchmark.WORK)
                assert len(figures["empty_rate"]) == 2
                assert len(figures["empty_latency_ms"]) == 5
    for title, _ in benchmark.WORK.values():
        assert title.format(megabytes=0.008, rows=10) in output
    assert "TensorFlow's ParameterServerStrategy: not run; tensorflow=" in output
    assert "2 workers together have" in output


def test_table_shows_ratios_to_tensorflow(capsys):
    limits = [{"there_and_back_1_ms": [0.1], "there_and_back_dense_ms": [20.0], "there_and_back_rows_ms": [0.2]}]
    limits[0] |= {"copy_dense_ms": [3.0], "plain_train_rate": [60.0]}
    ours = [{name: [30.0, 40.0] for name in benchmark.WORK}]
    theirs = [{name: [70.0] for name in benchmark.WORK if name != "pull_push_ms"}]
    figures = {("ours", 1): ours, ("TF", 1): theirs}
    benchmark.print_table({"floats": 10_000_000, "rows": 1000, "batch_size": 64}, 2, limits, figures)
    printed = capsys.readouterr().out
    assert "Loopback: 4.00 GB/s" in printed
    row = next(line for line in printed.splitlines() if line.startswith("pull and push of 40 MB, ms"))
    assert row.split()[-4:] == ["20.00", "35.00", "-", "-"]
    row = next(line for line in printed.splitlines() if line.startswith("the same with -x in between, ms"))
    assert row.split()[-4:] == ["20.00", "35.00", "70.00", "0.50"]


def test_ratios_are_those_of_rounds():
    ours = [{"rate": [1.0, 3.0]}, {"rate": [10.0]}, {"rate": [4.0]}]
    theirs = [{"rate": [1.0]}, {"rate": [1.0]}, {"rate": [2.0]}]
    assert benchmark.ratio(ours, theirs, "rate") == 2.0
    assert benchmark.median_of(ours, "rate") == 3.5


@pytest.mark.slow
def test_failures_of_the_other_side_are_told(tmp_path):
    with pytest.raises(RuntimeError, match=r"/no/python can't be started: .*No such file"):
        benchmark.run_script("/no/python", "tensorflow_servers.py", {})
    with pytest.raises(RuntimeError, match=r"server_times\.py failed with .*\n(.*\n)*.*KeyError: 'workers'"):
        benchmark.run_script(sys.executable, "server_times.py", {})
