"""How messages name the arguments that hold data: ``fit(x=...)``, or ``fit(validation_data=...)[0]``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["DataArguments", "named_arguments", "shown_type", "validation_arguments"]


@dataclass(frozen=True)
class DataArguments:
    """What the user wrote for each part of the data.

    Args:
        method: the model's method.
        x: the inputs, or whatever gives batches.
        y: the targets.
        sample_weight: the weights of the examples.
        batch_size: how many examples a batch has.
    """

    method: str
    x: str
    y: str
    sample_weight: str
    batch_size: str


def named_arguments(method: str) -> DataArguments:
    """Return the names of the arguments of a method such as ``"fit"``."""
    x, y, sample_weight, batch_size = (f"{method}({name}=...)" for name in ("x", "y", "sample_weight", "batch_size"))
    return DataArguments(method, x, y, sample_weight, batch_size)


def validation_arguments(method: str = "fit") -> DataArguments:
    """Return the names of the parts of ``validation_data``."""
    x, y, sample_weight = (f"{method}(validation_data=...)[{i}]" for i in range(3))
    return DataArguments(method, x, y, sample_weight, f"{method}(validation_batch_size=...)")


def shown_type(value: Any) -> str:
    """Return an article and the name of a value's type."""
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
