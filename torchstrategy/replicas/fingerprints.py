"""Whether values are what they were, or the same as others.

``fingerprints`` gives a number for each of many tensors, by which those of the same bits are known. ``snapshot`` and
``differ`` tell of other values whether they were changed in place; ``glance`` does so in microseconds.

An accelerator would take longer to start a few kernels for each parameter than to read it.
"""

from __future__ import annotations

import array
import copyreg
import functools
import hashlib
import itertools
import random
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchstrategy.base.devices import kind_of
from torchstrategy.replicas.record import recorded_classes

__all__ = [
    "CONTAINERS",
    "SCALARS",
    "attributes_of",
    "can_change",
    "differ",
    "fingerprints",
    "follow",
    "glance",
    "have_equal_bits",
    "is_of_library",
    "is_plain",
    "is_recorded",
    "snapshot",
]

#: Elements that are weighted together; and the rows of them that are at a time. On a CPU its caches hold these, an
#: accelerator is given what keeps it busy for longer than it takes to start a kernel.
_ROW = 1024
_ROWS, _ROWS_ON_CPU = 1 << 14, 1 << 6
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
CONTAINERS = (tuple, list, set, frozenset, deque)
#: Of a structure with more containers only those seen first are compared.
_MAX_CONTAINERS = 1000
#: A glance looks at so many members, and of a larger container or array at some of them, evenly spread.
_MAX_GLANCED, _MAX_NUMBERS = 256, 1 << 14
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)


def fingerprints(tensors: Sequence[Tensor]) -> list[int]:
    """Return a number for each tensor that tells its bits, element by element; waits once for each device.

    It is the sum of the elements' bits times odd random weights, modulo 2**64: integers, so that neither the order of
    the sum nor the device matters, and weights, so that it depends on where each element stands.

    Args:
        tensors: of any shape, dtype and device, sparse ones included.

    Example:
        >>> from torchstrategy.replicas.fingerprints import fingerprints
        >>> vectors = [torch.tensor(numbers) for numbers in ([1.0, 2.0], [1.0, 2.0], [2.0, 1.0])]
        >>> first, same, other = fingerprints(vectors)
        >>> first == same, first == other
        (True, False)
    """
    numbers = [0] * len(tensors)
    with torch.no_grad():
        parts = [(k, *part) for k, tensor in enumerate(tensors) for part in _parts_of(tensor.detach())]
        parts.sort(key=lambda part: (str(part[2].device), part[2].itemsize))
        for _, group in itertools.groupby(parts, lambda part: part[2].device):
            own = list(group)
            for (k, factor, part), number in zip(own, _weighted([part for _, _, part in own]), strict=True):
                numbers[k] += factor * (number + part.numel())
    return numbers


def have_equal_bits(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[bool]:
    """Say of which pairs of tensors it is known that their bits are equal; looks at those of accelerators only."""
    could_be = [
        not (a.is_cpu and b.is_cpu)
        and (a.shape, a.dtype) == (b.shape, b.dtype)
        and a.layout is b.layout is torch.strided
        for a, b in pairs
    ]
    tensors = {id(tensor): tensor for pair in itertools.compress(pairs, could_be) for tensor in pair}
    numbers = dict(zip(tensors, fingerprints(list(tensors.values())), strict=True))
    return [may and numbers[id(a)] == numbers[id(b)] for (a, b), may in zip(pairs, could_be, strict=True)]


def _parts_of(tensor: Tensor) -> list[tuple[int, Tensor]]:
    """Return what a tensor's bits are in, each with a factor; of a complex tensor that is real numbers."""
    if tensor.layout is not torch.strided:
        whole = tensor.to_sparse().coalesce()
        return [(31 * factor, part) for factor, part in _parts_of(whole.indices())] + _parts_of(whole.values())
    if not kind_of(tensor.device).has_views:  # of bits
        tensor = tensor.cpu()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return [(1, tensor.resolve_neg())]


def _weighted(parts: Sequence[Tensor]) -> list[int]:
    """Return the sum of each tensor's bits, each times its weight; the tensors of one itemsize follow each other."""
    by_itemsize = itertools.groupby(parts, lambda part: part.itemsize)
    sums = torch.cat([_sums_of_rows(list(group)) for _, group in by_itemsize])
    counts = [_num_rows(part.numel()) for part in parts]
    while max(counts) > 1:  # the sums of a tensor's rows are weighted in turn
        sums = _sums_of_rows(sums.split_with_sizes(counts))
        counts = list(map(_num_rows, counts))
    return sums.tolist()


def _num_rows(count: int) -> int:
    return max(1, -(-count // _ROW))


def _sums_of_rows(tensors: Sequence[Tensor]) -> Tensor:
    """Return the weighted sums of all rows of tensors of one itemsize, one tensor after the other."""
    device = tensors[0].device
    most = _ROW * (_ROWS_ON_CPU if device.type == "cpu" else _ROWS)
    weights, sums = _weights(device), []
    pieces: list[Tensor] = []
    missing = most
    for vector in _bits_of_rows(tensors, most):
        left = vector
        while len(left):
            pieces.append(left[:missing])
            left = left[missing:]
            missing -= len(pieces[-1])
            if missing == 0:
                sums.append((_joined(pieces).view(-1, _ROW) * weights).sum(1))
                pieces, missing = [], most
    if pieces:
        sums.append((_joined(pieces).view(-1, _ROW) * weights).sum(1))
    return _joined(sums)


def _joined(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _bits_of_rows(tensors: Sequence[Tensor], most: int) -> Iterator[Tensor]:
    """Yield the bits of tensors as vectors of integers, with zeros after each tensor that fill its last row."""
    zeros = torch.zeros(_ROW, dtype=_INTEGERS[tensors[0].itemsize], device=tensors[0].device)
    for tensor in tensors:
        count = tensor.numel()
        # Of a tensor that is not contiguous, `reshape` makes a copy: of a part of it at a time.
        is_whole = tensor.is_contiguous()
        for part in (tensor,) if is_whole else torch.split(tensor, max(1, most * len(tensor) // count)):
            yield part.reshape(-1).view(zeros.dtype)
        yield zeros[: _num_rows(count) * _ROW - count]


@functools.cache
def _weights(device: torch.device) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(0)
    numbers = torch.randint(-(1 << 62), 1 << 62, (_ROW,), generator=generator, dtype=torch.int64, device="cpu")
    numbers = 2 * numbers + 1
    numbers[0] = 1  # so that a number is the same where it is weighted once more, beside those of larger tensors
    return numbers.to(device)


def snapshot(value: Any) -> Any:
    """Return something that equals a later snapshot of the same value if and only if nothing in it was changed.

    Which modules, optimizers and the like a structure holds is compared, but not what is in them: they see to that
    themselves.
    """
    if is_plain(value):  # faster than the general case
        return _copy_plain(value)
    return _Look(None).at(value)


def glance(value: Any, known: dict[int, Any] | None = None) -> Any:
    """Return a snapshot that costs little: of what is large it has the size and some members.

    Args:
        value: the value.
        known: what was found of values at this moment, by their ids; many modules may hold one object.
    """
    if known is None:
        return _Look(_MAX_GLANCED).at(value)
    if id(value) not in known:
        known[id(value)] = _Look(_MAX_GLANCED).at(value)
    return known[id(value)]


class _Look:
    """Looks through a structure.

    Args:
        most: how many members are looked at; ``None``: all.
    """

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._num_left = _MAX_CONTAINERS if most is None else most
        self._seen: dict[int, Any] = {}

    def at(self, value: Any) -> Any:
        if type(value) in SCALARS:
            return value
        if isinstance(value, Tensor):
            return (id(value), None if value.is_inference() else value._version) if value.is_leaf else None
        state = _state_of(value)
        if state is not None:
            return self.at(state)
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            step = value.size // _MAX_NUMBERS if self._most is not None else 0
            numbers = value.flat[::step] if step > 1 else value
            return value.shape, str(value.dtype), hashlib.blake2b(numbers.tobytes()).digest()
        if id(value) in self._seen or self._num_left < 0 or isinstance(value, (type, *recorded_classes())):
            return id(value)
        self._seen[id(value)] = value
        self._num_left -= 1
        if isinstance(value, Mapping):
            found = [(_key(key), self.at(item)) for key, item in self._some(value.items())]
        elif isinstance(value, CONTAINERS):
            found = [self.at(item) for item in self._some(value)]
        else:
            return id(value), [(name, self.at(item)) for name, item in self._some(attributes_of(value).items())]
        return found if self._most is None else (len(value), found)

    def _some(self, values: Collection[Any]) -> Iterable[Any]:
        if self._most is None or len(values) <= self._most:
            self._num_left -= 0 if self._most is None else len(values)
            return values
        self._num_left -= self._most
        if isinstance(values, (list, tuple)):
            return [*values[:: len(values) // self._most], values[-1]]
        last = itertools.islice(reversed(values), 2) if hasattr(values, "__reversed__") else ()  # type: ignore[call-overload]
        return [*itertools.islice(values, self._most), *last]


def follow(values: Sequence[Any], before: Any, now: Any, values_for: Callable[[Any], Sequence[Any]]) -> bool:
    """Make in the other replicas' dicts, lists and objects the changes of replica 0's; they stay the same objects.

    Args:
        values: one for each replica.
        before: a snapshot of replica 0's, or what a glance has shown.
        now: another, of the same kind.
        values_for: returns what a value is on each replica.

    Returns:
        Whether that can be done. If not, others have to take their place.
    """
    was, shows = _by_key(values[0], before), _by_key(values[0], now)
    if was is None or shows is None or len({type(value) for value in values}) > 1:
        return False
    members: list[Any] = [value if isinstance(value, (list, dict)) else vars(value) for value in values]
    if isinstance(values[0], list) and len({len(was), *map(len, values)}) > 1:
        for own, copied in zip(values[1:], values_for(values[0])[1:], strict=True):
            own[:] = copied
        return True
    for key in was.keys() - shows.keys():
        for own in members[1:]:
            own.pop(key, None)
    for key, found in shows.items():
        if key in was and not differ(was[key], found):
            continue
        is_known = key in was and all(isinstance(own, list) or key in own for own in members)
        if not is_known or not follow([own[key] for own in members], was[key], found, values_for):
            for own, copied in zip(members[1:], values_for(members[0][key])[1:], strict=True):
                own[key] = copied
    return True


def _by_key(value: Any, found: Any) -> dict[Any, Any] | None:
    """Return what was found of each member of a value; ``None`` if that is not all."""
    if isinstance(value, (Tensor, tuple, set, frozenset, deque)) or is_recorded(value) or is_of_library(value):
        return None
    if not isinstance(value, (list, dict)) and (not hasattr(value, "__dict__") or not isinstance(found, tuple)):
        return None
    if isinstance(found, tuple) and len(found) == 2:
        number, found = found
        if number != (len(found) if isinstance(value, (list, dict)) else id(value)):
            return None
    if isinstance(value, list):
        return dict(enumerate(found)) if isinstance(found, list) else None
    named = dict(found) if isinstance(found, (list, dict)) else None
    return named if named is not None and all(type(key) in SCALARS for key in named) else None


def _state_of(value: Any) -> Any:
    """Return what an object holds where Python does not see it, as something that can be looked at, else ``None``."""
    if isinstance(value, torch.Generator):
        return value.get_state().numpy()
    if isinstance(value, (bytearray, array.array)):
        return np.array(value)
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return hash(value.getstate())
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.RandomState):
        return value.get_state(legacy=False)
    return repr(value) if isinstance(value, itertools.count) else None


def attributes_of(value: Any) -> dict[str, Any]:
    """Return an object's attributes, those in slots too."""
    attributes: dict[str, Any] = getattr(value, "__dict__", {})
    slots = copyreg._slotnames(type(value))  # type: ignore[attr-defined]
    return (
        {**attributes, **{name: getattr(value, name) for name in slots if hasattr(value, name)}}
        if slots
        else attributes
    )


def can_change(value: Any) -> bool:
    """Say whether whoever holds a value can change it, or what it holds."""
    if isinstance(value, (tuple, frozenset)):
        return any(map(can_change, value))
    if isinstance(value, (*SCALARS, *_FUNCTIONS, type, types.ModuleType, *recorded_classes())):
        return False
    return not type(value).__module__.startswith("torchstrategy.")


def _key(key: Any) -> Any:
    return key if type(key) in SCALARS else (id(key),)


def _copy_plain(value: Any) -> Any:
    """Return something that equals another copy if and only if the values are equal; faster than a deep copy."""
    if isinstance(value, dict):
        return {key: _copy_plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return set(value)
    return [_copy_plain(item) for item in value] if isinstance(value, CONTAINERS) else value


def differ(before: Any, now: Any) -> bool:
    """Say whether two snapshots of a value differ."""
    return bool(before != now)


def is_plain(value: Any) -> bool:
    """Say whether a value is plain Python data, in containers or not."""
    if type(value) in SCALARS:
        return True
    if isinstance(value, dict):
        return all(is_plain(k) and is_plain(v) for k, v in value.items())
    return isinstance(value, CONTAINERS) and all(is_plain(item) for item in value)


def is_recorded(value: Any) -> bool:
    """Say whether a value is of a class whose objects a scope records."""
    return isinstance(value, recorded_classes())


def is_of_library(value: Any) -> bool:
    """Say whether a value is of a class of this library or of torch."""
    return type(value).__module__.partition(".")[0] in ("torch", "torchstrategy")
