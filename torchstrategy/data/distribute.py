"""What turns a user's data into a distributed dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from torchstrategy.data.agreement import Workers, check_equal
from torchstrategy.data.context import InputContext
from torchstrategy.data.dataset import DistributedDataset
from torchstrategy.data.from_function import FunctionPipelines
from torchstrategy.data.numpy import ArrayBatches, ArrayDataset, make_numpy_dataset
from torchstrategy.data.sources import ShardedLoader, Source, WholeBatches
from torchstrategy.devices import Placement
from torchstrategy.errors import UnimplementedError
from torchstrategy.options import InputOptions, InputReplicationMode

__all__ = ["distribute_dataset", "distribute_from_function"]

_ACCEPTED = (
    "Pass a DataLoader of global batches, a map-style dataset or arrays with batch_size=, or an object that can be "
    "iterated again and again and gives global batches, such as a list of batches."
)


def distribute_dataset(
    dataset: Any,
    placement: Placement,
    workers: Workers | None,
    options: InputOptions | None = None,
    batch_size: int | None = None,
) -> DistributedDataset:
    """Split the global batches of a dataset over the replicas.

    With several processes every rank must call it, on the same dataset. The parts of a map-style ``DataLoader`` are
    loaded only where they are needed; of an iterable every process reads everything.

    Args:
        dataset: a ``DataLoader``, a map-style dataset, arrays (a numpy array or tensor, or a tuple or dict of them), or
            any iterable of global batches.
        placement: the replicas of this process.
        workers: the strategy's processes, ``None`` if there is one.
        options: how elements are moved to the devices; ``None`` means the defaults.
        batch_size: examples of a global batch, for data that is not batched yet.

    Returns:
        The distributed dataset.

    Raises:
        TypeError: ``dataset`` is no dataset, or can be iterated only once.
        ValueError: ``dataset`` is ``None``, has a ``DistributedSampler``, needs a ``batch_size`` or must not have one.
        UnimplementedError: the options ask for one dataset per replica.
    """
    options = options or InputOptions()
    if options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
        raise UnimplementedError(
            "InputReplicationMode.PER_REPLICA needs a dataset for each replica: use distribute_datasets_from_function."
        )
    _check_options(options)
    if dataset is None:
        raise ValueError(f"The dataset must not be None. {_ACCEPTED}")
    if isinstance(dataset, DistributedDataset):
        raise TypeError("The dataset is distributed already.")
    data = dataset if batch_size is None else _batch(dataset, batch_size)
    return DistributedDataset(_make_source(data, placement, workers), placement, options)


def distribute_from_function(
    fn: Callable[[InputContext], Any],
    placement: Placement,
    workers: Workers | None,
    options: InputOptions | None = None,
) -> DistributedDataset:
    """Distribute the datasets that a function makes: one for each process, or one for each replica.

    The function is called at once. Its batches are one replica's batches; consecutive ones go to the process's
    replicas in turn, and nothing is split.

    Args:
        fn: takes an ``InputContext`` and returns a ``DataLoader`` or another iterable of batches.
        placement: the replicas of this process.
        workers: the strategy's processes, ``None`` if there is one.
        options: how often ``fn`` is called and how elements are moved to the devices; ``None`` means the defaults.

    Returns:
        The distributed dataset. Its length is not known.

    Raises:
        TypeError: ``fn`` returned something that can't be iterated again and again.
        ValueError: the options place the dataset on the device without one dataset per replica.
    """
    options = options or InputOptions()
    _check_options(options)
    per_replica = options.experimental_replication_mode is InputReplicationMode.PER_REPLICA
    return DistributedDataset(FunctionPipelines(fn, placement, workers, per_replica=per_replica), placement, options)


def _check_options(options: InputOptions) -> None:
    per_replica = options.experimental_replication_mode is InputReplicationMode.PER_REPLICA
    if options.experimental_place_dataset_on_device and not per_replica:
        raise ValueError(
            "experimental_place_dataset_on_device needs experimental_replication_mode=InputReplicationMode.PER_REPLICA."
        )


def _batch(dataset: Any, batch_size: int) -> Any:
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        raise ValueError(f"batch_size must be a positive integer, the size of a global batch. Received: {batch_size!r}")
    if isinstance(dataset, DataLoader):
        raise ValueError("A DataLoader has a batch size of its own, which is the global one: leave batch_size= out.")
    if isinstance(dataset, (np.ndarray, Tensor, tuple, Mapping)):
        dataset = make_numpy_dataset(dataset)
    if isinstance(dataset, ArrayDataset):
        return ArrayBatches(dataset, batch_size)
    if isinstance(dataset, Dataset) or (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        return DataLoader(dataset, batch_size)
    raise TypeError(
        f"Can't batch a {type(dataset).__name__}: batch_size= is for map-style datasets and arrays. {_ACCEPTED}"
    )


def _make_source(data: Any, placement: Placement, workers: Workers | None) -> Source:
    _check_iterable(data)
    if isinstance(data, DataLoader):
        _check_sampler(data)
        if workers is not None and not isinstance(data.dataset, IterableDataset) and data.batch_sampler is not None:
            return ShardedLoader(data, placement, workers)
    is_array = isinstance(data, ArrayBatches)
    if is_array and workers is not None:
        advice = "Pass arrays of the same length on every rank."
        check_equal(workers, "number of examples and batch size", data.sizes, advice)
    return WholeBatches(data, placement, workers, is_agreed=is_array)


def _check_iterable(data: Any) -> None:
    is_map_style = isinstance(data, Dataset) and not isinstance(data, IterableDataset)
    if is_map_style or isinstance(data, (np.ndarray, Tensor, tuple, Mapping)):
        raise ValueError(
            f"A {type(data).__name__} holds examples: pass batch_size=, the global one. If it holds batches already, "
            "make it a list of batches, or a DataLoader with batch_size=None."
        )
    if isinstance(data, Iterator):
        raise TypeError(f"A {type(data).__name__} can be iterated only once. {_ACCEPTED}")
    if not isinstance(data, Iterable) or isinstance(data, (str, bytes)):
        raise TypeError(f"{data!r} is not a dataset. {_ACCEPTED}")


def _check_sampler(loader: DataLoader[Any]) -> None:
    samplers = [loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
    if any(isinstance(sampler, DistributedSampler) for sampler in samplers):
        raise ValueError(
            "The DataLoader has a DistributedSampler, so its batches would be divided twice. Remove it (shuffle=True "
            "shuffles) and give the loader the global batch size: the strategy gives every replica its share."
        )
