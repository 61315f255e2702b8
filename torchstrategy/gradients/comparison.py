"""Compares the parameters of the processes: a checkpoint loaded on the chief only would train on in silence.

All ranks hold equal bits, because they add up gradients in one order and make the same steps. So bits are compared
first, by fingerprints that know the place of each element. Only parameters whose bits differ are looked at element by
element: ranks on unlike hardware may round differently.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchstrategy.base.fingerprints import fingerprints
from torchstrategy.base.log import warning_once
from torchstrategy.collectives.process_group import WorkerGroup
from torchstrategy.errors import DivergenceError
from torchstrategy.replicas.divergence import difference

__all__ = ["compare_between_ranks", "differences_between_ranks"]

_OPERATION = "the comparison of parameters between ranks"


def compare_between_ranks(tensors: Sequence[Tensor], workers: WorkerGroup, name: Callable[[int], str]) -> None:
    """Raise unless tensors are equal on all ranks, rounding apart; every rank calls this.

    Args:
        tensors: of equal shapes and dtypes on all ranks.
        workers: the processes.
        name: says what the tensor at a position is.

    Raises:
        DivergenceError: one differs by more than rounding.
    """
    found = differences_between_ranks(tensors, workers)
    large = {k: value for k, value in found.items() if value is not None}
    if large:
        k, text = next(iter(large.items()))
        more = f" {len(large) - 1} more of {len(tensors)} do." if len(large) > 1 else ""
        raise DivergenceError(
            f"{name(k)} differs between the ranks before its gradients are summed: "
            f"{text}.{more} Every rank must change parameters in the same way: load weights on all ranks, not on the "
            "chief only."
        )
    if found:
        warning_once(
            f"{len(found)} of {len(tensors)} parameters differ between the ranks in the last bits, such as "
            f"{name(next(iter(found)))}. That is rounding, as on ranks with unlike hardware or numbers of threads; it "
            "is compared with a tolerance."
        )


def differences_between_ranks(tensors: Sequence[Tensor], workers: WorkerGroup) -> dict[int, str | None]:
    """Return the positions of the tensors whose bits differ between ranks; every rank calls this.

    Returns:
        For each position how the tensors differ, the same text on all ranks; ``None`` where that may be rounding.
    """
    numbers = fingerprints(tensors)
    digest = hashlib.sha256(repr(numbers).encode()).hexdigest()[:16]
    if len(set(workers.exchange(_OPERATION, digest))) == 1:
        return {}
    rows = workers.exchange(_OPERATION, numbers)
    found: dict[int, str | None] = {}
    for k in [k for k, column in enumerate(zip(*rows, strict=True)) if len(set(column)) > 1]:
        own = tensors[k].detach()
        first = own.to_dense() if own.is_sparse else own.clone()
        workers.broadcast([first], _OPERATION)
        with torch.no_grad():
            texts = workers.exchange(_OPERATION, difference(first, own.to_dense() if own.is_sparse else own))
        apart = {rank: text for rank, text in enumerate(texts) if text is not None}
        ranks = [rank for rank, row in enumerate(rows) if row[k] != rows[0][k]]
        found[k] = None
        if apart:
            rank, text = next(iter(apart.items()))
            others = f" (so do ranks {', '.join(map(str, ranks[1:]))})" if len(ranks) > 1 else ""
            found[k] = f"rank {rank}'s from rank 0's {text}{others}"
    return found
