"""Pickles with references in the place of what the coordinator and the workers share, and what makes one outdated."""

from __future__ import annotations

import enum
import functools
import inspect
import io
import itertools
import json
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchstrategy.ps.bindings import version_of
from torchstrategy.ps.optimizer_updates import as_numbers, attributes_of
from torchstrategy.ps.served import Served
from torchstrategy.ps.served_optimizers import hyper_parameters, make_worker_optimizer, step_hooks
from torchstrategy.ps.served_variables import ServedVariable
from torchstrategy.ps.user_modules import CodePickler, is_sent_by_value, pickled_by_value
from torchstrategy.replicas import metric_states
from torchstrategy.replicas.record import owner

__all__ = [
    "Pickled",
    "are_same",
    "pickle_with_references",
    "split_header",
    "state_of",
    "state_of_watched",
    "weakly",
    "what_it_refers_to",
    "with_header",
]

_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
#: What of a module's attributes workers follow: these, tensors, what is numbered, and containers of them. Of any other
#: object workers have what it was when they got the module.
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size})
_NUMBERED = (*_FUNCTIONS, types.BuiltinFunctionType, nn.Module, enum.Enum)
_CONTAINERS = (dict, list, tuple, set, frozenset)
_MOST_FOLLOWED = 100  # entries of a container, which are gone through in every `schedule`
_MAX_DEPTH = 3
_TABLES = frozenset({dict, OrderedDict, set})  # of hooks and members
#: By identity, which another object may have later: a reference, and a number that no other object ever has.
_numbered: dict[int, tuple[Any, int]] = {}
_numbers = itertools.count()


class Pickled(NamedTuple):
    """A pickle and what it refers to, which it does not keep alive: objects keep their strategy."""

    blob: bytes
    objects: tuple[weakref.ref[Any], ...]
    specs: list[Any]
    kinds: list[str]


def pickle_with_references(obj: Any, what: str, strategy: Any, name_of: Callable[[Any], str]) -> Pickled:
    """Pickle an object of the program.

    Args:
        obj: the object; recorded objects in it become references.
        what: what error messages call it.
        strategy: the coordinator's strategy.
        name_of: returns the name by which workers know a recorded object.

    Raises:
        TypeError: it can't be sent.
        ValueError: it holds a ``RemoteValue``, or what belongs to another strategy.
    """
    buffer = io.BytesIO()
    with pickled_by_value():
        pickler = _Pickler(strategy, name_of, buffer, obj)
        try:
            pickler.dump(obj)
        except _CantBeSentError as error:
            raise TypeError(str(error)) from None
        except (RecursionError, ValueError, ImportError, NotImplementedError):
            raise
        except Exception as error:
            why = str(error).rstrip(".")
            raise TypeError(
                f"{what[0].upper()}{what[1:]} can't be sent to the workers: {why}. Open files, connections and "
                "locks stay in their process: make them inside the function."
            ) from error
    bindings = [tensor.binding for tensor in pickler.tensors.values()]
    return Pickled(
        buffer.getvalue(),
        tuple(weakref.ref(found) for found in pickler.objects.values()),
        [binding.spec.to_json() for binding in bindings],
        [binding.kind.value for binding in bindings],
    )


def with_header(pickled: Pickled, needs: Sequence[str]) -> bytes:
    """Return a pickle with what it refers to before it."""
    header = {"uses": list(needs), "specs": pickled.specs, "kinds": pickled.kinds}
    return json.dumps(header).encode() + b"\n" + pickled.blob


def split_header(blob: bytes) -> tuple[dict[str, Any], bytes]:
    """Return what ``Shipper.value`` has put before a pickle, and the pickle."""
    header, _, pickled = blob.partition(b"\n")
    return json.loads(header), pickled


class _CantBeSentError(TypeError):
    """Says itself what can't be sent."""


class _Pickler(CodePickler):
    """Writes references in the place of what is shared, and notes what they refer to."""

    def __init__(self, strategy: Any, name_of: Callable[[Any], str], buffer: io.BytesIO, root: Any) -> None:
        super().__init__(buffer)
        self.objects: dict[int, Any] = {}
        self.tensors: dict[int, Served] = {}
        self._strategy = strategy
        self._name_of = name_of
        self._root = root

    def persistent_id(self, obj: Any) -> Any:
        if obj is self._strategy:
            return ("strategy",)
        if isinstance(obj, Served):
            return self._served(obj)
        if obj is self._root or isinstance(obj, (Tensor, type)):
            return None
        kind = type(obj)
        if getattr(kind, "_ts_is_remote_value", False):
            raise ValueError(
                "A RemoteValue can't be an argument: workers don't see each other's results. Give the function "
                "`value.fetch()` or `value.get()`."
            )
        if hasattr(kind, "_ts_resource_id"):
            return ("resource", obj._ts_resource_id)
        self._take_up(obj)
        if owner(obj) is self._strategy:
            return self._reference(obj)
        if owner(self._root) is self._strategy:
            return None  # part of what was made in the scope, such as a copy that its module made
        if isinstance(obj, nn.Module) and any(isinstance(tensor, Served) for tensor in obj._parameters.values()):
            raise _CantBeSentError(
                f"The {kind.__name__} was made outside the scope of the ParameterServerStrategy, or is a copy, but "
                "its parameters are on the servers, such as by an optimizer that was made inside: workers could not "
                "follow its buffers and its training mode. Make the module inside `with strategy.scope():`."
            )
        return None

    def _take_up(self, obj: Any) -> None:
        """Take up an optimizer or a metric that was made outside the scope."""
        if isinstance(obj, Optimizer) and owner(obj) in (None, self._strategy):
            self._strategy._adopt_optimizer(obj)
        elif isinstance(obj, nn.Module) and owner(obj) is None and metric_states.is_metric(obj):
            self._strategy.hosting.adopt_metric(obj)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Optimizer):
            return _reduce_optimizer(obj)
        if isinstance(obj, nn.Module) and parametrize.is_parametrized(obj):
            return _reduce_parametrized(obj)
        return super().reducer_override(obj)

    def _served(self, tensor: Served) -> Any:
        binding = tensor.binding
        if tensor.bindings is not self._strategy.bindings:
            raise ValueError(f"The variable {binding.spec.name!r} belongs to another ParameterServerStrategy.")
        self.tensors[binding.spec.id] = tensor
        name = tensor.options.name if isinstance(tensor, ServedVariable) else ""
        return ("tensor", binding.spec.id, tensor.requires_grad, name)

    def _reference(self, obj: Any) -> Any:
        if isinstance(obj, LRScheduler):
            raise _CantBeSentError(
                f"A function for the workers uses the {type(obj).__name__}: each worker would count its own steps. "
                "Call scheduler.step() in the coordinator's program; what it schedules from then on has the new rate."
            )
        root, path = self._strategy.hosting.root_of(obj)
        if root is self._root:
            return None  # a child of what is being pickled
        self.objects[id(root)] = root
        return ("object", self._name_of(root), path)


def _reduce_parametrized(module: nn.Module) -> Any:
    """Return what makes the class anew that ``torch.nn.utils.parametrize`` gave to a module."""
    return _make_parametrized, (type(module).__bases__[0], tuple(module.parametrizations)), dict(vars(module))  # type: ignore[arg-type]


def _make_parametrized(cls: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    module = cls.__new__(cls)
    parametrize._inject_new_class(module)
    for name in names:
        parametrize._inject_property(module, name)
    return module


def _reduce_optimizer(optimizer: Optimizer) -> Any:
    groups = [
        {"params": list(group["params"]), **hyper}
        for group, hyper in zip(optimizer.param_groups, hyper_parameters(optimizer), strict=True)
    ]
    attributes = {**attributes_of(optimizer), **step_hooks(optimizer)}
    return make_worker_optimizer, (type(optimizer), dict(optimizer.defaults), groups, attributes)


def state_of(obj: Any) -> Any:
    """Return what of an object's state workers must follow; hashable."""
    if metric_states.is_metric(obj):
        return ()
    if isinstance(obj, nn.Module):
        return tuple(_state_of_module(module) for _, module in metric_states.modules_but_metrics(obj))
    if isinstance(obj, Optimizer):
        trained = tuple(_trains(p) for group in obj.param_groups for p in group["params"])
        hooks = tuple((name, tuple(map(_number_of, own.values()))) for name, own in step_hooks(obj).items())
        hyper = [{name: as_numbers(value) for name, value in group.items()} for group in hyper_parameters(obj)]
        return repr(hyper), trained, hooks  # a tensor's own repr leaves digits out
    return ()


def _state_of_module(module: nn.Module) -> Any:
    """Return the state of one module; this is done with each one in every `schedule`."""
    state: list[Any] = []
    for name, value in vars(module).items():
        kind = type(value)
        if kind in _PLAIN:
            state += name, value
        elif kind in _TABLES and not value:
            continue
        elif name == "_modules":
            state += *value, *map(_number_of, value.values())
        elif name in ("_parameters", "_buffers"):
            state += value
            state += [
                (_number_of(own), own.binding.requires_grad) if isinstance(own, Served) else _mark(own)
                for own in value.values()
            ]
        else:
            state += name, _mark(value)
    return tuple(state)


def _mark(value: Any, depth: int = 0) -> Any:
    """Return what is another one when a value is another one for workers; hashable."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Tensor):
        if isinstance(value, Served):
            return _number_of(value), value.binding.requires_grad
        return _number_of(value), version_of(value), value.requires_grad
    if isinstance(value, _NUMBERED):
        return _number_of(value)
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tobytes() if value.size <= _MOST_FOLLOWED else _number_of(value)
    if not isinstance(value, _CONTAINERS) or depth == _MAX_DEPTH:
        return None
    if len(value) > _MOST_FOLLOWED:
        return len(value)
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return tuple((key if type(key) in _PLAIN else None, _mark(item, depth + 1)) for key, item in items)


def _number_of(obj: Any) -> int:
    known = _numbered.get(id(obj))
    if known is not None and known[0]() is obj:
        return known[1]
    key, number = id(obj), next(_numbers)

    def forget(gone: Any) -> None:
        if _numbered.get(key, (None, -1))[0] is gone:
            del _numbered[key]

    try:
        _numbered[key] = weakref.ref(obj, forget), number
    except TypeError:  # builtin functions and the like live for ever anyway
        _numbered[key] = weakly(obj), number
    return number


def state_of_watched(obj: Any) -> Any:
    """Return what changes when a tensor or module to which a function refers is another one for workers."""
    return _mark(obj) if isinstance(obj, Tensor) else state_of(obj)


def _trains(parameter: Tensor) -> bool:
    return parameter.binding.requires_grad if isinstance(parameter, Served) else parameter.requires_grad


def what_it_refers_to(fn: Any) -> list[Any]:
    """Return the objects that a function refers to by name, to notice when a name stands for another one.

    The program's own functions among them are sent with it, so what these refer to belongs to it.
    """
    found: list[Any] = [fn] if isinstance(fn, nn.Module) else []
    functions, seen = [fn], set()
    while functions:
        plain = functions.pop()
        plain = inspect.unwrap(plain.func if isinstance(plain, functools.partial) else plain)
        if isinstance(plain, types.MethodType):
            found.append(plain.__self__)
            plain = plain.__func__
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
