"""What processes run that drive one virtual device each: real XLA tensors, combined on the hosts."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

import torchstrategy as ts
from tests import programs
from tests.strategies import tpu_process_programs as chips
from tests.tpu.backend_programs import counted


def make() -> ts.TPUStrategy:
    os.environ["PJRT_DEVICE"] = "CPU"
    os.environ["CPU_NUM_DEVICES"] = "1"
    os.environ.pop("XLA_USE_SPMD", None)  # of the process with the tests, in which torch_xla has set it
    ts.tpu.experimental.initialize_tpu_system()
    return ts.TPUStrategy()


def train(**program: Any) -> tuple[list[list[float]], str]:
    strategy = make()
    return programs.train(strategy, **program), strategy.placement.devices[0].type


def everything(folder: str) -> list[dict[str, Any]]:
    chips_result = chips.everything(make(), os.path.join(folder, "chips"))
    cpus = ts.MultiWorkerMirroredStrategy(devices=["cpu:0"])
    return [chips_result, chips.everything(cpus, os.path.join(folder, "cpus"))]


def compilations() -> dict[str, Any]:
    """A loop with constant shapes; what each step compiles, and how often it reads from the device."""
    strategy = make()
    with strategy.scope():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.5), nn.Linear(4, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = programs.make_train_step(model, optimizer)
    compiled, reads = [], []
    for batch in strategy.experimental_distribute_dataset((torch.randn(64, 5), torch.randint(3, (64,))), batch_size=8):
        before = counted("TransferFromDeviceTime")
        strategy.run(step, args=(batch,))
        compiled.append(strategy.runtime.num_compilations())
        reads.append(counted("TransferFromDeviceTime") - before)
    return {"compiled": compiled, "reads": reads}


def masks() -> list[list[float]]:
    strategy = make()
    found = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        for _ in range(2):
            mask = strategy.run(lambda: nn.functional.dropout(torch.ones(40), 0.5))
            found.append(mask.cpu().tolist())
    return found
