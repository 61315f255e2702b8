"""Groups of replicas take turns on the same recorded objects: each finds what it has made of them.

Optimizers' states are left alone: the first group makes the steps of all.
"""

from __future__ import annotations

import contextlib
import functools
import random
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchstrategy.gradients.ledger import GradientLedger
from torchstrategy.gradients.notes import Note, State
from torchstrategy.replicas.distributed_variables import DistributedVariable
from torchstrategy.replicas.fingerprints import SCALARS, attributes_of, is_of_library, is_recorded
from torchstrategy.replicas.module_tensors import TORCHS_OWN
from torchstrategy.replicas.record import Record
from torchstrategy.tpu.marks import get_mark, is_on_device
from torchstrategy.tpu.metrics import SpmdMetrics
from torchstrategy.tpu.region import Region
from torchstrategy.tpu.state import attribute_members
from torchstrategy.tpu.trace import Trace

__all__ = ["GroupTurns"]

#: A dictionary of an object's members, a key in it, and the way to what the member holds.
_Place = tuple[int, str, tuple[Any, ...]]


class _Value:
    """What a tensor held at some time.

    Of what all replicas should hold alike that is a plain tensor, a value of the graph that nothing writes to. Batch
    normalisation does write to plain tensors, so of buffers it is a copy, as it is of tensors on the host.

    Args:
        tensor: the tensor.
        region: knows its plain tensor.
    """

    def __init__(self, tensor: Tensor, region: Region) -> None:
        self.tensor = tensor
        self._region = region
        self._plain = region.plain(tensor) if is_on_device(tensor) else tensor
        self._version = tensor._version
        self._mark = get_mark(self._plain)
        self.is_local = self._mark is not None
        self._is_kept = self._plain is not tensor and _is_alike(tensor)
        self._held = self._plain if self._is_kept else tensor.detach().clone()
        if self.is_local and not self._is_kept:
            region.mark_local(self._held)

    def is_same(self, other: _Value) -> bool:
        """Say whether another value of the tensor is this one; if both were computed, nobody knows yet."""
        if self._plain is self.tensor:
            return bool(_equal(self._held, other._held))
        return self._plain is other._plain

    @property
    def value(self) -> Tensor:
        """What the tensor held, as a tensor of the program."""
        if not self._is_kept:
            return self._held
        wrapped: Tensor = torch._to_functional_tensor(self._held)
        return wrapped

    def put_back(self) -> None:
        """Let the tensor hold that again."""
        if self._is_kept:
            if self._region.plain(self.tensor) is self._plain:
                return
            self.tensor.data = self.value
        else:
            self.tensor.data = self._held.clone()
            if self._plain is not self.tensor:
                self._region.mark_shared(self.tensor)
                self._plain = self._region.plain(self.tensor)
                if self.is_local:  # as before: another mark would say that it was written to
                    self._region.mark_results(self._plain, self._mark)
        # What autograd has saved of the tensor was this value.
        torch._C._autograd._unsafe_set_version_counter((self.tensor,), (self._version,))


def _keep_content(value: Any) -> Callable[[], Any] | None:
    """Return what puts back what a container, an array or an object of the program's holds now."""
    if isinstance(value, (dict, list, set, deque)):
        return functools.partial(_refill, value, value.copy())
    if isinstance(value, np.ndarray):
        return functools.partial(np.copyto, value, value.copy()) if value.flags.writeable else None
    if isinstance(value, (type, types.FunctionType, types.ModuleType)) or is_recorded(value) or is_of_library(value):
        return None
    own = attributes_of(value)
    return functools.partial(_reset, value, own.copy()) if own else None


def _keep_generator(value: Any) -> Callable[[], Any] | None:
    """Return what sets a generator of random numbers on the host to where it is now."""
    if isinstance(value, torch.Generator) and value.device.type == "cpu":
        return functools.partial(value.set_state, value.get_state())
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return functools.partial(value.setstate, value.getstate())
    if isinstance(value, np.random.RandomState):
        return functools.partial(value.set_state, value.get_state())
    if isinstance(value, np.random.Generator):
        return functools.partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    return None


def _reset(obj: Any, attributes: dict[str, Any]) -> None:
    for name in attributes_of(obj).keys() - attributes.keys():
        object.__delattr__(obj, name)
    for name, value in attributes.items():  # in slots, too
        object.__setattr__(obj, name, value)


def _refill(container: Any, content: Any) -> None:
    container.clear()
    (container.extend if isinstance(container, (list, deque)) else container.update)(content)


class _Gradient(NamedTuple):
    """A parameter, its gradient when a turn ended, and what was known of that."""

    parameter: Tensor
    gradient: Tensor | None
    note: Note | None


class _Snapshot:
    """What one group has made of the recorded objects.

    Args:
        record: what the strategy's scopes recorded.
        trace: the call of ``run``.
        ledger: what the gradients are.
    """

    def __init__(self, record: Record, trace: Trace, ledger: GradientLedger) -> None:
        self._trace = trace
        self._ledger = ledger
        #: What puts back what containers, arrays and objects held.
        self._held: list[Callable[[], Any]] = []
        self.gradients: dict[int, _Gradient] = {}
        self.values: dict[_Place, _Value] = {}
        for obj in record:
            if isinstance(obj, Tensor):
                self._take((id(obj), "", ()), obj)
            elif isinstance(obj, nn.Module):
                for module in obj.modules():
                    for members in (module._buffers, module.__dict__, module._parameters):
                        self._take_members(module, members)

    def _take_members(self, module: nn.Module, members: dict[str, Any]) -> None:
        self._hold(members)
        for key, value in members.items():
            if key in TORCHS_OWN or type(value) in SCALARS:
                continue
            for path, item in attribute_members(module, value):
                if not isinstance(item, Tensor):
                    self._hold(item)
                elif not is_lazy(item):
                    self._take((id(members), key, path), item)

    def _hold(self, value: Any) -> None:
        put_back = _keep_generator(value) or _keep_content(value)
        if put_back is not None:
            self._held.append(put_back)

    def _take(self, place: _Place, tensor: Tensor) -> None:
        if isinstance(tensor, nn.Parameter) or tensor.requires_grad:
            self.gradients[id(tensor)] = _Gradient(tensor, tensor.grad, self._ledger.take(tensor))
        self.values[place] = _Value(tensor, self._trace.region)

    def restore(self, *, copies: bool = False) -> None:
        """Put everything back as it was when this was made.

        Args:
            copies: give out copies of the gradients, to which a backward pass adds in place.
        """
        for put_back in self._held:
            put_back()
        for parameter, gradient, note in self.gradients.values():
            parameter.grad = gradient if gradient is None or not copies else self._copy(gradient)
            self._ledger.put(parameter, note)
        for value in self.values.values():
            value.put_back()

    def _copy(self, gradient: Tensor) -> Tensor:
        copied = gradient.clone()
        return self._trace.region.mark_local(copied) if self._trace.is_local(gradient) else copied


class GroupTurns:
    """Tells a ``Runner`` what happens between the groups' turns.

    Args:
        record: what the strategy's scopes recorded.
        trace: the call of ``run``.
        metrics: told of each group's turn; it sees to the metrics' lists, which may differ in length and shapes.
        ledger: what the gradients are, of the group whose turn it is.
    """

    def __init__(self, record: Record, trace: Trace, metrics: SpmdMetrics, ledger: GradientLedger) -> None:
        self._record = record
        self._trace = trace
        self._ledger = ledger
        self._metrics = metrics
        self._left_alone = metrics.list_places
        self._at_entry = self._snapshot()
        self._group = 0
        self._own: dict[int, _Snapshot] = {}
        #: For each group the tensors that its replicas may hold other values of than other groups.
        self._changed: dict[int, set[_Place]] = {}
        #: By the ``id`` of a tensor, the value that all replicas hold unless this group has changed it.
        self._shared: dict[int, _Value] = {}
        self._seeds: dict[int, int] = {}
        #: What the first group's step was given, and what it has made of that.
        self._before_step: dict[int, _Value] = {}
        self._stepped: dict[int, _Value] = {}
        #: What two groups have written to a tensor of which all replicas should hold the same value.
        self._to_compare: list[tuple[_Value, _Value]] = []

    def has_changed(self, tensor: Tensor) -> bool:
        """Say whether the group whose turn it is has changed a tensor, so that replicas may differ in it."""
        return self._is_changed(_Value(tensor, self._trace.region))

    def _is_changed(self, value: _Value) -> bool:
        known = self._shared.get(id(value.tensor))
        return value.is_local or known is None or not known.is_same(value)

    def note_shared(self, tensor: Tensor) -> None:
        """Note that all replicas hold a tensor's present value."""
        self._shared[id(tensor)] = _Value(tensor, self._trace.region)

    @contextlib.contextmanager
    def step(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        """Let a group find what the first group's step makes of its parameters, in place of its own.

        Raises:
            RuntimeError: the group whose turn it is has given its replicas different values of a parameter.
        """
        is_first, region = self._group == 0, self._trace.region
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in parameters:
                value = _Value(parameter, region)
                if value.is_local:
                    raise RuntimeError(
                        f"An optimizer can't update a variable of shape {tuple(parameter.shape)} that replicas have "
                        "assigned values of their own, when the shares of the batch differ in size. Make it with an "
                        "aggregation, such as ts.Variable(..., aggregation=ts.VariableAggregation.MEAN), or let every "
                        "batch be a multiple of the number of replicas (drop_remainder=True)."
                    )
                if is_first:
                    self._before_step[id(parameter)] = value
                elif id(parameter) in self._before_step:
                    self._compare(self._before_step[id(parameter)], value)
        yield
        with region.paused(), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for parameter in parameters:
                if is_first:
                    self._stepped[id(parameter)] = _Value(parameter, region)
                elif id(parameter) in self._stepped:
                    self._stepped[id(parameter)].put_back()
                self.note_shared(parameter)

    @contextlib.contextmanager
    def merging(self) -> Iterator[None]:
        """Show replica 0's values to a merge function; what that writes is for all replicas."""
        region, first = self._trace.region, self._own[0]
        with region.paused(), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            first.restore()
        yield
        with region.paused(), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for place, before in first.values.items():
                now = _Value(before.tensor, region)
                if now.is_same(before):
                    continue
                for group, own in self._own.items():
                    if place in own.values and own.values[place].tensor is now.tensor:
                        own.values[place] = now
                        self._changed[group].discard(place)

    def starts(self, local_id: int) -> None:
        """Let a group find what it has made, and go on with its random numbers."""
        self._group = local_id
        if local_id in self._seeds:
            self._trace.runtime.set_seed(self._seeds[local_id])
        with self._trace.region.paused(), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            own = self._own.get(local_id)
            if own is None:
                self._at_entry.restore(copies=True)
            else:
                own.restore()
            values, changed = (own or self._at_entry).values, self._changed.get(local_id, ())
            self._shared = {id(value.tensor): value for place, value in values.items() if place not in changed}

    def ends(self, local_id: int, *, failed: bool) -> None:
        """Note what a group has made."""
        self._seeds[local_id] = self._trace.runtime.get_seed()
        if not failed:
            own = self._own[local_id] = self._snapshot()
            self._changed[local_id] = {place for place, value in own.values.items() if self._is_changed(value)}
            self._metrics.note(local_id)

    def undo(self) -> None:
        """Put everything back as it was before the first turn."""
        with self._trace.region.paused(), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            self._at_entry.restore()

    def join(self) -> list[tuple[Tensor, Tensor]]:
        """Give every replica what its own group has made.

        Returns:
            Tensors of which all replicas should hold the same value although the groups have written to them, each
            with a bool that says whether the groups' values differ.
        """
        own = [self._own[group] for group in range(self._trace.groups.count)]
        with self._trace.region.paused(), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            own[0].restore()
            for key, first in own[0].gradients.items():
                column = [snapshot.gradients.get(key, first._replace(gradient=None, note=None)) for snapshot in own]
                if any(entry.gradient is not None and not _is_sum(entry.note) for entry in column):
                    self._join_gradients(first.parameter, column)
            for place in own[0].values:
                values = [snapshot.values[place] for snapshot in own if place in snapshot.values]
                is_changed = any(place in changed for changed in self._changed.values())
                if is_changed and len(values) == len(own) and place[:2] not in self._left_alone:
                    self._join(place[1], values)
            return [(first.tensor, ~_equal(first.value, other.value)) for first, other in self._to_compare]

    def _snapshot(self) -> _Snapshot:
        with self._trace.region.paused(), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            return _Snapshot(self._record, self._trace, self._ledger)

    def _join_gradients(self, parameter: Tensor, column: Sequence[_Gradient]) -> None:
        example, note = next((entry.gradient, entry.note) for entry in column if entry.gradient is not None)
        values = [torch.zeros_like(example) if entry.gradient is None else entry.gradient for entry in column]
        parameter.grad = self._trace.region.mark_local(self._trace.select(values))
        self._ledger.put(parameter, note)

    def _join(self, name: str, values: Sequence[_Value]) -> None:
        first = values[0]
        shapes = [tuple(value.value.shape) for value in values]
        if len(set(shapes)) > 1:
            raise RuntimeError(
                f"{name!r} of a recorded object has another shape on some replicas than on others: {shapes}. What "
                "replicas of a TPU keep from one run to the next must not follow the size of their share of the batch."
            )
        is_alike = _is_alike(first.tensor) and not any(value.is_local for value in values)
        if is_alike or not is_on_device(first.tensor):
            for value in values[1:]:
                self._compare(first, value)
        else:
            first.tensor.data = self._trace.select([value.value for value in values])
            self._trace.region.mark_local(first.tensor)

    def _compare(self, first: _Value, other: _Value) -> None:
        if not first.is_same(other):
            self._to_compare.append((first, other))


def _is_alike(tensor: Tensor) -> bool:
    """Say whether all replicas should hold the same value of a tensor."""
    if isinstance(tensor, DistributedVariable):
        return not tensor._writes_locally()
    return isinstance(tensor, nn.Parameter) or tensor.requires_grad


def _equal(first: Tensor, other: Tensor) -> Tensor:
    """Say whether two tensors are equal, a 0-d bool; nan equals nan."""
    if first.shape != other.shape:
        return torch.zeros((), dtype=torch.bool, device=first.device)
    return ((first == other) | ((first != first) & (other != other))).all()


def _is_sum(note: Note | None) -> bool:
    return note is not None and note.state in (State.SUMMED, State.APPLIED)
