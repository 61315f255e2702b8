"""Crossed columns: tf's hashes, order and masks."""

import pytest
import torch

import torchstrategy as ts
from torchstrategy.estimator.feature_column.features import Features

fc = ts.feature_column
NUMBERS = {"a": torch.tensor([[-1.0, 0.5], [0.5, 1.0]])}
STRINGS = {key: [[f"{key}A"], [f"{key}B", f"{key}C"]] for key in ("c", "d1", "d2")}


def bucketized():
    return fc.bucketized_column(fc.numeric_column("a", shape=2, dtype=torch.int32), (0, 1))


def rows(column, features):
    ids = column.ids(Features(features))
    return [row[mask].tolist() for row, mask in zip(ids.values, ids.present, strict=True)]


def test_name_does_not_depend_on_the_order():
    inner = fc.crossed_column(["d2", "d1"], 10)
    assert fc.crossed_column([bucketized(), "c", inner], 10).name == "a_bucketized_X_c_X_d1_X_d2"
    assert fc.crossed_column([inner, "c", bucketized()], 15).name == "a_bucketized_X_c_X_d1_X_d2"
    assert fc.crossed_column(["a", "b"], 15).num_buckets == 15


def test_buckets_of_tf():
    crossed = fc.crossed_column([bucketized(), "c"], hash_bucket_size=5, hash_key=5)
    assert rows(crossed, NUMBERS | STRINGS) == [[1, 0], [1, 3, 4, 2]]


def test_nested_crosses_stand_for_what_they_cross():
    inner = fc.crossed_column(["d1", "d2"], 10)
    crossed = fc.crossed_column([bucketized(), "c", inner], hash_bucket_size=15, hash_key=5)
    expected = [[6, 14], [0, 13, 8, 8, 10, 12, 2, 0, 1, 9, 8, 12, 2, 0, 10, 11]]
    assert rows(crossed, NUMBERS | STRINGS) == expected


def test_linear_model_of_tf():
    model = fc.LinearModel([fc.crossed_column([bucketized(), "c"], hash_bucket_size=5, hash_key=5)])
    with torch.no_grad():
        model._parameters["linear_model/a_bucketized_X_c/weights"].copy_(torch.arange(1.0, 6.0)[:, None])
        model._parameters["linear_model/bias_weights"].fill_(0.1)
    assert model(NUMBERS | STRINGS).flatten().tolist() == pytest.approx([3.1, 14.1])


def test_dense_features_come_last():
    text = {"c": ["x", "y"]}
    first = fc.crossed_column(["c", bucketized()], 1000)
    last = fc.crossed_column([bucketized(), "c"], 1000)
    assert rows(first, NUMBERS | text) == rows(last, NUMBERS | text)
    ragged = {"c": [["x"], ["y"]]}
    assert rows(first, NUMBERS | ragged) != rows(last, NUMBERS | ragged)


def test_what_is_missing():
    crossed = fc.crossed_column(["a", "b"], 1000)
    assert [len(row) for row in rows(crossed, {"a": [["x"], []], "b": [["u", "v"], ["w"]]})] == [2, 0]
    # a dense feature has all its values, empty ones too, as in tf
    assert [len(row) for row in rows(crossed, {"a": ["x", ""], "b": ["u", "v"]})] == [1, 1]
    assert [len(row) for row in rows(crossed, {"a": torch.tensor([1, -1]), "b": ["u", "v"]})] == [1, 1]
    # but columns leave them out, and keep unknown values
    known = fc.categorical_column_with_vocabulary_list("a", ["x"])
    column = fc.crossed_column([known, "b"], 1000)
    assert [len(row) for row in rows(column, {"a": ["x", "", "other"], "b": ["u", "v", "w"]})] == [1, 0, 1]


def test_the_key_changes_the_hash():
    features = {"a": ["x"], "b": ["y"]}
    plain, other, zero = (rows(fc.crossed_column(["a", "b"], 10**9, key), features) for key in (None, 1, 0))
    assert plain != other
    assert plain == zero  # as in tf


def test_integers_and_strings_differ():
    crossed = fc.crossed_column(["a", "b"], 10**9)
    assert rows(crossed, {"a": [1], "b": [2]}) != rows(crossed, {"a": ["1"], "b": ["2"]})
    with pytest.raises(ValueError, match=r"Invalid input, not integer. key: a"):
        rows(crossed, {"a": [1.5], "b": [2]})


def test_weights_are_refused():
    weighted = fc.weighted_categorical_column(fc.categorical_column_with_identity("a", 3), "w")
    crossed = fc.crossed_column([weighted, "b"], 10)
    with pytest.raises(ValueError, match=r"crossed_column does not support weight_tensor.* a_weighted_by_w"):
        rows(crossed, {"a": [1], "w": [1.0], "b": ["x"]})


@pytest.mark.parametrize(
    ("keys", "size", "message"),
    [
        ([], 10, "keys must be a list with length > 1"),
        (["a"], 10, "keys must be a list with length > 1"),
        ("ab", 10, "keys must be a list with length > 1"),
        (["a", fc.numeric_column("c")], 10, "Unsupported key type"),
        (["a", 3], 10, "Unsupported key type"),
        (["a", fc.categorical_column_with_hash_bucket("c", 10)], 10, "hash_bucket is not supported for crossing"),
        (["a", "b"], 0, "hash_bucket_size must be > 1"),
        (["a", "b"], -1, "hash_bucket_size must be > 1"),
        (["a", "b"], None, "hash_bucket_size must be > 1"),
    ],
)
def test_arguments(keys, size, message):
    with pytest.raises(ValueError, match=message):
        fc.crossed_column(keys, size)
