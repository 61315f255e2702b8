"""The validation of ``fit``: its data, a part of the arrays or given, and after which epochs it is due."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from torchstrategy.base import tree
from torchstrategy.fit.arguments import DataArguments, named_arguments
from torchstrategy.fit.array_data import is_array, make_arrays
from torchstrategy.fit.inputs import Batches

__all__ = ["Validation", "split_arrays"]

_Parts = tuple[Any, Any, Any]


def split_arrays(
    x: Any, y: Any, sample_weight: Any, validation_split: float, names: DataArguments | None = None
) -> tuple[_Parts, _Parts]:
    """Divide arrays in the data that is trained on and, of their end, the validation data; both are views.

    Args:
        x: an array ``[examples, ...]``, or arrays in tuples, lists and dicts.
        y: the same, or ``None``.
        sample_weight: the same, or ``None``.
        validation_split: the part of the examples to validate with, between 0 and 1.
        names: of the method's arguments, for messages; ``None`` means those of ``fit``.

    Returns:
        Two triples ``(x, y, sample_weight)``. The first has ``floor(examples * (1 - validation_split))`` examples, as
        in Keras.

    Raises:
        TypeError: something is no array.
        ValueError: the fraction isn't between 0 and 1 or leaves nothing on one side, or the arrays don't fit together.

    Example:
        >>> from torchstrategy.fit.validation import split_arrays
        >>> split_arrays(torch.arange(5), None, None, 0.4)
        ((tensor([0, 1, 2]), None, None), (tensor([3, 4]), None, None))
    """
    names = named_arguments("fit") if names is None else names
    name = f"{names.method}(validation_split=...)"
    if not isinstance(validation_split, (float, int, np.floating)) or not 0 < validation_split < 1:
        raise ValueError(
            f"{name} must be a fraction between 0 and 1, of the examples to validate with; 0 is for none. Received: "
            f"{validation_split!r}"
        )
    if not isinstance(x, (Mapping, tuple, list)) and not is_array(x):
        raise ValueError(
            f"{name} is only for arrays and tensors; {names.x} is a {type(x).__name__}. Divide the dataset yourself, "
            "for example with torch.utils.data.random_split, and pass the second part as validation_data."
        )
    num_examples = make_arrays(x, y, sample_weight, names).num_examples
    split_at = math.floor(num_examples * (1.0 - validation_split))
    if split_at == 0 or split_at == num_examples:
        side = "train on" if split_at == 0 else "validate with"
        raise ValueError(
            f"{name} of {validation_split} leaves none of the {num_examples} examples to {side}. Pass more data, "
            "another fraction, or validation_data."
        )
    parts = (x, y, sample_weight)
    return _cut(parts, slice(None, split_at)), _cut(parts, slice(split_at, None))


def _cut(parts: _Parts, examples: slice) -> _Parts:
    x, y, sample_weight = (
        tree.map_leaves(lambda leaf: _rows(leaf, examples), dict(part) if isinstance(part, Mapping) else part)
        for part in parts
    )
    return x, y, sample_weight


def _rows(leaf: Any, examples: slice) -> Any:
    if leaf is None:
        return None
    return (leaf if isinstance(leaf, Tensor) else np.asarray(leaf))[examples]


class Validation:
    """The validation of ``fit``."""

    def __init__(self, data: Batches, steps: int | None, frequency: int | Sequence[int]) -> None:
        self.data = data
        self.steps = steps
        self._frequency = frequency

    def is_due(self, epoch: int) -> bool:
        """Say whether there is one after an epoch, counted from 1."""
        frequency = self._frequency
        return epoch % frequency == 0 if isinstance(frequency, int) else epoch in frequency
