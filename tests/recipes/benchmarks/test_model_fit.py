import json
import sys

import model_fit as benchmark
import pytest

OPTIONS = {
    "model": "mlp",
    "threads": 1,
    "seed": 0,
    "examples": 20,
    "batch_size": 8,
    "optimizer": {"lr": 0.001},
    "pairs": 1,
}


@pytest.mark.slow
def test_benchmark_prints_and_writes_every_figure(run_benchmark, tmp_path):
    options = ["models=[mlp]", "examples=100", "batch_size=20", "quick=true"]
    output = run_benchmark(*options, timeout=110)
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert set(results["overhead"]) == {f"mlp, {layout}" for layout in benchmark.LAYOUTS}
    for case, (seconds,) in results["overhead"].items():
        assert set(seconds) == {"fit", "loop"} | ({"plain PyTorch"} if case == "mlp, 1 replica" else set())
        assert all(len(times) == 3 and min(times) > 0 for times in seconds.values())
        assert case in output
    (start,) = results["throughput"]["mlp"]
    assert set(start) == {"this library, loader", "this library, arrays"}
    for figures in start.values():
        assert figures["version"].startswith("torchstrategy ")
        assert (len(figures["seconds"]), len(figures["loss"])) == (3, 4)
    assert "Lightning: not run; lightning=/path/to/python names one that has it." in output
    assert "Keras: not run; keras=/path/to/python names one that has it." in output


def test_the_loop_and_plain_torch_tell_what_fit_tells():
    """All sides do the same work: with the same seed, the same losses and accuracies."""
    found = {}
    for name, make in {"fit": benchmark.fit_epoch, "loop": benchmark.loop_epoch}.items():
        found[name] = epochs(lambda make=make: make(benchmark.ts.MirroredStrategy(["cpu:0", "cpu:1"]), OPTIONS))
    found["plain"] = epochs(lambda: benchmark.plain_epoch(OPTIONS))
    for epoch in range(2):
        for name in ("loss", "accuracy"):
            expected = found["plain"][epoch][name]
            assert found["fit"][epoch][name] == pytest.approx(expected, abs=1e-5)
            assert found["loop"][epoch][name] == pytest.approx(expected, abs=1e-5)


def epochs(make):
    benchmark.torch.manual_seed(0)
    epoch = make()
    figures = []
    for seed in (1, 2):
        benchmark.torch.manual_seed(seed)
        figure = epoch()
        history = getattr(figure, "history", None)
        figures.append(figure if history is None else {name: values[-1] for name, values in history.items()})
    return figures


@pytest.mark.slow
def test_peers_take_turns(tmp_path):
    found = benchmark.time_peers({"this library": sys.executable, "Lightning": None, "Keras": None}, OPTIONS, tmp_path)
    assert [len(figures["seconds"]) for figures in found.values()] == [1, 1]


def test_failures_of_the_other_side_are_told(tmp_path):
    with pytest.raises(RuntimeError, match=r"/no/python can't be started: .*No such file"):
        benchmark.Peer("/no/python", "keras_fit.py", OPTIONS, tmp_path / "log")
    with (
        benchmark.Peer(sys.executable, "keras_fit.py", OPTIONS, tmp_path / "log") as peer,
        pytest.raises(RuntimeError, match=r"keras_fit\.py failed with .*\n(.*\n)*.*No module named 'keras'"),
    ):
        peer.read()


def test_table(capsys):
    found = {
        "this library, loader": {"version": "ours 1", "seconds": [1.0, 1.0], "loss": [1.0, 0.5]},
        "Lightning, loader": {"version": "Lightning 2", "seconds": [2.0, 2.0], "loss": [1.0, 0.5]},
    }
    benchmark.print_throughput("mlp", [found, found], 1000)
    rows = capsys.readouterr().out.splitlines()
    assert rows[2].split() == ["this", "library,", "loader", "1,000", "1,000", "1,000"]
    assert rows[3].split() == ["Lightning,", "loader", "500", "500", "500", "2.00", "2.00", "to", "2.00"]
    benchmark.print_overhead("mlp", [{"fit": [1.02, 1.02], "loop": [1.0, 1.0]}] * 2, 100)
    assert capsys.readouterr().out.split() == ["mlp", "10.200", "10.000", "+2.0", "%", "+2.0", "to", "+2.0", "%"]
