"""Where a run differs from that of one replica, step by step, and by how much more than rounding."""

from __future__ import annotations

import hashlib
import io
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "Backward",
    "Deviation",
    "Draw",
    "Named",
    "Replica",
    "Rounding",
    "Run",
    "Step",
    "Update",
    "coefficients",
    "deviations",
    "dump",
    "flat",
    "hash_rows",
    "is_close",
    "is_rounding",
    "load",
    "measured",
    "ratio",
    "scale_of",
    "tensors_of",
    "tolerance_of",
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
    numbers: list[Any] = field(default_factory=list)  # the optimizer's hyper-parameters, as `hyper_parameters` has them


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


_FACTOR = 10.0  # averages of gradients and of their squares may carry on more than one step's rounding


class Rounding:
    """What rounding in the gradients may have done to the weights so far.

    Adam divides a gradient by its own size, also one that is zero but for rounding, such as that of a key's bias in
    attention: the weight then moves by the learning rate, in any direction. What an element is allowed is what the
    largest step moves, times how uncertain this element's gradient is.
    """

    def __init__(self) -> None:
        self._uncertain: dict[str, Tensor] = {}
        self.allowed: dict[str, Tensor] = {}

    def add(self, run: Run, reference: Run, step: int, tolerance: float) -> None:
        """Take in a step.

        Args:
            run: the run with several replicas.
            reference: the run with one.
            step: which step.
            tolerance: how far gradients may be apart, relative to the largest.
        """
        expected = reference.replicas[0].steps[step]
        for k, right in enumerate(expected.updates):
            mine = [own.updates[k] for own in run.at(step) if k < len(own.updates)]
            moved = max((_largest_change(right, expected.weights, name) for name in right.gradients), default=0.0)
            allowed = tolerance * scale_of(right.gradients)
            for name, gradient in right.gradients.items():
                others = [update.gradients[name] for update in mine if name in update.gradients]
                if others and all(is_close(other, gradient, allowed) for other in others):
                    self._add(name, gradient, others, moved)

    def _add(self, name: str, gradient: Tensor, others: list[Tensor], moved: float) -> None:
        gap = torch.stack([(other - gradient).abs() for other in others]).amax(0)
        size = gradient.abs() + gap
        now = torch.where(gap > 0, _FACTOR * gap / size, torch.zeros_like(gap)).nan_to_num(0.0).clamp(max=1.0)
        before = self._uncertain.get(name)
        self._uncertain[name] = now if before is None else torch.maximum(before, now)
        self.allowed[name] = self.allowed.get(name, 0.0) + 2 * moved * self._uncertain[name]


def _largest_change(update: Update, after: dict[str, Tensor], name: str) -> float:
    before = update.before.get(name)
    if before is None or name not in after or after[name].shape != before.shape or not before.numel():
        return 0.0
    return float((after[name] - before).abs().max().nan_to_num(0.0))


Named = Mapping[str, Tensor]


def flat(tensors: Named, names: Sequence[str]) -> Tensor:
    """Return tensors as one vector, in the order of ``names``; zeros stand for none."""
    parts = [tensors[name].reshape(-1) for name in names if name in tensors]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


def scale_of(tensors: Named) -> float:
    """Return the largest magnitude."""
    return max((float(t.abs().max()) for t in tensors.values() if t.numel()), default=0.0)


def is_close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Say whether two tensors differ by no more than a tolerance; nan equals nan."""
    return a.shape == b.shape and bool(torch.isclose(a, b, rtol=0.0, atol=tolerance, equal_nan=True).all())


def is_rounding(a: Tensor, b: Tensor, tolerance: float, rounding: Tensor | None) -> bool:
    """Say whether each element differs by no more than a tolerance and what rounding may have done to it."""
    if rounding is None or not a.shape == b.shape == rounding.shape:
        return False
    return bool(((a - b).abs() <= tolerance + rounding).all())


def furthest(a: Tensor, b: Tensor) -> tuple[float, float, float]:
    """Return the largest difference, and the two numbers there."""
    if a.shape != b.shape:
        return float("inf"), float("nan"), float("nan")
    a, b = a.reshape(-1), b.reshape(-1)
    gap = torch.where(a.isnan() & b.isnan(), 0.0, (a - b).abs()).nan_to_num(float("inf"))
    where = int(gap.argmax())
    return float(gap[where]), _real(a[where]), _real(b[where])


def ratio(a: Tensor, b: Tensor, tolerance: float, scale: float | None = None) -> float | None:
    """Return ``c`` where ``a = c b``, or ``None`` if there is none.

    Args:
        a: a vector.
        b: another.
        tolerance: how far numbers may be apart, relative to ``scale``.
        scale: the largest magnitude of what ``a`` was computed from; ``None`` means that of ``a``. Where what is
            allowed is as large as ``a`` itself, any vector would do, so there is no answer.
    """
    if a.shape != b.shape or not a.numel() or a.is_complex() or b.is_complex():
        return None
    square = float(b @ b)
    if not square:
        return None
    found = float(a @ b) / square
    largest = float(a.abs().max())
    allowed = (largest if scale is None else scale) * max(tolerance, 1e-12) * 10
    return found if allowed <= 0.01 * largest and is_close(a, found * b, allowed) else None


def coefficients(target: Tensor, parts: Sequence[Tensor], tolerance: float) -> list[float] | None:
    """Return the numbers by which ``parts`` add up to ``target``, or ``None`` if there are none."""
    if not target.numel() or any(part.shape != target.shape for part in parts):
        return None
    matrix = torch.stack(list(parts), dim=1)
    if not bool(torch.isfinite(matrix).all()) or not bool(torch.isfinite(target).all()):
        return None
    found = torch.linalg.lstsq(matrix, target[:, None], driver="gelsd").solution[:, 0]
    loose = float(target.abs().max()) * max(tolerance, 1e-12) * 100
    return found.tolist() if is_close(matrix @ found, target, loose) else None


def _real(number: Tensor) -> float:
    return float(number.abs() if number.is_complex() else number)


@dataclass(frozen=True)
class Deviation:
    """A number that differs: which, in which step and replica, and what one replica has there."""

    step: int
    what: str
    name: str
    replica: int
    gap: float
    value: float
    expected: float

    def __str__(self) -> str:
        if self.gap == float("inf") and self.value != self.value:
            return (
                f"step {self.step}: {self.what} {self.name} on replica {self.replica} has another shape, or is missing"
            )
        return (
            f"step {self.step}: {self.what} {self.name} on replica {self.replica} is {self.value:.10g} where one "
            f"replica has {self.expected:.10g} (differs by {self.gap:.3g})"
        )


def tolerance_of(run: Run, step: int) -> float:
    """Return how far numbers of a step may be apart, relative to the largest of their kind."""
    return (1e-5 if run.is_single_precision else 1e-10) * (step + 1)


def deviations(run: Run, reference: Run, step: int, rounding: Named | None = None) -> Iterator[Deviation]:
    """Yield what differs in a step.

    Args:
        run: the run with several replicas.
        reference: the run with one.
        step: which step.
        rounding: how far the weights' elements may be apart beside that, because of rounding in gradients.

    Yields:
        What differs, gradients first.
    """
    expected = reference.replicas[0].steps[step]
    tolerance = tolerance_of(run, step)
    for replica, own in enumerate(run.at(step)):
        for mine, right in zip(own.updates, expected.updates, strict=False):
            yield from _compare(step, "gradient of", replica, mine.gradients, right.gradients, tolerance)
        if len(own.updates) != len(expected.updates):
            counts = float(len(own.updates)), float(len(expected.updates))
            yield Deviation(step, "number of", "optimizer steps", replica, abs(counts[0] - counts[1]), *counts)
        yield from _compare(step, "weight", replica, own.weights, expected.weights, tolerance, rounding=rounding or {})
        yield from _compare(step, "buffer", replica, own.buffers, expected.buffers, tolerance, alone=True)
        yield from _compare(step, "metric", replica, own.metrics, expected.metrics, tolerance, alone=True)
        both = own.values.keys() & expected.values.keys()  # what replicas return one by one has no like
        mine_too, right_too = ({name: values[name] for name in both} for values in (own.values, expected.values))
        yield from _compare(step, "returned value", replica, mine_too, right_too, tolerance, alone=True)


def _compare(
    step: int,
    what: str,
    replica: int,
    mine: Named,
    right: Named,
    tolerance: float,
    *,
    alone: bool = False,
    rounding: Named = MappingProxyType({}),
) -> Iterator[Deviation]:
    scale = scale_of(right)
    for name in sorted(mine.keys() | right.keys()):
        a, b = mine.get(name), right.get(name)
        if a is None or b is None:
            present = b if a is None else a
            if present is not None and _is_zero(present):
                continue  # a gradient of zeros is as good as none
            yield Deviation(step, what, name, replica, float("inf"), float("nan"), float("nan"))
            continue
        allowed = tolerance * (max(1e-3, scale_of({name: b})) if alone else scale)
        if a.numel() and not is_close(a, b, allowed) and not is_rounding(a, b, allowed, rounding.get(name)):
            yield Deviation(step, what, name, replica, *furthest(a, b))
        elif a.shape != b.shape:
            yield Deviation(step, what, name, replica, float("inf"), float("nan"), float("nan"))


def _is_zero(tensor: Tensor) -> bool:
    return not bool(tensor.any())
