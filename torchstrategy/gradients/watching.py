"""Lets a run see when a replica calls ``backward`` or clears gradients, whichever way the program does it.

While a strategy with several replicas runs a function, the one function of ``torch.autograd`` by which ``backward``,
``Tensor.backward`` and ``grad`` reach the engine tells of its calls, also of those by names that the program took
before; after the last run in progress it is torch's own again. From a strategy's first run on ``Module.zero_grad`` and
``Optimizer.zero_grad`` tell, until no such strategy is left: classes that change in every run make Python look up the
attributes of all modules anew.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from torchstrategy import patches
from torchstrategy.base.context import current_replica_context
from torchstrategy.gradients.summer import GradientSummer
from torchstrategy.replicas.hooks import own_hook

__all__ = ["guard_parameter", "watched"]

_lock = threading.RLock()
_num_runs = 0
#: While there are runs, what puts torch's function back.
_ends: list[Callable[[], None]] = []


def guard_parameter(
    parameter: Tensor, local_id: int, running: Callable[[], int | None], summer: weakref.ref[GradientSummer]
) -> None:
    """Raise when another replica's backward reaches a parameter, or one adds to a gradient that is summed already.

    Args:
        parameter: a replica's own parameter.
        local_id: the replica's position in the process.
        running: returns the position of the replica whose turn it is, or ``None``; for the threads of autograd, which
            have no context.
        summer: hears of each backward pass that has added to the parameter's gradient.
    """
    own = weakref.ref(parameter)

    @own_hook
    def check(tensor: Tensor) -> None:
        if tensor is not own():  # what a hook of the program's has returned, which torch is about to refuse
            return
        context = current_replica_context()
        current = running() if context is None else context.local_id
        if current is not None and current != local_id:
            raise RuntimeError(
                f"The backward pass of local replica {current} reached a parameter (shape {tuple(tensor.shape)}) of "
                f"local replica {local_id}. A tensor or list of parameters taken from the model outside `run` belongs "
                "to replica 0: read it from the model inside the replica function."
            )
        if (listener := summer()) is not None:
            is_inside = current is not None
            listener.ledger.note_backward(tensor, is_inside=is_inside)
            if is_inside and listener.early is not None:
                listener.early.note_backward(tensor)

    if parameter.is_leaf and not parameter.is_inference() and (parameter.is_floating_point() or parameter.is_complex()):
        required = parameter.requires_grad
        parameter.requires_grad_()  # a frozen one may be trained later
        parameter.register_post_accumulate_grad_hook(check)  # type: ignore[no-untyped-call]
        parameter.requires_grad_(required)


@contextlib.contextmanager
def watched(strategy: Any) -> Iterator[None]:
    """Let the current replica context hear of backward passes and of cleared gradients.

    Args:
        strategy: begins a run.
    """
    global _num_runs
    _clearing.use(strategy)
    with _lock:
        _num_runs += 1
        if _num_runs == 1:
            tell = _telling_of_passes(torch.autograd._engine_run_backward)  # type: ignore[attr-defined]
            why, until = "backward and grad tell of gradients", "the last run in progress ends"
            _ends.append(patches.replace(torch.autograd, "_engine_run_backward", tell, why, until))
    try:
        yield
    finally:
        with _lock:
            _num_runs -= 1
            if _num_runs == 0:
                _ends.pop()()


def _replace_clearing() -> list[Callable[[], None]]:
    why, until = "cleared gradients are new ones", "no strategy with several replicas that has run is left"
    return [
        patches.replace(owner, "zero_grad", _telling_of_clearing(owner.zero_grad), why, until)
        for owner in (torch.nn.Module, torch.optim.Optimizer)
    ]


#: Changed from a strategy's first run on.
_clearing = patches.WhileUsed(_replace_clearing)


@functools.lru_cache(maxsize=16)
def _telling_of_passes(engine: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(engine)
    def tell(outputs: Any, grad_outputs: Any, *args: Any, accumulate_grad: bool, **kwargs: Any) -> Any:
        run = functools.partial(engine, outputs, grad_outputs, *args, accumulate_grad=accumulate_grad, **kwargs)
        context = current_replica_context()
        if context is None or context.num_replicas_in_sync == 1:
            return run()
        _, create_graph, inputs = args[:3]
        gradients = context.strategy.gradients
        if accumulate_grad:
            gradients.before_backward(context, outputs, grad_outputs, create_graph=bool(create_graph))
            return run()
        mean = gradients.before_grad(context, outputs, grad_outputs, inputs)
        found = run()
        gradients.after_grad(context, mean, found)
        return found

    return tell


@functools.lru_cache(maxsize=16)
def _telling_of_clearing(zero_grad: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(zero_grad)
    def tell(*args: Any, **kwargs: Any) -> Any:
        result = zero_grad(*args, **kwargs)
        context = current_replica_context()
        if context is not None and context.num_replicas_in_sync > 1:
            context.strategy.gradients.ledger.sweep(context.local_id)
        return result

    return tell
