"""Canned estimators in clusters of processes, with strings among the features and labels."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from tests import warm
from tests.estimator import cluster_tasks

PROGRAM = Path(__file__).parent / "canned_program.py"


@pytest.fixture(autouse=True)
def runs_canned_program(monkeypatch):
    monkeypatch.setattr(cluster_tasks, "PROGRAM", PROGRAM)


def in_one_process(folder, **settings):
    settings |= {"model_dir": str(folder)}
    done = warm.run([sys.executable, PROGRAM, json.dumps(settings)], folder.parent)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_processes_train_as_two_replicas(tmp_path):
    expected = in_one_process(tmp_path / "one", strategy="mirrored", max_steps=10)
    with cluster_tasks.Tasks(tmp_path, ["chief", "worker"], strategy="multi_worker", max_steps=10) as tasks:
        tasks.start("chief0", "worker0")
        chief, worker = tasks.results("chief0", "worker0")
    assert chief["variables"].keys() == expected["variables"].keys() == worker["variables"].keys()
    assert chief["variables"]["global_step"] == 10
    for name, value in expected["variables"].items():
        np.testing.assert_allclose(chief["variables"][name], value, rtol=1e-5, atol=1e-6)
    assert chief["evaluation"] == pytest.approx(expected["evaluation"], abs=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_parameter_servers(tmp_path):
    untrained = in_one_process(tmp_path / "untrained", max_steps=1)
    jobs = ["ps", "chief", "worker"]
    with cluster_tasks.Tasks(tmp_path, jobs, strategy="parameter_server", max_steps=60) as tasks:
        tasks.start("ps0", "chief0", "worker0")
        (chief,) = tasks.results("chief0")
        tasks.wait("ps0", "worker0")
    assert chief["variables"]["global_step"] >= 60
    assert chief["evaluation"]["average_loss"] < untrained["evaluation"]["average_loss"]
    assert "linear/linear_model/color/weights" in chief["variables"]
