"""Nets whose gradients lie in memory in unusual ways; each step brings some examples to every replica."""

import numpy as np
import torch
from torch import nn

import torchstrategy as ts

NUM_EXAMPLES = 6
NUM_STEPS = 3
NETS = {}


def net(cls):
    NETS[cls.__name__] = cls
    return cls


class Overlapping(torch.autograd.Function):
    """Has gradients that are parts of one buffer and share some of its elements."""

    @staticmethod
    def forward(ctx, first, second):
        return torch.cat([first, second])

    @staticmethod
    def backward(ctx, grad):
        return grad[:4], grad[2:6]


class Same(torch.autograd.Function):
    """Has two gradients that are one tensor."""

    @staticmethod
    def forward(ctx, first, second):
        return first + second

    @staticmethod
    def backward(ctx, grad):
        both = grad * 1
        return both, both.view(-1)


class OfSaved(torch.autograd.Function):
    """Has a gradient that is a part of a tensor of the program's, if there is one example."""

    @staticmethod
    def forward(ctx, parameter, examples):
        ctx.examples = examples
        return (parameter * examples).sum()

    @staticmethod
    def backward(ctx, grad):
        return (ctx.examples[0] if len(ctx.examples) == 1 else ctx.examples.sum(0)), None


def parameter(*shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(sum(shape) + 1)
    return nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype))


class _Net(nn.Module):
    def sum_of(self, tensor, weight):
        return (tensor * (1 + torch.arange(tensor.numel(), dtype=tensor.dtype)).view(tensor.shape)).sum() * weight


class _Pair(_Net):
    def __init__(self):
        super().__init__()
        self.first, self.second = parameter(4), parameter(4)


@net
class PartsOfOneBuffer(_Pair):
    def forward(self, weight):
        return self.sum_of(Overlapping.apply(self.first, self.second) ** 2, weight)


@net
class OneTensorTwice(_Pair):
    def forward(self, weight):
        return self.sum_of(Same.apply(self.first, self.second) ** 2, weight)


@net
class StackedOnes(_Net):
    def __init__(self):
        super().__init__()
        self.parts = nn.ParameterList([parameter(3, 2) for _ in range(5)])

    def forward(self, weight):
        return self.sum_of(torch.stack(list(self.parts)) ** 2, weight)


@net
class ManyLayouts(_Net):
    """Another order of axes, gaps, no axes, no elements, other dtypes."""

    def __init__(self):
        super().__init__()
        self.last = nn.Parameter(parameter(2, 3, 4, 5).detach().to(memory_format=torch.channels_last))
        self.turned = nn.Parameter(parameter(3, 4).detach().t())
        self.gaps = nn.Parameter(parameter(4, 6).detach()[:, ::2])
        self.scalar = parameter()
        self.empty = parameter(0, 3)
        self.narrow = parameter(5, dtype=torch.float32)
        self.complex = parameter(4, dtype=torch.complex128)

    def forward(self, weight):
        pieces = [self.last.contiguous(), self.turned, self.gaps.contiguous(), self.scalar, self.empty]
        total = sum(self.sum_of(piece**2, weight) for piece in pieces)
        return total + self.sum_of(self.narrow.double(), weight) + self.sum_of(torch.view_as_real(self.complex), weight)


@net
class MoreThanAChunk(_Net):
    """Parameters of all sizes, of which some pass through shared memory in several chunks, and others together."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ParameterList([parameter(size) for size in (5, 70_000, 1, 150_001, 3, 20, 64)])

    def forward(self, weight):
        return 1e-5 * sum(self.sum_of(torch.sin(part), weight) for part in self.parts)


@net
class GradientsOfTheProgram(_Net):
    """Gives parameters gradients that share memory with each other and with a tensor that it keeps."""

    def __init__(self):
        super().__init__()
        self.first, self.second = parameter(4), parameter(2, 2)

    def forward(self, weight):
        return self.sum_of(self.first * self.second.view(-1), weight)

    def after_backward(self):
        kept = self.first.grad + self.second.grad.view(-1)
        self.first.grad, self.second.grad = kept, kept.view(2, 2)


def train(devices, name):
    """Return the parameters after some steps, each as a list of the local replicas'."""
    strategy = ts.MirroredStrategy(devices)
    with strategy.scope():
        model = NETS[name]()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(weights):
        optimizer.zero_grad()
        model(weights.sum()).backward()
        if hasattr(model, "after_backward"):
            model.after_backward()
        optimizer.step()

    examples = torch.linspace(0.5, 2, NUM_EXAMPLES * NUM_STEPS, dtype=torch.float64)
    for batch in strategy.experimental_distribute_dataset(examples, batch_size=NUM_EXAMPLES):
        strategy.run(step, args=(batch,))
    values = strategy.run(lambda: [parameter.detach().clone() for parameter in model.parameters()])
    return [list(strategy.experimental_local_results(column)) for column in values]


def train_all(devices):
    return {name: train(devices, name) for name in NETS}


def keeps_gradients(devices):
    """Return whether the sum is in the memory in which `backward` has left the gradient, and the sum."""
    strategy = ts.MirroredStrategy(devices)
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    found = []

    def step():
        model(torch.full((1, 1), ts.get_replica_context().replica_id_in_sync_group + 1.0)).sum().backward()
        before = model.weight.grad.data_ptr()
        optimizer.step()
        found.append((model.weight.grad.data_ptr() == before, model.weight.grad.item()))

    strategy.run(step)
    return found[0]


def train_on_kept_batches(devices):
    """Return the parameters after steps on batches that the program keeps, and the batches."""
    strategy = ts.MirroredStrategy(devices)
    with strategy.scope():
        model = nn.ParameterList([parameter(3)])
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    examples = torch.arange(12, dtype=torch.float64).view(4, 3)
    batches = list(strategy.experimental_distribute_dataset(examples.clone(), batch_size=2))

    def step(own):
        optimizer.zero_grad()
        OfSaved.apply(model[0], own).backward()
        optimizer.step()

    for _ in range(3):
        for batch in batches:
            strategy.run(step, args=(batch,))
    kept = [strategy.experimental_local_results(batch) for batch in batches]
    return model[0].detach().clone(), kept


COEFFICIENTS = np.arange(1.0, 6.0)


class OfNumpy(torch.autograd.Function):
    """Has a gradient whose memory is NumPy's."""

    @staticmethod
    def forward(ctx, parameter):
        return torch.tensor(float(parameter.detach().numpy() @ COEFFICIENTS), dtype=torch.float64)

    @staticmethod
    def backward(ctx, grad):
        return torch.from_numpy(COEFFICIENTS)


def gradients_that_others_hold(devices):
    """Return what becomes of gradients whose tensors or memory are not only theirs, and of who shares them."""
    strategy = ts.MirroredStrategy(devices)
    with strategy.scope():
        first, second, of_numpy = (nn.ParameterList([parameter(5)]) for _ in range(3))
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.0) for one in (first, second, of_numpy)]
        conjugated = nn.ParameterList([parameter(3, dtype=torch.complex128)])
        optimizers.append(torch.optim.SGD(conjugated.parameters(), lr=0.0))

    def step(is_given_before):
        own = ts.get_replica_context().replica_id_in_sync_group + 1.0
        for optimizer in optimizers:
            optimizer.zero_grad()
        (first[0].sum() * own).backward()
        kept = first[0].grad
        if is_given_before:
            second[0].grad = kept
        optimizers[0].step()
        second[0].grad = kept
        optimizers[1].step()
        OfNumpy.apply(of_numpy[0]).backward()
        optimizers[2].step()
        (conjugated[0].conj() * (own + 1j)).imag.sum().backward()
        optimizers[3].step()
        grads = [one[0].grad.resolve_conj().tolist() for one in (first, second, of_numpy, conjugated)]
        return grads, kept.tolist() == [own] * 5

    found = [strategy.run(step, args=(is_given_before,)) for is_given_before in (False, True, False)]
    return [strategy.experimental_local_results(one) for one in found], COEFFICIENTS.tolist()


def a_parameter_leaves_and_returns(devices):
    """Return a gradient that was summed in one run and used in a later one, between which its parameter was away."""
    strategy = ts.MirroredStrategy(devices)
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def first():
        (model.weight.sum() * (ts.get_replica_context().replica_id_in_sync_group + 1.0)).backward()
        ts.get_replica_context().sum_gradients(optimizer)

    def second():
        optimizer.step()
        return model.weight.grad.item()

    strategy.run(first)
    own = model.weight
    model.weight = nn.Parameter(torch.ones(1, 1))
    with strategy.scope():
        nn.Linear(1, 1)
    strategy.run(lambda: None)
    model.weight = own
    return strategy.experimental_local_results(strategy.run(second))


def missing_on_some(devices):
    """Return the sums of gradients that only replica 0 has, and of small ones where the program has set a device."""
    strategy = ts.MirroredStrategy(devices)
    with strategy.scope():
        model = nn.Module()
        model.gaps = nn.Parameter(torch.arange(24.0).view(4, 6).t()[:, ::2])
        model.first, model.second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step():
        optimizer.zero_grad()
        if ts.get_replica_context().replica_id_in_sync_group == 0:
            (model.gaps**2).sum().backward()
        (model.first.sum() + 2 * model.second.sum()).backward()
        with torch.device("meta"):
            ts.get_replica_context().sum_gradients(optimizer)
        return [parameter.grad.clone() for parameter in model.parameters()]

    for _ in range(2):
        found = strategy.run(step)
    return [strategy.experimental_local_results(value)[0] for value in found]
