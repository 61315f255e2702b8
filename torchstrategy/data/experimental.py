"""``ts.data.experimental``: names that tf.data has there."""

from __future__ import annotations

from torchstrategy.base.options import AutoShardPolicy
from torchstrategy.data.pipeline.dataset import AUTOTUNE, Dataset
from torchstrategy.data.pipeline.op import INFINITE_CARDINALITY, SHARD_HINT, UNKNOWN_CARDINALITY

__all__ = ["AUTOTUNE", "INFINITE_CARDINALITY", "SHARD_HINT", "UNKNOWN_CARDINALITY", "AutoShardPolicy", "cardinality"]


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
