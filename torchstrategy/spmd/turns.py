"""Groups of replicas take turns on the same recorded objects: each finds its own gradients, buffers and attributes.

Parameters and the optimizers' states are the same for all groups and are left alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchstrategy.gradients.ledger import GradientLedger, Note, State
from torchstrategy.replicas.distributed_variables import DistributedVariable
from torchstrategy.replicas.record import Record
from torchstrategy.spmd.metrics import SpmdMetrics
from torchstrategy.spmd.trace import Trace

__all__ = ["GroupTurns"]

#: A dictionary of an object's members, a key in it, and a position if the member is a list.
_Place = tuple[int, str, int]


class _Value(NamedTuple):
    """What a tensor held when a turn ended."""

    tensor: Tensor
    value: Tensor
    is_local: bool


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
        self._members: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.gradients: dict[int, _Gradient] = {}
        self.values: dict[_Place, _Value] = {}
        for obj in record:
            if isinstance(obj, Tensor):
                self._take((id(obj), "", 0), obj)
            elif isinstance(obj, nn.Module):
                for module in obj.modules():
                    for members in (module._buffers, module.__dict__, module._parameters):
                        self._take_members(members)

    def _take_members(self, members: dict[str, Any]) -> None:
        self._members.append((members, {k: list(v) if isinstance(v, list) else v for k, v in members.items()}))
        for key, value in members.items():
            for index, item in enumerate(value if isinstance(value, list) else [value]):
                if isinstance(item, Tensor):
                    self._take((id(members), key, index), item)

    def _take(self, place: _Place, tensor: Tensor) -> None:
        needs_grad = isinstance(tensor, nn.Parameter) or tensor.requires_grad
        if needs_grad:
            self.gradients[id(tensor)] = _Gradient(tensor, tensor.grad, self._ledger.take(tensor))
        if not needs_grad or (isinstance(tensor, DistributedVariable) and tensor._writes_locally()):
            value, is_local = tensor.detach().clone(), self._trace.is_local(tensor)
            self.values[place] = _Value(tensor, self._trace.region.mark_local(value) if is_local else value, is_local)

    def restore(self, *, copies: bool = False) -> None:
        """Put everything back as it was when this was made.

        Args:
            copies: give out copies of the gradients, to which a backward pass adds in place.
        """
        for members, own in self._members:
            members.clear()
            members.update({k: list(v) if isinstance(v, list) else v for k, v in own.items()})
        for parameter, gradient, note in self.gradients.values():
            parameter.grad = gradient if gradient is None or not copies else self._copy(gradient)
            self._ledger.put(parameter, note)
        for tensor, value, is_local in self.values.values():
            tensor.data = value.clone()
            (self._trace.region.mark_local if is_local else self._trace.region.mark_shared)(tensor)

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
        self._own: dict[int, _Snapshot] = {}
        #: For each group the tensors that its replicas may hold other values of than other groups.
        self._changed: dict[int, set[_Place]] = {}
        self._versions: dict[int, int] = {}
        self._seeds: dict[int, int] = {}
        #: What the first group's step has made of variables to which replicas could also write for themselves.
        self._stepped: dict[int, Tensor] = {}

    def has_changed(self, tensor: Tensor) -> bool:
        """Say whether the group whose turn it is has changed a tensor, so that replicas may differ in it."""
        return self._trace.is_local(tensor) or self._versions.get(id(tensor)) != tensor._version

    def note_shared(self, tensor: Tensor) -> None:
        """Note that all replicas hold a tensor's present value."""
        self._versions[id(tensor)] = tensor._version

    def check_step(self, parameters: Sequence[Tensor]) -> None:
        """Refuse an optimizer's step of a variable that replicas have written to: only the first group makes it.

        Raises:
            RuntimeError: the group whose turn it is has changed one of the parameters.
        """
        for parameter in parameters:
            if id(parameter) in self._versions and self.has_changed(parameter):
                raise RuntimeError(
                    f"An optimizer can't update a variable of shape {tuple(parameter.shape)} that replicas have "
                    "assigned values of their own, when the shares of the batch differ in size. Make it with an "
                    "aggregation, such as ts.Variable(..., aggregation=ts.VariableAggregation.MEAN), or let every "
                    "batch be a multiple of the number of replicas (drop_remainder=True)."
                )

    def share_step(self, parameters: Sequence[Tensor], local_id: int) -> None:
        """Let a group find what the first group's step has made of its variables."""
        with self._trace.region.paused(), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for parameter in parameters:
                if id(parameter) not in self._versions:
                    continue
                if local_id == 0:
                    self._stepped[id(parameter)] = parameter.detach().clone()
                elif id(parameter) in self._stepped:
                    parameter.data = self._stepped[id(parameter)].clone()
                    self._trace.region.mark_shared(parameter)
                self.note_shared(parameter)

    def starts(self, local_id: int) -> None:
        """Let a group find what it has made, and go on with its random numbers."""
        if local_id in self._seeds:
            self._trace.runtime.set_seed(self._seeds[local_id])
        with self._trace.region.paused(), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            own = self._own.get(local_id)
            if own is None:
                self._at_entry.restore(copies=True)
                self._versions = {id(value.tensor): value.tensor._version for value in self._at_entry.values.values()}
            else:
                own.restore()
                self._versions = {
                    id(value.tensor): -1 if place in self._changed[local_id] else value.tensor._version
                    for place, value in own.values.items()
                }

    def ends(self, local_id: int, *, failed: bool) -> None:
        """Note what a group has made."""
        self._seeds[local_id] = self._trace.runtime.get_seed()
        if not failed:
            own = self._own[local_id] = self._snapshot()
            self._changed[local_id] = {place for place, value in own.values.items() if self.has_changed(value.tensor)}
            self._metrics.note(local_id)

    def undo(self) -> None:
        """Put everything back as it was before the first turn."""
        with self._trace.region.paused(), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            self._at_entry.restore()

    def join(self) -> None:
        """Give every replica what its own group has made."""
        own = [self._own[group] for group in range(self._trace.groups.count)]
        with self._trace.region.paused(), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            own[0].restore()
            for key, first in own[0].gradients.items():
                column = [snapshot.gradients.get(key, first._replace(gradient=None, note=None)) for snapshot in own]
                if any(entry.gradient is not None and not _is_sum(entry.note) for entry in column):
                    self._join_gradients(first.parameter, column)
            for place, value in own[0].values.items():
                self._join(place, value, own)

    def _snapshot(self) -> _Snapshot:
        with self._trace.region.paused(), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            return _Snapshot(self._record, self._trace, self._ledger)

    def _join_gradients(self, parameter: Tensor, column: Sequence[_Gradient]) -> None:
        example, note = next((entry.gradient, entry.note) for entry in column if entry.gradient is not None)
        values = [torch.zeros_like(example) if entry.gradient is None else entry.gradient for entry in column]
        parameter.grad = self._trace.region.mark_local(self._trace.select(values))
        self._ledger.put(parameter, note)

    def _join(self, place: _Place, first: _Value, own: Sequence[_Snapshot]) -> None:
        if place[:2] in self._left_alone:
            return
        values = [snapshot.values[place] for snapshot in own if place in snapshot.values]
        if len(values) < len(own) or not any(place in changed for changed in self._changed.values()):
            return
        shapes = [tuple(value.value.shape) for value in values]
        if len(set(shapes)) > 1:
            raise RuntimeError(
                f"{place[1]!r} of a recorded object has another shape on some replicas than on others: {shapes}. What "
                "replicas of a TPU keep from one run to the next must not follow the size of their share of the batch."
            )
        first.tensor.data = self._trace.select([value.value for value in values])
        self._trace.region.mark_local(first.tensor)


def _is_sum(note: Note | None) -> bool:
    return note is not None and note.state in (State.SUMMED, State.APPLIED)
