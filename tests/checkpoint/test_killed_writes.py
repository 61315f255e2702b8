"""A save that is killed before any of its calls that change files is invisible, and nothing of it is left.

Each job of ``killed_writes`` is killed before its first such call and started again; then before its second; and so
on.
"""

import os
import subprocess
import sys

import pytest

_PROGRAM = os.path.join(os.path.dirname(__file__), "killed_writes.py")


def prove(folder, kind, every, *jobs):
    command = [sys.executable, _PROGRAM, folder, kind, str(every), *jobs]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.end_to_end
def test_some_calls(tmp_path):
    told = prove(tmp_path, "kill", 13, "manager of one")
    assert "manager of one: 4" in told
    assert "'unlink'" in told


@pytest.mark.slow
@pytest.mark.parametrize(
    "jobs",
    [
        ("checkpoint", "manager", "manager of one"),
        ("write", "model", "weights", "listed weights", "safetensors"),
        ("backup", "kept backup"),
        ("model checkpoint",),
        ("model checkpoint of models",),
        ("estimator", "parameter server"),
    ],
    ids=lambda jobs: jobs[0],
)
def test_every_call(tmp_path, jobs):
    told = prove(tmp_path, "kill", 1, *jobs)
    assert [line.partition(":")[0] for line in told.splitlines()] == list(jobs)


@pytest.mark.slow
def test_every_torn_write(tmp_path):
    prove(tmp_path, "torn", 1, "manager", "weights")
