"""Sums of gradients that travel in 16 bits."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from torchstrategy.base.options import PowerSGD
from torchstrategy.collectives.backends import C10dBackend, DataBackend, Wait, outlive_program
from torchstrategy.collectives.connections import Check
from torchstrategy.collectives.native_groups import NativeBackend
from torchstrategy.collectives.summing import sum_in_order

__all__ = ["NarrowBackend", "compressed"]

#: In one large exchange of gloo's the directions of a link take turns, so tensors go in pieces, all at once. 8 MiB
#: between two hosts at 100 Mbit/s, 0.70 s at best, took 1.1 s in one piece and 0.74 s in pieces of 512 KiB.
_GLOO_PIECE_NUMBERS = 256 << 10
_NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}


class NarrowBackend:
    """Rounds what each rank brings to a sum to 16 bits, and adds it in ``float32`` in the order of ranks.

    Each rank gets one part of everybody's tensor, adds it up, and gives the sum, in 16 bits as well, to all. So all
    ranks get the same bits, each number is rounded twice however many ranks there are, and a rank sends and receives
    half of what a ring sends of ``float32``. Of two ranks each one adds up everything, which is as little to send in
    one step less, and rounds once. Tensors of other types than ``float32`` and ``float64`` travel as they are.

    Args:
        backend: carries the bytes; it works only when waited for, so that collectives keep one order on all ranks.
        size: number of ranks.
        name: ``"bf16"`` or ``"fp16"``; numbers too large for ``float16`` become infinite on all ranks.
        piece_numbers: length of the pieces in which longer tensors travel, all at once; 0 means in one.
    """

    def __init__(self, backend: C10dBackend, size: int, name: str, piece_numbers: int = 0) -> None:
        self._backend = backend
        self._size = size
        self._dtype = _NARROW[name]
        self._piece_numbers = piece_numbers
        self.route = f"{backend.route} as {name}"

    def start_sum(self, tensor: Tensor) -> Wait:
        """See ``DataBackend``."""
        if tensor.dtype in (torch.float32, torch.float64) and tensor.numel():
            return functools.partial(self._sum, tensor.view(-1))
        return lambda check: self._backend.start_sum(tensor)(check)

    def start_all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> Wait:
        """See ``DataBackend``."""
        return lambda check: self._backend.start_all_gather(outputs, tensor)(check)

    def start_broadcast(self, tensor: Tensor) -> Wait:
        """See ``DataBackend``."""
        return lambda check: self._backend.start_broadcast(tensor)(check)

    def outlive_program(self) -> None:
        """See ``C10dBackend``."""
        outlive_program(self._backend)

    def _sum(self, flat: Tensor, check: Check) -> None:
        pieces = torch.split(flat, self._piece_numbers or flat.numel())
        if self._size == 2:
            gathers = [self._start_gather(piece.to(self._dtype)) for piece in pieces]
            for piece, (rows, wait) in zip(pieces, gathers, strict=True):
                wait(check)
                torch.add(rows[0].to(flat.dtype), rows[1], out=piece)
            return
        gathers = []
        for received, wait in [self._start_exchange(piece) for piece in pieces]:
            wait(check)
            total = received.new_empty(received.shape[1])
            sum_in_order(list(received), total)
            gathers.append(self._start_gather(total))
        for piece, (rows, wait) in zip(pieces, gathers, strict=True):
            wait(check)
            piece.copy_(rows.view(-1)[: piece.numel()])

    def _start_exchange(self, piece: Tensor) -> tuple[Tensor, Wait]:
        """Return where every rank's numbers for this rank's part of the sum arrive, one row for each."""
        length = -(-piece.numel() // self._size)
        sent = piece.new_zeros((self._size, length), dtype=self._dtype)
        sent.view(-1)[: piece.numel()] = piece
        received = torch.empty_like(sent)
        return received, self._backend.start_all_to_all(received.view(torch.uint8), sent.view(torch.uint8))

    def _start_gather(self, own: Tensor) -> tuple[Tensor, Wait]:
        """Return where every rank's numbers arrive, one row for each."""
        rows = own.new_empty((self._size, own.numel()))
        return rows, self._backend.start_all_gather(list(rows.view(torch.uint8)), own.view(torch.uint8))


def compressed(backend: C10dBackend, size: int, compression: str | PowerSGD | None) -> DataBackend:
    """Return what carries sums of gradients over a network.

    Args:
        backend: carries bytes over the network.
        size: number of ranks.
        compression: the choice of ``CommunicationOptions``.

    Returns:
        A backend that rounds to 16 bits, or ``backend`` itself: ``PowerSGD`` makes smaller what backends get.
    """
    if not isinstance(compression, str):
        return backend
    return NarrowBackend(backend, size, compression, 0 if isinstance(backend, NativeBackend) else _GLOO_PIECE_NUMBERS)
