"""Where a run differs from that of one replica: step by step, name by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor

from torchstrategy.testing.verification.algebra import Named, furthest, is_close, is_rounding, scale_of
from torchstrategy.testing.verification.records import Run

__all__ = ["Deviation", "deviations", "tolerance_of"]


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
