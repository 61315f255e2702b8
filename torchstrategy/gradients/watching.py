"""Lets a run see when a replica calls ``backward`` or clears gradients, whichever way the program does it.

While a strategy with several replicas runs a function, four functions of torch tell of their calls:
``torch.autograd.backward`` (which ``Tensor.backward`` calls), ``torch.autograd.grad``, ``Module.zero_grad`` and
``Optimizer.zero_grad``. After the last run in progress they are torch's own again.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torchstrategy.context import current_replica_context

__all__ = ["watched"]

_lock = threading.Lock()
_num_runs = 0
#: For each replaced function torch's own and the one in its place.
_replaced: dict[tuple[Any, str], tuple[Any, Any]] = {}


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Let the current replica context hear of backward passes and of cleared gradients."""
    global _num_runs
    with _lock:
        _num_runs += 1
        if _num_runs == 1:
            _replace(torch.autograd, "backward", _telling_before)
            _replace(torch.autograd, "grad", functools.partial(_telling_after, "_after_computing"))
            for owner in (torch.nn.Module, torch.optim.Optimizer):
                _replace(owner, "zero_grad", functools.partial(_telling_after, "_after_clearing"))
    try:
        yield
    finally:
        with _lock:
            _num_runs -= 1
            if _num_runs == 0:
                for (owner, name), (original, ours) in _replaced.items():
                    if getattr(owner, name) is ours:  # else another's function, which calls ours
                        setattr(owner, name, original)
                _replaced.clear()


def _replace(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = getattr(owner, name)
    _replaced[owner, name] = original, wrap(original)
    setattr(owner, name, _replaced[owner, name][1])


def _telling_before(backward: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(backward)
    def tell(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        context = current_replica_context()
        if context is not None and context.num_replicas_in_sync > 1:
            create_graph = kwargs.get("create_graph", args[1] if len(args) > 1 else False)
            context._before_backward(tensors, grad_tensors, create_graph=bool(create_graph))
        backward(tensors, grad_tensors, *args, **kwargs)

    return tell


def _telling_after(what: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def tell(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        context = current_replica_context()
        if context is not None and context.num_replicas_in_sync > 1:
            getattr(context, what)()
        return result

    return tell
