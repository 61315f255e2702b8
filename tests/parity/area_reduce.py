"""Area 2, first part: local results, reduce and gather."""

from __future__ import annotations

import ast
import functools

import numpy as np
import torch

import torchstrategy as ts
from tests.parity.driver import family, per_replica, replica_id

reduce_family = functools.partial(family, 2)
context = ts.get_replica_context

OPS = {"None": None, "ReduceOp.SUM": ts.ReduceOp.SUM, "ReduceOp.MEAN": ts.ReduceOp.MEAN}


def x():
    """The replica's number: 1., 2., ..."""
    return torch.tensor(replica_id() + 1.0)


def in_run(s, fn):
    """Call ``fn(replica context)`` in run."""
    return s.run(lambda: fn(context()))


def scope_variable(s):
    with s.scope():
        return ts.Variable(2.0)


@reduce_family()
def reduceops(s, case):
    return {name: member.value for name, member in ts.ReduceOp.__members__.items()}


# experimental_local_results


@reduce_family("elr_(tensor|none|int|list|tuple|dict)")
def elr(s, case):
    value = {
        "tensor": torch.tensor(5.0),
        "none": None,
        "int": 5,
        "list": [1, 2],
        "tuple": (per_replica(s), 5),
        "dict": {"a": per_replica(s)},
    }[case.groups[0]]
    return s.experimental_local_results(value)


@reduce_family()
def elr_var(s, case):
    return [(type(v).__name__, v.item()) for v in s.experimental_local_results(scope_variable(s))]


# reduce


@reduce_family("reduce_op_(.*)")
def reduce_op(s, case):
    name = case.groups[0]
    return s.reduce(OPS.get(name, name), per_replica(s), axis=None)


@reduce_family("(reduce|gather|all_gather)(2d)?(?:_(?:int32|f16|f64))?(?:_SUM|_MEAN)?_axis.*_(?:even|uneven|.*empty.*)")
def axis_grid(s, case):
    """Values of several lengths, with and without a second dimension, over every axis."""
    method, two_dims, lens = case.groups[0], case.groups[1], case.inputs["lens"]
    axis = None if case.inputs["axis"] is None else ast.literal_eval(str(case.inputs["axis"]))
    dtype = getattr(torch, case.inputs.get("dtype", "float32"))

    def value(i):
        column = 10 * i + torch.arange(lens[i], dtype=dtype)
        return torch.stack([column, 100 + column], dim=1) if two_dims else column

    values = per_replica(s, value)
    if method == "reduce":
        return s.reduce(case.inputs["op"], values, axis=axis)
    if method == "gather":
        return s.gather(values, axis=axis)
    return s.run(lambda v: context().all_gather(v, axis), args=(values,))


@reduce_family()
def reduce_noaxis(s, case):
    return s.reduce("SUM", per_replica(s))


@reduce_family("reduce_int_(mean|sum)")
def reduce_int(s, case):
    return s.reduce(case.groups[0], per_replica(s, lambda i: torch.tensor(i + 1, dtype=torch.int32)), axis=None)


@reduce_family()
def reduce_bool_sum(s, case):
    return s.reduce("SUM", per_replica(s, lambda i: torch.tensor(True)), axis=None)


@reduce_family("reduce_plain_(tensor|float|zero|zero_f|zero_tensor)_(sum|mean)")
def reduce_plain(s, case):
    value = {"tensor": torch.tensor(3.0), "float": 3.0, "zero": 0, "zero_f": 0.0, "zero_tensor": torch.tensor(0.0)}
    return s.reduce(case.groups[1], value[case.groups[0]], axis=None)


@reduce_family("reduce_plain_vec(_mean)?_axis0")
def reduce_plain_vec(s, case):
    return s.reduce("MEAN" if case.groups[0] else "SUM", torch.tensor([1.0, 2.0, 3.0]), axis=0)


@reduce_family("reduce_scalar(_mean)?_axis0")
def reduce_scalar(s, case):
    return s.reduce("MEAN" if case.groups[0] else "SUM", per_replica(s), axis=0)


@reduce_family()
def reduce_axis_str(s, case):
    return s.reduce("SUM", per_replica(s, lambda i: torch.ones(2)), axis="a")


@reduce_family()
def reduce_list(s, case):
    return s.reduce("SUM", [per_replica(s), per_replica(s)], axis=None)


@reduce_family()
def reduce_list_floats(s, case):
    return s.reduce("SUM", [1.0, 2.0], axis=None)


@reduce_family()
def reduce_result_type(s, case):
    return type(s.reduce("SUM", per_replica(s), axis=None)).__name__


@reduce_family()
def reduce_in_replica_ctx(s, case):
    return s.run(lambda: s.reduce("SUM", x(), axis=None))


@reduce_family("reduce_pr_py(float|int)(_mean)?")
def reduce_pr_py(s, case):
    kind = {"float": float, "int": int}[case.groups[0]]
    return s.reduce("MEAN" if case.groups[1] else "SUM", s.run(lambda: kind(replica_id() + 1)), axis=None)


@reduce_family("reduce_mirrored_var_(sum|mean)")
def reduce_mirrored_var(s, case):
    return s.reduce(case.groups[0], scope_variable(s), axis=None)


# gather


@reduce_family()
def gather_in_replica_ctx(s, case):
    return s.run(lambda: s.gather(torch.ones(1), axis=0))


@reduce_family()
def gather_scalar(s, case):
    return s.gather(per_replica(s), axis=0)


@reduce_family()
def gather_dict(s, case):
    return s.gather({"a": per_replica(s, lambda i: torch.tensor([float(i)]))}, axis=0)


@reduce_family()
def gather_plain(s, case):
    return s.gather(torch.tensor([1.0, 2.0]), axis=0)


@reduce_family()
def gather_plain_py(s, case):
    return s.gather(3.0, axis=0)


@reduce_family()
def gather_str(s, case):
    return s.gather(per_replica(s, lambda i: np.array([f"r{i}"])), axis=0)


def rank_mismatch(i):
    return torch.ones(1) if i == 0 else torch.ones(1, 1)


def width_mismatch(i):
    return torch.ones(1, i + 1)


@reduce_family("(gather|all_gather)_(rank|other_dim|dtype)_mismatch")
def gather_mismatch(s, case):
    value = {
        "rank": rank_mismatch,
        "other_dim": width_mismatch,
        "dtype": lambda i: torch.tensor([1], dtype=torch.int32 if i == 0 else torch.float32),
    }[case.groups[1]]
    if case.groups[0] == "gather":
        return s.gather(per_replica(s, value), axis=0)
    return in_run(s, lambda ctx: ctx.all_gather(value(replica_id()), 0))
