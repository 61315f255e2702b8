"""Notices what the program writes to parameters between two runs past torch's version counter, as by ``p.data.clamp_``.

Such a write reaches replica 0's tensor only. At the end of a run the replicas hold equal bits, or replica 0's are
noted; what replica 0 holds otherwise when the next run starts was written in between, and is copied to the others. All
tensors are looked at as long as that takes less than one hundredth of the time of the runs, else as many as that time
allows, in turn. Once a write was found, all of them are looked at in every run. The first parameters and buffers are
looked at whatever it takes, so that a small model does not depend on the clock.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchstrategy.base.log import info_once
from torchstrategy.errors import DivergenceError
from torchstrategy.replicas.copies import updated_tensor
from torchstrategy.replicas.divergence import describe_divergence, differences_between_copies
from torchstrategy.replicas.fingerprints import fingerprints
from torchstrategy.replicas.module_tensors import Slot
from torchstrategy.replicas.variables import Variable

__all__ = ["OutsideEdits"]

#: Which part of the time of the runs the search may take, beyond the first part.
_SHARE = 0.01
#: Small tensors are looked at together, so many and up to so many elements; large ones in ranges of elements.
_PART_TENSORS = 16
_PART_NUMBERS = 1 << 15
_RANGE_NUMBERS = 1 << 18
#: The list of tensors is made anew after so many runs.
_NUM_RUNS_OF_LIST = 64
#: So few parts are listed anew whenever replica functions have put other tensors in the place of some.
_FEW_PARTS = 8
#: After so many runs another part than the first is looked at, whatever time it takes.
_NUM_RUNS_BETWEEN = 8


class _Part(NamedTuple):
    """Some tensors on every replica, or a range of the elements of one."""

    members: list[tuple[weakref.ref[Tensor], ...]]
    start: int
    stop: int
    is_buffer: bool
    #: Whether it is looked at before and after each run.
    is_first: bool = False

    def columns(self) -> list[list[Tensor]]:
        """Return the tensors that the program still has, each on every replica."""
        return [found for found in map(_living, self.members) if found]


class _Watched(NamedTuple):
    """A part as it was when a run ended, and what else tells of writes to replica 0's tensors."""

    part: _Part
    states: list[tuple[int, int]]
    #: Where replicas differ, the fingerprints of replica 0's values, in the order of the states.
    numbers: list[int] | None = None

    def columns(self) -> list[list[Tensor]]:
        """Return the tensors of which torch tells nothing new."""
        states = set(self.states)
        return [column for column in self.part.columns() if _state(column[0]) in states]


class OutsideEdits:
    """Looks for writes to replica 0's tensors that no version tells of.

    Args:
        slots: returns where the parameters and buffers live.
        name: says which replica a local id is.
        written_past: the ids of dictionaries of buffers that modules write to past the version counter.
        num_layouts: returns a number that is another one when there are other slots.
    """

    def __init__(
        self,
        slots: Callable[[], list[Slot]],
        name: Callable[[int], str],
        written_past: Collection[int],
        num_layouts: Callable[[], int],
    ) -> None:
        self._slots = slots
        self._name = name
        self._written_past = written_past
        self._num_layouts = num_layouts
        self._listed_at = (0, 0)
        self._has_lost = False
        #: Whether replica functions put other tensors in the place of some, in a small model.
        self._loses = False
        self._parts: list[_Part] = []
        self._position = 0
        self._num_runs = 0
        self._watched: list[_Watched] = []
        self._credit = 0.0
        self._has_found = False

    def look(self) -> None:
        """Remember what the replicas hold alike outside ``run``, where they were made or a run has failed."""
        self._parts = _parts_of(self._slots(), self._written_past)
        for part in self._parts:
            columns = part.columns() if part.is_first else []
            if columns and not _are_equal(part, columns):  # some may have been written to in a way that torch tells of
                columns = [column for column in columns if _are_equal(part, [column])]
            if columns:
                self._watch(part, columns)

    def before_run(self) -> None:
        """Give the other replicas what was written to replica 0's tensors since ``after_run``."""
        self.catch_up()
        self._watched = []

    def catch_up(self) -> None:
        """Do so, and go on looking."""
        if not self._watched:
            return
        start = time.perf_counter()
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)  # a team that was at work spins for milliseconds, on the cores that the replicas need
        try:
            found = [column for entry in self._watched for column in _changed(entry)]
        finally:
            torch.set_num_threads(num_threads)
        if found:
            self._follow(found)
        self._credit -= time.perf_counter() - start

    def after_run(self, seconds: float) -> None:
        """Look at some tensors, which are to be equal on all replicas, and remember to do so before the next run.

        Args:
            seconds: how long the run took.

        Raises:
            DivergenceError: a parameter differs between the replicas.
        """
        self._credit = min(self._credit, 0.0) + _SHARE * seconds
        start = time.perf_counter()
        limit = start + self._credit / 2  # it takes as long once more when the next run starts
        self._num_runs += 1
        listed_at = (len(self._written_past), self._num_layouts())
        every = _NUM_RUNS_BETWEEN if self._has_lost else _NUM_RUNS_OF_LIST
        if self._num_runs % every == 1 or listed_at != self._listed_at or self._loses:
            self._list(listed_at)
        num_first = self._look_at_first()
        if self._has_lost and not self._loses and (len(self._parts) <= _FEW_PARTS or time.perf_counter() < limit):
            self._loses = len(self._parts) <= _FEW_PARTS
            self._watched = []
            self._list(listed_at)
            num_first = self._look_at_first()
        must_look = self._num_runs % _NUM_RUNS_BETWEEN == 0
        others = self._parts[num_first:]
        for _ in others:
            if not (must_look or self._has_found or time.perf_counter() < limit):
                break
            must_look = False
            self._position = (self._position + 1) % len(others)
            self._look_at(others[self._position])
        self._credit -= time.perf_counter() - start

    def _list(self, listed_at: tuple[int, int]) -> None:
        self._listed_at, self._has_lost = listed_at, False
        self._parts = _parts_of(self._slots(), self._written_past)

    def _look_at_first(self) -> int:
        """Look at the first parts, and return how many they are."""
        first = [part for part in self._parts if part.is_first]
        for part in first:
            self._look_at(part)
        return len(first)

    def _look_at(self, part: _Part) -> None:
        columns = part.columns()
        self._has_lost |= len(columns) < len(part.members)  # another tensor may be in the place of one
        if columns and _are_equal(part, columns):
            self._watch(part, columns)
            return
        own = [column for column in columns if not _are_equal(part, [column])]
        for column in own:
            self._refuse_divergence(column)
        if own:  # buffers and attributes, each replica's own until the next step
            states = [_state(column[0]) for column in own]
            self._watched.append(_Watched(part, states, _numbers(part, own)))
        if alike := [column for column in columns if not any(column is other for other in own)]:
            self._watch(part, alike)

    def _watch(self, part: _Part, columns: Sequence[Sequence[Tensor]]) -> None:
        self._watched.append(_Watched(part, [_state(column[0]) for column in columns]))

    def renew(self) -> None:
        """Look at new modules too."""
        self._num_runs = 0

    def forget(self) -> None:
        """Expect nothing of the tensors: after a run that failed they may differ."""
        self._watched = []

    def _follow(self, found: list[list[Tensor]]) -> None:
        """Copy to the other replicas what was written to replica 0's tensors."""
        if not self._has_found:  # others may have been written to that were not looked at
            info_once(
                f"A tensor of shape {tuple(found[0][0].shape)} was written to past torch's version counter, as by "
                "`.data`, between two runs. The other replicas of this process follow. Writing to the tensor itself, "
                "inside `with torch.no_grad():`, is noticed without a search."
            )
            parts = _parts_of(self._slots(), ())
            found = [*found, *(column for part in parts if not part.is_buffer for column in part.columns())]
        self._has_found = True
        with torch.no_grad():
            for first, *others in found:
                for other in others:
                    updated_tensor(other, first, other.device)

    def _refuse_divergence(self, tensors: Sequence[Tensor]) -> None:
        name = next((name for dicts, name in self._slots() if dicts[0].get(name) is tensors[0]), "")
        slot = (tuple({name: tensor} for tensor in tensors), name)
        found = differences_between_copies([slot], self._name)  # none of a buffer, which may differ until a step
        if found:
            raise DivergenceError(describe_divergence(*found[0]))


def _parts_of(slots: Sequence[Slot], written_past: Collection[int]) -> list[_Part]:
    parts: list[_Part] = []
    open_parts: dict[tuple[torch.dtype, bool, bool], tuple[_Part, int]] = {}
    for dicts, name in slots:
        tensors = [own[name] for own in dicts if _can_compare(own.get(name))]
        if len(tensors) < len(dicts) or len({(tensor.shape, tensor.dtype) for tensor in tensors}) > 1:
            continue
        members, count = tuple(weakref.ref(tensor) for tensor in tensors), tensors[0].numel()
        is_buffer, is_first = not isinstance(tensors[0], nn.Parameter), id(dicts[0]) in written_past
        if count > _PART_NUMBERS:
            size = _RANGE_NUMBERS if all(tensor.is_contiguous() for tensor in tensors) else count
            starts = range(0, count, size)
            parts += [_Part([members], start, min(start + size, count), is_buffer, is_first) for start in starts]
            continue
        key = (tensors[0].dtype, is_buffer, is_first)  # buffers may differ
        part, filled = open_parts.get(key, (None, 0))
        if part is None or filled + count > _PART_NUMBERS or len(part.members) == _PART_TENSORS:
            part, filled = _Part([], 0, _PART_NUMBERS, is_buffer, is_first), 0
            parts.append(part)
        part.members.append(members)
        open_parts[key] = (part, filled + count)
    parts.sort(key=lambda part: (not part.is_first, part.is_buffer))
    for is_buffer in (False, True):  # of all others one of each
        for k, part in enumerate(parts):
            if not part.is_first and part.is_buffer == is_buffer:
                parts[k] = part._replace(is_first=True)
                break
    return sorted(parts, key=lambda part: not part.is_first)


def _changed(entry: _Watched) -> list[list[Tensor]]:
    """Return the tensors that no longer hold the same bits on all replicas."""
    columns = entry.columns()
    if columns and entry.numbers is not None:
        known = dict(zip(entry.states, entry.numbers, strict=True))
        now = zip(columns, _numbers(entry.part, columns), strict=True)
        return [column for column, number in now if number != known[_state(column[0])]]
    if not columns or _are_equal(entry.part, columns):
        return []
    return [column for column in columns if not _are_equal(entry.part, [column])]


def _numbers(part: _Part, columns: Sequence[Sequence[Tensor]]) -> list[int]:
    """Return the fingerprints of what replica 0 holds of a part."""
    return fingerprints([_range(part, column[0]).detach() for column in columns])


def _state(tensor: Tensor) -> tuple[int, int]:
    return id(tensor), tensor._version


def _can_compare(tensor: object) -> bool:
    if not isinstance(tensor, Tensor) or isinstance(tensor, Variable):
        return False
    return tensor.layout is torch.strided and not tensor.is_inference() and tensor.device.type != "meta"


def _living(references: Sequence[weakref.ref[Tensor]]) -> list[Tensor]:
    found = [tensor for reference in references if (tensor := reference()) is not None]
    return found if len(found) == len(references) else []


def _are_equal(part: _Part, columns: Sequence[Sequence[Tensor]]) -> bool:
    """Say whether all replicas hold the same bits in a part; not-a-number equals itself.

    Args:
        part: the part.
        columns: its tensors, or some of them, each on every replica.
    """
    rows = list(zip(*columns, strict=True))
    if not rows[0][0].is_cpu and all(len({tensor.device for tensor in row}) == 1 for row in rows):
        # There, each operation costs more than to copy them.
        columns = [[torch.cat([_range(part, tensor).detach().reshape(-1) for tensor in row]) for row in rows]]
    for tensors in columns:
        first, *others = [_range(part, tensor) for tensor in tensors] if part.start or len(columns) == 1 else tensors
        for other in others:
            here = other if other.device == first.device else other.to(first.device)
            if not torch.equal(first, here) and not torch.allclose(first, here, rtol=0.0, atol=0.0, equal_nan=True):
                return False
    return True


def _range(part: _Part, tensor: Tensor) -> Tensor:
    return tensor if tensor.numel() <= part.stop - part.start else tensor.detach().reshape(-1)[part.start : part.stop]
