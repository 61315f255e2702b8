"""Metrics of a compiled model: Keras' names, one result over all replicas, weights for those that ask for them."""

import functools
import pickle

import pytest
import torch
import torchmetrics
from torch import nn
from torch.nn import functional as F

import torchstrategy as ts
from torchstrategy import losses
from torchstrategy.fit.compiled_loss import CompiledLoss
from torchstrategy.fit.compiled_metrics import CompiledMetrics

NUM_EXAMPLES = 10


def cpus(count):
    return [f"cpu:{i}" for i in range(count)]


def spread(*shape):
    count = torch.Size((NUM_EXAMPLES, *shape)).numel()
    return torch.sin(torch.arange(float(count))).reshape(NUM_EXAMPLES, *shape)


CLASS_IDS = torch.tensor([0, 1, 2, 1, 0, 2, 2, 1, 0, 1])
WEIGHTS = torch.arange(NUM_EXAMPLES) % 3 + 1.0


def my_distance(y_true, y_pred):
    return (y_true - y_pred).abs().amax(-1)


def results(compiled, y, y_pred, sample_weight=None):
    compiled.update_state(y, y_pred, sample_weight)
    return {name: round(float(metric.compute()), 5) for name, metric in compiled.named().items()}


def on_replicas(num_replicas, make, tensors, batch_size=4):
    """Return the results over all replicas after the batches of an epoch."""
    strategy = ts.MirroredStrategy(cpus(num_replicas))
    with strategy.scope():
        compiled = make()
    dataset = strategy.experimental_distribute_dataset(
        [[tensor[i : i + batch_size] for tensor in tensors] for i in range(0, NUM_EXAMPLES, batch_size)]
    )
    for batch in dataset:
        strategy.run(lambda *parts: compiled.update_state(*parts), args=tuple(batch))
    return {name: metric.compute() for name, metric in compiled.named().items()}


@pytest.mark.parametrize("num_replicas", [1, 2, 4])
def test_results_are_those_of_all_examples(num_replicas):
    y, y_pred = spread(2), spread(2).cos()

    def make():
        metrics = [
            "mae",
            "RootMeanSquaredError",
            my_distance,
            torchmetrics.MeanSquaredError(),
            ts.metrics.Precision(0.0),
        ]
        return CompiledMetrics(metrics, ["mse", my_distance])

    found = on_replicas(num_replicas, make, (y, y_pred, WEIGHTS))
    weighted = (y - y_pred).square().mean(1)
    expected = {
        "mae": F.l1_loss(y_pred, y),
        "RootMeanSquaredError": F.mse_loss(y_pred, y).sqrt(),
        "my_distance": my_distance(y, y_pred).mean(),
        "mean_squared_error": F.mse_loss(y_pred, y),
        "mse": (weighted * WEIGHTS).sum() / WEIGHTS.sum(),
        "weighted_my_distance": (my_distance(y, y_pred) * WEIGHTS).sum() / WEIGHTS.sum(),
    }
    precision = found.pop("precision")
    assert 0 < precision < 1
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


@pytest.mark.parametrize("num_replicas", [1, 3])
def test_metrics_that_were_made_outside_the_scope(num_replicas):
    metrics = [ts.metrics.MeanAbsoluteError(name="own"), torchmetrics.MeanAbsoluteError(),
               torchmetrics.MetricCollection({"first": torchmetrics.MeanSquaredError()}, prefix="all_")]  # fmt: skip
    y, y_pred = spread(1), spread(1).cos()
    found = on_replicas(num_replicas, lambda: CompiledMetrics(metrics), (y, y_pred))
    assert list(found) == ["own", "mean_absolute_error", "all_first"]
    torch.testing.assert_close(found["own"], F.l1_loss(y_pred, y))
    torch.testing.assert_close(found["mean_absolute_error"], F.l1_loss(y_pred, y))
    torch.testing.assert_close(found["all_first"], F.mse_loss(y_pred, y))


def test_a_metric_of_another_strategy_is_refused():
    with ts.MirroredStrategy(cpus(2)).scope():
        metric = ts.metrics.MeanAbsoluteError()
    with ts.MirroredStrategy(cpus(2)).scope(), pytest.raises(ValueError, match="the scope of another strategy"):
        CompiledMetrics([metric])


# Names, as Keras gives them


def test_names():
    """What Keras 3.15 prints for the same arguments."""
    compiled = CompiledMetrics(
        ["mae", my_distance, "MeanAbsoluteError", ts.metrics.MeanAbsoluteError(), "mae"], ["mae", "mse", my_distance]
    )
    names = ["mae", "my_distance", "MeanAbsoluteError", "mean_absolute_error", "mae_1", "weighted_mae", "mse",
             "weighted_my_distance"]  # fmt: skip
    assert list(compiled.named()) == names
    found = results(
        compiled, torch.zeros(4, 1), torch.tensor([[1.0], [2.0], [3.0], [4.0]]), torch.tensor([4.0, 0, 0, 1])
    )
    assert list(found) == names
    assert found["mae"] == found["mae_1"] == 2.5
    assert found["weighted_mae"] == 1.6
    assert found["mse"] == 4.0


def test_metrics_without_weights_in_the_data():
    found = results(CompiledMetrics([], ["mae"]), torch.zeros(2, 1), torch.ones(2, 1))
    assert found == {"mae": 1.0}


@pytest.mark.parametrize("spec", ["mae", ["mae"], ("mae",), [["mae"]], {"x": "mae"}, {"x": ["mae"]}])
def test_one_output(spec):
    compiled = CompiledMetrics(spec)
    assert list(compiled.named()) == ["mae"]
    assert results(compiled, torch.zeros(2, 1), torch.ones(2, 1)) == {"mae": 1.0}


def test_one_output_in_a_container():
    assert results(CompiledMetrics(["mae"]), {"x": torch.zeros(2, 1)}, {"x": torch.ones(2, 1)}) == {"mae": 1.0}
    assert results(CompiledMetrics([["mae"]]), [torch.zeros(2, 1)], [torch.ones(2, 1)]) == {"mae": 1.0}


TWO = {"b": torch.ones(2, 1), "a": torch.full((2, 1), 2.0)}


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (["mae", "mse"], {"output_0_mae": 1.0, "output_1_mse": 4.0}),
        ([["mae"], ["mae", "mse"]], {"output_0_mae": 1.0, "output_1_mae": 2.0, "output_1_mse": 4.0}),
        ([None, "mae"], {"output_1_mae": 2.0}),
        (None, {}),
    ],
)
def test_several_outputs_in_a_list(spec, expected):
    compiled = CompiledMetrics(spec)
    assert results(compiled, [torch.zeros(2, 1)] * 2, list(TWO.values())) == expected


def test_several_outputs_in_a_dict():
    y = {"a": torch.zeros(2, 1), "b": torch.zeros(2, 1)}
    compiled = CompiledMetrics({"a": ["mae", "mse"]}, {"a": "mae", "b": ["mae"]})
    weights = {"a": torch.tensor([1.0, 0.0])}
    assert results(compiled, y, TWO, weights) == {
        "a_mae": 2.0,
        "a_mse": 4.0,
        "b_mae": 1.0,
        "a_weighted_mae": 2.0,
    }
    guessed = CompiledMetrics({"a": ["mae"], "b": "mse"}, [["mae"], None])
    assert list(guessed.named()) == ["a_mae", "b_mse", "output_0_mae"]


@pytest.mark.parametrize(
    ("metrics", "loss", "expected"),
    [
        (["mae", "mse"], "mse", ["mae", "mse"]),
        (["mae", "mse"], ["mse", "mse"], ["output_0_mae", "output_1_mse"]),
        ({"a": "mae"}, {"a": "mse"}, ["mae"]),
        ({"a": "mae"}, {"a": "mse", "b": "mse"}, ["a_mae"]),
    ],
)
def test_names_before_the_first_batch(metrics, loss, expected):
    assert list(CompiledMetrics(metrics, None, CompiledLoss(loss)).named()) == expected


def test_weights_of_all_outputs():
    y_pred = [torch.tensor([[1.0], [3.0]]), torch.tensor([[0.0], [2.0]])]
    found = results(
        CompiledMetrics([[], []], [["mae"], ["mae"]]), [torch.zeros(2, 1)] * 2, y_pred, torch.tensor([1.0, 0.0])
    )
    assert found == {"output_0_mae": 1.0, "output_1_mae": 0.0}


@pytest.mark.parametrize(
    ("spec", "y", "y_pred", "message"),
    [
        (
            ["mae"],
            [0, 0],
            [0, 0],
            r"metrics= is one list, but the model has 2 outputs.*metrics=\[\['mae'\], \['mae'\]\]",
        ),
        (["mae", "mse"], {"a": 0, "b": 0}, {"a": 0, "b": 0}, r"metrics=\{'a': \['mae'\], 'b': \['mae'\]\}"),
        ({"c": "mae"}, {"a": 0, "b": 0}, {"a": 0, "b": 0}, "Not an output: 'c'"),
        ([["mae"]], [0, 0], [0, 0], "metrics= is a list of 1"),
        (["mae", "mae"], {"a": 0}, [0, 0], "y must have the structure of the model's outputs"),
        (["mae"], None, 0, "metrics= are given, but the data has no labels"),
    ],
)
def test_outputs_that_do_not_fit(spec, y, y_pred, message):
    def fill(value):
        if isinstance(value, dict):
            return {key: fill(part) for key, part in value.items()}
        return (
            [fill(part) for part in value] if isinstance(value, list) else None if value is None else torch.zeros(2, 1)
        )

    with pytest.raises(ValueError, match=message):
        CompiledMetrics(spec).update_state(fill(y), fill(y_pred))


# "accuracy" and "crossentropy"


@pytest.mark.parametrize("name", ["accuracy", "acc"])
@pytest.mark.parametrize(
    ("y", "y_pred"),
    [
        ([0, 1, 1], [[0.9, 0.1, 0.0], [0.2, 0.8, 0.0], [0.6, 0.4, 0.0]]),
        ([[0], [1], [1]], [[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]]),
        ([[1, 0], [0, 1], [0, 1]], [[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]]),
        ([[0], [1], [1]], [[0.1], [0.8], [0.4]]),
        ([0, 1, 1], [[0.1], [0.8], [0.4]]),
        ([0, 1, 1], [0.1, 0.8, 0.4]),
    ],
)
def test_accuracy_follows_the_shapes(name, y, y_pred):
    found = results(CompiledMetrics([name]), torch.tensor(y), torch.tensor(y_pred))
    assert found == {name: pytest.approx(2 / 3, abs=1e-5)}


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ("bce", 0.5),
        (losses.BinaryCrossentropy(from_logits=True), 1.0),
        (nn.BCEWithLogitsLoss(), 1.0),
        (functools.partial(losses.binary_crossentropy, from_logits=True), 1.0),
        ([nn.BCEWithLogitsLoss()], 1.0),
        ({"x": nn.BCEWithLogitsLoss()}, 1.0),
        (None, 0.5),
    ],
)
@pytest.mark.parametrize("name", ["accuracy", "binary_accuracy"])
def test_the_border_of_logits_is_zero(loss, expected, name):
    compiled = CompiledMetrics([name], None, CompiledLoss(loss))
    assert results(compiled, torch.tensor([[1.0], [0.0]]), torch.tensor([[0.3], [-0.3]])) == {name: expected}


def test_auc_of_logits():
    compiled = CompiledMetrics(["AUC"], None, CompiledLoss(nn.BCEWithLogitsLoss()))
    y, y_pred = torch.tensor([[1.0], [0.0], [1.0]]), torch.tensor([[3.0], [-3.0], [-4.0]])
    assert results(compiled, y, y_pred) == results(CompiledMetrics(["AUC"]), y, y_pred.sigmoid())


def test_logits_of_several_outputs():
    loss = CompiledLoss({"a": nn.BCEWithLogitsLoss(), "b": "bce"})
    y, y_pred = torch.tensor([[1.0], [0.0]]), torch.tensor([[0.3], [0.2]])
    compiled = CompiledMetrics({"a": ["accuracy"], "b": "accuracy"}, None, loss)
    assert results(compiled, {"a": y, "b": y}, {"a": y_pred, "b": y_pred - 0.1}) == {
        "a_accuracy": 0.5,
        "b_accuracy": 0.5,
    }
    in_a_list = CompiledMetrics(["accuracy", "accuracy"], None, CompiledLoss([nn.BCEWithLogitsLoss(), "bce"]))
    assert results(in_a_list, [y, y], [y_pred, y_pred]) == {"output_0_accuracy": 0.5, "output_1_accuracy": 0.5}
    assert results(in_a_list, [y, y], [y_pred - 0.25, y_pred]) == {"output_0_accuracy": 0.75, "output_1_accuracy": 0.5}


def test_classes_in_the_second_axis():
    """torch's cross-entropy has the classes there, and accuracy follows it."""
    logits = F.one_hot(torch.tensor([[0, 1, 1], [2, 0, 1]]), 3).float().movedim(-1, 1)
    labels = torch.tensor([[0, 1, 2], [2, 0, 2]])
    compiled = CompiledMetrics(["accuracy", "crossentropy"], None, CompiledLoss(nn.CrossEntropyLoss()))
    found = results(compiled, labels, logits)
    assert found["accuracy"] == pytest.approx(4 / 6, abs=1e-5)
    assert found["crossentropy"] == pytest.approx(F.cross_entropy(logits, labels).item(), abs=1e-5)


@pytest.mark.parametrize("name", ["crossentropy", "ce"])
def test_crossentropy_follows_the_shapes(name):
    probabilities = torch.tensor([[0.25, 0.75], [0.5, 0.5]])
    expected = round(float(-(0.75 * torch.ones(())).log() - torch.tensor(0.5).log()) / 2, 5)
    assert results(CompiledMetrics([name]), torch.tensor([1, 0]), probabilities) == {name: expected}
    assert results(CompiledMetrics([name]), torch.tensor([[0.0, 1.0], [1.0, 0.0]]), probabilities) == {name: expected}
    assert results(CompiledMetrics([name]), torch.tensor([1, 0]), torch.tensor([0.75, 0.5])) == {name: expected}


def test_the_crossentropy_of_logits():
    logits, y = spread(3), CLASS_IDS
    loss = CompiledLoss(nn.CrossEntropyLoss())
    found = results(CompiledMetrics(["sparse_categorical_crossentropy", "accuracy"], None, loss), y, logits)
    assert found["sparse_categorical_crossentropy"] == pytest.approx(F.cross_entropy(logits, y).item(), abs=1e-5)
    assert found["accuracy"] == pytest.approx((logits.argmax(1) == y).double().mean().item(), abs=1e-5)


# What is refused


@pytest.mark.parametrize(
    ("metrics", "weighted", "error", "message"),
    [
        (["accuracyy"], None, ValueError, "metrics='accuracyy' is not known. Did you mean .*'accuracy'"),
        (None, ["maee"], ValueError, "weighted_metrics='maee' is not known"),
        ([3], None, TypeError, "metrics= must be a list of metrics. Received in it: 3 of type int"),
        (
            None,
            [torchmetrics.MeanMetric()],
            ValueError,
            "weighted_metrics= holds MeanMetric, .* takes no sample weights",
        ),
        ([nn.Linear], None, TypeError, "Received in it: <class"),
    ],
)
def test_metrics_that_are_refused(metrics, weighted, error, message):
    with pytest.raises(error, match=message):
        CompiledMetrics(metrics, weighted)


def test_a_function_that_returns_one_number():
    compiled = CompiledMetrics([F.l1_loss])
    message = r"The metric 'l1_loss' of compile\(metrics=\.\.\.\): .*must return one value for each example"
    with pytest.raises(ts.errors.InvalidArgumentError, match=message):
        compiled.update_state(torch.zeros(2, 1), torch.ones(2, 1))


def test_outputs_that_change():
    compiled = CompiledMetrics(["mae"])
    compiled.update_state(torch.zeros(1, 1), torch.zeros(1, 1))
    with pytest.raises(ValueError, match="outputs have changed"):
        compiled.build(None, [torch.zeros(1, 1)])


def test_arguments_are_kept_and_pickled():
    compiled = CompiledMetrics(["accuracy", "bce", my_distance], ["mae"])
    assert compiled.metrics == ["accuracy", "bce", my_distance]
    copy = pickle.loads(pickle.dumps(compiled))
    y, y_pred = torch.tensor([[1.0], [0.0]]), torch.tensor([[0.75], [0.25]])
    assert results(copy, y, y_pred) == results(compiled, y, y_pred)


def test_nothing_to_measure():
    compiled = CompiledMetrics(None)
    assert compiled.is_empty
    compiled.update_state(None, "no tensor")
    compiled.build(None, None)
    assert compiled.named() == {}


def test_metrics_keep_no_graph():
    y_pred = torch.ones(2, 1, requires_grad=True)
    compiled = CompiledMetrics(["mae", torchmetrics.MeanSquaredError()])
    compiled.update_state(torch.zeros(2, 1), y_pred * 2)
    assert all(not metric.compute().requires_grad for metric in compiled.named().values())
