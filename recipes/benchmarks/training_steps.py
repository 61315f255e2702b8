"""One training step in the words of plain PyTorch, DDP, Fabric, Accelerate and this library."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, distributed, nn

if TYPE_CHECKING:
    import torchstrategy as ts

Batch = Sequence[Tensor]


@dataclass(frozen=True)
class Work:
    """What every way does: the same model, optimizer and batch.

    Args:
        make_model: builds the model.
        make_optimizer: makes its optimizer.
        batch: images ``[batch, 1, 28, 28]`` and labels ``[batch]`` of all replicas.
        num_replicas: that share the batch.
        rank: of this process, where each has one replica.
    """

    make_model: Callable[[], nn.Module]
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    batch: Batch
    num_replicas: int
    rank: int = 0

    @property
    def share(self) -> Batch:
        """The batch of this process's replica."""
        return [part.chunk(self.num_replicas)[self.rank] for part in self.batch]


class Training(NamedTuple):
    """A model, and a function that trains it by one step."""

    model: nn.Module
    step: Callable[[], Any]


def plain(work: Work) -> Training:
    """Train on the whole batch in one process."""
    model = work.make_model()
    return _torch_training(model, work.make_optimizer(model.parameters()), work.batch)


def alone(work: Work) -> Training:
    """Train on one replica's share and add nothing up: what several replicas can't go below."""
    model = work.make_model()
    return _torch_training(model, work.make_optimizer(model.parameters()), work.share)


def ddp(work: Work, **options: Any) -> Training:
    """Train a part of the batch in each process under ``DistributedDataParallel``.

    Args:
        work: what to do.
        options: of ``DistributedDataParallel``.
    """
    if not distributed.is_initialized():
        distributed.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(work.make_model(), **options)
    return _torch_training(model, work.make_optimizer(model.parameters()), work.share)


def fabric(work: Work) -> Training:
    """Train under Lightning's Fabric."""
    from lightning.fabric import Fabric  # noqa: PLC0415 - may be absent

    runtime = Fabric(accelerator="cpu", devices=work.num_replicas, strategy="ddp")
    runtime.launch()
    plain_model = work.make_model()
    model, optimizer = runtime.setup(plain_model, work.make_optimizer(plain_model.parameters()))
    return _torch_training(model, optimizer, work.share, runtime.backward)


def accelerate(work: Work) -> Training:
    """Train under Hugging Face's Accelerate."""
    from accelerate import Accelerator  # noqa: PLC0415 - may be absent

    accelerator = Accelerator(cpu=True)
    plain_model = work.make_model()
    model, optimizer = accelerator.prepare(plain_model, work.make_optimizer(plain_model.parameters()))
    return _torch_training(model, optimizer, work.share, accelerator.backward)


def ours(work: Work, strategy: ts.Strategy) -> Training:
    """Train under a strategy."""
    with strategy.scope():
        model = work.make_model()
        optimizer = work.make_optimizer(model.parameters())
    dataset = torch.utils.data.TensorDataset(*work.batch)
    batch = next(iter(strategy.experimental_distribute_dataset(dataset, batch_size=len(dataset))))

    return Training(model, functools.partial(strategy.run, replica_step(model, optimizer), args=tuple(batch)))


def replica_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a replica's step under a strategy, on inputs and labels; it gives its part of the mean loss."""
    import torchstrategy as ts  # noqa: PLC0415 - the peers do without

    def step(inputs: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        losses = nn.functional.cross_entropy(model(inputs), labels, reduction="none")
        loss = ts.nn.compute_average_loss(losses, global_batch_size="actual")
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def ours_in_processes(work: Work) -> Training:
    """Train under ``ts.MirroredStrategy`` with one replica in each process."""
    import torchstrategy as ts  # noqa: PLC0415 - the peers do without

    return ours(work, ts.MirroredStrategy(["cpu:0"]))


def ours_in_one_process(work: Work, *, concurrent: bool) -> Training:
    """Train under ``ts.MirroredStrategy`` with all replicas in this process."""
    import torchstrategy as ts  # noqa: PLC0415 - the peers do without

    return ours(work, ts.MirroredStrategy([f"cpu:{i}" for i in range(work.num_replicas)], concurrent=concurrent))


def _torch_training(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    backward: Callable[[Tensor], object] = Tensor.backward,
) -> Training:
    images, labels = batch

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        backward(loss)
        optimizer.step()
        return loss.detach()

    return Training(model, step)


PLAIN, ALONE, OURS = "plain PyTorch", "one replica alone", "ours"
CONCURRENT, TURNS = "ours, concurrent", "ours, in turns"
PEERS: dict[str, Callable[[Work], Training]] = {
    "DDP": ddp,
    "DDP, gradients as views": functools.partial(ddp, gradient_as_bucket_view=True),
    "Fabric": fabric,
    "Accelerate": accelerate,
}
WAYS: dict[str, Callable[[Work], Training]] = {
    **PEERS,
    OURS: ours_in_processes,
    PLAIN: plain,
    ALONE: alone,
    CONCURRENT: functools.partial(ours_in_one_process, concurrent=True),
    TURNS: functools.partial(ours_in_one_process, concurrent=False),
}
PACKAGES = {"Fabric": "lightning", "Accelerate": "accelerate"}  # that these ways need
