"""What is done to torch's functions to see backward passes and cleared gradients is undone."""

import gc

import pytest
import torch

import torchstrategy as ts
from torchstrategy.gradients import watching

CLASSES = (torch.nn.Module, torch.optim.Optimizer)


def functions():
    return [torch.autograd.backward, torch.autograd.grad, *(cls.zero_grad for cls in CLASSES)]


@pytest.fixture
def plain():
    """Torch's functions, where no strategy of another test is alive."""
    gc.collect()
    if any(True for _ in watching._strategies):
        pytest.skip("another test's strategy is still in use")
    return functions()


def test_a_strategy_leaves_nothing_behind(plain):
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    during = strategy.run(functions)
    assert all(
        now is not before for now, before in zip(strategy.experimental_local_results(during)[0], plain, strict=True)
    )
    assert functions()[:2] == plain[:2]
    del strategy, during
    gc.collect()
    assert functions() == plain


def test_the_last_of_several_strategies(plain):
    first, second = (ts.MirroredStrategy(["cpu:0", "cpu:1"]) for _ in range(2))
    first.run(lambda: None)
    second.run(lambda: None)
    del first
    gc.collect()
    assert functions()[2:] != plain[2:]
    del second
    gc.collect()
    assert functions() == plain


def test_one_replica_changes_nothing(plain):
    strategy = ts.OneDeviceStrategy("cpu:0")
    assert strategy.run(functions) == plain


def test_another_program_that_replaced_it_too_keeps_its_own(plain, monkeypatch):
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    strategy.run(lambda: None)
    ours = torch.nn.Module.zero_grad

    def theirs(self, set_to_none=True):
        return ours(self, set_to_none)

    monkeypatch.setattr(torch.nn.Module, "zero_grad", theirs)
    del strategy
    gc.collect()
    assert torch.nn.Module.zero_grad is theirs
    module = torch.nn.Linear(1, 1)
    module(torch.ones(1)).backward()
    module.zero_grad()
    assert module.weight.grad is None
    monkeypatch.undo()
    torch.nn.Module.zero_grad = plain[2]
