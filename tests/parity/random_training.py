"""Runs the programs of ``random_programs``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchstrategy as ts
from tests.parity.random_programs import Batch, RandomProgram, make_program

_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.02, momentum=0.9),
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.02, weight_decay=0.1),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=0.005, weight_decay=0.01),
}
_NUM_ROWS = 7


class Net(nn.Module):
    """The model of a program: a sum of small layers."""

    def __init__(self, layers: frozenset[str]) -> None:
        super().__init__()
        self.layers = layers
        self.body = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
        self.side = nn.Linear(4, 2)
        self.never = nn.Linear(4, 2)
        for name in ("sometimes", "at_times", "frozen", "late"):
            if name in layers:
                self.add_module(name, nn.Linear(4, 2))
        if "tied" in layers:
            self.tied = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
            self.tied[2].weight = self.tied[0].weight
        if "sparse" in layers:
            self.sparse = nn.Embedding(_NUM_ROWS, 2, sparse=True)
        if "buffers" in layers:
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))
            self.register_buffer("follower", torch.zeros(2))
        self.double()

    def outputs(self, x: Tensor, batch: Batch, *, late: bool) -> list[Tensor]:
        """Return the output ``[batch, 2]`` of each layer."""
        kind = batch.backward
        if kind in ("checkpoint", "reentrant"):
            entered = x.clone().requires_grad_()
            outputs = [checkpoint(self.body, entered, use_reentrant=kind == "reentrant")]
        else:
            outputs = [self.body(x)]
        outputs.append(self.side(x))
        used = {"frozen": True, "at_times": batch.uses, "late": late}
        outputs += [self.get_submodule(name)(x) for name, is_used in used.items() if is_used and name in self.layers]
        if "tied" in self.layers:
            outputs.append(self.tied(x)[:, :2])
        if "sparse" in self.layers:
            outputs.append(self.sparse((x[:, 1].detach() * 3).long() % _NUM_ROWS))
        chosen = x[:, 0].detach() > 0.7
        if "sometimes" in self.layers and chosen.any():
            outputs.append(chosen[:, None] * self.sometimes(x))
        return outputs

    def move_buffers(self) -> None:
        """Change the buffers, equally on all replicas."""
        if "buffers" in self.layers:
            with torch.no_grad():
                self.count += 1
                self.follower.lerp_(self.body[2].bias, 0.1)


class _Training:
    """A program that runs on a strategy."""

    def __init__(self, program: RandomProgram, strategy: Any) -> None:
        self.program = program
        self.strategy = strategy
        with strategy.scope():
            self.model = Net(program.layers)
            self._fill()
            self.optimizers = self._make_optimizers()
            device = self.model.side.weight.device.type
            self.scaler = torch.amp.GradScaler(device, init_scale=2.0**6, growth_interval=3, enabled=program.scaled)
            self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizers[0], 2, 0.7)
        self.batch = program.batches[0]
        self.knows_late = False
        self.to_clear: tuple[int, ...] = ()

    def _make_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers: of the body and most layers, of the side, and of the embedding."""
        model = self.model
        groups = [[model.body], [model.side, model.never]]
        groups[0] += [model.get_submodule(name) for name in ("tied", "frozen", "sometimes") if name in model.layers]
        groups[1] += [model.at_times] if "at_times" in model.layers else []
        kinds = self.program.optimizers
        if len(kinds) == 1:
            groups = [groups[0] + groups[1]]
        made = []
        for kind, modules in zip(kinds, groups, strict=True):
            made.append(_OPTIMIZERS[kind]([p for module in modules for p in module.parameters()]))
        if "sparse" in model.layers:
            if kinds[-1] == "SGD":
                made[-1].add_param_group({"params": model.sparse.parameters(), "momentum": 0.0})
            else:
                made.append(torch.optim.SparseAdam(model.sparse.parameters(), lr=0.02))
        return made

    def _fill(self) -> None:
        """Set initial values that do not depend on the device."""
        generator = torch.Generator().manual_seed(self.program.seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, device="cpu") * 0.4)

    def run(self) -> dict[str, Tensor]:
        """Train, and return parameters, buffers, losses and scales."""
        program, strategy = self.program, self.strategy
        dataset = strategy.experimental_distribute_dataset(self._data(), batch_size=program.batch_size)
        batches = _endlessly(dataset)
        losses, scales = [], []
        for number, self.batch in enumerate(program.batches):
            if number == program.late_at and "late" in program.layers:
                self.optimizers[0].add_param_group({"params": self.model.late.parameters()})
                self.knows_late = True
            if not program.freezes_inside:
                self._freeze()
            inputs = next(batches)
            if self.batch.evaluates:
                strategy.run(self._evaluate, args=inputs)
            losses.append(float(strategy.reduce("SUM", strategy.run(self._step, args=inputs), axis=None)))
            scales.append(self.scaler.get_scale())
            self.to_clear = self._due() if program.zeroing == "before" else ()
            if program.decays and 0 in self._due():
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", UserWarning)  # the scaler may have skipped the first step
                    self.schedule.step()
        found = {name: value.detach().cpu().clone() for name, value in self.model.state_dict().items()}
        return {**found, "losses": torch.tensor(losses, dtype=torch.float64), "scales": torch.tensor(scales)}

    def _data(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.program.seed)
        x = torch.randn(self.program.num_examples, 4, generator=generator, dtype=torch.float64)
        y = torch.stack([x.sum(1).sin(), x.prod(1)], 1)
        if self.program.overflow is not None:
            y[self.program.overflow] = torch.inf
        return x, y

    def _due(self) -> tuple[int, ...]:
        return tuple(k for k in self.batch.steps if k < len(self.optimizers))

    def _freeze(self) -> None:
        if "frozen" in self.program.layers:
            self.model.frozen.requires_grad_(self.batch.trains)

    def _evaluate(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            return self._loss(x, y)

    def _step(self, x: Tensor, y: Tensor) -> Tensor:
        """Do in replica context what the batch's entry says; return the replica's part of the loss."""
        if self.program.freezes_inside:
            self._freeze()
        for k in self.to_clear:
            self.optimizers[k].zero_grad()
        self.model.move_buffers()
        loss = self._backward(x, y)
        for k in self._due():
            self._edit(self.optimizers[k])
            self.scaler.step(self.optimizers[k])
        if self._due():
            self.scaler.update()
        if self.program.zeroing != "before":
            for k in self._due():
                self.optimizers[k].zero_grad(set_to_none=self.program.zeroing == "after")
        return loss.detach()

    def _backward(self, x: Tensor, y: Tensor) -> Tensor:
        kind = self.batch.backward
        if kind == "by chunks":
            parts = [self._loss(*chunk) for chunk in zip(x.split(2), y.split(2), strict=True)]
            for part in parts:
                self.scaler.scale(part).backward()
            return sum((part.detach() for part in parts), x.new_zeros(()))
        if kind == "by parts":
            first, *others = self._outputs(x)
            parts = [self._share((first - y).square()), *(self._share(other.square()) for other in others)]
            for part in parts:
                if part.requires_grad:
                    self.scaler.scale(part).backward()
            return sum(part.detach() for part in parts)
        if kind == "penalty":
            x = x.clone().requires_grad_()
        loss = self._loss(x, y)
        scaled = self.scaler.scale(loss)
        if kind == "twice":
            (0.3 * scaled).backward(retain_graph=True)
            (0.7 * scaled).backward()
        elif kind == "assigned":
            self._assign(scaled)
        elif kind != "none" and (kind != "unless empty" or len(x)):
            scaled.backward(create_graph=kind == "create_graph")
        return loss

    def _loss(self, x: Tensor, y: Tensor) -> Tensor:
        output = sum(self._outputs(x))
        loss = self._share((output - y).square())
        if self.batch.backward == "penalty" and torch.is_grad_enabled():
            (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
            loss = loss + 0.1 * self._share(slope.square())
        return loss

    def _outputs(self, x: Tensor) -> list[Tensor]:
        # A GradScaler's scale changes between batches, so there a gradient must not wait for its optimizer.
        return self.model.outputs(x, self.batch, late=self.knows_late or not self.program.scaled)

    @staticmethod
    def _share(values: Tensor) -> Tensor:
        return values.sum() / ts.get_replica_context().actual_batch_size()

    def _assign(self, loss: Tensor) -> None:
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        for parameter, grad in zip(trained, torch.autograd.grad(loss, trained, allow_unused=True), strict=True):
            if grad is not None:
                parameter.grad = grad if parameter.grad is None else parameter.grad + grad

    def _edit(self, optimizer: torch.optim.Optimizer) -> None:
        edit = self.batch.edit
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if edit == "summed":
            ts.get_replica_context().sum_gradients(optimizer)
        elif edit in ("norm clipped", "values clipped"):
            self._clip_the_sum(optimizer, parameters)
        else:
            with torch.no_grad():
                _edit_own(edit, parameters)

    def _clip_the_sum(self, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> None:
        if self.program.scaled:
            self.scaler.unscale_(optimizer)
        else:
            ts.get_replica_context().sum_gradients(optimizer)
        dense = _with_dense_gradients(parameters)
        if dense and self.batch.edit == "norm clipped":
            nn.utils.clip_grad_norm_(dense, 0.3)
        elif dense:
            nn.utils.clip_grad_value_(dense, 0.05)


def _edit_own(edit: str, parameters: Sequence[Tensor]) -> None:
    """Change a replica's own gradients."""
    dense = _with_dense_gradients(parameters)
    if edit == "scaled":
        for parameter in dense:
            parameter.grad.mul_(0.5)
    elif edit == "scaled past torch":
        for parameter in dense:
            parameter.grad.data.mul_(0.5)  # which moves no version
    elif edit == "replaced":
        for parameter in dense:
            parameter.grad = parameter.grad * 0.5
    elif edit == "dropped" and parameters[0] is not parameters[-1]:
        parameters[0].grad = None
    elif edit == "clipped locally" and dense:
        nn.utils.clip_grad_norm_(dense, 0.05)


def _with_dense_gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [p for p in parameters if p.grad is not None and not p.grad.is_sparse]


def _endlessly(dataset: Any) -> Iterator[Any]:
    while True:
        yield from dataset


def run_random_program(make_strategy: Callable[..., Any], seed: int, **options: Any) -> dict[str, Tensor]:
    """Run the program of a seed on ``make_strategy(**options)``; return named tensors."""
    program = make_program(seed)
    return _Training(program, make_strategy(**options)).run()


def default_strategy() -> Any:
    """Return the strategy of one replica."""
    return ts.get_strategy()


def mirrored(devices: Sequence[str] | None = None, *, concurrent: bool = False, **options: Any) -> Any:
    """Return a strategy with certain ``CommunicationOptions``."""
    communication = ts.experimental.CommunicationOptions(**options)
    return ts.MirroredStrategy(devices, communication_options=communication, concurrent=concurrent)
