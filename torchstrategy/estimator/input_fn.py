"""Calling an ``input_fn`` with the arguments that it names, and making a dataset of what it returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from torchstrategy.base.log import logger
from torchstrategy.data.context import InputContext
from torchstrategy.estimator.arguments import argument_names

__all__ = ["RepeatedBatch", "as_dataset", "call_input_fn", "parse_element"]

_PAIR = "input_fn should return (features, labels) as a len 2 tuple."


def call_input_fn(
    input_fn: Callable[..., Any], mode: str, params: Any, config: Any, input_context: InputContext | None = None
) -> Any:
    """Call an ``input_fn`` with those of ``mode``, ``params``, ``config`` and ``input_context`` that it names.

    Without an input context the argument is not given: its default holds, and without one Python's TypeError comes.

    Raises:
        TypeError: it is no function, or has other arguments without defaults.
    """
    if not callable(input_fn):
        raise TypeError(f"input_fn must be a function that returns the data. Received: {input_fn!r}")
    names = argument_names(input_fn)
    known = {"mode": mode, "params": params, "config": config}
    if input_context is not None and "input_context" in names:
        logger.info("The `input_fn` accepts an `input_context` which will be given by the strategy.")
        known["input_context"] = input_context
    return input_fn(**{name: value for name, value in known.items() if name in names})


class RepeatedBatch(Iterable[Any]):
    """A batch that never ends, as tensors that tf's ``input_fn`` returns are constants of its graph."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self.batch


def as_dataset(returned: Any) -> Iterable[Any]:
    """Return an iterable of batches for what an ``input_fn`` returned: data, or one ready batch.

    A tensor, an array, a dictionary and a tuple are one batch; everything else that can be iterated gives batches.

    Raises:
        ValueError: it is a tuple of another length than 2.
        TypeError: it can be iterated only once, or not at all.
    """
    if isinstance(returned, (tuple, Tensor, np.ndarray, Mapping)):
        parse_element(returned)
        return RepeatedBatch(returned)
    if isinstance(returned, Iterator):
        raise TypeError(
            f"input_fn returned a {type(returned).__name__}, which can be iterated only once, so that training could "
            "not go on at the same place after a restart. Return a DataLoader, ts.data.Dataset.from_generator(...), a "
            "list of batches, or another object whose __iter__ starts anew."
        )
    if isinstance(returned, (str, bytes)) or not isinstance(returned, Iterable):
        raise TypeError(
            "input_fn must return an iterable of batches, such as a DataLoader or a ts.data.Dataset, or one batch as "
            f"tensors or (features, labels). Received: {returned!r}"
        )
    return returned


def parse_element(element: Any) -> tuple[Any, Any]:
    """Return the features and labels of an element; labels are ``None`` if it has none.

    A list of one is what a ``DataLoader`` gives for a ``TensorDataset`` of one tensor: features.

    Raises:
        ValueError: it is a tuple or list of another length.
    """
    if not isinstance(element, (list, tuple)):
        return element, None
    if isinstance(element, list) and len(element) == 1:
        return element[0], None
    if len(element) != 2:
        raise ValueError(f"{_PAIR} Received {len(element)} parts: put further ones into a dictionary of features.")
    return element[0], element[1]
