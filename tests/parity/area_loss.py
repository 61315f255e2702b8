"""Area 6: compute_average_loss and scale_regularization_loss."""

from __future__ import annotations

import functools

import numpy as np
import torch

import torchstrategy as ts
from tests.parity.driver import family, per_replica

loss_family = functools.partial(family, 6)

VEC = (1.0, 2.0, 3.0)
DTYPES = {"f64": torch.float64, "int32": torch.int32}  # where the figures name no dtype, the loss's name does
GLOBAL_BATCH_SIZES = {
    "None": lambda: None,
    "str": lambda: "4",
    "vec[2,3]": lambda: [2, 3],
    "tensor_i32_4": lambda: torch.tensor(4, dtype=torch.int32),
    "tensor_f32_4": lambda: torch.tensor(4.0),
    "tensor_0": lambda: torch.tensor(0),
    "tensor_neg": lambda: torch.tensor(-1),
    "tensor_vec": lambda: torch.tensor([2, 3]),
    "np_int64_4": lambda: np.int64(4),
    "np_float32_4": lambda: np.float32(4),
    "True": lambda: True,
}


def global_batch_size(text):
    """``"4"``, ``"2.5"`` and ``"-1"`` are python numbers, the rest has a name."""
    if text in GLOBAL_BATCH_SIZES:
        return GLOBAL_BATCH_SIZES[text]()
    return float(text) if "." in text else int(text)


def tensor(value, dtype=None):
    """A tensor from figures, in which nan and inf are strings."""
    if isinstance(value, list):
        value = [float(v) if isinstance(v, str) else v for v in value]
    if dtype is None and any(isinstance(v, int) and not isinstance(v, bool) for v in np.ravel(value).tolist()):
        dtype = torch.int32
    return torch.tensor(value, dtype=dtype)


def on_replica_0(s, case, fn):
    """Call ``fn`` where the id says: outside any strategy, or in run, of which the figures show replica 0's result."""
    if case.host == "outside":
        return fn()
    return s.experimental_local_results(s.run(fn))[0]


# compute_average_loss


@loss_family("avg\\[(\\w+),gb=(.*)\\]")
def avg(s, case):
    i = case.inputs
    loss = tensor(i["value"], getattr(torch, i["dtype"]))
    if case.groups[0] == "mat02":
        loss = loss.reshape(0, 2)
    size = global_batch_size(i["global_batch_size"])
    return on_replica_0(s, case, lambda: ts.compute_average_loss(loss, global_batch_size=size))


@loss_family("avg_gb\\[vec,gb=(.*)\\]")
def avg_gb(s, case):
    size = global_batch_size(case.groups[0])
    return on_replica_0(s, case, lambda: ts.compute_average_loss(torch.tensor(VEC), global_batch_size=size))


@loss_family("avg_sw\\[(\\w+),sw=(.*),gb=(.*)\\]")
def avg_sw(s, case):
    name, weight_name, size = case.groups
    loss = tensor(case.inputs["value"], DTYPES.get(name, torch.float32))
    weight = case.inputs["sample_weight"]
    if isinstance(weight, list):
        weight = tensor(weight, torch.float64 if weight_name.startswith("f64") else None)
    return on_replica_0(s, case, lambda: ts.compute_average_loss(loss, weight, global_batch_size(size)))


@loss_family("avg_py(list|float|int)|cross_avg_none")
def avg_python(s, case):
    if case.name == "6.cross_avg_none":
        with s.scope():
            return ts.compute_average_loss(torch.tensor(VEC))
    loss = {"list": list(VEC), "float": 3.0, "int": [1, 2]}[case.groups[0]]
    return ts.compute_average_loss(loss, global_batch_size=4)


@loss_family()
def avg_positional_sw(s, case):
    weight = torch.tensor([1.0, 0.0, 2.0])
    return on_replica_0(s, case, lambda: ts.compute_average_loss(torch.tensor(VEC), weight, 4))


@loss_family()
def avg_posn_gb(s, case):
    return on_replica_0(s, case, lambda: ts.compute_average_loss(torch.tensor(VEC), None, 4))


@loss_family()
def cross_avg_gb(s, case):
    with s.scope():
        return ts.compute_average_loss(torch.tensor(VEC), global_batch_size=4)


@loss_family()
def merge_avg(s, case):
    def merge_fn(strategy):
        return ts.compute_average_loss(torch.tensor(VEC), global_batch_size=4)

    return on_replica_0(s, case, lambda: ts.get_replica_context().merge_call(merge_fn))


@loss_family("sum_over_replicas.*")
def sum_over_replicas(s, case):
    lens, size = case.inputs["lens"], case.inputs["global_batch_size"]
    losses = per_replica(s, lambda i: 10.0 * i + torch.arange(float(lens[i])))
    averages = s.run(lambda loss: ts.compute_average_loss(loss, global_batch_size=size), args=(losses,))
    return averages, s.reduce("SUM", averages, axis=None)


# scale_regularization_loss


@loss_family("reg\\[(.*)\\]")
def reg(s, case):
    loss = {
        "2.0": 2.0,
        "int2": 2,
        "tensor2": torch.tensor(2.0),
        "vec[1,2]": torch.tensor([1.0, 2.0]),
        "mat": torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
        "list": [1.0, 2.0],
        "list_of_tensors": [torch.tensor(1.0), torch.tensor(2.0)],
        "int_tensor": torch.tensor(2, dtype=torch.int32),
        "bool": True,
        "None": None,
        "str": "a",
        "empty": torch.tensor([]),
    }[case.groups[0]]
    return on_replica_0(s, case, lambda: ts.scale_regularization_loss(loss))


@loss_family()
def cross_reg(s, case):
    with s.scope():
        return ts.scale_regularization_loss(2.0)


@loss_family()
def default_run_reg(s, case):
    return s.run(lambda: ts.scale_regularization_loss(2.0))


# gradients


def value_and_grad(fn):
    leaf = torch.tensor(VEC, requires_grad=True)
    y = fn(leaf)
    return y, torch.autograd.grad(y, leaf)[0]


@loss_family()
def grad_avg_sw(s, case):
    weight = torch.tensor([1.0, 0.5, 2.0])
    return on_replica_0(s, case, lambda: value_and_grad(lambda x: ts.compute_average_loss(x**2, weight, 6)))


@loss_family()
def grad_reg(s, case):
    return on_replica_0(s, case, lambda: value_and_grad(lambda x: ts.scale_regularization_loss((x**2).sum())))


@loss_family()
def grad_wrt_sw(s, case):
    """The loss is [1, 2, 3] and the global batch 6."""
    return on_replica_0(
        s, case, lambda: value_and_grad(lambda weight: ts.compute_average_loss(torch.tensor(VEC), weight, 6))[1]
    )
