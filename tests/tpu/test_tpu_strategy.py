"""``run`` of a TPU strategy: its arguments, its results, where it may be called, and replica functions that fail."""

import dataclasses
import gc

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchstrategy as ts
from tests.tpu.programs import batches, check_same, error_of, ids, mlp, plain, sgd
from torchstrategy.testing import RemoteError

pytestmark = pytest.mark.timeout(300)


@dataclasses.dataclass
class Pair:
    first: object
    second: object


def arguments(strategy):
    of_function = strategy.experimental_distribute_values_from_function
    values = ids(strategy)
    name = of_function(lambda context: "ab"[context.replica_id_in_sync_group % 2])
    number = of_function(lambda context: context.replica_id_in_sync_group)
    fraction = of_function(lambda context: context.replica_id_in_sync_group / 2)

    def nested(structure, *, pair, n):
        return structure["x"][0] + 1, structure["x"][1] * 2, pair.first + pair.second, n

    def plain_ones(tensor, array, integer, real, text, nothing):
        return tensor * 2, torch.as_tensor(array).sum(), integer, real, text, nothing

    return (
        strategy.run(nested, args=({"x": (values, 3)},), kwargs={"pair": Pair(values, torch.ones(2)), "n": 5}),
        strategy.run(plain_ones, args=(torch.arange(3.0), np.arange(3.0), 7, 1.5, "text", None)),
        strategy.run(lambda x: x * 2, args=[name]),
        strategy.run(lambda i, f: (torch.as_tensor(i) + 1, torch.as_tensor(f) * 2.0), args=(number, fraction)),
    )


def test_arguments(xla_process):
    check_same(xla_process, arguments)


def results(strategy):
    marker = object()
    with strategy.scope():
        layer = nn.Linear(1, 1)

    def fn(x):
        objects = marker, layer.weight, layer(x.reshape(1, 1))
        return None, (x, x + 1), {"a": x}, Pair(x, 1), 3, "text", 1.5, True, *objects

    found = strategy.run(fn, args=(ids(strategy),))
    again = strategy.run(lambda found: found[1][1] * 2 + found[3].first, args=(found,))
    is_same = found[8] is marker, found[9] is layer.weight
    return found[:8], found[10], is_same, again, strategy.experimental_local_results((found[1], found[4]))


def test_results(xla_process):
    check_same(xla_process, results)


def returned_numbers(strategy):
    number = strategy.experimental_distribute_values_from_function(lambda context: context.replica_id_in_sync_group)
    return strategy.run(lambda i: i + 1, args=(number,)), strategy.run(lambda: 1)


def test_numbers_that_differ_between_replicas_are_tensors(xla_process):
    found, same = xla_process().run(plain_results, returned_numbers)
    assert [int(value) for value in found.values] == [1, 2, 3, 4]
    assert found.values[0].dtype == torch.int64
    assert same == 1


def plain_results(program):
    return plain(program(ts.TPUStrategy()))


def properties(strategy):
    def fn():
        context = ts.get_replica_context()
        return context.num_replicas_in_sync, context.strategy is strategy, len(context.devices)

    wrong = [
        error_of(strategy.run, 3),
        error_of(strategy.run, fn, 3),
        error_of(strategy.run, lambda x: x, ts.PerReplica((1, 2))),
        error_of(strategy.run, lambda x: x, (ts.PerReplica((torch.ones(1), torch.ones(1))),)),
        error_of(strategy.run, fn, (), None, "options"),
    ]
    return (
        strategy.run(fn),
        wrong,
        strategy.num_replicas_in_sync,
        len(strategy.extended.worker_devices),
        len(strategy.extended.parameter_devices),
        strategy.experimental_local_results(3),
        ts.has_strategy(),
    )


@pytest.mark.parametrize("num_devices", [2, 4])
def test_properties_and_wrong_calls(xla_process, num_devices):
    check_same(xla_process, properties, num_devices=num_devices)


def batch_sizes(strategy):
    def fn(batch, other):
        context = ts.get_replica_context()
        return context.actual_batch_size(batch), context.actual_batch_size(other), batch.shape[0], batch * 2

    first = strategy.experimental_distribute_dataset(torch.arange(11.0), batch_size=6)
    second = strategy.experimental_distribute_dataset(torch.arange(16.0), batch_size=8)
    found = [strategy.run(fn, args=pair) for pair in zip(first, second, strict=True)]
    alone = strategy.run(lambda x: ts.get_replica_context().actual_batch_size(), args=(next(iter(first)),))
    unknown = error_of(strategy.run, lambda x: ts.get_replica_context().actual_batch_size(), (ids(strategy),))
    return found, alone, unknown


def test_actual_batch_size(xla_process):
    check_same(xla_process, batch_sizes)


def higher_gradients(strategy):
    def fn(x):
        own = x.clone().requires_grad_()
        value = own**3
        (first,) = torch.autograd.grad(value, own, create_graph=True)
        (second,) = torch.autograd.grad(first, own)
        return value, first, second

    wanted = strategy.experimental_distribute_values_from_function(
        lambda context: torch.tensor([2.0 + context.replica_id_in_sync_group], requires_grad=True)
    )

    def on_input(x):
        (x**2).sum().backward()
        return x.grad

    return strategy.run(fn, args=(ids(strategy),)), strategy.run(on_input, args=(wanted,))


def test_gradients_of_inputs(xla_process):
    check_same(xla_process, higher_gradients)


def failing(strategy, when):
    """A replica function that raises, then works: what the failed call has traced must not matter."""
    with strategy.scope():
        model = nn.Linear(2, 1)
        optimizer = sgd(model.parameters())
    kept = []

    def step(x, fails):
        optimizer.zero_grad()
        hidden = model(x.expand(1, 2))
        if fails and when == "forward":
            kept.append(hidden * 2)
            raise ValueError("mine")
        hidden.sum().backward()
        if fails and when == "backward":
            kept.append(hidden)
            raise KeyboardInterrupt
        optimizer.step()
        return model.weight.detach().clone()

    found = [strategy.run(step, args=(ids(strategy), False))]
    try:
        strategy.run(step, args=(ids(strategy), True))
    except (ValueError, KeyboardInterrupt) as error:  # with its traceback, which holds local tensors
        kept.append(error)
    found.append(str(kept[-1]))
    found.append(strategy.run(step, args=(ids(strategy), False)))
    kept.clear()
    gc.collect()
    found.append(strategy.run(step, args=(ids(strategy), False)))
    return found, model.state_dict()


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_exception_leaves_nothing_behind(xla_process, when):
    check_same(xla_process, failing, when)


def failing_in_function(strategy):
    with strategy.scope():
        model = mlp()
        optimizer = sgd(model.parameters())

    def step(x, y):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y, reduction="sum").backward()
        optimizer.step()

    @ts.function
    def distributed_step(x, y, fails):
        strategy.run(step, args=(x, y))
        if fails:
            raise ValueError("after a run")

    for i, (x, y) in enumerate(strategy.experimental_distribute_dataset(batches(mlp, [8, 8, 8]))):
        try:
            distributed_step(x, y, i == 1)
        except ValueError:
            continue
    return model.state_dict()


def test_exception_after_a_run_in_a_function(xla_process):
    check_same(xla_process, failing_in_function)


def outliving(strategy):
    kept = []
    strategy.run(lambda x: kept.append(x + 1), args=(ids(strategy),))


def test_tensor_that_outlives_run_is_refused(xla_process):
    with pytest.raises(RemoteError, match="outlive `run`"):
        xla_process().run(plain_results, outliving)
    assert xla_process().run(plain_results, add_one).values[3] == 4


def add_one(strategy):
    return strategy.run(lambda x: x + 1, args=(ids(strategy),))


def run_in_merge_call(strategy):
    def merge(own, value):
        return own.run(lambda x: x * 2, args=(value,))

    return strategy.run(lambda x: ts.get_replica_context().merge_call(merge, args=(x,)), args=(ids(strategy),))


def test_run_in_merge_call_is_refused(xla_process):
    with pytest.raises(RemoteError, match="another call of it is being traced"):
        xla_process().run(plain_results, run_in_merge_call)
