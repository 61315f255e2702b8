"""Area 7: optimizers, whose formulas are Keras', and metrics in every place."""

from __future__ import annotations

import functools

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import torchstrategy as ts
from tests.parity.driver import family, mirrored, per_replica, replica_id

optimizer_family = functools.partial(family, 7)

RATE = 0.1
STEPS = 5


class Model(torch.nn.Module):
    """One weight of three elements."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))


class KerasRMSprop(torch.optim.Optimizer):
    """Keras adds epsilon to the mean square; torch's class adds it to the root."""

    def __init__(self, params, lr, rho=0.9, eps=1e-7):
        super().__init__(params, {"lr": lr, "rho": rho, "eps": eps})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                square = self.state[p].setdefault("square", torch.zeros_like(p))
                square.mul_(group["rho"]).addcmul_(p.grad, p.grad, value=1 - group["rho"])
                p.sub_(group["lr"] * p.grad * (square + group["eps"]).rsqrt())


class KerasAdam(torch.optim.Optimizer):
    """Keras computes the correction of the bias in float32 and adds epsilon before it; torch does neither."""

    def __init__(self, params, lr, betas=(0.9, 0.999), eps=1e-7):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("step", torch.zeros(()))
                mean, square = (state.setdefault(name, torch.zeros_like(p)) for name in ("mean", "square"))
                state["step"] += 1
                first, second = torch.tensor(group["betas"])
                rate = group["lr"] * (1 - second ** state["step"]).sqrt() / (1 - first ** state["step"])
                mean.lerp_(p.grad, 1 - group["betas"][0])
                square.lerp_(p.grad.square(), 1 - group["betas"][1])
                p.sub_(rate * mean / (square.sqrt() + group["eps"]))


MAKE = {
    "sgd": lambda p: torch.optim.SGD(p, lr=RATE),
    "sgd_mom": lambda p: torch.optim.SGD(p, lr=RATE, momentum=0.9),
    "sgd_nesterov": lambda p: torch.optim.SGD(p, lr=RATE, momentum=0.9, nesterov=True),
    "adam": lambda p: KerasAdam(p, lr=RATE),
    "rmsprop": lambda p: KerasRMSprop(p, lr=RATE),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=RATE, initial_accumulator_value=0.1, eps=1e-7),
}


def own_gradient(i, step):
    return torch.tensor([0.1 * (i + 1) * (step + 1), -0.2 * (i + 1), 0.05 * (step - i)])


@optimizer_family("(sgd|adam|rmsprop|adagrad)(_mom|_nesterov)?(?:_(global_clipnorm|grad_accum2|ema))?")
def optimizer(s, case):
    """Each replica's gradient is computed by ``backward`` from a loss that has it."""
    name, kind, option = case.groups
    clip, accumulation = (case.inputs.get(key) for key in ("global_clipnorm", "gradient_accumulation_steps"))

    def count(stepped, args, kwargs):
        stepped.iterations += 1

    with s.scope():
        model = Model()
        optimizer = MAKE[name + (kind or "")](model.parameters())
        optimizer.iterations = 0
        optimizer.register_step_post_hook(count)
        momentum = case.inputs.get("ema_momentum", 0.0)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(momentum))

    def fn(step):
        loss = (model.w * own_gradient(replica_id(), step)).sum()
        (loss / (accumulation or 1)).backward()
        if clip:
            norm = model.w.grad.norm()
            model.w.grad = model.w.grad * (clip / norm.clamp(min=clip))
        if accumulation and (step + 1) % accumulation:
            return
        optimizer.step()
        optimizer.zero_grad()
        if option == "ema":
            average.update_parameters(model)

    rows = []
    for step in range(STEPS):
        s.run(fn, args=(step,))
        rows.append(model.w.tolist())
    local = s.experimental_local_results(model.w)
    return {
        "w_by_step": rows,
        "local_equal": all(torch.equal(value, local[0]) for value in local),
        "iterations": int(optimizer.iterations),
    }


def step_on(variable, optimizer):
    optimizer.zero_grad()
    (variable * 1.0).sum().backward()
    optimizer.step()


def local_values(s, variable):
    return [value.tolist() for value in s.experimental_local_results(variable)]


@optimizer_family()
def apply_outside(s, case):
    with s.scope():
        variable = ts.Variable([1.0])
        optimizer = torch.optim.SGD([variable], lr=1.0)
    variable.grad = torch.ones(1)
    try:
        optimizer.step()
    finally:
        variable.grad = None  # else the next case's run refuses a gradient from outside
    return local_values(s, variable)


@optimizer_family()
def var_outside_scope(s, case):
    variable = ts.Variable([1.0])
    with s.scope():
        optimizer = torch.optim.SGD([variable], lr=1.0)
    s.run(step_on, args=(variable, optimizer))


@optimizer_family()
def opt_outside_scope(s, case):
    with s.scope():
        variable = ts.Variable([1.0])
    optimizer = torch.optim.SGD([variable], lr=1.0)
    s.run(lambda: step_on(variable, optimizer))
    return local_values(s, variable)


# metrics


def uneven_batch(lens):
    """Replica i's part: 10i, 10i + 1, ..."""
    i = replica_id()
    return torch.arange(10.0 * i, 10.0 * i + lens[i])


@optimizer_family(r"metric\.mean")
def mean(s, case):
    with s.scope():
        metric = ts.metrics.Mean()
    s.run(lambda: metric.update_state(uneven_batch(case.inputs["lens"])))
    result = metric.result()
    own = s.experimental_local_results(metric)
    found = {
        "result": float(result),
        "vars_local": [[float(m.total) for m in own], [float(m.count) for m in own]],
        "twice": float(metric.result()),
    }
    metric.reset_state()
    return {**found, "after_reset": float(metric.result()), "type": type(result).__name__}


@optimizer_family(r"metric\.sum")
def sum_metric(s, case):
    with s.scope():
        metric = ts.metrics.Sum()
    s.run(lambda: metric.update_state(uneven_batch(case.inputs["lens"])))
    return float(metric.result())


def mean_of_scaled_losses(s, losses_of, global_batch_size):
    """The pitfall: a metric's mean over losses that are divided by the global batch size already."""
    with s.scope():
        metric = ts.metrics.Mean()

    def fn():
        loss = ts.nn.compute_average_loss(losses_of(replica_id()), global_batch_size=global_batch_size)
        metric.update_state(loss)
        return loss

    scaled = s.run(fn)
    total = float(s.reduce("SUM", scaled, axis=None))
    return float(metric.result()), total, [float(loss) for loss in s.experimental_local_results(scaled)]


@optimizer_family(r"metric\.mean_over_scaled_losses")
def mean_over_scaled_losses(s, case):
    metric, total, local = mean_of_scaled_losses(
        s, lambda i: torch.tensor([2.0 + i, 5.0 - i]), 2 * s.num_replicas_in_sync
    )
    return {"mean_metric_of_scaled": metric, "reduce_sum": total, "per_replica": local}


@optimizer_family()
def doc_pitfall(s, case):
    metric, total, local = mean_of_scaled_losses(mirrored(2), lambda i: torch.tensor([2.0, 3.0]) + 2 * i, 4)
    return {"scaled": local, "reduce_sum": total, "mean_metric": metric}


@optimizer_family(r"metric\.result_in_run")
def result_in_run(s, case):
    def own_result(i):
        metric.update_state(i + 1.0)
        return metric.result()

    with s.scope():
        metric = ts.metrics.Mean()
    return per_replica(s, own_result)


@optimizer_family(r"metric\.metric_outside_scope")
def metric_outside_scope(s, case):
    metric = ts.metrics.Mean()
    per_replica(s, lambda i: metric.update_state(i + 1.0))
    return float(metric.result())
