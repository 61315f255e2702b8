"""What ``fit``, ``evaluate`` and ``predict`` accept as data, and the distributed dataset that they make of it.

Every kind of data becomes one, also without replicas to divide it over: so a batch always says how many examples it
has, and an epoch where it is.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from torchstrategy.base import tree
from torchstrategy.base.options import InputOptions
from torchstrategy.data.data_order import is_pipeline, known_length, note_small_batch
from torchstrategy.data.distribute import distribute_dataset, distribute_from_function
from torchstrategy.data.distributed_dataset import DistributedDataset
from torchstrategy.data.loader import has_index_batches
from torchstrategy.data.numpy import ArrayDataset
from torchstrategy.data.own_streams import InputContext
from torchstrategy.data.sources import WholeBatches
from torchstrategy.fit.arguments import DataArguments, named_arguments, shown_type, validation_arguments
from torchstrategy.fit.array_data import Arrays, ArraySource, is_array, make_arrays
from torchstrategy.fit.batch_parts import unpack_x_y_sample_weight
from torchstrategy.strategies.strategy import Strategy

__all__ = ["Batches", "DatasetCreator", "make_batches", "unpack_validation_data", "unpack_x_y_sample_weight"]


class DatasetCreator:
    """Lets ``fit``, ``evaluate`` and ``predict`` make their dataset by a function, once for each input pipeline.

    The function is called as ``strategy.distribute_datasets_from_function`` calls it, so its batches are those of one
    replica. Its datasets have no length that all processes know.

    Args:
        dataset_fn: takes a ``ts.InputContext`` and returns a ``DataLoader``, a ``ts.data.Dataset`` or another iterable
            of one replica's batches: ``context.get_per_replica_batch_size(global_batch_size)`` examples each.
        input_options: how elements are moved to the devices; ``None`` means the defaults.

    Raises:
        TypeError: ``dataset_fn`` is no function, or ``input_options`` are no ``ts.InputOptions``.

    Example:
        >>> def dataset_fn(context):
        ...     size = context.get_per_replica_batch_size(4)
        ...     dataset = ts.data.Dataset.from_tensor_slices((torch.ones(8, 1), torch.ones(8, 1)))
        ...     return dataset.shard(context.num_input_pipelines, context.input_pipeline_id).batch(size)
        >>> creator = ts.utils.DatasetCreator(dataset_fn)
        >>> len(list(creator(ts.InputContext())))
        2
    """

    def __init__(self, dataset_fn: Callable[[InputContext], Any], input_options: InputOptions | None = None) -> None:
        if not callable(dataset_fn):
            raise TypeError(
                "dataset_fn must be a function that takes a ts.InputContext and returns a dataset. Received: "
                f"{dataset_fn!r:.100}"
            )
        if input_options is not None and not isinstance(input_options, InputOptions):
            raise TypeError(f"input_options must be a ts.InputOptions. Received: {input_options!r:.100}")
        self.dataset_fn = dataset_fn
        self.input_options = input_options

    def __call__(self, context: InputContext) -> Any:
        """Return the dataset of one input pipeline."""
        return self.dataset_fn(context)


#: Examples of a batch of arrays, as in Keras.
DEFAULT_BATCH_SIZE = 32

_ACCEPTED = (
    "Pass arrays or tensors (one, or several in a tuple, list or dict), a DataLoader, a ts.data.Dataset, a torch "
    "Dataset, an iterable of batches, a dataset that the model's strategy distributed, or a ts.utils.DatasetCreator."
)
_ONCE = (
    "which can be iterated only once, and it is at its end. Pass data that can be iterated again and again, such as a "
    "DataLoader or a ts.data.Dataset; or say how many of its batches are for one epoch (steps_per_epoch, "
    "validation_steps)."
)


@dataclass(frozen=True)
class Batches:
    """The data of one call.

    Args:
        dataset: gives the global batches, anew in each iteration.
        num_batches: how many there are, ``None`` if that is not known.
        num_examples: how many examples they hold together, ``None`` if that is not known.
        names: of the method's arguments, for messages.
        is_one_shot: the data is a generator, which can be iterated once.
        labels: the targets of all examples as tensors, if they are arrays.
    """

    dataset: DistributedDataset
    num_batches: int | None
    num_examples: int | None
    names: DataArguments
    is_one_shot: bool = False
    labels: Any = None


def make_batches(  # noqa: PLR0913 - what `fit` has of data
    strategy: Strategy,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int | None = None,
    shuffle: bool = False,
    method: str = "fit",
    steps: int | None = None,
    names: DataArguments | None = None,
) -> Batches:
    """Distribute data, in cross-replica context; every process calls it with the same data.

    Arrays and torch Datasets are cut into batches and shuffled. Everything else gives batches in an order of its own; a
    tuple or list of up to three parts is ``(x, y, sample_weight)``. A list is taken for several inputs, as in Keras,
    unless its items are tuples or dicts: then it is a list of batches or, with a ``batch_size``, of examples. A
    generator is used up by one epoch, or by several with a number of steps.

    Args:
        strategy: the model's.
        x: the data.
        y: the targets, for arrays.
        sample_weight: the weights of the examples, for arrays.
        batch_size: examples of a global batch, for data that has no batches. If it is ``None``: as many as ``steps``
            batches need to hold all of the data, or 32.
        shuffle: whether arrays and torch Datasets are shuffled in each epoch.
        method: of the model, for messages.
        steps: how many batches will be read; ``None`` for all.
        names: of the method's arguments, if they are not called ``x``, ``y`` and so on.

    Raises:
        TypeError: ``x`` is no data.
        ValueError: the arguments don't go together, the arrays have no numbers or different lengths, or there is no
            data.

    Example:
        >>> from torchstrategy.fit.inputs import make_batches
        >>> batches = make_batches(ts.get_strategy(), torch.arange(3), torch.ones(3), batch_size=2)
        >>> batches.num_batches, list(batches.dataset)
        (2, [(tensor([0, 1]), tensor([1., 1.])), (tensor([2]), tensor([1.]))])
    """
    names = named_arguments(method) if names is None else names
    if not isinstance(shuffle, (bool, np.bool_)):
        raise TypeError(f"{names.method}(shuffle=...) must be True or False. Received: {shuffle!r}")
    _check_batch_size(batch_size, names)
    if x is None:
        raise ValueError(f"{names.x} is missing. {_ACCEPTED}")
    if type(x) in (TensorDataset, ArrayDataset):  # whose examples are indexed at once, not one by one
        _check_alone(x, y, sample_weight, names)
        x, y, sample_weight = _columns(x, names)
    if _holds_arrays(x, y, batch_size):
        arrays = make_arrays(x, y, sample_weight, names)
        size = _size_of_batches(arrays.num_examples, batch_size, steps)
        return _batches_of_arrays(strategy, arrays, size, shuffle=bool(shuffle), names=names)
    _check_alone(x, y, sample_weight, names)
    if isinstance(x, Iterator):
        _check_no_batch_size(x, batch_size, names)
        placement, workers = strategy.placement, strategy.workers
        source = WholeBatches(_Once(x, names), placement, workers)
        once = DistributedDataset(source, placement, workers, InputOptions(), reads_ahead=False)
        return Batches(once, None, None, names, is_one_shot=True)
    if isinstance(x, (DistributedDataset, DatasetCreator)):
        _check_no_batch_size(x, batch_size, names)
        dataset, num_examples = _own_dataset(strategy, x, names), None
    else:
        data = _batched(x, batch_size, steps, shuffle=bool(shuffle), names=names)
        # The strategy's own method would leave the data as it is where there is nothing to divide.
        dataset = distribute_dataset(data, strategy.placement, strategy.workers)
        num_examples = _num_examples(data)
    num_batches = known_length(dataset)
    if steps is None and _never_ends(x):
        raise ValueError(
            f"{names.x} never ends: the dataset is repeated without a number. Say how many of its batches are read "
            "(steps_per_epoch in fit, validation_steps for its validation_data, steps in evaluate and predict), or "
            "give repeat() a number."
        )
    if num_batches == 0:
        raise ValueError(
            f"{names.x} gives no batches: the {type(x).__name__} is empty, or has fewer examples than a batch and "
            "drops it (drop_last, drop_remainder)."
        )
    return Batches(dataset, num_batches, num_examples, names)


def unpack_validation_data(
    validation_data: Any, validation_batch_size: int | None = None, batch_size: int | None = None
) -> dict[str, Any]:
    """Return the arguments of ``make_batches`` for what ``fit`` is to validate with.

    Args:
        validation_data: ``(x, y)`` or ``(x, y, sample_weight)`` of arrays, or data that gives batches.
        validation_batch_size: examples of a global batch.
        batch_size: the same of the training, for arrays, if there is no ``validation_batch_size``.

    Raises:
        ValueError: it has other parts.
    """
    names = validation_arguments()
    size = batch_size if validation_batch_size is None else validation_batch_size
    if isinstance(validation_data, (tuple, list)) and not _is_list_of_rows(validation_data, None):
        if not 1 <= len(validation_data) <= 3:
            raise ValueError(
                "fit(validation_data=...) must be (x, y), (x, y, sample_weight), or data that gives batches. Received "
                f"a {type(validation_data).__name__} of {len(validation_data)} parts."
            )
        x, y, sample_weight = unpack_x_y_sample_weight(validation_data)
        return {"x": x, "y": y, "sample_weight": sample_weight, "batch_size": size, "names": names}
    names = replace(names, x="fit(validation_data=...)")
    if not _needs_batch_size(validation_data):
        size = validation_batch_size
    return {"x": validation_data, "batch_size": size, "names": names}


class _Once:
    """An iterator as data, whose next iteration goes on where the last one ended."""

    def __init__(self, iterator: Iterator[Any], names: DataArguments) -> None:
        self._iterator = iterator
        self._names = names
        self._was_read = False

    def __iter__(self) -> Iterator[Any]:
        was_read, is_at_end = self._was_read, True
        for item in self._iterator:
            self._was_read, is_at_end = True, False
            yield item
        if was_read and is_at_end:
            raise ValueError(f"{self._names.x} is a generator or another iterator, {_ONCE}")


def _never_ends(x: Any) -> bool:
    """Say whether it is known that data has no end; what a function makes on other processes is not."""
    data = getattr(x._source, "_data", None) if isinstance(x, DistributedDataset) else x
    return is_pipeline(data) and data.cardinality() == -1  # ts.data.INFINITE_CARDINALITY


def _check_batch_size(batch_size: Any, names: DataArguments) -> None:
    if batch_size is None:
        return
    if not isinstance(batch_size, (int, np.integer)) or isinstance(batch_size, bool) or batch_size < 1:
        raise ValueError(
            f"{names.batch_size} must be a positive integer, the examples of a batch over all replicas. Received: "
            f"{batch_size!r}"
        )


def _check_alone(x: Any, y: Any, sample_weight: Any, names: DataArguments) -> None:
    """Check that data which holds the targets itself came without others."""
    for value, name in ((y, names.y), (sample_weight, names.sample_weight)):
        if value is not None:
            raise ValueError(
                f"{name} is for arrays. {names.x} is {shown_type(x)}, whose batches must hold everything: make them "
                f"(x, y) or (x, y, sample_weight), and leave {name} out."
            )


def _check_no_batch_size(x: Any, batch_size: int | None, names: DataArguments) -> None:
    if batch_size is not None:
        raise ValueError(
            f"{names.batch_size} is for arrays and datasets without batches. {names.x} is {shown_type(x)}, which gives "
            f"batches: leave {names.batch_size} out, and set their size where it is made."
        )


def _columns(dataset: Any, names: DataArguments) -> tuple[Any, Any, Any]:
    examples = dataset.tensors if isinstance(dataset, TensorDataset) else dataset[:]
    try:
        return unpack_x_y_sample_weight(examples)
    except ValueError as error:
        raise ValueError(f"{names.x} is a {type(dataset).__name__} of something else: {error}") from None


def _holds_arrays(x: Any, y: Any, batch_size: int | None) -> bool:
    if isinstance(x, (Dataset, DataLoader, DistributedDataset)):
        return False
    if is_array(x):
        return True
    if isinstance(x, list) and y is None:
        return not _is_list_of_rows(x, batch_size)
    return isinstance(x, (tuple, list, Mapping, int, float, str, bytes)) or dataclasses.is_dataclass(x)


def _is_list_of_rows(x: Any, batch_size: int | None) -> bool:
    """Say whether x is a list of batches or, with a batch size, of examples."""
    if not isinstance(x, list) or not x or not all(isinstance(row, (tuple, dict)) for row in x):
        return False
    return batch_size is not None or any(map(is_array, tree.all_leaves(x[0])))


def _size_of_batches(num_examples: int | None, batch_size: int | None, steps: int | None) -> int:
    if batch_size is not None:
        return int(batch_size)
    return DEFAULT_BATCH_SIZE if steps is None or not num_examples else math.ceil(num_examples / steps)


def _batches_of_arrays(
    strategy: Strategy, arrays: Arrays, batch_size: int, *, shuffle: bool, names: DataArguments
) -> Batches:
    placement, workers = strategy.placement, strategy.workers
    source = ArraySource(arrays, batch_size, shuffle=shuffle, placement=placement, workers=workers)
    note_small_batch(source, placement)
    dataset = DistributedDataset(source, placement, workers, InputOptions())
    return Batches(dataset, source.length(), arrays.num_examples, names, labels=arrays.targets)


def _own_dataset(
    strategy: Strategy, x: DistributedDataset | DatasetCreator, names: DataArguments
) -> DistributedDataset:
    if isinstance(x, DatasetCreator):
        return distribute_from_function(x.dataset_fn, strategy.placement, strategy.workers, x.input_options)
    if not x.is_for(strategy.placement, strategy.workers):
        raise ValueError(
            f"{names.x} was distributed by another strategy than the model's. Distribute it by that one: "
            "model.distribute_strategy.experimental_distribute_dataset(...), or pass the dataset itself."
        )
    return x


def _batched(x: Any, batch_size: int | None, steps: int | None, *, shuffle: bool, names: DataArguments) -> Any:
    """Return data that gives batches."""
    if _is_map_style(x):
        num_examples = known_length(x)
        if num_examples == 0:
            raise ValueError(f"{names.x} has no examples: the {type(x).__name__} is empty.")
        return DataLoader(x, _size_of_batches(num_examples, batch_size, steps), shuffle=shuffle)
    if not isinstance(x, Iterable):
        raise TypeError(f"{names.x} is {shown_type(x)}, which is no data. {_ACCEPTED}")
    if batch_size is None:
        return x
    if is_pipeline(x):
        if x.batch_size is not None:
            _check_no_batch_size(x, batch_size, names)
        return x.batch(int(batch_size))
    if isinstance(x, IterableDataset):
        return DataLoader(x, int(batch_size))
    if isinstance(x, DataLoader) or not _has_items(x):
        _check_no_batch_size(x, batch_size, names)
    return DataLoader(cast("Dataset[Any]", x), int(batch_size), shuffle=shuffle)


def _is_map_style(x: Any) -> bool:
    return not isinstance(x, IterableDataset) and (
        isinstance(x, Dataset) or (_has_items(x) and not isinstance(x, (Iterable, Mapping)))
    )


def _has_items(x: Any) -> bool:
    return hasattr(x, "__getitem__") and hasattr(x, "__len__")


def _needs_batch_size(x: Any) -> bool:
    return is_array(x) or _is_map_style(x) or isinstance(x, Mapping)


def _num_examples(data: Any) -> int | None:
    """Return how many examples a loader's batches hold together, if that is known."""
    if not has_index_batches(data) or data.batch_size is None:
        return None
    num_indices = known_length(data.sampler)
    return num_indices if num_indices is None or not data.drop_last else len(data) * data.batch_size
