"""The recipe's command lines, alone and as the tasks of a cluster."""

import re

import pytest

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


@pytest.mark.slow
@pytest.mark.parametrize("way", ["two in one process", "two by torchrun"])
def test_two_replicas(tmp_path, data, way):
    options = [RECIPE, *SMALL, data, "dtype=float64"]
    if way == "two in one process":
        commands = layouts.alone(*options, "strategy=mirrored", layouts.TWO_LOCAL)
    else:
        commands = layouts.torchrun(*options, nproc=2)
    checked(layouts.run_all(commands, tmp_path), tmp_path, steps=40)


@pytest.mark.slow
def test_two_workers_and_an_evaluator(tmp_path, data):
    """They are started by the same command; the evaluator stands alone, and exports."""
    commands = layouts.tf_config(RECIPE, *SMALL, data, "keep_position=true", num_workers=2, evaluator=True)
    layouts.run_all(commands, tmp_path)
    model = tmp_path / "run" / "model"
    assert (model / "model.ckpt-40.pt").exists()
    assert list((model / "export" / "final").iterdir())
    assert list((model / "eval").glob("events.out.tfevents.*"))
