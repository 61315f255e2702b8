"""Lets a run see when a replica calls ``backward`` or clears gradients, whichever way the program does it.

While a strategy with several replicas runs a function, ``torch.autograd.backward`` (which ``Tensor.backward`` calls)
and ``torch.autograd.grad`` tell of their calls; after the last run in progress they are torch's own again. From a
strategy's first run on ``Module.zero_grad`` and ``Optimizer.zero_grad`` do, until no such strategy is left: classes
that change in every run make Python look up the attributes of all modules anew.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torchstrategy.context import current_replica_context

__all__ = ["watched"]

_Replaced = dict[tuple[Any, str], tuple[Any, Any]]

_lock = threading.RLock()  # a strategy may be collected at any time
_num_runs = 0
#: The strategies that have begun a run.
_strategies: weakref.WeakSet[Any] = weakref.WeakSet()
#: For each replaced function torch's own and the one in its place: during runs, and as long as there are strategies.
_of_runs: _Replaced = {}
_of_strategies: _Replaced = {}


@contextlib.contextmanager
def watched(strategy: Any) -> Iterator[None]:
    """Let the current replica context hear of backward passes and of cleared gradients.

    Args:
        strategy: begins a run.
    """
    global _num_runs
    with _lock:
        _num_runs += 1
        if _num_runs == 1:
            _replace(_of_runs, torch.autograd, "backward", _telling_before)
            _replace(_of_runs, torch.autograd, "grad", functools.partial(_telling_after, "_after_computing"))
        if strategy not in _strategies:
            _strategies.add(strategy)
            weakref.finalize(strategy, _forget_strategy).atexit = False
            if not _of_strategies:
                for owner in (torch.nn.Module, torch.optim.Optimizer):
                    _replace(_of_strategies, owner, "zero_grad", functools.partial(_telling_after, "_after_clearing"))
    try:
        yield
    finally:
        with _lock:
            _num_runs -= 1
            if _num_runs == 0:
                _restore(_of_runs)


def _forget_strategy() -> None:
    with _lock:
        if not any(True for _ in _strategies):
            _restore(_of_strategies)


def _replace(
    replaced: _Replaced, owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    original = getattr(owner, name)
    replaced[owner, name] = original, wrap(original)
    setattr(owner, name, replaced[owner, name][1])


def _restore(replaced: _Replaced) -> None:
    for (owner, name), (original, ours) in replaced.items():
        if getattr(owner, name) is ours:  # else another's function, which calls ours
            setattr(owner, name, original)
    replaced.clear()


@functools.lru_cache(maxsize=16)
def _telling_before(backward: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(backward)
    def tell(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        context = current_replica_context()
        if context is not None and context.num_replicas_in_sync > 1:
            create_graph = kwargs.get("create_graph", args[1] if len(args) > 1 else False)
            context._before_backward(tensors, grad_tensors, create_graph=bool(create_graph))
        backward(tensors, grad_tensors, *args, **kwargs)

    return tell


@functools.lru_cache(maxsize=16)
def _telling_after(what: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def tell(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        context = current_replica_context()
        if context is not None and context.num_replicas_in_sync > 1:
            getattr(context, what)()
        return result

    return tell
