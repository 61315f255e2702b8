"""Training programs whose optimizer states are split over ranks or not, in worker processes."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import torchstrategy as ts
from tests.gradients.early_job import DOUBLE, Job, net, weights
from tests.gradients.early_programs import PROGRAMS
from tests.gradients.parameter_programs import Words
from tests.programs import Lines, train
from torchstrategy.gradients import sharded_states

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    "Adam": (torch.optim.Adam, {"foreach": True, "amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"fused": True}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "Adafactor": (torch.optim.Adafactor, {}),
}


def strategy_of(sharded: Any, implementation: str = "AUTO", overlap: bool | None = None) -> Any:
    options = ts.experimental.CommunicationOptions(implementation=implementation, bytes_per_pack=400, overlap=overlap)
    return ts.MultiWorkerMirroredStrategy(
        devices=["cpu:0"], communication_options=options, shard_optimizer_states=sharded
    )


class Remembering(Job):
    """Gives optimizers that would have no states some."""

    def make(self, model: Any, optimizer: Any = torch.optim.SGD, **options: Any) -> tuple[Any, Any]:
        if model is Words:
            optimizer = torch.optim.Adagrad  # which takes sparse gradients and dense ones
        elif optimizer is torch.optim.SGD:
            options = {"momentum": 0.5, **options}
        return super().make(model, optimizer, **options)


def run(names: list[str], implementation: str) -> dict[str, tuple[list[float], list[float]]]:
    """Return the numbers of some programs with whole states, and with split ones and sums that begin early."""
    whole, split = strategy_of(False, implementation, False), strategy_of(True, implementation, True)
    with mock.patch.object(sharded_states, "_ROUND_BYTES", 100):  # so that parameters travel in parts
        return {name: (PROGRAMS[name](Remembering(whole)), PROGRAMS[name](Remembering(split))) for name in names}


def gradients_of(model: nn.Module) -> list[Any]:
    return [None if p.grad is None else p.grad.flatten().tolist() for p in model.parameters()]


def num_bytes(optimizer: torch.optim.Optimizer) -> int:
    values = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.nbytes for value in values if isinstance(value, Tensor) and value.dim())


def optimizers(names: list[str]) -> dict[str, list[Any]]:
    """Return for each class the weights, gradients and states with whole and with split states, and their bytes."""
    strategies = strategy_of(False), strategy_of(True)
    found: dict[str, list[Any]] = {}
    for name in names:
        cls, options = OPTIMIZERS[name]
        found[name] = []
        for strategy in strategies:
            job = Job(strategy)
            model, optimizer = job.make(net, cls, **options)
            numbers = job.train(model, optimizer)
            size = num_bytes(optimizer)
            states = {k: {n: torch.as_tensor(v).tolist() for n, v in state.items()}
                      for k, state in optimizer.state_dict()["state"].items()}  # fmt: skip
            strategy.check_sync()
            found[name].append((numbers, gradients_of(model), states, size))
    return found


def train_and_save(path: str, num_steps: int, *, sharded: bool, restore: str | None = None) -> dict[str, Any]:
    """Train on fixed batches from a checkpoint on, if there is one, and save; return weights and which states are here.

    Args:
        path: prefix of the checkpoint that is written.
        num_steps: of batches, which are counted on from the checkpoint.
        sharded: whether states are split.
        restore: a checkpoint.
    """
    strategy = strategy_of(sharded)
    with strategy.scope():
        torch.manual_seed(1 if restore else 5)
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        step_of = torch.zeros((), dtype=torch.int64)
    checkpoint = ts.train.Checkpoint(model=model, optimizer=optimizer, scheduler=scheduler, step=step_of)
    checkpoint.restore(restore)
    num_loaded = sum(map(bool, optimizer.state.values()))
    x = torch.randn(40, 12, 5, dtype=DOUBLE, generator=torch.Generator().manual_seed(3))

    def step(batch: Tensor) -> None:
        optimizer.zero_grad()
        (model(batch).square().sum() / 12).backward()
        ts.get_replica_context().sum_gradients(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()

    for _ in range(num_steps):
        rows = strategy.experimental_distribute_dataset(x[int(step_of)], batch_size=12)
        strategy.run(step, args=(next(iter(rows)),))
        step_of += 1
    return {"path": checkpoint.write(path), "weights": weights(model), "num_loaded": num_loaded}


def kept_in_a_save(path: str, *, own_path: bool) -> tuple[int, int]:
    """Save split states; return the bytes that this rank has gathered of them, and those of all states."""
    job = Job(strategy_of(True))
    model, optimizer = job.make(net, torch.optim.Adam)
    job.train(model, optimizer, 2)
    kept: list[dict[str, Any]] = []
    note = optimizer.register_state_dict_post_hook(lambda _, states: kept.append(states))
    ts.train.Checkpoint(optimizer=optimizer).write(f"{path}{job.rank if own_path else 0}/states")
    note.remove()
    sizes = [sum(value.nbytes for state in states["state"].values() for value in state.values() if value.dim())
             for states in (*kept, optimizer.state_dict())]  # fmt: skip
    return sizes[0], sizes[-1]


def save_on_one_rank() -> str:
    """Ask for all states on the chief only."""
    job = Job(strategy_of(True))
    model, optimizer = job.make(net, torch.optim.Adam)
    job.train(model, optimizer, 2)
    if job.rank == 0:
        optimizer.state_dict()
    else:
        job.train(model, optimizer, 2)
    return "not reached"


def load_on_one_rank() -> str:
    """Load states on the chief only, then on the others alike."""
    job = Job(strategy_of(True))
    model, optimizer = job.make(net, torch.optim.Adam)
    job.train(model, optimizer, 2)
    states = optimizer.state_dict()
    optimizer.load_state_dict(states)
    job.train(model, optimizer, 2)
    if job.rank == 0:
        optimizer.load_state_dict(states)
    job.train(model, optimizer, 2)
    return "not reached"


class Signed(torch.optim.Optimizer):
    """A program's own optimizer, which updates each parameter by itself."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                    mean.mul_(0.9).add_(parameter.grad)
                    with torch.no_grad():
                        parameter.sub_(mean.sign(), alpha=group["lr"])


class AllAtOnce(torch.optim.LBFGS):
    """LBFGS by another name: what is said of a name is said once in a process."""


def own_optimizers() -> dict[str, Any]:
    """Return for each way how many states this rank has, the weights without a split and with it, and warnings."""
    lines = Lines()
    found = {}
    whole = Job(strategy_of(False))
    for name, sharded, cls in (
        ("unknown", True, Signed),
        ("declared", [Signed], Signed),
        ("LBFGS", True, AllAtOnce),
    ):
        numbers = []
        for job in (whole, Job(strategy_of(sharded))):
            job._random.manual_seed(job.rank)
            model, optimizer = job.make(net, cls)

            def step(_: int, x: Tensor, model: Any = model, optimizer: Any = optimizer) -> None:
                def closure() -> Tensor:
                    optimizer.zero_grad()
                    loss = model(x).square().sum()
                    loss.backward()
                    return loss

                if not isinstance(optimizer, torch.optim.LBFGS):
                    closure()
                optimizer.step(closure)

            job.run_batches(step, 4)
            numbers.append(weights(model))
        found[name] = len(optimizer.state), numbers, [line for line in lines.lines if "not split" in line]
        lines.lines.clear()
    logging.getLogger("torchstrategy").removeHandler(lines)
    return found


def seen_by_hooks(*, sharded: bool) -> list[Any]:
    """Return what the program's hooks of the optimizer see of gradients and weights."""
    job = Job(strategy_of(sharded))
    seen: list[Any] = []
    with job.strategy.scope():
        torch.manual_seed(5)
        model = net()
        optimizer = torch.optim.Adam(model.parameters())
        optimizer.register_step_post_hook(lambda *_: seen.append(weights(model)))
    optimizer.register_step_pre_hook(lambda *_: seen.append(gradients_of(model)))
    job.train(model, optimizer, 2)
    optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(model.parameters(), 0.1) and None)
    return [*job.train(model, optimizer, 2), *seen]


def scaled(*, sharded: bool) -> tuple[list[float], list[Any], float]:
    """Train with a scaler that gives a fused step the scale, and one step that overflows on one rank."""
    job = Job(strategy_of(sharded))
    model, optimizer = job.make(lambda: net().float(), torch.optim.AdamW, fused=True)
    with job.strategy.scope():
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)

    def step(i: int, x: Tensor) -> None:
        optimizer.zero_grad()
        loss = model(x.float()).square().sum()
        scaler.scale(loss * (float("inf") if i == 3 and job.rank == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()

    job.run_batches(step, 6)
    return weights(model), gradients_of(model), scaler.get_scale()


class Failing(Signed):
    """Fails in the middle of a step, once it is told how."""

    how = ""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        how, self.how = self.how, ""
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how:
            raise ValueError("in the middle of the step")


def fail_in_step(how: str) -> str:
    """Fail in the middle of a step, on one rank, or on all, which go on."""
    job = Job(strategy_of([Failing]))
    model, optimizer = job.make(net, Failing)
    job.train(model, optimizer, 3)
    if how == "all" or job.rank == 1:
        optimizer.how = how
    with contextlib.suppress(ValueError) if how == "all" else contextlib.nullcontext():
        job.train(model, optimizer, 1)
    assert None not in gradients_of(model)
    job.train(model, optimizer, 1)
    return "not reached"


def fit(folder: str, num_epochs: int, *, sharded: bool) -> tuple[list[float], int, int]:
    """Train with ``Model.fit`` and a backup, which a second one continues; return weights and numbers of states."""
    strategy = strategy_of(sharded)
    with strategy.scope():
        torch.manual_seed(5)
        model = ts.Model(net())
        model.compile(optimizer="adam", loss="mse")
    x = torch.randn(30, 5, dtype=DOUBLE, generator=torch.Generator().manual_seed(3))
    backup = ts.callbacks.BackupAndRestore(folder, delete_checkpoint=False)
    model.fit(x, x[:, :3].sin(), batch_size=8, epochs=num_epochs, verbose=0, callbacks=[backup], shuffle=False)
    model.save(f"{folder}.pt")
    return weights(model), len(model.optimizer.state), len(list(model.parameters()))


def parity(options: dict[str, Any]) -> list[list[float]]:
    return train(strategy_of(True), dtype=DOUBLE, epochs=2, **options)


def drop_on_one_rank() -> str:
    """A hook drops a gradient that the other rank steps."""
    job = Job(strategy_of(True))
    model, optimizer = job.make(net, torch.optim.Adam)

    def drop(*_: Any) -> None:
        if job.rank == 0:
            model[0].weight.grad = None

    optimizer.register_step_pre_hook(drop)
    job.train(model, optimizer, 3)
    return "not reached"


def save_in_background(path: str) -> tuple[Any, Any]:
    """Return the states of the moment of an asynchronous save, and what the file has of them after more steps."""
    job = Job(strategy_of(True))
    model, optimizer = job.make(net, torch.optim.Adam)
    job.train(model, optimizer, 2)
    expected = {k: state["exp_avg"].tolist() for k, state in optimizer.state_dict()["state"].items()}
    checkpoint = ts.train.Checkpoint(optimizer=optimizer)
    file = checkpoint.write(path, ts.train.CheckpointOptions(enable_async=True))
    job.train(model, optimizer, 2)
    checkpoint.sync()
    saved = torch.load(file + ".pt", weights_only=True)["objects"]["optimizer"]["state"]["state"]["state"]
    return expected, {k: state["exp_avg"].tolist() for k, state in saved.items()}
