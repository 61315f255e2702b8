"""Records what an unchanged program does: nobody says which modules and optimizers it has, or where a step ends.

Modules are those that the program calls itself with gradients on; optimizers are met when they get their parameters. A
step lasts from one optimizer step to the next, and ends when the next forward pass begins: what the program does to
weights and buffers in between belongs to it.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data.dataloader import _BaseDataLoaderIter

from torchstrategy.testing.verification.deviations import hash_rows, measured, tensors_of
from torchstrategy.testing.verification.recorder import Recorder

__all__ = ["EnoughSteps", "ScriptRecorder", "Setup"]

#: What wraps a module for training in several processes, and under which name it keeps it.
_WRAPPED = ("module", "_forward_module", "_orig_mod")
_WRAPPING_PACKAGES = ("torch", "lightning_fabric", "lightning", "accelerate")


@dataclass(frozen=True)
class Setup:
    """What one process of a run is told.

    Args:
        script: the program's file.
        arguments: its own arguments.
        folder: where the record goes.
        rank: which process of the run this is.
        size: how many there are.
        is_job: whether the process finds the variables of ``torchrun``.
        replicas: how many replicas a strategy gets in this process.
        dtype: torch's default type, in which the program makes its weights.
        max_steps: how many steps are recorded.
        max_bytes: how large the records may become.
        batch_factor: how many times as large the batches of data loaders are made.
        assumed_replicas: what the program is told that the number of replicas is, outside replica functions.
        without: what does nothing: ``"dropout"``, or ``"shuffling"`` by data loaders.
    """

    script: str
    arguments: tuple[str, ...]
    folder: str
    rank: int = 0
    size: int = 1
    is_job: bool = True
    replicas: int = 1
    dtype: str = "float64"
    max_steps: int = 100
    max_bytes: float = 2e9
    batch_factor: int = 1
    assumed_replicas: int | None = None
    without: tuple[str, ...] = ()


class EnoughSteps(BaseException):
    """Ends a program that has made the steps which are to be recorded; no error that a program would catch."""


@dataclass
class _Own:
    """What one replica has: the modules that it calls, and the names of their tensors."""

    roots: list[nn.Module] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)  # by id; the roots keep the tensors alive
    others: dict[str, Tensor] = field(default_factory=dict)  # an optimizer's parameters that no root has
    depth: int = 0
    is_updated: bool = False


class ScriptRecorder(Recorder):
    """Holds the records of this process's replicas while a script runs.

    Args:
        rank: the id of the replica that runs where there is no replica context.
        max_steps: after so many steps the program ends with ``EnoughSteps``.
        max_bytes: so does it once the records are as large.
        before_end: called before that.
    """

    def __init__(self, rank: int, max_steps: int, max_bytes: float, before_end: Callable[[], None]) -> None:
        super().__init__(rank)
        self._max_steps = max_steps
        self._max_bytes = max_bytes
        self._before_end = before_end
        self._own: dict[int, _Own] = {}
        self._optimizer_names: dict[int, str] = {}
        self.num_bytes = 0

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Have torch also tell of modules' calls, of optimizers' parameters, and of what loaders deliver."""
        with super().recording(), contextlib.ExitStack() as stack:
            self._patch(stack, nn.Module, "__call__", self._calling)
            self._patch(stack, Optimizer, "add_param_group", self._adding)
            self._patch(stack, _BaseDataLoaderIter, "__next__", self._loading)
            yield

    def finish(self) -> None:
        """End the steps in which an optimizer step was made; what comes after a last one is none."""
        for replica_id, own in self._own.items():
            if own.is_updated:
                self._end_step(replica_id, own)

    def _calling(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            replica_id = self.replica_id
            own = self._own.setdefault(replica_id, _Own())
            if own.depth == 0 and torch.is_grad_enabled():
                self._begin_forward(replica_id, own, module, (args, kwargs))
            own.depth += 1
            try:
                return call(module, *args, **kwargs)
            finally:
                own.depth -= 1

        return __call__

    def _begin_forward(self, replica_id: int, own: _Own, module: nn.Module, given: Any) -> None:
        root = _unwrapped(module)
        if not any(parameter.requires_grad for parameter in root.parameters()):
            return  # a loss, a metric, a frozen part
        if own.is_updated:
            self._end_step(replica_id, own)
            if self._has_enough(replica_id):
                self.finish()
                self._before_end()
                raise EnoughSteps
        if not any(root is known for known in own.roots):
            self._note_root(own, root)
        hashes: Counter[bytes] = Counter()
        tensors = [tensor for tensor in tensors_of(given) if not tensor.requires_grad]
        for tensor in tensors:
            hashes.update(hash_rows(tensor))
        step = self.step_of(replica_id)
        step.seen.update(hashes)
        if tensors:
            step.num_rows = (step.num_rows or 0) + (len(tensors[0]) if tensors[0].dim() else 1)

    def _has_enough(self, replica_id: int) -> bool:
        return len(self._replica(replica_id).steps) >= self._max_steps or self.num_bytes >= self._max_bytes

    def _note_root(self, own: _Own, root: nn.Module) -> None:
        slot = f"model{len(own.roots) or ''}"
        own.roots.append(root)
        for key, tensor in (*root.named_parameters(), *root.named_buffers()):
            own.names.setdefault(id(tensor), f"{slot}.{key}")

    def _end_step(self, replica_id: int, own: _Own) -> None:
        step = self.finish_step(replica_id, replica_id)
        own.is_updated = False
        kept = [step.weights, step.buffers]
        kept += [part for update in step.updates for part in (update.local, update.gradients, update.before)]
        self.num_bytes += sum(tensor.numel() * tensor.element_size() for part in kept for tensor in part.values())

    def _state(self, local_id: int, *, buffers: bool) -> dict[str, Tensor]:
        own = self._own.setdefault(local_id, _Own())
        state = {} if buffers else {name: measured(tensor) for name, tensor in own.others.items()}
        for root in own.roots:
            tensors: Iterable[Tensor] = root.buffers() if buffers else root.parameters()
            for tensor in tensors:
                name = own.names.get(id(tensor))  # none: it was put there later, under a name that has another one
                if name is not None:
                    state[name] = measured(tensor)
        return state

    def _passing(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        inner = super()._passing(fn)

        @functools.wraps(fn)
        def run(*args: Any, **kwargs: Any) -> Any:
            own = self._own.setdefault(self.replica_id, _Own())
            own.depth += 1  # what is computed again for activation checkpoints is no call of the program's
            try:
                return inner(*args, **kwargs)
            finally:
                own.depth -= 1

        return run

    def _adding(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def add_param_group(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            result = fn(optimizer, *args, **kwargs)
            # Before the first backward pass: that is where a replica's own gradient can be seen.
            name = self._optimizer_names.setdefault(id(optimizer), f"optimizer{len(self._optimizer_names) or ''}")
            self._optimizers = [known for known in self._optimizers if known[1] is not optimizer]
            self.watch_optimizer(name, optimizer)
            return result

        return add_param_group

    def _loading(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def load(*args: Any, **kwargs: Any) -> Any:
            data = fn(*args, **kwargs)
            self._note_delivered(data)
            return data

        return load

    def _note_delivered(self, data: Any) -> None:
        for position, tensor in enumerate(tensors_of(data)):
            hashes = hash_rows(tensor)
            self.known.update(hashes)
            if position == 0 and torch.is_grad_enabled():
                self.step.delivered.update(hashes)

    def _note_draw(self, name: str, result: Any) -> None:
        own = self._own.get(self.replica_id)
        if own is not None and own.roots:  # else initial weights
            super()._note_draw(name, result)

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Calls are watched, which see keyword arguments as well."""

    def _before_update(self, optimizer: Optimizer, *_: Any) -> None:
        replica_id = self.replica_id
        own = self._own.setdefault(replica_id, _Own())
        parameters = self._find(optimizer)[1]
        names = {key: own.names.get(id(parameter), key) for key, parameter in parameters.items()}
        own.others.update({key: tensor for key, tensor in parameters.items() if names[key] == key})
        if not self._replica(replica_id).initial:
            self.note_initial(replica_id, replica_id)
        super()._before_update(optimizer)
        update = self.step.updates[-1]
        update.local = _renamed(update.local, names)
        update.gradients = _renamed(update.gradients, names)
        update.before = _renamed(update.before, names)
        own.is_updated = True


def _unwrapped(module: nn.Module) -> nn.Module:
    """Return the program's own module: one process often has it bare, and several have it wrapped."""
    while type(module).__module__.partition(".")[0] in _WRAPPING_PACKAGES:
        inner = next((module._modules[name] for name in _WRAPPED if module._modules.get(name) is not None), None)
        if inner is None:
            break
        module = inner
    return module


def _renamed(tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    return {names.get(key, key): tensor for key, tensor in tensors.items()}
