"""A worker's parameters after a step: whoever uses one has its new value."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.ps.test_workshop import Cluster
from torchstrategy.ps.behind import ParameterBehind


@pytest.fixture
def cluster():
    return Cluster()


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def make(cluster, make_optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9)):
    plain = make_net()
    with cluster.strategy.scope():
        net = make_net()
        optimizer = make_optimizer(net.parameters())
    return (net, optimizer), (plain, make_optimizer(plain.parameters()))


def assert_same_on_a_worker(cluster, fn):
    ours, plain = make(cluster)
    for k in range(3):
        x = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(k))
        torch.testing.assert_close(cluster.call(fn, *ours, x), fn(*plain, x), rtol=0, atol=1e-12)
    for own, expected in zip(ours[0].parameters(), plain[0].parameters(), strict=True):
        torch.testing.assert_close(own.detach(), expected.detach(), rtol=0, atol=1e-12)


def step(net, optimizer, x):
    optimizer.zero_grad()
    net(x).square().mean().backward()
    optimizer.step()


def test_a_value_that_is_read_after_a_step(cluster):
    def fn(net, optimizer, x):
        step(net, optimizer, x)
        return net[0].weight.detach().clone(), net[2].bias.norm().detach(), net[2].weight.data.clone()

    assert_same_on_a_worker(cluster, fn)


def test_steps_with_submodules_only(cluster):
    def fn(net, optimizer, x):
        for _ in range(2):
            net.zero_grad()
            loss = net[2](torch.tanh(net[0](x))).square().mean()
            loss.backward()
            optimizer.step()
        return loss.detach()

    assert_same_on_a_worker(cluster, fn)


def test_steps_with_functions_only(cluster):
    def fn(net, optimizer, x):
        for _ in range(2):
            for parameter in net.parameters():
                parameter.grad = None
            loss = F.linear(torch.tanh(F.linear(x, net[0].weight, net[0].bias)), net[2].weight).square().mean()
            loss.backward()
            optimizer.step()
        return loss.detach()

    assert_same_on_a_worker(cluster, fn)


def test_a_copy_made_after_a_step(cluster):
    def fn(net, optimizer, x):
        step(net, optimizer, x)
        copied = copy.deepcopy(net)
        assert all(type(parameter) is nn.Parameter for parameter in copied.parameters())
        return copied(x).detach()

    assert_same_on_a_worker(cluster, fn)


def test_a_value_that_is_pulled_in_inference_mode_trains_later(cluster):
    def fn(net, optimizer, x):
        step(net, optimizer, x)
        with torch.inference_mode():
            first = net(x).mean().item()
        step(net, optimizer, x)
        with torch.inference_mode():
            second = net[0].weight.sum().item()
        step(net, optimizer, x)
        return first, second

    assert_same_on_a_worker(cluster, fn)


def test_nothing_is_pulled_where_no_value_is_used(cluster):
    ours, _ = make(cluster)

    def fn(net, optimizer, x):
        step(net, optimizer, x)
        parameters = list(net.parameters())
        assert len({p.shape for p in set(parameters) if p.grad is not None}) == 4
        before = [isinstance(p, ParameterBehind) for p in parameters]
        parameters[0].sum()
        return before, [isinstance(p, ParameterBehind) for p in parameters]

    before, after = cluster.call(fn, *ours, torch.ones(2, 3, dtype=torch.float64))
    assert before == [True] * 4
    assert after == [False] * 4


def test_another_workers_update_does_not_break_a_graph(cluster, monkeypatch):
    """As where a generator's output is used for two losses."""
    (net, optimizer), _ = make(cluster)
    with cluster.strategy.scope():
        critic = nn.Linear(1, 1, dtype=torch.float64)
        critic_optimizer = torch.optim.SGD(critic.parameters(), 0.1)

    def fn(x):
        made = net(x)
        critic_optimizer.zero_grad()
        critic(made.detach()).mean().backward()
        critic_optimizer.step()
        optimizer.zero_grad()
        critic(made).mean().backward()
        optimizer.step()

    push, weight = cluster.client.push, net[0].weight.binding.spec

    def push_of_two_workers(*args):
        cluster.client.update(weight, "assign_add", torch.ones(4, 3, dtype=torch.float64))
        return push(*args)

    before = net[0].weight.detach().clone()
    monkeypatch.setattr(cluster.client, "push", push_of_two_workers)
    cluster.call(fn, torch.ones(2, 3, dtype=torch.float64))
    assert float((net[0].weight.detach() - before).mean()) > 1.5


@pytest.mark.parametrize("change", [lambda p: p.data.clamp_(-1e-3, 1e-3), lambda p: setattr(p, "data", p.data * 0)])
def test_a_change_through_data_is_an_error(cluster, change):
    (net, optimizer), _ = make(cluster)

    def fn(x):
        step(net, optimizer, x)
        for parameter in net.parameters():
            change(parameter)

    with pytest.raises(RuntimeError, match=r"changed the parameter '0\.weight' in place"):
        cluster.call(fn, torch.ones(2, 3, dtype=torch.float64))


def test_a_gradient_of_rows_and_of_all_is_one_tensor(cluster):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(5, 3, sparse=True, dtype=torch.float64)

        def forward(self, indices):
            return F.linear(self.table(indices), self.table.weight)

    def fn(net, optimizer, indices):
        optimizer.zero_grad()
        net(indices).square().mean().backward()
        net.table.weight.grad.mul_(0.5)
        optimizer.step()

    torch.manual_seed(0)
    plain = Tied()
    with cluster.strategy.scope():
        torch.manual_seed(0)
        net = Tied()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
    plain_optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    for _ in range(2):
        cluster.call(fn, net, optimizer, torch.tensor([1, 2, 2]))
        fn(plain, plain_optimizer, torch.tensor([1, 2, 2]))
    torch.testing.assert_close(net.table.weight.detach(), plain.table.weight.detach(), rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch's compiler, which looks into the pull
def test_a_compiled_module_after_a_step(cluster):
    def fn(net, optimizer, x):
        compiled = torch.compile(net, backend="eager")
        for _ in range(2):
            net.zero_grad()
            loss = compiled(x).square().mean()
            loss.backward()
            optimizer.step()
        return loss.detach()

    assert_same_on_a_worker(cluster, fn)
