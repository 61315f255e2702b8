"""How far weights may be apart because an optimizer makes much of what is only rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from torchstrategy.testing.verification.algebra import is_close, scale_of
from torchstrategy.testing.verification.records import Run, Update

__all__ = ["Rounding"]

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
