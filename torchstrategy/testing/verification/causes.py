"""Tells from the numbers why a run differs from that of one replica."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torchstrategy.testing.verification.deviations import (
    Deviation,
    Named,
    Replica,
    Rounding,
    Run,
    Step,
    deviations,
    is_close,
    scale_of,
    tolerance_of,
)
from torchstrategy.testing.verification.gradient_causes import gradient_causes

__all__ = ["OTHER_EXAMPLES", "OWN_RANDOM", "UNDECIDED", "Cause", "constant_divisor", "find_causes"]

_NEAR = 1e-6
_EQUAL = "equal random streams"
OTHER_EXAMPLES = "batches of other examples"
OWN_RANDOM = "random numbers can't be compared"
_ROUNDING = "perhaps rounding"
_SMALL = 1e-3
#: Causes that leave open whether the program is right.
UNDECIDED = {OTHER_EXAMPLES, OWN_RANDOM, _ROUNDING}


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
    rounding = Rounding()
    for step in range(min(run.num_steps, reference.num_steps)):
        rounding.add(run, reference, step, tolerance_of(run, step))
        here = list(deviations(run, reference, step, rounding.allowed))
        if not causes:
            causes += _first(_examples(run, reference, step))
        weights_were_right = not kinds & {"gradient of", "weight"}
        new = [deviation for deviation in here if deviation.what not in kinds]
        kinds |= {deviation.what for deviation in here}
        if new and weights_were_right:
            found += new
            if any(cause.kind.startswith("example") or cause.kind == OTHER_EXAMPLES for cause in causes):
                continue  # other data give other numbers
            explained = _of_step(run, reference, step, here, rounding.allowed)
            causes += [cause for cause in explained if cause.kind not in _kinds(causes)]
    if found and not causes:
        first = found[0]
        causes.append(Cause("unknown", first.step, f"no known cause explains it: {first}"))
    if run.is_single_precision and _kinds(causes) == {"unknown"} and all(_is_small(d, reference) for d in found):
        text = (
            f"{found[0]}; single precision may do that by rounding. Verify in double precision (torch.float64) to know"
        )
        causes = [Cause(_ROUNDING, found[0].step, text)]
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


def _is_small(deviation: Deviation, reference: Run) -> bool:
    expected = reference.replicas[0].steps[deviation.step]
    if deviation.what == "gradient of":
        scale = max((scale_of(update.gradients) for update in expected.updates), default=0.0)
    else:
        scale = scale_of({"weight": expected.weights, "buffer": expected.buffers}.get(deviation.what, {}))
    return deviation.gap <= _SMALL * scale


def _of_step(run: Run, reference: Run, step: int, here: Sequence[Deviation], rounding: Named) -> Iterator[Cause]:
    whats = {deviation.what for deviation in here}
    replicas, expected = run.at(step), reference.replicas[0].steps[step]
    random = list(_random(replicas, expected, step))
    if random and random[0].kind == _EQUAL:
        yield from random
        return
    if not whats - {"metric", "returned value"}:
        yield from random or _values(replicas, step, here)
        return
    if "gradient of" in whats:
        tolerance = tolerance_of(run, step)
        causes = [Cause(kind, step, text) for kind, text in gradient_causes(replicas, expected, tolerance, rounding)]
        yield from causes or random
    elif "weight" in whats:
        yield from _first(_hyper_parameters(replicas, expected, step)) or _weights(
            replicas, reference.replicas[0], step, here
        )
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
    right, mine = _seen(reference, reference, step), _seen(run, reference, step)
    if not right or not mine:
        right = reference.replicas[0].steps[step].delivered
        mine = _total(own.delivered for own in run.at(step))
    repeated, missing = mine - right, right - mine
    if not repeated and not (missing and (reference.known or _num_seen(run, step) < _num_seen(reference, step))):
        return  # rows that are no data, such as what another module made, differ in their last bits
    steps = range(min(run.num_steps, reference.num_steps))
    right_in_all, mine_in_all = (_total(_seen(part, reference, k) for k in steps) for part in (reference, run))
    if not (right_in_all and mine_in_all):  # what was delivered was counted
        right_in_all, mine_in_all = right, mine
    if mine_in_all == right_in_all or (repeated and missing and not _is_doubled(mine_in_all, right_in_all)):
        yield Cause(
            OTHER_EXAMPLES,
            step,
            f"the replicas make step {step} of other examples than one replica, though they see none more often in the "
            f"{len(steps)} steps: what a step computes can't be compared. Give replica r of N the examples r, r + N, "
            "r + 2N, ..., or verify without shuffling",
        )
    elif repeated:
        where = f", in step {step} first" if not missing else ", and in another order"
        yield _repeated(mine_in_all, right_in_all, step, f"in {len(steps)} steps{where}")
    else:
        text = f"{missing.total()} of {right.total()} examples of step {step} are never seen"
        yield Cause("example never seen", step, text)


def _is_doubled(mine: Counter[bytes], right: Counter[bytes]) -> bool:
    """Say whether an example is seen more often than any is by one replica, whatever the order."""
    return max(mine.values()) > max(right.values())


def _num_seen(run: Run, step: int) -> int:
    return sum(own.seen.total() for own in run.at(step))


def _seen(run: Run, reference: Run, step: int) -> Counter[bytes]:
    """Count the rows of the data that all replicas see in a step."""
    seen = _total(own.seen for own in run.at(step))
    if reference.known:
        return Counter({row: number for row, number in seen.items() if row in reference.known})
    if run is reference:
        return seen
    data = {row for own in reference.replicas[0].steps for row in own.seen}
    return Counter({row: number for row, number in seen.items() if row in data})


def _repeated(mine: Counter[bytes], right: Counter[bytes], step: int, where: str) -> Cause:
    """Name what is seen too often, counted over all steps: in one step it may be what another step should have."""
    repeated, missing = mine - right, right - mine
    row = max(repeated, key=mine.__getitem__)
    text = (
        f"the replicas see {repeated.total()} example(s) more than one replica does {where}: one is seen {mine[row]} "
        f"times instead of {right[row]}"
    )
    if missing:
        text += f"; {missing.total()} others are not seen"
    return Cause("example seen twice", step, text)


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
        yield Cause(OWN_RANDOM, step, text)


def _hyper_parameters(replicas: Sequence[Step], expected: Step, step: int) -> Iterator[Cause]:
    """Optimizers have got right gradients, but step with other numbers."""
    for replica, own in enumerate(replicas):
        for mine, right in zip(own.updates, expected.updates, strict=False):
            for group, other in zip(mine.numbers[1:], right.numbers[1:], strict=False):
                for key in sorted(group.keys() & other.keys() - {"number of parameters"}):
                    if not _is_like(group[key], other[key]):
                        text = (
                            f"step {step}: the gradients are right, but {key!r} of {mine.optimizer} on replica "
                            f"{replica} is {group[key]} where one replica has {other[key]}. Choose it for the global "
                            "batch, whatever the number of replicas, and move a schedule once in a step, not once on "
                            "each replica"
                        )
                        yield Cause("other hyper-parameters", step, text)


def _is_like(value: Any, other: Any) -> bool:
    are_numbers = isinstance(value, float) and isinstance(other, float)
    return bool(value == other or (are_numbers and math.isclose(value, other, rel_tol=_NEAR)))


def _weights(replicas: Sequence[Step], right: Replica, step: int, here: Sequence[Deviation]) -> Iterator[Cause]:
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
    elif _differ(values) and all(_has_gradient(own, first.name) for own in replicas):
        text = (
            f"{first}: the optimizer had equal gradients of it, but the replicas hold different weights after its step"
        )
        yield Cause("weights loaded on one replica only", step, text)
    elif _differ(values) and not _is_trained(right, step, first.name):
        text = f"{first}: nothing trains it, but the replicas hold different weights after step {step}"
        yield Cause("weights loaded on one replica only", step, text)
    elif _differ(values):
        yield Cause(
            "parameter not summed", step, f"{first}; the replicas hold different weights: each used its own gradient"
        )
    else:
        yield Cause("unknown", step, f"the gradients are right, but {first}")


def _has_gradient(own: Step, name: str) -> bool:
    return any(name in update.gradients for update in own.updates)


def _is_trained(right: Replica, step: int, name: str) -> bool:
    """Say whether one replica's step changes a weight."""
    before = right.steps[step - 1].weights if step else right.initial
    after = right.steps[step].weights
    return name not in before or name not in after or _differ([before[name], after[name]])


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
