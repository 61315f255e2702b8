"""Programs that plain torch trains, each from the devices of a strategy to its weights."""

import warnings
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import torchstrategy as ts

T = TypeVar("T")


class Abstract(ABC, nn.Module):
    @abstractmethod
    def width(self): ...

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, self.width()), nn.Tanh(), nn.Linear(self.width(), 1)).double()

    def forward(self, x):
        return self.layers(x)


class Concrete(Abstract):
    def width(self):
        return 4


class OfType(Generic[T], nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1).double()

    def forward(self, x):
        return self.layer(x).tanh()


def batches(strategy):
    """Two epochs of 13 examples in batches of 5, so that the last share is uneven or empty."""
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(13, 3).double(), torch.randn(13, 1).double())
    loader = strategy.experimental_distribute_dataset(DataLoader(data, batch_size=5))
    for _ in range(2):
        yield from loader


def flat(*modules):
    return torch.cat([p.detach().reshape(-1) for module in modules for p in module.parameters()])


def mean_square(output, y):
    return ts.nn.compute_average_loss((output - y).square().mean(1), global_batch_size="actual")


def train(devices, make):
    torch.manual_seed(0)
    strategy = ts.MirroredStrategy(devices)
    with strategy.scope():
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x, y):
        optimizer.zero_grad()
        mean_square(model(x), y).backward()
        optimizer.step()

    for batch in batches(strategy):
        strategy.run(step, args=batch)
    strategy.check_sync()
    return flat(model)


def abstract_class(devices=None):
    return train(devices, Concrete)


def generic_class(devices=None):
    return train(devices, OfType[int])


def disabled_scaler(devices=None):
    """As GPU programs are written, with the scaler made outside the scope."""
    torch.manual_seed(0)
    strategy = ts.MirroredStrategy(devices)
    with strategy.scope():
        model = Concrete()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)

    def step(x, y):
        optimizer.zero_grad()
        scaler.scale(mean_square(model(x), y)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()

    for batch in batches(strategy):
        strategy.run(step, args=batch)
    strategy.check_sync()
    return flat(model)


def scripted(devices=None):
    def make():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return torch.jit.script(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double())

    return train(devices, make)


def gan_with_batch_norm(devices=None):
    """The order of torch's DCGAN example: the discriminator steps between the generator's forward and backward."""
    torch.manual_seed(0)
    strategy = ts.MirroredStrategy(devices)
    with strategy.scope():
        generator = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)).double()
        discriminator = nn.Linear(2, 1).double()
        for_generator, for_discriminator = (
            torch.optim.SGD(net.parameters(), lr=0.1) for net in (generator, discriminator)
        )

    def loss(logits):
        return ts.nn.compute_average_loss(nn.functional.softplus(logits), global_batch_size="actual")

    def step(real, noise):
        for_discriminator.zero_grad()
        loss(-discriminator(real)).backward()
        fake = generator(noise)
        loss(discriminator(fake.detach())).backward()
        for_discriminator.step()
        for_generator.zero_grad()
        loss(-discriminator(fake)).backward()
        for_generator.step()

    values = torch.randn(16, 2).double(), torch.randn(16, 4).double()
    for batch in strategy.experimental_distribute_dataset(values, batch_size=8):
        strategy.run(step, args=batch)
    strategy.check_sync()
    return torch.cat([flat(generator, discriminator), *(b.double().reshape(-1) for b in generator.buffers())])


def quantization_aware(devices=None):
    """``prepare_qat`` swaps layers for ones with observers and fake quantization."""
    torch.manual_seed(0)
    strategy = ts.MirroredStrategy(devices)
    with strategy.scope():
        model = nn.Sequential(torch.ao.quantization.QuantStub(), nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
        model.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
        with warnings.catch_warnings():  # it is moving to torchao
            warnings.simplefilter("ignore")
            torch.ao.quantization.prepare_qat(model.train(), inplace=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, y):
        optimizer.zero_grad()
        mean_square(model(x.float()), y.float()).backward()
        optimizer.step()

    torch.manual_seed(1)
    values = torch.randn(16, 3), torch.randn(16, 1)
    for batch in strategy.experimental_distribute_dataset(values, batch_size=8):
        strategy.run(step, args=batch)
    strategy.check_sync()
    return flat(model)


class OwnMovingAverages(nn.Module):
    """Batch normalisation by torch's function, which writes to the buffers without moving their versions."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("var", torch.ones(3))
        self.register_buffer("constant", torch.full((3,), torch.nan))

    def forward(self, x):
        return self.layer(nn.functional.batch_norm(x, self.mean, self.var, training=True))


def own_moving_averages(devices=None, num_steps=4):
    torch.manual_seed(0)
    strategy = ts.MirroredStrategy(devices)
    with strategy.scope():
        model = OwnMovingAverages().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        ts.nn.compute_average_loss(model(x).square().mean(1)).backward()
        optimizer.step()

    values = (torch.randn(8 * num_steps, 3).double(),)
    for batch in strategy.experimental_distribute_dataset(values, batch_size=8):
        strategy.run(step, args=batch)
        strategy.check_sync()
    return torch.cat([flat(model), model.mean, model.var])


def sharded_model():
    """Return what ``run`` says of a model that ``fully_shard`` has made of DTensors."""
    strategy = ts.MirroredStrategy()
    with strategy.scope():
        model = nn.Linear(4, 4, bias=False)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    try:
        strategy.run(lambda: model(torch.ones(1, 4)))
    except TypeError as error:
        return str(error)
