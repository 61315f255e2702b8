"""What a feature column is, and the raw features of a batch as columns read them.

They are in one form, on one device, and each is looked up once.

Values of categorical features are padded: ``[batch, n]`` with a mask of what is there. So a batch has the same
operations whatever its rows hold, and where nothing is a string it can be compiled and exported.
"""

from __future__ import annotations

import math
import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

__all__ = [
    "CategoricalColumn",
    "DenseColumn",
    "FeatureColumn",
    "Features",
    "Ids",
    "Strings",
    "as_count",
    "as_strings",
    "check_dtype",
    "check_key",
    "variable_scope",
]

Strings = np.ndarray[Any, np.dtype[np.object_]]


def as_strings(value: Any) -> Strings:
    """Return strings as an array of dtype ``object`` whose elements are ``str``; bytes are decoded as UTF-8.

    Args:
        value: a list of ``str``, ``bytes`` or ``None`` (which becomes ``""``), or an array of them of any shape.

    Raises:
        ValueError: an element is something else.

    Example:
        >>> from torchstrategy.estimator.feature_column.features import as_strings
        >>> as_strings([b"red", "green"])
        array(['red', 'green'], dtype=object)
    """
    if isinstance(value, Tensor):
        raise ValueError(f"Expected strings, in a list or a NumPy array. Received a tensor of dtype {value.dtype}.")
    array = np.asarray(value, dtype=None if isinstance(value, np.ndarray) else object)
    result = np.empty(array.shape, dtype=object)
    result.ravel()[:] = [item if type(item) is str else _as_text(item) for item in array.ravel().tolist()]
    return result


def _as_text(item: Any) -> str:
    if item is None:
        return ""
    if isinstance(item, bytes):
        return item.decode("utf-8", "surrogateescape")  # bytes that are no UTF-8 keep their fingerprint
    if isinstance(item, str):
        return str(item)
    raise ValueError(f"Expected strings (str or bytes). Received {item!r} of type {type(item).__name__}.")


_T = TypeVar("_T")


@dataclass(frozen=True)
class RawValues:
    """A feature as the batch has it.

    Args:
        values: ``[batch, ...]`` numbers, or strings on the host.
        present: bool ``[batch, n]``, false where there is no value; ``None`` if all are there.
        is_ragged: whether rows may have different numbers of values by their type, as in tf's sparse tensors.
        is_padded: whether they have.
    """

    values: Tensor | Strings
    present: Tensor | None = None
    is_ragged: bool = False
    is_padded: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether no value is there, so that nothing says of what kind they are."""
        if isinstance(self.values, Tensor):
            return False
        return self.values.size == 0 or (self.present is not None and not bool(self.present.any()))


@dataclass(frozen=True)
class Ids:
    """The categories of each example.

    Args:
        values: int64 ``[batch, n]``; a negative one has no category, but takes part in crosses.
        present: bool ``[batch, n]``, false where there is no value at all.
        weights: float ``[batch, n]``, or ``None`` if all weigh 1.
    """

    values: Tensor
    present: Tensor
    weights: Tensor | None = None


class Features:
    """One batch's features, with what columns have made of them.

    Args:
        features: a mapping from keys to tensors, NumPy arrays or lists.
        device: where numbers are put; ``None`` means the device of the first tensor among the features, or torch's
            default device if there is none.

    Raises:
        ValueError: ``features`` is no mapping.
    """

    def __init__(self, features: Mapping[str, Any], device: torch.device | None = None) -> None:
        if not isinstance(features, Mapping):
            raise ValueError(
                f"Expected features to be a dictionary from keys to values. Received: {type(features).__name__}"
            )
        if device is None:
            tensors = (value for value in features.values() if isinstance(value, Tensor))
            device = next((tensor.device for tensor in tensors), torch.get_default_device())
        self.device = device
        self._features = features
        self._made: dict[Hashable, Any] = {}

    def raw(self, key: str) -> RawValues:
        """Return a feature's values; ``[batch]`` becomes ``[batch, 1]``.

        Raises:
            ValueError: there is no such feature, or its value can't be read.
        """
        if key not in self._features:
            raise ValueError(
                f"Feature {key} is not in features dictionary. It has: {', '.join(map(str, self._features)) or 'none'}."
            )
        return self.once(key, lambda: _read(self._features[key], key, self.device))

    def once(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """Return what ``make`` returns, calling it only for the first time that ``key`` is asked for."""
        if key not in self._made:
            self._made[key] = make()
        made: _T = self._made[key]
        return made

    def strings(self, key: str) -> tuple[Strings, Tensor]:
        """Return a feature's strings ``[batch, n]`` and the mask of those that are there.

        An empty string is not, unless rows are ragged.

        Raises:
            ValueError: they are numbers.
        """
        raw = self.raw(key)
        if isinstance(raw.values, Tensor):
            raise ValueError(
                f"Column dtype and the feature's dtype must be compatible. key: {key}, column dtype: str, feature's "
                f"dtype: {raw.values.dtype}. Pass strings in a list or a NumPy array, or give the column an integer "
                "dtype."
            )
        values = raw.values.reshape(len(raw.values), math.prod(raw.values.shape[1:]))
        present = None if raw.present is None else raw.present.reshape(values.shape)
        if not raw.is_ragged:
            given = torch.from_numpy(np.not_equal(values, "").astype(bool))
            present = given.to(self.device) if present is None else present & given.to(self.device)
        return values, self._all_present(values.shape) if present is None else present

    def integers(self, key: str) -> tuple[Tensor, Tensor]:
        """Return a feature's integers ``[batch, n]`` as int64 and the mask of those that are there.

        -1 is not, unless rows are ragged.

        Raises:
            ValueError: they are strings or floating point numbers.
        """
        raw = self.raw(key)
        values = torch.full(raw.values.shape, -1, device=self.device) if raw.is_empty else raw.values
        if not isinstance(values, Tensor) or not _is_integer(values):
            kind = values.dtype if isinstance(values, Tensor) else "str"
            raise ValueError(f"Invalid input, not integer. key: {key}, dtype: {kind}")
        values = values.to(torch.int64).flatten(1)
        present = self._all_present(values.shape) if raw.present is None else raw.present.reshape(values.shape)
        return values, present if raw.is_ragged else present & (values != -1)

    def _all_present(self, shape: Sequence[int]) -> Tensor:
        return torch.ones(tuple(shape), dtype=torch.bool, device=self.device)


def _is_integer(values: Tensor) -> bool:
    return not values.is_floating_point() and not values.is_complex() and values.dtype is not torch.bool


def _read(value: Any, key: str, device: torch.device) -> RawValues:
    if isinstance(value, Tensor):
        return _read_tensor(value, key, device)
    if not isinstance(value, np.ndarray) and hasattr(value, "__array__"):  # such as a column of a pandas table
        value = np.asarray(value)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return _read_tensor(torch.as_tensor(value if value.flags.writeable else value.copy()), key, device)
    if not isinstance(value, (list, tuple, np.ndarray)):
        raise ValueError(
            f"Feature (key: {key}) must be a tensor, a NumPy array or a list. Received: {type(value).__name__}"
        )
    if not isinstance(value, np.ndarray) or (value.dtype.kind == "O" and value.ndim == 1):
        if any(isinstance(row, (list, tuple, np.ndarray, Tensor)) for row in value):
            return _read_rows(value, key, device)
        value = _as_objects(value)
    return _read_objects(value, key, device)


def _read_tensor(value: Tensor, key: str, device: torch.device) -> RawValues:
    if value.dim() == 0:
        raise ValueError(f"Feature (key: {key}) cannot have rank 0: features are batches. Received: {value}")
    if value.is_nested:
        return _read_rows(value.unbind(), key, device)
    if value.layout is not torch.strided:
        return _read_sparse(value if value.layout is torch.sparse_coo else value.to_sparse(), device)
    return RawValues((value.unsqueeze(-1) if value.dim() == 1 else value).to(device))


def _read_sparse(value: Tensor, device: torch.device) -> RawValues:
    # Not coalesced: that would add up the values that share a place
    indices, entries = value._indices(), value._values()
    values = torch.full(value.shape, -1, dtype=value.dtype, device=value.device)
    present = torch.zeros(value.shape, dtype=torch.bool, device=value.device)
    values[tuple(indices)], present[tuple(indices)] = entries, torch.ones_like(entries, dtype=torch.bool)
    rows = (len(values), math.prod(value.shape[1:]))
    return RawValues(values.reshape(rows).to(device), present.reshape(rows).to(device), is_ragged=True, is_padded=True)


def _read_rows(rows: Iterable[Any], key: str, device: torch.device) -> RawValues:
    """Read rows of different lengths."""
    lists = [_as_objects(row).ravel().tolist() for row in rows]
    lengths = [len(row) for row in lists]
    width = max(lengths, default=0)
    values = np.full((len(lists), width), None, dtype=object)
    for padded, row in zip(values, lists, strict=True):
        padded[: len(row)] = row
    read = _read_objects(values, key, device)
    if min(lengths, default=0) == width:
        return replace(read, is_ragged=True)
    is_there = torch.tensor([[i < length for i in range(width)] for length in lengths], device=device)
    present = is_there if read.present is None else is_there & read.present
    return RawValues(read.values, present, is_ragged=True, is_padded=True)


def _as_objects(row: Any) -> np.ndarray[Any, Any]:
    if isinstance(row, np.ndarray):
        return row
    return np.array(row.tolist() if isinstance(row, Tensor) else row, dtype=object)


def _read_objects(values: np.ndarray[Any, Any], key: str, device: torch.device) -> RawValues:
    """Read strings, or numbers of which some may be ``None``."""
    if values.ndim == 0:
        raise ValueError(f"Feature (key: {key}) cannot have rank 0. Received: {values!r}")
    if values.ndim == 1:
        values = values[:, None]
    is_missing = np.array([item is None for item in values.ravel().tolist()], dtype=bool).reshape(values.shape)
    present = torch.from_numpy(~is_missing).to(device) if is_missing.any() else None
    first = next((item for item in values[~is_missing].ravel()[:1].tolist()), "")
    if isinstance(first, (str, bytes)):
        try:
            return RawValues(as_strings(values), present)
        except ValueError as error:
            raise ValueError(f"Feature (key: {key}): {error}") from None
    try:
        filled = np.where(is_missing, -1, values)
        numbers = torch.from_numpy(np.array(filled.tolist()).reshape(values.shape))
    except (TypeError, ValueError):
        raise ValueError(
            f"Feature (key: {key}) must hold numbers only, or strings only. Received {first!r} of type "
            f"{type(first).__name__} among others."
        ) from None
    return RawValues(numbers.to(device), present)


_Self = TypeVar("_Self", bound="FeatureColumn")


class FeatureColumn(ABC):
    """Base class of feature columns: descriptions of how a model reads features. They never change.

    A column has a name, which is unique among the columns of a layer, and holds no variables; layers make those.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The column's name, made of the keys of its features."""

    @property
    def variable_names(self) -> tuple[str, ...]:
        """Names of the variables that the column itself has in a layer."""
        return ()

    def make_variables(self) -> dict[str, nn.Parameter]:
        """Make the variables of ``variable_names``, by name."""
        return {}

    def __deepcopy__(self: _Self, memo: dict[int, Any]) -> _Self:
        return self  # it never changes, and a vocabulary need not be there once for each replica


class DenseColumn(FeatureColumn):
    """Base class of columns that give a fixed number of floating point numbers for each example."""

    @property
    @abstractmethod
    def variable_shape(self) -> tuple[int, ...]:
        """Shape of an example's numbers."""

    @abstractmethod
    def dense(self, features: Features, variables: Mapping[str, Tensor]) -> Tensor:
        """Return the numbers, ``[batch, *variable_shape]``.

        Args:
            features: the batch.
            variables: the column's own, by name.
        """


class CategoricalColumn(FeatureColumn):
    """Base class of columns that give any number of categories for each example."""

    @property
    @abstractmethod
    def num_buckets(self) -> int:
        """Number of categories."""

    @abstractmethod
    def make_ids(self, features: Features) -> Ids:
        """Return the categories of each example."""

    def ids(self, features: Features) -> Ids:
        """Return the categories of each example, which are made once for each batch."""
        return features.once((CategoricalColumn, id(self)), lambda: self.make_ids(features))


def variable_scope(name: str) -> str:
    """Return a column's name as it stands in the names of its variables, where torch allows no dots."""
    return re.sub(r"[^\w\-]", "_", name)


def check_key(key: Any) -> None:
    """Check that the key of a feature is a string.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(key, str):
        raise ValueError(f"key must be a string. Received: key={key!r} of type {type(key).__name__}")


def as_count(name: str, value: Any) -> int:
    """Return a number of things as an ``int``.

    Raises:
        TypeError: it is no integer.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer. Received: {value!r} of type {type(value).__name__}") from None


def check_dtype(dtype: Any, name: str) -> None:
    """Check that a categorical feature's dtype is ``str`` or an integer dtype of torch.

    Raises:
        ValueError: it is something else.
    """
    if dtype is str:
        return
    if not isinstance(dtype, torch.dtype) or dtype is torch.bool or dtype.is_floating_point or dtype.is_complex:
        raise ValueError(
            f"dtype must be string or integer: `str` or an integer dtype of torch. dtype: {dtype}, column: {name}"
        )
