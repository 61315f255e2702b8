"""Right programs are not accused of what rounding and chance do."""

import functools

import pytest
import torch
from torch import nn

import torchstrategy as ts
from tests.testing.verification.planted import Transformer, build, make_batches

OPTIMIZERS = {
    "adam": functools.partial(torch.optim.Adam, lr=0.01),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=0.01),
    "momentum": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
}


def build_right(strategy, optimizer, mistake=None):
    """A right program; the gradient of a key's bias is zero but for rounding, which Adam divides by its own size."""
    model = Transformer()
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    number = 0

    def replica_step(batch):
        inputs, labels = batch
        optimizer.zero_grad()
        losses = nn.functional.cross_entropy(model(inputs), labels, reduction="none")
        ts.nn.compute_average_loss(losses, global_batch_size="actual").backward()
        context = ts.get_replica_context()
        if mistake is not None and number == 2 and context.replica_id_in_sync_group == 1:
            with torch.no_grad():
                model.head.bias.add_(mistake)
        optimizer.step()

    def step(batch):
        nonlocal number
        number += 1
        strategy.run(replica_step, args=(batch,))

    return {"step": step, "model": model, "optimizer": optimizer}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_rounding_in_single_precision_is_no_deviation(optimizer):
    report = ts.testing.verify_replication(
        functools.partial(build_right, optimizer=optimizer),
        make_batches("transformer", torch.float32),
        replicas=(2, 3),
        processes=(),
    )
    assert report.ok, str(report)


def test_a_weight_changed_on_one_replica_is_more_than_rounding():
    report = ts.testing.verify_replication(
        functools.partial(build_right, optimizer="adam", mistake=0.02),
        make_batches("transformer", torch.float32),
        replicas=(2,),
        processes=(),
    )
    assert report.kinds == {"weights loaded on one replica only"}, str(report)


def test_a_last_batch_of_one_example_shows_a_constant_divisor():
    batches = [*make_batches("mlp")[:2], tuple(part[:1] for part in make_batches("mlp")[2])]
    report = ts.testing.verify_replication(
        functools.partial(build, mistake="constant divisor"), batches, replicas=(2,), processes=()
    )
    assert report.kinds == {"constant divisor on a short batch"}, str(report)


def build_noisy_metric(strategy):
    model = nn.Linear(6, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shown = [torch.zeros(())]

    def replica_step(batch):
        return (model(batch[0]).detach() + torch.randn(len(batch[0]), 2)).sum()

    def step(batch):
        shown[0] = strategy.reduce("sum", strategy.run(replica_step, args=(batch,)), axis=None)

    return {"step": step, "model": model, "optimizer": optimizer, "metric": lambda: shown[0]}


def test_a_metric_of_random_numbers_is_not_called_unmerged():
    report = ts.testing.verify_replication(build_noisy_metric, make_batches("mlp"), replicas=(2,), processes=())
    assert report.kinds == {"random numbers can't be compared"}, str(report)
    assert "CAN'T BE COMPARED" in str(report)
