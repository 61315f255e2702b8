"""What a function, an object or an optimizer on a worker knows of changes in the coordinator's program."""

import gc

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from tests.ps.test_workshop import Cluster

factor = 1.0
thing = None


@pytest.fixture
def cluster():
    return Cluster()


class Thing:
    """Can be referred to weakly."""


def make_pair(cluster, make_net, make_optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9)):
    torch.manual_seed(0)
    plain = make_net()
    with cluster.strategy.scope():
        torch.manual_seed(0)
        net = make_net()
        optimizer = make_optimizer(net.parameters())
    return (net, optimizer), (plain, make_optimizer(plain.parameters()))


def make_net():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def step(net, optimizer, x):
    optimizer.zero_grad()
    loss = net(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def inputs():
    return torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def assert_equal(net, plain):
    for (name, value), expected in zip(net.state_dict().items(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(value.detach(), expected.detach(), rtol=0, atol=1e-12, msg=name)


def test_parameters_that_are_frozen_and_trained_in_turn(cluster):
    ours, plain = make_pair(cluster, make_net)
    for k in range(8):
        for net in (ours[0], plain[0]):
            net[0].requires_grad_(k % 2 == 0)
        torch.testing.assert_close(cluster.call(step, *ours, inputs()), step(*plain, inputs()), rtol=0, atol=1e-12)
    assert_equal(ours[0], plain[0])


def test_a_new_worker_knows_what_is_frozen(cluster):
    ours, plain = make_pair(cluster, make_net)
    cluster.call(step, *ours, inputs())
    step(*plain, inputs())
    for net in (ours[0], plain[0]):
        net[0].requires_grad_(False)
    cluster.known.clear()  # as a worker that came back
    for _ in range(2):
        cluster.call(step, *ours, inputs())
        step(*plain, inputs())
    assert_equal(ours[0], plain[0])


def test_a_module_that_is_called_itself_follows_its_mode(cluster):
    with cluster.strategy.scope():
        net = nn.Sequential(nn.Dropout(0.5))
    assert (cluster.call(net, torch.ones(100)) == 0).any()
    net.eval()
    assert not (cluster.call(net, torch.ones(100)) == 0).any()


def test_plain_attributes_of_modules_are_followed(cluster):
    with cluster.strategy.scope():
        net = nn.Sequential(nn.Dropout(0.5))
    assert (cluster.call(lambda: net(torch.ones(100))) == 0).any()
    net[0].p = 0.0
    assert not (cluster.call(lambda: net(torch.ones(100))) == 0).any()


def _in_comprehension():
    return [factor * k for k in range(3)]


def _in_helper():
    return sum(_in_comprehension())


def test_names_in_nested_code_and_in_called_functions(cluster, monkeypatch):
    assert cluster.call(_in_comprehension) == [0, 1, 2]
    assert cluster.call(_in_helper) == 3
    monkeypatch.setitem(globals(), "factor", 2.0)
    assert cluster.call(_in_comprehension) == [0, 2, 4]
    assert cluster.call(_in_helper) == 6


def test_a_name_that_stands_for_none_after_an_object_that_is_gone(cluster, monkeypatch):
    def is_none():
        return thing is None

    monkeypatch.setitem(globals(), "thing", Thing())
    assert cluster.call(is_none) is False
    monkeypatch.setitem(globals(), "thing", None)
    gc.collect()
    assert cluster.call(is_none) is True


def test_a_tensor_that_is_changed_in_place(cluster):
    scale = torch.ones(2)

    def scaled():
        return scale * 3

    assert cluster.call(scaled).tolist() == [3, 3]
    scale.add_(1)
    assert cluster.call(scaled).tolist() == [6, 6]


def test_hyper_parameters_change_in_the_coordinators_program_only(cluster):
    (net, optimizer), _ = make_pair(cluster, make_net)
    before = [parameter.detach().clone() for parameter in net.parameters()]

    def wrong():
        optimizer.param_groups[0]["lr"] = 0.5
        return step(net, optimizer, inputs())

    for _ in range(2):
        with pytest.raises(RuntimeError, match="changed hyper-parameters of the SGD"):
            cluster.call(wrong)
    for parameter, old in zip(net.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.detach(), old, rtol=0, atol=0)
    cluster.call(step, net, optimizer, inputs())


def test_hyper_parameters_count_for_steps_of_the_coordinator(cluster):
    ours, plain = make_pair(cluster, make_net)
    for _ in range(3):
        step(*ours, inputs())
        step(*plain, inputs())
        for _, optimizer in (ours, plain):
            optimizer.param_groups[0]["lr"] *= 0.5
    assert_equal(ours[0], plain[0])


def test_hooks_of_an_optimizers_step(cluster):
    ours, plain = make_pair(cluster, make_net)
    for net, optimizer in (ours, plain):

        def halve(*_, net=net):
            for parameter in net.parameters():
                parameter.grad.mul_(0.5)

        optimizer.register_step_pre_hook(halve)
    for _ in range(3):
        cluster.call(step, *ours, inputs())
        step(*plain, inputs())
    assert_equal(ours[0], plain[0])


def test_hooks_of_parameters_are_refused(cluster):
    with cluster.strategy.scope():
        net = make_net()
    with pytest.raises(NotImplementedError, match=r"hook on the tensor '0\.weight' would not run"):
        net[0].weight.register_hook(lambda grad: grad)
    scope = cluster.strategy.scope()
    scope.__enter__()
    other = nn.Linear(2, 1)
    other.bias.register_hook(lambda grad: grad)
    with pytest.raises(NotImplementedError, match="'bias' would not run on the workers"):
        scope.__exit__(None, None, None)


def test_parametrized_modules(cluster):
    def make():
        first, last = nn.Linear(3, 4).double(), nn.Linear(4, 2).double()
        return nn.Sequential(parametrizations.weight_norm(first), nn.Tanh(), parametrizations.spectral_norm(last))

    ours, plain = make_pair(cluster, make)
    for _ in range(3):
        torch.testing.assert_close(cluster.call(step, *ours, inputs()), step(*plain, inputs()), rtol=0, atol=1e-12)
    assert_equal(ours[0], plain[0])


class Noting(nn.Module):
    """Has buffers that can't be added to, or are replaced."""

    def __init__(self):
        super().__init__()
        self.register_buffer("least", torch.tensor(float("inf")))
        self.register_buffer("large", torch.tensor(1e30))
        self.register_buffer("calls", torch.tensor(0), persistent=False)

    def forward(self, x):
        self.least = torch.minimum(self.least, x.min())
        self.large.fill_(2.0)
        self.calls = self.calls + 1
        return x


def test_buffers_that_are_replaced_or_come_from_infinity(cluster):
    with cluster.strategy.scope():
        net = Noting()
    for value in (3.0, -1.0, 2.0):
        cluster.call(net, torch.tensor([value]))
    assert float(net.least) == -1.0
    assert float(net.large) == 2.0
    assert int(net.calls) == 3


def test_a_buffer_keeps_its_shape(cluster):
    with cluster.strategy.scope():
        net = Noting()

    def wrong():
        net.least = torch.zeros(2)

    with pytest.raises(RuntimeError, match=r"changed the buffer 'least' of a Noting from shape \(\) to shape \(2,\)"):
        cluster.call(wrong)
    cluster.call(net, torch.tensor([1.0]))
    assert float(net.least) == 1.0


def test_a_function_that_fails_changes_no_buffer(cluster):
    with cluster.strategy.scope():
        net = nn.BatchNorm1d(3).double()

    def fail():
        net(inputs() + 5)
        raise KeyError("fails")

    with pytest.raises(KeyError):
        cluster.call(fail)
    assert cluster.call(lambda: net.running_mean.clone()).tolist() == [0, 0, 0]
    assert int(net.num_batches_tracked) == 0
