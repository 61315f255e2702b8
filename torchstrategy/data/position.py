"""Where an iteration over data stands, and how another one goes on from there.

A state is plain data. It is a count of elements and the random states that their order was drawn with, so that it does
not depend on the number of replicas or processes; data that can say and resume its own position adds its own state.
"""

from __future__ import annotations

import copy
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from torchstrategy.base.log import logger, warn_once
from torchstrategy.data.data_order import SharedStream, Workers, find_generators, is_pipeline, raw_bytes
from torchstrategy.data.numpy import ArrayBatches
from torchstrategy.data.pipeline.op import OTHER_POSITION
from torchstrategy.errors import InvalidArgumentError

__all__ = [
    "END",
    "TAKEN_OVER",
    "Position",
    "StreamPosition",
    "StreamReader",
    "check_state",
    "is_resumable",
    "random_state",
    "restore_generators",
]

#: Stands for the end of the data where any object may be an element.
END = object()

TAKEN_OVER = (
    "A newer iteration over this dataset has taken over its persistent workers. Finish one iteration before the next, "
    "or give the DataLoader persistent_workers=False."
)

_MANY = 1000
#: Whose iteration is the latest one over data that tells the position of its latest iteration only.
_latest: weakref.WeakKeyDictionary[Any, weakref.ref[StreamPosition]] = weakref.WeakKeyDictionary()


class Position:
    """Where an iteration over a source of batches stands.

    It does not keep the iteration, with its worker processes, alive.

    Args:
        step: global batches given.
        ask: returns the part of the state that others know. It must not hold the iteration.
        more: what else the state holds; it may be changed.
    """

    def __init__(self, step: int = 0, ask: Callable[[], dict[str, Any]] = dict, **more: Any) -> None:
        self.step = step
        self.is_finished = False
        self.more = more
        self._ask = ask

    def state(self) -> dict[str, Any]:
        """Return the position after the last element, as plain data."""
        return {"step": self.step, "is_finished": self.is_finished, **self.more, **self._ask()}


class StreamReader:
    """Reads any iterable of elements, and knows where it is.

    Nothing is opened before the first ``next``, so that whatever draws random numbers then draws the shared ones.

    Args:
        data: gives its elements each time it is iterated.
        workers: the processes that read the same elements, ``None`` if this one reads for itself.
        state: where to go on, from another reader's ``position``; ``None`` means at the start.
        starts_anew: begin the iteration that follows a finished one, whose state this is.
    """

    def __init__(
        self,
        data: Iterable[Any],
        workers: Workers | None = None,
        state: dict[str, Any] | None = None,
        *,
        starts_anew: bool = False,
    ) -> None:
        self.data = _own(data)
        self._items: Iterator[Any] | None = None
        self._starts_anew = starts_anew
        random = None if state is None or starts_anew else state["random"]
        start = None if random is None else random["start"]
        is_read_again = state is not None and state["data"] is None
        current = None if random is None or is_read_again else random["current"]
        stream = SharedStream(workers, find_generators(self.data), start, current)
        self._position = StreamPosition(self.data, stream, state)

    @property
    def position(self) -> StreamPosition:
        """Where this reader is."""
        return self._position

    @property
    def num_read(self) -> int:
        """Elements read so far, counted from the start of the data."""
        return self._position.num_read

    def next(self) -> Any:
        """Return the next element, or ``END``."""
        position = self._position
        if position.resume is not None:
            self._go_on(position.resume)
            position.resume = None
        if position.is_finished:
            return END
        position.check_not_taken_over(is_open=self._items is not None)
        item = position.stream.draw(self._advance)
        if item is END:
            position.is_finished = True
            self._items = None
        else:
            position.count(item)
        return item

    def give_back(self) -> None:
        """Don't count the latest element: it could not be used."""
        self._position.num_read -= 1

    def _advance(self) -> Any:
        if self._items is None:
            self._items = iter(self.data)
            self._position.open()
        return next(self._items, END)

    def _go_on(self, state: dict[str, Any]) -> None:
        """Bring the data to where the state was taken."""
        position = self._position
        is_of_start = self._starts_anew and state["num_read"] == 0
        if not is_of_start and (state["data"] is not None) != is_resumable(self.data):
            has, had = ("a", "no") if state["data"] is None else ("no", "a")
            raise InvalidArgumentError(
                f"The state to resume from is of data with {had} state_dict of its own, but a "
                f"{type(self.data).__name__} has {has} state_dict. Load it into the same dataset as it was taken from."
            )
        if state["data"] is not None:
            self.data.load_state_dict(state["data"])
        if state["data"] is not None or self._starts_anew:
            restore_generators(self.data, state)
        if self._starts_anew:
            return
        if state["data"] is not None or state["is_finished"]:
            position.num_read, position.is_finished = state["num_read"], state["is_finished"]
        else:
            self._read_again(state)

    def _read_again(self, state: dict[str, Any]) -> None:
        position, num_read = self._position, state["num_read"]
        if num_read >= _MANY:
            logger.info("Resuming: reading %d elements again, because the data can't tell its position.", num_read)
        for i in range(num_read):
            item = position.stream.draw(self._advance)
            if item is END:
                raise InvalidArgumentError(
                    f"The state to resume from is {num_read} elements into its data, but this data has only {i}. Load "
                    "it into the same dataset as it was taken from."
                )
            position.count(item)
        if position.sample != state["sample"]:
            warn_once(
                f"Element {num_read}, up to which the data was read again, has other values than when the state was "
                "taken. If the data comes in another order now, examples are lost and repeated: load the state into "
                "the same dataset, and shuffle by torch's default generator, by a torch.Generator that is the "
                "dataset's attribute, or in a ts.data.Dataset. If only random augmentation differs, all is well."
            )


class StreamPosition:
    """Where one reader of any iterable is. It does not keep the reader alive.

    Args:
        data: what is read.
        stream: the random numbers that its order is drawn with.
        resume: where to go on at the first ``next``.
    """

    def __init__(self, data: Any, stream: SharedStream, resume: dict[str, Any] | None) -> None:
        self._data = data
        self._is_resumable = is_resumable(data)
        self._was_opened = False
        # torch has one iterator for all iterations of such a loader
        self._is_persistent = isinstance(data, DataLoader) and data.persistent_workers
        self.stream = stream
        self.resume = resume
        self.num_read = 0
        self.is_finished = False
        self.sample: int | None = None  # of the latest element

    def open(self) -> None:
        """Note that an iteration over the data has begun."""
        self._was_opened = True
        if (self._is_resumable or self._is_persistent) and _can_be_watched(self._data):
            _latest[self._data] = weakref.ref(self)

    def check_not_taken_over(self, *, is_open: bool) -> None:
        """Check that no newer iteration uses the loader's persistent workers.

        Raises:
            RuntimeError: one does.
        """
        if is_open and self._is_persistent and _latest[self._data]() is not self:
            raise RuntimeError(TAKEN_OVER)

    def count(self, item: Any) -> None:
        """Count an element."""
        self.num_read += 1
        if not self._is_resumable:
            self.sample = _sample(item)

    def state(self) -> dict[str, Any]:
        """Return the position after the last element, as plain data."""
        if self.resume is not None:
            return self.resume
        # At the start others may have no position yet, or make one by starting their workers.
        has_state = self._is_resumable and (self._was_opened or is_pipeline(self._data))
        return {
            "num_read": self.num_read,
            "is_finished": self.is_finished,
            "sample": self.sample,
            "random": random_state(self.stream, self._data),
            "data": self._state_of_data() if has_state else None,
        }

    def _state_of_data(self) -> Any:
        latest = _latest.get(self._data) if _can_be_watched(self._data) else None
        if latest is not None and latest() is not self:
            raise RuntimeError(
                f"The position of this iteration is not known any more: a newer one over the same "
                f"{type(self._data).__name__} has begun, and its state_dict() tells of the latest one only. Ask for "
                "the state before, or distribute an object of its own for each loop."
            )
        return self._data.state_dict()


def is_resumable(data: Any) -> bool:
    """Say whether data tells the position of its latest iterator and can go on from there."""
    return callable(getattr(data, "state_dict", None)) and callable(getattr(data, "load_state_dict", None))


def random_state(stream: SharedStream, data: Any) -> dict[str, Any]:
    """Return the random states that an iteration started with, if it has, and those of now."""
    now = [generator.get_state() for generator in find_generators(data)]
    return {"start": stream.start, "current": stream.current, "now": now}


def restore_generators(data: Any, state: dict[str, Any]) -> None:
    """Put the data's own generators where they were when a state was taken."""
    if state["random"] is not None:
        for generator, now in zip(find_generators(data), state["random"]["now"], strict=False):
            generator.set_state(now)


def check_state(state: Any, kinds: list[str]) -> None:
    """Check that a loaded state is of a dataset that is read in the same way.

    Raises:
        TypeError: it is no state of a distributed dataset.
        InvalidArgumentError: it is another kind's.
    """
    if not isinstance(state, dict) or not {"kind", "step", "position"} <= set(state):
        raise TypeError(
            f"Expected what state_dict() of a distributed dataset returned. Received: {type(state).__name__}"
            + (f" with the keys {sorted(map(str, state))[:8]}" if isinstance(state, dict) else "")
            + (f". {OTHER_POSITION}" if isinstance(state, dict) and {"pipeline", "position"} <= set(state) else "")
        )
    if state["kind"] not in kinds:
        raise InvalidArgumentError(
            f"The state is of a dataset that was read as {state['kind']}, but this one is read as "
            f"{' or '.join(kinds)}. Load it into the same dataset, distributed with the same auto_shard_policy."
        )


def _own(data: Any) -> Any:
    """Return data with a position of its own, where a copy has one; so that iterations don't disturb each other."""
    if is_pipeline(data) or isinstance(data, ArrayBatches):
        return copy.copy(data)
    if isinstance(data, DataLoader) and is_resumable(data) and not data.persistent_workers:
        data = copy.copy(data)
        data.__dict__["_iterator"] = None
    return data


def _can_be_watched(data: Any) -> bool:
    return hasattr(data, "__weakref__") and type(data).__hash__ is not None


def _sample(item: Any) -> int | None:
    """Return a checksum of the first numbers of an element's first tensor; ``None`` if it has none to look at."""
    while isinstance(item, (tuple, list, dict)) and item:
        item = next(iter(item.values() if isinstance(item, dict) else item))
    if isinstance(item, Tensor):
        if item.layout is not torch.strided or item.is_nested or item.device.type != "cpu" or not item.numel():
            return None
        item = item if item.dim() else item[None]
    elif isinstance(item, np.ndarray) and item.size:
        item = np.atleast_1d(item)
    else:
        return None
    while item.ndim > 1:  # flattening it all could copy it
        item = item[0]
    data = raw_bytes(item, slice(None, 16))
    return zlib.crc32(data) if data else None
