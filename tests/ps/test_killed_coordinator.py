"""A save of a coordinator with variables on parameter servers is complete or invisible, wherever it is killed."""

import json
import os
import shutil
import subprocess
import sys

import pytest

import torchstrategy as ts

_PROGRAM = os.path.join(os.path.dirname(__file__), "killed_coordinator.py")
NUM_SAVES = 3


def attempt(cluster, folder, last, kind="none", at=0):
    """Return what a coordinator said, and how it ended."""
    done = subprocess.run(
        [sys.executable, _PROGRAM, folder, str(last), kind, str(at)],
        env={**os.environ, "TF_CONFIG": cluster.tf_config()},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["')]
    return said, done.returncode, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(400)  # dozens of processes
def test_killed_before_calls_for_files(tmp_path):
    folder = str(tmp_path / "run")
    with ts.testing.LocalCluster(num_workers=1, num_ps=2) as cluster:
        said, status, told = attempt(cluster, folder, NUM_SAVES)
        assert status == 0, told
        calls = said[-1][1]
        assert {"open", "write", "fsync", "replace", "unlink"} <= set(calls)
        for at in range(2, len(calls) + 1, 4):  # every fourth: each start takes seconds
            shutil.rmtree(folder)
            said, status, told = attempt(cluster, folder, NUM_SAVES, "kill", at)
            assert status == -9, (at, status, told)
            saved = max((words[1] for words in said if words[0] == "saved"), default=0)
            said, status, told = attempt(cluster, folder, NUM_SAVES + 1)
            assert status == 0, (at, told)
            assert saved <= said[0][1] <= saved + 1, (at, calls[at - 1], saved, said)
            names = sorted(os.listdir(folder))
            assert names == ["checkpoint", f"ckpt-{NUM_SAVES}.pt", f"ckpt-{NUM_SAVES + 1}.pt"], (at, names)
