"""Pickles with references in the place of what the coordinator and the workers share."""

from __future__ import annotations

import io
import json
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchstrategy.ps.optimizer_updates import attributes_of
from torchstrategy.ps.served import Served
from torchstrategy.ps.served_optimizers import hyper_parameters, make_worker_optimizer, step_hooks
from torchstrategy.ps.served_variables import ServedVariable
from torchstrategy.ps.user_modules import CodePickler, pickled_by_value
from torchstrategy.replicas import metric_states
from torchstrategy.replicas.record import owner

__all__ = ["Pickled", "pickle_with_references", "split_header", "with_header"]


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
