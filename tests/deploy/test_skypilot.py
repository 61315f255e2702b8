"""SkyPilot's YAML, whose commands are run here as on two machines, with the variables that SkyPilot sets."""

import os
import subprocess
import sys

import pytest
import yaml

from tests.recipes import layouts
from torchstrategy.base.addresses import ReservedPorts

TASK = yaml.safe_load((layouts.ROOT / "docs" / "deploy" / "skypilot" / "train.yaml").read_text())


def test_checkpoints_are_where_all_machines_see_them():
    (place,) = [path for path, mount in TASK["file_mounts"].items() if mount["mode"] == "MOUNT"]
    assert f" folder={place}/" in TASK["run"]
    assert TASK["num_nodes"] == 2


@pytest.mark.slow
def test_two_machines_meet_and_train(tmp_path):
    with ReservedPorts(1) as ports:
        (port,) = ports.numbers
    run = TASK["run"].replace("29400", str(port)).replace("/runs/", f"{tmp_path}/")
    run = run.replace("recipes/", f"{layouts.RECIPES}/").rstrip() + " epochs=1 global_batch_size=2000"
    machines = []
    for rank in range(2):
        variables = {
            "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2\n",
            "SKYPILOT_NODE_RANK": str(rank),
            "SKYPILOT_NUM_NODES": "2",
            "SKYPILOT_NUM_GPUS_PER_NODE": "1",
            "SKYPILOT_TASK_ID": "sky-2026-01-01-00-00-00-000000_train_1",
            "OMP_NUM_THREADS": "1",
            "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}",
            "PYTHONPATH": str(layouts.ROOT),
        }
        machines.append(
            subprocess.Popen(
                ["bash", "-c", run],
                cwd=tmp_path,
                env={**os.environ, **variables},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        outputs = [machine.communicate(timeout=110)[0] for machine in machines]
    finally:
        for machine in machines:
            machine.kill()
    assert [machine.returncode for machine in machines] == [0, 0], outputs
    assert "num_workers = 2" in outputs[0] + outputs[1]
    assert sum(output.count("Trained for 1 epochs, 3 steps.") for output in outputs) == 1
