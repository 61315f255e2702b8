"""What is done to torch's functions to see backward passes and cleared gradients is undone."""

import gc

import pytest
import torch

import torchstrategy as ts
from torchstrategy.gradients import hooks

CLASSES = (torch.nn.Module, torch.optim.Optimizer)


def functions():
    return [torch.autograd._engine_run_backward, *(cls.zero_grad for cls in CLASSES)]


@pytest.fixture
def plain():
    """Torch's functions, where no strategy of another test is alive."""
    gc.collect()
    if hooks._watching.has_users:
        pytest.skip("another test's strategy is still in use")
    return functions()


def test_a_strategy_leaves_nothing_behind(plain):
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    with pytest.raises(ZeroDivisionError):
        strategy.run(lambda: 1 / 0)
    during = strategy.run(functions)
    assert all(
        now is not before for now, before in zip(strategy.experimental_local_results(during)[0], plain, strict=True)
    )
    del strategy, during
    gc.collect()
    assert functions() == plain


def test_the_last_of_several_strategies(plain):
    first, second = (ts.MirroredStrategy(["cpu:0", "cpu:1"]) for _ in range(2))
    first.run(lambda: None)
    second.run(lambda: None)
    del first
    gc.collect()
    assert all(now is not before for now, before in zip(functions(), plain, strict=True))
    del second
    gc.collect()
    assert functions() == plain


def test_what_backward_and_grad_return_is_torchs():
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])

    def compute():
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        unused = torch.ones(2, requires_grad=True)
        first, second = torch.autograd.grad((x**3).sum(), [x, unused], create_graph=True, allow_unused=True)
        (batched,) = torch.autograd.grad(x**2, x, torch.eye(2), is_grads_batched=True)
        (mean,) = torch.autograd.grad(x.mean(), x)
        first.sum().backward(inputs=[x])
        jacobian = torch.func.vmap(torch.func.grad(lambda value: (value**2).mean()))(x.detach()[:, None])
        return first.tolist(), second, batched.tolist(), mean.tolist(), x.grad.tolist(), jacobian.tolist()

    for found in strategy.experimental_local_results(strategy.run(compute)):
        assert found == compute()


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
    torch.nn.Module.zero_grad = plain[1]


def climbs(*, sums, sets_to_none=True):
    """The gradient at a point that the gradient leads to, as ``first_step`` of SAM makes it."""
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        ts.nn.compute_average_loss(model(x).square().sum(1), global_batch_size="actual").backward()
        if sums:
            ts.get_replica_context().sum_gradients(optimizer)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += parameter.grad
        optimizer.zero_grad(set_to_none=sets_to_none)
        ts.nn.compute_average_loss(model(x).square().sum(1), global_batch_size="actual").backward()
        with torch.no_grad():
            for parameter, own in zip(model.parameters(), before, strict=True):
                parameter.copy_(own)
        optimizer.step()
        optimizer.zero_grad()

    for batch in strategy.experimental_distribute_dataset(torch.eye(4)[:, :2], batch_size=2):
        strategy.run(step, args=(batch,))


@pytest.mark.parametrize("sets_to_none", [True, False])
def test_a_change_by_gradients_that_were_not_summed_is_warned_of(sets_to_none):
    climbs(sums=True, sets_to_none=sets_to_none)
    with pytest.warns(UserWarning, match=r"Parameters were changed between `backward` and `zero_grad`.*test_hooks.py"):
        climbs(sums=False, sets_to_none=sets_to_none)


def test_weights_that_are_loaded_between_two_runs_are_no_change_by_gradients():
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD([model.bias], lr=0.1)  # nothing trains the weight, whose gradients are cleared
    first = {name: value.clone() for name, value in model.state_dict().items()}

    def step(x):
        model.zero_grad()
        ts.nn.compute_average_loss(model(x).square().sum(1), global_batch_size="actual").backward()
        optimizer.step()

    for batch in strategy.experimental_distribute_dataset(torch.eye(4)[:, :2], batch_size=2):
        strategy.run(step, args=(batch,))
        model.load_state_dict(first)
