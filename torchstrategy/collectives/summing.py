"""Sums of the ranks' tensors, always in the order of ranks, so that every rank computes the same bits.

Tensors that travel together are packed into one. The numbers of many tensors are taken as if they lay one after the
other, in chunks that pass through shared memory.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

from torchstrategy.base.devices import kind_of
from torchstrategy.errors import InvalidArgumentError

__all__ = [
    "USES_OF_OWN_STORAGE",
    "Chunk",
    "Pack",
    "as_addable",
    "as_bytes",
    "copy_in",
    "copy_out",
    "divide",
    "group_by_layout",
    "have_own_memory",
    "in_a_row",
    "in_format_of",
    "in_memory_order",
    "is_addable",
    "memory_order",
    "pack",
    "plan_buckets",
    "plan_packs",
    "split_into_packs",
    "sum_columns",
    "sum_in_order",
    "unpack",
    "unpack_copies",
]

#: Of memory that one tensor uses: the tensor, and the object by which it is asked for.
USES_OF_OWN_STORAGE = 2


def pack(tensors: Sequence[Tensor], formats: Sequence[Tensor] | None = None) -> Tensor:
    """Copy tensors of one dtype and device into one flat buffer.

    Args:
        tensors: what to copy.
        formats: a tensor of the same shape for each, whose elements' order in memory is that in the buffer: the
            gradient of a parameter in ``channels_last`` has that format, and another order would cost one more copy.
            ``None`` means the order of the indices.
    """
    if formats is not None:
        orders = map(memory_order, formats)
        tensors = [t if order is None else t.permute(order) for t, order in zip(tensors, orders, strict=True)]
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def unpack(flat: Tensor, like: Sequence[Tensor], *, keep_formats: bool = False) -> list[Tensor]:
    """Return views of the buffer in the shapes of ``like``.

    Args:
        flat: the buffer.
        like: tensors of the packed ones' shapes.
        keep_formats: whether ``like`` were the ``formats`` of ``pack``.
    """
    # One call into C++, three times as fast as `split` and `view`; DDP uses it, too. In torch 2.9 it gives empty
    # tensors one dimension.
    views = _unflatten_dense_tensors(flat, like)  # type: ignore[no-untyped-call]
    views = [
        view if view.shape == tensor.shape else view.reshape(tensor.shape)
        for view, tensor in zip(views, like, strict=True)
    ]
    if keep_formats:
        views = [in_memory_order(view, memory_order(tensor)) for view, tensor in zip(views, like, strict=True)]
    return views


def unpack_copies(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the parts of a buffer, in the shapes and dtypes of ``like`` and in memory of their own.

    Views would make changes in place an error where gradients are recorded.
    """
    return [part.to(tensor.dtype, copy=True) for part, tensor in zip(unpack(flat, like), like, strict=True)]


def in_a_row(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor in one row, in which their bytes can be seen.

    A single element counts as contiguous whatever its stride, such as that of a column, and torch then shows no bytes.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    return flat if flat.stride(0) == 1 else flat.as_strided((flat.numel(),), (1,))


def as_bytes(flat: Tensor) -> Tensor:
    """Return the bytes of a buffer, because not every backend knows every dtype; XLA does, but has no such views."""
    return in_a_row(flat).view(torch.uint8) if kind_of(flat.device).has_views else flat


def memory_order(tensor: Tensor) -> tuple[int, ...] | None:
    """Return a tensor's axes by falling strides; ``None`` if they are in order, or no order makes it contiguous."""
    if tensor.is_contiguous():
        return None
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda axis: (tensor.shape[axis] == 1, -strides[axis])))
    return order if tensor.permute(order).is_contiguous() else None


def in_memory_order(tensor: Tensor, order: Sequence[int] | None) -> Tensor:
    """Return a view of a contiguous tensor's memory in the same shape, whose axes have this ``memory_order``."""
    if order is None:
        return tensor
    inverse = [order.index(axis) for axis in range(len(order))]
    return tensor.view([tensor.shape[axis] for axis in order]).permute(inverse)


def have_own_memory(tensors: Sequence[Tensor]) -> list[bool]:
    """Say of each tensor whether it can be written to without a change to another one or to a graph.

    Autograd may give a parameter a view as its gradient: a part of a buffer, or of what a function has saved.
    """
    if len(set(map(id, tensors))) < len(tensors):
        return [False] * len(tensors)
    found = []
    count_uses = torch._C._storage_Use_Count
    for tensor in tensors:  # of many gradients in each step, so with few calls for each
        if (
            tensor.requires_grad
            or tensor.layout is not torch.strided
            or not (tensor.is_cpu or kind_of(tensor.device).has_storages)
        ):
            found.append(False)
            continue
        storage = tensor.untyped_storage()
        found.append(
            count_uses(storage._cdata) <= USES_OF_OWN_STORAGE
            and storage.resizable()  # not of NumPy or another library
            and not (tensor.is_neg() or tensor.is_conj())
            and (tensor.is_contiguous() or memory_order(tensor) is not None)
        )
    return found


def in_format_of(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a gradient, copied if its elements do not lie in memory as those of its parameter ``like`` do.

    torch's fused optimizers take that for granted, and compute wrong numbers otherwise.
    """
    if tensor.stride() == like.stride() or tensor.shape != like.shape:
        return tensor
    order = memory_order(like)
    if order is None and not like.is_contiguous():
        return tensor
    if order == memory_order(tensor) and (order is not None or tensor.is_contiguous()):
        return tensor  # only axes of size 1 have other strides
    return torch.empty_like(like, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def plan_buckets(tensors: Sequence[Tensor], bucket_bytes: int, first_bytes: int | None = None) -> list[list[int]]:
    """Group the positions of tensors into buckets of one dtype and device, each of about ``bucket_bytes``.

    Args:
        tensors: what will be packed; only shapes, dtypes and devices count.
        bucket_bytes: size in bytes at which a bucket is closed; a larger tensor has a bucket of its own.
        first_bytes: the same of the first bucket of each dtype and device, if it is another one.

    Returns:
        Positions in ``tensors``, each in exactly one bucket.
    """
    buckets: list[list[int]] = []
    open_buckets: dict[tuple[torch.dtype, torch.device], tuple[list[int], int, int]] = {}
    for index, tensor in enumerate(tensors):
        key = (tensor.dtype, tensor.device)
        size = tensor.numel() * tensor.element_size()
        members, filled, limit = open_buckets.get(key, ([], 0, bucket_bytes if first_bytes is None else first_bytes))
        if members and filled + size > limit:
            members, filled, limit = [], 0, bucket_bytes
        if not members:
            buckets.append(members)
        members.append(index)
        open_buckets[key] = (members, filled + size, limit)
    return buckets


def group_by_layout(tensors: Sequence[Tensor]) -> list[tuple[torch.dtype, list[int]]]:
    """Group the positions of tensors by dtype, device and whether they are sparse, each group in order of first use.

    Returns:
        For each group the dtype and the positions, the same on all ranks for tensors of the same signatures.
    """
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) == 1 and {tensor.is_cpu and not tensor.is_sparse for tensor in tensors} == {True}:  # often, quick
        return [(dtypes.pop(), list(range(len(tensors))))]
    groups: dict[tuple[torch.dtype, torch.device, bool], list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault((tensor.dtype, tensor.device, tensor.is_sparse), []).append(index)
    return [(dtype, indices) for (dtype, _, _), indices in groups.items()]


def split_into_packs(count: int, num_packs: int) -> list[range]:
    """Cut ``count`` positions into at most ``num_packs`` consecutive ranges of nearly equal length."""
    packs = max(1, min(num_packs, count))
    bounds = [count * i // packs for i in range(packs + 1)]
    return [range(bounds[i], bounds[i + 1]) for i in range(packs)]


def plan_packs(tensors: Sequence[Tensor], num_packs: int, bucket_bytes: int) -> list[list[int]]:
    """Group the positions of tensors into ``num_packs`` packs, or one for each if that is 0, and these into buckets."""
    packs = split_into_packs(len(tensors), num_packs or len(tensors))
    buckets = [(part, plan_buckets([tensors[i] for i in part], bucket_bytes)) for part in packs]
    return [[part[k] for k in bucket] for part, found in buckets for bucket in found]


_NARROW = (torch.float16, torch.bfloat16)
_ADDABLE = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
}


#: A tensor's position, a start and a stop in it.
_Piece = tuple[int, int, int]


def as_addable(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the numbers of contiguous tensors of one dtype, in one dimension; complex ones as twice as many real ones.

    Raises:
        InvalidArgumentError: tensors of this dtype can't be added.
    """
    dtype = tensors[0].dtype
    if dtype.is_complex:
        tensors = [torch.view_as_real(tensor) for tensor in tensors]
    if not is_addable(tensors[0].dtype):
        raise InvalidArgumentError(f"Can't sum tensors of dtype {dtype}. Convert them, for example to float32.")
    return [tensor if tensor.dim() == 1 else tensor.view(-1) for tensor in tensors]


def is_addable(dtype: torch.dtype) -> bool:
    """Say whether tensors of a real dtype can be added."""
    return dtype in _ADDABLE


def sum_in_order(parts: Sequence[Tensor], out: Tensor) -> None:
    """Write the sum of equal-sized tensors to ``out``, which is none of them and has the same dtype.

    Three and more parts of 16-bit floating-point numbers are added in ``float32`` and rounded once.
    """
    if len(parts) == 1:
        out.copy_(parts[0])
        return
    if len(parts) > 2 and out.dtype in _NARROW:
        wide = parts[0].float()
        for part in parts[1:]:
            wide += part
        out.copy_(wide)
        return
    torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        out += part


def sum_columns(columns: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """Return the sums of what each rank has packed, in memory of their own.

    Args:
        columns: one flat buffer of each rank, of one dtype on the CPU.
        like: tensors of the packed ones' shapes and dtype.
    """
    if len(like) == 1:
        summed = torch.empty(like[0].shape, dtype=like[0].dtype, device="cpu")
        sum_in_order(columns, summed.view(-1))
        return [summed]
    flat = torch.empty_like(columns[0])
    sum_in_order(columns, flat)
    return unpack_copies(flat, like)


class Pack(NamedTuple):
    """Memory for tensors that are small together: views of it are made once, not in each step.

    Args:
        flat: the memory.
        views: parts of it, in the tensors' shapes.
    """

    flat: Tensor
    views: list[Tensor]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Pack:
        """Return a pack for contiguous tensors of one dtype on the CPU."""
        with torch.inference_mode(mode=False):  # later steps may be outside of it
            flat = torch.empty(sum([tensor.numel() for tensor in tensors]), dtype=tensors[0].dtype, device="cpu")
            return cls(flat, unpack(flat, tensors))


class Chunk(NamedTuple):
    """Numbers that pass through the memory at once.

    Args:
        parts: one for each rank that adds up a part, or one in all; each as pieces of tensors.
        lengths: of the parts.
    """

    parts: list[list[Tensor]]
    lengths: tuple[int, ...]

    def places(self, area: Tensor) -> Sequence[Tensor]:
        """Return where the parts are in an area of the memory, as in those of all ranks."""
        first = next(pieces[0] for pieces in self.parts if pieces)
        return area[: sum(self.lengths) * first.element_size()].view(first.dtype).split_with_sizes(self.lengths)


def divide(numbers: Sequence[Tensor], sizes: tuple[int, ...], length: int, num_parts: int, unit: int) -> list[Chunk]:
    """Divide the numbers of tensors into chunks of some parts.

    Args:
        numbers: tensors of one dimension and dtype.
        sizes: their numbers of elements.
        length: of a chunk.
        num_parts: of a chunk, of equal lengths in whole units; the last ones of a short chunk are shorter or empty.
        unit: the elements that a processor's caches keep together.
    """
    return [
        Chunk(
            [[numbers[i] if b - a == sizes[i] else numbers[i][a:b] for i, a, b in pieces] for pieces in parts], lengths
        )
        for parts, lengths in _cut(sizes, length, num_parts, unit)
    ]


@functools.lru_cache(maxsize=64)
def _cut(
    sizes: tuple[int, ...], length: int, num_parts: int, unit: int
) -> list[tuple[list[list[_Piece]], tuple[int, ...]]]:
    """Return for each chunk its parts, each as pieces of tensors, and the parts' lengths; once for a list of sizes."""
    chunks = []
    tensor = done = 0  # elements before `done` of the tensor at that position are divided
    total = sum(sizes)
    for begin in range(0, total, length):
        left = min(length, total - begin)
        longest = left if num_parts == 1 else -(-left // (num_parts * unit)) * unit
        parts, lengths = [], []
        for _ in range(num_parts):
            lengths.append(missing := min(longest, left))
            left -= missing
            pieces = []
            while missing:
                stop = min(sizes[tensor], done + missing)
                if stop > done:
                    pieces.append((tensor, done, stop))
                missing -= stop - done
                done = stop
                if done == sizes[tensor]:
                    tensor, done = tensor + 1, 0
            parts.append(pieces)
        chunks.append((parts, tuple(lengths)))
    return chunks


def copy_in(place: Tensor, pieces: Sequence[Tensor]) -> None:
    """Copy pieces of tensors to a place in the memory, one after the other."""
    if len(pieces) == 1:
        place.copy_(pieces[0])
    elif pieces:
        torch.cat(pieces, out=place)  # type: ignore[arg-type]


def copy_out(place: Tensor, pieces: list[Tensor]) -> None:
    """Copy what lies at a place to pieces of tensors."""
    if len(pieces) == 1:
        pieces[0].copy_(place)
    elif pieces:
        torch._foreach_copy_(pieces, place.split_with_sizes([piece.numel() for piece in pieces]))
