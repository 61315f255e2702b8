"""The recipe's command lines, alone and as the tasks of a cluster, and the functions it gives to the Estimator."""

import json
import re

import estimator
import pytest
import torch
from hydra import compose, initialize_config_dir

import torchstrategy as ts
from tests.recipes import layouts

RECIPE = "estimator.py"
SMALL = ["model=mlp", "max_steps=40", "save_every=20", "optimizer.lr=0.1", "folder=run"]
SUMMARY = re.compile(
    r"^Test accuracy: (?P<accuracy>[01]\.\d{4}), loss: (?P<loss>\d\.\d{4}) after (?P<steps>\d+) steps in [\d.]+ s; "
    r"files: (?P<folder>.+)$",
    re.MULTILINE,
)
EXPORTED = re.compile(r"^Accuracy of the exported program: ([01]\.\d{4})$", re.MULTILINE)


def settings(*options):
    with initialize_config_dir(str(layouts.RECIPES.parent / "conf"), version_base="1.3"):
        return compose("estimator", list(options))


def checked(output, folder, steps):
    """Return what the recipe has told of a run whose files are as they should be."""
    (summary,) = SUMMARY.finditer(output)
    assert summary["folder"] == str(folder / "run")
    assert int(summary["steps"]) == steps
    assert EXPORTED.findall(output) == [summary["accuracy"]]
    model_path = folder / "run" / "model"
    assert (model_path / f"model.ckpt-{steps}.pt").exists()
    assert (folder / "run" / "learning_curve.png").stat().st_size > 10_000
    results = json.loads((folder / "run" / "results.json").read_text())
    assert results["last"]["accuracy"] == pytest.approx(float(summary["accuracy"]), abs=1e-4)
    return float(summary["accuracy"])


@pytest.mark.slow
def test_alone_and_a_second_start_goes_on(tmp_path):
    accuracy = checked(layouts.run_all(layouts.alone(RECIPE, *SMALL), tmp_path), tmp_path, steps=40)
    assert accuracy > 0.4
    output = layouts.run_all(layouts.alone(RECIPE, *SMALL, "max_steps=60"), tmp_path)
    assert re.search(r"Restoring parameters from .*model\.ckpt-40", output)
    checked(output, tmp_path, steps=60)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp64", "bf16", "fp16"])
def test_precision(precision, tmp_path):
    options = [*SMALL, f"precision={precision}", "strategy=mirrored", layouts.TWO_LOCAL]
    checked(layouts.run_all(layouts.alone(RECIPE, *options), tmp_path), tmp_path, steps=40)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", ["shard", "seed"])
def test_two_workers_and_an_evaluator(way, tmp_path):
    output = layouts.run_all(layouts.alone(RECIPE, *SMALL, "cluster.workers=2", f"input={way}"), tmp_path)
    assert checked(output, tmp_path, steps=40) > 0.4
    assert re.search(r"^\[worker 0\] .*MultiWorkerMirroredStrategy .*num_workers = 2", output, re.MULTILINE)
    assert re.search(r"^\[evaluator 0\] .*Saving dict for global step 40", output, re.MULTILINE)


def run_two_workers(folder, *options):
    """Return what it printed, and the weights."""
    command = [*SMALL, "cluster.workers=2", "keep_position=true", *options]
    output = layouts.run_all(layouts.alone(RECIPE, *command), folder)
    checked(output, folder, steps=40)
    return output, read_weights(folder / "run" / "model")


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    output, weights = run_two_workers(tmp_path_factory.mktemp("unbroken"))
    assert "killed" not in output
    assert len(weights) == 4
    return weights


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("task", ["worker_0", "worker_1"])
def test_a_killed_worker_loses_nothing(task, unbroken, tmp_path):
    """With the position in the data in the checkpoints the weights are those of an unbroken run, bit for bit."""
    output, broken = run_two_workers(tmp_path, f"kill.task={task}", "kill.step=30", "cluster.max_restarts=3")
    assert f"{task.replace('_', ' ')} was killed by SIGKILL; starting it again" in output
    assert all(torch.equal(broken[name], value) for name, value in unbroken.items())


def read_weights(path):
    names = [name for name, _ in ts.train.list_variables(path) if name.startswith("model.")]
    return {name: torch.as_tensor(ts.train.load_variable(path, name)) for name in names}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_parameter_servers(tmp_path):
    options = [*SMALL, "cluster.ps=2", "cluster.workers=1", "max_steps=100", "save_every=50"]
    output = layouts.run_all(layouts.alone(RECIPE, *options), tmp_path)
    (summary,) = SUMMARY.finditer(output)
    assert int(summary["steps"]) >= 100
    assert float(summary["accuracy"]) > 0.4
    assert {path.name for path in (tmp_path / "run" / "tasks").iterdir()} == {
        "chief_0",
        "evaluator_0",
        "ps_0",
        "ps_1",
        "worker_0",
    }


@pytest.mark.slow
def test_linear_model_ends_where_that_of_tf_does(tmp_path):
    options = ["linear=true", "folder=run", "strategy=mirrored", layouts.TWO_LOCAL]
    output = layouts.run_all(layouts.alone(RECIPE, *options), tmp_path)
    weight, bias = (
        float(re.search(rf"^{name}: \[+([\d.]+)\]+$", output, re.MULTILINE)[1])
        for name in ("linear/linear_model/feats/weights", "linear/linear_model/bias_weights")
    )
    assert weight == bias == pytest.approx(0.49999994, abs=1e-7)


def numbers_read(way, pipeline_id, num_batches):
    """Return what a worker reads of images that are numbers, when there are two workers."""
    config = settings(f"input={way}", "batch_size=10")
    context = ts.InputContext(num_input_pipelines=2, input_pipeline_id=pipeline_id, num_replicas_in_sync=2)
    dataset = estimator.make_input_fn(config)("train", context)
    batches = [images for images, _ in dataset.take(num_batches)]
    assert all(len(batch) == 10 for batch in batches)
    return [image.numpy().tobytes() for image in torch.cat(batches)]


def test_sharded_workers_read_different_images():
    first, second = (set(numbers_read("shard", pipeline_id, 300)) for pipeline_id in (0, 1))
    assert len(first) == len(second) == 3000
    assert not first & second


def test_workers_with_seeds_read_all_images_in_different_orders():
    first, second = (numbers_read("seed", pipeline_id, 600) for pipeline_id in (0, 1))
    assert len(set(first)) == 6000
    assert set(first) == set(second)
    assert first != second
    assert numbers_read("seed", 0, 3) == first[:30]


def test_evaluation_reads_all_test_images():
    dataset = estimator.make_input_fn(settings("batch_size=300"))("eval")
    assert [len(labels) for _, labels in dataset] == [300, 300, 300, 100]


def test_unknown_way_of_input():
    with pytest.raises(ValueError, match=r"input must be shard or seed\. Received: none"):
        estimator.make_input_fn(settings("input=none"))


def test_the_loss_is_divided_by_the_batch_size():
    model_fn = estimator.make_model_fn(settings("model=mlp", "batch_size=4"), torch.float32)
    spec = model_fn(None, None, "eval")
    logits, labels = torch.randn(8, 10), torch.arange(8)
    expected = 2 * torch.nn.functional.cross_entropy(logits, labels)
    torch.testing.assert_close(spec.loss(logits, labels), expected)
