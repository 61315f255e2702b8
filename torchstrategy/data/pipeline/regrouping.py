"""The methods of ``ts.data.Dataset`` in which an element depends on others, or on which ones came before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from typing_extensions import Self, override

from torchstrategy.data.pipeline import dataset_sources, ops
from torchstrategy.data.pipeline.batches import Buckets, collate
from torchstrategy.data.pipeline.dataset_base import Pipeline
from torchstrategy.data.pipeline.dataset_options import check_callable, check_int, check_weights
from torchstrategy.data.pipeline.elements import to_element
from torchstrategy.data.pipeline.nested import GroupByWindowOp, WindowOp, ZipOp
from torchstrategy.data.pipeline.op import Node, Op, SourcedNode, Stream
from torchstrategy.data.pipeline.ops import elements_of
from torchstrategy.data.pipeline.parallel import IgnoreErrors
from torchstrategy.data.pipeline.randomness import Rejection
from torchstrategy.errors import InvalidArgumentError

__all__ = ["Regrouping"]


@dataclass(frozen=True)
class _Always:
    """A function that returns one number."""

    number: int

    def __call__(self, _: Any) -> int:
        return self.number


@dataclass(frozen=True, eq=False)
class _IgnoreErrorsOp(Op):
    """``ignore_errors``."""

    keeps_count: ClassVar[bool] = False
    form: ClassVar[str] = "ignore_errors()"

    warns: bool

    @override
    def build(self, streams: list[Stream]) -> Stream:
        return Stream(IgnoreErrors(elements_of(streams[0]), warns=self.warns))


def _first(first: Any, second: Any) -> Any:  # noqa: ARG001 - of a pair
    return first


def _second(first: Any, second: Any) -> Any:  # noqa: ARG001 - of a pair
    return second


class _Batches(SourcedNode):
    """Batches of elements, of several sizes in turn.

    Args:
        source: of the elements.
        sizes: of the batches.
        drop_remainder: leave out a last batch of fewer elements.
    """

    saved = ("num_read", "turn")

    def __init__(self, source: Node, sizes: Sequence[int], *, drop_remainder: bool) -> None:
        super().__init__(source)
        self._sizes = sizes
        self._drop_remainder = drop_remainder

    @override
    def begin(self) -> None:
        self.num_read = self.turn = 0

    @override
    def next(self) -> Any:
        size = self._sizes[self.turn]
        elements = self._source.read(size)
        if not elements or (self._drop_remainder and len(elements) < size):
            raise StopIteration
        self.turn = (self.turn + 1) % len(self._sizes)
        self.num_read += len(elements)
        return collate(elements, self.num_read - len(elements))


@dataclass(frozen=True, eq=False)
class _BatchesOp(Op):
    """``rebatch`` to several sizes."""

    keeps_count: ClassVar[bool] = False
    keeps_batches: ClassVar[bool] = False
    splits_by_file: ClassVar[bool] = False

    sizes: tuple[int, ...]
    drop_remainder: bool

    @override
    def build(self, streams: list[Stream]) -> Stream:
        return Stream(_Batches(elements_of(streams[0]), self.sizes, drop_remainder=self.drop_remainder))

    @override
    def label(self) -> str:
        return f"batch({list(self.sizes)}{', drop_remainder=True' if self.drop_remainder else ''})"


class Regrouping(Pipeline):
    """A dataset with more fluent methods; each returns a new dataset."""

    def take_while(self, predicate: Callable[..., Any]) -> Self:
        """Keep the elements before the first one for which a function is false.

        Args:
            predicate: takes an element, a plain tuple unpacked into arguments, and returns one truth value.

        Raises:
            TypeError: ``predicate`` is no function; while iterating: it returned something else, such as ``None``.

        Example:
            >>> list(ts.data.Dataset.range(10).take_while(lambda x: x < 2))
            [tensor(0), tensor(1)]
        """
        return self._with(ops.TakeWhileOp((self._op,), check_callable("predicate", predicate)))

    def scan(self, initial_state: Any, scan_func: Callable[[Any, Any], Any]) -> Self:
        """Apply a function that passes a state on from element to element.

        The state is part of ``state_dict()``; keep it small.

        Args:
            initial_state: the state before the first element; numbers, arrays and lists in it become tensors.
            scan_func: takes the state and an element, and returns the new state and what becomes an element.

        Raises:
            TypeError: ``scan_func`` is no function; while iterating: it returned no pair, or a state of another
                structure or dtype.

        Example:
            >>> list(ts.data.Dataset.range(4).scan(0, lambda total, x: (total + x, total + x)))
            [tensor(0), tensor(1), tensor(3), tensor(6)]
        """
        return self._with(ops.ScanOp((self._op,), to_element(initial_state), check_callable("scan_func", scan_func)))

    def unique(self) -> Self:
        """Keep the first of equal elements.

        All different elements are kept in memory. Resuming reads what comes before again, from its beginning.

        Raises:
            TypeError: while iterating: an element is neither one tensor of integers nor a string.

        Example:
            >>> list(ts.data.Dataset.from_tensor_slices([1, 37, 2, 37, 2, 1]).unique())
            [tensor(1), tensor(37), tensor(2)]
        """
        return self._with(ops.UniqueOp((self._op,)))

    def window(
        self,
        size: int,
        shift: int | None = None,
        stride: int = 1,
        drop_remainder: bool = False,  # noqa: FBT001, FBT002 - tf's signature
    ) -> Self:
        """Make datasets of consecutive elements: each is an element of the result.

        A tuple or dict of components becomes a tuple or dict of datasets, one for each component, as in tf. Resuming
        reads the elements of the next window again.

        Args:
            size: elements of a window; the last ones may have fewer.
            shift: from the first element of a window to that of the next; ``None`` means ``size``.
            stride: from one element of a window to the next.
            drop_remainder: leave out windows of fewer elements.

        Raises:
            TypeError: an argument is no integer.
            InvalidArgumentError: it is not positive.

        Example:
            >>> windows = ts.data.Dataset.range(5).window(3, shift=1, drop_remainder=True)
            >>> list(windows.flat_map(lambda window: window.batch(3)))
            [tensor([0, 1, 2]), tensor([1, 2, 3]), tensor([2, 3, 4])]
        """
        size = check_int("size", size, 1)
        shift = size if shift is None else check_int("shift", shift, 1)
        stride = check_int("stride", stride, 1)
        return self._with(WindowOp((self._op,), size, shift, stride, bool(drop_remainder), self._of_elements))

    def group_by_window(
        self,
        key_func: Callable[..., Any],
        reduce_func: Callable[[Any, Any], Any],
        window_size: int | None = None,
        window_size_func: Callable[[Any], Any] | None = None,
    ) -> Self:
        """Group elements by key, and give the elements of the datasets that a function makes of groups.

        A group is handed over when it is full; those that are not, at the end, in the order of keys. Resuming reads
        again from the oldest element on that waits.

        Args:
            key_func: takes an element, a plain tuple unpacked into arguments, and returns an integer, its key.
            reduce_func: takes a key and a dataset of a group's elements, and returns a ``ts.data.Dataset``.
            window_size: elements of a group.
            window_size_func: takes a key and returns the elements of its groups; in place of ``window_size``.

        Raises:
            TypeError: a function is none; while iterating: one returned something else.
            InvalidArgumentError: there are both sizes or none, or one is not positive.

        Example:
            >>> numbers = ts.data.Dataset.range(6)
            >>> list(numbers.group_by_window(lambda x: x % 2, lambda key, group: group.batch(2), window_size=2))
            [tensor([0, 2]), tensor([1, 3]), tensor([4]), tensor([5])]
        """
        if (window_size is None) == (window_size_func is None):
            raise InvalidArgumentError("group_by_window() needs either window_size or window_size_func.")
        if window_size_func is None:
            size_of: Callable[[Any], Any] = _Always(check_int("window_size", window_size, 1))
        else:
            size_of = check_callable("window_size_func", window_size_func)
        reduce_func, key_func = check_callable("reduce_func", reduce_func), check_callable("key_func", key_func)
        return self._with(GroupByWindowOp((self._op,), reduce_func, 1, 1, key_func, size_of, self._of_elements))

    def bucket_by_sequence_length(
        self,
        element_length_func: Callable[..., Any],
        bucket_boundaries: Sequence[int],
        bucket_batch_sizes: Sequence[int],
        padded_shapes: Any = None,
        padding_values: Any = None,
        pad_to_bucket_boundary: bool = False,  # noqa: FBT001, FBT002 - tf's signature
        no_padding: bool = False,  # noqa: FBT001, FBT002
        drop_remainder: bool = False,  # noqa: FBT001, FBT002
    ) -> Self:
        """Make padded batches of elements of similar lengths.

        Args:
            element_length_func: takes an element and returns its length.
            bucket_boundaries: ascending lengths; an element as long as a boundary belongs to the bucket above it.
            bucket_batch_sizes: the batch size of each bucket, one more than boundaries.
            padded_shapes: as of ``padded_batch``.
            padding_values: as of ``padded_batch``.
            pad_to_bucket_boundary: ``None`` in a shape means the bucket's boundary minus 1 and not the longest of the
                batch; without ``padded_shapes`` an element is one tensor of one dimension.
            no_padding: stack elements as they are.
            drop_remainder: leave out batches that are not full at the end.

        Raises:
            TypeError: ``element_length_func`` is no function, or a boundary or size no integer.
            InvalidArgumentError: boundaries do not ascend, or sizes are not one more. While iterating: with
                ``pad_to_bucket_boundary``, an element is as long as the last boundary.

        Example:
            >>> dataset = ts.data.Dataset.range(1, 6).map(lambda n: torch.ones(int(n)))
            >>> [tuple(batch.shape) for batch in dataset.bucket_by_sequence_length(len, [3], [2, 2])]
            [(2, 2), (2, 4), (1, 5)]
        """
        boundaries = [check_int("each of bucket_boundaries", boundary) for boundary in bucket_boundaries]
        if not boundaries or any(a >= b for a, b in pairwise(boundaries)):
            raise InvalidArgumentError(f"bucket_boundaries must be ascending lengths. Received: {bucket_boundaries!r}")
        sizes = [check_int("each of bucket_batch_sizes", size, 1) for size in bucket_batch_sizes]
        if len(sizes) != len(boundaries) + 1:
            raise InvalidArgumentError(
                f"bucket_batch_sizes must have {len(boundaries) + 1} numbers, one more than bucket_boundaries. "
                f"Received: {bucket_batch_sizes!r}"
            )
        if pad_to_bucket_boundary and padded_shapes is None:
            padded_shapes = [None]
        buckets = Buckets(
            check_callable("element_length_func", element_length_func),
            boundaries,
            sizes,
            None if no_padding else (padded_shapes, padding_values),
            pads_to_boundary=pad_to_bucket_boundary,
            drop_remainder=drop_remainder,
        )
        return self.group_by_window(buckets.key, buckets.stack, window_size_func=buckets.size)

    def rejection_resample(
        self,
        class_func: Callable[..., Any],
        target_dist: Sequence[float],
        initial_dist: Sequence[float] | None = None,
        seed: int | None = None,
    ) -> Self:
        """Leave out elements at random, so that their classes come as often as they shall.

        Args:
            class_func: takes an element and returns its class, an integer from 0.
            target_dist: how often each class shall come, relative to the others.
            initial_dist: how often each comes. ``None`` means as often as it has come so far, which is wrong for the
                first elements.
            seed: decides what is left out, another part in each iteration. ``None`` takes one from torch's random
                stream when the first element is read.

        Returns:
            A dataset of pairs of a class and an element.

        Raises:
            TypeError: ``class_func`` is no function; while iterating: it returned no integer.
            InvalidArgumentError: a distribution has negative numbers or only 0, they have different lengths, or the
                initial one is 0 for a class that shall come. While iterating: a class has no number.

        Example:
            >>> rare = ts.data.Dataset.range(10000).map(lambda x: int(x) % 10 == 0)
            >>> balanced = rare.rejection_resample(int, [0.5, 0.5], [0.9, 0.1], seed=1)
            >>> classes = [int(c) for c, _ in balanced]
            >>> 0.4 < sum(classes) / len(classes) < 0.6
            True
        """
        check_callable("class_func", class_func)
        target = check_weights("target_dist", target_dist)
        initial = None if initial_dist is None else check_weights("initial_dist", initial_dist, len(target))
        if initial is not None and any(wanted and not there for wanted, there in zip(target, initial, strict=True)):
            raise InvalidArgumentError(
                f"initial_dist must be above 0 for each class that shall come. Received: {initial} for {target}"
            )
        numbers = dataset_sources.random_numbers(seed, rerandomizes=True)
        zipped = ZipOp((self._op, numbers), (0, 1))
        counts = torch.zeros(len(target), dtype=torch.float64, device="cpu")
        decided = ops.ScanOp((zipped,), counts, Rejection(class_func, target, initial))
        return self._with(ops.MapOp((ops.FilterOp((decided,), _first),), _second, 0))

    def rebatch(
        self,
        batch_size: int | Sequence[int],
        drop_remainder: bool = False,  # noqa: FBT001, FBT002 - tf's signature
    ) -> Self:
        """Make batches of another size of batches.

        Args:
            batch_size: elements of a batch; or several numbers, the sizes of batches in turn.
            drop_remainder: leave out a last batch of fewer elements.

        Raises:
            TypeError: a size is no integer.
            InvalidArgumentError: it is not positive; while iterating: the components of a batch have no common first
                dimension.

        Example:
            >>> list(ts.data.Dataset.range(6).batch(2).rebatch(4))
            [tensor([0, 1, 2, 3]), tensor([4, 5])]
        """
        elements = ops.UnbatchOp((self._op,))
        if isinstance(batch_size, Sequence):
            sizes = tuple(check_int("each of batch_size", size, 1) for size in batch_size)
            if not sizes:
                raise InvalidArgumentError("batch_size must have at least one number.")
            return self._with(_BatchesOp((elements,), sizes, bool(drop_remainder)))
        return self._with(ops.BatchOp((elements,), check_int("batch_size", batch_size, 1), bool(drop_remainder)))

    def ignore_errors(self, log_warning: bool = False) -> Self:  # noqa: FBT001, FBT002 - tf's signature
        """Leave out elements that raise an error.

        It belongs right after what may fail: after a ``batch`` the whole batch is left out. Of a file whose reader
        fails, and of a generator, the rest is left out.

        Args:
            log_warning: say each time in the log what was raised.

        Example:
            >>> quotients = ts.data.Dataset.range(3).map(lambda x: 4 // int(x)).ignore_errors()
            >>> list(quotients)
            [tensor(4), tensor(2)]
        """
        return self._with(_IgnoreErrorsOp((self._op,), bool(log_warning)))

    @staticmethod
    def _of_elements(elements: Sequence[Any]) -> Any:
        raise NotImplementedError
