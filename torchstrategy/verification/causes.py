"""Tells from the numbers why a run differs from that of one replica."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from torchstrategy.verification.algebra import is_close, scale_of
from torchstrategy.verification.deviations import Deviation, deviations, tolerance_of
from torchstrategy.verification.gradient_causes import gradient_causes
from torchstrategy.verification.records import Run, Step

__all__ = ["Cause", "constant_divisor", "find_causes"]

_NEAR = 1e-6
_EQUAL = "equal random streams"


@dataclass(frozen=True)
class Cause:
    """Why a run differs: a fixed ``kind``, the ``step`` it begins in, and a sentence with the numbers."""

    kind: str
    step: int
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


def find_causes(run: Run, reference: Run) -> tuple[list[Deviation], list[Cause]]:
    """Return what differs, and why.

    Args:
        run: the run with several replicas.
        reference: the run with one.

    Returns:
        The deviations of the first step that has some, and of later ones those of a kind not met before; and the
        causes.
    """
    causes = _first(_initial(run, reference))
    found: list[Deviation] = []
    kinds: set[str] = set()
    for step in range(min(run.num_steps, reference.num_steps)):
        here = list(deviations(run, reference, step))
        if not causes:
            causes += _first(_examples(run, reference, step))
        weights_were_right = not kinds & {"gradient of", "weight"}
        new = [deviation for deviation in here if deviation.what not in kinds]
        kinds |= {deviation.what for deviation in here}
        if new and weights_were_right:
            found += new
            if any(cause.kind.startswith("example") for cause in causes):
                continue  # other data give other numbers
            causes += [cause for cause in _of_step(run, reference, step, here) if cause.kind not in _kinds(causes)]
    if found and not causes:
        first = found[0]
        causes.append(Cause("unknown", first.step, f"no known cause explains it: {first}"))
    return found, causes


def constant_divisor(reference: Run) -> list[Cause]:  # noqa: C901 - one search
    """Find a sum that is divided by its elements in a full batch, and by as many in a short one.

    Args:
        reference: the run with one replica.

    Returns:
        The cause, or nothing.
    """
    steps = reference.replicas[0].steps if reference.replicas else []
    sizes = [step.num_rows for step in steps]
    full = max((size for size in sizes if size), default=None)
    if full is None:
        return []
    means: dict[tuple[int, int], tuple[int, float]] = {}
    for step in steps:
        if step.num_rows == full:
            for order, backward in enumerate(step.backwards):
                for k, (number, factor) in enumerate(backward.sums):
                    if abs(number * factor - 1) < _NEAR:
                        means.setdefault((order, k), (number, factor))
    for at, step in enumerate(steps):
        for order, backward in enumerate(step.backwards):
            for k, (number, factor) in enumerate(backward.sums):
                usual, constant = means.get((order, k), (0, 0.0))
                share = (step.num_rows or full) / full
                if share < 1 and factor == constant and abs(number - usual * share) < _NEAR * usual:
                    text = (
                        f"the loss of step {at} adds up {number} elements of {step.num_rows} examples and divides by "
                        f"{1 / factor:g}, the number in a full batch of {full}: its gradient is {share:.4g} times the "
                        'mean\'s. Divide by the size of this batch: global_batch_size="actual"'
                    )
                    return [Cause("constant divisor on a short batch", at, text)]
    return []


def _of_step(run: Run, reference: Run, step: int, here: Sequence[Deviation]) -> Iterator[Cause]:
    whats = {deviation.what for deviation in here}
    replicas, expected = run.at(step), reference.replicas[0].steps[step]
    if not whats - {"metric", "returned value"}:
        yield from _values(replicas, step, here)
        return
    random = list(_random(replicas, expected, step))
    if random and random[0].kind == _EQUAL:
        yield from random
        return
    if "gradient of" in whats:
        causes = [
            Cause(kind, step, text) for kind, text in gradient_causes(replicas, expected, tolerance_of(run, step))
        ]
        yield from causes or random
    elif "weight" in whats:
        yield from _weights(replicas, step, here)
    if "buffer" in whats:
        first = next(deviation for deviation in here if deviation.what == "buffer")
        text = f"{first}. Each replica computed it from its own share of the batch"
        yield Cause("buffer not synchronised", step, text)


def _initial(run: Run, reference: Run) -> Iterator[Cause]:
    right = reference.replicas[0].initial if reference.replicas else {}
    tolerance = tolerance_of(run, 0) * max(scale_of(right), 1e-300)
    wrong: dict[int, str] = {}
    for replica, record in sorted(run.replicas.items()):
        for name in record.initial.keys() & right.keys():
            if not is_close(record.initial[name], right[name], tolerance):
                wrong.setdefault(replica, name)
    if not wrong:
        return
    replica, name = next(iter(wrong.items()))
    where = ", ".join(map(str, wrong))
    if len(wrong) < len(run.replicas) or _differ([run.replicas[r].initial[name] for r in sorted(run.replicas)]):
        text = f"before the first step, replica {where} has other weights than one replica has, first in {name}"
        yield Cause("weights loaded on one replica only", 0, text)
    else:
        yield Cause("other initial weights", 0, f"all replicas begin with other weights than one replica, as in {name}")


def _examples(run: Run, reference: Run, step: int) -> Iterator[Cause]:
    replicas, expected = run.at(step), reference.replicas[0].steps[step]
    # What is no row of the data, such as what another module made, differs in its last bits.
    right, mine = (
        Counter({row: number for row, number in seen.items() if row in reference.known})
        for seen in (expected.seen, _total(own.seen for own in replicas))
    )
    if not right or not mine:
        right, mine = expected.delivered, _total(own.delivered for own in replicas)
    repeated, missing = mine - right, right - mine
    if repeated:
        times = max(mine[row] for row in repeated)
        text = (
            f"{len(repeated)} of the examples of step {step} are seen more often than with one replica, {times} times"
        )
        if missing:
            text += f"; {len(missing)} others are not seen"
        yield Cause("example seen twice", step, text)
    elif missing:
        yield Cause(
            "example never seen", step, f"{len(missing)} of {len(right)} examples of step {step} are never seen"
        )


def _random(replicas: Sequence[Step], expected: Step, step: int) -> Iterator[Cause]:
    draws = [[draw for draw in own.draws if len(draw.begin) > 1] for own in replicas]
    if not any(draws):
        return
    for k, own in enumerate(draws):
        for other in range(k + 1, len(draws)):
            for a, b in zip(own, draws[other], strict=False):
                size = min(len(a.begin), len(b.begin))
                if a.function == b.function and a.begin[:size] == b.begin[:size] and len(set(a.begin[:size])) > 1:
                    text = f"in step {step}, {a.function} gives replicas {k} and {other} the same random numbers"
                    yield Cause(_EQUAL, step, text)
                    return
    if expected.draws:
        function = expected.draws[0].function
        text = (
            f"step {step} draws random numbers ({function}); each replica "
            "draws its own, so that the numbers can't be those of one replica. Verify without dropout, and with noise "
            "that comes with the batch"
        )
        yield Cause("random numbers can't be compared", step, text)


def _weights(replicas: Sequence[Step], step: int, here: Sequence[Deviation]) -> Iterator[Cause]:
    """Weights differ though the optimizers' gradients don't."""
    wrong = [deviation for deviation in here if deviation.what == "weight"]
    unlike = (d for d in wrong if _differ([own.weights[d.name] for own in replicas if d.name in own.weights]))
    first = next(unlike, wrong[0])
    values = [own.weights[first.name] for own in replicas if first.name in own.weights]
    befores = [update.before for own in replicas for update in own.updates[:1]]
    started = [before[first.name] for before in befores if first.name in before]
    if len(started) == len(replicas) and _differ(started):
        text = f"{first}: the replicas begin the step with other weights, without an optimizer step between"
        yield Cause("weights loaded on one replica only", step, text)
    elif _differ(values) and not any(own.updates for own in replicas):
        text = f"{first}: the replicas hold different weights before an optimizer step of step {step} was made"
        yield Cause("weights loaded on one replica only", step, text)
    elif _differ(values):
        yield Cause(
            "parameter not summed", step, f"{first}; the replicas hold different weights: each used its own gradient"
        )
    else:
        yield Cause("unknown", step, f"the gradients are right, but {first}")


def _values(replicas: Sequence[Step], step: int, here: Sequence[Deviation]) -> Iterator[Cause]:
    first = here[0]
    times = ""
    if first.expected:
        times = f" ({first.value / first.expected:.4g} times)"
    values = [(own.metrics if first.what == "metric" else own.values).get(first.name) for own in replicas]
    alike = not _differ([value for value in values if value is not None])
    why = "the replicas' values are not put together as the gradients are" if alike else "each replica has its own"
    yield Cause("metric not merged", step, f"{first}{times}; the weights are right: {why}")


def _differ(values: Sequence[Tensor]) -> bool:
    return any(value.shape != values[0].shape or not bool((value == values[0]).all()) for value in values[1:])


def _total(counters: Iterator[Counter[bytes]] | Sequence[Counter[bytes]]) -> Counter[bytes]:
    total: Counter[bytes] = Counter()
    for counter in counters:
        total.update(counter)
    return total


def _kinds(causes: Sequence[Cause]) -> set[str]:
    return {cause.kind for cause in causes}


def _first(causes: Iterator[Cause]) -> list[Cause]:
    return list(causes)[:1]
