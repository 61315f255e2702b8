"""Signals at random moments: in steps, in reading data, in saves, in validations, and before the first step."""

import os
import subprocess
import sys

import pytest

_PROGRAM = os.path.join(os.path.dirname(__file__), "preempted_jobs.py")


@pytest.mark.slow
@pytest.mark.timeout(520)  # dozens of attempts
@pytest.mark.parametrize("job", ["fit", "loop"])
def test_random_moments(tmp_path, job):
    command = [sys.executable, _PROGRAM, tmp_path, job, "20", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) >= 20  # attempts that were ended by a signal
