"""A worker's own datasets: what the coordinator sent becomes something to iterate over."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torchstrategy.data.context import InputContext

__all__ = ["make_dataset", "make_iterator"]


def make_dataset(value: Any) -> Any:
    """Return the dataset of this worker: all of it, whichever worker this is.

    Args:
        value: a dataset, or a function that makes one. A function that needs an argument gets an ``InputContext`` of
            one pipeline.

    Raises:
        TypeError: it is neither, or the function needs more, or returns something else.
    """
    dataset = value
    if callable(value) and not _can_be_iterated(value):
        dataset = value(InputContext()) if _num_needed(value) else value()
    if not _can_be_iterated(dataset):
        where = "" if dataset is value else " from the dataset function"
        raise TypeError(
            "A per-worker dataset must be a ts.data.Dataset, a DataLoader or something else to iterate over, or a "
            f"function that returns one. Received{where}: {dataset!r}"
        )
    return dataset


def make_iterator(dataset: Any) -> Iterator[Any]:
    """Return a new iterator from the dataset's beginning.

    Args:
        dataset: what ``make_dataset`` returned.
    """
    if hasattr(dataset, "__iter__"):
        return iter(dataset)
    # Indexable datasets of torch need not raise IndexError at their end, which Python would go by.
    return (dataset[index] for index in range(len(dataset)))


def _can_be_iterated(value: Any) -> bool:
    is_indexable = hasattr(value, "__getitem__") and hasattr(value, "__len__")
    return not isinstance(value, type) and (isinstance(value, Iterable) or is_indexable)


def _num_needed(fn: Callable[..., Any]) -> int:
    """Return how many arguments a dataset function needs.

    Raises:
        TypeError: they are more than one.
    """
    try:
        parameters = inspect.signature(fn).parameters.values()
    except ValueError:  # some functions written in C don't tell
        return 0
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [each for each in parameters if each.default is each.empty and each.kind not in variadic]
    if len(needed) > 1 or any(each.kind is each.KEYWORD_ONLY for each in needed):
        names = ", ".join(each.name for each in needed)
        raise TypeError(f"A dataset function takes no argument, or an InputContext. This one needs: {names}")
    return len(needed)
