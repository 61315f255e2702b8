"""The library imports and trains where Python has less than on Linux, and says what it can't do there."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import torchstrategy as ts

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_every_module_imports_and_training_works(platform):
    command = [sys.executable, "-m", "tests.other_platforms", platform]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stderr
    modules, last = result.stdout.splitlines()
    assert int(modules.split()[0]) > 350
    assert last == "trained"


def test_a_local_cluster_says_what_it_needs(monkeypatch):
    monkeypatch.delattr(signal, "SIGCONT")
    with pytest.raises(ts.errors.UnimplementedError, match=r"needs signals and inherited files, "):
        ts.testing.LocalCluster(num_workers=1)
