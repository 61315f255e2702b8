"""Ftrl's steps are those that tf.keras' computes, alone, on several replicas and on parameter servers."""

import copy
import math

import pytest
import torch
from torch import nn

import torchstrategy as ts
from tests.fit.measured_ftrl import LOSSES
from torchstrategy.optimizers.by_name import make_optimizer


def losses_of(weight, bias, optimizer, num_steps):
    losses = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = (weight + bias - 1).square()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_steps_are_those_measured():
    weight, bias = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))
    optimizer = ts.optimizers.Ftrl([weight, bias], lr=0.2)
    assert losses_of(weight, bias, optimizer, 10) == pytest.approx(LOSSES, rel=1e-6, abs=1e-7)
    assert weight.item() == bias.item() == pytest.approx(0.48982712626457214, abs=1e-6)
    state = optimizer.state[weight]
    assert state["accumulator"].item() == pytest.approx(6.759093761444092, rel=1e-6)
    assert state["linear"].item() == pytest.approx(-6.367325782775879, rel=1e-6)


def expected(gradients, value, lr, lr_power=-0.5, n=0.1, l1=0.0, l2=0.0, shrinkage=0.0, beta=0.0):
    """One element's value after the gradients, by the formulas of the paper."""
    z = 0.0
    for g in gradients:
        new = n + g * g
        sigma = (new**-lr_power - n**-lr_power) / lr
        z += g + 2 * shrinkage * value - sigma * value
        n = new
        denominator = (beta + n**-lr_power) / lr + 2 * l2
        value = 0.0 if abs(z) <= l1 else (math.copysign(l1, z) - z) / denominator
    return value


OPTIONS = [
    {},
    {"lr_power": -0.8},
    {"lr_power": 0.0},
    {"initial_accumulator_value": 1.0},
    {"l1_regularization_strength": 1.5},
    {"l2_regularization_strength": 0.7},
    {"l2_shrinkage_regularization_strength": 0.3},
    {"beta": 2.0},
    {"l1_regularization_strength": 0.2, "l2_regularization_strength": 0.1, "beta": 0.5},
]
SHORT = {
    "initial_accumulator_value": "n",
    "l1_regularization_strength": "l1",
    "l2_regularization_strength": "l2",
    "l2_shrinkage_regularization_strength": "shrinkage",
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("is_sparse", [False, True])
def test_options(options, is_sparse):
    start, gradients = [1.0, -2.0, 0.5], [[0.5, -1.0, 0.25], [0.25, 1.0, 2.0], [1.0, -3.0, 0.125]]
    parameter = nn.Parameter(torch.tensor(start, dtype=torch.float64))
    optimizer = ts.optimizers.Ftrl([parameter], lr=0.3, **options)
    for gradient in gradients:
        dense = torch.tensor(gradient, dtype=torch.float64)
        parameter.grad = dense.to_sparse() if is_sparse else dense
        optimizer.step()
    short = {SHORT.get(name, name): value for name, value in options.items()}
    wanted = [
        expected(column, value, 0.3, **short) for value, column in zip(start, zip(*gradients, strict=True), strict=True)
    ]
    assert parameter.tolist() == pytest.approx(wanted, rel=1e-12)


def test_sparse_gradients_leave_other_rows():
    parameter = nn.Parameter(torch.ones(3, 2))
    optimizer = ts.optimizers.Ftrl([parameter], lr=0.5)
    parameter.grad = torch.sparse_coo_tensor([[2, 2]], torch.ones(2, 2), (3, 2), check_invariants=True)
    optimizer.step()
    assert parameter[:2].tolist() == [[1, 1], [1, 1]]
    assert parameter[2].tolist() == pytest.approx([expected([2.0], 1.0, 0.5)] * 2, rel=1e-6)
    assert optimizer.state[parameter]["accumulator"][:, 0].tolist() == pytest.approx([0.1, 0.1, 4.1])


def test_closure_and_missing_gradients():
    used, unused = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.ones(1))
    optimizer = ts.optimizers.Ftrl([used, unused], lr=1.0)

    def closure():
        optimizer.zero_grad()
        loss = (used - 1).square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 1
    assert used.item() > 0
    assert unused.item() == 1
    assert unused not in optimizer.state


def test_state_dict_goes_on():
    def trained(num_steps, optimizer, parameter):
        for step in range(num_steps):
            parameter.grad = torch.tensor([1.0 + step])
            optimizer.step()

    whole = nn.Parameter(torch.zeros(1))
    first = ts.optimizers.Ftrl([whole], lr=0.1)
    trained(1, first, whole)
    resumed = nn.Parameter(whole.detach().clone())
    second = ts.optimizers.Ftrl([resumed], lr=0.9)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    trained(2, first, whole)
    trained(2, second, resumed)
    assert resumed.item() == whole.item()


def test_by_name():
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = make_optimizer("Ftrl", [parameter])
    assert type(optimizer) is ts.optimizers.Ftrl
    assert optimizer.defaults["lr"] == 0.001
    assert optimizer.defaults["initial_accumulator_value"] == 0.1
    assert ts.optimizers.get("ftrl", lr=0.2, beta=1.0)([parameter]).defaults["beta"] == 1.0


def test_replicas_sum_their_gradients():
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        layer = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(layer.weight)
        optimizer = ts.optimizers.Ftrl(layer.parameters(), lr=0.2)

    def step():
        optimizer.zero_grad()
        replica = ts.get_replica_context().replica_id_in_sync_group
        (layer(torch.ones(1)) * (1.0 + 2.0 * replica)).sum().backward()
        optimizer.step()

    for _ in range(2):
        strategy.run(step)
    assert layer.weight.item() == pytest.approx(expected([4.0, 4.0], 0.0, 0.2), rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": 0.0}, "divides by the learning rate.*Received: lr=0.0"),
        ({"lr": -1.0}, "more than 0"),
        ({"lr_power": 0.5}, "lr_power must be at most 0"),
        ({"initial_accumulator_value": -0.1}, "initial_accumulator_value must be at least 0"),
        ({"l1_regularization_strength": -1.0}, "l1_regularization_strength must be"),
        ({"l2_regularization_strength": math.nan}, "l2_regularization_strength must be"),
        ({"l2_shrinkage_regularization_strength": -1.0}, "l2_shrinkage"),
        ({"beta": -1.0}, "beta must be"),
    ],
)
def test_what_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        ts.optimizers.Ftrl([nn.Parameter(torch.zeros(1))], **arguments)


def test_a_schedule_that_reaches_zero():
    parameter = nn.Parameter(torch.ones(1))
    optimizer = ts.optimizers.Ftrl([parameter], lr=0.1)
    optimizer.param_groups[0]["lr"] = 0.0
    parameter.grad = torch.ones(1)
    with pytest.raises(ValueError, match="divides by the learning rate"):
        optimizer.step()
    assert parameter.item() == 1
    assert not optimizer.state


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_no_number_stays_to_be_seen(options, bad):
    weight = nn.Parameter(torch.zeros(2))
    optimizer = ts.optimizers.Ftrl([weight], **{"lr": 0.1, **options})
    for gradient in (torch.tensor([bad, 1.0]), torch.ones(2)):
        weight.grad = gradient
        optimizer.step()
        assert weight.isfinite().tolist() == [False, True]


def test_a_sparse_gradient_that_is_no_number_stays_to_be_seen():
    weight = nn.Parameter(torch.zeros(3, 1))
    weight.grad = torch.sparse_coo_tensor([[0, 2]], [[math.nan], [1.0]], (3, 1), check_invariants=True)
    ts.optimizers.Ftrl([weight], lr=0.1, l1_regularization_strength=0.1).step()
    assert weight.isnan().flatten().tolist() == [True, False, False]
