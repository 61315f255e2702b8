"""Models and optimizers that were made before there was a strategy, and without a scope."""

import pytest
import torch
from torch import nn

import torchstrategy as ts
from tests.programs import cpu_devices
from torchstrategy import errors

DATA = torch.randn(12, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def train(devices, way):
    """Return the parameters of all local replicas after some steps."""
    constructor = nn.Module.__init__

    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    if way == "scope":
        strategy = ts.MirroredStrategy(devices)
        with strategy.scope():
            model, optimizer, scheduler = make()
    elif way == "before":
        model, optimizer, scheduler = make()
        strategy = ts.MirroredStrategy(devices)
        assert nn.Module.__init__ is constructor
        model, optimizer, scheduler = strategy.replicate(model, optimizer, scheduler)
    else:
        strategy = ts.MirroredStrategy(devices)
        model, optimizer, scheduler = strategy.replicate(*make())
        assert nn.Module.__init__ is constructor

    def step(x):
        optimizer.zero_grad()
        ts.nn.compute_average_loss(model(x).square().sum(1), global_batch_size="actual").backward()
        optimizer.step()
        scheduler.step()

    for batch in strategy.experimental_distribute_dataset(DATA, batch_size=3):
        strategy.run(step, args=(batch,))
    values = strategy.run(lambda: [parameter.detach().clone() for parameter in model.parameters()])
    return [strategy.experimental_local_results(value) for value in values]


@pytest.fixture(scope="module")
def expected():
    return [value for (value,) in train(cpu_devices(1), "scope")]


@pytest.mark.parametrize("way", ["scope", "before", "after"])
def test_replicas_equal_one(way, expected, process_pool):
    for found in (train(cpu_devices(2), way), *process_pool(2).run(train, None, way)):
        for row, value in zip(found, expected, strict=True):
            for own in row:
                torch.testing.assert_close(own, value, rtol=1e-10, atol=1e-10)


def test_a_scheduler_goes_with_its_optimizer():
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    strategy = ts.MirroredStrategy(cpu_devices(2))
    strategy.replicate(model, optimizer)

    def step():
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        scheduler.step()

    for _ in range(3):
        strategy.run(step)
    assert scheduler.last_epoch == 3
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**3


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_what_is_made_later_and_left_out_is_noticed():
    strategy = ts.MirroredStrategy(cpu_devices(2))
    model = strategy.replicate(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()

    with pytest.raises(RuntimeError, match=r"give both to `strategy\.replicate`"):
        strategy.run(step)
    strategy.replicate(optimizer)
    strategy.run(step)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    with pytest.raises(errors.DivergenceError, match="lr"):
        strategy.run(scheduler.step)


def step_outside(devices, is_first):
    """Step an optimizer that was left out, outside ``run``; return what it raises, and the weight before and after."""
    net = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1) if is_first else None
    strategy = ts.MirroredStrategy(devices)
    model = strategy.replicate(net)
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    weight = model.weight.item()
    strategy.run(lambda: model(torch.ones(1, 1)).sum().backward())
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error), weight, model.weight.item()
    return "", weight, model.weight.item()


@pytest.mark.parametrize("is_first", [True, False])
def test_a_forgotten_run_is_noticed_also_of_an_optimizer_that_was_left_out(is_first, process_pool):
    for message, before, after in (
        step_outside(cpu_devices(2), is_first),
        *process_pool(2).run(step_outside, None, is_first),
    ):
        assert "SGD.step() was called outside `run` of the MirroredStrategy" in message
        assert before == after


def test_an_optimizer_of_other_parameters_is_none_of_its_business():
    strategy = ts.MirroredStrategy(cpu_devices(2))
    strategy.replicate(nn.Linear(1, 1))
    other = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in range(2):
        other(torch.ones(1, 1)).sum().backward()
        optimizer.step()
    strategy.replicate(other)
    with pytest.raises(RuntimeError, match="outside `run`"):
        optimizer.step()


def test_one_or_several():
    strategy = ts.MirroredStrategy(cpu_devices(2))
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    assert strategy.replicate(first) is first
    assert strategy.replicate(first, second) == (first, second)


def test_mistakes():
    strategy, other = ts.MirroredStrategy(cpu_devices(2)), ts.MirroredStrategy(cpu_devices(2))
    model = other.replicate(nn.Linear(1, 1))
    new = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="belongs to a MirroredStrategy already"):
        strategy.replicate(new, model)
    assert not strategy.record.has_new  # nothing was taken in
    with pytest.raises(TypeError, match="A tensor can't be replicated"):
        strategy.replicate(new, torch.ones(1))
    with pytest.raises(ValueError, match="takes the objects"):
        strategy.replicate()
