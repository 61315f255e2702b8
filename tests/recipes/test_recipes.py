"""Each recipe is one short file that runs when it is copied, and gives the same numbers however its replicas run."""

import ast
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import torchstrategy as ts
from tests import warm
from tests.recipes import layouts

#: Those that run without what only some environments have; tests/engines runs copies of the others.
ALONE = [
    "compare",
    "custom_loop",
    "estimator",
    "fault_tolerant",
    "fit",
    "gan",
    "image_classification",
    "parameter_server",
    "sharded_files",
]
NAMES = sorted([*ALONE, "finetune_transformer", "ray_train"])
MOST_LINES = 120
PACKAGES = {"hydra", "numpy", "omegaconf", "peft", "ray", "torch", "torchstrategy", "tqdm", "transformers"}

#: Options that make a run short, and the last line of what it prints.
SHORT = {
    "compare": (["compare=[default,mirrored_3]"], r"^mirrored_3 +3( +\d\.\d+){4} +\d\.\de-1\d +[\d.]+$"),
    "custom_loop": (["epochs=1"], r"^Test accuracy of the saved model, restored without a strategy: 0\.\d{4}; files: "),
    "estimator": (["max_steps=8", "save_every=4"], r"^Accuracy of the exported program: 0\.\d{4}; files: "),
    "fault_tolerant": (["epochs=1"], r"^Trained for 1 epochs, \d+ steps\. The same folder goes on: "),
    "fit": (["epochs=1"], r"^Files: "),
    "gan": (["epochs=1", "width=8"], r"^Files, for TensorBoard: "),
    "image_classification": (["epochs=1", "width=2"], r"^Trained for 1 epochs\. The same folder goes on from here: "),
    "parameter_server": (["epochs=1"], r"^Trained for 1 epochs\. The same folder goes on from here: "),
    "sharded_files": (["epochs=1"], r"^Trained for 1 epochs\. The same folder goes on from here: "),
}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return layouts.write_images(tmp_path_factory.mktemp("images") / "images.npz")


def test_there_are_eleven():
    assert sorted(path.stem for path in layouts.RECIPES.glob("*.py")) == NAMES
    assert sorted(SHORT) == ALONE


@pytest.mark.parametrize("path", sorted(layouts.RECIPES.rglob("*.py")), ids=lambda path: path.stem)
def test_a_traceback_without_hydra_shows_what_to_install(path):
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("import hydra")]
    assert set(lines) <= {"import hydra  # pip install hydra-core"}


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_short_and_needs_no_file_but_its_own(name):
    text = (layouts.RECIPES / f"{name}.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MOST_LINES
    imported = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module)
        elif isinstance(node, ast.Attribute):
            assert not node.attr.startswith("_"), f"{node.attr} is private"
    assert {module for module in imported if module.startswith("torchstrategy")} == {"torchstrategy"}, (
        "public names only"
    )
    assert {module.partition(".")[0] for module in imported} - set(sys.stdlib_module_names) <= PACKAGES


@pytest.mark.parametrize("name", NAMES)
def test_the_public_names_that_a_recipe_uses_are_listed(name):
    lines = (layouts.ROOT / "tests" / "public_api.txt").read_text(encoding="utf-8").splitlines()
    public = {re.split(r"[(:]", line)[0] for line in lines if not line.endswith(": module")}
    text = (layouts.RECIPES / f"{name}.py").read_text(encoding="utf-8")
    for used in set(re.findall(r"\bts((?:\.\w+)+)", text)):
        parts = f"torchstrategy{used}".split(".")
        prefixes = {".".join(parts[:end]) for end in range(2, len(parts) + 1)}
        assert prefixes & public, used


@pytest.mark.end_to_end
@pytest.mark.parametrize(
    "name", ["custom_loop", *(pytest.param(name, marks=pytest.mark.slow) for name in ALONE if name != "custom_loop")]
)
def test_a_copy_runs_alone(name, tmp_path):
    """In an empty folder, with its configuration beside it and no images: it makes up some, and says so."""
    shutil.copy(layouts.RECIPES / f"{name}.py", tmp_path)
    shutil.copy(layouts.ROOT / "conf" / f"{name}.yaml", tmp_path)
    options, last = SHORT[name]
    process = warm.run([sys.executable, tmp_path / f"{name}.py", *options], tmp_path)
    assert process.returncode == 0, process.stdout + process.stderr
    assert re.search(last, process.stdout.splitlines()[-1]), process.stdout
    assert "Made up images" in process.stdout + process.stderr
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.py", f"{name}.yaml", "outputs"}


@pytest.mark.slow
@pytest.mark.end_to_end
def test_a_copy_may_have_another_name(tmp_path):
    shutil.copy(layouts.RECIPES / "custom_loop.py", tmp_path / "mine.py")
    shutil.copy(layouts.ROOT / "conf" / "custom_loop.yaml", tmp_path)
    process = warm.run([sys.executable, tmp_path / "mine.py", "epochs=1", "folder=run"], tmp_path)
    assert process.returncode == 0, process.stdout + process.stderr
    assert (tmp_path / "run" / "checkpoints" / "ckpt-1.pt").exists()


def weights(folder):
    """Return what the last checkpoint of a run holds of its models."""
    path = folder / "checkpoints"
    reader = ts.train.load_checkpoint(path)
    names = [name for name, _ in ts.train.list_variables(path) if name.startswith(("model.", "models/"))]
    assert names
    return {name: torch.as_tensor(reader.get_tensor(name)) for name in names}


def assert_same(found, expected, atol):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert value.dtype == found[name].dtype
        torch.testing.assert_close(found[name], value, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


# Three steps an epoch; the last batch has 30 examples, which four replicas can't divide evenly.
COMMON = ["epochs=2", "global_batch_size=100", "folder=run"]
SGD = ["optimizer={_target_:torch.optim.SGD,_partial_:true,lr:0.1}", "dtype=float32", "tune=false"]
ADAM = ["dtype=float64"]
WAYS = {
    "3 in one process": lambda *options: layouts.alone(*options, "strategy.devices=[cpu:0,cpu:1,cpu:2]"),
    "2 by TF_CONFIG": lambda *options: layouts.tf_config(*options, num_workers=2, chief=True),
    "3 by TF_CONFIG": lambda *options: layouts.tf_config(*options, num_workers=3),
    "3 by torchrun": lambda *options: layouts.torchrun(*options, nproc=3),
    "2 by torchrun, mirrored": lambda *options: layouts.torchrun(*options, nproc=2, strategy=("strategy=mirrored",)),
    "2 times 2 by launch": lambda *options: layouts.launch(*options, layouts.TWO_LOCAL, nproc=2),
    "central storage, 2 times 2 by launch": lambda *options: layouts.launch(
        *options, "strategy.compute_devices=[cpu:0,cpu:1]", nproc=2, strategy=("strategy=central_storage",)
    ),
}


@pytest.fixture(scope="module")
def of_one_replica(tmp_path_factory, images):
    """What each recipe ends with in one process with one replica."""
    found = {}

    def train(name, *options):
        if (name, options) not in found:
            folder = tmp_path_factory.mktemp(name)
            layouts.run_all(layouts.alone(f"{name}.py", *COMMON, f"data={images}", *options), folder)
            found[name, options] = weights(folder / "run")
        return found[name, options]

    return train


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "options", "atol"),
    [*((way, ADAM, 1e-10) for way in WAYS), *((way, SGD, 1e-6) for way in ("3 in one process", "2 by TF_CONFIG"))],
    ids=lambda value: "sgd" if value is SGD else "adam" if value is ADAM else None,
)
def test_the_loops_weights_are_those_of_one_replica(way, options, atol, of_one_replica, images, tmp_path):
    output = layouts.run_all(WAYS[way]("custom_loop.py", *COMMON, f"data={images}", *options), tmp_path)
    assert len(re.findall(r"^Epoch \d, loss: ", output, re.MULTILINE)) == 2, "one process prints"
    assert len(list((tmp_path / "run").glob("events.out.tfevents.*"))) == 1
    assert_same(weights(tmp_path / "run"), of_one_replica("custom_loop", *options), atol)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["3 in one process", "3 by TF_CONFIG"])
@pytest.mark.parametrize(("name", "options"), [("gan", ["width=8"]), ("fault_tolerant", ["dropout=0"])])
def test_other_recipes_weights_are_those_of_one_replica(name, options, way, of_one_replica, images, tmp_path):
    options = [*options, *ADAM]
    layouts.run_all(WAYS[way](f"{name}.py", *COMMON, f"data={images}", *options), tmp_path)
    assert_same(weights(tmp_path / "run"), of_one_replica(name, *options), atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["3 in one process", "central storage, 2 times 2 by launch"])
def test_image_classification_goes_on_to_the_weights_of_one_replica(way, of_one_replica, images, tmp_path):
    options = ["width=2", *ADAM]
    for more, said in ((["stop_after=1"], "Trained for 1 epochs"), ([], "Going on with epoch 2.")):
        ways = WAYS[way]("image_classification.py", *COMMON, f"data={images}", *options, *more)
        assert said in layouts.run_all(ways, tmp_path)
    assert_same(weights(tmp_path / "run"), of_one_replica("image_classification", *options), atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["3 in one process", "2 by torchrun, mirrored"])
def test_fit_gives_what_one_replica_gives(way, images, tmp_path):
    told = []
    for name, make in (("one", layouts.alone), ("several", WAYS[way])):
        output = layouts.run_all(make("fit.py", *COMMON, f"data={images}", *ADAM), tmp_path / name)
        folder = tmp_path / name / "run"
        assert {"checkpoints", "history.csv", "logs", "model.pt"} <= {path.name for path in folder.iterdir()}
        epochs, tested = re.findall(r" (loss: .*)$", output, re.MULTILINE), re.findall(r"loss \d\.\d{4}, .*", output)
        told.append((epochs, tested[:2], ts.models.load_model(folder / "model.pt", trust=True).state_dict()))
    assert len(told[0][0]) == len(told[0][1]) == 2
    assert told[0][:2] == told[1][:2]
    assert_same(told[1][2], told[0][2], atol=1e-10)


@pytest.mark.slow
def test_strategies_side_by_side_differ_in_rounding_only(images, tmp_path):
    output = layouts.run_all(layouts.alone("compare.py", f"data={images}"), tmp_path)
    rows = [line.split() for line in output.splitlines() if re.match(r"\w+ +\d ", line)]
    assert [(row[0], row[1]) for row in rows] == [
        ("default", "1"),
        ("one_device", "1"),
        ("mirrored_2", "2"),
        ("mirrored_3", "3"),
        ("central_storage_2", "2"),
        ("mirrored_2_processes", "2"),
        ("workers_2", "2"),
        ("workers_2_of_2", "4"),
    ]
    assert all(row[2:6] == rows[0][2:6] for row in rows), "what is printed is equal"
    assert all(float(row[6]) < 1e-10 for row in rows)


@pytest.mark.slow
def test_one_command_runs_under_one_strategy_after_the_other(images, tmp_path):
    options = ["-m", "strategy=default,one_device,mirrored", "bf16=true", "epochs=1", "clip_norm=0.5", f"data={images}"]
    output = layouts.run_all(layouts.alone("custom_loop.py", *options), tmp_path)
    saved = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("ckpt-1.pt"))
    assert len(saved) == 3, "each has a folder that its options name"
    for path, name in zip(saved, ("default", "mirrored", "one_device"), strict=True):
        assert path.startswith(f"multirun/custom_loop/bf16=True/clip_norm=0.5/data={images}/epochs=1/strategy={name}/")
    assert len(set(re.findall(r"^Epoch 1, (.*)$", output, re.MULTILINE))) == 1, "with one replica the strategies agree"


@pytest.mark.slow
def test_each_process_records_a_profile_and_the_chief_tells_of_all(images, tmp_path):
    options = [f"data={images}", "epochs=1", "global_batch_size=20", "profile_steps=3", "folder=run", layouts.TWO_LOCAL]
    output = layouts.run_all(layouts.torchrun("custom_loop.py", *options, nproc=2), tmp_path)
    assert output.count("Where the time of a step goes, in ms (means of 3 steps)") == 1
    assert "rank 0      rank 1\n" in output
    assert "rank 1: computing: replica 2 " in output
    paths = sorted((tmp_path / "run" / "profile").iterdir())
    assert [path.name for path in paths] == ["rank_0.json", "rank_1.json"]
    assert ts.profiler.table(paths) in output
    for rank, path in enumerate(paths):
        text = path.read_text()
        assert f"ts::wait for rank {1 - rank}" in text
        assert f"ts::replica {2 * rank + 1}" in text


def test_the_data_is_the_balanced_slice():
    images = layouts.RECIPES / "data" / "fashion_mnist_slice.npz"
    with np.load(images) as arrays:
        for part, per_class in (("train", 600), ("test", 100)):
            assert arrays[f"{part}_images"].shape == (10 * per_class, 28, 28)
            assert torch.tensor(arrays[f"{part}_labels"]).bincount().tolist() == [per_class] * 10


def test_no_recipe_is_a_package():
    assert not list(layouts.RECIPES.rglob("__init__.py")), "recipes are copied, not imported"
    assert Path(layouts.RECIPES / "benchmarks").is_dir()
