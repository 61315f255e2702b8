"""What is noted of gradients: edits between the backward pass and the sum, and layers that were frozen at first."""

import warnings

import pytest
import torch
from torch import nn

import torchstrategy as ts
from tests.programs import cpu_devices, strategy_for
from torchstrategy.base import log


@pytest.fixture(autouse=True)
def _said(monkeypatch):
    monkeypatch.setattr(log, "_said", set())


def warnings_of(devices, edit, clear="drop", twice=False, sparse=False, first_sum=False):
    """Return the warnings of some steps in which ``edit(model, optimizer)`` comes before the step."""
    log._said.clear()
    strategy = strategy_for(devices)
    with strategy.scope():
        model = nn.Embedding(4, 2, sparse=True) if sparse else nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.tensor([0, 1, 1, 3]) if sparse else torch.ones(3, 2)

    def step():
        if clear == "zero":
            model.zero_grad(set_to_none=False)
        elif clear == "optimizer":
            optimizer.zero_grad(set_to_none=False)
        else:
            model.zero_grad()
        model(x).sum().backward()
        if twice:
            model(x).square().sum().backward()
        if first_sum:
            ts.get_replica_context().sum_gradients(optimizer)
        EDITS[edit](model, optimizer)
        optimizer.step()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            strategy.run(step)
    return [str(warning.message) for warning in caught]


def scale_all(model, optimizer):
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)


EDITS = {
    "none": lambda model, optimizer: None,
    "norm": lambda model, optimizer: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
    "high norm": lambda model, optimizer: nn.utils.clip_grad_norm_(model.parameters(), 1e6),
    "norm one by one": lambda model, optimizer: nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False),
    "value": lambda model, optimizer: nn.utils.clip_grad_value_(model.parameters(), 1e-3),
    "by hand": scale_all,
    "to zeros": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "replaced": lambda model, optimizer: [setattr(p, "grad", p.grad * 0.5) for p in model.parameters()],
}


@pytest.mark.parametrize("edit", ["norm", "high norm", "norm one by one", "value", "by hand"])
@pytest.mark.parametrize("clear", ["drop", "zero", "optimizer"])
def test_clipping_before_the_sum_warns_once(edit, clear, process_pool):
    (text,) = warnings_of(cpu_devices(2), edit, clear)
    assert "sum_gradients(optimizer)` before `clip_grad_norm_`" in text
    assert process_pool(2).run(warnings_of, None, edit, clear) == [[text], [text]]
    assert warnings_of([], edit, clear) == warnings_of(cpu_devices(1), edit, clear) == []


@pytest.mark.parametrize("options", [{}, {"twice": True}, {"sparse": True}], ids=str)
@pytest.mark.parametrize("clear", ["drop", "zero", "optimizer"])
@pytest.mark.parametrize("edit", ["none", "to zeros", "replaced"])
def test_what_is_no_clipping_does_not_warn(edit, clear, options, process_pool):
    assert warnings_of(cpu_devices(3), edit, clear, **options) == []
    assert process_pool(2).run(warnings_of, None, edit, clear, **options) == [[], []]


@pytest.mark.parametrize("edit", ["norm", "value", "by hand"])
def test_clipping_after_the_sum_does_not_warn(edit, process_pool):
    assert warnings_of(cpu_devices(2), edit, first_sum=True) == []
    assert process_pool(2).run(warnings_of, None, edit, first_sum=True) == [[], []]


def test_sparse_gradients_are_looked_at_too():
    assert len(warnings_of(cpu_devices(2), "by hand", sparse=True)) == 1


def test_gradient_scaler_does_not_warn():
    strategy = ts.MirroredStrategy(cpu_devices(2))
    with strategy.scope():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def step(x):
        optimizer.zero_grad()
        scaler.scale(model(x).sum()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    for x in (torch.ones(1, 2), torch.full((1, 2), float("inf")), torch.ones(1, 2)):
        strategy.run(step, args=(x,))


@pytest.mark.parametrize("count", [2, 3])
def test_layer_that_was_frozen_at_first_is_guarded(count):
    """A forgotten ``zero_grad`` is found there as elsewhere."""
    strategy = ts.MirroredStrategy(cpu_devices(count))
    with strategy.scope():
        model = nn.Linear(2, 1)
        model.requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    strategy.run(lambda: None)
    assert not model.weight.requires_grad
    model.requires_grad_()
    strategy.run(step)
    with pytest.raises(RuntimeError, match="zero_grad"):
        strategy.run(step)


def outside_message(devices, clear):
    """Return what a step says to gradients from outside ``run``."""
    strategy = strategy_for(devices)
    with strategy.scope():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    strategy.run(step)
    model(torch.ones(1, 2)).sum().backward()
    if clear == "drop":
        model.zero_grad()
    elif clear == "zero":
        model.zero_grad(set_to_none=False)
    try:
        strategy.run(step)
    except RuntimeError as error:
        return str(error)
    return None


@pytest.mark.parametrize("clear", ["no", "drop", "zero"])
def test_gradients_from_outside_run_are_refused_unless_cleared(clear, process_pool):
    found = [outside_message(cpu_devices(2), clear), *process_pool(2).run(outside_message, None, clear)]
    if clear == "no":
        assert all("outside `run`" in text for text in found)
    else:
        assert found == [None] * 3
    assert outside_message([], clear) is None
