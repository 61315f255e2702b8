"""The parameters and buffers of a module on every replica, and what has become of replica 0's since the last run.

Stamps tell whether a tensor was written to, fingerprints whether tensors have the same bits: of many at once, because
an accelerator would take longer to start a few kernels for each parameter than to read it.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn

from torchstrategy.base.devices import kind_of
from torchstrategy.replicas.mirrored import Mirror
from torchstrategy.replicas.object_hooks import Belongings, belongings_of, push_belongings
from torchstrategy.replicas.variables import Variable

__all__ = [
    "ModuleTensors",
    "Slot",
    "Stamp",
    "fingerprints",
    "grad_stamp",
    "have_equal_bits",
    "is_dtensor",
    "keeps_parts",
    "leaf_grad",
    "leave_to_fsdp",
    "reshard",
    "tensors_of",
]

#: Whether this process keeps what it gathers of others: it need not if another one writes the file.
keeps_parts: ContextVar[bool] = ContextVar("torchstrategy_keeps_parts", default=True)
#: ``_parameters`` or ``_buffers`` of one module on every replica, and a name in it.
Slot = tuple[tuple[dict[str, Any], ...], str]
Stamp = tuple[int, int, int, bool, int, int]


class ModuleTensors:
    """The parameters and buffers of one module on every replica, and what replica 0's were after the last run."""

    def __init__(self, mirror: Mirror, before: ModuleTensors | None) -> None:
        self.slots = _slots_of(mirror, "_parameters")
        self._num_parameters = len(self.slots)
        self.slots += _slots_of(mirror, "_buffers")
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

    def accept_changes(self) -> None:
        """Take what ``changes`` returned as known."""
        self._grads = []
        if self._changed:
            self._stamps = [_stamp(slot) for slot in self.slots]

    def push_belongings(self, values_for: Callable[[Any], Sequence[Any]]) -> None:
        """Let the other replicas' parameters follow the hooks and attributes of replica 0's."""
        for dicts, name in self._parameters() if self._belongings else ():
            now = belongings_of(dicts[0][name])
            if self._belongings[name] != now:
                push_belongings([own[name] for own in dicts], self._belongings[name], now, values_for)
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
        mirror.is_stale = False
    return tensors  # type: ignore[no-any-return]


def _slots_of(mirror: Mirror, kind: str) -> list[Slot]:
    dicts = tuple(body.__dict__[kind] for body in mirror.bodies)
    return [(dicts, name) for name, value in dicts[0].items() if value is not None]


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


def grad_stamp(tensor: Tensor) -> tuple[int, int]:
    """Return what tells whether a tensor has another gradient than before, or the same one with another value."""
    grad = leaf_grad(tensor)
    return (0, 0) if grad is None else (id(grad), grad._version)


def leaf_grad(tensor: Tensor | None) -> Tensor | None:
    """Return a leaf's gradient, ``None`` for other tensors, which torch warns of."""
    return tensor.grad if tensor is not None and tensor.is_leaf else None


#: Elements that are weighted together; and the rows of them that are at a time. On a CPU its caches hold these, an
#: accelerator is given what keeps it busy for longer than it takes to start a kernel.
_ROW = 1024
_ROWS, _ROWS_ON_CPU = 1 << 14, 1 << 6
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprints(tensors: Sequence[Tensor]) -> list[int]:
    """Return a number for each tensor that tells its bits, element by element; waits once for each device.

    It is the sum of the elements' bits times odd random weights, modulo 2**64: integers, so that neither the order of
    the sum nor the device matters, and weights, so that it depends on where each element stands.

    Args:
        tensors: of any shape, dtype and device, sparse ones included.

    Example:
        >>> from torchstrategy.replicas.module_tensors import fingerprints
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


def is_dtensor(value: Any) -> bool:
    """Say whether a tensor is a DTensor, a part of which each process has; its module need not be imported for that."""
    kind = type(value)
    if kind is nn.Parameter or kind is Tensor:  # nearly all are
        return False
    return any(base.__name__ == "DTensor" and base.__module__.startswith("torch.") for base in kind.__mro__)


def reshard(objects: Iterable[Any]) -> None:
    """Let modules that FSDP2 has divided show their DTensors, not the whole parameters that a forward pass may leave.

    The next forward pass gathers them again.
    """
    for module in _fsdp_modules(_modules_of(objects)):
        module.reshard()


def leave_to_fsdp(objects: Iterable[Any], num_replicas: int) -> None:
    """Leave the parameters that FSDP2 has divided to it, and let it add up their gradients instead of averaging them.

    Losses are divided by the size of the global batch, so that a mean over the ranks would divide a second time.

    Args:
        objects: those among them that are modules are looked at, with their submodules.
        num_replicas: over all processes, which have one each.

    Raises:
        TypeError: there are other DTensors, or FSDP2 divides over other processes; nothing was changed.
    """
    modules = _modules_of(objects)
    own: set[int] = set()
    divided = _fsdp_modules(modules)
    for module in divided:
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.9 has one
        for group in (state._fsdp_param_group,) if groups is None else groups:
            if group is None:  # it has no parameters
                continue
            size = group.mesh_info.mesh.size()
            if size != num_replicas:
                raise TypeError(
                    f"`fully_shard` has divided the parameters of {type(module).__name__} over a data-parallel mesh of "
                    f"{size} processes, but the strategy has {num_replicas} replicas, each with data of its own. Give "
                    f"it all of them: fully_shard(module, mesh=init_device_mesh(device_type, ({num_replicas},))), with "
                    "one replica in each process. Tensor parallelism beside it needs a program without a strategy."
                )
            own.update(id(parameter.sharded_param) for parameter in group.fsdp_params)
    for module in divided:
        module.reshard()
    for name, tensor in _dtensors(modules):
        if id(tensor) not in own:
            raise TypeError(
                f"{name} is a DTensor that `fully_shard` (FSDP2) does not manage, as `parallelize_module` makes them. "
                "Its processes compute one batch together, but every replica of a strategy has data of its own. Divide "
                "the module by fully_shard(module, mesh=init_device_mesh(device_type, "
                f"({num_replicas},))), or train it without a strategy."
            )
    for module in divided:
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo can't multiply first


def _modules_of(objects: Iterable[Any]) -> list[Any]:
    """Return the modules among some objects and their submodules, once each; none where there can be no DTensors."""
    if "torch.distributed.tensor" not in sys.modules:
        return []
    modules = [obj for obj in objects if isinstance(obj, nn.Module)]
    return list({id(member): member for module in modules for member in module.modules()}.values())


def _fsdp_modules(modules: Iterable[Any]) -> list[Any]:
    """Return the modules that ``fully_shard`` was called for."""
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return [] if fsdp is None else [module for module in modules if isinstance(module, fsdp)]


def _dtensors(modules: Iterable[Any]) -> Iterator[tuple[str, Tensor]]:
    for module in modules:
        for own in (module._parameters, module._buffers):
            for key, value in own.items():
                if is_dtensor(value):
                    yield f"{key!r} of {type(module).__name__}", value
