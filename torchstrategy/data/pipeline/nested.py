"""Operations and nodes that read what is no dataset, or several: one after another, in turn, or side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import override

from torchstrategy.data.pipeline import nodes
from torchstrategy.data.pipeline.elements import add_note, begin, call_noted, function_name, to_raw
from torchstrategy.data.pipeline.op import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, Node, Op, RandomOp, State, Stream
from torchstrategy.data.pipeline.ops import elements_of
from torchstrategy.data.pipeline.randomness import Draws, KeyedDraws
from torchstrategy.data.pipeline.shuffle import GroupByWindow
from torchstrategy.data.readers.reading import read_from

__all__ = [
    "ConcatenateOp",
    "Files",
    "Generate",
    "GroupByWindowOp",
    "InterleaveOp",
    "SelectOp",
    "WindowOp",
    "ZipOp",
]


class Interleave(Node):
    """Elements of the datasets that a function makes of elements, from several in turn.

    Args:
        source: of the outer elements.
        open_inner: makes a node of an outer element, the number of the repetition and the element's number in it.
        cycle_length: datasets that are open at the same time.
        block_length: consecutive elements of one dataset.
    """

    def __init__(
        self, source: Node, open_inner: Callable[[Any, int, int], Node], cycle_length: int, block_length: int
    ) -> None:
        self._source = source
        self._open_inner = open_inner
        self._cycle_length = cycle_length
        self._block_length = block_length
        self._repetition = -1

    @override
    def start(self, state: State | None) -> None:
        self._slots: list[_Slot | None] = [None] * self._cycle_length
        self._turn = self._num_in_block = self._num_opened = 0
        self._is_ended = False
        if state is None:
            self._repetition += 1
            self._source.reset()
            return
        self._repetition = state["repetition"]
        for i, slot in enumerate(state["slots"]):
            if slot is not None:
                self._source.reset(slot["before"])
                self._slots[i] = _Slot(slot["before"], slot["number"], self._open(slot["number"]))
                self._slots[i].node.reset(slot["inner"])  # type: ignore[union-attr]
        self._source.reset(state["source"])
        self._turn, self._num_in_block, self._num_opened = state["turn"], state["num_in_block"], state["num_opened"]
        self._is_ended = state["is_ended"]

    @override
    def next(self) -> Any:
        while not self._is_ended or any(self._slots):
            slot = self._slots[self._turn]
            if slot is not None:
                try:
                    element = next(slot.node)
                except StopIteration:
                    self._slots[self._turn] = None
                    self._pass_turn()
                    continue
                self._num_in_block += 1
                if self._num_in_block == self._block_length:
                    self._pass_turn()
                return element
            if self._is_ended:
                self._pass_turn()
            else:
                self._fill_slot()
        raise StopIteration

    @override
    def get_state(self) -> State:
        return {
            "repetition": self._repetition,
            "slots": [slot and slot.state() for slot in self._slots],
            "source": self._source.state_dict(),
            "turn": self._turn,
            "num_in_block": self._num_in_block,
            "num_opened": self._num_opened,
            "is_ended": self._is_ended,
        }

    def _fill_slot(self) -> None:
        before = self._source.state_dict()
        try:
            node = self._open(self._num_opened)
        except StopIteration:
            self._is_ended = True
            return
        node.reset()
        self._slots[self._turn] = _Slot(before, self._num_opened, node)
        self._num_opened += 1

    def _open(self, number: int) -> Node:
        return self._open_inner(next(self._source), self._repetition, number)

    def _pass_turn(self) -> None:
        self._num_in_block = 0
        self._turn = (self._turn + 1) % self._cycle_length


class _Slot:
    """An open dataset."""

    def __init__(self, before: State, number: int, node: Node) -> None:
        self._before = before
        self._number = number
        self.node = node

    def state(self) -> State:
        return {"before": self._before, "number": self._number, "inner": self.node.state_dict()}


class Generate(Node):
    """What a function's iterator gives; resuming reads it again from the start.

    Args:
        make: returns an iterable.
        convert: makes an element of an item.
        fn: the user's function, for messages.
    """

    def __init__(
        self, make: Callable[[], Iterable[Any]], convert: Callable[[Any], Any], fn: Callable[..., Any]
    ) -> None:
        self._make = make
        self._fn = fn
        self._convert = convert

    @override
    def start(self, state: State | None) -> None:
        self._num_read = 0
        self._items: Iterator[Any] | None = None
        if state is not None and state["num_read"]:
            wanted = state["num_read"]
            found = self.skip(wanted)
            if found < wanted:
                raise RuntimeError(
                    f"The data has changed since the state was taken: {wanted} elements had been read, now there are "
                    f"only {found}."
                )

    @override
    def read(self, count: int) -> list[Any]:
        return self._read(count, self._convert)

    @override
    def skip(self, count: int) -> int:
        return len(self._read(count, lambda _: None))

    @override
    def get_state(self) -> State:
        return {"num_read": self._num_read}

    def _read(self, count: int, convert: Callable[[Any], Any]) -> list[Any]:
        items: list[Any] = []
        try:
            if self._items is None:
                self._items = begin("from_generator", self._fn, lambda: iter(self._make()))
            items.extend(map(convert, islice(self._items, count)))  # up to the one that fails
        except Exception as error:
            self._items = iter(())
            add_note(error, "from_generator", self._fn, f"element {self._num_read + len(items)}")
            raise
        self._num_read += len(items)
        return items


class Files(Node):
    """The examples of files, one file after another; resuming begins in the current file.

    Args:
        files: their names.
        reader: returns an iterable of a file's examples.
    """

    def __init__(self, files: Sequence[Any], reader: Callable[..., Iterable[Any]]) -> None:
        self._files = files
        self._reader = reader

    @override
    def start(self, state: State | None) -> None:
        self._begin_file(*((0, 0) if state is None else (state["file"], state["num_read"])))

    def _begin_file(self, file: int, num_read: int = 0) -> None:
        self._file, self._num_read = file, num_read
        self._examples: Iterator[Any] | None = None

    @override
    def read(self, count: int) -> list[Any]:
        items: list[Any] = []
        while len(items) < count and self._file < len(self._files):
            items += self._read_of_file(count - len(items))
            if len(items) < count:
                self._begin_file(self._file + 1)
        return items

    @override
    def get_state(self) -> State:
        return {"file": self._file, "num_read": self._num_read}

    def _read_of_file(self, count: int) -> list[Any]:
        file = self._files[self._file]
        items: list[Any] = []
        try:
            if self._examples is None:
                self._examples = begin(
                    "from_files", self._reader, partial(read_from, self._reader, file, self._num_read)
                )
            items.extend(map(to_raw, islice(self._examples, count)))  # up to the one that fails
        except Exception as error:
            add_note(error, "from_files", self._reader, f"example {self._num_read + len(items)} of {file}")
            self._begin_file(self._file + 1)
            raise
        self._num_read += len(items)
        return items


@dataclass(frozen=True, eq=False)
class ZipOp(Op):
    """``zip``; ``structure`` says how the inputs' elements are nested, by number."""

    structure: Any

    splits_by_file: ClassVar[bool] = False

    @override
    def build(self, streams: list[Stream]) -> Stream:
        return Stream(nodes.Zip([elements_of(stream) for stream in streams], self.structure))

    @override
    def cardinality(self) -> int:
        numbers = [op.cardinality() for op in self.inputs]
        if UNKNOWN_CARDINALITY in numbers:
            return UNKNOWN_CARDINALITY
        return min((number for number in numbers if number >= 0), default=INFINITE_CARDINALITY)

    @override
    def label(self) -> str:
        return f"zip({', '.join(map(Op.describe, self.inputs))})"


@dataclass(frozen=True, eq=False)
class SelectOp(Op):
    """``choose_from_datasets``; the last input chooses."""

    stops_early: bool

    splits_by_file: ClassVar[bool] = False

    @override
    def build(self, streams: list[Stream]) -> Stream:
        *sources, choices = map(elements_of, streams)
        return Stream(nodes.Select(choices, sources, stops_early=self.stops_early))

    @override
    def cardinality(self) -> int:
        *numbers, choices = (op.cardinality() for op in self.inputs)
        is_endless = choices == INFINITE_CARDINALITY in numbers and not self.stops_early
        return INFINITE_CARDINALITY if is_endless else UNKNOWN_CARDINALITY

    @property
    @override
    def batch_size(self) -> int | None:
        sizes = {op.batch_size for op in self.inputs[:-1]}
        return sizes.pop() if len(sizes) == 1 else None

    @override
    def label(self) -> str:
        return f"choose_from_datasets({', '.join(map(Op.describe, self.inputs))})"


@dataclass(frozen=True, eq=False)
class WindowOp(Op):
    """``window``."""

    size: int
    shift: int
    stride: int
    drop_remainder: bool
    make_dataset: Callable[[Any], Any]

    form: ClassVar[str] = "window({0.size}, {0.shift}, {0.stride}, {0.drop_remainder})"
    splits_by_file: ClassVar[bool] = False
    keeps_batches: ClassVar[bool] = False

    @override
    def build(self, streams: list[Stream]) -> Stream:
        source, drop = elements_of(streams[0]), self.drop_remainder
        return Stream(nodes.Window(source, self.size, self.shift, self.stride, self.make_dataset, drop_remainder=drop))

    @override
    def cardinality(self) -> int:
        number = self.inputs[0].cardinality()
        left_out = (self.size - 1) * self.stride if self.drop_remainder else 0
        return number if number < 0 else -(-max(0, number - left_out) // self.shift)


@dataclass(frozen=True, eq=False)
class ConcatenateOp(Op):
    """``concatenate``."""

    splits_by_file: ClassVar[bool] = False

    @override
    def build(self, streams: list[Stream]) -> Stream:
        return Stream(nodes.Concatenate(*map(elements_of, streams)))

    @override
    def cardinality(self) -> int:
        numbers = [op.cardinality() for op in self.inputs]
        if INFINITE_CARDINALITY in numbers:
            return INFINITE_CARDINALITY
        return UNKNOWN_CARDINALITY if UNKNOWN_CARDINALITY in numbers else sum(numbers)

    @override
    def label(self) -> str:
        return f"concatenate({', '.join(map(Op.describe, self.inputs))})"


@dataclass(frozen=True, eq=False)
class InterleaveOp(RandomOp):
    """``interleave``, and ``flat_map`` with one dataset at a time."""

    keeps_count: ClassVar[bool] = False
    form: ClassVar[str] = "interleave({0.cycle_length}, {0.block_length})"
    keeps_batches: ClassVar[bool] = False

    fn: Callable[..., Any]
    cycle_length: int
    block_length: int

    @override
    def build_random(self, stream: Stream, key: list[int]) -> Stream:
        opener = _OpenInner(self.fn, key)
        return Stream(Interleave(elements_of(stream), opener, self.cycle_length, self.block_length))

    @override
    def draw_key(self, draws: Draws) -> list[int]:
        return [draws.silent_seed(), *draws.iteration(self.memory)]


@dataclass(frozen=True, eq=False)
class GroupByWindowOp(InterleaveOp):
    """``group_by_window``; ``fn`` reduces the windows."""

    form: ClassVar[str] = "group_by_window()"
    splits_by_file: ClassVar[bool] = False

    key_func: Callable[..., Any]
    window_size: Callable[[Tensor], Any]
    make_dataset: Callable[[Any], Any]

    @override
    def build_random(self, stream: Stream, key: list[int]) -> Stream:
        open_window = _OpenInner(self.fn, key, "group_by_window")
        source, make = elements_of(stream), self.make_dataset
        return Stream(GroupByWindow(source, self.key_func, self.window_size, make, open_window))


class _OpenInner:
    """Makes the nodes of the dataset that a user's function returns for an element."""

    def __init__(self, fn: Callable[..., Any], key: list[int], operation: str = "flat_map or interleave") -> None:
        self._fn = fn
        self._key = key
        self._operation = operation

    def __call__(self, element: Any, repetition: int, number: int) -> Node:
        dataset = call_noted(self._operation, self._fn, element, f"element {number}")
        op = getattr(dataset, "_op", None)
        if not isinstance(op, Op):
            raise TypeError(
                f"The function {function_name(self._fn)} of {self._operation} must return a ts.data.Dataset. "
                f"Received: {type(dataset).__name__}"
            )
        return elements_of(op.make(iter(op.resolve(KeyedDraws(self._key, [repetition, number])))))
