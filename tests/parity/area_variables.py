"""Area 4: variables of every synchronization and aggregation, in every context, and ``strategy.extended``."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

import torchstrategy as ts
from tests.parity.driver import EXCEPTIONS, Raw, family, per_replica, replica_id
from torchstrategy.base.devices import full_device_name

variable_family = functools.partial(family, 4)

MODES = r"\[(\w+),(\w+)\]"
UPDATE = r"(assign|assign_add|assign_sub)"


def make(case, value=2.0, first_group=0, **kwargs):
    """Return a new variable of the modes that the case's id names."""
    synchronization, aggregation = case.groups[first_group : first_group + 2]
    return ts.Variable(
        value,
        synchronization=ts.VariableSynchronization[synchronization],
        aggregation=ts.VariableAggregation[aggregation],
        **kwargs,
    )


def made_in_scope(s, case, value=2.0, first_group=0, **kwargs):
    with s.scope():
        return make(case, value, first_group, **kwargs)


def local(s, variable):
    return [value.tolist() for value in s.experimental_local_results(variable)]


def or_error(expected: Any, fn: Any) -> Any:
    """The figures hold an error in the middle of a result as text: !Name: message."""
    if not (isinstance(expected, str) and expected.startswith("!")):
        return fn()
    name = expected[1:].partition(":")[0]
    try:
        return fn()
    except EXCEPTIONS[name]:
        return Raw(expected)


def after(s, case, variable, **more):
    """The local values and the value in cross-replica context."""
    expected = case.expected.get("dict", {}) if isinstance(case.expected, dict) else {}

    def read():
        with s.scope():
            return variable.read_value()

    return {**more, "local": local(s, variable), "cross_read": or_error(expected.get("cross_read"), read)}


@variable_family(rf"type{MODES}")
def made(s, case):
    if case.host in ("default", "onedevice", "central2"):  # of which only the class was measured
        return type(made_in_scope(s, case)).__name__
    v = made_in_scope(s, case)
    return type(v).__name__, v.trainable, str(v.synchronization), str(v.aggregation)


@variable_family("type")
def type_and_repr(s, case):
    with s.scope():
        variable = ts.Variable(2.0)
    return type(variable).__name__, repr(variable)


@variable_family(rf"{UPDATE}_replica{MODES}")
def update_in_run(s, case):
    variable = made_in_scope(s, case, first_group=1)

    def fn():
        getattr(variable, case.groups[0])(torch.tensor(replica_id() + 1.0))
        return variable.read_value()

    return after(s, case, variable, in_replica_after=s.run(fn))


@variable_family(rf"{UPDATE}_replica_pyfloat{MODES}")
def update_in_run_by_number(s, case):
    variable = made_in_scope(s, case, first_group=1)
    s.run(lambda: getattr(variable, case.groups[0])(replica_id() + 1.0))
    return after(s, case, variable)


@variable_family(rf"{UPDATE}_cross_scope{MODES}")
def update_in_scope(s, case):
    with s.scope():
        variable = make(case, first_group=1)
        getattr(variable, case.groups[0])(6.0)
    return after(s, case, variable)


@variable_family(rf"{UPDATE}_outside{MODES}")
def update_outside(s, case):
    variable = made_in_scope(s, case, first_group=1)
    getattr(variable, case.groups[0])(6.0)
    return after(s, case, variable)


@variable_family(rf"assign_add_retval{MODES}")
def returned_in_run(s, case):
    variable = made_in_scope(s, case)
    return s.run(lambda: variable.assign_add(torch.tensor(replica_id() + 1.0)))


@variable_family(rf"assign_same_replica{MODES}")
def assign_same(s, case):
    variable = made_in_scope(s, case)
    s.run(lambda: variable.assign(torch.tensor(5.0)))
    seen = after(s, _with_cross_read(case), variable)
    return seen["local"], seen["cross_read"]


@variable_family(rf"int_assign_add{MODES}")
def int_assign_add(s, case):
    variable = made_in_scope(s, case, 2)
    s.run(lambda: variable.assign_add(torch.tensor(replica_id() + 1)))
    seen = after(s, _with_cross_read(case), variable)
    cross = seen["cross_read"]
    return seen["local"], cross.to(torch.int32) if isinstance(cross, torch.Tensor) else cross


@variable_family(rf"vec_assign_add{MODES}")
def vector_assign_add(s, case):
    variable = made_in_scope(s, case, [1.0, 2.0])
    s.run(lambda: variable.assign_add(torch.tensor([replica_id() + 1.0, 0.0])))
    return local(s, variable)


@variable_family(rf"read_cross(_scope)?{MODES}")
def read_in_cross_replica_context(s, case):
    variable = made_in_scope(s, case, first_group=1)
    if not case.groups[0]:
        return variable.read_value()
    with s.scope():
        return variable.read_value()


@variable_family(rf"grad{MODES}")
def gradient(s, case):
    variable = made_in_scope(s, case, trainable=True)
    return s.run(lambda: torch.autograd.grad(variable * variable, variable)[0])


@variable_family(rf"reduce_var{MODES}")
def reduce_variable(s, case):
    variable = made_in_scope(s, case)
    if variable.synchronization is ts.VariableSynchronization.ON_READ:
        s.run(lambda: variable.assign(torch.tensor(replica_id() + 1.0)))
    ops = zip(("SUM", "MEAN"), case.expected["list"], strict=True)
    return [or_error(expected, lambda op=op: s.reduce(op, variable, axis=None)) for op, expected in ops]


@variable_family(rf"update{MODES}")
def update(s, case):
    variable = made_in_scope(s, case)
    s.extended.update(variable, lambda copy, x: copy.assign_add(x), args=(1.0,))
    return local(s, variable)


@variable_family()
def update_perreplica_args(s, case):
    with s.scope():
        variable = ts.Variable(2.0)
    values = s.experimental_distribute_values_from_function(lambda c: torch.tensor(c.replica_id_in_sync_group + 1.0))
    s.extended.update(variable, lambda copy, x: copy.assign_add(x), args=(values,))
    return local(s, variable)


@variable_family()
def update_plain_var(s, case):
    return s.extended.update(ts.Variable(2.0), lambda copy: copy.assign_add(1.0))


@variable_family("(repr|str)")
def shown(s, case):
    with s.scope():
        variable = ts.Variable(2.0)
    return {"repr": repr, "str": str}[case.groups[0]](variable)


@variable_family()
def name(s, case):
    with s.scope():
        unnamed, first, second = ts.Variable(1.0), ts.Variable(1.0, name="w"), ts.Variable(1.0, name="w")
    local_names = [value.name for value in s.experimental_local_results(first)][
        : 2 if s.num_replicas_in_sync < 3 else 3
    ]
    return unnamed.name, first.name, second.name, local_names


@variable_family()
def values_attr(s, case):
    with s.scope():
        variable = ts.Variable(1.0)
    return len(variable.values), [full_device_name(device) for device in s.placement.devices]


@variable_family()
def read_in_run(s, case):
    with s.scope():
        variable = ts.Variable(2.0)
    return s.run(lambda: variable.read_value())


@variable_family()
def init_fn_random(s, case):
    with s.scope():
        variable = ts.Variable(lambda: torch.rand(3))
    values = local(s, variable)
    return all(value == values[0] for value in values)


@variable_family()
def var_from_other(s, case):
    with s.scope():
        return local(s, ts.Variable(ts.Variable(3.0)))


@variable_family()
def var_bad_agg(s, case):
    with s.scope():
        return ts.Variable(1.0, aggregation="x")


@variable_family()
def onread_trainable(s, case):
    with s.scope():
        return ts.Variable(1.0, trainable=True, synchronization=ts.VariableSynchronization.ON_READ).trainable


@variable_family()
def reduce_to_outside(s, case):
    with s.scope():
        variable = ts.Variable(1.0)
    return s.extended.reduce_to("SUM", per_replica(s), variable)


@variable_family()
def reduce_to_inrun(s, case):
    with s.scope():
        variable = ts.Variable(1.0)
    return s.run(lambda: s.extended.reduce_to("SUM", torch.tensor(1.0), variable))


@variable_family()
def reduce_to_plain_mean(s, case):
    with s.scope():
        return s.extended.reduce_to("MEAN", torch.tensor(3.0), ts.Variable(1.0))


@variable_family()
def batch_reduce_to_mean(s, case):
    with s.scope():
        return s.extended.batch_reduce_to("MEAN", [(per_replica(s), ts.Variable(1.0))])


@variable_family()
def num(s, case):
    return s.num_replicas_in_sync


@variable_family(rf"(assign|assign_add){MODES}")
def update_in_run_of_one_replica(s, case):
    variable = made_in_scope(s, case, first_group=1)
    s.run(lambda: getattr(variable, case.groups[0])(torch.tensor(replica_id() + 1.0)))
    return np.float32(variable.read_value().item())


def _with_cross_read(case):
    """The expectation of a pair (local values, value in cross-replica context) in the form of the others."""
    pair = case.expected.get("tuple", [None, None])
    return type(case)(case.id, case.inputs, {"dict": {"cross_read": pair[1]}}, case.tf_bug, case.groups)
