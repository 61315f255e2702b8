"""``ts.data.experimental``: names that tf.data has there."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec

from torchstrategy.base.later import explain_absent
from torchstrategy.base.options import AutoShardPolicy
from torchstrategy.data.pipeline import regrouping
from torchstrategy.data.pipeline.dataset import AUTOTUNE, Dataset
from torchstrategy.data.pipeline.op import INFINITE_CARDINALITY, SHARD_HINT, UNKNOWN_CARDINALITY

__all__ = [
    "AUTOTUNE",
    "INFINITE_CARDINALITY",
    "SHARD_HINT",
    "UNKNOWN_CARDINALITY",
    "AutoShardPolicy",
    "Counter",
    "RandomDataset",
    "bucket_by_sequence_length",
    "cardinality",
    "choose_from_datasets",
    "group_by_window",
    "ignore_errors",
    "rejection_resample",
    "sample_from_datasets",
    "scan",
    "take_while",
    "unique",
]

explain_absent(__name__)
_Args = ParamSpec("_Args")


def _for_apply(method: Callable[Concatenate[Any, _Args], Dataset]) -> Callable[_Args, Callable[[Dataset], Dataset]]:
    """Return what takes a method's arguments and gives a function for ``Dataset.apply``."""

    @functools.wraps(method)
    def make(*args: _Args.args, **kwargs: _Args.kwargs) -> Callable[[Dataset], Dataset]:
        return lambda dataset: method(dataset, *args, **kwargs)

    parameters = [*inspect.signature(method).parameters.values()][1:]
    make.__dict__["__signature__"] = inspect.Signature(parameters)
    title = f"Return a function for ``Dataset.apply`` that does as ``Dataset.{method.__name__}``."
    make.__doc__ = f"{title}\n\n{inspect.getdoc(method)}"
    make.__module__ = __name__
    return make


Counter = Dataset.counter
RandomDataset = Dataset.random
bucket_by_sequence_length = _for_apply(regrouping.Regrouping.bucket_by_sequence_length)
group_by_window = _for_apply(regrouping.Regrouping.group_by_window)
ignore_errors = _for_apply(regrouping.Regrouping.ignore_errors)
rejection_resample = _for_apply(regrouping.Regrouping.rejection_resample)
scan = _for_apply(regrouping.Regrouping.scan)
take_while = _for_apply(regrouping.Regrouping.take_while)
sample_from_datasets = Dataset.sample_from_datasets
unique = _for_apply(regrouping.Regrouping.unique)


def cardinality(dataset: Dataset) -> int:
    """Return the number of elements of a dataset, as ``dataset.cardinality()`` does.

    Args:
        dataset: a ``ts.data.Dataset``.

    Returns:
        The number, or ``INFINITE_CARDINALITY``, or ``UNKNOWN_CARDINALITY``.

    Raises:
        TypeError: it is no dataset.

    Example:
        >>> ts.data.experimental.cardinality(ts.data.Dataset.range(3))
        3
    """
    if not isinstance(dataset, Dataset):
        raise TypeError(f"cardinality() takes a ts.data.Dataset. Received: {dataset!r}")
    return dataset.cardinality()


def choose_from_datasets(
    datasets: Sequence[Dataset],
    choice_dataset: Dataset,
    stop_on_empty_dataset: bool = False,  # noqa: FBT001, FBT002 - tf's signature
) -> Dataset:
    """Return ``Dataset.choose_from_datasets(...)``, which ends by default when all datasets have ended.

    Args:
        datasets: what is chosen from.
        choice_dataset: its elements are the numbers of datasets, integers from 0.
        stop_on_empty_dataset: end when a dataset is chosen that has no more elements; otherwise pass over it.

    Example:
        >>> datasets = [ts.data.Dataset.range(1), ts.data.Dataset.range(7, 9)]
        >>> choices = ts.data.Dataset.from_tensor_slices([0, 1, 0, 1])
        >>> [int(number) for number in ts.data.experimental.choose_from_datasets(datasets, choices)]
        [0, 7, 8]
    """
    return Dataset.choose_from_datasets(datasets, choice_dataset, stop_on_empty_dataset)
