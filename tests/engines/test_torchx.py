"""The component for TorchX, run by its scheduler for this host."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.recipes import layouts
from torchstrategy.base.addresses import ReservedPorts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("torchx") is None, reason="needs TorchX: make test-engines"),
]
COMPONENT = layouts.ROOT / "docs" / "deploy" / "torchx" / "component.py"


def run(folder, *options, program):
    command = [Path(sys.executable).with_name("torchx"), "run", "-s", "local_cwd", f"{COMPONENT}:train", *options]
    return subprocess.run(
        [*command, "--python", sys.executable, "--", *program],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(layouts.ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def test_two_hosts_train_a_recipe(tmp_path):
    """They are this one, twice; a process is killed, and both hosts start theirs again."""
    recipe = [layouts.RECIPES / "fault_tolerant.py", "epochs=1", "global_batch_size=500", "save_every=4"]
    recipe += [f"folder={tmp_path}/run", "kill.step=6"]
    with ReservedPorts(1) as ports:
        (port,) = ports.numbers
    process = run(tmp_path, "--nnodes=2", f"--port={port}", program=recipe)
    output = process.stdout + process.stderr
    assert process.returncode == 0, output
    assert "num_workers = 2" in output
    assert "Going on with epoch 1 after step 4" in output
    assert "Trained for 1 epochs, 12 steps." in output
    assert "Job finished: SUCCEEDED" in output


def test_a_program_that_fails_fails_the_job(tmp_path):
    (tmp_path / "program.py").write_text("raise ValueError('no data')")
    process = run(tmp_path, "--max_restarts=0", program=["program.py"])
    assert process.returncode == 1
    assert "ValueError: no data" in process.stdout + process.stderr
