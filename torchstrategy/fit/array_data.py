"""The arrays that ``fit`` and its kin are given, nested or not, and batches of them, shuffled anew in each epoch.

Nothing of the size of the data is copied. numpy's floating arrays become torch's default dtype, batch by batch, as
Keras casts them: numpy makes ``float64`` by itself, which no layer takes. Tensors keep their dtype.

The order is a function of one number, so a position is that number and a count, for any number of replicas and
processes. A batch costs each process one indexing call for each array, of its own part only.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchstrategy.base import tree
from torchstrategy.base.devices import Placement
from torchstrategy.data.batch import Components, LocalBatch, division, take
from torchstrategy.data.data_order import Workers, check_equal, checksum
from torchstrategy.data.position import Position
from torchstrategy.errors import DisagreementError, InvalidArgumentError
from torchstrategy.fit.arguments import DataArguments, shown_type
from torchstrategy.fit.batch_parts import pack_x_y_sample_weight

__all__ = ["ArraySource", "Arrays", "is_array", "make_arrays"]

_SAME_ARRAYS = (
    "Pass the same arrays on every rank: load the same files, and seed alike what is random (ts.utils.set_random_seed)."
)


class ArraySource:
    """A source of a distributed dataset: consecutive or shuffled examples of arrays.

    Args:
        arrays: the data.
        batch_size: examples of a global batch; the last one may have fewer.
        shuffle: draw a new order in each iteration, by one number of torch's random stream (the chief's).
        placement: the strategy's replicas.
        workers: its processes, ``None`` if there is one.

    Raises:
        DisagreementError: the processes have different arrays or batch sizes.
    """

    kind = "arrays"
    is_collective = False

    def __init__(
        self, arrays: Arrays, batch_size: int, *, shuffle: bool, placement: Placement, workers: Workers | None
    ) -> None:
        self._arrays = arrays
        self.batch_size = batch_size
        self._shuffle = shuffle
        self._placement = placement
        self._workers = workers
        self.how = "Batches are cut from arrays."
        if workers is not None:
            self.how = "Each process takes its own part of each batch from its arrays."
            record = [*self._sizes, checksum(arrays.tensors)]
            check_equal(workers, "number of examples, batch size and checksum of the arrays", record, _SAME_ARRAYS)

    @property
    def _sizes(self) -> list[int]:
        return [self._arrays.num_examples, self.batch_size]

    def start(self, state: dict[str, Any] | None) -> _Reading:
        """Start an iteration, or go on with one."""
        if state is not None and state["sizes"] != self._sizes:
            raise InvalidArgumentError(
                f"The state to resume from is of arrays with [examples, batch size] {state['sizes']}, these have "
                f"{self._sizes}. Load it into the same data as it was taken from."
            )
        position = Position(sizes=self._sizes, seed=None)
        if state is not None and not state["is_finished"]:
            position = Position(state["step"], sizes=self._sizes, seed=state["seed"])
        return _Reading(self._arrays, position, self.batch_size, self._placement, self._workers, shuffle=self._shuffle)

    def combine(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state as it is: it is the same in every process."""
        return state

    def length(self) -> int:
        """Return the number of global batches."""
        return -(-self._arrays.num_examples // self.batch_size)

    def example(self) -> Components:
        """Return the first examples."""
        return self._arrays.rows(0, min(self.batch_size, self._arrays.num_examples))


class _Reading:
    """One iteration."""

    def __init__(
        self,
        arrays: Arrays,
        position: Position,
        batch_size: int,
        placement: Placement,
        workers: Workers | None,
        *,
        shuffle: bool,
    ) -> None:
        self._arrays = arrays
        self.position = position
        self._batch_size = batch_size
        self._placement = placement
        self._workers = workers
        self._shuffle = shuffle
        self._is_open = False
        self._order: Tensor | None = None

    def __next__(self) -> LocalBatch:
        if not self._is_open:
            self._open()
        start = self.position.step * self._batch_size
        size = min(self._batch_size, self._arrays.num_examples - start)
        if size <= 0:
            self.position.is_finished = True
            raise StopIteration
        bounds, shares = division(size, self._placement.num_replicas)
        own = [bounds[i] for i in self._placement.local_replica_ids]
        first, end = own[0][0], own[-1][1]
        rows = self._arrays.rows(start + first, start + end, self._order)
        parts = [rows] if len(own) == 1 else [take(rows, a - first, b - first) for a, b in own]
        self.position.step += 1
        tags = [None if leaf is None else shares for leaf in rows.leaves]
        return LocalBatch(list(zip(*(part.leaves for part in parts), strict=True)), tags, rows.spec)

    def _open(self) -> None:
        """Draw the order, here and not in ``start``: nobody may iterate over what was started."""
        position = self.position
        seed = position.more["seed"]
        # Every rank draws, though the chief's number counts: ranks that were seeded alike stay alike.
        if self._shuffle and seed is None:
            seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
        if self._workers is not None:
            heard = self._workers.exchange("batch to begin with, and the order's seed", [position.step, seed])
            if len({step for step, _ in heard}) > 1:
                steps = [step for step, _ in heard]
                raise DisagreementError(f"The ranks begin with batches {steps}. Load the same state on every rank.")
            seed = heard[0][1]
        position.more["seed"] = seed
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
            self._order = torch.randperm(self._arrays.num_examples, generator=generator, device="cpu")
        self._is_open = True


# torch can't index these; the numbers have the same bits as signed ones.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


@dataclass(frozen=True)
class _Column:
    """One array.

    Args:
        name: what to call it in messages, such as ``fit(x=...)['image']``.
        tensor: ``[examples, ...]``, in the memory of the user's array.
        dtype: what batches become.
    """

    name: str
    tensor: Tensor
    dtype: torch.dtype

    def rows(self, start: int, stop: int, order: Tensor | None) -> Tensor:
        """Return a copy: what a step does to its batch must not reach the user's array."""
        if order is None:
            rows = self.tensor[start:stop].to(self.dtype)
            return rows.clone() if rows.dtype is self.tensor.dtype else rows
        indices = order[start:stop].to(self.tensor.device)
        signed = _SIGNED.get(self.dtype)
        if signed is not None:
            return self.tensor.view(signed).index_select(0, indices).view(self.dtype)
        return self.tensor.index_select(0, indices).to(self.dtype)


class Arrays:
    """The arrays of one call.

    Args:
        columns: the arrays; ``None`` for a part of a batch that is ``None``.
        spec: builds a batch.
        targets: the arrays that are ``y``, as tensors in its structure.
    """

    def __init__(self, columns: list[_Column | None], spec: Any, targets: Any) -> None:
        self._columns = columns
        self._spec = spec
        self.targets = targets

    @property
    def tensors(self) -> list[Tensor]:
        """The arrays, without their nested structure."""
        return [column.tensor for column in self._columns if column is not None]

    @property
    def num_examples(self) -> int:
        """The length of all of them."""
        return len(self.tensors[0])

    def rows(self, start: int, stop: int, order: Tensor | None = None) -> Components:
        """Return a copy of some examples.

        Args:
            start: the place of the first one.
            stop: the place behind the last one.
            order: the indices of all examples in the order that places are counted in, ``None`` for that of the arrays.
        """
        leaves = [None if column is None else column.rows(start, stop, order) for column in self._columns]
        return Components(leaves, self._spec)


def is_array(value: Any) -> bool:
    """Say whether a value is an array: numpy's, torch's, or what numpy reads by itself, such as pandas' objects."""
    return isinstance(value, (np.ndarray, Tensor)) or hasattr(value, "__array__")


def make_arrays(x: Any, y: Any, sample_weight: Any, names: DataArguments) -> Arrays:
    """Check the arrays of one call; they keep their memory.

    Args:
        x: an array ``[examples, ...]``, or arrays in tuples, lists and dicts.
        y: the same, or ``None``.
        sample_weight: the same, or ``None``.
        names: of the arguments.

    Raises:
        TypeError: something is no array.
        ValueError: an array is a scalar, has no examples or no numbers, or lengths or the weights' shapes don't fit.
    """
    x, y, sample_weight = (dict(v) if isinstance(v, Mapping) else v for v in (x, y, sample_weight))
    inputs = _make_columns(x, names.x)
    targets = _make_columns(y, names.y)
    weights = _make_columns(sample_weight, names.sample_weight)
    columns = [*inputs, *targets, *weights]
    if not any(inputs):
        raise ValueError(f"{names.x} holds no arrays. Received: {x!r:.100}")
    _check_lengths([column for column in columns if column is not None])
    if len(targets) == len(weights):
        for target, weight in zip(targets, weights, strict=True):
            _check_weight(target, weight)
    spec = tree.flatten(pack_x_y_sample_weight(x, y, sample_weight))[1]
    labels = tree.unflatten(tree.flatten(y)[1], [column and column.tensor for column in targets])
    return Arrays(columns[: spec.num_leaves], spec, labels)


def _make_columns(structure: Any, name: str) -> list[_Column | None]:
    return [None if leaf is None else _make_column(leaf, name + path) for path, leaf in tree.leaf_paths(structure)]


def _make_column(array: Any, name: str) -> _Column:
    if isinstance(array, Tensor):
        if array.layout is not torch.strided or array.is_nested:
            raise TypeError(f"{name} is a sparse or nested tensor. Pass a dense one, or a loader that gives batches.")
        tensor = array.detach()
    elif is_array(array):
        tensor = _share_memory(np.asarray(array), name)
    else:
        raise TypeError(f"{name} is {shown_type(array)}, not a numpy array or a tensor. {_remedy(array)}")
    if tensor.dim() == 0:
        raise ValueError(f"{name} must have a first dimension, of its examples. Received a scalar: {array!r:.100}")
    if len(tensor) == 0:
        raise ValueError(f"{name} has no examples: its shape is {tuple(tensor.shape)}.")
    is_cast = tensor.is_floating_point() and not isinstance(array, Tensor)
    return _Column(name, tensor, torch.get_default_dtype() if is_cast else tensor.dtype)


def _remedy(value: Any) -> str:
    if isinstance(value, (bool, int, float)):
        return "Lists of numbers are not taken for arrays: convert them with numpy.array(...) or torch.tensor(...)."
    if isinstance(value, (str, bytes)):
        return "Models take numbers: encode strings first, for example as the indices of a vocabulary."
    return "Convert it, or pass a DataLoader or a ts.data.Dataset, whose batches hold (x, y)."


def _share_memory(array: np.ndarray[Any, Any], name: str) -> Tensor:
    if array.dtype.kind not in "biufc":
        what = "Python objects (strings, or rows of different lengths)" if array.dtype.kind == "O" else "no numbers"
        raise ValueError(
            f"{name} has dtype {array.dtype}: it holds {what}. Models take numbers: make it an array of a numeric "
            "dtype, for example with .astype('float32'); encode strings, pad rows to one length."
        )
    if not array.dtype.isnative or any(stride < 0 for stride in array.strides):
        array = np.array(array, dtype=array.dtype.newbyteorder("="), order="C")  # torch can't share these
    try:
        with warnings.catch_warnings():
            # Read-only arrays such as memory maps: batches are copies, so nothing writes to them.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.from_numpy(array)
    except TypeError:
        raise ValueError(
            f"{name} has dtype {array.dtype}, which torch doesn't have. Convert it, for example with "
            ".astype('float32')."
        ) from None


def _check_lengths(columns: list[_Column]) -> None:
    if len({len(column.tensor) for column in columns}) > 1:
        lengths = ", ".join(f"{column.name} has {len(column.tensor)}" for column in columns)
        raise ValueError(
            f"All arrays must have the same length, their number of examples: {lengths}. If the examples are not along "
            "the first dimension, move it there."
        )


def _check_weight(target: _Column | None, weight: _Column | None) -> None:
    if target is None or weight is None:
        return
    sizes, weight_sizes = target.tensor.shape[1:], weight.tensor.shape[1:]
    fits = (n == 1 or (i < len(sizes) and n == sizes[i]) for i, n in enumerate(weight_sizes))
    if not all(fits) or weight.tensor.is_complex():
        raise ValueError(
            f"{weight.name} must hold one number for each example, shape [{len(weight.tensor)}], or for each part of "
            f"{target.name} that has a loss of its own. {weight.name} has shape {tuple(weight.tensor.shape)}, "
            f"{target.name} has shape {tuple(target.tensor.shape)}."
        )
