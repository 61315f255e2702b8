"""The recipes with `strategy=tpu`, each in a process of its own with a small model and few steps."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.recipes import layouts

RECIPES = Path(__file__).parents[2] / "recipes"
NUM_DEVICES = 2
FIGURE = re.compile(r"\d+\.\d+")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    images = layouts.write_images(tmp_path_factory.mktemp("images") / "images.npz")
    return ["epochs=2", f"data={images}"]


def start(folder, recipe, *options, timeout_s=110):
    """Run a recipe; return what it printed."""
    environ = {name: value for name, value in os.environ.items() if name != "XLA_USE_SPMD"}
    environ |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(NUM_DEVICES)}
    process = subprocess.run(
        [sys.executable, str(RECIPES / recipe), *options],
        cwd=folder, env=environ, capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    return process.stdout


def figures(output):
    """Return the numbers of each epoch, and of the model that was restored without a strategy."""
    lines = [line for line in output.splitlines() if line.startswith(("Epoch", "Test accuracy of"))]
    return [[float(number) for number in FIGURE.findall(line.partition("; files")[0])] for line in lines]


def test_the_loop_gives_what_it_gives_on_cpu_replicas(tmp_path, small):
    options = [*small, "clip_norm=0.5", "global_batch_size=90"]
    virtual = start(tmp_path, "custom_loop.py", "strategy=tpu", *options)
    mirrored = start(tmp_path, "custom_loop.py", "strategy=mirrored", "strategy.devices=[cpu:0,cpu:1]", *options)
    assert f"Number of replicas: {NUM_DEVICES}" in virtual
    found, expected = figures(virtual), figures(mirrored)
    assert len(found) == len(expected) == 3
    for own, other in zip(found, expected, strict=True):
        assert own == pytest.approx(other, abs=0.002)


def test_bf16_and_the_compilation_cache(tmp_path, small, monkeypatch):
    monkeypatch.setenv("TORCHSTRATEGY_XLA_CACHE", str(tmp_path / "programs"))
    options = ["strategy=tpu", "bf16=true", *small]
    first = start(tmp_path, "custom_loop.py", *options)
    programs = sorted(path.name for path in (tmp_path / "programs").iterdir())
    assert programs
    assert figures(start(tmp_path, "custom_loop.py", *options)) == figures(first)
    assert sorted(path.name for path in (tmp_path / "programs").iterdir()) == programs, "nothing was compiled anew"
    on_cpus = figures(start(tmp_path, "custom_loop.py", "strategy.devices=[cpu:0,cpu:1]", "bf16=true", *small))
    losses = [[epoch[0] for epoch in run[:2]] for run in (figures(first), on_cpus)]
    assert losses[0] == pytest.approx(losses[1], abs=0.01)


def test_fit(tmp_path, small):
    options = [*small, "global_batch_size=100", "seed=1"]
    virtual = start(tmp_path, "fit.py", "strategy=tpu", "folder=virtual", *options)
    assert f"Number of replicas: {NUM_DEVICES}" in virtual
    start(tmp_path, "fit.py", "strategy=mirrored", "strategy.devices=[cpu:0,cpu:1]", "folder=cpus", *options)
    found, expected = ((tmp_path / name / "history.csv").read_text().splitlines() for name in ("virtual", "cpus"))
    assert len(found) == len(expected) == 3
    for own, other in zip(found[1:], expected[1:], strict=True):
        assert [*map(float, own.split(","))] == pytest.approx([*map(float, other.split(","))], abs=1e-3)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_benchmark_prints_and_writes_every_figure(tmp_path):
    options = ["models=[conv_net]", "devices=[2]", "starts=1", "pairs=2", "steps=3", "batch_size=4"]
    options += ["profile=true", "profile_steps={skip: 1, record: 2}"]
    output = start(tmp_path, "benchmarks/tpu_steps.py", "hydra.run.dir=run", *options, timeout_s=380)
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    (start_of_all,) = results["starts"]["conv_net, 2 devices"]
    assert set(start_of_all) == {"plain", "loop", "fit"}
    for side in start_of_all.values():
        assert len(side["seconds"]) == len(side["python_seconds"]) == 2
        assert side["first"]["compilations"] >= 1
        assert side["compilations"] == [0, 0], "all programs are compiled in the first block"
    assert start_of_all["loop"]["loss"] == pytest.approx(start_of_all["plain"]["loss"], abs=1e-4)
    assert "conv_net, 2 devices: TPUStrategy, loop" in output
    traces = tmp_path / "run" / "conv_net_2_devices" / "profile"
    assert sorted(path.name for path in traces.iterdir()) == ["fit.json", "loop.json"]
    assert "Where the time of a step goes" in output
