"""The arguments of ``fit``, checked as far as they can be without the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchstrategy.fit.arguments import check_counts
from torchstrategy.fit.validation import check_frequency

__all__ = ["FitArguments"]


@dataclass(frozen=True, kw_only=True)
class FitArguments:
    """What ``Model.fit`` was called with; see there."""

    x: Any
    y: Any
    batch_size: int | None
    epochs: int
    verbose: int | str
    callbacks: Sequence[Any] | None
    validation_split: float
    validation_data: Any
    shuffle: bool
    class_weight: Mapping[int, float] | None
    sample_weight: Any
    initial_epoch: int
    steps_per_epoch: int | None
    validation_steps: int | None
    validation_batch_size: int | None
    validation_freq: int | Sequence[int]

    def __post_init__(self) -> None:
        check_counts(
            "fit",
            epochs=self.epochs,
            steps_per_epoch=self.steps_per_epoch,
            validation_steps=self.validation_steps,
        )
        if not isinstance(self.initial_epoch, int) or isinstance(self.initial_epoch, bool) or self.initial_epoch < 0:
            raise ValueError(
                f"fit(initial_epoch=...) must be 0 or a positive integer. Received: {self.initial_epoch!r}"
            )
        check_frequency(self.validation_freq)
        if self.class_weight is not None and self.sample_weight is not None:
            raise ValueError(
                "fit(class_weight=..., sample_weight=...): pass one of them. Multiply the weights of the classes into "
                "sample_weight if you need both."
            )
