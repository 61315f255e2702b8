"""Which module buffers travel with the gradients, and what becomes of them."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from torchstrategy.base.devices import kind_of
from torchstrategy.base.log import warn_once
from torchstrategy.replicas.mirrored import bodies
from torchstrategy.replicas.module_tensors import Slot
from torchstrategy.replicas.record import Record
from torchstrategy.replicas.variables import Variable

__all__ = ["BufferSync"]

#: Values are looked at in so many first steps, and in every so many later ones: each look waits for an accelerator.
_NUM_LOOKS = 3
_EVERY = 64


class _Layout(NamedTuple):
    """What buffers there are.

    Args:
        state: what the rest depends on: where each buffer is, its dtype and its shape.
        names: the qualified name, dtype and shape of each, by which processes know it.
        digest: of the names.
    """

    state: list[tuple[Any, ...]]
    names: list[str]
    digest: int


class BufferSync:
    """Averages changed floating-point buffers over the replicas that had examples; others take replica 0's value.

    Processes average those that all of them have, with equal shapes: one may come late, or follow a replica's share.

    An optimizer's step brings together the buffers of the modules that it trains: those of another optimizer's may be
    in use, between their forward and backward pass.

    Args:
        record: what the strategy's scopes recorded.
        slots: returns where the parameters and buffers live.
    """

    def __init__(self, record: Record, slots: Callable[[], list[Slot]]) -> None:
        self.record = record
        self._slots = slots
        self._stamps: dict[int, tuple[Any, ...]] = {}
        self._silent = _SilentWrites(record.written_past)
        self._known = _Layout([], [], 0)
        self._num_stores: dict[int, int] = {}
        #: Whether the latest candidates were not all buffers.
        self.leaves_others = False
        #: For each list of parameters, by its number: what the answer depends on, and which modules' buffers are its.
        self._of_plan: dict[int, tuple[tuple[Any, ...], frozenset[int]]] = {}

    def note_new(self, objects: Iterable[Any]) -> None:
        """Take the buffers of new objects as synchronised: initial values are equal on all replicas.

        What is known of buffers that are gone is forgotten, for new ones may lie in the same places.

        Args:
            objects: what was recorded since the last call.
        """
        modules = [m for obj in objects if isinstance(obj, nn.Module) for m in bodies(obj)[0].modules()]
        places, slots = {id(module._buffers) for module in modules}, self.candidates()
        new = [slot for slot in slots if id(slot[0][0]) in places]
        old = [slot for slot in slots if id(slot[0][0]) not in places]
        keys = set(map(_key, old))
        for known in (self._stamps, self._num_stores):
            for key in known.keys() - keys:
                del known[key]
        self._stamps.update((_key(slot), _stamp(slot)) for slot in new)
        self._silent.forget_others(old)
        for slot in new:
            self._silent.watch(slot)

    def candidates(self, number: int = 0, parameters: Sequence[Tensor] = ()) -> list[Slot]:
        """Return the slots that hold buffers; a variable says itself how its copies are brought together.

        Args:
            number: stands for ``parameters``; 0 means all buffers.
            parameters: only buffers of modules that these train, and of modules that no optimizer trains.
        """
        slots = [slot for slot in self._slots() if type(slot[0][0].get(slot[1])) is not nn.Parameter]  # nearly all are
        found = [
            (dicts, name)
            for dicts, name in slots
            if isinstance(dicts[0].get(name), Tensor) and not isinstance(dicts[0][name], (nn.Parameter, Variable))
        ]
        self.leaves_others = False
        if number == 0 or not found:
            return found
        state = (self.record.num_added, *(id(dicts[0]) for dicts, _ in found))
        known = self._of_plan.get(number)
        if known is None or known[0] != state:
            self._of_plan = {k: v for k, v in self._of_plan.items() if v[0][0] == state[0]}
            known = self._of_plan[number] = (state, self._trained_by(parameters))
        own = [(dicts, name) for dicts, name in found if id(dicts[0]) in known[1]]
        self.leaves_others = len(own) < len(found)
        return own

    def digest(self, slots: Sequence[Slot]) -> int:
        """Return what differs where processes do not have the same buffers."""
        return self._layout(slots).digest if slots else 0

    def common(
        self, slots: Sequence[Slot], changed: Sequence[int], exchange: Callable[[str, Any], list[Any]]
    ) -> tuple[list[Slot], int]:
        """Return which buffers all processes have, in one order, and a mask of those that some process has changed.

        Args:
            slots: of this process's buffers.
            changed: the positions of those that it has changed.
            exchange: returns what each process brings.
        """
        names = self._layout(slots).names if slots else []
        rows = exchange("the comparison of buffers", [names, [names[k] for k in changed]])
        counts = [Counter(row) for row, _ in rows]
        common = [name for name in rows[0][0] if all(count[name] == 1 for count in counts)]
        written = set().union(*[row for _, row in rows])
        by_name = dict(zip(names, slots, strict=True))
        return [by_name[name] for name in common], sum((name in written) << k for k, name in enumerate(common))

    def _layout(self, slots: Sequence[Slot]) -> _Layout:
        own = [dicts[0][name] for dicts, name in slots]
        state = [(id(dicts[0]), name, t.dtype, t.shape) for (dicts, name), t in zip(slots, own, strict=True)]
        if state != self._known.state:
            paths: dict[int, str] = {}
            modules = [bodies(obj)[0] for obj in self.record if isinstance(obj, nn.Module)]
            for module in sorted(modules, key=lambda module: -len(list(module.modules()))):  # the outer ones first
                for path, child in module.named_modules():
                    paths.setdefault(id(child._buffers), f"{type(module).__name__}.{path}")
            names = [f"{paths.get(key)}.{name} {dtype} {list(shape)}" for key, name, dtype, shape in state]
            self._known = _Layout(state, names, zlib.crc32("\n".join(names).encode()))
        return self._known

    def _trained_by(self, parameters: Sequence[Tensor]) -> frozenset[int]:
        """Return the ids of the dictionaries of buffers that go with some parameters.

        A module's buffers go with its own and its children's parameters; if it has none, with those of the modules
        that contain it, the closest first.
        """
        recorded = [bodies(obj)[0] for obj in self.record if isinstance(obj, (nn.Module, Optimizer))]
        groups = [group for obj in recorded if isinstance(obj, Optimizer) for group in obj.param_groups]
        trained = {id(parameter) for group in groups for parameter in group["params"]}
        own = set(map(id, parameters))
        modules = {id(m): m for obj in recorded if isinstance(obj, nn.Module) for m in obj.modules()}
        parents: dict[int, list[nn.Module]] = {}
        for module in modules.values():
            for child in module.children():
                parents.setdefault(id(child), []).append(module)
        found = set()
        for module in modules.values():
            if module._buffers:
                with_it = _parameters_around(module, parents)
                if with_it & own or not with_it & trained:
                    found.add(id(module._buffers))
        return frozenset(found)

    def changed(self, slots: Sequence[Slot], *, by_value: bool = True) -> list[bool]:
        """Say which buffers any local replica has changed since they were last synchronised.

        A module's buffers count as changed together: torch's batch normalisation writes its moving averages without
        moving their version, but it counts its batches. Other such writes show in the values. Buffers whose shapes
        follow the replica's share of the batch are the replica's own.

        Args:
            slots: the buffers.
            by_value: look for new writes that no version tells of.
        """
        modules = {id(slot[0][0]) for slot in slots if self._stamps.get(_key(slot)) != _stamp(slot)}
        if by_value:
            self._silent.find(slots, modules)
        modules |= self._silent.found
        return [id(slot[0][0]) in modules and _have_equal_shapes(slot) for slot in slots]

    def contributions(self, slot: Slot, weights: Sequence[float], *, holds_first: bool) -> list[Tensor]:
        """Return what each local replica adds to the sum over replicas.

        Args:
            slot: the buffer.
            weights: for each local replica, its part of the average.
            holds_first: whether replica 0 is the first local one.
        """
        dicts, name = slot
        values = [own[name].detach() for own in dicts]
        if _is_averaged(values[0]):
            return [_weighted(value, weight) for value, weight in zip(values, weights, strict=True)]
        wide = [value.to(torch.int64) for value in values]
        return [value if holds_first and i == 0 else torch.zeros_like(value) for i, value in enumerate(wide)]

    def store(self, slots: Sequence[Slot], totals: Sequence[Sequence[Tensor]], had_examples: Sequence[bool]) -> None:
        """Write the sums to the replicas' buffers.

        Args:
            slots: the buffers.
            totals: what each is on each local replica.
            had_examples: whether each local replica had.
        """
        for slot, row in zip(slots, totals, strict=True):
            num_stores = self._num_stores[_key(slot)] = self._num_stores.get(_key(slot), 0) + 1
            if num_stores <= _NUM_LOOKS or num_stores % _EVERY == 0:
                self._look_for_own_values(slot, row, had_examples)
        buffers = tuple(own[name] for dicts, name in slots for own in dicts)
        values = [total for row in totals for total in row]
        # As torch's batch norm writes them: a backward pass that is still to come does not use their values.
        with torch.no_grad(), torch.autograd.grad_mode._unsafe_preserve_version_counter(buffers):
            for buffer, value in zip(buffers, values, strict=True):
                buffer.copy_(value)

    def _look_for_own_values(self, slot: Slot, totals: Sequence[Tensor], had_examples: Sequence[bool]) -> None:
        """Warn of a buffer of the program's that each replica has computed from its own share of the batch."""
        dicts, name = slot
        values = [own[name] for own, has in zip(dicts, had_examples, strict=True) if has]
        if all(_can_compare(value) and _are_close(value, totals[0]) for value in values):
            return
        recorded = [bodies(obj)[0] for obj in self.record if isinstance(obj, nn.Module)]
        module = next((m for root in recorded for m in root.modules() if m._buffers is dicts[0]), None)
        if module is None or _averages_by_itself(module):
            return
        kept = "their mean is kept" if _is_averaged(values[0]) else "replica 0's is kept"
        warn_once(
            f"Buffer {name!r} of {type(module).__name__} (shape {tuple(values[0].shape)}) has got another value on "
            f"each replica, such as a sum over its share of the batch; {kept}. One replica alone would have another "
            "value, unless this is a mean and all shares are equally large. Compute it from the whole batch: sum what "
            "it is made of by `ts.get_replica_context().all_reduce` first; or register a `ts.Variable` with the "
            "aggregation that you mean as the buffer.",
            of=self,
        )

    def mark_synchronised(self, slots: Sequence[Slot]) -> None:
        """Note the present values as synchronised."""
        self._stamps.update((_key(slot), _stamp(slot)) for slot in slots)  # others may be another optimizer's
        self._silent.refresh(slots)


class _SilentWrites:
    """Finds modules whose buffers are written without moving their version, as by ``functional.batch_norm``.

    Values are compared in the first steps, and later one buffer at a time: what is found late is not lost, for the
    replicas' own moving averages have the same average.

    Args:
        found: where the ids of the modules' dictionaries of buffers are put.
    """

    def __init__(self, found: set[int]) -> None:
        #: The ids of the dictionaries of buffers that are written so.
        self.found = found
        self._values: dict[int, list[Tensor]] = {}
        self._num_looks: dict[int, int] = {}
        self._num_calls = 0

    def forget_others(self, slots: Sequence[Slot]) -> None:
        """Forget all but some buffers."""
        keys = set(map(_key, slots))
        self._values = {key: values for key, values in self._values.items() if key in keys}
        self._num_looks = {key: number for key, number in self._num_looks.items() if key in keys}
        self.found.intersection_update([id(dicts[0]) for dicts, _ in slots])

    def watch(self, slot: Slot) -> None:
        """Keep a buffer's values on all local replicas, to compare them with."""
        dicts, name = slot
        values = [own.get(name) for own in dicts]
        if all(map(_can_compare, values)):
            self._values[_key(slot)] = [value.detach().clone() for value in values if value is not None]

    def find(self, slots: Sequence[Slot], changed: set[int]) -> None:
        """Look at buffers of modules that seem unchanged.

        Args:
            slots: the buffers.
            changed: the ids of the dictionaries of those that are known to have changed.
        """
        for slot in slots if self._values else ():
            values, (dicts, name) = self._values.get(_key(slot)), slot
            if values is None:
                continue
            key, module = _key(slot), id(dicts[0])
            is_known = module in changed or module in self.found
            if not is_known and not all(_are_equal(value, own[name]) for value, own in zip(values, dicts, strict=True)):
                self.found.add(module)
            self._num_looks[key] = self._num_looks.get(key, 0) + 1
            if self._num_looks[key] >= _NUM_LOOKS:
                del self._values[key]
        self._num_calls += 1
        if slots and self._num_calls % _EVERY == 0:
            self.watch(slots[self._num_calls // _EVERY % len(slots)])

    def refresh(self, slots: Sequence[Slot]) -> None:
        """Take what the buffers hold as unchanged."""
        for slot in slots if self._values else ():
            if _key(slot) in self._values:
                self.watch(slot)


def _can_compare(value: Any) -> bool:
    is_tensor = isinstance(value, Tensor) and value.layout is torch.strided and not is_lazy(value)
    return is_tensor and not value.is_meta and not kind_of(value.device).is_traced


def _are_equal(before: Tensor, now: Any) -> bool:
    if not isinstance(now, Tensor) or now.shape != before.shape or now.dtype != before.dtype:
        return False
    if torch.equal(before, now):
        return True
    return bool(((before == now) | (before.isnan() & now.isnan())).all())


def _parameters_around(module: nn.Module, parents: dict[int, list[nn.Module]]) -> set[int]:
    """Return the ids of the parameters in a module or, if it has none, in the closest modules around it that do."""
    level, seen = [module], {id(module)}
    while level:
        found = {id(parameter) for member in level for parameter in member.parameters()}
        if found:
            return found
        level = [parent for member in level for parent in parents.get(id(member), ()) if id(parent) not in seen]
        seen.update(map(id, level))
    return set()


def _is_averaged(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _averages_by_itself(module: nn.Module) -> bool:
    """Say whether a module's buffers are known to be statistics of a share, of which the mean is meant; or a metric."""
    is_known = type(module).__module__.startswith(("torch.", "torchstrategy."))
    return is_known or isinstance(module, nn.modules.batchnorm._NormBase) or hasattr(module, "_update_count")


def _are_close(value: Tensor, total: Tensor) -> bool:
    """Say whether a replica's own value is that of all, but for the rounding of a mean."""
    total = total.to(value.device, value.dtype)
    if not _is_averaged(value):
        return torch.equal(value, total)
    return torch.allclose(value, total, rtol=1e-3 if value.element_size() < 4 else 1e-5, equal_nan=True)


def _weighted(value: Tensor, weight: float) -> Tensor:
    # A replica without examples may hold NaN, which a zero weight would spread.
    return torch.zeros_like(value) if weight == 0 else value * weight


def _have_equal_shapes(slot: Slot) -> bool:
    dicts, name = slot
    first = dicts[0][name].shape
    return all(isinstance(own.get(name), Tensor) and own[name].shape == first for own in dicts[1:])


def _key(slot: Slot) -> int:
    dicts, name = slot
    return hash((id(dicts[0]), name))


def _stamp(slot: Slot) -> tuple[Any, ...]:
    dicts, name = slot
    stamps: list[Any] = []
    for own in dicts:
        tensor = own.get(name)
        stamps += [id(tensor), -1 if tensor is None or tensor.is_inference() else tensor._version]
    return tuple(stamps)
