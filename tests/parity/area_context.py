"""Area 3: scopes, and what the context functions say in every place."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import pickle
import threading

import numpy as np
import torch
from torch.utils.data import DataLoader

import torchstrategy as ts
from tests.parity.driver import context_name, family, mirrored, replica_id
from torchstrategy.replicas.record import owner

context_family = functools.partial(family, 3)


def truth():
    """What the four context functions say here, in the form of the figures."""
    return {
        "has_strategy": ts.has_strategy(),
        "in_cross_replica_context": ts.in_cross_replica_context(),
        "get_strategy": type(ts.get_strategy()).__name__,
        "get_replica_context": context_name(),
    }


def truth_text():
    """The figures hold what was seen inside run as text."""
    return json.dumps(truth())


def other_strategy():
    return mirrored(2)


@context_family("truth\\.(scope|run|merge|ctx_reenter|update)")
def truth_in(s, case):
    def reenter():
        with ts.get_replica_context():
            return truth_text()

    where = case.groups[0]
    if where == "scope":
        with s.scope():
            return truth()
    if where == "update":
        with s.scope():
            variable = ts.Variable(0.0)
            return list(s.extended.update(variable, lambda v: truth(), group=False))
    fn = {
        "run": truth_text,
        "merge": lambda: ts.get_replica_context().merge_call(lambda strategy: truth_text()),
        "ctx_reenter": reenter,
    }[where]
    return s.run(fn)


# scopes


@context_family()
def scope_in_run(s, case):
    def fn():
        with s.scope():
            return truth_text()

    return s.run(fn)


@context_family()
def scope_as(s, case):
    with s.scope() as entered:
        return entered is s


@context_family()
def reenter(s, case):
    with s.scope():
        with s.scope():
            inner = truth()
        after_inner = truth()
    return inner, after_inner, truth()


@context_family()
def scope_object_reuse(s, case):
    scope = s.scope()
    for _ in range(2):
        with scope:
            pass
    return truth()


@context_family()
def scope_object_reuse_nested(s, case):
    scope = s.scope()
    with scope, scope:
        pass
    return ts.has_strategy()


@context_family()
def nest_other(s, case):
    with s.scope(), other_strategy().scope():
        return truth()


@context_family()
def nest_other_after(s, case):
    with contextlib.suppress(RuntimeError), s.scope(), other_strategy().scope():
        pass
    return truth()


@context_family()
def nest_default(s, case):
    default = ts.get_strategy()
    with s.scope(), default.scope():
        return truth()


@context_family()
def run_other_in_scope(s, case):
    with s.scope():
        return other_strategy().run(truth_text)


@context_family()
def reduce_other_in_scope(s, case):
    with s.scope():
        return other_strategy().reduce("SUM", 0.0, axis=None)


@context_family()
def out_of_order(s, case):
    first, second = s.scope(), s.scope()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    after_first = truth()
    second.__exit__(None, None, None)
    return after_first, truth()


@context_family()
def exit_twice(s, case):
    scope = s.scope()
    scope.__enter__()
    scope.__exit__(None, None, None)
    scope.__exit__(None, None, None)


@context_family()
def name_scope_crossing(s, case):
    """A profiler's label stands for TF's name scope."""
    scope, label = s.scope(), torch.profiler.record_function("label")
    scope.__enter__()
    label.__enter__()
    scope.__exit__(None, None, None)
    label.__exit__(None, None, None)
    return truth()


@context_family()
def exc_in_scope(s, case):
    with contextlib.suppress(KeyError), s.scope():
        raise KeyError("left the scope")
    return truth()


@context_family()
def thread(s, case):
    seen = []
    with s.scope():
        worker = threading.Thread(target=lambda: seen.append(truth()))
        worker.start()
        worker.join()
    return seen[0]


# experimental_set_strategy


@context_family()
def set_strategy(s, case):
    ts.experimental_set_strategy(s)
    seen = truth(), type(ts.Variable(0.0)).__name__, s.run(truth_text)
    ts.experimental_set_strategy(None)
    return *seen, truth()


@context_family()
def set_in_scope(s, case):
    with s.scope():
        ts.experimental_set_strategy(s)


@context_family()
def set_in_run(s, case):
    s.run(lambda: ts.experimental_set_strategy(s))


@context_family()
def set_then_other(s, case):
    ts.experimental_set_strategy(s)
    with other_strategy().scope():
        return truth()


@context_family()
def set_then_same(s, case):
    ts.experimental_set_strategy(s)
    with s.scope():
        return truth()


@context_family()
def set_twice(s, case):
    ts.experimental_set_strategy(s)
    ts.experimental_set_strategy(other_strategy())
    return truth()


# the strategy object


@context_family()
def public_attrs(s, case):
    return [name for name in case.expected["list"] if name in dir(s)]


@context_family()
def ext_attrs(s, case):
    return [name for name in case.expected["list"] if name in dir(s.extended)]


@context_family("type")
def type_and_repr(s, case):
    return type(s).__name__, repr(s)[: repr(s).index(" object") + len(" object")]


@context_family()
def cluster_resolver(s, case):
    return type(s.cluster_resolver).__name__


@context_family("copy")
def shallow_copy(s, case):
    return copy.copy(s) is s


@context_family()
def deepcopy(s, case):
    return copy.deepcopy(s) is s


@context_family("pickle")
def pickled(s, case):
    return len(pickle.dumps(s))


@context_family()
def worker_devices(s, case):
    devices = s.extended.worker_devices
    return list(devices) if case.host == "central" else devices  # TF's is a list there


@context_family()
def parameter_devices(s, case):
    return s.extended.parameter_devices


# variables


@context_family()
def variable_created_in_scope(s, case):
    with s.scope():
        inside = ts.Variable(1.0)
    outside = ts.Variable(1.0)
    return owner(inside) is s, owner(outside) is s, type(inside).__name__, type(outside).__name__


@context_family()
def variable_created_in_other_scope(s, case):
    with other_strategy().scope():
        variable = ts.Variable(1.0)
    return s.extended.variable_created_in_scope(variable)


@context_family()
def plain_var_assign_add_in_run(s, case):
    variable = ts.Variable(1.0)
    s.run(lambda: variable.assign_add(1.0))
    return variable


@context_family()
def var_in_run(s, case):
    return s.run(lambda: type(ts.Variable(0.0)).__name__)


@context_family()
def var_in_run_values(s, case):
    made = []
    s.run(lambda: made.append(ts.Variable(replica_id() + 1)))
    return [[np.float32(v.item()) for v in s.experimental_local_results(made[0])]], all(v is made[0] for v in made)


# the default strategy


@context_family()
def dist_dataset_in_run(s, case):
    loader = DataLoader(range(4), batch_size=2)
    return s.run(lambda: s.experimental_distribute_dataset(loader))


@context_family("default\\.(singleton|same_in_run|dist_from_fn|dvff|var_type)")
def default(s, case):
    """``s`` is the default strategy here."""

    def dataset_fn(ctx):
        seen.append(
            (
                ctx.num_input_pipelines,
                ctx.input_pipeline_id,
                ctx.num_replicas_in_sync,
                ctx.get_per_replica_batch_size(8),
            )
        )
        return DataLoader(range(5), batch_size=2)

    seen = []
    which = case.groups[0]
    if which == "singleton":
        return ts.get_strategy() is ts.get_strategy()
    if which == "same_in_run":
        return s.run(lambda: ts.get_strategy() is s)
    if which == "dist_from_fn":
        dataset = s.distribute_datasets_from_function(dataset_fn)
        return seen, type(dataset).__name__, [batch.numpy() for batch in dataset]
    if which == "dvff":
        return s.experimental_distribute_values_from_function(lambda ctx: torch.tensor(1.0))
    if which == "var_type":
        with s.scope():
            return type(ts.Variable(0.0)).__name__
    raise LookupError(f"{case.id} is about something that is not known here")
