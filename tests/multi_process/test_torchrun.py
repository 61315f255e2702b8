"""Real ``torchrun`` jobs: a restart after a failure, and a process group of the user's own."""

import subprocess
import sys

import pytest

RESTART = """
import os
import torch
import torchstrategy as ts

first, second = ts.MirroredStrategy(), ts.MirroredStrategy()
sums = [float(strategy.reduce("sum", torch.ones(()))) for strategy in (first, second, first)]
del first
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and second.workers.rank == 1:
    raise OSError("no such shard")
sums.append(float(ts.MirroredStrategy().reduce("sum", torch.ones(()))))
print(f"done {sums}", flush=True)
"""
# (A restart with a default process group of torch's own fails in gloo, also without this library: torch 2.13.)
PROCESS_GROUP = """
import torch
import torch.distributed as dist
import torchstrategy as ts

strategies = [ts.MirroredStrategy()]
dist.init_process_group("gloo")
strategies.append(ts.MirroredStrategy())
theirs = torch.ones(())
dist.all_reduce(theirs)
sums = [float(theirs), *(float(strategy.reduce("sum", torch.ones(()))) for strategy in strategies)]
dist.destroy_process_group()
sums.append(float(strategies[0].reduce("sum", torch.ones(()))))
print(f"done {sums}", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        pytest.param(RESTART, "Rank 1 failed in its program", id="restart", marks=pytest.mark.slow),
        pytest.param(PROCESS_GROUP, "", id="process group"),
    ],
)
def test_torchrun(source, complaint, tmp_path, monkeypatch):
    program = tmp_path / "program.py"
    program.write_text(source)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=0.1"]
    meeting = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    command = [sys.executable, *launcher, *meeting, str(program)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("done [2.0, 2.0, 2.0, 2.0]") == 2
    assert complaint in result.stderr
