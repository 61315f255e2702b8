"""What turns a user's data into a distributed dataset."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from torchstrategy.base.devices import Placement
from torchstrategy.base.options import AutoShardPolicy, InputOptions, InputReplicationMode
from torchstrategy.data.data_order import Workers, check_equal, checksum, is_pipeline, note_small_batch
from torchstrategy.data.distributed_dataset import DistributedDataset
from torchstrategy.data.example_lists import with_example_lists
from torchstrategy.data.loader import IndexedLoader, has_index_batches
from torchstrategy.data.numpy import ArrayBatches, ArrayDataset, make_numpy_dataset
from torchstrategy.data.own_streams import FunctionPipelines, InputContext, OwnStreams
from torchstrategy.data.policy import choose_sharding, shard
from torchstrategy.data.sources import Source, WholeBatches
from torchstrategy.errors import UnimplementedError

__all__ = ["distribute_dataset", "distribute_from_function"]

_ACCEPTED = (
    "Pass a DataLoader of global batches, a ts.data.Dataset, a map-style dataset or arrays with batch_size=, or an "
    "object that can be iterated again and again and gives global batches, such as a list of batches."
)

_GENERATOR = " Of a function that yields batches make one by ts.data.Dataset.from_generator(function)."

_SAME_ARRAYS = (
    "Pass the same arrays on every rank: load the same files, and seed alike what is random "
    "(ts.utils.set_random_seed). If each rank has arrays of its own, use distribute_datasets_from_function."
)


def distribute_dataset(
    dataset: Any,
    placement: Placement,
    workers: Workers | None,
    options: InputOptions | None = None,
    batch_size: int | None = None,
    auto_shard_policy: AutoShardPolicy | None = None,
) -> DistributedDataset:
    """Split the global batches of a dataset over the replicas.

    With several processes every rank must call it, on the same dataset. The parts of a map-style ``DataLoader`` are
    loaded only where they are needed; of an iterable every process reads everything.

    Args:
        dataset: a ``DataLoader``, a ``ts.data.Dataset``, a map-style or iterable dataset, arrays (a numpy array or
            tensor, or a tuple or dict of them), or any iterable of global batches.
        placement: the replicas of this process.
        workers: the strategy's processes, ``None`` if there is one.
        options: how elements are moved to the devices; ``None`` means the defaults.
        batch_size: examples of a global batch, for data that is not batched yet.
        auto_shard_policy: how several processes divide the data; ``None`` means what the dataset's options say.

    Returns:
        The distributed dataset.

    Raises:
        TypeError: ``dataset`` is no dataset, or can be iterated only once; ``options`` are no ``InputOptions``.
        ValueError: ``dataset`` is ``None``, has a ``DistributedSampler``, needs a ``batch_size`` or must not have one.
        UnimplementedError: the options ask for one dataset per replica.
    """
    options = _check_options(options)
    if options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
        raise UnimplementedError(
            "InputReplicationMode.PER_REPLICA needs a dataset for each replica: use distribute_datasets_from_function."
        )
    if dataset is None:
        raise ValueError(f"The dataset must not be None. {_ACCEPTED}")
    if isinstance(dataset, DistributedDataset):
        raise TypeError("The dataset is distributed already.")
    data = dataset if batch_size is None else _batch(dataset, batch_size)
    _check_iterable(data)
    note_small_batch(data, placement)
    sharding = choose_sharding(data, auto_shard_policy, workers)
    if isinstance(data, DataLoader) and sharding.policy is not AutoShardPolicy.OFF:
        _check_sampler(data)
    if placement.num_replicas > 1:
        data = with_example_lists(data)
    make = functools.partial(_make_source, data, placement=placement, workers=workers)
    other = None if sharding.other is None else make(sharding.other)
    return DistributedDataset(make(sharding.policy), placement, workers, options, sharding, other)


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
        TypeError: ``fn`` is no function, or returned something that can't be iterated again and again.
        ValueError: the options place the dataset on the device without one dataset per replica.
    """
    options = _check_options(options)
    if not callable(fn):
        raise TypeError(
            f"dataset_fn must be a function that takes an InputContext and returns a dataset. Received: {fn!r}. To "
            "divide a dataset that you have, use experimental_distribute_dataset."
        )
    per_replica = options.experimental_replication_mode is InputReplicationMode.PER_REPLICA
    if options.experimental_place_dataset_on_device and not per_replica:
        raise ValueError(
            "For a dataset function experimental_place_dataset_on_device needs "
            "experimental_replication_mode=InputReplicationMode.PER_REPLICA."
        )
    source = FunctionPipelines(fn, placement, workers, per_replica=per_replica)
    return DistributedDataset(source, placement, workers, options)


def _check_options(options: InputOptions | None) -> InputOptions:
    options = InputOptions() if options is None else options
    if not isinstance(options, InputOptions):
        raise TypeError(f"options must be a ts.InputOptions. Received: {options!r}")
    return options


def _batch(dataset: Any, batch_size: int) -> Any:
    if not isinstance(batch_size, (int, np.integer)) or isinstance(batch_size, bool) or batch_size < 1:
        raise ValueError(f"batch_size must be a positive integer, the size of a global batch. Received: {batch_size!r}")
    batch_size = int(batch_size)
    if isinstance(dataset, DataLoader):
        raise ValueError("A DataLoader has a batch size of its own, which is the global one: leave batch_size= out.")
    if is_pipeline(dataset):
        if dataset.batch_size is not None:
            raise ValueError(
                "The ts.data.Dataset has batches already, which are the global ones: leave batch_size= out."
            )
        return dataset.batch(batch_size)
    if isinstance(dataset, (np.ndarray, Tensor, tuple, Mapping)):
        dataset = make_numpy_dataset(dataset)
    if isinstance(dataset, ArrayDataset):
        return ArrayBatches(dataset, batch_size)
    if isinstance(dataset, Dataset) or (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        return DataLoader(dataset, batch_size)
    raise TypeError(
        f"Can't batch a {type(dataset).__name__}: batch_size= is for map-style datasets and arrays. {_ACCEPTED}"
    )


def _make_source(data: Any, policy: AutoShardPolicy, placement: Placement, workers: Workers | None) -> Source:
    if policy is not AutoShardPolicy.DATA:
        return OwnStreams(functools.partial(shard, data, policy), placement, workers, policy.name)
    if has_index_batches(data):
        return IndexedLoader(data, placement, workers)
    is_array = isinstance(data, ArrayBatches)
    if is_array and workers is not None:
        record = [*data.sizes, checksum(data.arrays)]
        check_equal(workers, "number of examples, batch size and checksum of the arrays", record, _SAME_ARRAYS)
    return WholeBatches(data, placement, workers, is_agreed=is_array)


def _check_iterable(data: Any) -> None:
    is_map_style = isinstance(data, Dataset) and not isinstance(data, IterableDataset)
    if is_map_style or isinstance(data, (np.ndarray, Tensor, tuple, Mapping)):
        raise ValueError(
            f"A {type(data).__name__} holds examples: pass batch_size=, the global one. If it holds batches already, "
            "make it a list of batches, or a DataLoader with batch_size=None."
        )
    if isinstance(data, Iterator):
        raise TypeError(f"A {type(data).__name__} can be iterated only once. {_ACCEPTED}{_GENERATOR}")
    if not isinstance(data, Iterable) or isinstance(data, (str, bytes)):
        raise TypeError(f"{data!r} is not a dataset. {_ACCEPTED}{_GENERATOR if inspect.isroutine(data) else ''}")


def _check_sampler(loader: DataLoader[Any]) -> None:
    samplers = [loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
    if any(isinstance(sampler, DistributedSampler) for sampler in samplers):
        raise ValueError(
            "The DataLoader has a DistributedSampler, so its batches would be divided twice. Remove it (shuffle=True "
            "shuffles) and give the loader the global batch size: the strategy gives every replica its share."
        )
