"""Identity and hashed columns."""

import numpy as np
import pytest
import torch

import torchstrategy as ts
from torchstrategy.estimator.feature_column.features import Features

fc = ts.feature_column


def ids_of(column, value):
    """Return each example's categories, without those that are missing or unknown."""
    ids = column.ids(Features({column.key: value}))
    assert ids.values.dtype == torch.int64
    valid = ids.present & (ids.values >= 0)
    return [row[mask].tolist() for row, mask in zip(ids.values, valid, strict=True)]


def test_identity():
    column = fc.categorical_column_with_identity("a", 3)
    assert (column.name, column.num_buckets) == ("a", 3)
    assert ids_of(column, torch.tensor([[0, 2], [1, -1]])) == [[0, 2], [1]]
    assert ids_of(column, [[0, 1], [], [2]]) == [[0, 1], [], [2]]
    assert ids_of(column, np.array([-7])) == [[]]


def test_identity_out_of_range():
    with pytest.raises(ValueError, match="Feature a holds 3, but its column has num_buckets=3 and no default_value"):
        ids_of(fc.categorical_column_with_identity("a", 3), [0, 3])
    column = fc.categorical_column_with_identity("a", 3, default_value=1)
    assert ids_of(column, [3, -2, 0, -1]) == [[1], [1], [0], []]  # -1 says that there is no value


def test_identity_needs_integers():
    with pytest.raises(ValueError, match="Invalid input, not integer"):
        ids_of(fc.categorical_column_with_identity("a", 3), [0.0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, 3), "key must be a string"),
        (("a", 0), "num_buckets 0 < 1, column_name a"),
        (("a", 3, 3), r"default_value 3 not in range \[0, 3\), column_name a"),
        (("a", 3, -1), r"default_value -1 not in range \[0, 3\), column_name a"),
    ],
)
def test_identity_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        fc.categorical_column_with_identity(*arguments)


def test_hashed_strings_have_buckets_of_tf():
    column = fc.categorical_column_with_hash_bucket("wire", 10)
    assert (column.name, column.num_buckets, column.dtype) == ("wire", 10, str)
    assert ids_of(column, [["omar"], ["stringer", "marlo"]]) == [[6], [4, 1]]
    assert ids_of(column, np.array([b"omar", b""])) == [[6], []]
    four = fc.categorical_column_with_hash_bucket("wire", 4)
    assert ids_of(four, ["marlo", "skywalker", "omar"]) == [[3], [2], [2]]


def test_hashed_integers_have_buckets_of_tf():
    column = fc.categorical_column_with_hash_bucket("wire", 10, dtype=torch.int64)
    assert ids_of(column, torch.tensor([[101, -1], [201, 301]], dtype=torch.int32)) == [[3], [7, 5]]


def test_hashed_dtype_must_match():
    with pytest.raises(ValueError, match=r"Invalid input, not integer. key: wire, dtype: str"):
        ids_of(fc.categorical_column_with_hash_bucket("wire", 10, dtype=torch.int64), ["omar"])
    with pytest.raises(ValueError, match=r"must be compatible. key: wire, column dtype: str"):
        ids_of(fc.categorical_column_with_hash_bucket("wire", 10), [101])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((("a",), 10), "key must be a string"),
        (("a", None), "hash_bucket_size must be set. key: a"),
        (("a", 0), "hash_bucket_size must be at least 1"),
        (("a", 10, torch.float32), "dtype must be string or integer"),
        (("a", 10, torch.bool), "dtype must be string or integer"),
        (("a", 10, int), "dtype must be string or integer"),
    ],
)
def test_hashed_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        fc.categorical_column_with_hash_bucket(*arguments)


@pytest.mark.parametrize(
    "make",
    [
        lambda: fc.categorical_column_with_identity("a", "3"),
        lambda: fc.categorical_column_with_hash_bucket("a", 2.5),
        lambda: fc.crossed_column(["a", "b"], "3"),
        lambda: fc.embedding_column(fc.categorical_column_with_identity("a", 3), 2.0),
        lambda: fc.LinearModel(fc.numeric_column("a"), units="1"),
    ],
)
def test_numbers_of_things_are_integers(make):
    with pytest.raises(TypeError, match=r"must be an integer. Received: .* of type"):
        make()
