"""Tells from the gradients of a step why they differ from those of one replica."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from torchstrategy.testing.verification.deviations import (
    Named,
    Step,
    Update,
    coefficients,
    flat,
    is_close,
    is_rounding,
    ratio,
    scale_of,
)

__all__ = ["gradient_causes"]

_NEAR = 1e-4
_MIN_NUMBERS = 3  # any difference of one number is a multiple of its weight, and two may be so by chance


def gradient_causes(
    replicas: Sequence[Step], expected: Step, tolerance: float, rounding: Named
) -> Iterator[tuple[str, str]]:
    """Yield the kind and the sentence of each cause of the first optimizer step that differs.

    Args:
        replicas: the step of each replica.
        expected: the step of one replica.
        tolerance: how far numbers may be apart, relative to the largest.
        rounding: how far weights may be apart beside that, because of rounding in earlier gradients.
    """
    for k, right in enumerate(expected.updates):
        mine = [own.updates[k] for own in replicas if k < len(own.updates)]
        if len(mine) < len(replicas):
            yield (
                "another number of optimizer steps",
                f"a replica makes fewer optimizer steps than {len(expected.updates)}",
            )
            return
        allowed = tolerance * scale_of(right.gradients)
        names = [name for name in right.gradients if all(name in update.gradients for update in mine)]
        wrong = [
            name for name in names if any(not is_close(u.gradients[name], right.gradients[name], allowed) for u in mine)
        ]
        if wrong:
            unequal = _not_begun_alike(mine, right, tolerance, rounding)
            if unequal:
                yield "weights loaded on one replica only", unequal
                return
            yield from _of_update(mine, right, wrong, names, [own.num_rows for own in replicas], tolerance)
            return


def _of_update(
    mine: Sequence[Update],
    right: Update,
    wrong: list[str],
    names: list[str],
    rows: Sequence[int | None],
    tolerance: float,
) -> Iterator[tuple[str, str]]:
    lonely = [name for name in wrong if _is_own(mine, name)]
    if lonely:
        name = lonely[0]
        spread = ", ".join(f"{float(update.gradients[name].norm()):.6g}" for update in mine)
        yield (
            "parameter not summed",
            f"the step uses each replica's own gradient of {name} ({len(lonely)} of {len(names)} parameters): its norm "
            f"is {spread} on the replicas and {float(right.gradients[name].norm()):.6g} with one replica",
        )
    rest = [name for name in wrong if name not in lonely]
    if rest:
        shown = f"first in {rest[0]} ({len(rest)} of {len(names)} parameters)"
        yield from _of_sum(mine, right, rest, rows, tolerance, shown)


def _of_sum(
    mine: Sequence[Update],
    right: Update,
    names: list[str],
    rows: Sequence[int | None],
    tolerance: float,
    shown: str,
) -> Iterator[tuple[str, str]]:
    number = sum(row != 0 for row in rows)  # empty shares add nothing
    final, expected = flat(mine[0].gradients, names), flat(right.gradients, names)
    local = [flat(update.local, names) for update in mine]
    has_local = all(part.shape == final.shape for part in local)
    times = ratio(final, expected, tolerance)
    if times is not None and (len(final) > 1 or _is_plain(times, number, len(rows))):
        yield _of_ratio(times, number, len(rows), shown)
        return
    penalty = _penalty(final - expected, right, names, tolerance, max(scale_of({"": final}), scale_of({"": expected})))
    if penalty is not None:
        what, coefficient = penalty
        yield (
            "regularizer not shared",
            f"the gradient differs by {coefficient:.6g} times {what}, {shown}: each of the {number} replicas adds the "
            "whole penalty. Use ts.nn.scale_regularization_loss",
        )
        return
    if has_local:
        summed = ratio(final, sum(local[1:], local[0]), tolerance)
        weighted = None if summed is None else _weighted(local, rows, expected, tolerance)
        if summed is not None and weighted is not None:
            yield _of_shares(summed * weighted, number, rows, shown)
            return
        if summed is None and _sums_to(local, rows, flat(right.local, names), tolerance):
            factors = coefficients(final, local, tolerance)
            numbers = (
                ""
                if factors is None
                else ": the step uses " + " + ".join(f"{factor:.4g} g{k}" for k, factor in enumerate(factors))
            )
            yield (
                "clipped before the sum",
                "the replicas' gradients after the backward pass add up to those of one replica, but they are changed "
                f"before they are summed, {shown}{numbers}. Sum them first: sum_gradients(optimizer)",
            )
            return
    own = [(name, ratio(flat(mine[0].gradients, [name]), flat(right.gradients, [name]), tolerance)) for name in names]
    for name, found in own:
        if found is not None and abs(found - number) < _NEAR * number:
            yield "loss not divided", f"a part of it: the gradient of {name} is {found:.6g} times one replica's"
            return


def _is_plain(times: float, number: int, num_replicas: int) -> bool:
    """Say whether a mistake multiplies by this; a single number is some multiple of any other."""
    return abs(times - number) < _NEAR * number or abs(times * num_replicas - 1) < _NEAR


def _of_ratio(times: float, number: int, num_replicas: int, shown: str) -> tuple[str, str]:
    text = f"the gradient is {times:.6g} times that of one replica, {shown}"
    if number > 1 and abs(times - number) < _NEAR * number:
        return "loss not divided", f"{text}: each of the {number} replicas' losses is a mean over its own share"
    if number < num_replicas and abs(times * num_replicas - number) < _NEAR:
        why = f"only {number} of {num_replicas} replicas have examples, and each replica's mean counts 1/{num_replicas}"
        return "each replica's mean weighs alike", f"{text}: {why}"
    if abs(times * num_replicas - 1) < _NEAR:
        return "loss divided twice", f"{text}: it is divided once more by the number of replicas, {num_replicas}"
    return "loss scaled", f"{text}. Divide a sum over the examples by the size of the global batch"


def _of_shares(effective: float, number: int, rows: Sequence[int | None], shown: str) -> tuple[str, str]:
    """Name what the means over the replicas' shares are multiplied by where they are summed."""
    shares = ", ".join(map(str, rows))
    text = f"the replicas' gradients are means over shares of {shares} examples"
    count = next((count for count in (number, len(rows)) if abs(effective * count - 1) < _NEAR), None)
    if count is not None:
        return (
            "each replica's mean weighs alike",
            f"{text}, and each weighs 1/{count}, so that examples of small shares weigh more, {shown}. Divide sums by "
            'the size of the global batch: global_batch_size="actual"',
        )
    if abs(effective - 1) < _NEAR:
        return "loss not divided", f"{text}, which are added up: about {number} times one replica's, {shown}"
    if abs(effective * number * number - 1) < _NEAR:
        return "loss divided twice", f"{text}, divided by {number} and once more by {number}, {shown}"
    return (
        "loss scaled",
        f"{text}, and each weighs {effective:.6g}, {shown}. Divide sums by the size of the global batch",
    )


def _weighted(local: Sequence[Tensor], rows: Sequence[int | None], expected: Tensor, tolerance: float) -> float | None:
    """Return ``q`` if the mean of the local gradients, weighted by examples, is ``q`` times the expected one."""
    counts = [row or 0 for row in rows]
    total = sum(counts)
    if not total:
        return None
    mean = sum((part * (count / total) for part, count in zip(local, counts, strict=True)), torch.zeros_like(expected))
    return ratio(mean, expected, tolerance)


def _sums_to(local: Sequence[Tensor], rows: Sequence[int | None], right: Tensor, tolerance: float) -> bool:
    if not right.numel() or right.shape != local[0].shape:
        return False
    return (
        ratio(sum(local[1:], local[0]), right, tolerance) is not None
        or _weighted(local, rows, right, tolerance) is not None
    )


def _penalty(
    difference: Tensor, right: Update, names: list[str], tolerance: float, scale: float
) -> tuple[str, float] | None:
    weights = flat(right.before, names)
    if weights.shape != difference.shape or int((weights != 0).sum()) < _MIN_NUMBERS:
        return None
    for what, direction in (("the weight", weights), ("the weight's sign", weights.sign())):
        found = ratio(difference, direction, max(tolerance, 1e-9), scale)
        if found:
            return what, found
    return None


def _is_own(mine: Sequence[Update], name: str) -> bool:
    """Say whether all replicas step with the gradients of their own backward passes, which differ."""
    if any(name not in update.local for update in mine):
        return False
    gradients = [update.gradients[name] for update in mine]
    return any(not torch.equal(gradient, gradients[0]) for gradient in gradients[1:]) and all(
        torch.equal(update.gradients[name], update.local[name]) for update in mine
    )


def _not_begun_alike(mine: Sequence[Update], right: Update, tolerance: float, rounding: Named) -> str | None:
    allowed = tolerance * scale_of(right.before)
    for replica, update in enumerate(mine):
        for name in update.before.keys() & right.before.keys():
            own, other = update.before[name], right.before[name]
            if not is_close(own, other, allowed) and not is_rounding(own, other, allowed, rounding.get(name)):
                gap = float((own - other).abs().max())
                return f"replica {replica} begins the step with another {name} than one replica (differs by {gap:.3g})"
    return None
