"""Where the parts and rows of variables live, and how what concerns all of one is cut into each server's.

Decided once, when the variable is made, by the coordinator; workers get the same ``VariableSpec``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchstrategy.base.names import dtype_name
from torchstrategy.errors import InvalidArgumentError
from torchstrategy.ps.store import check_rows

__all__ = [
    "Part",
    "Place",
    "Placer",
    "Requests",
    "VariableSpec",
    "add_sparse",
    "by_part",
    "check_padding_index",
    "cut_evenly",
    "rows_of",
    "to_row_numbers",
    "to_row_values",
]


class _Rows(torch.autograd.Function):
    """Gives rows that were pulled; their gradient is that of the variable, sparse."""

    @staticmethod
    def forward(ctx: Any, variable: Tensor, indices: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.shape = variable.shape
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (indices,) = ctx.saved_tensors
        sparse = torch.sparse_coo_tensor(
            indices[None], gradient, ctx.shape, check_invariants=False, is_coalesced=not torch.is_grad_enabled()
        )
        return sparse, None, None


def rows_of(variable: Tensor, indices: Tensor, rows: Tensor) -> Tensor:
    """Return rows through which a backward pass reaches their variable.

    Args:
        variable: a leaf of autograd, whose values are not looked at.
        indices: numbers of the rows, ``[k]`` in int64, sorted, each once.
        rows: their values, ``[k, ...]``.
    """
    result: Tensor = _Rows.apply(variable, indices, rows)  # type: ignore[no-untyped-call]
    return result


def to_row_numbers(name: str, shape: Sequence[int], indices: Any) -> Tensor:
    """Return what names rows of a variable as int64, of any shape.

    Raises:
        InvalidArgumentError: these are no integers, or one is out of range; negative numbers are.
    """
    try:
        numbers = torch.as_tensor(indices)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InvalidArgumentError(f"Rows of {name!r} are named by integers. Received: {indices!r}") from error
    if not numbers.numel() and not isinstance(indices, Tensor):
        numbers = numbers.to(torch.int64)  # an empty list has torch's default dtype
    if numbers.dtype not in _INTEGERS or numbers.layout != torch.strided:
        raise InvalidArgumentError(f"Rows of {name!r} are named by integers. Received: indices of {numbers.dtype}")
    numbers = numbers.detach().to(torch.int64)
    if numbers.numel():
        first, last = map(int, torch.aminmax(numbers))
        if first < 0 or last >= shape[0]:
            wrong = first if first < 0 else last
            raise InvalidArgumentError(f"{name!r} has rows 0 to {shape[0] - 1}. Received: index {wrong}")
    return numbers


def to_row_values(name: str, shape: Sequence[int], dtype: torch.dtype, num_rows: int, values: Any) -> Tensor:
    """Return what is brought for rows of a variable as ``[num_rows, *shape[1:]]`` in its dtype.

    Raises:
        InvalidArgumentError: it has not this shape and does not broadcast to it, or another kind of dtype.
    """
    try:
        found = torch.as_tensor(values).detach()
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InvalidArgumentError(f"Rows of {name!r} can't be changed by {values!r}: it is no tensor.") from error
    if found.numel() and not torch.can_cast(found.dtype, dtype):
        raise InvalidArgumentError(
            f"{name!r} has dtype {dtype}. Received: values of {found.dtype}. Convert them: `values.to({dtype})`"
        )
    try:
        return found.to(dtype).expand((num_rows, *shape[1:]))
    except RuntimeError as error:
        raise InvalidArgumentError(
            f"Values of shape {tuple(found.shape)} don't fit {num_rows} rows of {name!r}, whose shape is "
            f"{tuple(shape)}."
        ) from error


def check_padding_index(name: str, num_rows: int, padding: int) -> int:
    """Return the number of the row that pads; negative ones count from the end.

    Raises:
        InvalidArgumentError: there is no such row.
    """
    if not -num_rows <= padding < num_rows:
        raise InvalidArgumentError(
            f"padding_idx must be a row of {name!r}, {-num_rows} to {num_rows - 1}. Received: {padding}"
        )
    return padding % num_rows


_INTEGERS = frozenset({torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8})


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


class Part(NamedTuple):
    """The rows ``start`` to ``stop`` (excluded) of a variable, held by one parameter server.

    A scalar has one part, with rows 0 to 1.
    """

    name: str
    ps: int
    start: int
    stop: int


@dataclass(frozen=True)
class VariableSpec:
    """What is known of a variable of a parameter server besides its value."""

    id: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    parts: tuple[Part, ...]

    @property
    def is_sharded(self) -> bool:
        """Whether it is cut into several parts."""
        return len(self.parts) > 1

    @property
    def num_bytes(self) -> int:
        """Size of the whole variable."""
        return math.prod(self.shape) * self.dtype.itemsize

    def part_shape(self, index: int) -> tuple[int, ...]:
        """Return the shape of one part."""
        part = self.parts[index]
        return (part.stop - part.start, *self.shape[1:]) if self.shape else ()

    def cut(self, value: torch.Tensor, index: int) -> torch.Tensor:
        """Return one part's rows of a tensor of the variable's shape: a view."""
        part = self.parts[index]
        return value[part.start : part.stop] if self.is_sharded else value

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return {
            "id": self.id,
            "name": self.name,
            "shape": list(self.shape),
            "dtype": dtype_name(self.dtype),
            "trainable": self.trainable,
            "parts": [list(part) for part in self.parts],
        }

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> VariableSpec:
        """Return what ``to_json`` was made of.

        Raises:
            ValueError: the fields are not those of a variable.
        """
        try:
            dtype = getattr(torch, fields["dtype"])
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"{fields['dtype']!r} is no dtype")
            parts = tuple(Part(str(name), int(ps), int(start), int(stop)) for name, ps, start, stop in fields["parts"])
            return cls(
                int(fields["id"]),
                str(fields["name"]),
                tuple(map(int, fields["shape"])),
                dtype,
                bool(fields["trainable"]),
                parts,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"These are not the fields of a variable: {fields!r:.300} ({error})") from error


class Placer:
    """Decide where each new variable lives, in the order in which they are made.

    tf's rules: one counter over all variables goes round the parameter servers, whatever their size, dtype or use;
    each shard of a variable advances it; a variable with a place of its own does not.

    Args:
        num_ps: number of parameter servers.
        partitioner: says into how many shards to cut a variable; ``None`` cuts none.
        by_size: place each shard on the server with the fewest bytes so far instead (the lowest such number).

    Raises:
        ValueError: ``num_ps`` is smaller than 1.

    Example:
        >>> from torchstrategy.ps.layout import Placer
        >>> from torchstrategy.ps.partitioning import FixedShardsPartitioner
        >>> placer = Placer(2, FixedShardsPartitioner(3))
        >>> [(part.ps, part.start, part.stop) for part in placer.place(0, "w", (7, 4), torch.float32, True).parts]
        [(0, 0, 3), (1, 3, 5), (0, 5, 7)]
        >>> placer.place(1, "b", (), torch.float32, True).parts
        (Part(name='b', ps=1, start=0, stop=1),)
    """

    def __init__(
        self,
        num_ps: int,
        partitioner: Callable[..., Sequence[int]] | None = None,
        by_size: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        if num_ps < 1:
            raise ValueError(f"At least one parameter server is needed. Received: num_ps={num_ps}")
        self._num_ps = num_ps
        self._partitioner = partitioner
        self._by_size = by_size
        self._num_placed = 0
        self._num_bytes = [0] * num_ps

    def place(
        self,
        id: int,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        trainable: bool,  # noqa: FBT001
        *,
        ps: int | None = None,
    ) -> VariableSpec:
        """Return the new variable's spec.

        Args:
            id: its number, which no other variable of the coordinator has.
            name: for messages and for the names of its parts.
            shape: its whole shape.
            dtype: its dtype.
            trainable: whether it gets gradients.
            ps: the server that has to hold it, whole; ``None`` cuts and places it by the rules.

        Raises:
            ValueError: there is no server ``ps``, or the partitioner gave something else than numbers of shards, or
                more than one along another axis than 0.
        """
        shape = tuple(shape)
        if ps is not None and not 0 <= ps < self._num_ps:
            raise ValueError(f"There is no parameter server {ps} for variable {name!r}: there are {self._num_ps}.")
        num_shards = self._num_shards(name, shape, dtype) if shape and ps is None else 1
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        parts = []
        start = 0
        for index, rows in enumerate(cut_evenly(shape[0] if shape else 1, num_shards)):
            place = self._next_place() if ps is None else ps
            self._num_bytes[place] += rows * row_bytes
            parts.append(Part(f"{name}/part_{index}" if num_shards > 1 else name, place, start, start + rows))
            start += rows
        return VariableSpec(id, name, shape, dtype, trainable, tuple(parts))

    def _next_place(self) -> int:
        if self._by_size:
            return self._num_bytes.index(min(self._num_bytes))
        self._num_placed += 1
        return (self._num_placed - 1) % self._num_ps

    def _num_shards(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        if self._partitioner is None:
            return 1
        counts = self._partitioner(shape=shape, dtype=dtype)  # as tf calls it
        try:
            counts = [int(count) for count in counts]
        except (TypeError, ValueError):
            counts = []
        if not counts:
            raise ValueError(
                f"The partitioner must return the number of shards along each axis. Received for variable {name!r} of "
                f"shape {list(shape)}: {counts}"
            )
        if any(count > 1 for count in counts[1:]):
            raise ValueError(
                f"Variables are cut along axis 0 only: the partitioner may return numbers above 1 there alone. "
                f"Received for variable {name!r} of shape {list(shape)}: {counts}"
            )
        return max(1, min(counts[0], shape[0]))


def cut_evenly(num_rows: int, num_shards: int) -> list[int]:
    """Return the rows of each shard; the first ones get one more where they don't come out even.

    Example:
        >>> from torchstrategy.ps.layout import cut_evenly
        >>> cut_evenly(13, 5)
        [3, 3, 3, 2, 2]
    """
    each, more = divmod(num_rows, num_shards)
    return [each + (index < more) for index in range(num_shards)]
