"""A run that loses a process, and starts again, ends with exactly what a run without losses ends with."""

import functools
import re

import pytest
import torch

import torchstrategy as ts
from tests.recipes import layouts

RECIPE = "fault_tolerant.py"
# 12 steps an epoch; the saves after steps 5, 10, 15 and 20 are in the middle of an epoch.
SMALL = ["global_batch_size=20", "save_every=5", "folder=run", "dropout=0.5"]
LAYOUTS = {
    "2 by launch": functools.partial(layouts.launch, RECIPE, nproc=2),
    "2 times 2 by launch": functools.partial(layouts.launch, RECIPE, layouts.TWO_LOCAL, nproc=2),
    "2 by torchrun": functools.partial(layouts.torchrun, RECIPE, nproc=2),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return f"data={layouts.write_images(tmp_path_factory.mktemp('images') / 'images.npz')}"


def saved(folder):
    """Return all that the last save holds, the position in the data and the optimizer's state included."""
    reader = ts.train.load_checkpoint(folder / "run" / "checkpoints")
    return {name: reader.get_tensor(name) for name, _ in ts.train.list_variables(folder / "run" / "checkpoints")}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, data):
    """What a layout ends with if no process is lost."""

    @functools.cache
    def run_once(layout):
        folder = tmp_path_factory.mktemp("unbroken")
        layouts.run_all(LAYOUTS[layout](*SMALL, data), folder)
        return saved(folder)

    return run_once


def check_same(first, second):
    assert first.keys() == second.keys()
    for name, value in first.items():
        torch.testing.assert_close(torch.as_tensor(value), torch.as_tensor(second[name]), rtol=0, atol=0, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, 10, 17])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losing_a_process(layout, step, unbroken, data, tmp_path):
    """Before the first save, right after one, and in the second epoch."""
    output = layouts.run_all(LAYOUTS[layout](*SMALL, data, f"kill.step={step}", max_restarts=1), tmp_path / "broken")
    assert "exitcode: -9" in output, "a process was lost"
    went_on = re.findall(
        r"^Going on with epoch (\d) after step (\d+): .*run was there already\.$", output, re.MULTILINE
    )
    assert went_on == {3: [], 10: [("1", "10")], 17: [("2", "15")]}[step]
    assert output.count("Trained for 2 epochs, 24 steps.") == 1
    check_same(unbroken(layout), saved(tmp_path / "broken"))


@pytest.mark.slow
def test_going_on_with_other_replicas(data, tmp_path):
    """A second start may have another layout; without random layers the weights are the same but for rounding."""
    plain = [*SMALL, "dropout=0.0", "dtype=float64", data]
    layouts.run_all(layouts.alone(RECIPE, *plain, "strategy=one_device"), tmp_path / "unbroken")
    broken = tmp_path / "broken"
    killed = layouts.alone(RECIPE, *plain, "strategy=one_device", "kill.rank=0", "kill.step=8")
    with pytest.raises(RuntimeError, match=r"exit statuses \[-9\]"):
        layouts.run_all(killed, broken)
    output = layouts.run_all(layouts.tf_config(RECIPE, *plain, num_workers=3), broken)
    assert "Going on with epoch 1 after step 5: " in output
    expected, found = saved(tmp_path / "unbroken"), saved(broken)
    for name in (name for name in expected if name.startswith(("model.", "optimizer."))):
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-10)


@pytest.mark.slow
def test_whoever_the_processes_were_started_by(unbroken, data, tmp_path):
    """Each knows its rank from TF_CONFIG; the same command again loses none."""
    options = [RECIPE, *SMALL, data, "kill.step=8"]
    with pytest.raises(RuntimeError, match=r"exit statuses \[\d+, -9\]") as caught:
        layouts.run_all(layouts.tf_config(*options, num_workers=2), tmp_path)
    assert "Going on" not in str(caught.value)
    output = layouts.run_all(layouts.tf_config(*options, num_workers=2), tmp_path)
    assert "Going on with epoch 1 after step 5: " in output
    check_same(unbroken("2 by torchrun"), saved(tmp_path))
