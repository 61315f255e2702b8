"""N replicas on XLA devices train as N replicas on the CPU do, whatever the model, optimizer and batch sizes."""

import functools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchstrategy as ts
from tests.tpu.programs import (
    Transformer,
    batch_norm,
    batches,
    check_same,
    conv,
    mlp,
    on_devices,
    plain,
    sgd,
    sync_batch_norm,
    train,
)

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("num_devices", [1, 2, 4])
@pytest.mark.parametrize("make_model", [conv, batch_norm, sync_batch_norm, Transformer])
def test_training_equals_replicas_on_cpu(xla_process, make_model, num_devices):
    # 20 steps, two epochs of which end with a partial batch; one replica gets less than the others, or nothing
    epoch = [4 * num_devices] * 9 + [2 * num_devices + 1]
    compilations = check_same(xla_process, train, make_model, epoch * 2, num_devices=num_devices)
    assert compilations <= 3


def test_constant_shapes_compile_twice(xla_process):
    assert check_same(xla_process, train, mlp, [8] * 6) <= 2


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [2, 4])
@pytest.mark.parametrize("make_model", [conv, batch_norm, Transformer])
def test_accumulation_of_models_over_runs(xla_process, make_model, num_devices):
    sizes = [4 * num_devices] * 3 + [2 * num_devices + 1] + [4 * num_devices] * 2
    check_same(xla_process, train, make_model, sizes, accumulate=2, num_devices=num_devices)


def test_accumulation_over_runs(xla_process):
    check_same(xla_process, train, mlp, [8, 8, 8, 5, 5, 8, 8, 8], accumulate=2)


def accumulate_inside(strategy):
    with strategy.scope():
        model = mlp()
        optimizer = sgd(model.parameters())

    def step(*micro_batches):
        optimizer.zero_grad()
        for x, y in micro_batches:
            size = ts.get_replica_context().actual_batch_size(x)
            (F.cross_entropy(model(x), y, reduction="sum") / size / len(micro_batches)).backward()
        optimizer.step()

    data = list(strategy.experimental_distribute_dataset(batches(mlp, [8, 8, 8, 5])))
    for first in (0, 2):
        strategy.run(step, args=data[first : first + 2])
    return model.state_dict()


def test_accumulation_inside_a_run(xla_process):
    check_same(xla_process, accumulate_inside)


def adam(parameters):
    return torch.optim.Adam(parameters, 0.01)


def adamw(parameters):
    return torch.optim.AdamW(parameters, 0.01, amsgrad=True)


def rmsprop(parameters):
    return torch.optim.RMSprop(parameters, 0.01, momentum=0.5, centered=True)


def adagrad(parameters):
    return torch.optim.Adagrad(parameters, 0.01)


def nesterov(parameters):
    return torch.optim.SGD(parameters, 0.01, momentum=0.9, nesterov=True, weight_decay=0.1)


def one_by_one(parameters):
    return torch.optim.Adam(parameters, 0.01, foreach=False)


def nadam(parameters):
    return torch.optim.NAdam(parameters, 0.01, weight_decay=0.1)


def radam(parameters):
    return torch.optim.RAdam(parameters, 0.01)


def adamax(parameters):
    return torch.optim.Adamax(parameters, 0.01)


def adadelta(parameters):
    return torch.optim.Adadelta(parameters, 0.5)


def maximizing(parameters):
    return torch.optim.SGD(parameters, 0.01, momentum=0.9, dampening=0.5, maximize=True)


def rate_in_a_tensor(parameters):
    return torch.optim.AdamW(parameters, torch.tensor(0.01))


OPTIMIZERS = [
    rate_in_a_tensor,
    adam,
    adamw,
    rmsprop,
    adagrad,
    nesterov,
    one_by_one,
    nadam,
    radam,
    adamax,
    adadelta,
    maximizing,
]


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS)
def test_optimizers(xla_process, make_optimizer):
    assert check_same(xla_process, train, mlp, [8] * 5, make_optimizer=make_optimizer) <= 2


def options_of_a_step(strategy):
    with strategy.scope():
        net = mlp()
        groups = [{"params": [net[0].weight]}, {"params": [net[0].bias], "foreach": False}]
        optimizer = torch.optim.SGD(groups, 0.1)
    seen = []
    optimizer.register_step_pre_hook(lambda own, *_: seen.append([group["foreach"] for group in own.param_groups]))

    def step(x):
        net(x).sum().backward()
        optimizer.step()

    strategy.run(step, args=(torch.ones(2, 4),))
    return seen, [group["foreach"] for group in optimizer.state_dict()["param_groups"]]


def test_options_of_an_optimizer_stay_as_they_are(xla_process):
    (seen, saved), _ = xla_process(2).run(on_devices, options_of_a_step)
    assert seen == [[True, False]]  # all parameters at once, unless the program has said otherwise
    assert saved == [None, False]


def capturable(parameters):
    return torch.optim.Adam(parameters, 0.01, capturable=isinstance(ts.get_strategy(), ts.TPUStrategy))


def test_a_step_count_on_the_devices(xla_process):
    check_same(xla_process, train, mlp, [8, 8, 5], make_optimizer=capturable)


def test_adam_in_float64(xla_process):
    check_same(xla_process, train, mlp, [8, 8, 5], make_optimizer=adam, dtype=torch.float64, tolerance=1e-7)


def squares(model):
    return ts.nn.scale_regularization_loss(0.01 * sum((p**2).sum() for p in model.parameters()))


def test_regularizer(xla_process):
    check_same(xla_process, train, mlp, [8, 8, 5], add_loss=squares)


class WithAddedLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        result = self.layer(x)
        ts.add_loss(0.1 * (result**2).mean())
        return result


def added_losses(model):
    return ts.nn.scale_regularization_loss(ts.losses_of(model))


def test_added_losses(xla_process):
    check_same(xla_process, train, WithAddedLoss, [8, 8, 5], add_loss=added_losses)


def clip_norm(model, optimizer):
    ts.get_replica_context().sum_gradients(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def clip_value(model, optimizer):
    ts.get_replica_context().sum_gradients(optimizer)
    nn.utils.clip_grad_value_(model.parameters(), 0.01)


def clip_greatest(model, optimizer):
    ts.get_replica_context().sum_gradients(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type=math.inf)


@pytest.mark.parametrize("clip", [clip_norm, clip_value, clip_greatest])
def test_clipping_after_the_sum(xla_process, clip):
    check_same(xla_process, train, mlp, [8, 8, 5], before_step=clip)


class Partly(nn.Module):
    """A frozen parameter, one without a gradient, and two that are one."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.unused = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.first.bias.requires_grad_(False)

    def forward(self, x):
        return self.second(self.first(x).tanh())[:, :3]


def test_frozen_unused_and_tied_parameters(xla_process):
    check_same(xla_process, train, Partly, [8, 8, 5], make_optimizer=nesterov)


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.recurrent = getattr(nn, kind)(2, 4, num_layers=2, batch_first=True, bidirectional=True)
        self.output = nn.Linear(8, 3)

    def forward(self, x):
        return self.output(self.recurrent(x.reshape(-1, 2, 2))[0][:, -1])


class Parametrized(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.second = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))

    def forward(self, x):
        return self.second(self.first(x))


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 3)

    def forward(self, x):
        hidden = torch.utils.checkpoint.checkpoint(lambda own: self.first(own).tanh(), x, use_reentrant=False)
        return self.second(hidden)


class WithHooks(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 3)
        self.first.register_forward_hook(lambda module, inputs, output: output * 2)
        self.second.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))
        self.first.weight.register_hook(lambda gradient: gradient * 3)

    def forward(self, x):
        return self.second(self.first(x).relu())


class Synchronised(nn.Module):
    """Batch normalisation over all replicas, by a user who knows ``all_reduce``."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 3)

    def forward(self, x):
        hidden = self.first(x)
        own = [hidden.sum(0), (hidden**2).sum(0), torch.tensor(float(len(x)))]
        total, squared, count = ts.get_replica_context().all_reduce("sum", own)
        mean = total / count
        return self.second((hidden - mean) / (squared / count - mean**2 + 1e-5).sqrt())


@pytest.mark.parametrize("make_model", [Parametrized, Checkpointed, WithHooks, Synchronised])
def test_kinds_of_models(xla_process, make_model):
    check_same(xla_process, train, make_model, [8, 8, 5])


class WithoutExamples(nn.Module):
    """Layers that XLA can't compute for an empty share, or whose gradient it forgets."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.LayerNorm(3)

    def forward(self, x):
        hidden = F.glu(self.first(x))
        hidden = hidden.gather(1, hidden.detach().argsort(1))
        hidden = torch.zeros_like(hidden).scatter_add(1, hidden.detach().argsort(1), hidden)
        return self.norm(torch.cat([part * 2 for part in hidden.unsafe_chunk(3, 1)], 1))


def test_layers_of_replicas_without_examples(xla_process):
    check_same(xla_process, train, WithoutExamples, [8, 8, 3, 1])


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv3d(1, 3, 1)

    def forward(self, x):
        return F.max_pool3d(self.first(x.reshape(-1, 1, 1, 2, 2)), (1, 2, 2)).flatten(1)


def test_pooling_in_three_dimensions(xla_process):
    check_same(xla_process, train, Pooled, [8, 8, 3])


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_recurrent_model(xla_process, kind):
    check_same(xla_process, train, functools.partial(Recurrent, kind), [8, 8, 7, 3])  # one share of 3 is empty


def test_modules_are_torchs(xla_process):
    """Torch_xla puts some of its own there: what a host without it can't load, what reads numbers."""
    assert xla_process(4).run(homes) == ["torch.nn.modules.rnn", "torch.nn.utils.clip_grad"]


def homes():
    return [type(nn.GRU(2, 3)).__module__, nn.utils.clip_grad_norm_.__module__]


def optimizer_outside(strategy):
    with strategy.scope():
        model = mlp()
    optimizer = sgd(model.parameters())

    def step(x, y):
        optimizer.zero_grad()
        loss = ts.nn.compute_average_loss(F.cross_entropy(model(x), y, reduction="none"), global_batch_size="actual")
        loss.backward()
        optimizer.step()

    for i, (x, y) in enumerate(strategy.experimental_distribute_dataset(batches(mlp, [8, 8, 5, 8]))):
        if i == 2:  # parameters that are added later
            with strategy.scope():
                layer = nn.Linear(3, 3)
            model.append(layer)
            optimizer.add_param_group({"params": list(layer.parameters()), "lr": 0.05})
        strategy.run(step, args=(x, y))
    return model.state_dict()


def test_optimizer_made_outside_and_parameters_added_later(xla_process):
    check_same(xla_process, optimizer_outside)


def two_optimizers(strategy):
    with strategy.scope():
        generator = nn.Linear(4, 4)
        critic = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        optimizers = sgd(generator.parameters()), sgd(critic.parameters())

    def step(x, noise):
        size = ts.get_replica_context().actual_batch_size(x)
        optimizers[1].zero_grad()
        made = generator(noise)
        ((1 - critic(x)).relu().sum() / size + (1 + critic(made.detach())).relu().sum() / size).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        (-critic(made).sum() / size).backward()
        optimizers[0].step()

    data = [(x, torch.randn(len(x), 4)) for x, _ in batches(mlp, [8, 8, 9])]
    for x, noise in strategy.experimental_distribute_dataset(data):
        strategy.run(step, args=(x, noise))
    return generator.state_dict(), critic.state_dict()


def test_two_optimizers(xla_process):
    check_same(xla_process, two_optimizers)


def scheduled(strategy, inside):
    with strategy.scope():
        model = mlp()
        optimizer = sgd(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    def step(x, y):
        optimizer.zero_grad()
        loss = ts.nn.compute_average_loss(F.cross_entropy(model(x), y, reduction="none"), global_batch_size="actual")
        loss.backward()
        optimizer.step()
        if inside:
            scheduler.step()

    rates = []
    distributed_step = ts.function(lambda x, y: strategy.run(step, args=(x, y)))
    for x, y in strategy.experimental_distribute_dataset(batches(mlp, [8, 8, 5, 8, 8])):
        distributed_step(x, y)
        if not inside:
            scheduler.step()
        rates.append((optimizer.param_groups[0]["lr"], scheduler.get_last_lr(), scheduler.state_dict()["last_epoch"]))
    return rates, model.state_dict()


@pytest.mark.parametrize("inside", [True, False])
def test_learning_rate_scheduler(xla_process, inside):
    assert check_same(xla_process, scheduled, inside) <= 3


def train_and_evaluate(strategy):
    with strategy.scope():
        model = batch_norm()
        optimizer = sgd(model.parameters())

    def step(x, y):
        optimizer.zero_grad()
        loss = ts.nn.compute_average_loss(F.cross_entropy(model(x), y, reduction="none"), global_batch_size="actual")
        loss.backward()
        optimizer.step()
        return loss.detach()

    def evaluate(x, y):
        with torch.no_grad():
            return (model(x).argmax(1) == y).float().sum()

    train_step = ts.function(lambda x, y: strategy.reduce("sum", strategy.run(step, args=(x, y))))
    test_step = ts.function(lambda x, y: strategy.reduce("sum", strategy.run(evaluate, args=(x, y))))
    results, compilations = [], []
    train_data = strategy.experimental_distribute_dataset(batches(batch_norm, [16] * 3 + [9]))
    test_data = strategy.experimental_distribute_dataset(batches(batch_norm, [16] * 2 + [7]))
    for _ in range(3):
        model.train()
        results += [plain(train_step(x, y)) for x, y in train_data]
        model.eval()
        results += [plain(test_step(x, y)) for x, y in test_data]
        compilations.append(strategy.runtime.num_compilations() if hasattr(strategy, "runtime") else 0)
    # What the first epoch has compiled serves the others; a step after the first one is another graph.
    assert compilations[-1] - compilations[0] <= 1
    return results, model.state_dict()


def test_epochs_with_evaluation_in_between(xla_process):
    assert check_same(xla_process, train_and_evaluate) <= 6
