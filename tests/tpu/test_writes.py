"""What a replica function writes to parameters and averages is written once, however the batch was split."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import torchstrategy as ts
from tests.tpu.programs import check_same, plain
from torchstrategy.testing.processes import RemoteError

EVEN, UNEVEN = [8, 8, 8], [8, 5, 2, 8]


def train(strategy, sizes, write, make_others=None, *, writes_first=False):
    """Train with ``write(model, others, x)`` in each step; returns losses, weights and what the others hold."""
    with strategy.scope():
        model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, affine=False), nn.Tanh(), nn.Linear(5, 3)).eval()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        others = None if make_others is None else make_others(model)

    def step(x):
        if writes_first:
            write(model, others, x)
        optimizer.zero_grad()
        loss = ts.nn.compute_average_loss(model(x).square().sum(1), global_batch_size="actual")
        loss.backward()
        optimizer.step()
        if not writes_first:
            write(model, others, x)
        return loss.detach()

    @ts.function
    def distributed_step(x):
        return strategy.reduce("sum", strategy.run(step, args=(x,)))

    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(size, 4, generator=generator) for size in sizes]
    losses = [plain(distributed_step(x)) for x in strategy.experimental_distribute_dataset(batches)]
    return losses, model.state_dict(), None if others is None else others.state_dict()


def decay(model, _, x):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)


def decay_together(model, _, x):
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 0.9)


def decay_by_data(model, _, x):
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.9


def clamp_a_view(model, _, x):
    with torch.no_grad():
        model[0].weight[1:3].clamp_(-0.1, 0.1)


def descend_by_hand(model, _, x):
    loss = ts.nn.compute_average_loss(model(x).square().sum(1), global_batch_size="actual")
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    gradients = ts.get_replica_context().all_reduce("sum", gradients)
    with torch.no_grad():
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter -= 0.1 * gradient


def follow(model, target, x):
    with torch.no_grad():
        for own, other in zip(target.parameters(), model.parameters(), strict=True):
            own.lerp_(other, 0.3)


def follow_together(model, target, x):
    with torch.no_grad():
        torch._foreach_lerp_(list(target.parameters()), list(model.parameters()), 0.3)


def copy_over(model, target, x):
    with torch.no_grad():
        for own, other in zip(target.parameters(), model.parameters(), strict=True):
            own.copy_(own * 0.5 + other)


def copy_together(model, target, x):
    with torch.no_grad():
        own = list(target.parameters())
        torch._foreach_copy_(own, [a * 0.5 + b for a, b in zip(own, model.parameters(), strict=True)])


def load(model, target, x):
    target.load_state_dict({key: value * 0.5 for key, value in model.state_dict().items()})


def in_a_merge(model, _, x):
    def write(strategy):
        with torch.no_grad():
            model[0].weight.mul_(0.9)
            model[0].bias.copy_(model[0].weight.sum(1))

    ts.get_replica_context().merge_call(write)


def count_in_a_buffer(model, _, x):
    model[1].running_mean.add_(0.5)
    torch._foreach_mul_([model[1].running_var], 1.1)


BY_HAND = [decay, decay_together, decay_by_data, clamp_a_view, descend_by_hand, in_a_merge, count_in_a_buffer]
TARGETS = [follow, follow_together, copy_over, copy_together, load]
SIZES = pytest.mark.parametrize("sizes", [EVEN, UNEVEN], ids=["even", "uneven"])


@SIZES
@pytest.mark.parametrize("writes_first", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("write", BY_HAND)
def test_writes_to_the_model(xla_process, sizes, write, writes_first):
    check_same(xla_process, train, sizes, write, writes_first=writes_first)


@SIZES
@pytest.mark.parametrize("write", TARGETS)
def test_target_networks(xla_process, sizes, write):
    check_same(xla_process, train, sizes, write, copy.deepcopy)


def by_mean(model):
    return AveragedModel(model)


def by_ema(model):
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)


def by_function(model):
    return AveragedModel(model, avg_fn=lambda own, other, count: own + (other - own) / (count + 2))


def update(model, average, x):
    average.update_parameters(model)


@SIZES
@pytest.mark.parametrize("make", [by_mean, by_ema, by_function])
def test_averages(xla_process, sizes, make):
    compilations = check_same(xla_process, train, sizes * 2, update, make)
    assert compilations < 20  # none for each step


def scale_by_share(model, _, x):
    with torch.no_grad():
        model[0].weight.mul_(1 + 0.1 * len(x))


def add_own_mean(model, _, x):
    with torch.no_grad():
        model[0].weight.add_(x.mean())


@pytest.mark.parametrize("sizes", [EVEN[:1], [5]], ids=["even", "uneven"])
def test_what_differs_between_replicas_is_told(xla_process, sizes):
    with pytest.raises(RemoteError, match=r"DivergenceError.* Linear: weight, a tensor of shape \(5, 4\)"):
        xla_process(4).run(on_devices, add_own_mean, sizes)


def test_what_follows_the_size_of_the_share_is_told(xla_process):
    with pytest.raises(RemoteError, match=r"different sizes have given Linear: weight different values"):
        xla_process(4).run(on_devices, scale_by_share, UNEVEN)


def on_devices(write, sizes):
    return train(ts.TPUStrategy(), sizes, write)


def backward_across_a_write(strategy):
    """One group writes to a parameter between the forward and the backward pass of another."""
    with strategy.scope():
        model = nn.Linear(4, 1)

    def step(x):
        loss = F.mse_loss(model(x), torch.ones(len(x), 1), reduction="sum")
        total = ts.get_replica_context().all_reduce("sum", loss.detach())
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            model.weight.mul_(0.5)
        return total, *ts.get_replica_context().all_reduce("sum", gradients)

    results = []
    for x in strategy.experimental_distribute_dataset([torch.ones(size, 4) for size in UNEVEN]):
        run = ts.function(lambda x=x: strategy.run(step, args=(x,)))
        results.append(strategy.experimental_local_results(run()[0])[0])
    return plain(results), model.state_dict()


def test_a_write_disturbs_no_other_groups_backward_pass(xla_process):
    check_same(xla_process, backward_across_a_write)
