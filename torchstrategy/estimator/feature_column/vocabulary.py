"""Columns whose categories are the entries of a vocabulary."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchstrategy.base.log import logger
from torchstrategy.errors import InvalidArgumentError
from torchstrategy.estimator.feature_column.features import (
    CategoricalColumn,
    Features,
    Ids,
    as_strings,
    check_dtype,
    check_key,
)
from torchstrategy.estimator.feature_column.fingerprint import bucket_of

__all__ = ["categorical_column_with_vocabulary_file", "categorical_column_with_vocabulary_list"]

Integers = np.ndarray[Any, np.dtype[np.int64]]


class _VocabularyColumn(CategoricalColumn):
    """What both columns do with a vocabulary."""

    key: str
    dtype: type[str] | torch.dtype
    default_value: int
    num_oov_buckets: int

    @property
    def name(self) -> str:
        return self.key

    @property
    @abstractmethod
    def entries(self) -> Sequence[Any]:
        """The vocabulary, in the order of the categories."""

    @property
    @abstractmethod
    def num_entries(self) -> int:
        """Its length."""

    @property
    def num_buckets(self) -> int:
        return self.num_entries + self.num_oov_buckets

    def make_ids(self, features: Features) -> Ids:
        if self.dtype is str:
            texts, present = features.strings(self.key)
            ids = torch.tensor([self._id_of(text) for text in texts.ravel().tolist()], dtype=torch.int64)
            return Ids(ids.reshape(texts.shape).to(features.device), present)
        values, present = features.integers(self.key)
        if self.num_oov_buckets:
            ids = torch.tensor([self._id_of(value) for value in values.flatten().tolist()], dtype=torch.int64)
            return Ids(ids.reshape(values.shape).to(features.device), present)
        keys, order = (torch.tensor(table, device=values.device) for table in self._sorted)
        places = torch.searchsorted(keys, values).clamp(max=len(keys) - 1)
        return Ids(torch.where(keys[places] == values, order[places], self.default_value), present)

    @cached_property
    def _table(self) -> dict[Any, int]:
        return {entry: index for index, entry in enumerate(self.entries)}

    @cached_property
    def _sorted(self) -> tuple[Integers, Integers]:
        """An integer vocabulary in ascending order, and the category of each entry.

        No tensors: one that is made while a program is exported is of no use afterwards.
        """
        entries = np.array(self.entries, dtype=np.int64)
        order = np.argsort(entries)
        return entries[order], order

    def _id_of(self, value: Any) -> int:
        index = self._table.get(value)
        if index is not None:
            return index
        if not self.num_oov_buckets:
            return self.default_value
        return self.num_entries + bucket_of(str(value), self.num_oov_buckets)


@dataclass(frozen=True)
class VocabularyListCategoricalColumn(_VocabularyColumn):
    """What ``categorical_column_with_vocabulary_list`` makes; its arguments are the attributes."""

    key: str
    vocabulary_list: tuple[Any, ...]
    dtype: type[str] | torch.dtype
    default_value: int
    num_oov_buckets: int

    @property
    def entries(self) -> Sequence[Any]:
        return self.vocabulary_list

    @property
    def num_entries(self) -> int:
        return len(self.vocabulary_list)


@dataclass(frozen=True)
class VocabularyFileCategoricalColumn(_VocabularyColumn):
    """What ``categorical_column_with_vocabulary_file`` makes; its arguments are the attributes.

    The file is read when the column first reads a batch.
    """

    key: str
    vocabulary_file: str
    vocabulary_size: int
    dtype: type[str] | torch.dtype
    default_value: int
    num_oov_buckets: int

    @cached_property
    def entries(self) -> Sequence[Any]:
        lines = _read_lines(self.vocabulary_file, self.vocabulary_size)
        if len(lines) < self.vocabulary_size:
            raise InvalidArgumentError(
                f"vocabulary_size of {self.key} is {self.vocabulary_size}, but {self.vocabulary_file} has only "
                f"{len(lines)} lines."
            )
        entries: list[Any] = list(lines) if self.dtype is str else [int(line) for line in lines]
        if len(set(entries)) < len(entries):
            twice = next(entry for entry in entries if entries.count(entry) > 1)
            raise InvalidArgumentError(
                f"{self.vocabulary_file} holds {twice!r} twice: each line must be another value."
            )
        return entries

    @property
    def num_entries(self) -> int:
        return self.vocabulary_size


def categorical_column_with_vocabulary_list(
    key: str, vocabulary_list: Sequence[Any], dtype: Any = None, default_value: int = -1, num_oov_buckets: int = 0
) -> VocabularyListCategoricalColumn:
    """Make a column whose categories are the entries of a list.

    Args:
        key: the feature's key; also the column's name. An empty string, or -1, means that there is no value.
        vocabulary_list: strings or integers, each once; a value's category is its index.
        dtype: ``str`` or an integer dtype. ``None`` means what the vocabulary holds.
        default_value: the category of all other values. -1 means none: they are left out.
        num_oov_buckets: number of further categories, into which all other values are hashed.

    Returns:
        A categorical column.

    Raises:
        ValueError: the vocabulary is empty, holds an entry twice or does not fit ``dtype``, there are both
            ``default_value`` and ``num_oov_buckets``, or one of these is out of range.

    Example:
        >>> colors = ts.feature_column.categorical_column_with_vocabulary_list("color", ["R", "G"], num_oov_buckets=1)
        >>> layer = ts.feature_column.DenseFeatures([ts.feature_column.indicator_column(colors)])
        >>> layer({"color": ["G", "black"]})
        tensor([[0., 1., 0.],
                [0., 0., 1.]])
    """
    check_key(key)
    if vocabulary_list is None or len(vocabulary_list) < 1:
        raise ValueError(f"vocabulary_list {vocabulary_list} must be non-empty, column_name: {key}")
    if isinstance(vocabulary_list, (str, bytes)):
        raise ValueError(f"vocabulary_list must be a list of values, column_name: {key}. Received: {vocabulary_list!r}")
    array = np.array(vocabulary_list)
    is_text = array.dtype.kind in "USO" and array.ndim == 1
    if not is_text and array.dtype.kind not in "iu":
        raise ValueError(f"dtype must be string or integer. vocabulary_list: {vocabulary_list}, column_name: {key}")
    entries = tuple((as_strings(vocabulary_list) if is_text else array).tolist())
    if len(set(entries)) != len(entries):
        raise ValueError(f"Duplicate keys in vocabulary_list: {vocabulary_list}, column_name: {key}")
    dtype = (str if is_text else torch.int64) if dtype is None else dtype
    check_dtype(dtype, key)
    if (dtype is str) != is_text:
        raise ValueError(
            f"dtype {dtype} and vocabulary dtype {'str' if is_text else array.dtype} do not match, column_name: {key}"
        )
    _check_others(key, default_value if default_value != -1 else None, num_oov_buckets, len(entries))
    return VocabularyListCategoricalColumn(key, entries, dtype, default_value, num_oov_buckets)


def categorical_column_with_vocabulary_file(
    key: str,
    vocabulary_file: str | os.PathLike[str],
    vocabulary_size: int | None = None,
    dtype: Any = str,
    default_value: int | None = None,
    num_oov_buckets: int = 0,
) -> VocabularyFileCategoricalColumn:
    r"""Make a column whose categories are the lines of a text file.

    Args:
        key: the feature's key; also the column's name. An empty string, or -1, means that there is no value.
        vocabulary_file: path of a file in UTF-8; a value's category is the number of its line, from 0.
        vocabulary_size: how many of its first lines are used. ``None`` means all.
        dtype: ``str``, or an integer dtype if the lines are integers.
        default_value: the category of all other values. ``None`` and -1 mean none: they are left out.
        num_oov_buckets: number of further categories, into which all other values are hashed.

    Returns:
        A categorical column.

    Raises:
        ValueError: there is no such file, ``vocabulary_size`` is not positive, ``dtype`` is another one, there are both
            ``default_value`` and ``num_oov_buckets``, or one of these is out of range.

    Example:
        >>> import pathlib, tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = pathlib.Path(folder.name, "colors.txt")
        >>> _ = path.write_text("red\ngreen\n")
        >>> color = ts.feature_column.categorical_column_with_vocabulary_file("color", path)
        >>> color.num_buckets
        2
        >>> folder.cleanup()
    """
    check_key(key)
    if not vocabulary_file:
        raise ValueError(f"Missing vocabulary_file in {key}.")
    path = os.fspath(vocabulary_file)
    if vocabulary_size is None:
        if not Path(path).is_file():
            raise ValueError(f"vocabulary_file in {key} does not exist. vocabulary_file: {path}")
        vocabulary_size = len(_read_lines(path, None))
        logger.info(
            "vocabulary_size = %d in %s is inferred from the number of elements in the vocabulary_file %s.",
            vocabulary_size,
            key,
            path,
        )
    if vocabulary_size < 1:
        raise ValueError(f"Invalid vocabulary_size in {key}: {vocabulary_size}. At least one entry is needed.")
    _check_others(key, default_value, num_oov_buckets, vocabulary_size)
    check_dtype(dtype, key)
    return VocabularyFileCategoricalColumn(
        key, path, vocabulary_size, dtype, -1 if default_value is None else default_value, num_oov_buckets
    )


def _check_others(key: str, default_value: int | None, num_oov_buckets: int, num_entries: int) -> None:
    if num_oov_buckets and default_value is not None:
        raise ValueError(f"Can't specify both num_oov_buckets and default_value in {key}.")
    if num_oov_buckets < 0:
        raise ValueError(f"Invalid num_oov_buckets {num_oov_buckets} in {key}.")
    if default_value is not None and not -1 <= default_value < num_entries:
        raise ValueError(f"default_value {default_value} of {key} is neither -1 nor one of {num_entries} categories.")


def _read_lines(path: str, num: int | None) -> list[str]:
    with Path(path).open(encoding="utf-8", errors="surrogateescape", newline="\n") as file:
        return [line.rstrip("\n").replace("\r", "") for line in islice(file, num)]
