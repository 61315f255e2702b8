"""One side of recipes/benchmarks/tpu_steps.py: a program that trains a block of steps whenever it is asked to.

``python tpu_times.py '{"side": "loop", "devices": 4, ...}'``: the number of devices holds for a whole process.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    import torchstrategy as ts

Batches = list[tuple[Tensor, Tensor]]
#: Trains on all batches and returns the loss of the last one, which waits for it. A side of ours may be recorded.
Block = Callable[..., float]

VOCABULARY, LENGTH, WIDTH, CLASSES = 1000, 32, 64, 10


class Transformer(nn.Module):
    """A small encoder that classifies sequences of tokens ``[batch, length]``.

    Args:
        dropout: of all layers.
    """

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits ``[batch, classes]``."""
        return self.head(self.encoder(self.embedding(tokens) + self.positions).mean(1))


def make_model(options: dict[str, Any]) -> nn.Module:
    """Build the model that all sides train."""
    if options["model"] == "transformer":
        return Transformer(options["dropout"])
    import models  # noqa: PLC0415 - beside this file

    return models.conv_net()


def make_batches(options: dict[str, Any], num_replicas: int) -> Batches:
    """Return the global batches of a block, on the host."""
    generator = torch.Generator().manual_seed(options["seed"])
    size, batches = options["batch_size"] * num_replicas, []
    for _ in range(options["steps"]):
        labels = torch.randint(CLASSES, (size,), generator=generator)
        if options["model"] == "transformer":
            batches.append((torch.randint(VOCABULARY, (size, LENGTH), generator=generator), labels))
        else:
            batches.append((torch.rand(size, 1, 28, 28, generator=generator), labels))
    return batches


def make_optimizer(model: nn.Module, options: dict[str, Any]) -> torch.optim.Optimizer:
    """Build the optimizer that all sides use."""
    return torch.optim.SGD(model.parameters(), lr=options["optimizer"]["lr"], momentum=0.9)


def plain_block(options: dict[str, Any]) -> Block:
    """Return the program as it is written by hand for torch_xla: the batch is split, the rest is XLA's."""
    import numpy as np  # noqa: PLC0415
    import torch_xla  # noqa: PLC0415
    import torch_xla.distributed.spmd as spmd  # noqa: PLC0415
    import torch_xla.runtime as runtime  # noqa: PLC0415

    runtime.use_spmd()
    device, number = torch_xla.device(), runtime.global_runtime_device_count()
    mesh = spmd.Mesh(np.arange(number), (number,), ("replica",))
    model = make_model(options).to(device)
    optimizer = make_optimizer(model, options)
    batches = make_batches(options, number)

    def block() -> float:
        for inputs, labels in batches:
            own_inputs, own_labels = inputs.to(device), labels.to(device)
            spmd.mark_sharding(own_inputs, mesh, ("replica", *[None] * (inputs.dim() - 1)))
            spmd.mark_sharding(own_labels, mesh, ("replica",))
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(own_inputs), own_labels)
            loss.backward()
            optimizer.step()
            torch_xla.sync()
        return loss.item()

    return block


def loop_block(options: dict[str, Any]) -> Block:
    """Return the program as a loop under the strategy."""
    from training_steps import replica_step  # noqa: PLC0415

    import torchstrategy as ts  # noqa: PLC0415

    strategy = ts.TPUStrategy(ts.cluster_resolver.TPUClusterResolver.connect("local"))
    with strategy.scope():
        model = make_model(options)
        optimizer = make_optimizer(model, options)
    dataset = strategy.experimental_distribute_dataset(make_batches(options, strategy.num_replicas_in_sync))

    train = replica_step(model, optimizer)

    @ts.function
    def step(inputs: Any, labels: Any) -> Tensor:
        return strategy.reduce("SUM", strategy.run(train, args=(inputs, labels)))

    def block(profile: ts.profiler.Profile | None = None) -> float:
        for inputs, labels in dataset if profile is None else profile.steps(dataset):
            loss = step(inputs, labels)
        return float(loss)

    return block


def fit_block(options: dict[str, Any]) -> Block:
    """Return the program as calls of ``fit``."""
    import torchstrategy as ts  # noqa: PLC0415

    strategy = ts.TPUStrategy(ts.cluster_resolver.TPUClusterResolver.connect("local"))
    with strategy.scope():
        model = ts.Model(make_model(options))
        model.compile(make_optimizer(model, options), nn.CrossEntropyLoss())
    batches = make_batches(options, strategy.num_replicas_in_sync)

    def block(profile: ts.profiler.Profile | None = None) -> float:
        callbacks = []
        if profile is not None:
            import profiles  # noqa: PLC0415 - as in `record`

            callbacks.append(profiles.ProfileCallback(profile))
        return model.fit(batches, verbose=0, callbacks=callbacks).history["loss"][-1]

    return block


def record(block: Block, options: dict[str, Any], folder: str) -> None:
    """Record steps of a block; on the host only, since a step on a TPU is one program."""
    import profiles  # noqa: PLC0415 - beside this file, and with the library that the side by hand does without

    with (
        contextlib.redirect_stdout(sys.stderr),  # the benchmark reads the other one
        profiles.make(options, Path(folder), name=options["side"]) as profile,
    ):
        block(profile)


SIDES = {"plain": plain_block, "loop": loop_block, "fit": fit_block}


def num_compilations() -> int:
    """Return how many programs this process has compiled."""
    import torch_xla.debug.metrics as metrics  # noqa: PLC0415

    return metrics.counter_value("UncachedCompile") or 0


def main() -> None:
    """Tell what this is; then train a block for every line that is read, until there is none."""
    options = json.loads(sys.argv[1])
    if options["devices"] is not None:
        os.environ.update(PJRT_DEVICE="CPU", CPU_NUM_DEVICES=str(options["devices"]))
    torch.manual_seed(options["seed"])
    block = SIDES[options["side"]](options)
    import torch_xla  # noqa: PLC0415

    print(json.dumps(f"torch {torch.__version__}, torch_xla {torch_xla.__version__}"), flush=True)
    while line := sys.stdin.readline():
        if request := json.loads(line):
            record(block, options, request["trace"])
            print("{}", flush=True)
            continue
        compiled, started, cpu = num_compilations(), time.perf_counter(), time.thread_time()
        loss = block()
        told = {
            "seconds": time.perf_counter() - started,
            "python_seconds": time.thread_time() - cpu,  # of the thread that traces
            "compilations": num_compilations() - compiled,
            "loss": loss,
        }
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
