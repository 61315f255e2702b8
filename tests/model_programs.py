"""Training with compiled, checkpointed and channels_last models, alone or combined."""

from __future__ import annotations

import collections
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchstrategy as ts
from tests.programs import strategy_for

DOUBLE = torch.float64


class Body(nn.Module):
    """Convolutions, that are computed again in the backward pass if asked for."""

    def __init__(self, use_reentrant: bool | None, norm: type[nn.Module]) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.first = nn.Conv2d(2, 4, 3, dtype=DOUBLE)
        self.norm = norm(4, dtype=DOUBLE)
        self.second = nn.Conv2d(4, 3, 3, dtype=DOUBLE)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.use_reentrant is None:
            return self._rest(x)
        return checkpoint(self._rest, x, use_reentrant=self.use_reentrant)  # type: ignore[no-any-return]

    def _rest(self, x: Tensor) -> Tensor:
        return self.second(self.norm(x).relu()).relu()


class Head(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(1))


class Net(nn.Module):
    """A convolutional net."""

    def __init__(self, use_reentrant: bool | None, norm: type[nn.Module]) -> None:
        super().__init__()
        self.body = Body(use_reentrant, norm)
        self.head = Head(12, 2, dtype=DOUBLE)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def train(
    devices: list[str] | None,
    compiler: str | None = None,
    backend: str = "eager",
    use_reentrant: bool | None = None,
    norm: type[nn.Module] = nn.Identity,
    memory_format: torch.memory_format = torch.contiguous_format,
    epochs: int = 4,
    fused: bool | None = None,
    strategy: Any = None,
) -> tuple[list[list[float]], list[int], dict[str, bool]]:
    """Train on batches of 6, with a last one of 4.

    Args:
        devices: ``[]`` means no distribution, ``None`` one replica in each process.
        compiler: ``"module"`` for ``torch.compile(model)``, ``"function"`` for ``ts.function``, or ``None``.
        backend: the compiler's.
        use_reentrant: of the activation checkpoint; ``None`` means that there is none.
        norm: a layer before the first activation.
        memory_format: that of the model and the inputs.
        epochs: number of passes over the data.
        fused: whether the optimizer is fused; it takes for granted that gradients have their parameters' format.
        strategy: what makes a strategy of the devices; ``None`` means ``MirroredStrategy``.

    Returns:
        Parameters and losses; the numbers of graphs compiled until the end of each epoch; what always had the memory
        format.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(3)
    strategy = strategy_for(strategy(devices) if strategy else devices)
    x, y = torch.randn(16, 2, 6, 6, dtype=DOUBLE), torch.randint(2, (16,))
    with strategy.scope():
        net = Net(use_reentrant, norm).to(memory_format=memory_format)
        model = torch.compile(net, backend=backend) if compiler == "module" else net
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, fused=fused)
    dataset = strategy.experimental_distribute_dataset((x.to(memory_format=memory_format), y), batch_size=6)
    formats: dict[str, bool] = collections.defaultdict(lambda: True)

    def note(name: str, tensor: Tensor) -> None:
        formats[name] &= tensor.is_contiguous(memory_format=memory_format)

    def step(batch: Any) -> Tensor:
        images, labels = batch
        note("input", images)
        optimizer.zero_grad()
        per_example = nn.functional.cross_entropy(model(images), labels, reduction="none")
        loss = ts.nn.compute_average_loss(per_example, global_batch_size="actual")
        loss.backward()
        weight = net.body.first.weight
        note("local gradient", weight.grad)
        ts.get_replica_context().sum_gradients(optimizer)
        note("gradient", weight.grad)
        optimizer.step()
        note("weight", weight)
        if weight in optimizer.state:  # with central storage the first replica has it
            note("momentum", optimizer.state[weight]["momentum_buffer"])
        return loss.detach()

    def distributed_step(batch: Any) -> Tensor:
        return strategy.reduce("SUM", strategy.run(step, args=(batch,)))  # type: ignore[no-any-return]

    if compiler == "function":
        distributed_step = ts.function(distributed_step, jit_compile=True, backend=backend)
    losses, graphs = [], []
    for _ in range(epochs):
        losses += [float(distributed_step(batch)) for batch in dataset]
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    numbers = [parameter.detach().flatten().tolist() for parameter in net.parameters()]
    return [*numbers, losses], graphs, dict(formats)
