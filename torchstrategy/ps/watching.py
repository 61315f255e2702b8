"""What of the program is watched, to send it again when it has changed."""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from torchstrategy.ps.optimizers import hyper_parameters, step_hooks
from torchstrategy.ps.served import Served
from torchstrategy.ps.user_modules import is_sent_by_value
from torchstrategy.replicas import metric_states

__all__ = ["are_same", "state_of", "state_of_tensor", "weakly", "what_it_refers_to"]

#: Types of attributes of modules that workers follow.
_PLAIN = frozenset({bool, int, float, str, type(None)})
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)


def state_of(obj: Any) -> Any:
    """Return what of an object's state workers must follow; hashable."""
    if metric_states.is_metric(obj):
        return ()
    if isinstance(obj, nn.Module):
        return tuple(
            (
                id(m),
                *(item for item in vars(m).items() if type(item[1]) in _PLAIN),
                *((id(p), _trains(p)) for p in m._parameters.values() if p is not None),
            )
            for _, m in metric_states.modules_but_metrics(obj)
        )
    if isinstance(obj, Optimizer):
        trained = tuple(_trains(p) for group in obj.param_groups for p in group["params"])
        hooks = tuple((name, tuple(map(id, own.values()))) for name, own in step_hooks(obj).items())
        return repr(hyper_parameters(obj)), trained, hooks
    return ()


def state_of_tensor(tensor: Tensor) -> Any:
    """Return what changes when a tensor to which a function refers is another one for workers."""
    return tensor.binding.requires_grad if isinstance(tensor, Served) else (tensor._version, tensor.requires_grad)


def _trains(parameter: Tensor) -> bool:
    return parameter.binding.requires_grad if isinstance(parameter, Served) else parameter.requires_grad


def what_it_refers_to(fn: Any) -> list[Any]:
    """Return the objects that a function refers to by name, to notice when a name stands for another one.

    The program's own functions among them are sent with it, so what these refer to belongs to it.
    """
    found: list[Any] = []
    functions, seen = [fn], set()
    while functions:
        plain = functions.pop()
        plain = inspect.unwrap(plain.func if isinstance(plain, functools.partial) else plain)
        plain = plain.__func__ if isinstance(plain, types.MethodType) else plain
        code = getattr(plain, "__code__", None)
        if code is None or id(plain) in seen:
            continue
        seen.add(id(plain))
        cells = [_content(cell) for cell in plain.__closure__ or ()]
        names = [plain.__globals__.get(name) for name in _names_in(code)]
        own = [*cells, *names, plain.__defaults__, *(plain.__kwdefaults__ or {}).values()]
        found += own
        functions += [each for each in own if isinstance(each, _FUNCTIONS) and is_sent_by_value(each)]
    return found


@functools.lru_cache(maxsize=1024)
def _names_in(code: types.CodeType) -> tuple[str, ...]:
    """Return the names in a function's code, and in that of functions and comprehensions inside it."""
    inner = [_names_in(const) for const in code.co_consts if isinstance(const, types.CodeType)]
    return tuple(dict.fromkeys((*code.co_names, *(name for names in inner for name in names))))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def weakly(obj: Any) -> Callable[[], Any]:
    """Return what gives an object, without keeping it alive where that can be."""
    try:
        return weakref.ref(obj)
    except TypeError:
        return lambda: obj


def are_same(before: list[Callable[[], Any]] | None, now: list[Any]) -> bool:
    """Say whether what was watched is what there is now."""
    if before is None or len(before) != len(now):
        return False
    # A weak reference gives None for an object that is gone, which is not the None that a name stands for now.
    return all(a() is b and (b is not None or not isinstance(a, weakref.ref)) for a, b in zip(before, now, strict=True))
