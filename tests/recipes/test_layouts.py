"""However its processes are started, the custom loop ends with the weights of one process with one replica."""

import re

import pytest
import torch

import torchstrategy as ts
from tests.recipes import layouts

RECIPE = "custom_loop.py"
# Four steps an epoch; the last batch has 30 examples, which three and four replicas can't divide evenly.
COMMON = ["-m", "model=mlp", "epochs=2", "global_batch_size=1990", "hydra.sweep.dir=sweep"]
SGD = ["optimizer=sgd", "learning_rate.base=0.1", "precision=fp32", "hydra.sweep.subdir=sgd"]
ADAM = ["optimizer=adam", "learning_rate.base=0.002", "precision=fp64", "hydra.sweep.subdir=adam"]
TOLERANCE = {"sgd": 1e-6, "adam": 1e-10}
LAYOUTS = {
    "2 by TF_CONFIG": lambda *options: layouts.tf_config(RECIPE, *options, num_workers=2, chief=True),
    "3 by TF_CONFIG": lambda *options: layouts.tf_config(RECIPE, *options, num_workers=3),
    "2 by torchrun": lambda *options: layouts.torchrun(RECIPE, *options, nproc=2),
    "3 by torchrun": lambda *options: layouts.torchrun(RECIPE, *options, nproc=3),
    "2 by the launcher": lambda *options: layouts.launcher(RECIPE, *options, nproc=2),
    "3 by the launcher": lambda *options: layouts.launcher(RECIPE, *options, nproc=3),
    "2 times 2 by the launcher": lambda *options: layouts.launcher(RECIPE, *options, layouts.TWO_LOCAL, nproc=2),
    "2 times 2 by TF_CONFIG": lambda *options: layouts.tf_config(RECIPE, *options, layouts.TWO_LOCAL, num_workers=2),
}


def train(commands, folder):
    layouts.run_all(commands, folder)
    runs = list(folder.glob("sweep/*/checkpoints"))
    assert len(runs) == 1, "one run directory for all processes"
    reader = ts.train.load_checkpoint(runs[0])
    return {name: reader.get_tensor(name) for name, _ in ts.train.list_variables(runs[0]) if name.startswith("model.")}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The weights of one process with one replica."""
    return {
        name: train(layouts.alone(RECIPE, *COMMON, *options, "strategy=one_device"), tmp_path_factory.mktemp(name))
        for name, options in (("sgd", SGD), ("adam", ADAM))
    }


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_are_those_of_one_process(layout, optimizer, expected, tmp_path):
    options = SGD if optimizer == "sgd" else ADAM
    weights = train(LAYOUTS[layout](*COMMON, *options), tmp_path)
    assert weights.keys() == expected[optimizer].keys()
    for name, weight in weights.items():
        assert weight.dtype == (torch.float32 if optimizer == "sgd" else torch.float64)
        torch.testing.assert_close(weight, expected[optimizer][name], rtol=0, atol=TOLERANCE[optimizer])


CENTRAL = {
    "2 in one process": ["strategy.compute_devices=[cpu:0,cpu:1]"],
    "2 by the launcher": ["launcher.nproc=2"],
    "2 times 2 by the launcher": ["strategy.compute_devices=[cpu:0,cpu:1]", "launcher.nproc=2"],
}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("layout", CENTRAL)
def test_weights_of_central_storage_are_those_of_one_process(layout, optimizer, expected, tmp_path):
    options = SGD if optimizer == "sgd" else ADAM
    weights = train(layouts.alone(RECIPE, *COMMON, *options, "strategy=central_storage", *CENTRAL[layout]), tmp_path)
    assert weights.keys() == expected[optimizer].keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[optimizer][name], rtol=0, atol=TOLERANCE[optimizer])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "options", "end"),
    [
        ("gan.py", ["width=8", "noise_size=4", "epochs=2", "max_steps=3"], r"after 2 epochs with 2 replica\(s\)"),
        ("sharded_files.py", ["epochs=1", "global_batch_size=500"], r"start\(s\): 0 of 6000 never, 0 more than once"),
    ],
)
def test_other_recipes(recipe, options, end, tmp_path):
    output = layouts.run_all(layouts.launcher(recipe, *options, nproc=2), tmp_path)
    assert len(re.findall(end, output)) == 1
