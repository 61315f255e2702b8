"""Shuffling and grouping with a buffer.

The order in which items leave the buffer is a function of a key and of the number of items. So positions are shuffled
as integers, and elements by their numbers: a state holds integers, never elements, and elements that were in the buffer
are read again on resuming.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from torchstrategy.data.pipeline.dataset_options import check_int
from torchstrategy.data.pipeline.elements import call_noted
from torchstrategy.data.pipeline.op import Node, State
from torchstrategy.data.pipeline.randomness import random_stream

__all__ = ["GroupByWindow", "RandomNumbers", "Shuffle", "ShuffleElements"]

_MIN_ANCHOR_INTERVAL = 1024
_MIN_MARK_INTERVAL = 64
_MAX_MARKS = 16


class RandomNumbers(Node):
    """Random integers of 32 bits, without an end.

    Args:
        key: decides them.
        rerandomizes: each repetition has others.
    """

    def __init__(self, key: Sequence[int], *, rerandomizes: bool) -> None:
        self._key = key
        self._rerandomizes = rerandomizes
        self._repetition = -1

    @override
    def start(self, state: State | None) -> None:
        self._repetition = self._repetition + 1 if state is None else state["repetition"]
        self._num_drawn = 0 if state is None else state["num_drawn"]
        repetition = self._repetition if self._rerandomizes else 0
        self._bits = random_stream(self._key, repetition, self._num_drawn).bit_generator

    @override
    def read(self, count: int) -> list[Any]:
        self._num_drawn += count
        numbers: list[Any] = [number >> 32 for number in self._bits.random_raw(count).tolist()]
        return numbers

    @override
    def get_state(self) -> State:
        return {"repetition": self._repetition, "num_drawn": self._num_drawn}


class Shuffle(Node):
    """Shuffles integers.

    A state names the latest *anchor*, a copy of the buffer made once in a buffer's length, and how many items left it
    since. So taking a state costs nothing, and resuming repeats less than a buffer's length.

    Args:
        source: of the integers.
        buffer_size: how many wait to be chosen from.
        key: decides the order.
        reshuffles: each repetition has an order of its own.
    """

    def __init__(self, source: Node, buffer_size: int, key: Sequence[int], *, reshuffles: bool) -> None:
        self._source = source
        self._buffer_size = buffer_size
        self._key = list(key)
        self._reshuffles = reshuffles
        self._repetition = -1

    @override
    def start(self, state: State | None) -> None:
        self._is_filled = False
        if state is None:
            self._repetition += 1
            self._source.reset()
            self._beginning = self._source.state_dict()
            self._anchor: State | None = None
            self._num_drawn = 0
            return
        self._repetition = state["repetition"]
        self._beginning = state["beginning"]
        self._anchor = state["anchor"]
        self._num_drawn = 0
        if self._anchor is None:
            self._source.reset(self._beginning)
        else:
            self._source.reset(self._anchor["source"])
            self._buffer = self._anchor["buffer"].tolist()
            self._carry: list[Any] = []
            self._order: np.ndarray[Any, Any] | None = None
            self._num_drawn = self._anchor["num_drawn"]
            self._rng = self._make_rng(self._num_drawn)
            self._is_filled = True
        self.skip(state["num_drawn"] - self._num_drawn)

    @override
    def read(self, count: int) -> list[Any]:
        if count < 1:
            return []
        if not self._is_filled:
            self._fill()
        if self._order is not None:
            items: list[Any] = self._order[self._num_drawn : self._num_drawn + count].tolist()
        else:
            self._drop_anchor()
            items = self._draw(count)
        self._num_drawn += len(items)
        return items

    @override
    def get_state(self) -> State:
        return {
            "repetition": self._repetition,
            "beginning": self._beginning,
            "anchor": self._anchor,
            "num_drawn": self._num_drawn,
        }

    def waiting(self) -> list[Any]:
        """Return the integers that were read and not given yet."""
        if not self._is_filled:
            return []
        return self._buffer + self._carry if self._order is None else list(self._order[self._num_drawn :].tolist())

    def _make_rng(self, num_drawn: int) -> np.random.Generator:
        return random_stream(self._key, self._repetition if self._reshuffles else 0, num_drawn)

    def _fill(self) -> None:
        # One more than fits tells whether all items fit, which makes the order a plain permutation.
        items = self._source.read_integers(self._buffer_size + 1)
        self._rng = self._make_rng(0)
        if len(items) <= self._buffer_size:
            self._order = self._rng.permutation(items)
        else:
            self._order = None
            self._buffer, self._carry = items[:-1].tolist(), items[-1:].tolist()
        self._is_filled = True

    def _drop_anchor(self) -> None:
        since = self._num_drawn - (0 if self._anchor is None else self._anchor["num_drawn"])
        if since >= max(self._buffer_size, _MIN_ANCHOR_INTERVAL):
            self._anchor = {
                "buffer": torch.tensor(self._buffer, dtype=torch.int64, device="cpu"),
                "source": self._source.state_dict(),
                "num_drawn": self._num_drawn,
            }

    def _draw(self, count: int) -> list[Any]:
        buffer = self._buffer
        arrivals = self._carry + self._source.read(count - len(self._carry))
        self._carry = []
        choices = self._rng.random(min(count, len(arrivals) + len(buffer)))
        items = []
        for chosen, arrival in zip((choices * len(buffer)).astype(np.int64).tolist(), arrivals, strict=False):
            items.append(buffer[chosen])
            buffer[chosen] = arrival
        for choice in choices[len(arrivals) :].tolist():
            chosen = int(choice * len(buffer))
            buffer[chosen], buffer[-1] = buffer[-1], buffer[chosen]
            items.append(buffer.pop())
        return items


class ShuffleElements(Node):
    """Shuffles elements: their numbers go through ``Shuffle``.

    Args:
        source: of the elements.
        buffer_size: how many wait to be chosen from.
        key: decides the order.
        reshuffles: each repetition has an order of its own.
    """

    def __init__(self, source: Node, buffer_size: int, key: Sequence[int], *, reshuffles: bool) -> None:
        self._numbers = _Numbers(source, max(buffer_size, _MIN_MARK_INTERVAL))
        self._shuffle = Shuffle(self._numbers, buffer_size, key, reshuffles=reshuffles)

    @override
    def start(self, state: State | None) -> None:
        if state is None:
            self._shuffle.reset()
            return
        self._numbers.replay(state["num_read"], is_ended=state["is_ended"])
        self._shuffle.reset(state["shuffle"])
        self._numbers.refill(self._shuffle.waiting(), state["marks"])

    @override
    def read(self, count: int) -> list[Any]:
        return list(map(self._numbers.elements.pop, self._shuffle.read(count)))

    @override
    def get_state(self) -> State:
        return {"shuffle": self._shuffle.state_dict(), **self._numbers.progress()}


class GroupByWindow(Node):
    """Elements of the datasets that a function makes of windows, which are consecutive elements of one key.

    Args:
        source: of the elements.
        key_func: the user's, makes a key of an element.
        window_size: returns the elements of a window of a key.
        make_dataset: makes a dataset of a list of elements.
        open_window: makes a node of a key with a dataset, the number of the repetition and the window's number in it.
    """

    def __init__(
        self,
        source: Node,
        key_func: Callable[..., Any],
        window_size: Callable[[torch.Tensor], Any],
        make_dataset: Callable[[Any], Any],
        open_window: Callable[[Any, int, int], Node],
    ) -> None:
        self._numbers = _Numbers(source, _MIN_MARK_INTERVAL)
        self._key_func = key_func
        self._window_size = window_size
        self._make_dataset = make_dataset
        self._open_window = open_window
        self._repetition = -1

    @override
    def start(self, state: State | None) -> None:
        self._inner: Node | None = None
        self._groups: dict[int, list[int]] = {}  # the numbers of the elements that wait, by key
        self._window: list[int] = []
        self._key = self._num_opened = 0
        if state is None:
            self._repetition += 1
            self._numbers.reset()
            return
        self._repetition, self._key, self._num_opened = state["repetition"], state["key"], state["num_opened"]
        self._groups = {key: list(numbers) for key, numbers in state["groups"]}
        self._window = list(state["window"])
        self._numbers.replay(state["num_read"], is_ended=state["is_ended"])
        self._numbers.reset()
        waiting = [number for group in (self._window, *self._groups.values()) for number in group]
        self._numbers.refill(waiting, state["marks"])
        if self._window:
            self._begin_window(state["inner"])

    @override
    def next(self) -> Any:
        while self._inner is not None or self._fill_window():
            found = [] if self._inner is None else self._inner.read(1)
            if found:
                return found[0]
            for number in self._window:
                del self._numbers.elements[number]
            self._inner, self._window = None, []
            self._num_opened += 1
        raise StopIteration

    @override
    def get_state(self) -> State:
        return {
            "repetition": self._repetition,
            "key": self._key,
            "num_opened": self._num_opened,
            "groups": [[key, list(numbers)] for key, numbers in self._groups.items()],
            "window": list(self._window),
            "inner": None if self._inner is None else self._inner.state_dict(),
            **self._numbers.progress(),
        }

    def _fill_window(self) -> bool:
        """Read on until a window is full, or take one that is not when there is no more; say whether there was one."""
        while found := self._numbers.read(1):
            key = self._key_of(found[0])
            group = self._groups.setdefault(key, [])
            group.append(found[0])
            if len(group) >= check_int("window_size", self._window_size(torch.tensor(key, device="cpu")), 1):
                break
        else:
            if not self._groups:
                return False
            key = min(self._groups)
        self._key, self._window = key, self._groups.pop(key)
        self._begin_window(None)
        return True

    def _key_of(self, number: int) -> int:
        try:
            element = self._numbers.elements[number]
            answer = call_noted("group_by_window", self._key_func, element, f"element {number}")
            return check_int("what key_func returns", answer)
        except Exception:
            del self._numbers.elements[number]  # the error may be ignored
            raise

    def _begin_window(self, state: State | None) -> None:
        dataset = self._make_dataset([self._numbers.elements[number] for number in self._window])
        argument = (torch.tensor(self._key, device="cpu"), dataset)
        self._inner = self._open_window(argument, self._repetition, self._num_opened)
        self._inner.reset(state)


class _Numbers(Node):
    """Numbers the elements of a source, and keeps them until they are taken.

    Args:
        source: of the elements.
        interval: elements between two marks, which are states of the source.
    """

    def __init__(self, source: Node, interval: int) -> None:
        self._source = source
        self._interval = interval
        self._replayed: tuple[int, bool] | None = None
        self.elements: dict[int, Any] = {}

    @override
    def start(self, state: State | None) -> None:
        self._num_read = self._num_given = 0 if state is None else state["num_read"]  # an error may lie between them
        self._is_ended = False
        self.elements = {}
        self._marks: list[tuple[int, State]] = []
        if self._replayed is None:
            self._source.reset()
            self._marks.append((0, self._source.state_dict()))

    @override
    def read(self, count: int) -> list[Any]:
        first = self._num_given
        if self._replayed is not None:
            self._num_given = min(self._replayed[0], first + count)
            return list(range(first, self._num_given))
        while self._num_read < first + count and not self._is_ended:
            if self._num_read >= self._marks[-1][0] + self._interval:
                self._forget_marks()
                self._marks.append((self._num_read, self._source.state_dict()))
                if len(self._marks) > _MAX_MARKS:  # one element may stay for ever; fewer marks mean reading more again
                    del self._marks[1::2]
            wanted = min(first + count, self._marks[-1][0] + self._interval) - self._num_read
            wanted = min(wanted, self.chunk)
            found = self._source.read(wanted)
            self.elements.update(enumerate(found, self._num_read))
            self._num_read += len(found)
            self._is_ended = len(found) < wanted
        self._num_given = min(first + count, self._num_read)
        return list(range(first, self._num_given))

    @override
    def get_state(self) -> State:
        return {"num_read": self._num_given}

    def progress(self) -> State:
        """Return what ``replay`` and ``refill`` need."""
        return {"num_read": self._num_given, "is_ended": self._is_ended, "marks": list(self._marks)}

    def replay(self, num_read: int, *, is_ended: bool) -> None:
        """Give numbers only, without elements, until ``refill``."""
        self._replayed = (num_read, is_ended)

    def refill(self, waiting: list[int], marks: list[Any]) -> None:
        """Read the waiting elements again, and go on where the state was taken."""
        num_read, is_ended = self._replayed or (0, False)
        self._replayed = None
        self._num_read = self._num_given = num_read
        self._is_ended = is_ended
        self._marks = [(number, state) for number, state in marks]
        oldest = min(waiting, default=num_read)
        number, state = max((mark for mark in self._marks if mark[0] <= oldest), key=lambda mark: mark[0])
        self._source.reset(state)
        needed = set(waiting)
        while number < num_read:
            try:
                found = self._source.read(min(self._interval, num_read - number, self.chunk))
            except Exception:
                if self.chunk > 1:
                    raise
                continue  # errors are ignored, and this one was
            if not found:
                raise RuntimeError(
                    f"The data has changed since the state was taken: {num_read} elements had been read before a "
                    f"shuffle, now there are {number}."
                )
            self.elements.update((n, element) for n, element in enumerate(found, number) if n in needed)
            number += len(found)

    def _forget_marks(self) -> None:
        """Leave out the marks before the last one that is needed."""
        oldest = next(iter(self.elements), self._num_read)  # they were put in by number
        while len(self._marks) > 1 and self._marks[1][0] <= oldest:
            self._marks.pop(0)
