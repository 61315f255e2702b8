"""Programs that plain torch trains, each from the devices of a strategy to its weights."""

import warnings
from abc import ABC, abstractmethod
from typing import Generic, TypeVar
from unittest import mock

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

import torchstrategy as ts
from torchstrategy.checkpoint.objects import TrackedOptimizer
from torchstrategy.checkpoint.tracked import to_plain
from torchstrategy.gradients.sharded_states import shard_of

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


class Growing(nn.Module):
    """Gets parameters while it is trained."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1).double()
        self.layer.register_parameter("factor", None)
        self.offsets = nn.ParameterList()

    def forward(self, x):
        output = self.layer(x).tanh() + sum(self.offsets)
        return output if self.layer.factor is None else output * self.layer.factor


def grow(number, model, optimizer):
    if number == 1:
        model.layer.factor = nn.Parameter(torch.ones(1).double())
        optimizer.add_param_group({"params": [model.layer.factor]})
    if number > 2:
        model.offsets.append(nn.Parameter(torch.zeros(1).double()))
        optimizer.add_param_group({"params": [model.offsets[-1]], "lr": 0.1 / number})


def growing(devices=None):
    return train(devices, Growing, grow)


def train(devices, make, before_run=lambda number, model, optimizer: None):
    torch.manual_seed(0)
    strategy = ts.MirroredStrategy(devices)
    with strategy.scope():
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x, y):
        optimizer.zero_grad()
        mean_square(model(x), y).backward()
        optimizer.step()

    for number, batch in enumerate(batches(strategy)):
        before_run(number, model, optimizer)
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


class PartlyDivided(nn.Module):
    """A model that FSDP2 divides in two groups, except for ``rest`` if that is asked for."""

    def __init__(self, norm):
        super().__init__()
        self.first, self.norm = nn.Linear(3, 5), norm(5)
        self.second, self.rest = nn.Linear(5, 1), nn.Linear(5, 1)

    def forward(self, x):
        hidden = torch.tanh(self.norm(self.first(x)))
        return self.second(hidden) + self.rest(hidden)


def divide(model, kind):
    """Let FSDP2 divide a model over two processes: all of it, all but ``rest``, or in one group and two copies."""
    names = ("copies", "parts")
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=names) if kind == "copies" else init_device_mesh("cpu", (2,))
    if kind != "copies":
        fully_shard(model.first, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params=set(model.rest.parameters()) if kind == "mixed" else None)


def divided_model(strategy, kind, dtype=torch.double, norm=nn.LayerNorm):
    torch.manual_seed(1)
    with strategy.scope():
        model = PartlyDivided(norm).to(dtype)
        if strategy.num_replicas_in_sync > 1 and kind != "whole":
            divide(model, kind)
    return model


def whole(tensor):
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def weights_of(model):
    return torch.cat([whole(value).flatten().double() for value in model.state_dict().values()])


def examples(number, dtype=torch.double):
    torch.manual_seed(3)
    return torch.randn(number, 3, dtype=dtype), torch.randn(number, 1, dtype=dtype)


def divided(devices, kind="all", make=torch.optim.Adam, variant="", number=25, **options):
    """Train a model that FSDP2 has divided, if there are two processes; return losses and weights."""
    strategy, dtype = ts.MirroredStrategy(devices, **options), torch.float if variant == "float" else torch.double
    model = divided_model(strategy, kind, dtype, nn.BatchNorm1d if variant == "batch norm" else nn.LayerNorm)
    with strategy.scope():
        optimizer = make(model.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0, enabled=variant == "scaler")

    def step(x, y, is_last):
        if variant == "no sync" and isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(is_last)
        loss = ts.nn.compute_average_loss((model(x) - y).square().mean(1), global_batch_size="actual")
        if variant == "penalty":  # of the DTensors, past FSDP2's hooks
            values = [value.full_tensor() if isinstance(value, DTensor) else value for value in parameters]
            loss = loss + ts.nn.scale_regularization_loss(0.1 * sum(value.square().sum() for value in values))
        scaler.scale(loss).backward()
        if is_last:
            if variant == "clipped":
                ts.get_replica_context().sum_gradients(optimizer)
                norm = whole(nn.utils.get_total_norm([p.grad for p in parameters]))  # torch 2.9 takes the rank's own
                nn.utils.clip_grads_with_norm_(parameters, 0.1, norm)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return loss.detach()

    parameters, found = list(model.parameters()), []
    for k, batch in enumerate(strategy.experimental_distribute_dataset(examples(number, dtype), batch_size=6)):
        is_last = variant not in ("accumulated", "no sync") or k % 2 == 1
        found.append(float(strategy.reduce("sum", strategy.run(step, args=(*batch, is_last)))))
        strategy.run(lambda: model(torch.ones(2, 3, dtype=dtype)).detach())  # leaves whole parameters
    strategy.check_sync()
    assert shard_of(optimizer) is None
    return torch.cat([torch.tensor(found).double(), weights_of(model)])


def fitted_divided(devices, kind):
    """Return what ``fit`` logs, ``evaluate`` and ``predict`` return, before and after ``fit`` alike."""
    strategy = ts.MirroredStrategy(devices)
    module = divided_model(strategy, kind)
    with strategy.scope():
        model = ts.Model(module)
        model.compile(optimizer="adam", loss="mse", metrics=["mae"], gradient_accumulation_steps=2)
    x, y = examples(24)
    numbers = [*model.evaluate(x, y, batch_size=8, verbose=0)]
    for _ in range(2):
        history = model.fit(x, y, batch_size=6, epochs=2, validation_data=(x, y), shuffle=False, verbose=0).history
        numbers += [number for column in history.values() for number in column]
    numbers += torch.as_tensor(model.predict(x, batch_size=8, verbose=0)).flatten().tolist()
    return torch.cat([torch.tensor(numbers).double(), weights_of(module)])


def saved_divided(devices, kind, path, restored=None):
    """Restore a checkpoint, train for three steps and save; return what the file would hold on this rank."""
    strategy = ts.MirroredStrategy(devices)
    model = divided_model(strategy, kind)
    with strategy.scope():
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    checkpoint = ts.train.Checkpoint(model=model, optimizer=optimizer)
    if restored is not None:
        checkpoint.read(restored).assert_consumed()

    def step(x, y):
        optimizer.zero_grad()
        ts.nn.compute_average_loss((model(x) - y).square().mean(1)).backward()
        optimizer.step()

    for batch in strategy.experimental_distribute_dataset(examples(18), batch_size=6):
        strategy.run(step, args=batch)
    kept = []
    with mock.patch.object(TrackedOptimizer, "capture", _noting(TrackedOptimizer.capture, kept)):
        checkpoint.write(path)
    (state,) = kept
    return weights_of(model), sum(value.numel() for one in state["state"]["state"].values() for value in one.values())


def _noting(capture, kept):
    def noting(*args):
        kept.append(capture(*args))
        return kept[-1]

    return noting


def warned_of(reduce, strategy):
    """Return the warnings of a model's first steps."""
    model = divided_model(strategy, "all")
    with strategy.scope():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        reduce(model(torch.ones(2, 3).double())).backward()
        optimizer.step()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(20):
            strategy.run(step)
    return [str(one.message) for one in caught]


def warned_of_means():
    """Return what is said of a sum and, in a later optimizer's first step, of a mean over the rank's share."""
    strategy = ts.MirroredStrategy()
    return warned_of(torch.sum, strategy), warned_of(torch.mean, strategy)


def refused_dtensors(kind, devices=None):
    """Return what ``run`` says of DTensors whose gradients nobody would sum over the replicas."""
    strategy = ts.MirroredStrategy(devices)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("all", "one"))
    with strategy.scope():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        if kind == "tensor parallel":
            parallelize_module(model, mesh["all"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        else:
            fully_shard(model, mesh=mesh[kind])
    try:
        strategy.run(lambda: model(torch.ones(1, 4)))
    except TypeError as error:
        return str(error)


def part_of_a_dtensor():
    """Return what a checkpoint says of a DTensor in a ``state_dict`` of which it can't know before."""
    model = divided_model(ts.MirroredStrategy(), "all")
    value = next(model.parameters())
    try:
        return str(to_plain({"weight": value}, "state"))
    except TypeError as error:
        return str(error)


def save_divided_on_one_rank(path):
    """Save a model that FSDP2 has divided on the chief only, while the others train on."""
    strategy = ts.MirroredStrategy()
    model = divided_model(strategy, "all")
    strategy.run(lambda: model(torch.ones(2, 3).double()))
    if strategy.is_chief:
        ts.train.Checkpoint(model=model).save(path)
    strategy.reduce("sum", ts.PerReplica((torch.ones(1),)))
