import ast
import json
from pathlib import Path

import pytest
import training as benchmark
import training_report as report
from comparisons import bootstrap_median_ratio, markdown, spread_cell
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from training_steps import ALONE, CONCURRENT, OURS, PLAIN, TURNS

RECIPE = Path(__file__).parents[3] / "recipes" / "benchmarks" / "training.py"
SMALL = ["models=[mlp]", "scaling={model:mlp,replicas:[2]}", "starts=1", "pairs=2", "block_s=0.001", "batch_size=8"]
SMALL += ["run={calls:20,steps:3}", "profile_steps={skip:1,record:1}"]
SMALL += ["collectives.processes=[2]", "collectives.sizes=[1,5000,70000]", "collectives.most=20"]


def test_bootstrap_interval_encloses_the_median_ratio():
    ratio = bootstrap_median_ratio([1.0, 2.0, 3.3, 4.0], [1.0, 2.0, 3.0, 5.0])
    assert ratio["median"] == pytest.approx(1.0)
    assert ratio["low"] == pytest.approx(0.8)
    assert ratio["high"] == pytest.approx(1.1)


def test_tables_are_markdown_and_line_up():
    assert markdown(["", "ms"], [["DDP", "1.00"], ["ours", "12.0"]]) == (
        "|      | ms   |\n| ---- | ---- |\n| DDP  | 1.00 |\n| ours | 12.0 |"
    )
    assert spread_cell([0.001] * 9 + [1.5], 1e-3) == "1.00 (1.00 to 151)"


def test_table_of_steps_compares_pairs_and_names_the_best_peer():
    times = {
        "DDP": [4e-3, 8e-3],
        "Fabric": [2e-3, 4e-3],
        OURS: [1e-3, 2e-3],
        PLAIN: [3e-3, 6e-3],
        CONCURRENT: [1e-3, 1e-3],
    }
    results = {"options": {"replicas": 2, "settings": {"default": None}}, "steps": {"mlp": {"default": times}}}
    text = report.steps_table(results)
    rows = {cells[1].strip(): [cell.strip() for cell in cells[2:-1]] for cells in map(split_row, text.splitlines())}
    assert rows["mlp, ms a step"] == ["default", "ours / it", "ours, concurrent / it"]
    assert rows["DDP, 2 processes"] == ["6.00 (4.40 to 7.60)", "0.25 (0.25 to 0.25)", "0.19 (0.12 to 0.25)"]
    assert rows["ours, 2 processes"] == ["1.50 (1.10 to 1.90)", "", "0.75 (0.50 to 1.00)"]
    assert rows["Accelerate, 2 processes"] == ["not run", "", ""]
    assert rows["TF MirroredStrategy, 1 process"] == ["not run", "", ""]
    assert "mlp, default: ours / best peer (Fabric), median of 2 pairs: 0.500 (95 % interval 0.500 to 0.500)." in text


def split_row(line):
    return line.split("|") if line.startswith("|") else ["", line, ""]


def test_unknown_names_are_told():
    with initialize_config_dir(str(RECIPE.parents[2] / "conf" / "benchmarks"), version_base="1.3"):
        options = OmegaConf.to_container(compose("training", ["models=[mlp]", "tensorflow=/its/python"]))
    assert benchmark.check(options)["described"]["mlp"]["_target_"] == "models.mlp"
    with pytest.raises(ValueError, match=r"parts must be of \['steps', .*Received: \['speed'\]"):
        benchmark.check({**options, "parts": ["speed"]})
    with pytest.raises(ValueError, match=r"models must be of \[.*'conv_net', .*Received: \['resnet'\]"):
        benchmark.check({**options, "models": ["resnet"]})
    with pytest.raises(ValueError, match="the optimizer must be adam"):
        benchmark.check({**options, "optimizer": {"_target_": "torch.optim.SGD"}})


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_benchmark_prints_and_writes_every_figure(run_benchmark, tmp_path):
    output = run_benchmark(*SMALL, "profile=true", timeout=280)
    run = tmp_path / "run"
    results = json.loads((run / "results.json").read_text())
    ways = {"DDP", "DDP, gradients as views", OURS, PLAIN, CONCURRENT, TURNS, ALONE}
    assert set(results["steps"]["mlp"]) == {"default", "tuned"}
    for times in results["steps"]["mlp"].values():
        assert set(times) >= ways
        assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in times.values())
    for (figures,) in results["starts"]["mlp"].values():
        assert 0 < figures["built"] < figures["seconds"]
        assert figures["peak"] > figures["held"] > 0
    assert list(results["scaling"]) == ["2"]
    assert set(results["scaling"]["2"]) >= {"DDP", OURS, PLAIN, CONCURRENT, TURNS}
    assert set(results["run"]["costs"]) == {"the default strategy", "replicas in turns", "concurrent replicas"}
    assert {way: list(by_size) for way, by_size in results["collectives"]["processes"]["2"].items()} == {
        "gloo": ["1", "5000", "70000"],
        "message": ["1", "5000"],
        "shared memory": ["1", "5000", "70000"],
        "a user's all_reduce": ["1", "5000", "70000"],
    }
    printed = output
    for table in (run / "tables.md").read_text().strip().split("\n\n"):
        assert table in printed
    assert "| TF MirroredStrategy, 1 process       | not run" in printed
    assert "Where the time of a step goes" in printed
    assert (run / "mlp" / "profile" / "rank_0.json").exists()
    assert (run / "benchmark.png").stat().st_size > 10_000


def test_tensorflow_has_every_model_of_the_benchmark():
    """Read from its source, because TensorFlow is not installed here."""
    conf = RECIPE.parents[2] / "conf" / "benchmarks"
    tree = ast.parse(RECIPE.with_name("tensorflow_mirrored.py").read_text(encoding="utf-8"))
    (table,) = (
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MODELS"
    )
    known = {key.value for key in table.keys}
    models = OmegaConf.load(conf / "training.yaml").models
    assert len(models) > 3
    assert {OmegaConf.load(conf / f"model/{name}.yaml")._target_ for name in models} <= known
