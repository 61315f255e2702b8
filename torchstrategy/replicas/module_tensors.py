"""The parameters and buffers of a module on every replica, and what has become of replica 0's since the last run."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import NoneType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from torchstrategy.replicas.fingerprints import SCALARS, attributes_of, is_of_library, is_recorded
from torchstrategy.replicas.mirrored import Mirror
from torchstrategy.replicas.object_hooks import Belongings, belongings_of, push_belongings
from torchstrategy.replicas.variables import Variable

__all__ = [
    "TORCHS_OWN",
    "ModuleTensors",
    "Noted",
    "Slot",
    "Stamp",
    "attribute_slots",
    "buffers_read",
    "grad_stamp",
    "leaf_grad",
    "tensors_now",
    "tensors_of",
]

#: What every module has.
TORCHS_OWN = vars(nn.Module()).keys()
#: ``_parameters`` or ``_buffers`` of one module on every replica, or another dict, and a name in it.
Slot = tuple[tuple[dict[str, Any], ...], str]
Stamp = tuple[int, int, int, bool, int, int]


class Noted(NamedTuple):
    """What a tensor had when it was last noted: what tells of its gradient, hooks and attributes."""

    gradient: tuple[int, ...]
    belongings: Belongings | None


class ModuleTensors:
    """The parameters and buffers of one module on every replica, and what replica 0's were after the last run."""

    def __init__(self, mirror: Mirror, before: ModuleTensors | None) -> None:
        self.slots = _slots_of(mirror, "_parameters")
        self._num_parameters = len(self.slots)
        self.slots += _slots_of(mirror, "_buffers")
        self._buffers = [body.__dict__["_buffers"] for body in mirror.bodies]
        self._num_buffers = self._count_buffers()
        old: dict[str, Stamp] = {}
        if before is not None:
            old = {name: stamp for (_, name), stamp in zip(before.slots, before._stamps, strict=True)}
        self._stamps: list[Stamp] = []
        for slot in self.slots:
            dicts, name = slot
            mirror.know(tuple(own[name] for own in dicts))
            # What is new is copied at the next run, except for gradients: those from before count once.
            self._stamps.append(old.get(name) or _unknown(_stamp(slot)))
        self._grads: list[Tensor | None] = []
        self._changed = False
        known: dict[str, Belongings] = {} if before is None else before._belongings
        self._belongings: dict[str, Belongings] = {
            name: known.get(name) or belongings_of(dicts[0][name]) for dicts, name in self._parameters()
        }

    def has_other_buffers(self) -> bool:
        """Say whether a replica has registered a buffer, or filled one that was ``None``: a facade hears of no body."""
        return self._count_buffers() != self._num_buffers

    def _count_buffers(self) -> int:
        return sum([value is not None for own in self._buffers if own for value in own.values()])

    def changes(self) -> list[tuple[Slot, Stamp, Stamp]]:
        """Return the slots that changed on replica 0 since ``note``, with what they were and are."""
        now = [_stamp(slot) for slot in self.slots]
        self._changed = now != self._stamps
        if not self._changed:
            return []
        changed = [b != n for b, n in zip(self._stamps, now, strict=True)]
        # torch's batch normalisation writes its moving averages without moving their version, but counts its batches.
        any_buffer = any(changed[self._num_parameters :])
        return [
            (slot, _unknown(n) if any_buffer and k >= self._num_parameters else b, n)
            for k, (slot, b, n) in enumerate(zip(self.slots, self._stamps, now, strict=True))
            if changed[k] or (any_buffer and k >= self._num_parameters)
        ]

    def noted(self) -> Iterator[tuple[int, Noted]]:
        """Yield for each tensor that replica 0 had its id, and what it had: a module may get another one's."""
        for (_, name), stamp in zip(self.slots, self._stamps, strict=True):
            yield stamp[0], Noted(stamp[4:], self._belongings.get(name))

    def accept_changes(self) -> None:
        """Take what ``changes`` returned as known."""
        self._grads = []
        if self._changed:
            self._stamps = [_stamp(slot) for slot in self.slots]

    def push_belongings(self, values_for: Callable[[Any], Sequence[Any]], noted: Mapping[int, Noted]) -> None:
        """Let the other replicas' parameters follow the hooks and attributes of replica 0's.

        Args:
            values_for: returns what a value is on each replica.
            noted: what all tensors had, by their ids, if some stand in another place now.
        """
        for dicts, name in self._parameters() if self._belongings else ():
            now, before = belongings_of(dicts[0][name]), self._belongings[name]
            if noted:
                had = noted.get(id(dicts[0][name]))
                before = now if had is None or had.belongings is None else had.belongings
            if before != now:
                push_belongings([own[name] for own in dicts], before, now, values_for)
            self._belongings[name] = now

    def _parameters(self) -> list[Slot]:
        if not self._num_parameters:
            return []
        found = [(slot, slot[0][0].get(slot[1])) for slot in self.slots[: self._num_parameters]]
        return [s for s, p in found if type(p) is nn.Parameter or not isinstance(p, (Variable, NoneType))]

    def note(self) -> None:
        """Note what replica 0's tensors are and have."""
        self._stamps = [_stamp(slot) for slot in self.slots]
        self._belongings = {name: belongings_of(dicts[0][name]) for dicts, name in self._parameters()}
        # Kept so that a gradient which is made outside can't have the id of one that was freed.
        self._grads = [leaf_grad(dicts[0].get(name)) for dicts, name in self.slots]


def tensors_of(mirror: Mirror) -> ModuleTensors:
    """Return a module's tensors, found anew if the module was changed."""
    tensors = mirror.tensors
    if tensors is None or mirror.is_stale:
        tensors = mirror.tensors = ModuleTensors(mirror, tensors)
        mirror.replicas.num_layouts += 1
        mirror.is_stale = False
    return tensors  # type: ignore[no-any-return]


def tensors_now(mirror: Mirror) -> ModuleTensors:
    """Return a module's tensors, with the buffers that its replicas have made meanwhile."""
    mirror.is_stale = mirror.is_stale or tensors_of(mirror).has_other_buffers()
    return tensors_of(mirror)


def _slots_of(mirror: Mirror, kind: str) -> list[Slot]:
    dicts = tuple(body.__dict__[kind] for body in mirror.bodies)
    return [(dicts, name) for name in dicts[0] if all(own.get(name) is not None for own in dicts)]


def _unknown(stamp: Stamp) -> Stamp:
    """Return the stamp of a tensor whose value on the other replicas is not known, though its gradient is."""
    return (0, 0, 0, False, *stamp[4:])


def _stamp(slot: Slot) -> Stamp:
    dicts, name = slot
    tensor = dicts[0].get(name)
    if tensor is None:
        return (0, 0, 0, False, 0, 0)
    try:
        version = tensor._version
    except RuntimeError:  # an inference tensor
        version = -1
    grad = tensor.grad if tensor.is_leaf else None
    of_grad = (0, 0) if grad is None else (id(grad), grad._version)
    return (id(tensor), version, tensor.data_ptr(), tensor.requires_grad, *of_grad)


def buffers_read(module: nn.Module) -> list[Tensor]:
    """Return the buffers that gradients may follow from: not those that norms write and read in other modes only."""
    return [
        buffer
        for child in module.modules()
        if not (isinstance(child, _NormBase) and type(child).__module__.startswith(("torch.", "torchstrategy.")))
        for buffer in child._buffers.values()
        if buffer is not None and not buffer.is_inference()
    ]


def attribute_slots(bodies: Sequence[Any]) -> list[Slot]:
    """Return where tensors live that are attributes of a module, or in containers or objects that are.

    Args:
        bodies: each replica's copy of the module.
    """
    found: list[Slot] = []
    _add_slots(tuple(vars(body) for body in bodies), found, set())
    return found


def _add_slots(held: tuple[dict[Any, Any], ...], found: list[Slot], seen: set[int]) -> None:
    for name, value in held[0].copy().items():
        if isinstance(value, Tensor):
            found.append((held, name))
        elif name not in TORCHS_OWN and type(value) not in SCALARS and id(value) not in seen:
            seen.add(id(value))
            copies = [own.get(name) for own in held]
            members = tuple(_members_of(copy) for copy in copies if type(copy) is type(value))
            if len(members) == len(copies) and members[0]:
                _add_slots(members, found, seen)


def _members_of(value: Any) -> dict[Any, Any]:
    if isinstance(value, dict):
        return value
    if isinstance(value, (list, tuple, deque)):
        return {str(number): member for number, member in enumerate(value)}
    return {} if isinstance(value, type) or is_recorded(value) or is_of_library(value) else attributes_of(value)


def grad_stamp(tensor: Tensor) -> tuple[int, int]:
    """Return what tells whether a tensor has another gradient than before, or the same one with another value."""
    grad = leaf_grad(tensor)
    return (0, 0) if grad is None else (id(grad), grad._version)


def leaf_grad(tensor: Tensor | None) -> Tensor | None:
    """Return a leaf's gradient, ``None`` for other tensors, which torch warns of."""
    return tensor.grad if tensor is not None and tensor.is_leaf else None
