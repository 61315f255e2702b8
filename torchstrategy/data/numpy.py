"""Arrays as datasets, without copying them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from torchstrategy.base import tree
from torchstrategy.errors import InvalidArgumentError

__all__ = ["ArrayBatches", "ArrayDataset", "make_numpy_dataset"]


class ArrayDataset(Dataset[Any]):
    """A map-style dataset of the slices of arrays along their first dimension.

    Args:
        arrays: a nested structure of numpy arrays or tensors of equal length.

    Raises:
        ValueError: there are no arrays, one is a scalar, or their lengths differ.
    """

    def __init__(self, arrays: Any) -> None:
        leaves, self._spec = tree.flatten(arrays)
        _check_arrays(leaves)
        self.arrays = leaves
        self._length = len(leaves[0])

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        return self._spec.unflatten([leaf[index] for leaf in self.arrays])

    def __getattr__(self, name: str) -> Any:
        text = f"{type(self).__name__!r} object has no attribute {name!r}"
        if not name.startswith("_"):
            text += (
                ". It is a torch dataset, for a DataLoader or experimental_distribute_dataset(dataset, batch_size=n). "
                "tf's methods, such as batch, are those of ts.data.Dataset.from_tensor_slices(arrays)."
            )
        raise AttributeError(text, name=name, obj=self)


class ArrayBatches:
    """Global batches of an ``ArrayDataset``: consecutive slices, which are views.

    Args:
        dataset: the arrays.
        batch_size: examples of a batch; the last one may have fewer.
    """

    def __init__(self, dataset: ArrayDataset, batch_size: int) -> None:
        self._dataset = dataset
        self._batch_size = batch_size
        self._next = 0  # of the latest iteration
        self._resume_at = 0

    @property
    def batch_size(self) -> int:
        """Examples of a batch."""
        return self._batch_size

    @property
    def arrays(self) -> list[Any]:
        """The arrays, without their nested structure."""
        return self._dataset.arrays

    @property
    def sizes(self) -> list[int]:
        """Examples of the dataset and of a batch."""
        return [len(self._dataset), self._batch_size]

    def __len__(self) -> int:
        return -(-len(self._dataset) // self._batch_size)

    def __iter__(self) -> Iterator[Any]:
        self._next, self._resume_at = self._resume_at, 0
        for start in range(self._next * self._batch_size, len(self._dataset), self._batch_size):
            self._next = start // self._batch_size + 1
            yield self._dataset[start : start + self._batch_size]
        self._next = 0

    def state_dict(self) -> dict[str, Any]:
        """Return where the latest iteration is."""
        return {"sizes": self.sizes, "next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration begin there.

        Raises:
            InvalidArgumentError: the state is of other arrays.
        """
        if state.get("sizes") != self.sizes:
            raise InvalidArgumentError(
                f"The state to resume from is not of arrays with [examples, batch size] {self.sizes}. Load it into the "
                f"same dataset as it was taken from. It holds: {state!r:.100}"
            )
        self._resume_at = state["next"]


def make_numpy_dataset(arrays: Any) -> ArrayDataset:
    """Make a map-style dataset of the slices of arrays; nothing is copied.

    Args:
        arrays: a numpy array, a tensor, or a nested structure (tuples, dicts) of them, all of shape ``[examples, ...]``
            with equal ``examples``. A list of arrays is stacked, as in tf.

    Returns:
        A dataset for a ``DataLoader``, or for ``experimental_distribute_dataset(dataset, batch_size=...)``.

    Raises:
        ValueError: there are no arrays, one is a scalar, or their lengths differ.

    Example:
        >>> import numpy
        >>> from torchstrategy.data.numpy import make_numpy_dataset
        >>> dataset = make_numpy_dataset({"x": numpy.zeros((3, 2)), "y": numpy.arange(3)})
        >>> len(dataset), dataset[1]["x"].shape
        (3, (2,))
    """
    return ArrayDataset(_stack_lists(arrays))


def _stack_lists(arrays: Any) -> Any:
    if isinstance(arrays, list):
        return np.asarray(arrays)
    if isinstance(arrays, tuple):
        values = map(_stack_lists, arrays)
        return type(arrays)(*values) if hasattr(arrays, "_fields") else type(arrays)(values)
    if isinstance(arrays, dict):
        return {key: _stack_lists(value) for key, value in arrays.items()}
    return arrays


def _check_arrays(leaves: list[Any]) -> None:
    if not leaves:
        raise ValueError("There are no arrays to make a dataset of.")
    for leaf in leaves:
        if not isinstance(leaf, (np.ndarray, Tensor)):
            raise TypeError(f"Expected numpy arrays or tensors, in tuples or dicts. Received: {type(leaf).__name__}")
        if leaf.ndim == 0:
            raise ValueError("Each array must have a first dimension, of its examples. Received a scalar.")
    lengths = [len(leaf) for leaf in leaves]
    if len(set(lengths)) > 1:
        raise ValueError(f"All arrays must have the same length, their number of examples. Received: {lengths}")
