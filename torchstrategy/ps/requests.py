"""How what concerns a whole variable is cut into what each parameter server is asked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchstrategy.errors import InvalidArgumentError
from torchstrategy.ps.layout import VariableSpec
from torchstrategy.ps.store import check_rows

__all__ = ["Place", "Requests", "add_sparse", "by_part"]

Place = tuple[int, int]  # id of the variable, number of the part


class Requests:
    """What to ask each server: rows that name parts, with tensors."""

    def __init__(self) -> None:
        self._rows: dict[int, list[list[Any]]] = {}
        self._tensors: dict[int, list[Tensor]] = {}

    def add(self, ps: int, place: Place, *values: Any, tensors: Iterable[Tensor] = ()) -> None:
        """Ask a server about one more part."""
        self._rows.setdefault(ps, []).append([*place, *values])
        self.tensors_of(ps).extend(tensors)

    def tensors_of(self, ps: int) -> list[Tensor]:
        """Return the list of a server's tensors, which is asked even if nothing is added."""
        return self._tensors.setdefault(ps, [])

    def all(self) -> list[tuple[int, list[list[Any]], tuple[Tensor, ...]]]:
        """Return for each server that is asked its number, rows and tensors."""
        return [(ps, self._rows.get(ps, []), tuple(tensors)) for ps, tensors in self._tensors.items()]

    def pair(self, ps: int, values: Sequence[Any]) -> list[tuple[Place, Any]]:
        """Return each place that a server was asked about with its answer."""
        return [((row[0], row[1]), value) for row, value in zip(self._rows.get(ps, []), values, strict=True)]


def by_part(spec: VariableSpec, indices: Tensor) -> tuple[Tensor | None, list[tuple[int, Tensor | slice]]]:
    """Return the positions in ``indices`` sorted by the part that holds the row, and those of each such part.

    With numpy, because torch shares out even this among threads: with no core free it took 90 ms instead of 0.1.
    """
    if not spec.is_sharded:
        return None, [(0, slice(None))]
    owners = np.searchsorted([part.stop for part in spec.parts], indices.numpy(), side="right")
    bounds = np.cumsum(np.bincount(owners, minlength=len(spec.parts))).tolist()
    pieces = [(i, slice(first, stop)) for i, (first, stop) in enumerate(zip([0, *bounds], bounds, strict=False))]
    pieces = [(index, own) for index, own in pieces if own.start < own.stop]
    if (owners[1:] >= owners[:-1]).all():
        return None, list(pieces)
    order = torch.from_numpy(owners.argsort(kind="stable"))
    return order, [(index, order[own]) for index, own in pieces]


def add_sparse(requests: Requests, spec: VariableSpec, gradient: Tensor) -> None:
    """Ask for an update with a gradient of some rows, each row once.

    Raises:
        IndexError: a row is out of range.
        InvalidArgumentError: the gradient has not the variable's shape and dtype, or is sparse in another way.
    """
    name = f"{spec.name}.grad"
    if gradient.sparse_dim() != 1 or gradient.shape != spec.shape or gradient.dtype != spec.dtype:
        raise InvalidArgumentError(
            f"{name!r} must be sparse along its rows, of shape {list(spec.shape)}, {spec.dtype}. Received: "
            f"{gradient.sparse_dim()} sparse dimensions, shape {list(gradient.shape)}, {gradient.dtype}"
        )
    indices, values = gradient._indices()[0], gradient._values()
    check_rows(name, spec.shape, indices)
    if not gradient.is_coalesced() and bool((indices[1:] <= indices[:-1]).any()):
        coalesced = gradient.coalesce()
        indices, values = coalesced._indices()[0], coalesced._values()
    # Every part gets its rows, also if these are none: its optimizer counts the step all the same.
    indices, values = indices.cpu(), values.cpu()
    bounds = np.searchsorted(indices.numpy(), [part.start for part in spec.parts]).tolist()
    for index, (part, first, stop) in enumerate(zip(spec.parts, bounds, [*bounds[1:], len(indices)], strict=True)):
        own = slice(first, stop)
        requests.add(part.ps, (spec.id, index), True, tensors=[indices[own] - part.start, values[own]])  # noqa: FBT003
