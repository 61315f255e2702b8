"""Area 1: what ``Strategy.run`` passes to the replica function and makes of its results."""

from __future__ import annotations

import collections
import contextlib
import functools

import numpy as np
import torch

import torchstrategy as ts
from tests.parity.driver import Raw, family, per_replica, replica_id

run_family = functools.partial(family, 1)
Pair = collections.namedtuple("Pair", "first second")


def replica_id_tensor():
    """TF's replica id is an int32 tensor; here it is a python int."""
    return torch.tensor(replica_id(), dtype=torch.int32)


def all_reduced_zero():
    return ts.get_replica_context().all_reduce("SUM", torch.tensor(0.0))


@run_family()
def ret_tensor_rid(s, case):
    return s.run(replica_id_tensor)


@run_family()
def ret_none(s, case):
    return s.run(lambda: None)


@run_family()
def ret_int_diff(s, case):
    return s.run(replica_id)


@run_family()
def ret_int_same(s, case):
    return s.run(lambda: 3)


@run_family()
def ret_float_same(s, case):
    return s.run(lambda: 3.5)


@run_family()
def ret_str_same(s, case):
    return s.run(lambda: "x")


@run_family()
def ret_bool(s, case):
    return s.run(lambda: True)


@run_family()
def ret_ndarray(s, case):
    return s.run(lambda: np.array([1, 2]))


@run_family()
def ret_tuple(s, case):
    return s.run(lambda: (torch.tensor(1.0), None, 3, "x"))


@run_family()
def ret_namedtuple(s, case):
    pair = s.run(lambda: Pair(torch.tensor(1.0), None))
    return Raw({"object": type(pair).__name__})


@run_family()
def ret_dict(s, case):
    return s.run(lambda: {"b": torch.tensor(1.0), "a": {"c": (torch.tensor(2, dtype=torch.int32),)}})


@run_family()
def ret_empty_tuple(s, case):
    return s.run(lambda: ())


@run_family()
def ret_empty_dict(s, case):
    return s.run(lambda: {})


@run_family()
def ret_same_tensor(s, case):
    captured = torch.tensor(7.0)
    return s.run(lambda: captured)


@run_family("ret_(type|struct|key)_mismatch")
def ret_mismatch(s, case):
    fn = {
        "type": lambda: (tuple if replica_id() == 0 else list)([torch.tensor(1.0)]),
        "struct": lambda: (torch.tensor(1.0),) * (1 + replica_id()),
        "key": lambda: {f"key {replica_id()}": torch.tensor(1.0)},
    }[case.groups[0]]
    return s.run(fn)


@run_family()
def arg_perreplica(s, case):
    return s.run(lambda x: 2 * x, args=(per_replica(s),))


@run_family()
def arg_not_tuple(s, case):
    return s.run(lambda x: x, args=per_replica(s))


@run_family()
def kwargs(s, case):
    return s.run(lambda x, y: x * y, args=(per_replica(s),), kwargs={"y": per_replica(s)})


@run_family()
def kwargs_none(s, case):
    return s.run(lambda: 1, args=(), kwargs=None)


@run_family()
def arg_nested(s, case):
    argument = {"a": per_replica(s), "b": (per_replica(s), 5)}
    return s.run(lambda d: d["a"] + d["b"][0] * d["b"][1], args=(argument,))


@run_family()
def arg_nested_identity(s, case):
    return s.run(lambda d: d, args=({"a": per_replica(s), "b": (per_replica(s), 5, None)},))


@run_family()
def extra_kwarg(s, case):
    return s.run(lambda: 1, kwargs={"z": 1})


@run_family("exc_last|tf_function_exc|exc")
def exc_last(s, case):
    def fn():
        if replica_id() == s.num_replicas_in_sync - 1:
            raise KeyError(f"boom {replica_id()}")

    return ts.function(s.run)(fn) if "tf_function" in case.id else s.run(fn)


@run_family()
def exc_first_others_run(s, case):
    entered = []

    def fn():
        entered.append(replica_id())
        if replica_id() == 0:
            raise KeyError("boom")

    try:
        s.run(fn)
    except KeyError:
        return entered
    return "no exception"


@run_family()
def usable_after_exc(s, case):
    with contextlib.suppress(KeyError):
        exc_last(s, case)
    return s.run(replica_id_tensor)


@run_family()
def nested_run(s, case):
    return s.run(lambda: s.run(replica_id_tensor))


@run_family()
def exc_before_allreduce(s, case):
    def fn():
        if replica_id() == s.num_replicas_in_sync - 1:
            raise ValueError("before all_reduce")
        return all_reduced_zero()

    return s.run(fn)


@run_family()
def uneven_collective(s, case):
    def fn():
        is_last_of_several = replica_id() == s.num_replicas_in_sync - 1 > 0
        return torch.tensor(0.0) if is_last_of_several else all_reduced_zero()

    return s.run(fn)


@run_family()
def call_order(s, case):
    entered = []
    s.run(lambda: entered.append(replica_id()))
    return sorted(entered)


@run_family()
def call_count(s, case):
    entered = []
    s.run(lambda: entered.append(replica_id()))
    return len(entered)


@run_family()
def reduce_perreplica_none(s, case):
    return s.reduce("SUM", s.run(lambda: None), axis=None)


@run_family()
def run_in_scope(s, case):
    with s.scope():
        return s.run(replica_id_tensor)


def scope_variable(s):
    with s.scope():
        return ts.Variable(2.0)


@run_family()
def ret_variable(s, case):
    variable = scope_variable(s)
    return type(s.run(lambda: variable)).__name__


@run_family()
def ret_variable_id(s, case):
    variable = scope_variable(s)
    return s.run(lambda: variable) is variable


@run_family()
def arg_variable(s, case):
    return s.run(lambda x: x * 2, args=(scope_variable(s),))


@run_family()
def arg_variable_type(s, case):
    return s.run(lambda x: type(x).__name__, args=(scope_variable(s),))
