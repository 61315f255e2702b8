"""What is recorded of a run: of each replica, step by step, in CPU tensors of double precision."""

from __future__ import annotations

import hashlib
import io
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "Backward",
    "Draw",
    "Replica",
    "Run",
    "Step",
    "Update",
    "dump",
    "hash_rows",
    "load",
    "measured",
    "tensors_of",
]


@dataclass
class Backward:
    """A backward pass: the value it started from, and what its loss adds up.

    ``sums`` has, for each sum over elements in the loss, how many there are and the constant that each is scaled by.
    """

    loss: float
    sums: list[tuple[int, float]]


@dataclass
class Draw:
    """The beginning of what a random function returned."""

    function: str
    begin: tuple[float, ...]


@dataclass
class Update:
    """One optimizer step of one replica, by names of parameters."""

    optimizer: str
    local: dict[str, Tensor] = field(default_factory=dict)  # after the last backward pass, before any sum
    gradients: dict[str, Tensor] = field(default_factory=dict)  # what the step used
    before: dict[str, Tensor] = field(default_factory=dict)  # the weights it began with


@dataclass
class Step:
    """What one replica did between two optimizer steps, or in one call of the program's step."""

    delivered: Counter[bytes] = field(default_factory=Counter)
    seen: Counter[bytes] = field(default_factory=Counter)
    num_rows: int | None = None
    backwards: list[Backward] = field(default_factory=list)
    draws: list[Draw] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Replica:
    """One replica's part of a run."""

    initial: dict[str, Tensor] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)


@dataclass
class Run:
    """A run of the program with ``num_replicas`` replicas, in ``num_processes`` processes."""

    num_replicas: int
    num_processes: int
    replicas: dict[int, Replica] = field(default_factory=dict)
    error: str | None = None
    is_single_precision: bool = False
    known: set[bytes] = field(default_factory=set)  # the rows of all tensors that were delivered
    printed: str = ""  # by the first process of a script

    @property
    def title(self) -> str:
        """What the report calls it."""
        one = self.num_replicas == 1
        where = "one process" if self.num_processes == 1 else f"{self.num_processes} processes"
        return f"{self.num_replicas} replica{'' if one else 's'} in {where}"

    @property
    def num_steps(self) -> int:
        """Number of steps that all replicas have made."""
        return min((len(replica.steps) for replica in self.replicas.values()), default=0)

    def at(self, step: int) -> list[Step]:
        """Return a step of all replicas, in their order."""
        return [replica.steps[step] for _, replica in sorted(self.replicas.items())]


def measured(tensor: Tensor) -> Tensor:
    """Return a copy that later writes don't reach."""
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    dtype = torch.complex128 if tensor.is_complex() else torch.float64
    return tensor.detach().to("cpu", dtype, copy=True)


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict) or hasattr(value, "keys"):
        for key in value:
            yield from tensors_of(value[key])
    elif isinstance(value, Iterable) and not isinstance(value, (str, bytes)) and isinstance(value, (list, tuple)):
        for member in value:
            yield from tensors_of(member)


def hash_rows(tensor: Tensor) -> list[bytes]:
    """Return a hash of each row's bits."""
    if tensor.dim() == 0 or tensor.layout is not torch.strided or tensor.numel() == 0:
        return []
    rows = tensor.detach().to("cpu").reshape(len(tensor), -1).contiguous().view(torch.uint8).numpy()
    return [hashlib.blake2b(row.tobytes(), digest_size=8).digest() for row in rows]


def dump(run: Run) -> bytes:
    """Return a run as bytes that ``load`` reads in another process."""
    buffer = io.BytesIO()
    torch.save(run, buffer)
    return buffer.getvalue()


def load(data: bytes) -> Run:
    """Read what ``dump`` has written in a process of ours."""
    run: Run = torch.load(io.BytesIO(data), weights_only=False)
    return run
