"""Indicator, embedding and weighted columns."""

import math

import numpy as np
import pytest
import torch

import torchstrategy as ts

fc = ts.feature_column
IDS = {"aaa": [[2], [0, 1], [], [1]]}
TABLE = torch.tensor([[1.0, 2.0], [3.0, 5.0], [7.0, 11.0]])


def identity():
    return fc.categorical_column_with_identity("aaa", 3)


def embedding(categorical=None, **options):
    return fc.embedding_column(categorical or identity(), 2, **{"initializer": lambda x: x.copy_(TABLE), **options})


def outputs(column, features):
    return fc.DenseFeatures(column)(features)


def test_indicator_counts():
    column = fc.indicator_column(identity())
    assert (column.name, column.variable_shape) == ("aaa_indicator", (3,))
    out = outputs(column, {"aaa": [[2, 2], [0, 1], []]})
    assert out.dtype == torch.float32
    assert out.tolist() == [[0, 0, 2], [1, 1, 0], [0, 0, 0]]


def test_indicator_leaves_out_unknown_values():
    words = fc.categorical_column_with_vocabulary_list("aaa", ["a", "b"])
    assert outputs(fc.indicator_column(words), {"aaa": ["b", "c", ""]}).tolist() == [[0, 1], [0, 0], [0, 0]]


def test_mean_is_the_default():
    column = embedding()
    assert (column.name, column.variable_shape) == ("aaa_embedding", (2,))
    assert outputs(column, IDS).tolist() == [[7, 11], [2, 3.5], [0, 0], [3, 5]]


def test_other_combiners():
    assert outputs(embedding(combiner="sum"), IDS).tolist() == [[7, 11], [4, 7], [0, 0], [3, 5]]
    expected = torch.tensor([[7, 11], [4 / math.sqrt(2), 7 / math.sqrt(2)], [0, 0], [3, 5]])
    torch.testing.assert_close(outputs(embedding(combiner="sqrtn"), IDS), expected)


def test_max_norm_clips_each_row():
    out = outputs(embedding(max_norm=1.0, combiner="sum"), IDS)
    unit = TABLE / TABLE.norm(dim=1, keepdim=True)
    torch.testing.assert_close(out, torch.stack([unit[2], unit[0] + unit[1], torch.zeros(2), unit[1]]))
    assert torch.equal(outputs(embedding(max_norm=100.0), IDS), outputs(embedding(), IDS))


def test_only_rows_that_are_used_get_gradients():
    layer = fc.DenseFeatures(embedding())
    layer({"aaa": [[0, 1], [-1]]}).sum().backward()
    assert layer._parameters["dense_features/aaa_embedding/embedding_weights"].grad.tolist() == [
        [0.5, 0.5],
        [0.5, 0.5],
        [0.0, 0.0],
    ]


def test_default_initializer():
    torch.manual_seed(0)
    words = fc.categorical_column_with_hash_bucket("w", 2000)
    (weights,) = fc.DenseFeatures(fc.embedding_column(words, 16)).parameters()
    assert weights.shape == (2000, 16)
    assert weights.abs().max() <= 2 / 4
    assert abs(weights.std() - 0.88 / 4) < 0.005  # a normal distribution cut at two deviations has 0.88 of them
    assert abs(weights.mean()) < 0.005


def test_not_trainable():
    (weights,) = fc.DenseFeatures(embedding(trainable=False)).parameters()
    assert not weights.requires_grad


def test_first_values_from_a_checkpoint(tmp_path):
    trained = fc.DenseFeatures(embedding())
    path = ts.train.Checkpoint(model=trained).write(str(tmp_path / "saved"))
    name = "model.dense_features/aaa_embedding/embedding_weights"
    loaded = fc.embedding_column(identity(), 2, ckpt_to_load_from=path, tensor_name_in_ckpt=name)
    assert outputs(loaded, IDS).tolist() == [[7, 11], [2, 3.5], [0, 0], [3, 5]]
    with pytest.raises(ValueError, match=r"has shape \[3, 2\], but aaa_embedding needs \[3, 4\]"):
        fc.DenseFeatures(fc.embedding_column(identity(), 4, ckpt_to_load_from=path, tensor_name_in_ckpt=name))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dimension": None}, "Invalid dimension None"),
        ({"dimension": 0}, "Invalid dimension 0"),
        ({"initializer": 3}, "initializer must be callable if specified. Embedding of column_name: aaa"),
        ({"ckpt_to_load_from": "x"}, "Must specify both `ckpt_to_load_from` and `tensor_name_in_ckpt`"),
        ({"tensor_name_in_ckpt": "x"}, "Must specify both `ckpt_to_load_from` and `tensor_name_in_ckpt`"),
        ({"combiner": "max"}, "combiner must be one of 'mean', 'sqrtn', 'sum'. Received: 'max'"),
        ({"categorical_column": fc.numeric_column("a")}, "must be a categorical column"),
    ],
)
def test_embedding_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        fc.embedding_column(**{"categorical_column": identity(), "dimension": 2, **options})


def test_indicator_needs_a_categorical_column():
    with pytest.raises(ValueError, match="must be a categorical column"):
        fc.indicator_column(fc.numeric_column("a"))


def weighted():
    return fc.weighted_categorical_column(identity(), "w")


WEIGHTED = {"aaa": [[0, 1], [2], []], "w": [[0.5, 2.0], [4.0], []]}


def test_weighted_indicator_adds_weights_up():
    assert weighted().name == "aaa_weighted_by_w"
    assert weighted().num_buckets == 3
    out = outputs(fc.indicator_column(weighted()), {"aaa": [[0, 0], [2]], "w": [[0.5, 1.0], [-4.0]]})
    assert out.tolist() == [[1.5, 0, 0], [0, 0, -4.0]]


def test_weighted_embedding():
    rows = 0.5 * TABLE[0] + 2.0 * TABLE[1]
    mean = outputs(embedding(weighted()), WEIGHTED)
    torch.testing.assert_close(mean, torch.stack([rows / 2.5, TABLE[2], torch.zeros(2)]))
    root = outputs(embedding(weighted(), combiner="sqrtn"), WEIGHTED)
    torch.testing.assert_close(root, torch.stack([rows / math.sqrt(4.25), TABLE[2], torch.zeros(2)]))
    total = outputs(embedding(weighted(), combiner="sum"), WEIGHTED)
    torch.testing.assert_close(total, torch.stack([rows, 4 * TABLE[2], torch.zeros(2)]))


def test_weights_that_are_not_positive_count_in_sums_only():
    features = {"aaa": [[0, 1]], "w": [[-1.0, 2.0]]}
    assert outputs(embedding(weighted()), features).tolist() == TABLE[1:2].tolist()
    assert outputs(embedding(weighted(), combiner="sum"), features).tolist() == (2 * TABLE[1:2] - TABLE[:1]).tolist()


def test_weighted_linear_model():
    model = fc.LinearModel(weighted())
    with torch.no_grad():
        model._parameters["linear_model/aaa_weighted_by_w/weights"].copy_(torch.tensor([[1.0], [10.0], [100.0]]))
    assert model(WEIGHTED).flatten().tolist() == [20.5, 400.0, 0.0]


@pytest.mark.parametrize("weights", [np.array([[0.5, 2.0]]), torch.tensor([[0.5, 2.0]]), [[0.5, 2.0]]])
def test_kinds_of_weights(weights):
    out = outputs(fc.indicator_column(weighted()), {"aaa": torch.tensor([[0, 1]]), "w": weights})
    assert out.tolist() == [[0.5, 2.0, 0.0]]


def test_missing_weights_and_values():
    features = {"aaa": np.array([[0, -1]]), "w": np.array([[None, 2.0]], dtype=object)}
    assert outputs(fc.indicator_column(weighted()), features).tolist() == [[0.0, 0.0, 0.0]]


def test_rows_without_any_value():
    features = {"aaa": [[], []], "w": [[], []]}
    for column in (fc.indicator_column(weighted()), embedding(weighted())):
        assert not outputs(column, features).any()
        assert outputs(column, {"aaa": [], "w": []}).shape == (0, column.variable_shape[0])
    crossed = fc.indicator_column(fc.crossed_column(["aaa", "w"], 3))
    assert outputs(crossed, features).tolist() == [[0.0] * 3] * 2


def test_weights_must_fit():
    column = fc.indicator_column(weighted())
    with pytest.raises(ValueError, match=r"feature w has shape \[1, 1\], but the values of aaa have \[1, 2\]"):
        outputs(column, {"aaa": [[0, 1]], "w": [[0.5]]})
    with pytest.raises(ValueError, match=r"Bad dtype of weights, expected numbers. key: w"):
        outputs(column, {"aaa": [0], "w": ["x"]})
    with pytest.raises(ValueError, match="Feature w is not in features dictionary"):
        outputs(column, {"aaa": [0]})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((fc.numeric_column("a"), "w"), "must be a categorical column"),
        ((identity(), 3), "key must be a string"),
        ((identity(), "w", str), "is not convertible to float"),
    ],
)
def test_weighted_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        fc.weighted_categorical_column(*arguments)
