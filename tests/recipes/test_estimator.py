"""The recipe's command lines, alone and as the tasks of a cluster."""

import re

import pytest
import torch

import torchstrategy as ts
from tests.recipes import layouts

RECIPE = "estimator.py"
SMALL = ["max_steps=40", "save_every=20", "optimizer.lr=0.1", "folder=run"]
TESTED = re.compile(r"^After (\d+) steps: test accuracy ([01]\.\d{4}), loss \d\.\d{4}$", re.MULTILINE)
EXPORTED = re.compile(r"^Accuracy of the exported program: ([01]\.\d{4}); files: ", re.MULTILINE)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return f"data={layouts.write_images(tmp_path_factory.mktemp('images') / 'images.npz', 1000, 200)}"


def checked(output, folder, steps):
    """Return what the recipe has told of a run whose files are as they should be."""
    ((number, accuracy),) = TESTED.findall(output)
    assert int(number) == steps
    assert EXPORTED.findall(output) == [accuracy]
    assert (folder / "run" / "model" / f"model.ckpt-{steps}.pt").exists()
    return float(accuracy)


@pytest.mark.slow
def test_alone_and_a_second_start_goes_on(tmp_path, data):
    output = layouts.run_all(layouts.alone(RECIPE, *SMALL, data), tmp_path)
    assert checked(output, tmp_path, steps=40) > 0.4
    output = layouts.run_all(layouts.alone(RECIPE, *SMALL, data, "max_steps=60"), tmp_path)
    assert re.search(r"Restoring parameters from .*model\.ckpt-40", output)
    checked(output, tmp_path, steps=60)


def weights(folder):
    """Return the tensors that the last checkpoint holds of the model."""
    reader = ts.train.load_checkpoint(folder / "run" / "model")
    values = {
        name: torch.as_tensor(reader.get_tensor(name)) for name, _ in ts.train.list_variables(folder / "run" / "model")
    }
    return {name: value for name, value in values.items() if name.startswith("model.")}


def assert_same(found, expected, atol=1e-10):
    assert found.keys() == expected.keys() != set()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=atol, msg=name)


@pytest.mark.slow
def test_two_replicas_train_as_one_with_twice_the_batch(tmp_path, data):
    """Of one process they take turns with the batches; of two, each reads other images."""
    one, two, processes, workers = (tmp_path / name for name in ("one", "two", "processes", "workers"))
    options = [RECIPE, *SMALL, data, "dtype=float64"]
    layouts.run_all(layouts.alone(*options, "batch_size=128"), one)
    output = layouts.run_all(layouts.alone(*options, "strategy=mirrored", layouts.TWO_LOCAL), two)
    checked(output, two, steps=40)
    assert_same(weights(two), weights(one))
    checked(layouts.run_all(layouts.torchrun(*options, nproc=2), processes), processes, steps=40)
    layouts.run_all(layouts.tf_config(*options, num_workers=2), workers)
    assert_same(weights(workers), weights(processes), atol=0)


@pytest.mark.slow
def test_the_position_in_the_data_is_kept_if_asked_for(tmp_path, data):
    options = [RECIPE, *SMALL, data, "dtype=float64"]
    layouts.run_all(layouts.alone(*options), tmp_path / "unbroken")
    for name, is_kept in (("kept", "true"), ("anew", "false")):
        for max_steps in (20, 40):
            start = layouts.alone(*options, f"keep_position={is_kept}", f"max_steps={max_steps}")
            output = layouts.run_all(start, tmp_path / name)
        assert "Not evaluated here" in layouts.run_all(start, tmp_path / name)
        checked(output, tmp_path / name, steps=40)
    assert_same(weights(tmp_path / "kept"), weights(tmp_path / "unbroken"), atol=0)
    with pytest.raises(AssertionError):
        assert_same(weights(tmp_path / "anew"), weights(tmp_path / "unbroken"))


@pytest.mark.slow
def test_two_workers_and_an_evaluator(tmp_path, data):
    """They are started by the same command; the evaluator stands alone, and exports."""
    commands = layouts.tf_config(RECIPE, *SMALL, data, "keep_position=true", num_workers=2, evaluator=True)
    layouts.run_all(commands, tmp_path)
    model = tmp_path / "run" / "model"
    assert (model / "model.ckpt-40.pt").exists()
    assert list((model / "export" / "final").iterdir())
    assert list((model / "eval").glob("events.out.tfevents.*"))
