"""Distributed datasets and their iterators."""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack

from torchstrategy.base.context import current_replica_context, has_strategy
from torchstrategy.base.devices import Placement
from torchstrategy.base.labels import label
from torchstrategy.base.log import add_note, logger, without_compiler
from torchstrategy.base.options import InputOptions
from torchstrategy.base.values import PerReplica
from torchstrategy.data.batch import LocalBatch, describe
from torchstrategy.data.data_order import Workers
from torchstrategy.data.policy import Sharding
from torchstrategy.data.position import check_state
from torchstrategy.data.prefetch import DeviceCopies, InFlight
from torchstrategy.data.sources import Cursor, Reading, Source
from torchstrategy.errors import InvalidArgumentError, OutOfRangeError

__all__ = ["DistributedDataset", "DistributedIterator"]

#: What programs ask a DataLoader for, beside iterating over it.
_OF_LOADERS = ("dataset", "batch_size", "sampler", "batch_sampler", "drop_last", "collate_fn", "num_workers")


class DistributedDataset:
    """Gives each replica its share of every global batch; made by a strategy.

    Each iteration starts anew, in an order that all processes share. An element has the structure of the user's
    batches. Its leaves are ``PerReplica`` values if this process has several replicas, plain tensors if it has one.

    Args:
        source: where the elements come from.
        placement: the replicas of this process.
        workers: the strategy's processes, ``None`` if there is one.
        options: whether elements are moved to the replicas' devices, and how far ahead.
        sharding: how processes divide the data, ``None`` if nothing is divided.
        other_source: reads the same data in the way that a state of another number of processes may have been read.
        reads_ahead: whether elements may be read before they are asked for; no, if an iteration that is dropped must
            leave the others to the next one.

    Example:
        >>> strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> dataset = strategy.experimental_distribute_dataset(torch.arange(5), batch_size=3)
        >>> for batch in dataset:
        ...     print(batch)
        PerReplica:{
          0: tensor([0, 1]),
          1: tensor([2])
        }
        PerReplica:{
          0: tensor([3]),
          1: tensor([4])
        }
    """

    def __init__(
        self,
        source: Source,
        placement: Placement,
        workers: Workers | None,
        options: InputOptions,
        sharding: Sharding | None = None,
        other_source: Source | None = None,
        *,
        reads_ahead: bool = True,
    ) -> None:
        self._source = source
        self._other_source = other_source
        self._placement = placement
        self._workers = workers
        self._options = options
        self._sharding = sharding
        self._reads_ahead = reads_ahead
        self._element_spec: Any = None
        self._said_nothing_came = False
        self._cursor = Cursor(source, None, None)

    def __iter__(self) -> DistributedIterator:
        if torch.compiler.is_dynamo_compiling():
            return without_compiler(iter, self)  # type: ignore[no-any-return]
        reading, cursor = self._open()
        copies = DeviceCopies(self._placement, self._options.experimental_fetch_to_device is not False)
        reads_ahead = copies.is_needed and self._reads_ahead
        num_ahead = self._options.experimental_per_replica_buffer_size if reads_ahead else 0
        return DistributedIterator(reading, copies, num_ahead, cursor, self)

    def __getattr__(self, name: str) -> Any:
        text = f"A {type(self).__name__} has no {name!r}."
        if name in _OF_LOADERS:
            text += f" Ask what was distributed, such as your DataLoader: loader.{name}."
            text += " Each epoch has an order of its own without set_epoch()." if name == "sampler" else ""
        raise AttributeError(text, name=name, obj=self)

    def _note_no_batches(self) -> None:
        """Say, once for this dataset, that an iteration ended before its first element."""
        if self._placement.first_replica == 0 and not self._said_nothing_came:
            self._said_nothing_came = True
            logger.warning(
                "The dataset gave no batches: it has no examples, or fewer than one batch and drops it (drop_last, "
                "drop_remainder), or it was at its end and its __iter__ does not start anew."
            )

    def _open(self) -> tuple[Reading, Cursor]:
        """Start an iteration, or go on with the one of a loaded state."""
        source, start = self._cursor.source, self._cursor.loaded
        if start is None or (start["is_finished"] and source is not self._source):
            source, start = self._source, None
        reading = source.start(start)
        self._cursor = Cursor(source, reading.position, start)
        return reading, self._cursor

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}: for {self._placement}>"

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Return what a function, which gets a state and an element, has made of the elements of one iteration.

        Example:
            >>> dataset = ts.get_strategy().experimental_distribute_dataset(torch.arange(5), batch_size=2)
            >>> assert dataset.reduce(0, lambda total, batch: total + batch.sum()) == 10
        """
        return functools.reduce(reduce_func, self, initial_state)

    def __len__(self) -> int:
        length = self._source.length()
        if length is None:
            raise TypeError(f"The length of this {type(self).__name__} is not known.")
        return length

    @property
    def element_spec(self) -> Any:
        """The structure of the elements, with a ``TensorSpec`` for each tensor; the first use reads one element.

        Raises:
            ValueError: the dataset is empty.
        """
        if self._element_spec is None:
            example = self._source.example()
            specs = [describe(leaf) for leaf in example.leaves]
            num_local = self._placement.num_local
            leaves = specs if num_local == 1 else [spec and PerReplica((spec,) * num_local) for spec in specs]
            self._element_spec = example.spec.unflatten(leaves)
        return self._element_spec

    def state_dict(self) -> dict[str, Any]:
        """Return where the latest iteration is: after the last element that it gave.

        With several processes that have data of their own (``state_is_collective``) every process must call it. A
        state can be loaded by the same dataset distributed over another number of replicas or processes. Batches cut by
        ``AutoShardPolicy.DATA`` then go on in the same order. Processes with streams of their own take over those that
        have no process any more.

        Returns:
            Plain data (tensors, numbers, strings, dicts, lists). ``"step"`` is the number of elements given in this
            epoch, ``"is_finished"`` whether the epoch was at its end.

        Example:
            >>> strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> dataset = strategy.experimental_distribute_dataset(torch.arange(6), batch_size=2)
            >>> iterator = iter(dataset)
            >>> _ = next(iterator)
            >>> state = dataset.state_dict()
            >>> one = ts.OneDeviceStrategy("cpu:0")
            >>> rest = one.experimental_distribute_dataset(torch.arange(6), batch_size=2)
            >>> rest.load_state_dict(state)
            >>> list(rest)
            [tensor([2, 3]), tensor([4, 5])]
        """
        return self._full_state(self._cursor)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration go on where a state was taken; if that was the end of an epoch, a new one begins.

        Args:
            state: what ``state_dict`` returned.

        Raises:
            TypeError: it is no such state.
            InvalidArgumentError: it is of a dataset that is read in another way.
        """
        self._cursor = Cursor(self._check_state(state)[state["kind"]], None, state["position"])

    def _check_state(self, state: dict[str, Any]) -> dict[str, Source]:
        """Check a state as ``load_state_dict`` does; return the sources by the kinds of their states."""
        sources = {source.kind: source for source in (self._other_source, self._source) if source is not None}
        check_state(state, list(sources))
        return sources

    @property
    def state_is_collective(self) -> bool:
        """Whether every process must call ``state_dict`` at the same point, because each has data of its own."""
        return self._cursor.source.is_collective

    @property
    def _is_under_way(self) -> bool:
        """Whether the latest iteration has given elements, and is not known to be at its end."""
        if self._cursor.is_at_start:
            return False
        position = self._cursor.local_state()
        return position is not None and not position["is_finished"]

    def is_for(self, placement: Placement, workers: Workers | None) -> bool:
        """Say whether the elements are made for these replicas: those of a strategy, with its processes."""
        return self._placement == placement and self._workers is workers

    def explain_sharding(self) -> str:
        """Say how the data is divided, and why.

        Example:
            >>> strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> dataset = strategy.experimental_distribute_dataset(torch.arange(6), batch_size=2)
            >>> print(dataset.explain_sharding())
            DATA: one process reads everything. Whole batches are read and cut. 2 replicas in all.
        """
        number = self._placement.num_replicas
        replicas = f"{number} replica{'' if number == 1 else 's'} in all."
        if self._sharding is None:
            return f"{self._source.how} {replicas}"
        return f"{self._sharding.policy.name}: {self._sharding.reason}. {self._source.how} {replicas}"

    def _full_state(self, cursor: Cursor) -> dict[str, Any]:
        source, position = cursor.source, cursor.local_state()
        begins = position is None
        if position is None:  # like the end of the one before: what the next one's order is drawn from counts, too
            position = {**source.start(None).position.state(), "is_finished": True}
        if begins or not cursor.is_at_start:
            position = source.combine(position)
        is_finished = position["is_finished"] and not begins
        return {"kind": source.kind, "step": position["step"], "is_finished": is_finished, "position": position}


class OptionalElement:
    """What ``DistributedIterator.get_next_as_optional`` returns: an element, or none at the end.

    Args:
        elements: the element, or nothing.
    """

    def __init__(self, *elements: Any) -> None:
        self._elements = elements

    def has_value(self) -> bool:
        """Say whether there is an element."""
        return bool(self._elements)

    def get_value(self) -> Any:
        """Return the element.

        Raises:
            InvalidArgumentError: there is none.
        """
        if not self._elements:
            raise InvalidArgumentError("This optional has no value: the dataset is at its end. Ask has_value() first.")
        return self._elements[0]


class DistributedIterator:
    """Iterates over a distributed dataset once.

    After an error in the dataset the iterator is finished. Dropping it stops its loader's worker processes.

    Args:
        reading: gives the elements, not yet on the replicas' devices.
        copies: brings them there.
        num_ahead: how many elements it starts to bring before they are asked for.
        cursor: where this iterator is.
        dataset: what it iterates over.
    """

    def __init__(
        self, reading: Reading, copies: DeviceCopies, num_ahead: int, cursor: Cursor, dataset: DistributedDataset
    ) -> None:
        self._reading = reading
        self._copies = copies
        self._num_ahead = num_ahead
        self._cursor = cursor
        self._dataset = dataset
        self._num_read = 0
        self._num_given = 0
        self._elements: deque[tuple[InFlight, dict[str, Any] | Exception | None]] = deque()
        self._end: Exception | None = None
        self._end_state: dict[str, Any] | Exception | None = None

    def __iter__(self) -> DistributedIterator:
        return self

    def __next__(self) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return without_compiler(next, self)
        if current_replica_context() is not None and has_strategy():
            raise ValueError(
                "next(iterator) was called in a replica function: an element has the shares of all replicas, and each "
                "replica would take one of its own. Read outside: `strategy.run(fn, args=(next(iterator),))`."
            )
        while self._end is None and len(self._elements) <= self._num_ahead:
            with label("input"):
                self._read()
        if self._elements:
            in_flight, snapshot = self._elements.popleft()
            # Processes that sum gradients compare which element these are of.
            element = self._copies.finish(in_flight, None if self._dataset._workers is None else self._num_given)
            self._num_given += 1
            self._cursor.move(snapshot)
            return element
        error = self._end
        if error is None or isinstance(error, StopIteration):
            if self._cursor.is_at_start and self._cursor.loaded is None:
                self._dataset._note_no_batches()
            self._cursor.move(self._end_state)
            raise StopIteration
        self._end = RuntimeError(f"This iterator ended with an error before: {error!r}. Take a new one: iter(dataset).")
        raise error

    @property
    def element_spec(self) -> Any:
        """The structure of the elements, as ``DistributedDataset.element_spec`` says it."""
        return self._dataset.element_spec

    def get_next(self) -> Any:
        """Return the next element; not in a replica function.

        Raises:
            OutOfRangeError: the dataset's end was reached.
            ValueError: called in a replica function.
        """
        with contextlib.suppress(StopIteration):
            return next(self)
        raise OutOfRangeError("End of the dataset: all its elements have been read.")

    def get_next_as_optional(self) -> OptionalElement:
        """Return the next element, or an empty optional at the dataset's end."""
        with contextlib.suppress(StopIteration):
            return OptionalElement(next(self))
        return OptionalElement()

    def state_dict(self) -> dict[str, Any]:
        """Return where this iterator is, as ``DistributedDataset.state_dict`` does of the latest one."""
        return self._dataset._full_state(self._cursor)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a state was taken, as ``DistributedDataset.load_state_dict`` lets the next iteration do."""
        self._dataset.load_state_dict(state)
        self._reading, self._cursor = self._dataset._open()
        self._elements.clear()
        self._end = self._end_state = None
        self._num_read = self._num_given = 0

    def _check_state(self, state: dict[str, Any]) -> None:
        self._dataset._check_state(state)

    @property
    def state_is_collective(self) -> bool:
        """Whether every process must call ``state_dict`` at the same point."""
        return self._cursor.source.is_collective

    def _read(self) -> None:
        try:
            batch = self._next_on_cpu()
            # A position that runs ahead of the user must be noted element by element.
            snapshot = self._snapshot() if self._num_ahead else None
            self._elements.append((self._copies.start(batch), snapshot))
            self._num_read += 1
        except StopIteration:
            self._end = StopIteration()
            self._end_state = self._snapshot() if self._num_ahead else None
        except Exception as error:  # noqa: BLE001 - raised in its turn, after the elements that were read before it
            self._end = error
            workers = self._dataset._workers
            where = "" if workers is None else f", on rank {workers.rank}"
            add_note(error, f"Raised while element {self._num_read} of this iteration was read{where}.")
            if workers is not None:
                workers.report_failure("reading the dataset", error)
        except BaseException as interrupt:
            self._end = RuntimeError(f"This iterator was interrupted by {interrupt!r}. Take a new one: iter(dataset).")
            raise

    def _snapshot(self) -> dict[str, Any] | Exception:
        """Return the position, or why there is none: only who asks for it needs to know."""
        try:
            return self._reading.position.state()
        except Exception as error:  # noqa: BLE001 - a user's state_dict
            return error

    def _next_on_cpu(self) -> LocalBatch:
        stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        if not stack or torch.get_default_device().type == "cpu":
            return next(self._reading)
        # A scope on an accelerator makes it the default device, but loaders draw and collate on the CPU.
        with torch.device("cpu"):
            return next(self._reading)
