"""What replicas hold from one run to the next: gradients, buffers and metric states that differ between them.

Such a tensor is kept as ``[num_replicas, ...]``, split over the devices, and outside ``run`` shows replica 0's value.
At the next run every replica finds its own again, unless the program has written to the tensor or replaced it.
"""

from __future__ import annotations

import io
import threading
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from torchstrategy.errors import DivergenceError
from torchstrategy.replicas.buffers import BufferSync
from torchstrategy.replicas.fingerprints import SCALARS, attributes_of, is_of_library, is_recorded
from torchstrategy.replicas.metric_states import is_metric
from torchstrategy.replicas.module_tensors import TORCHS_OWN, Slot
from torchstrategy.replicas.object_hooks import members_held
from torchstrategy.replicas.record import Record
from torchstrategy.tpu.marks import is_on_device

__all__ = ["Comparisons", "ReplicaState", "attribute_members", "refuse_different"]


def refuse_different(parameters: Sequence[str]) -> NoReturn:
    """Refuse what a run has written.

    Raises:
        DivergenceError: always.
    """
    raise DivergenceError(
        "Replicas have given parameters different values in `run`, and all have replica 0's now: "
        f"{', '.join(parameters)}. Compute what all replicas hold from what `all_reduce` gives, or keep what is each "
        "replica's own in a buffer, or in ts.Variable(..., synchronization=ON_READ)."
    )


class Comparisons:
    """What groups of replicas with shares of different sizes have written alike, or so it should be."""

    def __init__(self) -> None:
        self._pending: list[tuple[str, Tensor]] = []

    def add(self, name: str, differs: Tensor) -> None:
        """Note a parameter and whether the groups' values differ, a 0-d bool that is not computed yet."""
        self._pending.append((name, differs))

    def check(self) -> None:
        """Look at what was noted, which waits for the devices.

        Raises:
            DivergenceError: values differ.
        """
        pending, self._pending = self._pending, []
        different = dict.fromkeys(name for name, differs in pending if bool(differs.cpu()))
        if different:
            raise DivergenceError(
                f"Replicas with shares of different sizes have given {', '.join(different)} different values, and all "
                "have those of replica 0 now. What all replicas hold must not follow a replica's share of the batch: "
                "compute it from what `all_reduce` gives, or keep it in a buffer."
            )


class _Held(NamedTuple):
    """A tensor of the program's, what tells of writes to it since the run, and the replicas' values."""

    tensor: TensorWeakRef
    #: Not moved by `.data` and `torch._foreach_...`.
    version: int
    #: Not another one after a copy from the host.
    value: TensorWeakRef
    #: ``[num_replicas, ...]``.
    rows: Tensor

    def is_valid_for(self, tensor: Tensor | None) -> bool:
        """Say whether the tensor is this one, and was not written to."""
        if tensor is None or self.tensor() is not tensor or self.version != tensor._version:
            return False
        return self.value() is _value_of(tensor)


class ReplicaState:
    """The tensors of recorded objects that differ between the replicas of one program.

    Args:
        record: what the strategy's scopes recorded.
        slots: returns where the parameters and buffers live.
    """

    def __init__(self, record: Record, slots: Callable[[], list[Slot]]) -> None:
        self._record = record
        self._slots = slots
        self._held: dict[int, _Held] = {}
        self._buffers = BufferSync(record, slots)
        self.leave()

    def enter(self, is_local: Callable[[Tensor], bool], mark_shared: Callable[[Tensor], Tensor]) -> None:
        """Take what a run knows of tensors: whether replicas differ in one, and to note that they don't."""
        self.is_local, self.mark_shared = is_local, mark_shared

    def leave(self) -> None:
        """Forget the run: what it holds would be computed with the next graph."""
        self.is_local, self.mark_shared = _never, _as_it_is

    def take(self) -> list[tuple[Tensor, Tensor]]:
        """Return the tensors that still hold what the last run left, with the replicas' values; forget all.

        Raises:
            RuntimeError: a gradient was changed outside ``run``.
        """
        found = []
        gradients = {id(gradient) for gradient in self._gradients()}
        for held in self._held.values():
            tensor = held.tensor()
            if tensor is not None and held.is_valid_for(tensor):
                found.append((tensor, held.rows))
            elif id(tensor) in gradients and tensor is not None and bool(tensor.count_nonzero()):  # zeros are for all
                raise RuntimeError(
                    f"A gradient of shape {tuple(tensor.shape)} was changed outside `run`, where it is replica 0's "
                    "only. Change gradients inside the function that you give to `strategy.run`."
                )
        self._held = {}
        return found

    def _gradients(self) -> Iterator[Tensor]:
        for dicts, name in self._slots() if self._held else ():
            tensor = dicts[0].get(name)
            if isinstance(tensor, Tensor) and (gradient := tensor.grad) is not None:
                yield gradient

    def rows(self, tensor: Tensor) -> Tensor | None:
        """Return the replicas' values of a tensor ``[num_replicas, ...]``; ``None`` if they all have the tensor's."""
        held = self._held.get(id(tensor))
        return None if held is None or not held.is_valid_for(tensor) else held.rows

    def keep(self, tensor: Tensor, rows: Tensor) -> None:
        """Keep the replicas' values of a tensor; outside ``run`` it has replica 0's."""
        tensor.data = rows[0].clone()  # no view, whose base would bring back what is written past torch's views
        self.hold(tensor, rows)

    def hold(self, tensor: Tensor, rows: Tensor) -> None:
        """Note the replicas' values of a tensor that has replica 0's already."""
        self._held[id(tensor)] = _Held(TensorWeakRef(tensor), tensor._version, TensorWeakRef(_value_of(tensor)), rows)

    def buffers_to_average(self, parameters: Sequence[Tensor], *, all_of_them: bool) -> dict[int, Tensor]:
        """Return the buffers that differ between replicas, by a number; or all of them.

        Args:
            parameters: only those that go with these parameters of an optimizer, see ``BufferSync``.
            all_of_them: return also those that don't differ.
        """
        wanted = self._buffers.candidates(hash(tuple(map(id, parameters))) or 1, parameters)
        places = {(id(dicts[0]), name) for dicts, name in wanted}
        found = {}
        for key, (dicts, name) in enumerate(self._slots()):
            if (id(dicts[0]), name) not in places:
                continue
            tensor = dicts[0][name]
            if is_on_device(tensor) and (all_of_them or self.is_local(tensor)):
                found[key] = tensor
        return found

    def write_shared(self, buffer: Tensor, value: Tensor) -> None:
        """Give a buffer a value that all replicas have."""
        buffer.data = value.clone()
        self.mark_shared(buffer)

    def names(self) -> dict[int, tuple[str, Tensor]]:
        """Return what each tensor of the recorded objects is called, by its ``id``, and the tensor itself."""
        found: dict[int, tuple[str, Tensor]] = {}
        for obj in self._record:
            for path, owner in _parts(obj):
                for name, tensor in _tensors(owner):
                    full = f"{type(obj).__name__}: {'.'.join(filter(None, (path, name)))}"
                    found.setdefault(id(tensor), (full, tensor))
                    if (gradient := tensor.grad) is not None:
                        found.setdefault(id(gradient), (f"gradient of {full}", gradient))
        return found


def _value_of(tensor: Tensor) -> Tensor:
    """Return the value that a tensor of the device stands for: each write gives it another one."""
    with torch._C.DisableTorchFunctionSubclass():
        if not torch._is_functional_tensor(tensor):
            return tensor
        torch._sync(tensor)  # type: ignore[attr-defined, no-untyped-call]
        value: Tensor = torch._from_functional_tensor(tensor)
        return value


def _never(_: Tensor) -> bool:
    return False


def _as_it_is(value: Tensor) -> Tensor:
    return value


def _parts(obj: Any) -> Iterable[tuple[str, Any]]:
    return obj.named_modules() if isinstance(obj, nn.Module) else [("", obj)]


def _tensors(owner: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(owner, Tensor):
        yield "", owner
        return
    members = dict(owner.__dict__)
    if isinstance(owner, nn.Module):
        members = {key: value for key, value in members.items() if key not in TORCHS_OWN}
        members.update(owner._parameters)
        members.update(owner._buffers)
    for name, value in members.items():
        if isinstance(value, Tensor):
            yield name, value
        elif type(value) not in SCALARS:
            found = attribute_members(owner, value)
            yield from ((name + "".join(f"[{k!r}]" for k in path), t) for path, t in found if isinstance(t, Tensor))


def attribute_members(owner: Any, value: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the value of an attribute and all that it holds, each once and with its place.

    Of a list or tuple of what is no module of the program's only the items are looked at: a metric sees to its states
    itself. So it is with what has locks or streams, which may be at work in another thread.
    """
    is_open = isinstance(owner, nn.Module) and not is_metric(owner)
    if not is_open or any(isinstance(item, _AT_WORK) for item in members_held(value, is_closed=_is_closed)):
        yield (), value
        if isinstance(value, (list, tuple)):
            yield from (((i,), item) for i, item in enumerate(value))
        return
    seen: dict[int, Any] = {}
    waiting: list[tuple[tuple[Any, ...], Any]] = [((), value)]
    while waiting:
        path, item = waiting.pop()
        if id(item) in seen or type(item) in SCALARS:
            continue
        seen[id(item)] = item
        yield path, item
        if isinstance(item, Mapping):
            waiting += [((*path, key), member) for key, member in item.items()]
        elif isinstance(item, (list, tuple, deque)):
            waiting += [((*path, i), member) for i, member in enumerate(item)]
        elif not (_is_closed(item) or isinstance(item, (Tensor, types.FunctionType, types.ModuleType))):
            waiting += [((*path, key), member) for key, member in attributes_of(item).items()]


_AT_WORK = (type(threading.Lock()), type(threading.RLock()), threading.Thread, io.IOBase)


def _is_closed(value: Any) -> bool:
    return isinstance(value, type) or is_recorded(value) or is_of_library(value)
