"""Where the parts of each variable live: which rows on which parameter server.

Decided once, when the variable is made, by the coordinator; workers get the same ``VariableSpec``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

__all__ = ["Part", "Placer", "VariableSpec", "cut_evenly"]


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
            "dtype": str(self.dtype).removeprefix("torch."),
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
        >>> from torchstrategy.ps.partitioners import FixedShardsPartitioner
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
