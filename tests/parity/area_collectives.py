"""Area 2, second part: the replica context, its collectives and ``merge_call``, and PerReplica values outside run."""

from __future__ import annotations

import json

import torch

import torchstrategy as ts
from tests.parity.area_reduce import OPS, in_run, reduce_family, scope_variable, x
from tests.parity.driver import context_name, mirrored, normalise, per_replica, replica_id
from torchstrategy.base.devices import canonical_device, full_device_name

# What a replica context has here and not in TF.
ADDED_TO_CONTEXT = {"actual_batch_size", "mark_summed", "sum_gradients"}
ADDED_TO_CONTEXT |= {"batch_shares", "has_scaled_losses", "local_id", "step_depth"}  # for the library's own use


def all_reduced(s, op, fn):
    return in_run(s, lambda ctx: ctx.all_reduce(op, fn()))


@reduce_family()
def rid_type(s, case):
    value = in_run(s, lambda ctx: ctx.replica_id_in_sync_group)
    return type(value).__name__, int(value)


@reduce_family()
def ctx_num(s, case):
    return in_run(s, lambda ctx: ctx.num_replicas_in_sync)


@reduce_family()
def ctx_strategy(s, case):
    return in_run(s, lambda ctx: ctx.strategy is s)


@reduce_family()
def ctx_type(s, case):
    return in_run(s, lambda ctx: context_name())


@reduce_family()
def ctx_devices(s, case):
    return in_run(s, lambda ctx: str(tuple(full_device_name(canonical_device(name)) for name in ctx.devices)))


@reduce_family()
def ctx_repr(s, case):
    return in_run(s, lambda ctx: tuple(n for n in dir(ctx) if n[0] != "_" and n not in ADDED_TO_CONTEXT))


@reduce_family()
def ctx_leak_all_reduce(s, case):
    kept = []
    in_run(s, kept.append)
    return kept[0].all_reduce("SUM", torch.tensor(1.0))


# all_reduce


@reduce_family("all_reduce_(SUM|sum|mean|MEAN|None)")
def all_reduce(s, case):
    name = case.groups[0]
    return all_reduced(s, OPS.get(name, name), x)


@reduce_family("all_reduce_in_tf_function_in_run|tf_function_run_all_reduce")
def all_reduce_in_tf_function(s, case):
    return ts.function(all_reduced)(s, "SUM", ts.function(x))


@reduce_family("all_reduce_(empty|empty_list|pyint|none|bool|int_mean|nested|shape_mismatch)")
def all_reduce_of(s, case):
    fn = {
        "empty": lambda: {},
        "empty_list": list,
        "pyint": lambda: 3,
        "none": lambda: None,
        "bool": lambda: torch.tensor(replica_id() > 0),
        "int_mean": lambda: torch.tensor(replica_id() + 1, dtype=torch.int32),
        "nested": lambda: {"a": x(), "b": [x() * 2, (x() * 3,)]},
        "shape_mismatch": lambda: torch.ones(replica_id() + 1),
    }[case.groups[0]]
    return all_reduced(s, "MEAN" if case.groups[0].endswith("mean") else "SUM", fn)


@reduce_family("all_reduce_vec(_mean)?")
def all_reduce_vec(s, case):
    return all_reduced(s, "MEAN" if case.groups[0] else "SUM", lambda: torch.stack([x(), 2 * x()]))


@reduce_family()
def all_reduce_var(s, case):
    variable = scope_variable(s)
    return all_reduced(s, "SUM", lambda: variable)


@reduce_family()
def all_reduce_indexed(s, case):
    """A sparse tensor stands for IndexedSlices."""
    return in_run(s, lambda ctx: ctx.all_reduce("SUM", sparse_rows(replica_id())).to_dense())


@reduce_family()
def all_reduce_indexed_raw(s, case):
    reduced = all_reduced(s, "SUM", lambda: sparse_rows(0))
    parts = s.run(lambda t: (t._values(), t._indices()[0].to(torch.int32)), args=(reduced,))
    is_sparse = all(t.is_sparse for t in s.experimental_local_results(reduced))
    return ("IndexedSlices" if is_sparse else "dense", *parts)


def sparse_rows(row):
    indices, values = torch.tensor([[row]]), torch.stack([x(), x()])[None]
    return torch.sparse_coo_tensor(indices, values, (4, 2), check_invariants=True)


@reduce_family("all_reduce_grad_(w_|nested_)?(SUM|MEAN)")
def all_reduce_grad(s, case):
    kind, op = case.groups

    def fn(ctx):
        leaf = x().requires_grad_()
        if kind == "nested_":
            reduced = ctx.all_reduce(op, {"p": leaf**2, "q": 3 * leaf})
            y = reduced["p"] * reduced["q"]
        else:
            y = ctx.all_reduce(op, leaf**2) * (replica_id() + 1 if kind == "w_" else 1)
        return y, torch.autograd.grad(y, leaf)[0]

    return in_run(s, fn)


# all_gather


@reduce_family()
def all_gather_nested(s, case):
    return in_run(s, lambda ctx: ctx.all_gather({"a": x()[None], "b": (2 * x()[None],)}, 0))


@reduce_family()
def all_gather_grad(s, case):
    def fn(ctx):
        leaf = x().requires_grad_()
        y = (replica_id() + 1) * ctx.all_gather((leaf**2)[None], 0).sum()
        return y, torch.autograd.grad(y, leaf)[0]

    return in_run(s, fn)


@reduce_family()
def all_gather_scalar(s, case):
    return in_run(s, lambda ctx: ctx.all_gather(x(), 0))


@reduce_family()
def all_gather_py(s, case):
    return in_run(s, lambda ctx: ctx.all_gather(3.0, 0))


# merge_call


def merged(s, fn, args=lambda: (), kwargs=lambda: None):
    return in_run(s, lambda ctx: ctx.merge_call(fn, args=args(), kwargs=kwargs()))


@reduce_family()
def merge_args_tensor(s, case):
    return merged(s, lambda strategy, a: type(a).__name__, args=lambda: (x(),))


@reduce_family()
def merge_kwargs(s, case):
    return merged(s, lambda strategy, a: type(a).__name__, kwargs=lambda: {"a": x()})


@reduce_family()
def merge_identity(s, case):
    return merged(s, lambda strategy, a: a, args=lambda: (x(),))


@reduce_family()
def merge_none(s, case):
    return merged(s, lambda strategy: None)


@reduce_family()
def merge_reduce(s, case):
    return merged(s, lambda strategy, a: strategy.reduce("SUM", a, axis=None), args=lambda: (x(),))


@reduce_family("merge_nested_args|merge_pyint_diff")
def merge_structure(s, case):
    args = (lambda: ({"a": (x(), 3, None)},)) if case.name == "2.merge_nested_args" else (lambda: (replica_id(),))
    return merged(s, lambda strategy, a: json.dumps(normalise(a)), args=args)


@reduce_family()
def merge_state(s, case):
    def state(strategy):
        in_cross, no_replica = ts.in_cross_replica_context(), ts.get_replica_context() is None
        return in_cross, no_replica, ts.has_strategy(), ts.get_strategy() is s, strategy is s

    return merged(s, state)


@reduce_family()
def merge_diff_fn(s, case):
    return in_run(
        s, lambda ctx: ctx.merge_call((lambda strategy: "A") if replica_id() == 0 else (lambda strategy: "B"))
    )


@reduce_family()
def merge_call_count(s, case):
    calls = []
    merged(s, calls.append)
    return len(calls)


def fail(strategy):
    raise ValueError("merge")


@reduce_family()
def merge_exc(s, case):
    return merged(s, fail)


@reduce_family()
def merge_exc_catch(s, case):
    def fn(ctx):
        try:
            ctx.merge_call(fail)
        except ValueError:
            return f"caught {replica_id()}"
        return "no exception"

    return in_run(s, fn)


@reduce_family()
def merge_nested(s, case):
    return in_run(s, lambda ctx: ctx.merge_call(lambda strategy: ctx.merge_call(lambda inner: None)))


# PerReplica outside run

PER_REPLICA_USES = {
    "repr": lambda p: (repr(p), str(p)),
    "ops": lambda p: p + 1,
    "ops2": lambda p: torch.add(p, 1),
    "numpy": lambda p: p.numpy(),
    "attr": lambda p: p.shape,
    "bool": bool,
}


@reduce_family("pr_(repr|ops|ops2|numpy|attr|bool)")
def per_replica_outside(s, case):
    return PER_REPLICA_USES[case.groups[0]](per_replica(mirrored(2)))


@reduce_family()
def pr_wrong_count_reduce(s, case):
    return mirrored(3).reduce("SUM", per_replica(mirrored(2)), axis=None)


@reduce_family()
def pr_wrong_count_run(s, case):
    return mirrored(3).run(lambda v: v, args=(per_replica(mirrored(2)),))
