"""Numeric and bucketized columns."""

import numpy as np
import pytest
import torch

import torchstrategy as ts
from torchstrategy.estimator.feature_column.features import Features

fc = ts.feature_column


def test_defaults():
    column = fc.numeric_column("a")
    assert (column.key, column.name, column.shape, column.default_value) == ("a", "a", (1,), None)
    assert (column.dtype, column.normalizer_fn) == (torch.float32, None)


@pytest.mark.parametrize(
    "value", [torch.tensor([1, 2]), [1, 2], [1.0, 2.0], np.array([[1.0], [2.0]]), torch.tensor([[1.0], [2.0]]).double()]
)
def test_values_become_float32(value):
    dense = fc.numeric_column("a").get_dense({"a": value})
    assert dense.dtype == torch.float32
    assert dense.tolist() == [[1.0], [2.0]]


def test_shape():
    column = fc.numeric_column("a", shape=[2, 3])
    assert column.variable_shape == (2, 3)
    assert column.get_dense({"a": torch.arange(12).reshape(2, 2, 3)}).shape == (2, 2, 3)
    assert fc.numeric_column("a", shape=3).shape == (3,)
    with pytest.raises(ValueError, match=r"Feature a has values of shape \[3\] for each example.* shape=\(2, 3\)"):
        column.get_dense({"a": torch.zeros(2, 3)})


def test_lists_of_rows():
    assert fc.numeric_column("a", shape=2).get_dense({"a": [[1, 2], [3.5, 4]]}).tolist() == [[1.0, 2.0], [3.5, 4.0]]
    pair = fc.numeric_column("a", shape=2, default_value=[7, 8])
    assert pair.get_dense({"a": [[1, None], [None, 4]]}).tolist() == [[1.0, 8.0], [7.0, 4.0]]
    nested = [[[1, 2], [3, 4]]]
    assert fc.numeric_column("a", shape=(2, 2)).get_dense({"a": nested}).tolist() == [[[1.0, 2.0], [3.0, 4.0]]]


def test_normalizer_gets_the_values_as_they_are():
    seen = []
    column = fc.numeric_column("a", shape=2, normalizer_fn=lambda x: seen.append(x) or x * 2)
    assert column.get_dense({"a": torch.tensor([[1, 2]])}).tolist() == [[2.0, 4.0]]
    assert seen[0].dtype == torch.int64


@pytest.mark.parametrize("normalizer_fn", [lambda _: 3, lambda x: x.sum()])
def test_normalizer_must_keep_the_shape(normalizer_fn):
    with pytest.raises(ValueError, match=r"normalizer_fn of a must return a tensor .*, \[2, 1\]"):
        fc.numeric_column("a", normalizer_fn=normalizer_fn).get_dense({"a": [1, 2]})


def test_one_number_without_a_dimension():
    column = fc.numeric_column("a", shape=())
    assert fc.DenseFeatures(column)({"a": [1, 2]}).tolist() == [[1.0], [2.0]]


def test_missing_values_take_the_default():
    column = fc.numeric_column("a", default_value=7)
    assert column.get_dense({"a": [1, None, 3]}).tolist() == [[1.0], [7.0], [3.0]]
    assert column.get_dense({"a": [None, None]}).tolist() == [[7.0], [7.0]]
    pair = fc.numeric_column("a", shape=2, default_value=[7.0, 8.0])
    assert pair.get_dense({"a": np.array([[1.5, None], [None, 2.5]], dtype=object)}).tolist() == [
        [1.5, 8.0],
        [7.0, 2.5],
    ]
    with pytest.raises(ValueError, match=r"Feature a has no value in 1 places. Fill them, or give numeric_column"):
        fc.numeric_column("a").get_dense({"a": [1, None]})
    with pytest.raises(ValueError, match="Feature a is not in features dictionary"):
        column.get_dense({"b": [1]})


def test_batch_without_examples():
    assert fc.numeric_column("a", shape=3).get_dense({"a": []}).shape == (0, 3)
    assert fc.numeric_column("a", shape=3).get_dense({"a": torch.zeros(0, 3)}).shape == (0, 3)


def test_strings_and_ragged_values_are_refused():
    with pytest.raises(ValueError, match="holds strings, but its column is numeric"):
        fc.numeric_column("a").get_dense({"a": ["x"]})
    with pytest.raises(ValueError, match=r"Sparse and ragged values are not supported. key: a"):
        fc.numeric_column("a").get_dense({"a": [[1], [1, 2]]})


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"key": 1}, ValueError, "key must be a string"),
        ({"key": "a", "shape": [1.5]}, TypeError, "shape dimensions must be integer"),
        ({"key": "a", "shape": [0]}, ValueError, "shape dimensions must be greater than 0"),
        ({"key": "a", "dtype": torch.bool}, ValueError, "dtype must be convertible to float"),
        ({"key": "a", "dtype": str}, ValueError, "dtype must be convertible to float"),
        ({"key": "a", "normalizer_fn": 3}, TypeError, "normalizer_fn must be a callable"),
        ({"key": "a", "default_value": "x"}, TypeError, "default_value must be compatible with dtype"),
        ({"key": "a", "default_value": 1.5, "dtype": torch.int32}, TypeError, "compatible with dtype"),
        ({"key": "a", "default_value": [1.0, 2.0]}, ValueError, "shape of default_value must be equal to given shape"),
    ],
)
def test_numeric_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        fc.numeric_column(**arguments)


def price(shape=1, boundaries=(0, 2, 4, 6)):
    return fc.bucketized_column(fc.numeric_column("price", shape=shape), boundaries)


def test_buckets():
    column = price()
    assert (column.name, column.num_buckets, column.variable_shape) == ("price_bucketized", 5, (1, 5))
    features = Features({"price": [-1.0, 0.0, 1.0, 2.0, 6.0, 7.0, float("nan")]})
    ids = column.ids(features)
    assert ids.values.flatten().tolist() == [0, 1, 1, 2, 4, 4, 4]
    assert ids.present.all()
    assert column.dense(features, {}).shape == (7, 1, 5)


def test_each_number_has_buckets_of_its_own():
    column = price(2)
    features = Features({"price": torch.tensor([[-1.0, 1.0], [5.0, 6.0]])})
    assert column.num_buckets == 10
    assert column.ids(features).values.tolist() == [[0, 6], [3, 9]]
    assert column.dense(features, {}).argmax(-1).tolist() == [[0, 1], [3, 4]]


@pytest.mark.parametrize(
    ("source", "boundaries", "message"),
    [
        ("a", [0], "must be a column generated with numeric_column"),
        (fc.numeric_column("a", shape=[2, 3]), [0], "must be one-dimensional column"),
        (fc.numeric_column("a"), [], "boundaries must not be empty"),
        (fc.numeric_column("a"), None, "boundaries must not be empty"),
        (fc.numeric_column("a"), 3, "boundaries must not be empty"),
        (fc.numeric_column("a"), [1, 0], "boundaries must be a sorted list"),
        (fc.numeric_column("a"), [1, 1], "boundaries must be a sorted list"),
    ],
)
def test_bucketized_arguments(source, boundaries, message):
    with pytest.raises(ValueError, match=message):
        fc.bucketized_column(source, boundaries)
