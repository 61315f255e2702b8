"""``DenseFeatures`` and ``LinearModel``, and the layers that they are made of."""

import copy
import pickle

import pytest
import torch

import torchstrategy as ts
from torchstrategy.estimator.feature_column.layers import InputLayer, LinearLayer

fc = ts.feature_column


def price():
    return fc.numeric_column("price")


def wire():
    return fc.categorical_column_with_hash_bucket("wire", 4)


def fill(model, **values):
    """Set parameters, each named by its column."""
    with torch.no_grad():
        for column, value in values.items():
            name = f"linear_model/{column}" if column == "bias_weights" else f"linear_model/{column}/weights"
            model._parameters[name].copy_(torch.tensor(value))
    return model


def test_dense_and_sparse_columns_and_bias():
    model = fill(fc.LinearModel([wire(), price()]), wire=[[10.0], [100.0], [1000.0], [10000.0]], bias_weights=[5.0])
    fill(model, price=[[10.0]])
    features = {"wire": [["omar"], ["stringer", "marlo"]], "price": torch.tensor([1.0, 5.0])}
    assert model(features).tolist() == [[1015.0], [10065.0]]


def test_names_shapes_and_first_values():
    model = fc.LinearModel([fc.bucketized_column(price(), [0, 1]), wire(), fc.numeric_column("pair", shape=2)], units=3)
    assert {name: list(parameter.shape) for name, parameter in model.named_parameters()} == {
        "linear_model/pair/weights": [2, 3],
        "linear_model/price_bucketized/weights": [3, 3],
        "linear_model/wire/weights": [4, 3],
        "linear_model/bias_weights": [3],
    }
    assert not any(parameter.any() for parameter in model.parameters())
    assert list(model.state_dict()) == [name for name, _ in model.named_parameters()]


def test_several_units():
    model = fill(fc.LinearModel(price(), units=3), price=[[1.0, 2.0, 3.0]], bias_weights=[0.0, 0.0, 7.0])
    assert model({"price": [2]}).tolist() == [[2.0, 4.0, 13.0]]


@pytest.mark.parametrize(("combiner", "expected"), [("sum", 10001.0), ("mean", 5000.5), ("sqrtn", 10001.0 / 2**0.5)])
def test_sparse_combiner(combiner, expected):
    model = fill(fc.LinearModel(wire(), sparse_combiner=combiner), wire=[[1.0], [100.0], [1000.0], [10000.0]])
    out = model({"wire": [["stringer", "marlo"], []]})
    assert out.flatten().tolist() == pytest.approx([expected, 0.0])


def test_embedding_in_a_linear_model():
    ids = fc.categorical_column_with_identity("aaa", 3)
    table = torch.tensor([[1.0, 2.0], [3.0, 5.0], [7.0, 11.0]])
    model = fc.LinearModel(fc.embedding_column(ids, 2, initializer=lambda x: x.copy_(table)))
    assert [name for name, _ in model.named_parameters()] == [
        "linear_model/aaa_embedding/embedding_weights",
        "linear_model/aaa_embedding/weights",
        "linear_model/bias_weights",
    ]
    fill(model, aaa_embedding=[[4.0], [6.0]])
    assert model({"aaa": [[2], [0, 1], [], [1]]}).flatten().tolist() == [94.0, 29.0, 0.0, 42.0]


def test_dense_features_stand_in_the_order_of_names():
    b, a = fc.numeric_column("b", shape=2), fc.numeric_column("a")
    layer = fc.DenseFeatures([b, a])
    assert layer.output_size == 3
    assert layer({"a": [1], "b": torch.tensor([[2.0, 3.0]])}).tolist() == [[1.0, 2.0, 3.0]]
    assert fc.DenseFeatures(a)({"a": [1]}).tolist() == [[1.0]]
    assert fc.DenseFeatures(iter([a]))({"a": [1]}).tolist() == [[1.0]]


def test_columns_of_several_dimensions_are_flattened():
    layer = fc.DenseFeatures(fc.bucketized_column(fc.numeric_column("a", shape=2), [0]))
    assert layer({"a": torch.tensor([[-1.0, 1.0]])}).tolist() == [[1.0, 0.0, 0.0, 1.0]]


@pytest.mark.parametrize("layer", [fc.DenseFeatures, fc.LinearModel])
def test_columns_are_checked(layer):
    with pytest.raises(ValueError, match="feature_columns must not be empty"):
        layer([])
    with pytest.raises(ValueError, match=r"Items of feature_columns must be a FeatureColumn. Given \(type str\): N"):
        layer("Nothing")
    with pytest.raises(ValueError, match="Expected feature_columns to be iterable, found dict"):
        layer({"a": price()})
    with pytest.raises(ValueError, match="Duplicate feature column name found for columns"):
        layer([price(), price()])
    with pytest.raises(ValueError, match=r"'a b' and 'a.b' would have variables of the same name"):
        layer([fc.numeric_column("a.b"), fc.numeric_column("a b")])


def test_dense_features_need_dense_columns():
    with pytest.raises(ValueError, match="You can wrap a categorical column with an embedding_column or ind"):
        fc.DenseFeatures([wire()])


def test_linear_model_arguments():
    with pytest.raises(ValueError, match=r"units must be positive. Received: 0"):
        fc.LinearModel(price(), units=0)
    with pytest.raises(ValueError, match=r"sparse_combiner must be one of 'mean', 'sqrtn', 'sum'. Received: 'max'"):
        fc.LinearModel(price(), sparse_combiner="max")

    class Other(fc.FeatureColumn):
        name = "other"

    with pytest.raises(ValueError, match="must be either a DenseColumn or CategoricalColumn"):
        fc.LinearModel(Other())


@pytest.mark.parametrize("layer", [fc.DenseFeatures, fc.LinearModel])
def test_features_are_checked(layer):
    model = layer([price(), fc.numeric_column("size")])
    with pytest.raises(ValueError, match="Feature size is not in features dictionary"):
        model({"price": [1.0]})
    with pytest.raises(ValueError, match="Expected features to be a dictionary"):
        model(torch.zeros(2, 1))
    message = r"Batch size .* must be same. Batch size of columns \(price, size\): \(1, 2\)"
    with pytest.raises(ValueError, match=message):
        model({"price": [1.0], "size": [1.0, 2.0]})


def test_names_without_dots():
    model = fc.LinearModel(fc.numeric_column("petal.length (cm)"))
    assert next(iter(model.state_dict())) == "linear_model/petal_length__cm_/weights"


def test_a_feature_is_transformed_once():
    calls = []
    column = fc.numeric_column("price", normalizer_fn=lambda x: calls.append(1) or x)
    fc.LinearModel([column, fc.bucketized_column(column, [0])])({"price": [1.0]})
    assert len(calls) == 1


def test_one_module_with_the_variables_of_two_layers():
    linear = LinearLayer([wire()], units=2, scope="linear/linear_model")
    deep = InputLayer([fc.indicator_column(wire()), fc.embedding_column(wire(), 2)], scope="dnn/input_layer")
    variables = {**linear.make_parameters(), **deep.make_parameters()}
    assert {name: list(value.shape) for name, value in variables.items()} == {
        "linear/linear_model/wire/weights": [4, 2],
        "linear/linear_model/bias_weights": [2],
        "dnn/input_layer/wire_embedding/embedding_weights": [4, 2],
    }
    assert deep.output_size == 6
    assert linear({"wire": ["omar"]}, variables).tolist() == [[0.0, 0.0]]
    assert deep({"wire": ["omar"]}, variables).shape == (1, 6)
    with pytest.raises(KeyError, match=r"There is no variable 'linear/linear_model/bias_weights'"):
        linear({"wire": ["omar"]}, {})


def columns():
    """Return columns of every kind that can be pickled."""
    city = fc.categorical_column_with_vocabulary_list("city", ["Bonn", "Ulm"])
    return [
        price(),
        fc.bucketized_column(price(), [0, 1]),
        fc.indicator_column(fc.weighted_categorical_column(city, "share")),
        fc.embedding_column(fc.crossed_column([city, "wire"], 10), 2),
        fc.indicator_column(fc.categorical_column_with_identity("day", 7)),
        fc.embedding_column(wire(), 2),
    ]


FEATURES = {
    "price": torch.tensor([0.5, 2.0]),
    "city": ["Ulm", "Bonn"],
    "share": torch.tensor([0.5, 1.0]),
    "wire": ["omar", "marlo"],
    "day": torch.tensor([3, 6]),
}


def test_columns_can_be_pickled_and_compared():
    assert pickle.loads(pickle.dumps(columns())) == columns()
    assert len(set(columns())) == 6


@pytest.mark.parametrize("remake", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_models_can_be_copied(remake):
    model = fc.DenseFeatures(columns())
    copied = remake(model)
    assert torch.equal(copied(FEATURES), model(FEATURES))
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert not torch.equal(copied(FEATURES), model(FEATURES))


def test_copies_share_columns():
    model = fc.LinearModel(fc.categorical_column_with_vocabulary_list("city", ["Bonn", "Ulm"]))
    assert copy.deepcopy(model)._layer.columns[0] is model._layer.columns[0]


def test_double_precision():
    model = fc.LinearModel([price(), wire()]).double()
    assert model({"price": [1.0], "wire": ["omar"]}).dtype == torch.float64


@pytest.mark.slow
def test_without_strings_a_model_can_be_exported():
    day = fc.categorical_column_with_identity("day", 7)
    code = fc.categorical_column_with_vocabulary_list("code", [30, 10, 20])
    cross = fc.crossed_column([day, code, "raw"], 100)
    parts = [price(), fc.bucketized_column(price(), [0, 1]), day, code, cross, fc.embedding_column(day, 2)]
    model = fc.LinearModel(parts)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    batch = {
        "price": torch.tensor([0.5, 2.0]),
        "day": torch.tensor([[1, -1], [6, 0]]),
        "code": torch.tensor([10, 99]),
        "raw": torch.tensor([5, 6]),
    }
    size = torch.export.Dim("batch")
    larger = {key: torch.cat([value, value.flip(0), value]) for key, value in batch.items()}
    with torch.no_grad():
        program = torch.export.export(model, (batch,), dynamic_shapes=({key: {0: size} for key in batch},))
        torch.testing.assert_close(program.module()(larger), model(larger))


def test_strings_alone_go_where_the_variables_are():
    layer = InputLayer([fc.indicator_column(wire())])
    assert layer({"wire": ["omar"]}, {"kernel": torch.zeros(1, device="meta")}).device.type == "meta"
    with torch.device("meta"):
        assert layer({"wire": ["omar"]}, {}).device.type == "meta"


def test_another_default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        layer = fc.DenseFeatures([price(), fc.indicator_column(wire()), fc.embedding_column(wire(), 2)])
        assert layer({"price": [1.0], "wire": ["omar"]}).dtype == torch.float64
        assert fc.DenseFeatures(fc.bucketized_column(price(), [0]))({"price": [1.0]}).dtype == torch.float32
        assert fc.LinearModel([price(), wire()])({"price": [1.0], "wire": ["omar"]}).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
