"""Programs that run under any strategy, and what compares a TPU strategy's results with those of replicas on the CPU.

A program gets a strategy; it is called in a process with virtual devices, and here under ``MirroredStrategy``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import torchstrategy as ts
from torchstrategy.base.values import DistributedValues, PerReplica


def on_devices(program, *args, **kwargs):
    """Call a program with a TPU strategy; returns what it returned, on the CPU, and the number of compilations."""
    from torchstrategy.tpu.tpu_strategy import TPUStrategy

    strategy = TPUStrategy()
    before = strategy.runtime.num_compilations()
    torch.manual_seed(0)
    result = plain(program(strategy, *args, **kwargs))
    return result, strategy.runtime.num_compilations() - before


def on_cpu(program, num_replicas, *args, **kwargs):
    """Call a program with as many replicas on the CPU."""
    torch.manual_seed(0)
    strategy = ts.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
    return plain(program(strategy, *args, **kwargs))


def check_same(xla_process, program, *args, num_devices=4, tolerance=1e-5, **kwargs):
    """Assert that a program returns the same with TPU replicas as with CPU replicas; returns the compilations."""
    found, compilations = xla_process(num_devices).run(on_devices, program, *args, **kwargs)
    assert_same(found, on_cpu(program, num_devices, *args, **kwargs), tolerance)
    return compilations


def plain(value: Any) -> Any:
    """Return a structure with all tensors on the CPU, and distributed values as ``PerReplica``."""
    if isinstance(value, DistributedValues):
        return PerReplica([plain(own) for own in value.values])
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, (list, tuple)):
        return type(value)(plain(item) for item in value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value):
        return dataclasses.replace(value, **{f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)})
    return value


def assert_same(found, expected, tolerance=1e-5, path="result"):
    """Assert that two plain structures are equal, floats up to a tolerance."""
    assert type(found) is type(expected), f"{path}: {found!r} instead of {expected!r}"
    if isinstance(expected, PerReplica):
        assert_same(found.values, expected.values, tolerance, f"{path}.values")
    elif isinstance(expected, torch.Tensor):
        rough = 1e-2 if expected.dtype in (torch.float16, torch.bfloat16) else tolerance
        torch.testing.assert_close(
            found, expected, rtol=rough, atol=rough, equal_nan=True, msg=lambda text: f"{path}: {text}"
        )
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), f"{path}: {found!r} instead of {expected!r}"
        for i, pair in enumerate(zip(found, expected, strict=True)):
            assert_same(*pair, tolerance, f"{path}[{i}]")
    elif isinstance(expected, dict):
        assert list(found) == list(expected), path
        for key in expected:
            assert_same(found[key], expected[key], tolerance, f"{path}[{key!r}]")
    elif dataclasses.is_dataclass(expected):
        assert_same(vars(found), vars(expected), tolerance, path)
    elif isinstance(expected, float):
        assert found == expected or abs(found - expected) <= tolerance * max(1.0, abs(expected)), f"{path}: {found}"
    else:
        assert found == expected, f"{path}: {found!r} instead of {expected!r}"


def error_of(fn, *args):
    """Return the name of the error that a call raises, or what it returned."""
    try:
        return fn(*args)
    except Exception as error:  # noqa: BLE001 - whatever it is
        return type(error).__name__


def ids(strategy):
    """Return each replica's id as a float."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: torch.tensor(float(context.replica_id_in_sync_group))
    )


def rows_of_id(strategy, *width):
    """Return a tensor of as many rows as the replica's id, full of that id: one has none."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: torch.full((context.replica_id_in_sync_group, *width), float(context.replica_id_in_sync_group))
    )


def conv():
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 3))


def batch_norm():
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3))


def sync_batch_norm():
    kinds = [ts.nn.SyncBatchNorm(3), ts.nn.SyncBatchNorm(3, momentum=None), nn.SyncBatchNorm(3, affine=False)]
    return nn.Sequential(nn.Conv2d(1, 3, 3), *kinds, nn.ReLU(), nn.Flatten(), nn.Linear(48, 3))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.output = nn.Linear(8, 3)

    def forward(self, x):
        return self.output(self.layer(self.embedding(x)).mean(1))


def mlp():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def batches(make_model, sizes, dtype=torch.float32):
    """Return batches that fit to a model."""
    generator = torch.Generator().manual_seed(1)
    shape = {conv: (1, 6, 6), batch_norm: (1, 6, 6), sync_batch_norm: (1, 6, 6)}.get(make_model, (4,))
    made = []
    for size in sizes:
        if make_model is Transformer:
            x = torch.randint(0, 11, (size, 5), generator=generator)
        else:
            x = torch.randn(size, *shape, generator=generator, dtype=dtype)
        made.append((x, torch.randint(0, 3, (size,), generator=generator)))
    return made


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def train(
    strategy, make_model, sizes, *, make_optimizer=sgd, accumulate=1, add_loss=None, before_step=None, dtype=None
):
    """Train on batches of the given sizes in a ``ts.function``; returns losses, replicas' losses, and the weights."""
    with strategy.scope():
        model = make_model().to(dtype or torch.float32)
        optimizer = make_optimizer(model.parameters())

    def step(x, y, is_last):
        per_example = F.cross_entropy(model(x), y, reduction="none")
        loss = ts.nn.compute_average_loss(per_example, global_batch_size="actual")
        if add_loss is not None:
            loss = loss + add_loss(model)
        loss.backward()
        if is_last:
            if before_step is not None:
                before_step(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    @ts.function
    def distributed_step(x, y, is_last):
        losses = strategy.run(step, args=(x, y, is_last))
        return strategy.reduce("sum", losses), losses

    results = []
    data = strategy.experimental_distribute_dataset(batches(make_model, sizes, dtype or torch.float32))
    for i, (x, y) in enumerate(data):
        results.append(plain(distributed_step(x, y, (i + 1) % accumulate == 0)))
    return results, model.state_dict()
