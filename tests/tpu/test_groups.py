"""Batches that don't divide evenly: replicas with fewer examples than the others, or none, count exactly."""

import random
from collections import deque

import numpy as np
import pytest
import torch
from torch import nn

import torchstrategy as ts
from tests.tpu.programs import batch_norm, batches, check_same, conv, error_of, ids, mlp, rows_of_id, sgd, train
from torchstrategy.testing import RemoteError

pytestmark = pytest.mark.timeout(300)


def test_remainders(xla_process):
    # shares of 2+2+2+1, 2+2+2+0, 2+2+1+0, 1+1+1+1, 1+1+1+0, 1+1+0+0, 1+0+0+0
    check_same(xla_process, train, mlp, [8, 7, 6, 5, 8, 4, 3, 2, 1])


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [2, 4])
@pytest.mark.parametrize("make_model", [mlp, conv])
def test_all_remainders(xla_process, make_model, num_devices):
    sizes = [size for rest in range(1, 2 * num_devices + 1) for size in (2 * num_devices, rest)]
    check_same(xla_process, train, make_model, sizes, num_devices=num_devices, accumulate=3)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [[16, 9], [9, 16], [9, 9], [16, 3]])
def test_accumulated_batch_norm(xla_process, sizes):
    check_same(xla_process, train, batch_norm, sizes * 2, accumulate=2)


class Counting(nn.Module):
    """Buffers that a forward pass changes in place: a sum of what was seen, and the number of examples."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(()))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        self.total += x.detach().sum()
        self.count += x.shape[0]
        return self.layer(x)


def counting(strategy, sizes, steps):
    with strategy.scope():
        model = Counting()
        optimizer = sgd(model.parameters())

    def step(x, y, is_last):
        model(x).sum().backward()
        before = model.total.clone()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
        return before, model.total.clone(), model.count.clone()

    results = []
    data = strategy.experimental_distribute_dataset(batches(mlp, sizes))
    for (x, y), is_last in zip(data, steps, strict=True):
        results.append(strategy.run(step, args=(x, y, is_last)))
        results.append((model.total.clone(), model.count.clone()))
    return results, model.state_dict()


@pytest.mark.filterwarnings("ignore:Buffer .* has got another value on each replica")
def test_buffers_of_uneven_shares(xla_process):
    # between steps every replica keeps its own; a step takes the mean of those that had examples
    check_same(xla_process, counting, [8, 5, 5, 8, 3, 8], [False, True, False, False, True, True])


def uneven_losses(strategy):
    with strategy.scope():
        model = nn.Linear(2, 1)
        optimizer = sgd(model.parameters())

    def step(x):
        optimizer.zero_grad()
        if len(x):
            model(x).sum().backward()  # the replicas without examples have no gradient at all
        optimizer.step()
        return len(x), x.shape[0] * 2.0, model.weight.detach().clone()

    return [strategy.run(step, args=(rows_of_id(strategy, 2),)) for _ in range(2)], model.state_dict()


def test_replica_without_backward(xla_process):
    check_same(xla_process, uneven_losses)


def uneven_values(strategy):
    values = rows_of_id(strategy)
    first = strategy.run(lambda x: (x.sum(), x * 2, x.shape[0], {"rows": x.reshape(-1, 1)}), args=(values,))
    again = strategy.run(lambda x, k: (x.sum() + k, x[:1]), args=(first[1], ids(strategy)))
    return first, again, strategy.gather(first[1], 0), strategy.reduce("mean", first[1], axis=0)


def test_values_of_several_shapes(xla_process):
    check_same(xla_process, uneven_values)


def shapes_by_rank(strategy):
    def fn(x):
        context = ts.get_replica_context()
        if x.shape[0] == 2:
            return context.all_reduce("sum", x.sum())
        return x.sum()

    functions = [fn, lambda x: (x,) if x.shape[0] == 2 else x, fails_for_two_rows]
    errors = [error_of(strategy.run, function, (rows_of_id(strategy),)) for function in functions]
    return errors, strategy.run(lambda x: x + 1, args=(ids(strategy),))


def fails_for_two_rows(x):
    ts.get_replica_context().all_reduce("sum", x.sum())
    if x.shape[0] == 2:
        raise ValueError("mine")
    ts.get_replica_context().all_reduce("sum", x.sum())


def test_groups_that_disagree(xla_process):
    check_same(xla_process, shapes_by_rank)


class Remembering(nn.Module):
    """Keeps what it saw last: a tensor whose shape follows the share."""

    def __init__(self):
        super().__init__()
        self.register_buffer("last", torch.zeros(1))

    def forward(self, x):
        self.last = x.detach() * 1
        return x


def remembering(strategy):
    with strategy.scope():
        module = Remembering()
    return strategy.run(lambda x: module(x), args=(rows_of_id(strategy),))


def test_kept_tensor_of_unequal_shapes_is_refused(xla_process):
    with pytest.raises(RemoteError, match="another shape on some replicas"):
        xla_process().run(run_on_devices, remembering)


def run_on_devices(program):
    program(ts.TPUStrategy())


class Own:
    def __init__(self):
        self.count, self.total = 0, torch.zeros(())


class Slots:
    __slots__ = ("count",)

    def __init__(self):
        self.count = 0


class CountingInAttributes(nn.Module):
    """Counts its calls in whatever its attributes are or hold."""

    def __init__(self):
        super().__init__()
        self.held = {"list": [Own()], "tensors": (torch.zeros(()),)}
        self.numbers, self.seen, self.last, self.slots = np.zeros(1), set(), deque(maxlen=9), Slots()
        self.drawn = [random.Random(1), np.random.default_rng(1), np.random.RandomState(1)]

    def forward(self, x):
        own = self.held["list"][0]
        own.count += 1
        own.total = own.total + 1
        self.held["tensors"][0].add_(1)
        self.held["new"] = self.held.get("new", torch.zeros(())) + x.sum()
        self.numbers += 1
        self.seen.add(len(self.seen))
        self.last.append(1)
        self.slots.count += 1
        draws = [generator.random() for generator in self.drawn]
        counts = [own.count, float(self.numbers[0]), len(self.seen), len(self.last), self.slots.count]
        return counts, draws, own.total + 0, self.held["tensors"][0] + 0, self.held["new"] + 0


def counted(strategy):
    with strategy.scope():
        model = CountingInAttributes()
    batches = strategy.experimental_distribute_dataset(torch.arange(20.0).reshape(20, 1), batch_size=10)
    return [strategy.run(model, args=(batch,)) for batch in batches]


def test_what_attributes_hold_is_changed_once(xla_process):
    """By a group of replicas as by one, not once for each group."""
    check_same(xla_process, counted)
