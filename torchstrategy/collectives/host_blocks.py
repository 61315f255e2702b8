"""Memory of a host that is there once, and of which every replica sees a view of its own.

The memory is anonymous (``memfd_create``), see ``shared_memory``. A view is a private mapping of it: pages that nobody
has written to are the memory's own, so that any number of views takes no memory and sees each change of it at once. A
write through a view makes a private copy of its page, which nobody else sees, until the view is refreshed. So replicas,
and processes, may treat a view as memory of their own.
"""

from __future__ import annotations

import functools
import mmap
import os
import sys
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

__all__ = ["HostBlock", "PlainBlock", "can_map", "make_block", "share_block"]

_ALIGNMENT = 64
_FLAGS_BYTES = 8  # for each page, in /proc/self/pagemap
_PRESENT, _SWAPPED, _OF_FILE = 63, 62, 61


class PlainBlock:
    """Memory without views, for parameters on an accelerator and for systems other than Linux.

    Args:
        sizes: bytes of each part.
        device: where it is.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self.memory: list[Tensor] | None = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
        self.views: list[list[Tensor]] = [self.memory]

    def changed(self, view: int) -> list[slice]:  # noqa: ARG002 - as of a HostBlock
        """Return which bytes only this view has: none."""
        return []

    def stamp(self) -> list[tuple[int, int, int]]:
        """Return what tells whether the first view was written to: nothing can."""
        return []

    def publish(self) -> None:
        """Nothing to do."""

    def spread(self) -> None:
        """Nothing to do."""

    def refresh(self, view: int) -> None:
        """Nothing to do."""


class HostBlock:
    """Memory of the host, in parts, and this process's views of it.

    Args:
        descriptor: of the memory; the caller closes it.
        sizes: bytes of each part.
        num_views: how many views this process needs.
        is_host: whether this process changes the memory itself.
    """

    def __init__(self, descriptor: int, sizes: Sequence[int], num_views: int, *, is_host: bool) -> None:
        ends = list(accumulate(map(_aligned, sizes)))
        offsets = [end - _aligned(size) for end, size in zip(ends, sizes, strict=True)]
        length = _block_bytes(sizes)
        self._whole: Tensor | None = None
        #: The parts of the memory itself; ``None`` in a process that is not the host.
        self.memory: list[Tensor] | None = None
        if is_host:
            mapping = mmap.mmap(descriptor, length)
            self._whole, self.memory = _whole(mapping), _parts(mapping, offsets, sizes)
        self._mappings = [mmap.mmap(descriptor, length, access=mmap.ACCESS_COPY) for _ in range(num_views)]
        self._whole_views = [_whole(mapping) for mapping in self._mappings]
        #: The parts of each view.
        self.views = [_parts(mapping, offsets, sizes) for mapping in self._mappings]

    def changed(self, view: int) -> list[slice]:
        """Return which bytes were written to through a view since it was refreshed, in whole pages."""
        return _private_pages(self._whole_views[view])

    def stamp(self) -> list[tuple[int, int, int]]:
        """Return what tells whether the first view was written to in between: its own pages and their sums."""
        view = self._whole_views[0]
        return [(part.start, part.stop, int(view[part].view(torch.int64).sum())) for part in self.changed(0)]

    def publish(self) -> None:
        """Put what the first view holds into the memory. In the host process only."""
        if self._whole is None:
            raise RuntimeError("Only the host changes the memory that is shared.")
        for part in self.changed(0):
            self._whole[part].copy_(self._whole_views[0][part])

    def spread(self) -> None:
        """Write to the other views what was written through the first one."""
        for part in self.changed(0):
            for view in self._whole_views[1:]:
                view[part].copy_(self._whole_views[0][part])

    def refresh(self, view: int) -> None:
        """Forget what was written through a view: it shows the memory again."""
        for part in self.changed(view):
            self._mappings[view].madvise(mmap.MADV_DONTNEED, part.start, part.stop - part.start)


def can_map() -> bool:
    """Say whether this system has the means for views."""
    return sys.platform == "linux"


def make_block(sizes: Sequence[int], num_views: int) -> HostBlock:
    """Return memory of this process with views of it."""
    descriptor = _allocate(_block_bytes(sizes))
    try:
        return HostBlock(descriptor, sizes, num_views, is_host=True)
    finally:
        os.close(descriptor)


def share_block(exchange: Callable[[Any], list[Any]], rank: int, sizes: Sequence[int], num_views: int) -> HostBlock:
    """Return the chief's memory with views of it; every process of the host calls this.

    The others open the chief's descriptor by way of ``/proc``, as debuggers do with processes of the same user.

    Args:
        exchange: gives every rank every rank's payload.
        rank: this process's id.
        sizes: bytes of each part, the same on all ranks.
        num_views: how many views this process needs.

    Raises:
        RuntimeError: memory can't be shared; every rank raises it.
    """
    descriptor, problem = -1, ""
    try:
        try:
            if rank == 0:
                descriptor = _allocate(_block_bytes(sizes))
        except OSError as error:
            problem = str(error)
        _raise_first(cards := exchange([os.getpid(), descriptor, problem]))
        pid, number, _ = cards[0]
        try:
            if rank != 0:
                descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
            block = HostBlock(descriptor, sizes, num_views, is_host=rank == 0)
        except OSError as error:
            problem = str(error)
        _raise_first(exchange([0, 0, problem]))
        return block
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _raise_first(cards: Sequence[Sequence[Any]]) -> None:
    for rank, (_, _, problem) in enumerate(cards):
        if problem:
            raise RuntimeError(
                f"The processes can't share the memory of the parameters. Rank {rank}: {problem}. They must run on one "
                "Linux host as one user, in one container. MirroredStrategy needs no shared memory."
            )


def _allocate(num_bytes: int) -> int:
    if not can_map():
        raise OSError(f"shared memory between processes needs Linux, and this is {sys.platform}")
    descriptor = os.memfd_create("torchstrategy")
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)  # now, because later there would be a bus error
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _aligned(size: int, unit: int = _ALIGNMENT) -> int:
    return -(-size // unit) * unit


def _block_bytes(sizes: Sequence[int]) -> int:
    return max(mmap.PAGESIZE, _aligned(sum(map(_aligned, sizes)), mmap.PAGESIZE))


def _whole(mapping: mmap.mmap) -> Tensor:
    return torch.frombuffer(mapping, dtype=torch.uint8)


def _parts(mapping: mmap.mmap, offsets: Sequence[int], sizes: Sequence[int]) -> list[Tensor]:
    """Return a tensor for each part with a storage of its own: ``torch.save`` writes whole storages."""
    return [
        torch.frombuffer(mapping, dtype=torch.uint8, offset=offset, count=size)
        for offset, size in zip(offsets, sizes, strict=True)
    ]


def _private_pages(view: Tensor) -> list[slice]:
    """Return the bytes of a mapping whose pages are copies of this process's own."""
    num_pages = view.numel() // mmap.PAGESIZE
    flags = _page_flags(view.data_ptr() // mmap.PAGESIZE, num_pages)
    if flags is None:  # not known, so any may be
        return [slice(0, view.numel())]
    is_private = _is_private(flags)
    if not bool(is_private.any()):
        return []
    edges = torch.diff(is_private.to(torch.int8), prepend=_ZERO, append=_ZERO)
    starts, stops = (torch.nonzero(edges == sign).flatten().tolist() for sign in (1, -1))
    return [slice(a * mmap.PAGESIZE, b * mmap.PAGESIZE) for a, b in zip(starts, stops, strict=True)]


_ZERO = torch.zeros(1, dtype=torch.int8)


def _page_flags(first: int, count: int) -> Tensor | None:
    """Return what the kernel says of some pages of this process; ``None`` if it says nothing."""
    return _read_flags(first, count) if _says_page_flags() else None


def _read_flags(first: int, count: int) -> Tensor | None:
    with open("/proc/self/pagemap", "rb", buffering=0) as pages:
        pages.seek(first * _FLAGS_BYTES)
        data = bytearray(pages.read(count * _FLAGS_BYTES))
    return torch.frombuffer(data, dtype=torch.int64) if len(data) == count * _FLAGS_BYTES else None


@functools.cache
def _says_page_flags() -> bool:
    """Say whether the kernel tells a page that was written to from one that was only read; some sandboxes' do not."""
    try:
        descriptor = _allocate(2 * mmap.PAGESIZE)
    except OSError:
        return False
    try:
        view = _whole(mmap.mmap(descriptor, 2 * mmap.PAGESIZE, access=mmap.ACCESS_COPY))
        view[0] = 1 + view[mmap.PAGESIZE]
        flags = _read_flags(view.data_ptr() // mmap.PAGESIZE, 2)
        return flags is not None and _is_private(flags).tolist() == [True, False]
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _is_private(flags: Tensor) -> Tensor:
    return ((flags >> _PRESENT | flags >> _SWAPPED) & 1 == 1) & (flags >> _OF_FILE & 1 == 0)
