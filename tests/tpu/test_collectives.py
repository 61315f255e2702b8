"""``reduce``, ``gather``, ``all_reduce``, ``all_gather`` and ``merge_call`` over XLA devices, against CPU replicas."""

import pytest
import torch
from torch import nn

import torchstrategy as ts
from tests.tpu.programs import check_same, error_of, ids, rows_of_id

pytestmark = pytest.mark.timeout(300)


def matrices(strategy):
    return strategy.experimental_distribute_values_from_function(
        lambda context: torch.arange(6.0).reshape(2, 3) + context.replica_id_in_sync_group
    )


def reduced(strategy):
    held = matrices(strategy)
    computed = strategy.run(lambda x: x * 2, args=(held,))
    results = [
        strategy.reduce(op, value, axis=axis)
        for value in (held, computed)
        for op in ("sum", "MEAN", ts.ReduceOp.SUM)
        for axis in (None, 0, (1, 0))
    ]
    uneven = rows_of_id(strategy, 2)
    computed = strategy.run(lambda x: x * 2, args=(uneven,))
    return results, [strategy.reduce(op, value, axis=0) for value in (uneven, computed) for op in ("sum", "mean")]


def test_reduce(xla_process):
    check_same(xla_process, reduced)


def dtypes(strategy):
    values = strategy.run(
        lambda x: {
            "float64": x.double() / 3,
            "float16": x.half(),
            "bfloat16": x.bfloat16(),
            "int64": x.long() + 2**40,
            "int32": x.int() + 100,
            "int16": x.to(torch.int16),
            "uint8": (x + 100).to(torch.uint8),
        },
        args=(ids(strategy),),
    )
    return strategy.reduce("sum", values), strategy.reduce("mean", values)


def test_reduce_of_every_dtype(xla_process):
    check_same(xla_process, dtypes)


def plain_values(strategy):
    with strategy.scope():
        layer = nn.Linear(2, 1)
    shared = strategy.run(lambda: layer.weight * 2)
    return (
        strategy.reduce("mean", {"a": torch.ones(2)}),
        strategy.reduce("mean", 4.0),
        strategy.reduce("sum", torch.ones(3), axis=0),
        strategy.gather(torch.ones(2), 0),
        shared,
        strategy.reduce("sum", shared),
        strategy.run(lambda: ts.get_replica_context().all_reduce("sum", torch.ones(2))),
    )


def test_values_that_all_replicas_have(xla_process):
    check_same(xla_process, plain_values)


def gathered(strategy):
    held, uneven = matrices(strategy), rows_of_id(strategy, 2)
    computed = strategy.run(lambda x, y: (x * 2, (x.long(), x > 2), y * 2), args=(held, uneven))
    return (
        strategy.gather(computed, 0),
        strategy.gather(computed[:2], 1),
        strategy.gather(held, 1),
        strategy.gather(uneven, 0),
    )


def test_gather(xla_process):
    check_same(xla_process, gathered)


def refusals(strategy):
    number, uneven = ids(strategy), rows_of_id(strategy)
    numbers, unevens, flags = strategy.run(lambda x, y: (x * 1, y * 1, x > 1), args=(number, uneven))
    calls = [
        *((strategy.reduce, "sum", value) for value in (flags, unevens, uneven, None, 3.0)),
        *((strategy.reduce, op, numbers) for op in ("max", 3)),
        *((strategy.reduce, "sum", unevens, axis) for axis in (1, -2, "x")),
        (strategy.reduce, "sum", numbers, 0),
        *((strategy.gather, value, 0) for value in (numbers, number)),
        *((strategy.gather, unevens, axis) for axis in (1, -1)),
    ]
    return [error_of(*call) for call in calls]


def test_refusals(xla_process):
    check_same(xla_process, refusals)


def refusals_inside(strategy):
    context = ts.get_replica_context
    functions = [
        lambda x, y: context().all_reduce("sum", 3.0),
        lambda x, y: context().all_reduce("sum", x > 1),
        lambda x, y: context().all_reduce("prod", x),
        lambda x, y: context().all_reduce("sum", y),
        lambda x, y: context().all_gather(x, 0),
        lambda x, y: context().all_gather(y, 1),
        lambda x, y: context().all_gather(y, -1),
        lambda x, y: context().all_gather(3.0, 0),
        lambda x, y: strategy.reduce("sum", x),
        lambda x, y: strategy.gather(y, 0),
        lambda x, y: strategy.run(lambda: 1),
        lambda x, y: ts.OneDeviceStrategy("cpu").run(lambda: 1),
        lambda x, y: strategy.scope().__enter__(),
    ]
    errors = [error_of(strategy.run, fn, (ids(strategy), rows_of_id(strategy))) for fn in functions]
    return errors, strategy.run(lambda x: x + 1, args=(ids(strategy),))


def test_refusals_inside_a_replica_function(xla_process):
    check_same(xla_process, refusals_inside)


def inside(strategy):
    def fn(x, rows):
        context = ts.get_replica_context()
        return (
            context.all_reduce("sum", {"a": x, "b": (x.long(), x.double())}),
            context.all_reduce("mean", [x, x.long()]),
            context.all_gather({"rows": rows}, 0),
            context.all_gather((x.reshape(1, 1), x.long().reshape(1, 1)), 1),
            torch.as_tensor(context.replica_id_in_sync_group),
            context.num_replicas_in_sync,
            len(context.devices),
        )

    even = strategy.experimental_distribute_values_from_function(
        lambda context: torch.full((2, 2), float(context.replica_id_in_sync_group))
    )
    return [strategy.run(fn, args=(ids(strategy), rows)) for rows in (even, rows_of_id(strategy, 2))]


def test_inside_a_replica_function(xla_process):
    check_same(xla_process, inside)


def gradients(strategy):
    def fn(x, rows):
        context = ts.get_replica_context()
        weight = torch.full((2,), 2.0, requires_grad=True)
        total = context.all_reduce("sum", weight * x)
        (total * (x + 1)).sum().backward()
        own = rows.clone().requires_grad_()
        gathered = context.all_gather(own, 0)
        (gathered**2 * (x + 1)).sum().backward()
        mean = context.all_reduce("mean", own.sum() * x)
        (second,) = torch.autograd.grad(mean, own)
        return total, weight.grad, gathered, own.grad, second

    even = strategy.run(lambda x: x.expand(2).clone(), args=(ids(strategy),))
    return [strategy.run(fn, args=(ids(strategy), rows)) for rows in (even, rows_of_id(strategy))]


def test_gradients_through_collectives(xla_process):
    check_same(xla_process, gradients)


def merged(strategy):
    with strategy.scope():
        layer = nn.Linear(1, 1)

    def assign(own, value):
        with torch.no_grad():
            layer.weight.copy_(own.reduce("sum", value).reshape(1, 1))

    def fn(x, rows):
        merge_call = ts.get_replica_context().merge_call
        merge_call(assign, args=(x,))
        total = merge_call(lambda own, value: own.reduce("sum", value), args=(x,))
        mean = merge_call(lambda own, value, k: own.reduce("mean", value) * k, args=(x,), kwargs={"k": 3})
        rows_total = merge_call(lambda own, value: own.reduce("sum", value, axis=0), args=(rows,))
        gathered = merge_call(lambda own, value: own.gather(value, 0), args=(rows,))
        local = merge_call(lambda own, value: own.experimental_local_results(value)[1] + 1, args=(x,))
        own = merge_call(lambda own, value: value, args=(x * 2,))
        # what `merge_call` returned to all is one object on the CPU's replicas, and so plain: compute with it
        shared = [value + 1 for value in (total, mean, rows_total, gathered, local)]
        return shared, own, merge_call(lambda own: ts.in_cross_replica_context()), layer.weight * x

    return strategy.run(fn, args=(ids(strategy), rows_of_id(strategy))), layer.weight


def test_merge_call(xla_process):
    check_same(xla_process, merged)


def means_of_integers(strategy):
    def replica(x):
        context = ts.get_replica_context()
        return [context.all_reduce("MEAN", value) for dtype in SMALL for value in (x.to(dtype), (x + 1).to(dtype)[:1])]

    values = strategy.experimental_distribute_values_from_function(
        lambda context: torch.arange(3.0) + 7 * context.replica_id_in_sync_group
    )
    return strategy.run(replica, args=(values,))


SMALL = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


def test_means_of_small_integers(xla_process):
    check_same(xla_process, means_of_integers)
