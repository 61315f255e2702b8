"""What the tests of SyncBatchNorm run with one replica, several in a process, and several processes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchstrategy as ts
from tests.programs import make_train_step, strategy_for
from torchstrategy.gradients.lone_values import trains_on_one

DOUBLE = torch.float64


def dense_net(**norm):
    return nn.Sequential(
        nn.Linear(3, 4, dtype=DOUBLE),
        nn.BatchNorm1d(4, dtype=DOUBLE, **norm),
        nn.Tanh(),
        nn.Linear(4, 2, dtype=DOUBLE),
    )


def conv_net(**norm):
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, dtype=DOUBLE),
        nn.BatchNorm2d(4, dtype=DOUBLE, **norm),
        nn.ReLU(),
        nn.Conv2d(4, 3, 3, dtype=DOUBLE),
        nn.BatchNorm2d(3, dtype=DOUBLE, **norm),
        nn.Flatten(),
        nn.Linear(12, 2, dtype=DOUBLE),
    )


class Checkpointed(nn.Sequential):
    """Computes its layers again in the backward pass."""

    use_reentrant = False

    def forward(self, x):
        return checkpoint(super().forward, x.requires_grad_(), use_reentrant=self.use_reentrant)


class Reentrant(Checkpointed):
    use_reentrant = True


NETS = {"dense": (dense_net, (3,)), "conv": (conv_net, (2, 6, 6))}
NORMS = {
    "plain": {},
    "cumulative": {"momentum": None},
    "no running statistics": {"track_running_stats": False},
    "not affine": {"affine": False},
}


def synchronised(model, layer=ts.nn.SyncBatchNorm):
    return layer.convert_sync_batchnorm(model)


def train(
    devices: list[str] | None,
    net: str = "dense",
    norm: str = "plain",
    layer: type = ts.nn.SyncBatchNorm,
    wrapper: type = nn.Sequential,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> dict[str, Tensor]:
    """Train on batches of 5, with a last one of 2; return state, losses and what evaluation gives.

    With devices ``[]``, which means no distribution, batch norms stay plain.
    """
    torch.manual_seed(3)
    strategy = strategy_for(devices)
    build, shape = NETS[net]
    x, y = torch.randn(12, *shape, dtype=DOUBLE), torch.randint(2, (12,))
    if memory_format is torch.channels_last:
        x = x.to(memory_format=memory_format)
    with strategy.scope():
        model = build(**NORMS[norm])
        if devices != []:
            model = synchronised(model, layer)
        model = wrapper(model).to(memory_format=memory_format)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    step = make_train_step(model, optimizer)
    dataset = strategy.experimental_distribute_dataset((x, y), batch_size=5)

    def evaluate(batch):
        with torch.no_grad():
            return model(batch[0])

    losses = [strategy.reduce("SUM", strategy.run(step, args=(batch,))) for _ in range(2) for batch in dataset]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.eval()
    outputs = [strategy.gather(strategy.run(evaluate, args=(batch,)), axis=0) for batch in dataset]
    return {**state, "losses": torch.stack(losses), "outputs": torch.cat(outputs)}


def largest_difference(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    assert list(first) == list(second)
    return max(float((first[name] - second[name]).abs().max()) for name in first if first[name].numel())


def gradient_penalty(devices: list[str] | None) -> list[Tensor]:
    """Differentiate gradients through a batch norm; return all parameters' gradients."""
    torch.manual_seed(3)
    strategy = strategy_for(devices)
    with strategy.scope():
        model = dense_net()
        if devices != []:
            model = synchronised(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(5, 3, dtype=DOUBLE)
    (batch,) = strategy.experimental_distribute_dataset(x, batch_size=5)

    def step(x):
        x = x.requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        gradient.square().sum().backward()
        optimizer.step()
        return [parameter.grad for parameter in model.parameters()]

    return list(strategy.experimental_local_results(strategy.run(step, args=(batch,)))[0])


def fit(devices: list[str] | None) -> dict[str, Tensor]:
    """Fit and evaluate on batches of 5, with a last one of 2."""
    torch.manual_seed(3)
    strategy = strategy_for(devices)
    x, y = torch.randn(12, 3, dtype=DOUBLE), torch.randint(2, (12,))
    with strategy.scope():
        module = dense_net()
        if devices != []:
            module = synchronised(module)
        model = ts.Model(module)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    model.compile(optimizer, torch.nn.CrossEntropyLoss())
    history = model.fit(x, y, batch_size=5, epochs=3, shuffle=False, verbose=0)
    results = [*history.history["loss"], model.evaluate(x, y, batch_size=5, verbose=0)]
    return {**module.state_dict(), "losses": torch.tensor(results, dtype=DOUBLE)}


class Native:
    """Stands in for NCCL: what carries a kind of device's tensors, and lets the calling thread go on.

    Args:
        backend: moves them.
    """

    def __init__(self, backend):
        self.backend = backend
        self.is_late = False  # rows never come then, as where a GPU waits for a rank that leaves a pass out
        self.sent = []

    def start_all_gather(self, outputs, tensor):
        self.sent.append(tensor.nbytes)
        return (lambda check: check()) if self.is_late else self.backend.start_all_gather(outputs, tensor)

    def start_sum(self, tensor):
        return self.backend.start_sum(tensor)

    def start_broadcast(self, tensor):
        return self.backend.start_broadcast(tensor)


def native_strategy(devices=None, overlap=False):
    options = ts.experimental.CommunicationOptions(overlap=overlap)
    strategy = ts.MultiWorkerMirroredStrategy(devices=devices, communication_options=options)
    routes = strategy.workers.routes
    routes.accelerators["cpu"] = Native(routes.large)
    return strategy, routes.accelerators["cpu"]


def train_natively(devices: list[str] | None) -> tuple[dict[str, Tensor], list[int]]:
    """Train as ``train``; return also the bytes of what was gathered for each pass."""
    strategy, native = native_strategy(devices)
    return train(strategy), native.sent


def records_of_steps(is_native: bool, overlap: bool, num_layers: int) -> list[int]:
    """Return how many records each of four steps exchanges."""
    strategy = native_strategy(overlap=overlap)[0] if is_native else strategy_for(None)
    with strategy.scope():
        model = synchronised(nn.Sequential(nn.Linear(3, 4), *(nn.BatchNorm1d(4) for _ in range(num_layers))))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        model(torch.randn(3, 3)).square().sum().backward()
        optimizer.step()

    counts = []
    for _ in range(4):
        before = strategy.workers._sequence
        strategy.run(step)
        counts.append(strategy.workers._sequence - before)
    return counts


def error_of_a_pass_on_one_rank(change: str) -> tuple[str, bool]:
    """Return what a rank raises if rank 1 leaves a pass out or makes another one, and whether its weights changed."""
    strategy, native = native_strategy()
    rank = strategy.workers.rank
    with strategy.scope():
        first, second, wide = (ts.nn.SyncBatchNorm(channels) for channels in (4, 4, 8))
        linear = nn.Linear(3, 4)
        optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)

    def step(odd):
        optimizer.zero_grad()
        x = first(linear(torch.randn(3, 3)))
        y = wide(torch.cat([x, x], 1)) if odd and change == "another" else second(x)
        if not (odd and change == "left out"):
            y = wide(torch.cat([y[:, :4], y[:, :4]], 1))
        y.square().sum().backward()
        optimizer.step()

    for _ in range(2):
        strategy.run(step, args=(False,))
    native.is_late = True
    before = linear.weight.detach().clone()
    token = trains_on_one.set(True)  # on an accelerator nobody looks at the count, which may be anything here
    try:
        strategy.run(step, args=(rank == 1,))
    except ts.errors.DisagreementError as error:
        return str(error), torch.equal(before, linear.weight)
    finally:
        trains_on_one.reset(token)
    return "no error", False


def error_of_other_channels() -> str:
    """Return what a rank raises if rank 1 calls a layer with fewer channels."""
    strategy = strategy_for(None)
    with strategy.scope():
        layers = [ts.nn.SyncBatchNorm(channels) for channels in (4, 3)]
    channels = 4 - strategy.workers.rank
    try:
        strategy.run(lambda: layers[strategy.workers.rank](torch.ones(2, channels)))
    except ts.errors.InvalidArgumentError as error:
        return str(error)
    return "no error"
