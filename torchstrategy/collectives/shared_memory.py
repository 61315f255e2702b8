"""Collectives between the processes of one host, through memory that they share.

The memory is anonymous (``memfd_create``): it has no name in ``/dev/shm``, is not limited by the size of that file
system, which containers keep at 64 MB, and is gone with the last process that maps it, however that one ends. Its file
descriptor travels over Unix sockets, one between each pair of ranks, which afterwards carry one byte for each step of a
collective. A rank waits in ``recv``: nothing spins, and the end of a process ends the wait at once.

Data passes in chunks through three slots of the memory, so that some chunks are written while others are read. Each
slot has an area for each rank's input and, where there are more than two, one for results. In **one step**, every rank
copies its chunk to its area, and adds up all of them itself. In **two steps**, every rank copies only what the others
need, adds up its own part of the chunk, and writes it to the results, from where the others copy it: more waiting, but
less work for three and more ranks. Sums are in the order of ranks, so all ranks get the same bits.

Who may write when: a rank sends a byte when its input is there, and in two steps another one when its results are. An
area of input may be overwritten once every other rank has sent the byte that follows its reading (``_free_at``). The
results of a chunk are overwritten three chunks later, when all have brought their input to that one; each does so after
reading them.
"""

from __future__ import annotations

import functools
import mmap
import os
import secrets
import socket
import struct
import sys
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchstrategy.base.labels import label
from torchstrategy.collectives.connections import BACKLOG, Check
from torchstrategy.collectives.joining import Channel, connect_ranks, lost_connection
from torchstrategy.collectives.summing import (
    Chunk,
    Pack,
    as_addable,
    copy_in,
    copy_out,
    divide,
    is_addable,
    sum_in_order,
)

__all__ = ["SharedMemoryBackend", "share_memory"]

_NUM_SLOTS = 3
_AHEAD = 2  # chunks that are in the memory before the first one is added up
_MEMORY_BYTES = 64 << 20
# Up to this size one step is faster than two between 3 and 4 processes; between 2 it always is.
_ONE_STEP_BYTES = 1 << 20
_SMALL_BYTES = 4 << 20
_NUM_PACKS = 4
_ALIGNMENT = 64
_POLL_US = 500_000
_SET_UP_S = 30.0

Wait = Callable[[Check], None]


class SharedMemoryBackend:
    """Collectives between some processes of one host; tensors are on the CPU.

    Operations are carried out when their end is waited for, in the order in which they were started.

    Args:
        memory: the shared memory.
        peers: sockets to the other processes, by index.
        index: this process's position among them.
        ranks: each process's rank.
    """

    route = "shared memory"

    def __init__(self, memory: mmap.mmap, peers: Mapping[int, socket.socket], index: int, ranks: Sequence[int]) -> None:
        self._index = index
        self._ranks = ranks
        self._size = len(peers) + 1
        self._peers = dict(sorted(peers.items()))
        self._chunk_bytes = chunk_bytes(self._size)
        self._whole_bytes = min(self._chunk_bytes // 2, _ONE_STEP_BYTES)  # which are one chunk, in one step
        slots = torch.frombuffer(memory, dtype=torch.uint8).view(_NUM_SLOTS, _num_areas(self._size), self._chunk_bytes)
        self._inputs: list[list[Tensor]] = [list(slot[: self._size]) for slot in slots]
        self._results: list[Tensor] = [area for slot in slots for area in slot[self._size :]]  # none between two
        self._slot = 0
        self._sent = 0  # bytes to each peer
        self._arrived = dict.fromkeys(self._peers, 0)
        self._free_at = [0] * _NUM_SLOTS
        self._queue: deque[Wait] = deque()
        #: For the last few lists of small tensors, by dtype and shapes.
        self._packs: dict[tuple[Any, ...], Pack] = {}
        weakref.finalize(self, _close_all, list(self._peers.values())).atexit = False
        timeout = struct.pack("@ll", _POLL_US // 1_000_000, _POLL_US % 1_000_000)
        for peer in self._peers.values():  # one system call for each wait instead of two
            peer.setblocking(True)  # noqa: FBT003 - the standard library's signature
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)

    def start_sum(self, tensor: Tensor) -> Wait:
        """See ``DataBackend``."""
        return self.start_sum_of([tensor])

    def start_sum_of(self, tensors: Sequence[Tensor]) -> Wait:
        """Do as ``start_sum`` with several contiguous tensors of one dtype, as if they lay one after the other."""
        if len(tensors) > 1 and is_addable(tensors[0].dtype):
            num_bytes = sum([tensor.nbytes for tensor in tensors])
            if num_bytes <= self._whole_bytes:
                return self._start(functools.partial(self._sum_packed, list(tensors), num_bytes))
        return self._start(functools.partial(self._sum, as_addable(tensors)))

    def start_all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> Wait:
        """See ``DataBackend``."""
        return self._start(functools.partial(self._gather, list(outputs), tensor))

    def start_broadcast(self, tensor: Tensor) -> Wait:
        """See ``DataBackend``."""
        return self._start(functools.partial(self._broadcast, tensor))

    def _start(self, job: Wait) -> Wait:
        self._queue.append(job)
        return functools.partial(self._finish, job)

    def _finish(self, job: Wait, check: Check) -> None:
        check()
        while job in self._queue:
            self._queue.popleft()(check)

    def _sum(self, numbers: Sequence[Tensor], check: Check) -> None:
        sizes, item = tuple([part.numel() for part in numbers]), numbers[0].element_size()
        num_bytes = sum(sizes) * item
        in_one_step = self._size == 2 or num_bytes <= _ONE_STEP_BYTES
        # Small models' processes have less of the memory for it, and their sums take hardly longer.
        length = (self._chunk_bytes // 2 if num_bytes <= _SMALL_BYTES else self._chunk_bytes) // item
        chunks = divide(numbers, sizes, length, 1 if in_one_step else self._size, _ALIGNMENT // item)
        if chunks:
            (self._sum_whole if in_one_step else self._sum_parts)(chunks, check)

    def _sum_whole(self, chunks: Sequence[Chunk], check: Check) -> None:
        """Let every rank add up everything."""
        uploads = [self._upload(chunk, check) for chunk in chunks[:_AHEAD]]
        for number, chunk in enumerate(chunks):
            slot, mark = uploads[number]
            self._wait(mark, check)
            (pieces,) = chunk.parts
            columns = [chunk.places(area)[0] for area in self._inputs[slot]]
            if len(pieces) > 1:
                total = torch.empty_like(columns[0])
                sum_in_order(columns, total)
                copy_out(total, pieces)
            else:
                if self._size == 2:
                    columns[self._index] = pieces[0]
                sum_in_order(columns, pieces[0])
            self._free_at[slot] = self._sent + 1
            if number + _AHEAD < len(chunks):
                uploads.append(self._upload(chunks[number + _AHEAD], check))

    def _sum_packed(self, tensors: list[Tensor], num_bytes: int, check: Check) -> None:
        """Do as ``_sum_whole`` with small tensors that are one chunk: other ranks can't tell the difference."""
        dtype = tensors[0].dtype
        key = (dtype, *[tensor.shape for tensor in tensors])
        pack = self._packs.get(key)
        if pack is None:
            while len(self._packs) >= _NUM_PACKS:
                del self._packs[next(iter(self._packs))]
            pack = self._packs[key] = Pack.of(tensors)
        torch._foreach_copy_(pack.views, tensors)
        slot = self._take_slot(check)
        columns = [area[:num_bytes].view(dtype) for area in self._inputs[slot]]
        columns[self._index].copy_(pack.flat)
        self._wait(self._signal(check), check)
        sum_in_order(columns, pack.flat)
        torch._foreach_copy_(tensors, pack.views)
        self._free_at[slot] = self._sent + 1

    def _sum_parts(self, chunks: Sequence[Chunk], check: Check) -> None:
        """Let every rank add up a part of each chunk."""
        uploads = [self._upload(chunk, check) for chunk in chunks[:_AHEAD]]
        added: list[tuple[int, int]] = []
        for number, chunk in enumerate(chunks):
            slot, mark = uploads[number]
            self._wait(mark, check)
            self._add_up(chunk, slot)
            self._free_at[slot] = self._signal(check)
            added.append((slot, self._free_at[slot]))
            # The other ranks get the time of a chunk before this one waits for them.
            if number > 0:
                self._download(chunks[number - 1], *added[number - 1], check)
            if number + _AHEAD < len(chunks):
                uploads.append(self._upload(chunks[number + _AHEAD], check))
        self._download(chunks[-1], *added[-1], check)

    def _upload(self, chunk: Chunk, check: Check) -> tuple[int, int]:
        """Copy what the others need of a chunk; return the slot, and the mark at which all ranks have done so."""
        slot = self._take_slot(check)
        places = chunk.places(self._inputs[slot][self._index])
        for rank, (place, pieces) in enumerate(zip(places, chunk.parts, strict=True)):
            if len(places) == 1 or rank != self._index:
                copy_in(place, pieces)
        return slot, self._signal(check)

    def _add_up(self, chunk: Chunk, slot: int) -> None:
        """Add up this rank's part of a chunk."""
        own = chunk.parts[self._index]
        if own:
            columns = [chunk.places(area)[self._index] for area in self._inputs[slot]]
            if len(own) == 1:
                columns[self._index] = own[0]
            else:
                copy_in(columns[self._index], own)  # nobody else reads this part of it
            total = chunk.places(self._results[slot])[self._index]
            sum_in_order(columns, total)
            copy_out(total, own)

    def _download(self, chunk: Chunk, slot: int, mark: int, check: Check) -> None:
        """Copy what the other ranks have added up."""
        self._wait(mark, check)
        places = chunk.places(self._results[slot])
        for rank in self._peers:
            copy_out(places[rank], chunk.parts[rank])

    def _gather(self, outputs: Sequence[Tensor], tensor: Tensor, check: Check) -> None:
        outputs[self._index].copy_(tensor)
        for start in range(0, tensor.numel(), self._chunk_bytes):
            part = slice(start, start + self._chunk_bytes)
            slot = self._take_slot(check)
            self._input(slot, self._index, tensor[part]).copy_(tensor[part])
            self._wait(self._signal(check), check)
            for rank in self._peers:
                outputs[rank][part].copy_(self._input(slot, rank, tensor[part]))
            self._free_at[slot] = self._sent + 1

    def _broadcast(self, tensor: Tensor, check: Check) -> None:
        for chunk in torch.split(tensor, self._chunk_bytes):
            slot = self._take_slot(check)
            area = self._input(slot, 0, chunk)
            if self._index == 0:
                area.copy_(chunk)
            self._wait(self._signal(check), check)
            if self._index != 0:
                chunk.copy_(area)
            self._free_at[slot] = self._sent + 1

    def _input(self, slot: int, rank: int, like: Tensor) -> Tensor:
        return self._inputs[slot][rank][: like.numel()]

    def _take_slot(self, check: Check) -> int:
        slot, self._slot = self._slot, (self._slot + 1) % _NUM_SLOTS
        self._wait(self._free_at[slot], check)
        return slot

    def _signal(self, check: Check) -> int:
        """Tell the others that this rank took a step; return the mark at which they have taken it, too."""
        self._sent += 1
        byte = bytes([self._sent & 0xFF])
        for index, peer in self._peers.items():
            while True:
                try:
                    peer.send(byte)
                    break
                except BlockingIOError:
                    check()
                except OSError as error:
                    raise lost_connection(self._ranks[index], error) from None
        return self._sent

    def _wait(self, mark: int, check: Check) -> None:
        for rank in self._peers:
            if self._arrived[rank] < mark:
                with label("wait", "for process", rank, "of this host"):
                    self._hear(rank, mark, check)

    def _hear(self, rank: int, mark: int, check: Check) -> None:
        while self._arrived[rank] < mark:
            try:
                steps = self._peers[rank].recv(16)
            except BlockingIOError:
                check()
                continue
            except OSError as error:
                raise lost_connection(self._ranks[rank], error) from None
            if not steps:
                raise lost_connection(self._ranks[rank])
            self._arrived[rank] += len(steps)
            if steps[-1] != self._arrived[rank] & 0xFF:
                raise ConnectionError("the ranks lost step in shared memory")


def chunk_bytes(size: int) -> int:
    """Return the bytes of a tensor that are in one slot of the memory, so that all slots take at most 64 MiB.

    Measured with 10 M floats between 2, 3 and 4 processes, from 128 KiB to 4 MiB: small chunks make the ranks wait for
    each other more often, large ones leave the caches. Each process holds all that it has touched of the slots.
    """
    chunk = 512 << 10 if size == 2 else 2 << 20
    while _NUM_SLOTS * _num_areas(size) * chunk > _MEMORY_BYTES:
        chunk //= 2
    return chunk


def _num_areas(size: int) -> int:
    """Return the number of areas of a slot: one for each input, and one for the results of two steps."""
    return size if size == 2 else size + 1


def share_memory(
    exchange: Callable[[Any], list[Any]], rank: int, hosts: Sequence[int], check: Check
) -> SharedMemoryBackend | str | None:
    """Set up shared memory between the ranks of each host; every rank of the group calls this.

    Args:
        exchange: gives every rank every rank's payload.
        rank: this process's id.
        hosts: for each rank the number of its host.
        check: called while waiting; may raise to end the wait.

    Returns:
        The backend; ``None`` if this rank is alone on its host; why it can't be had, if it can't on some rank.
    """
    local = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    index = local.index(rank)
    listener, descriptor, backend = None, None, None
    card: list[str] = ["", "", ""]
    try:
        try:
            listener = _listen(card)
            descriptor = _allocate(len(local)) if index == 0 else None
        except OSError as error:
            card[2] = str(error)
        cards = exchange(card)
        reason = _reasons([row[2] for row in cards])
        if reason or listener is None:
            return reason
        problem = ""
        try:
            backend = _connect(listener, cards, local, index, descriptor, check)
        except OSError as error:
            problem = str(error)
        return _reasons(exchange(problem)) or backend
    finally:
        if listener is not None:
            listener.close()
        if descriptor is not None:
            os.close(descriptor)


def _listen(card: list[str]) -> socket.socket:
    if sys.platform != "linux":
        raise OSError(f"shared memory between processes needs Linux, and this is {sys.platform}")
    # An abstract name: there is no file, and nothing to remove.
    card[0], card[1] = f"torchstrategy-{secrets.token_hex(16)}", secrets.token_hex(16)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0{card[0]}")
    listener.listen(BACKLOG)
    return listener


def _allocate(size: int) -> int:
    num_bytes = _NUM_SLOTS * _num_areas(size) * chunk_bytes(size)
    descriptor = os.memfd_create("torchstrategy")
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)  # now, because later there would be a bus error
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _connect(
    listener: socket.socket,
    cards: Sequence[Sequence[str]],
    local: Sequence[int],
    index: int,
    descriptor: int | None,
    check: Check,
) -> SharedMemoryBackend | None:
    """Connect to the other ranks of this host and share the first one's memory; ``None`` if there are no others."""
    if len(local) == 1:
        return None
    calls = {other: functools.partial(_call, cards[local[other]][0]) for other in range(index)}
    answers = range(index + 1, len(local))
    channels = connect_ranks(listener, index, calls, answers, cards[local[0]][1].encode(), _SET_UP_S, check)
    try:
        memory = _share(channels, descriptor, check)
    except BaseException:
        for channel in channels.values():
            channel.close()
        raise
    return SharedMemoryBackend(memory, {other: channel.socket for other, channel in channels.items()}, index, local)


def _share(channels: Mapping[int, Channel], descriptor: int | None, check: Check) -> mmap.mmap:
    if descriptor is not None:
        for channel in channels.values():
            socket.send_fds(channel.socket, [b"m"], [descriptor])
        return mmap.mmap(descriptor, 0)
    while True:
        try:
            _, received, _, _ = socket.recv_fds(channels[0].socket, 1, 1)
            break
        except TimeoutError:
            check()
    if not received:
        raise ConnectionError("connection closed by peer")
    try:
        return mmap.mmap(received[0], 0)
    finally:
        os.close(received[0])


def _call(name: str, timeout_s: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout_s)
    connection.connect(f"\0{name}")
    return connection


def _reasons(by_rank: Sequence[str]) -> str:
    """Return each reason with the first rank that has it; empty if there is none."""
    distinct = [reason for reason in dict.fromkeys(by_rank) if reason]
    return "; ".join(f"rank {by_rank.index(reason)}: {reason}" for reason in distinct)


def _close_all(sockets: Sequence[socket.socket]) -> None:
    for connection in sockets:
        connection.close()
