"""The methods of ``ts.data.Dataset`` in which an element depends on others, or on which ones came before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from typing_extensions import Self

from torchstrategy.data.pipeline import ops
from torchstrategy.data.pipeline.dataset_base import Pipeline
from torchstrategy.data.pipeline.dataset_options import check_callable, check_int
from torchstrategy.data.pipeline.elements import to_element
from torchstrategy.data.pipeline.nested import WindowOp

__all__ = ["Regrouping"]


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

    @staticmethod
    def _of_elements(elements: Sequence[Any]) -> Any:
        raise NotImplementedError
