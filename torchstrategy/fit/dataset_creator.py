"""``DatasetCreator``: a dataset function as the data of ``fit``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchstrategy.base.options import InputOptions
from torchstrategy.data.context import InputContext

__all__ = ["DatasetCreator"]


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
