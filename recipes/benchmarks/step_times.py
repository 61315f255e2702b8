"""A process of recipes/benchmarks/training.py: trains a block of steps in one of several ways whenever it is asked to.

``python step_times.py '{"model": {"_target_": "models.conv_net"}, "num_replicas": 2, ...}'``
"""

from __future__ import annotations

import functools
import json
import os
import pydoc
import sys
from typing import Any

import torch
from blocks import Program, serve
from torch import nn
from training_steps import WAYS, Work


def main() -> None:
    """Answer the benchmark."""
    options = json.loads(sys.argv[1])
    work = make_work(options)

    def build(way: str) -> Program:
        torch.set_num_threads(options["threads"])
        torch.manual_seed(0)
        training = WAYS[way](work)
        if torch.get_num_threads() != options["threads"]:
            raise RuntimeError(f"{way} changed the number of threads to {torch.get_num_threads()}.")
        return Program(training.step, sum(parameter.numel() for parameter in training.model.parameters()))

    serve(build, torch.__version__)


def make_work(options: dict[str, Any]) -> Work:
    """Make what the options describe.

    Args:
        options: ``model`` and ``optimizer`` as in conf/, ``channels_last``, ``num_replicas``, ``batch_size`` of each.
    """
    generator = torch.Generator().manual_seed(0)
    size = options["num_replicas"] * options["batch_size"]
    # Images of one channel lie in memory as channels_last ones do, so there is nothing to convert.
    images = torch.rand(size, 1, 28, 28, generator=generator)
    labels = torch.randint(10, (size,), generator=generator)

    def make_model() -> nn.Module:
        model = make(options["model"])()
        return model.to(memory_format=torch.channels_last) if options["channels_last"] else model

    rank = int(os.environ.get("RANK", "0"))
    return Work(make_model, make(options["optimizer"]), (images, labels), options["num_replicas"], rank)


def make(node: dict[str, Any]) -> functools.partial[Any]:
    """Return what a node of conf/ describes, to be called; hydra's way would add its import to the time of a start."""
    arguments = {name: value for name, value in node.items() if name not in ("_target_", "_partial_")}
    return functools.partial(pydoc.locate(node["_target_"]), **arguments)


if __name__ == "__main__":
    main()
