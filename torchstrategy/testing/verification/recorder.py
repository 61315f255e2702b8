"""Records what replicas do while a program runs: by hooks of torch, without a word of the program's."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchstrategy.base.context import current_replica_context
from torchstrategy.replicas.divergence import hyper_parameters
from torchstrategy.replicas.mirrored import bodies
from torchstrategy.replicas.record import optimizer_parameters
from torchstrategy.testing.verification.deviations import (
    Backward,
    Draw,
    Replica,
    Step,
    Update,
    hash_rows,
    measured,
    tensors_of,
)

__all__ = ["Recorder", "sums_of"]

_MAX_NODES = 300
_SUM = 2  # torch's number of the reduction
_THROUGH = ("Neg", "MaskedFill", "ToCopy", "Alias", "View", "Reshape", "Squeeze", "Unsqueeze", "Where", "Clone")


def sums_of(loss: Any) -> list[tuple[int, float]]:  # noqa: C901 - a table of operations
    """Return the sums that a loss consists of.

    Args:
        loss: a scalar tensor with a graph.

    Returns:
        For each sum over elements that constants scale: how many elements, and the constant each is scaled by.
    """
    if not isinstance(loss, Tensor) or loss.grad_fn is None:
        return []
    found: list[tuple[int, float]] = []
    waiting: list[tuple[Any, float, int | None]] = [(loss.grad_fn, 1.0, None)]
    for _ in range(_MAX_NODES):
        if not waiting:
            break
        node, factor, number = waiting.pop()
        kind = node.name()
        children = [child for child, _ in node.next_functions if child is not None]
        if kind.startswith("SumBackward") and number is None and _is_total(node):
            waiting += [(child, factor, math.prod(node._saved_self_sym_sizes)) for child in children]
        elif kind.startswith(("MulBackward", "DivBackward")) and len(children) == 1:
            constant = _constant(node)
            if constant:
                by = 1 / constant if kind.startswith("Div") else constant
                waiting.append((children[0], factor * by, number))
            elif number is not None:
                found.append((number, abs(factor)))
        elif kind.startswith(("AddBackward", "SubBackward")) and number is None:
            waiting += [(child, factor, None) for child in children]
        elif kind.startswith(_THROUGH) and children:
            waiting.append((children[0], factor, number))
        elif getattr(node, "_saved_reduction", None) == _SUM:
            size = getattr(node, "_saved_self", None)
            target = getattr(node, "_saved_target", None)
            rows = target if isinstance(target, Tensor) else size
            if isinstance(rows, Tensor):
                found.append((rows.numel(), abs(factor)))
        elif number is not None:
            found.append((number, abs(factor)))
    return found


def _is_total(node: Any) -> bool:
    is_vector = len(node._saved_self_sym_sizes) > 0  # of one element, too: the last batch may have one example
    return is_vector and all(math.prod(o.shape) == 1 for o in node._input_metadata)


def _constant(node: Any) -> float | None:
    for name in ("_saved_other", "_saved_self"):
        value = getattr(node, name, None)
        if isinstance(value, Tensor) and value.numel() == 1 and not value.requires_grad:
            return float(value)
        if isinstance(value, (int, float)):
            return float(value)
    return None


_RANDOM = ("rand", "randn", "randint", "normal", "bernoulli", "rand_like", "randn_like", "multinomial", "randperm")
_RANDOM_METHODS = ("bernoulli_", "normal_", "uniform_", "exponential_", "random_")
#: Of numpy; not what makes orders, which may well be the same on all replicas.
_RANDOM_ARRAYS = ("rand", "randn", "random", "random_sample", "normal", "standard_normal", "uniform")
_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
_BEGIN = 64
#: Their random numbers are no replica's: fingerprints of gradients, orders of examples.
_NOT_OF_PROGRAMS = ("torchstrategy.", "torch.utils.data.")


class Recorder:
    """Holds the replicas' records of this process.

    Args:
        rank: the id of the replica that runs where there is no replica context.
    """

    def __init__(self, rank: int = 0) -> None:
        self._rank = rank
        self.replicas: dict[int, Replica] = {}
        self._steps: dict[int, Step] = {}
        self._local: dict[int, dict[str, Tensor]] = {}
        self._names: dict[str, nn.Module] = {}
        self._optimizers: list[tuple[str, Optimizer, list[str]]] = []
        self._parameters: dict[int, str] = {}
        self._kept: list[Any] = []
        self.known: set[bytes] = set()
        self.is_single_precision = False

    def __deepcopy__(self, memo: Any) -> Recorder:
        return self  # hooks are copied with what they are registered at

    @property
    def replica_id(self) -> int:
        """The replica that runs here."""
        context = current_replica_context()
        return self._rank if context is None else context.replica_id_in_sync_group

    @property
    def step(self) -> Step:
        """The unfinished step of the replica that runs here."""
        return self.step_of(self.replica_id)

    def step_of(self, replica_id: int) -> Step:
        """Return the unfinished step of a replica."""
        return self._steps.setdefault(replica_id, Step())

    def watch_module(self, name: str, module: nn.Module) -> None:
        """Record a module's parameters and buffers under ``name``."""
        self._names[name] = module
        for key, parameter in module.named_parameters():
            self.watch_parameter(f"{name}.{key}" if name else key, parameter)

    def watch_parameter(self, name: str, parameter: Tensor) -> None:
        """Record a parameter's gradients under ``name``, unless it has a name already."""
        if id(parameter) in self._parameters:
            return
        self._parameters[id(parameter)] = name
        self._kept.append(parameter)
        self.is_single_precision |= parameter.dtype not in (torch.float64, torch.complex128)
        if parameter.requires_grad and parameter.is_leaf:
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                functools.partial(self._note_local, name)
            )

    def watch_optimizer(self, name: str, optimizer: Optimizer) -> None:
        """Record an optimizer's steps under ``name``; parameters without a name are numbered."""
        parameters = optimizer_parameters(optimizer)
        for number, parameter in enumerate(parameters):
            self.watch_parameter(f"{name}[{number}]", parameter)
        names = [self._parameters[id(parameter)] for parameter in parameters]
        self._optimizers.append((name, optimizer, names))

    def note_initial(self, replica_id: int, local_id: int = 0) -> None:
        """Keep a replica's weights as those it begins with."""
        self._replica(replica_id).initial = self._state(local_id, buffers=False)

    def note_batch(self, replica_id: int, batch: Any) -> None:
        """Keep which rows a replica was given."""
        step = self.step_of(replica_id)
        for position, tensor in enumerate(tensors_of(batch)):
            hashes = hash_rows(tensor)
            self.known.update(hashes)
            if position == 0:  # an example is told by its first tensor: labels repeat
                step.delivered.update(hashes)
                step.num_rows = (step.num_rows or 0) + (len(tensor) if tensor.dim() else 1)

    @property
    def has_unfinished(self) -> bool:
        """Whether something was recorded since the last finished step."""
        return bool(self._steps)

    def forget_steps(self) -> None:
        """Drop what was recorded since the last finished step, such as the draws of initial weights."""
        self._steps.clear()
        self._local.clear()

    def finish_step(self, replica_id: int, local_id: int = 0) -> Step:
        """End a replica's step, with the weights and buffers it has now."""
        step = self._steps.pop(replica_id, None) or Step()
        step.weights = self._state(local_id, buffers=False)
        step.buffers = self._state(local_id, buffers=True)
        self._replica(replica_id).steps.append(step)
        return step

    def _replica(self, replica_id: int) -> Replica:
        return self.replicas.setdefault(replica_id, Replica())

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Have torch tell of backward passes, optimizer steps, forward passes and random draws."""
        with contextlib.ExitStack() as stack:
            for handle in (
                register_module_forward_pre_hook(self._before_forward),
                register_optimizer_step_pre_hook(self._before_update),
            ):
                stack.callback(handle.remove)
            self._patch(stack, torch.autograd, "_engine_run_backward", self._passing)  # by whatever name it is called
            for name in _RANDOM:
                self._patch(stack, torch, name, self._drawing)
            for name in _RANDOM_ARRAYS:
                self._patch(stack, np.random, name, self._drawing)
            for name in _RANDOM_METHODS:
                self._patch(stack, Tensor, name, self._drawing)
            for name in _DROPOUTS:
                self._patch(stack, nn.functional, name, self._dropping)
            yield

    def _patch(self, stack: contextlib.ExitStack, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        before = getattr(owner, name)
        setattr(owner, name, wrap(before))
        stack.callback(setattr, owner, name, before)

    def _passing(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def run(outputs: Any, *args: Any, accumulate_grad: bool, **kwargs: Any) -> Any:
            for output in outputs if accumulate_grad else ():  # else it is `grad`
                if isinstance(output, Tensor) and output.numel() == 1:
                    self.step.backwards.append(Backward(float(output.detach()), sums_of(output)))
            return fn(outputs, *args, accumulate_grad=accumulate_grad, **kwargs)

        return run

    def _drawing(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def draw(*args: Any, **kwargs: Any) -> Any:
            result = fn(*args, **kwargs)
            if not sys._getframe(1).f_globals.get("__name__", "").startswith(_NOT_OF_PROGRAMS):
                self._note_draw(fn.__name__, result)
            return result

        return draw

    def _dropping(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def drop(*args: Any, **kwargs: Any) -> Any:
            result = fn(*args, **kwargs)
            given = args[0] if args else kwargs.get("input")
            if isinstance(result, Tensor) and isinstance(given, Tensor) and given.shape == result.shape:
                kept = (result != 0) | (given == 0)
                if not kept.all():
                    self._note_draw(fn.__name__, kept)
            return result

        return drop

    def _note_draw(self, name: str, result: Any) -> None:
        if isinstance(result, np.ndarray):
            result = torch.from_numpy(result)
        if isinstance(result, Tensor) and result.numel() and result.device.type != "meta":
            begin = result.detach().reshape(-1)[:_BEGIN].to("cpu", torch.float64).tolist()
            self.step.draws.append(Draw(name, tuple(begin)))

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if module not in self._heads:
            return
        hashes: Counter[bytes] = Counter()
        for tensor in tensors_of(args):
            hashes.update(hash_rows(tensor))
        self.step.seen.update(hashes)

    @property
    def _heads(self) -> list[Any]:
        return [body for module in self._names.values() for body in bodies(module)]

    def _note_local(self, name: str, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._local.setdefault(self.replica_id, {})[name] = measured(parameter.grad)

    def _before_update(self, optimizer: Optimizer, *_: Any) -> None:
        name, own = self._find(optimizer)
        update = Update(name, numbers=hyper_parameters(optimizer))
        local = self._local.setdefault(self.replica_id, {})
        for key, parameter in own.items():
            update.before[key] = measured(parameter)
            if parameter.grad is not None:
                update.gradients[key] = measured(parameter.grad)
            if key in local:
                update.local[key] = local.pop(key)
        self.step.updates.append(update)

    def _find(self, optimizer: Optimizer) -> tuple[str, Mapping[str, Tensor]]:
        own = optimizer_parameters(optimizer)
        for name, known, names in self._optimizers:
            if any(body is optimizer for body in bodies(known)):
                names = [*names, *(f"{name}[{k}]" for k in range(len(names), len(own)))]
                return name, dict(zip(names, own, strict=False))
        name = f"optimizer{len(self._optimizers)}"
        self.watch_optimizer(name, optimizer)
        return name, dict(zip(self._optimizers[-1][2], own, strict=True))

    def _state(self, local_id: int, *, buffers: bool) -> dict[str, Tensor]:
        state = {}
        for name, module in self._names.items():
            copies = bodies(module)
            # A buffer is what the program reads outside `run`; weights are looked at on every replica.
            own = module if buffers else copies[min(local_id, len(copies) - 1)]
            for key, tensor in own.named_buffers() if buffers else own.named_parameters():
                state[f"{name}.{key}" if name else key] = measured(tensor)
        return state
