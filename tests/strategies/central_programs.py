"""Training programs that run under MirroredStrategy and under CentralStorageStrategy, in one process and in several."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from torch import Tensor, nn

import torchstrategy as ts
from tests import programs
from torchstrategy.replicas import host_memory, host_states

DOUBLE = torch.float64
EXACT = 1e-10
VARIANTS = ["plain", "lbfgs", "scaler", "clip", "written in run", "written in run by data", "replaced in run",
            "written outside", "loaded"]  # fmt: skip
IN_PROCESSES = {"1 each": None, "2 each": programs.cpu_devices(2)}


def make(kind: str, devices: list[str] | None, **options: Any) -> ts.Strategy:
    if kind == "mirrored":
        return ts.MirroredStrategy(devices, **options)
    parameter_device = None if devices is None else "cpu:0"
    return ts.experimental.CentralStorageStrategy(devices, parameter_device, **options)


def equivalence(devices: list[str] | None, **program: Any) -> list[list[float]]:
    return programs.train(make("central", devices), **program)


class Net(nn.Module):
    def __init__(self, has_norm: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6, dtype=DOUBLE)
        self.norm = nn.BatchNorm1d(6, dtype=DOUBLE) if has_norm else nn.Identity()
        self.last = nn.Linear(6, 1, dtype=DOUBLE)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


def train(  # noqa: C901
    kind: str, devices: list[str] | None, variant: str = "plain", has_norm: bool = True, **options: Any
) -> list[list[float]]:
    """Train with what a variant names; return parameters, buffers, losses and the state of the optimizer."""
    torch.manual_seed(3)
    strategy = make(kind, devices, **options)
    x = torch.randn(30, 4, dtype=DOUBLE)
    with strategy.scope():
        model, average = Net(has_norm), Net(has_norm).requires_grad_(False)
        if variant == "lbfgs":
            optimizer: Any = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        else:
            optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        scaler = torch.amp.GradScaler("cpu", enabled=variant == "scaler")
        total = ts.Variable(0.0, aggregation=ts.VariableAggregation.SUM, dtype=DOUBLE)
    late = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    batches = strategy.experimental_distribute_dataset((x, x[:, :1] * 2), batch_size=8)

    def backward(batch: tuple[Tensor, Tensor]) -> Tensor:
        optimizer.zero_grad()
        errors = (model(batch[0]) - batch[1]).square().flatten()
        loss = ts.nn.compute_average_loss(errors, global_batch_size="actual")
        scaler.scale(loss).backward()
        return loss

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        if variant == "lbfgs":
            return optimizer.step(lambda: backward(batch)).detach()
        loss = backward(batch)
        if variant == "clip":
            ts.get_replica_context().sum_gradients(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        late.step()
        change(model, variant, "in run")
        with torch.no_grad():
            for own, other in zip(average.parameters(), model.parameters(), strict=True):
                own.lerp_(other, 0.5)
        total.assign_add(loss.detach())
        return loss.detach()

    losses = []
    for _ in range(3):
        for batch in batches:
            result = strategy.run(step, args=(batch,))
            if variant == "lbfgs":  # which returns the sum over replicas
                losses.append(float(strategy.experimental_local_results(result)[0]))
            else:
                losses.append(float(strategy.reduce("SUM", result)))
        change(model, variant, "outside")
        if variant == "loaded":
            values = {key: value * 0.9 for key, value in model.state_dict().items() if value.is_floating_point()}
            model.load_state_dict(values, strict=False)
            optimizer.load_state_dict(optimizer.state_dict())
    state = optimizer.state_dict()["state"].values() if variant != "lbfgs" else ()
    tensors = [*model.state_dict().values(), *average.state_dict().values()]
    return [
        *(tensor.double().flatten().tolist() for tensor in tensors),
        *([float(value.double().sum()) for value in entry.values()] for entry in state),
        [*losses, float(total), *(float(group["lr"]) for group in optimizer.param_groups)],
    ]


def change(model: nn.Module, variant: str, where: str) -> None:
    for parameter in model.parameters():
        if variant == f"written {where}":
            with torch.no_grad():
                parameter.mul_(0.9)
        elif variant == f"written {where} by data":
            parameter.data.mul_(0.9)
        elif variant == f"replaced {where}":
            parameter.data = parameter.data * 0.9


class Averaging(nn.Module):
    """Keeps the mean of what it was given in a buffer, and the latest in one that is another tensor each time."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=DOUBLE))
        self.register_buffer("mean", torch.zeros(3, dtype=DOUBLE))
        self.register_buffer("latest", None)

    def forward(self, x: Tensor) -> Tensor:
        self.latest = x.mean(0)
        self.mean.lerp_(self.latest, 0.5)
        return (self.weight * x).sum()


def buffers_of_two_optimizers(kind: str, devices: list[str] | None, with_hook: bool) -> list[list[float]]:
    """Return each replica's buffers after steps of one optimizer, and after a step of both."""
    strategy = make(kind, devices)
    with strategy.scope():
        models = [Averaging(), Averaging()]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        average = Averaging()
    (batch,) = strategy.experimental_distribute_dataset(torch.arange(36, dtype=DOUBLE).view(12, 3), batch_size=12)

    def follow(*_: object) -> None:
        average.mean.lerp_(models[0].mean, 0.5)

    if with_hook:
        optimizers[0].register_step_post_hook(follow)

    def step(x: Tensor, num_steps: int) -> list[Tensor]:
        for model in models:
            model(x).backward()
        for optimizer in optimizers[:num_steps]:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        return [buffer.clone() for model in (*models, average) for buffer in model.buffers()]

    found, extra = [], []
    for num_steps in (1, 1, 2, 1, 0):
        values = strategy.run(step, args=(batch, num_steps))
        found += [part.tolist() for value in values for part in strategy.experimental_local_results(value)]
        with strategy.scope():
            extra.append(nn.Linear(1, 1))
    strategy.sync_buffers()
    return found + [buffer.tolist() for model in (*models, average) for buffer in model.buffers()]


class Sharp(torch.optim.Optimizer):
    """SAM as it is usually written: it gives parameters their old memory back."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)

    @torch.no_grad()
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        old = [parameter.data.clone() for parameter in parameters]
        for parameter in parameters:
            parameter.data = parameter + 0.05 * parameter.grad
        loss = torch.enable_grad()(closure)()
        for parameter, value in zip(parameters, old, strict=True):
            parameter.data = value
        self.base.step()
        return loss


def exchange(kind: str, devices: list[str] | None, variant: str) -> list[list[float]]:  # noqa: C901
    """Train while parameters' memory is exchanged, or while hooks write to a second model."""
    torch.manual_seed(4)
    strategy = make(kind, devices)
    x = torch.randn(4, 3, dtype=DOUBLE)
    with strategy.scope():
        model, other = nn.Linear(3, 3, dtype=DOUBLE), nn.Linear(3, 3, dtype=DOUBLE)
        optimizer: Any = Sharp(model.parameters()) if variant == "sam" else torch.optim.Adam(model.parameters(), lr=0.1)
    (batch,) = strategy.experimental_distribute_dataset(x, batch_size=4)

    def swap() -> None:
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            one.data, two.data = two.data, one.data

    def follow(*_: object) -> None:
        with torch.no_grad():
            for one, two in zip(model.parameters(), other.parameters(), strict=True):
                two.lerp_(one, 0.5)

    if variant.startswith("hook before"):
        optimizer.register_step_pre_hook(follow)
    elif variant.startswith("hook"):
        optimizer.register_step_post_hook(follow)

    def step(part: Tensor) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = ts.nn.compute_average_loss(model(part).square().sum(1), global_batch_size=4)
            loss.backward()
            return loss

        closure()
        optimizer.step(*[closure] * (variant == "sam"))
        if variant == "swapped in run":
            swap()

    for _ in range(3):
        strategy.run(step, args=(batch,))
        if variant == "swapped outside":
            swap()
        elif variant == "transposed outside":
            with torch.no_grad():
                model.weight.t_()
        elif variant == "kept outside":  # as averages of weights are evaluated
            kept = [parameter.data for parameter in model.parameters()]
            for one, two in zip(model.parameters(), other.parameters(), strict=True):
                one.data = two.data.clone()
            strategy.run(model, args=(batch,))
            for one, value in zip(model.parameters(), kept, strict=True):
                one.data = value
    return [tensor.flatten().tolist() for m in (model, other) for tensor in m.state_dict().values()]


def with_copies(*args: Any, **kwargs: Any) -> list[list[float]]:
    """Train as if no replica could read the host's memory, as GPUs can't."""
    plain = host_states._can_read
    host_states._can_read = lambda device, memory: False
    try:
        return train(*args, **kwargs)
    finally:
        host_states._can_read = plain


def without_views(*args: Any, **kwargs: Any) -> list[list[float]]:
    """Train as on a system that has no private mappings of memory."""
    plain = host_memory.can_map
    host_memory.can_map = lambda: False
    try:
        return train(*args, **kwargs)
    finally:
        host_memory.can_map = plain


def shared_memory(devices: list[str] | None) -> dict[str, Any]:
    """Return what the ranks see of the chief's memory after three steps, and what each has of its own."""
    torch.manual_seed(0)
    strategy = make("central", devices)
    with strategy.scope():
        model = nn.Linear(64, 64)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        strategy.run(step)
    blocks = list(strategy._memory._blocks)
    if strategy.is_chief:  # which no rank sees before the next step
        with torch.no_grad():
            model.weight.fill_(7.0)
    strategy.reduce("SUM", torch.ones(()))
    changed = [block.changed(view) for block in blocks for view in range(len(block.views))]
    return {
        "private pages": [] if strategy.is_chief else changed,
        "weight": float(model.weight.detach().sum()),
        "steps": [float(entry["step"]) for entry in optimizer.state_dict()["state"].values()],
        "moments": [float(entry["exp_avg_sq"].sum()) for entry in optimizer.state_dict()["state"].values()],
        "state in replicas": [len(body.state) for body in strategy.experimental_local_results(optimizer)],
        "is host": strategy._memory.is_host,
    }


def dies(rank: int, where: str) -> None:
    """Train until a rank kills itself."""
    strategy = make("central", None)
    with strategy.scope():
        model = nn.Linear(4, 4)
        optimizer = Killing(model.parameters(), rank if where == "in the update" else -1)

    def step(number: int) -> None:
        model(torch.ones(1, 4)).sum().backward()
        if number == 2 and where == "in run" and strategy.workers.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()

    for number in range(4):
        strategy.run(step, args=(number,))


class Killing(torch.optim.SGD):
    def __init__(self, parameters: Any, rank: int) -> None:
        super().__init__(parameters, lr=0.1)
        self.kill_at = 3 if rank == int(os.environ["RANK"]) else 0

    def step(self, closure: Any = None) -> Any:
        self.kill_at -= 1
        if self.kill_at == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(closure)


def fails_in_the_update() -> None:
    strategy = make("central", None)
    with strategy.scope():
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def boom(*_: object) -> None:
        raise ValueError("boom")

    def step() -> None:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()

    optimizer.register_step_pre_hook(boom)
    strategy.run(step)


def new_layer() -> list[float]:
    """Add a layer and a parameter group after the first step."""
    torch.manual_seed(1)
    strategy = make("central", None)
    with strategy.scope():
        model = nn.Sequential(nn.Linear(2, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    strategy.run(step)
    with strategy.scope():
        model.append(nn.Linear(2, 2))
    optimizer.add_param_group({"params": model[1].parameters()})
    for _ in range(2):
        strategy.run(step)
    return [float(parameter.detach().sum()) for parameter in model.parameters()]


def saved(kind: str, devices: list[str] | None, path: str) -> list[float]:
    """Save after some steps, go on, and return the weights."""
    strategy, model, checkpoint, step = _checkpointed(kind, devices)
    for _ in range(3):
        strategy.run(step)
    checkpoint.write(path)
    strategy.run(step)
    return model.weight.detach().flatten().tolist()


def restored(kind: str, devices: list[str] | None, path: str) -> list[float]:
    """Restore and make the last step."""
    strategy, model, checkpoint, step = _checkpointed(kind, devices)
    strategy.run(step)
    checkpoint.read(path)
    strategy.run(step)
    return model.weight.detach().flatten().tolist()


def _checkpointed(kind: str, devices: list[str] | None) -> Any:
    strategy = make(kind, devices) if kind != "default" else ts.get_strategy()
    with strategy.scope():
        model = nn.Linear(3, 2, dtype=DOUBLE)
        nn.init.constant_(model.weight, 0.5)
        nn.init.constant_(model.bias, 0.1)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        checkpoint = ts.train.Checkpoint(model=model, optimizer=optimizer)
    count = strategy.num_replicas_in_sync

    def step() -> None:
        optimizer.zero_grad()
        (model(torch.ones(1, 3, dtype=DOUBLE)).square().sum() / count).backward()
        optimizer.step()

    return strategy, model, checkpoint, step


def state_written_outside() -> list[float]:
    """Return what a process sees of the momentum after the program has changed it outside ``run`` and trained on."""
    strategy = make("central", None)
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()

    seen = []
    for _ in range(2):
        strategy.run(step)
        optimizer.state[model.weight]["momentum_buffer"].zero_()
        strategy.run(step)
        seen.append(optimizer.state[model.weight]["momentum_buffer"].item())
    return seen
