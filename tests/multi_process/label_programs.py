"""What the ranks of the test of labels run."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torchstrategy as ts
from torchstrategy.base.labels import make_profiler

NUM_WEIGHTS = 10_000


def labels_of_collectives() -> dict[str, list[list[str]]]:
    """Return the chains of nested labels of some collectives, outermost first, in the order of their beginning."""
    strategy = ts.MirroredStrategy(["cpu:0"])
    with strategy.scope():
        model = nn.Linear(NUM_WEIGHTS, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, NUM_WEIGHTS)).sum().backward()
        optimizer.step()

    def reduce(size: int) -> None:
        ts.get_replica_context().all_reduce("sum", torch.ones(size))

    def gather() -> None:
        ts.get_replica_context().all_gather(torch.ones(NUM_WEIGHTS), axis=0)

    strategy.run(step)
    strategy.run(step)  # the first two compare the parameters
    return {
        "step": _chains(lambda: strategy.run(step)),
        "small": _chains(lambda: strategy.run(reduce, args=(4,))),
        "large": _chains(lambda: strategy.run(reduce, args=(NUM_WEIGHTS,))),
        "gather": _chains(lambda: strategy.run(gather)),
    }


def _chains(program: Callable[[], Any]) -> list[list[str]]:
    with make_profiler() as profile:
        program()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    labels = [event for event in events if event.get("name", "").startswith("ts::")]
    labels.sort(key=lambda event: (event["ts"], -event["dur"]))
    return [
        [
            outer["name"].removeprefix("ts::")
            for outer in labels[: number + 1]
            if outer["tid"] == event["tid"] and event["ts"] < outer["ts"] + outer["dur"]
        ]
        for number, event in enumerate(labels)
    ]
