"""Where elements come from when the user's function makes one dataset for each input pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torchstrategy.data.agreement import Workers
from torchstrategy.data.batch import Components, LocalBatch, batch_length, components, empty_like, join_parts
from torchstrategy.data.context import InputContext
from torchstrategy.data.sources import first_element
from torchstrategy.devices import Placement
from torchstrategy.errors import DisagreementError
from torchstrategy.values import BatchShares

__all__ = ["FunctionPipelines"]

_END = object()


class FunctionPipelines:
    """Deals the batches of the function's datasets to the replicas, without splitting them.

    The function is called at once. Iteration goes on until every rank is out of data; a replica without data gets
    empty batches. A last round of elements without a batch dimension is dropped unless every replica has one.

    Args:
        fn: takes an ``InputContext`` and returns a ``DataLoader`` or another iterable of one replica's batches.
        placement: the strategy's replicas.
        workers: its processes, ``None`` if there is one.
        per_replica: call ``fn`` for each replica instead of once in each process.

    Raises:
        TypeError: ``fn`` returned something that can't be iterated again and again.
    """

    def __init__(
        self, fn: Callable[[InputContext], Any], placement: Placement, workers: Workers | None, *, per_replica: bool
    ) -> None:
        self._placement = placement
        self._workers = workers
        replicas = placement.num_replicas
        if per_replica:
            contexts = [InputContext(replicas, i, replicas) for i in placement.local_replica_ids]
        elif workers is None:
            contexts = [InputContext(1, 0, replicas)]
        else:
            contexts = [InputContext(workers.size, workers.rank, replicas)]
        self._datasets = [_check_dataset(fn(context)) for context in contexts]

    def batches(self) -> Iterator[LocalBatch]:
        """Start an iteration."""
        queues = [iter(dataset) for dataset in self._datasets]
        if len(queues) == 1:  # consecutive elements go to the process's replicas in turn
            queues *= len(self._placement.devices)
        template: Components | None = None
        while True:
            items = [next(queue, _END) for queue in queues]
            parts = [None if item is _END else components(item) for item in items]
            template = next((part for part in parts if part is not None), template)
            record = _record(parts, template)
            records = [record] if self._workers is None else self._workers.exchange("next batches", record)
            if not _has_step(records) or template is None:
                return
            filled = [empty_like(template) if part is None else part for part in parts]
            yield join_parts(filled, _shares(records))

    def length(self) -> int | None:
        """Return ``None``: the datasets of other ranks are not known here."""
        return None

    def example(self) -> Components:
        """Return the first batch of the first dataset."""
        return first_element(self._datasets[0])


def _record(parts: list[Components | None], template: Components | None) -> dict[str, Any]:
    """Return what the ranks tell each other: who has data, and the length of every component for every replica."""
    if template is None:
        return {"has_data": False, "is_full": False, "is_scalar": False, "lengths": None}
    count = range(len(template.leaves))
    lengths = [[0 if part is None else batch_length(part.leaves[i]) for part in parts] for i in count]
    return {
        "has_data": any(part is not None for part in parts),
        "is_full": all(part is not None for part in parts),
        "is_scalar": any(leaf is not None and batch_length(leaf) is None for leaf in template.leaves),
        "lengths": lengths,
    }


def _has_step(records: list[dict[str, Any]]) -> bool:
    if not any(record["has_data"] for record in records):
        return False
    without = [rank for rank, record in enumerate(records) if record["lengths"] is None]
    if without:
        raise RuntimeError(
            f"The dataset function gave ranks {without} no data at all while others have some, so the structure of an "
            "empty batch is not known there. Give every input pipeline at least one batch."
        )
    counts = [len(record["lengths"]) for record in records]
    if len(set(counts)) > 1:
        raise DisagreementError(
            f"The ranks' batches have different numbers of components (by rank): {counts}. The dataset function must "
            "give batches of the same structure on every rank."
        )
    return all(record["is_full"] for record in records) or not any(record["is_scalar"] for record in records)


def _shares(records: list[dict[str, Any]]) -> list[BatchShares | None]:
    shares: list[BatchShares | None] = []
    for columns in zip(*(record["lengths"] for record in records), strict=True):
        sizes = [size for column in columns for size in column]
        shares.append(None if None in sizes else BatchShares(tuple(sizes)))
    return shares


def _check_dataset(dataset: Any) -> Iterable[Any]:
    if isinstance(dataset, Iterator):
        raise TypeError(
            f"The dataset function returned a {type(dataset).__name__}, which can be iterated only once. Return a "
            "DataLoader, a list of batches, or another object whose __iter__ starts anew."
        )
    if not isinstance(dataset, Iterable) or isinstance(dataset, (str, bytes)):
        raise TypeError(
            f"The dataset function must return a DataLoader or another iterable of batches. Received: {dataset!r}"
        )
    return dataset
