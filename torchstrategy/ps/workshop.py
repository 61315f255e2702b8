"""A worker's part: it loads what the coordinator has sent, and calls functions with its own copies.

Before a call the variables that the function's objects have are pulled, those that changed since the last one. What the
call did to buffers is added on the servers, and what metrics accumulated goes back with the result.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchstrategy.base.context import Frame, pop_frame, push_frame
from torchstrategy.base.labels import label
from torchstrategy.base.options import VariableAggregation, VariableSynchronization
from torchstrategy.ps.behind import PulledParameter
from torchstrategy.ps.bindings import Binding, Bindings, Kind, RefreshWhenCalled, can_require_grad
from torchstrategy.ps.client import ParameterClient
from torchstrategy.ps.layout import VariableSpec
from torchstrategy.ps.pickling import split_header
from torchstrategy.ps.served import ServedParameter
from torchstrategy.ps.served_optimizers import OptimizerLink
from torchstrategy.ps.served_variables import make_served, served_class
from torchstrategy.replicas import metric_states
from torchstrategy.replicas.variables import VariableOptions

__all__ = ["Outcome", "Workshop"]

_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})


class Outcome(NamedTuple):
    """What a function's call gave.

    Args:
        value: what it returned.
        side: what metrics accumulated, by object and metric: number of updates and states; ``None`` for nothing.
    """

    value: Any
    side: dict[str, Any] | None


class _Buffer(NamedTuple):
    """A buffer of a module, with its tensor that is on the servers."""

    module: nn.Module
    name: str
    tensor: Tensor

    def take_back(self) -> None:
        """Where a function put another tensor in its place, take over its value."""
        own, found = self.tensor, self.module._buffers.get(self.name)
        if found is own:
            return
        self.module._buffers[self.name] = own
        if found is None or found.shape != own.shape:
            received = "None" if found is None else f"shape {tuple(found.shape)}"
            raise RuntimeError(
                f"A function on a worker changed the buffer {self.name!r} of a {type(self.module).__name__} from shape "
                f"{tuple(own.shape)} to {received}, but on the parameter servers it keeps its shape."
            )
        with torch.no_grad():
            own.copy_(found)


class _Uses:
    """What objects and functions refer to."""

    def __init__(self) -> None:
        self.variables: dict[int, Binding] = {}
        #: Which of them train.
        self.trains: dict[int, bool] = {}
        #: Buffers of modules, by the modules' names.
        self.buffers: dict[str, list[_Buffer]] = {}
        #: Metrics and modules by their names.
        self.objects: dict[str, Any] = {}
        #: What makes the objects again what they were when they came, by the objects' names.
        self.undo: dict[str, Callable[[], None]] = {}

    def add(self, other: _Uses) -> None:
        """Add what something else refers to."""
        self.variables |= other.variables
        self.trains |= other.trains
        self.buffers |= other.buffers
        self.objects |= other.objects
        self.undo |= other.undo


class _Loaded(NamedTuple):
    """An object or function, and what it refers to."""

    obj: Any
    uses: _Uses


class Workshop:
    """Loads and calls what one coordinator sends.

    Args:
        strategy: stands for the coordinator's strategy here.
        client: talks to the parameter servers.
    """

    def __init__(self, strategy: Any, client: ParameterClient) -> None:
        self.strategy = strategy
        self.bindings = Bindings(client, strategy.placement.devices[0], is_coordinator=False)
        self._loaded: dict[str, _Loaded] = {}
        self._tensors: dict[int, Tensor] = {}
        self._binding_of: dict[int, Binding] = {}
        self._kinds: dict[int, Kind] = {}
        self._specs: dict[int, VariableSpec] = {}

    def define(self, message: Any, resources: Mapping[int, Any]) -> None:
        """Load a definition.

        Args:
            message: what ``Shipper.definition`` returned.
            resources: this worker's datasets and iterators by their numbers.

        Raises:
            ValueError: it needs a definition that was not sent.
            Exception: what loading raises, such as ``ImportError`` for a package that is not installed here.
        """
        fields = message.fields
        loader = self._loader(fields, message.blobs[0], resources)
        obj = loader.load()
        name, uses = fields["name"], loader.uses
        if fields["kind"] != "function":
            uses.objects[name] = obj
        if isinstance(obj, nn.Module):
            uses.buffers[name] = self._buffers_of(obj)
            uses.undo[name] = _undo_of(obj)
            RefreshWhenCalled(obj, self.bindings, [b for b in uses.variables.values() if b.kind is Kind.PARAMETER])
        elif isinstance(obj, Optimizer):
            link = OptimizerLink(obj, int(name[1:]), self.bindings, self.binding)
            link.attach()
            uses.undo[name] = link.undo_changes
        for old in fields["replaces"]:
            self._loaded.pop(old, None)
        self._loaded[fields["key"]] = _Loaded(obj, uses)

    def load(self, blob: bytes, resources: Mapping[int, Any]) -> Any:
        """Return an object that the coordinator has pickled.

        Args:
            blob: what ``Shipper.value`` returned.
            resources: this worker's datasets and iterators by their numbers.
        """
        return self._loader(*split_header(blob), resources).load()

    def run(self, key: str, arguments: bytes, resources: Mapping[int, Any]) -> Outcome:
        """Call a function.

        Args:
            key: the function's definition.
            arguments: what ``Shipper.arguments`` returned.
            resources: this worker's datasets and iterators by their numbers.

        Raises:
            ValueError: a definition was not sent.
            Exception: what the function raises.
        """
        function, uses = self._definition(key), _Uses()
        uses.add(function.uses)
        args: tuple[Any, ...] = ()
        kwargs: dict[str, Any] = {}
        if arguments:
            loader = self._loader(*split_header(arguments), resources)
            args, kwargs = loader.load()
            uses.add(loader.uses)
        of_modules = [buffer for own in uses.buffers.values() for buffer in own]
        for number, own in uses.trains.items():  # another version may have been loaded since
            self.tensor(number, own, "")
        for undo in uses.undo.values():
            undo()
        self.bindings.forget_gradients()
        self.bindings.mark_stale()
        variables = uses.variables.values()
        pulled = [b for b in variables if b.kind in (Kind.PARAMETER, Kind.BUFFER)]
        self.bindings.refresh(pulled)
        # A variable may be written only, so it is pulled when it is read.
        self.bindings.pulled_together = [b for b in variables if b.kind is Kind.VARIABLE and _trains(b)]
        before = {b: b.local.clone() for b in pulled if b.kind is Kind.BUFFER and b.local is not None}
        metrics = {name: obj for name, obj in uses.objects.items() if metric_states.is_metric(obj)}
        for metric in metrics.values():
            metric.reset()
        frame = Frame(self.strategy, None)
        push_frame(frame)
        try:
            with label("function", getattr(function.obj, "__name__", "")):
                value = function.obj(*args, **kwargs)
            for buffer in of_modules:
                buffer.take_back()
            self.bindings.write_back(variables)
        except BaseException:
            for buffer in of_modules:
                buffer.module._buffers[buffer.name] = buffer.tensor
            for binding in variables:
                binding.versions = None  # pulled anew before the next use, as if this call had not been
                binding.note()
            raise
        finally:
            pop_frame(frame)
        self._push_buffers(before)
        return Outcome(value, _states(metrics))

    def forget(self, keys: Iterable[str]) -> None:
        """Drop definitions that nothing refers to any more."""
        for key in keys:
            self._loaded.pop(key, None)

    def binding(self, tensor: Tensor) -> Binding | None:
        """Return the binding of one of this worker's tensors."""
        return self._binding_of.get(id(tensor))

    def tensor(self, variable_id: int, trains: bool, name: str) -> Tensor:  # noqa: FBT001 - of a reference
        """Return this worker's tensor for a variable."""
        tensor = self._tensors.get(variable_id)
        if tensor is None:
            tensor = self._tensors[variable_id] = self._make(variable_id, trains, name)
            self._binding_of[id(tensor)] = self.bindings.by_id[variable_id]
        elif tensor.requires_grad != trains:
            tensor.requires_grad_(trains)
        return tensor

    def _make(self, variable_id: int, trains: bool, name: str) -> Tensor:  # noqa: FBT001 - of a reference
        spec, kind = self._specs[variable_id], self._kinds[variable_id]
        device = self.bindings.device
        if kind is Kind.PARAMETER:
            local = PulledParameter(torch.empty(spec.shape, dtype=spec.dtype, device=device), trains)
            self.bindings.add(spec, kind, local).requires_grad = trains
            return local
        if kind is Kind.BUFFER:
            buffer = torch.zeros(spec.shape, dtype=spec.dtype, device=device)
            self.bindings.add(spec, kind, buffer)
            return buffer
        binding = self.bindings.add(spec, kind)
        binding.requires_grad = trains
        if kind is Kind.ROWS:
            return make_served(ServedParameter, self.bindings, binding)  # type: ignore[no-any-return]
        options = VariableOptions(name, trains, VariableSynchronization.AUTO, VariableAggregation.NONE)
        return make_served(served_class(spec), self.bindings, binding, options)  # type: ignore[no-any-return]

    def _buffers_of(self, root: nn.Module) -> list[_Buffer]:
        return [
            _Buffer(module, name, buffer)
            for module in root.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and self.binding(buffer) is not None
        ]

    def _push_buffers(self, before: dict[Binding, Tensor]) -> None:
        """Add to the buffers on the servers what the call changed: others may have changed them meanwhile."""
        changes = []
        for binding, old in before.items():
            local = binding.local
            if local is None or torch.equal(local, old):
                continue
            new = local.detach()
            if _is_sum(old, new):
                changes.append((binding.spec, "assign_add", new - old))
            else:
                changes.append((binding.spec, "assign", new))
            binding.versions = None
        if changes:
            self.bindings.client.update_many(changes)

    def _loader(self, header: Mapping[str, Any], pickled: bytes, resources: Mapping[int, Any]) -> _Loader:
        """Return what loads a pickle, given what it refers to."""
        for row, kind in zip(header["specs"], header["kinds"], strict=True):
            spec = VariableSpec.from_json(row)
            self._specs[spec.id], self._kinds[spec.id] = spec, Kind(kind)
        uses = _Uses()
        for key in header["uses"]:
            uses.add(self._definition(key).uses)
        return _Loader(self, pickled, uses, resources)

    def _definition(self, key: str) -> _Loaded:
        try:
            return self._loaded[key]
        except KeyError:
            raise ValueError(f"The coordinator refers to {key!r}, which it has not sent to this worker.") from None


class _Loader(pickle.Unpickler):
    """Puts this worker's own objects in the place of references.

    Args:
        workshop: has the tensors and the strategy.
        blob: the pickle.
        uses: what the definitions that it needs refer to; it adds what it refers to itself.
        resources: datasets and iterators by their numbers.
    """

    def __init__(self, workshop: Workshop, blob: bytes, uses: _Uses, resources: Mapping[int, Any]) -> None:
        super().__init__(io.BytesIO(blob))
        self.uses = uses
        self._workshop = workshop
        self._resources = resources

    def persistent_load(self, reference: Any) -> Any:
        kind, *rest = reference
        if kind == "strategy":
            return self._workshop.strategy
        if kind == "tensor":
            tensor = self._workshop.tensor(*rest)
            self.uses.variables[rest[0]] = self._workshop.bindings.by_id[rest[0]]
            self.uses.trains[rest[0]] = rest[1]
            return tensor
        if kind == "object" and rest[0] in self.uses.objects:
            root, path = self.uses.objects[rest[0]], rest[1]
            return root.get_submodule(path) if path else root
        if kind == "resource" and rest[0] in self._resources:
            return self._resources[rest[0]]
        raise ValueError(f"The coordinator refers to the {kind} {rest}, which this worker does not have.")


def _undo_of(root: nn.Module) -> Callable[[], None]:
    """Return what takes back what functions do to plain attributes, such as ``root.eval()`` to the training mode.

    They are what they were when the function was scheduled, whatever ran on this worker before. What has become
    something else, such as a tensor that is kept for the next call, stays.
    """
    known = [
        (vars(module), {name: value for name, value in vars(module).items() if type(value) in _PLAIN})
        for _, module in metric_states.modules_but_metrics(root)
    ]

    def undo() -> None:
        for attributes, before in known:
            for name, value in before.items():
                now = attributes.get(name)
                if now is not value and type(now) in _PLAIN:
                    attributes[name] = value

    return undo


def _is_sum(old: Tensor, new: Tensor) -> bool:
    """Say whether a value can be given as what is to be added to the old one: not from infinity, or from far away."""
    if old.dtype == torch.bool:
        return False
    return not can_require_grad(old) or torch.allclose(old + (new - old), new, rtol=1e-3, equal_nan=False)


def _trains(binding: Binding) -> bool:
    return binding.spec.trainable and not binding.spec.is_sharded


def _states(metrics: dict[str, Any]) -> dict[str, Any] | None:
    side = {}
    for name, metric in metrics.items():
        states = {part: tuple(state) for part, state in metric_states.own_states(metric).items() if state.num_updates}
        if states:
            side[name] = states
    return side or None
