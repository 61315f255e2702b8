"""Every metric under tf's names, over replicas with uneven and empty shares: equal to one that saw all the data."""

import functools
import json
import pickle
import warnings

import pytest
import torch
import torchmetrics

import torchstrategy as ts

NUM_EXAMPLES, BATCH_SIZE, NUM_CLASSES = 11, 5, 4  # with 4 replicas the shares are 2 2 1 0, twice, and 1 0 0 0


class Range(ts.metrics.Metric):
    """A metric as a user writes it."""

    def __init__(self, name=None, dtype=None):
        super().__init__(dtype, name)
        self.low = self.add_weight(initializer=torch.inf, aggregation="min")
        self.high = self.add_weight(initializer=-torch.inf, aggregation="max")
        self.weight = self.add_weight()

    def update_state(self, values, sample_weight):
        self.weight += sample_weight.sum()
        if len(values):
            self.low, self.high = torch.minimum(self.low, values.min()), torch.maximum(self.high, values.max())

    def result(self):
        return torch.stack([self.low, self.high, self.weight]).nan_to_num(posinf=0.0, neginf=0.0)


def binary():
    return torch.rand(NUM_EXAMPLES), torch.rand(NUM_EXAMPLES).round()


def multi_label():
    return torch.rand(NUM_EXAMPLES, NUM_CLASSES), torch.rand(NUM_EXAMPLES, NUM_CLASSES).round()


def one_hot():
    scores, labels = sparse()
    return scores, torch.nn.functional.one_hot(labels, NUM_CLASSES)


def sparse():
    return torch.randn(NUM_EXAMPLES, NUM_CLASSES), torch.randint(NUM_CLASSES, (NUM_EXAMPLES,))


def column():
    scores, labels = sparse()
    return scores, labels[:, None]


def images():
    return torch.randint(NUM_CLASSES, (NUM_EXAMPLES, 2, 3)), torch.randint(NUM_CLASSES, (NUM_EXAMPLES, 2, 3))


def numbers():
    return torch.randn(NUM_EXAMPLES, 3), torch.randn(NUM_EXAMPLES, 3)


def close():
    labels = torch.randn(NUM_EXAMPLES, 3)
    return labels + 0.3 * torch.randn(NUM_EXAMPLES, 3), labels


def values():
    return (torch.randn(NUM_EXAMPLES),)


def squared(y_true, y_pred):
    return (y_true - y_pred).square()


#: How each metric is made, and the function that gives (predictions, labels).
METRICS = {
    "Mean": (lambda: ts.metrics.Mean(dtype="float64"), values),
    "Sum": (lambda: ts.metrics.Sum(dtype="float64"), values),
    "MeanMetricWrapper": (lambda: ts.metrics.MeanMetricWrapper(squared, dtype="float64"), numbers),
    "Accuracy": (lambda: ts.metrics.Accuracy(dtype="float64"), images),
    "BinaryAccuracy": (lambda: ts.metrics.BinaryAccuracy(dtype="float64"), binary),
    "CategoricalAccuracy": (lambda: ts.metrics.CategoricalAccuracy(dtype="float64"), one_hot),
    "SparseCategoricalAccuracy": (lambda: ts.metrics.SparseCategoricalAccuracy(dtype="float64"), column),
    "TopKCategoricalAccuracy": (lambda: ts.metrics.TopKCategoricalAccuracy(2, dtype="float64"), one_hot),
    "SparseTopKCategoricalAccuracy": (lambda: ts.metrics.SparseTopKCategoricalAccuracy(2, dtype="float64"), sparse),
    "MeanSquaredError": (lambda: ts.metrics.MeanSquaredError(dtype="float64"), numbers),
    "MeanAbsoluteError": (lambda: ts.metrics.MeanAbsoluteError(dtype="float64"), binary),
    "RootMeanSquaredError": (lambda: ts.metrics.RootMeanSquaredError(dtype="float64"), numbers),
    "MeanAbsolutePercentageError": (lambda: ts.metrics.MeanAbsolutePercentageError(dtype="float64"), numbers),
    "Precision": (lambda: ts.metrics.Precision([0.3, 0.5], dtype="float64"), binary),
    "Precision top_k": (lambda: ts.metrics.Precision(top_k=2, class_id=1, dtype="float64"), multi_label),
    "Recall": (lambda: ts.metrics.Recall(dtype="float64"), multi_label),
    "TruePositives": (lambda: ts.metrics.TruePositives(dtype="float64"), binary),
    "FalsePositives": (lambda: ts.metrics.FalsePositives(dtype="float64"), binary),
    "TrueNegatives": (lambda: ts.metrics.TrueNegatives(dtype="float64"), binary),
    "FalseNegatives": (lambda: ts.metrics.FalseNegatives(dtype="float64"), binary),
    "AUC": (lambda: ts.metrics.AUC(dtype="float64"), binary),
    "AUC PR": (lambda: ts.metrics.AUC(20, "PR", dtype="float64"), multi_label),
    "AUC labels": (lambda: ts.metrics.AUC(multi_label=True, label_weights=[1, 2, 0, 1], dtype="float64"), multi_label),
    "MeanIoU": (lambda: ts.metrics.MeanIoU(NUM_CLASSES, dtype="float64", ignore_class=3), images),
    "IoU": (lambda: ts.metrics.IoU(NUM_CLASSES, [1], dtype="float64", sparse_y_pred=False), sparse),
    "BinaryIoU": (lambda: ts.metrics.BinaryIoU(dtype="float64"), binary),
    "OneHotIoU": (lambda: ts.metrics.OneHotIoU(NUM_CLASSES, [1, 2], dtype="float64"), one_hot),
    "OneHotMeanIoU": (lambda: ts.metrics.OneHotMeanIoU(NUM_CLASSES, dtype="float64"), one_hot),
    "PrecisionAtRecall": (lambda: ts.metrics.PrecisionAtRecall(0.6, dtype="float64"), binary),
    "RecallAtPrecision": (lambda: ts.metrics.RecallAtPrecision(0.6, dtype="float64"), multi_label),
    "SensitivityAtSpecificity": (lambda: ts.metrics.SensitivityAtSpecificity(0.7, dtype="float64"), multi_label),
    "SpecificityAtSensitivity": (lambda: ts.metrics.SpecificityAtSensitivity(0.7, dtype="float64"), multi_label),
    "F1Score": (lambda: ts.metrics.F1Score("weighted", dtype="float64"), one_hot),
    "FBetaScore": (lambda: ts.metrics.FBetaScore("micro", 2.0, 0.5, dtype="float64"), multi_label),
    "FBetaScore macro": (lambda: ts.metrics.FBetaScore("macro", 0.5, dtype="float64"), one_hot),
    "R2Score": (lambda: ts.metrics.R2Score("variance_weighted_average", 3, dtype="float64"), close),
    "PearsonCorrelation": (lambda: ts.metrics.PearsonCorrelation(dtype="float64"), numbers),
    "ConcordanceCorrelation": (lambda: ts.metrics.ConcordanceCorrelation(dtype="float64"), numbers),
    "CosineSimilarity": (lambda: ts.metrics.CosineSimilarity(dtype="float64"), numbers),
    "LogCoshError": (lambda: ts.metrics.LogCoshError(dtype="float64"), numbers),
    "MeanSquaredLogarithmicError": (lambda: ts.metrics.MeanSquaredLogarithmicError(dtype="float64"), multi_label),
    "BinaryCrossentropy": (lambda: ts.metrics.BinaryCrossentropy(dtype="float64"), binary),
    "CategoricalCrossentropy": (
        lambda: ts.metrics.CategoricalCrossentropy(dtype="float64", from_logits=True, label_smoothing=0.1),
        one_hot,
    ),
    "SparseCategoricalCrossentropy": (
        lambda: ts.metrics.SparseCategoricalCrossentropy(dtype="float64", from_logits=True, ignore_class=2),
        column,
    ),
    "KLDivergence": (lambda: ts.metrics.KLDivergence(dtype="float64"), multi_label),
    "Poisson": (lambda: ts.metrics.Poisson(dtype="float64"), multi_label),
    "Hinge": (lambda: ts.metrics.Hinge(dtype="float64"), binary),
    "SquaredHinge": (lambda: ts.metrics.SquaredHinge(dtype="float64"), multi_label),
    "CategoricalHinge": (lambda: ts.metrics.CategoricalHinge(dtype="float64"), one_hot),
    "Metric": (lambda: Range(dtype="float64"), values),
}


@functools.cache
def drawn(name):
    with torch.random.fork_rng([]):
        torch.manual_seed(49)
        return (*reversed(METRICS[name][1]()), torch.rand(NUM_EXAMPLES, dtype=torch.float64))


def data(name):
    """Return all examples as ``update_state`` takes them, with weights."""
    return tuple(x.clone() for x in drawn(name))


@functools.cache
def expected(name, last=NUM_EXAMPLES):
    metric = METRICS[name][0]()
    metric.update_state(*(x[:last] for x in data(name)))
    return metric.result()


def update(strategy, metric, name, last=NUM_EXAMPLES):
    examples = tuple(x[:last] for x in data(name))
    for batch in strategy.experimental_distribute_dataset(examples, batch_size=BATCH_SIZE):
        strategy.run(metric.update_state, args=batch)


def whole_life(strategy, name, folder):
    """Return the results, one for each thing that may happen to a metric."""
    with strategy.scope():
        metric, restored = METRICS[name][0](), METRICS[name][0]()
    results = {"untouched": (metric.result(), torch.zeros_like(expected(name)))}
    update(strategy, metric, name)
    results["updated"] = metric.result(), expected(name)
    results["computed"] = metric.compute(), expected(name)
    path = ts.train.Checkpoint(metric=metric).save(f"{folder}/{name}")
    update(strategy, restored, name, 7)  # to be overwritten
    ts.train.Checkpoint(metric=restored).restore(path).assert_consumed()
    results["restored"] = restored.result(), expected(name)
    results["still there"] = metric.result(), expected(name)
    for reset in ("reset_state", "reset_states", "reset"):
        getattr(metric, reset)()
        results[reset] = metric.result(), torch.zeros_like(expected(name))
        update(strategy, metric, name, 7)
        results[f"updated after {reset}"] = metric.result(), expected(name, 7)
    return results


def assert_equal(results, what):
    for step, (result, wanted) in results.items():
        assert result.dtype == torch.float64
        torch.testing.assert_close(result, wanted, rtol=1e-10, atol=1e-10, msg=lambda m, s=step: f"{what}, {s}: {m}")


def mirrored(num_replicas):
    return ts.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])


def test_every_metric_is_in_the_table():
    assert {name.split()[0] for name in METRICS} == set(ts.metrics.__all__) - {"get"}


@pytest.mark.parametrize("name", METRICS)
def test_the_data_tell_something(name):
    assert expected(name).sum() > 0
    assert not torch.equal(expected(name), expected(name, 7))


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("num_replicas", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 4))])
def test_replicas_in_one_process(name, num_replicas, tmp_path):
    assert_equal(whole_life(mirrored(num_replicas), name, tmp_path), name)


def whole_lives(folder):
    strategy = ts.MirroredStrategy()
    return {name: whole_life(strategy, name, folder) for name in METRICS}


@pytest.mark.end_to_end
def test_processes(process_pool, tmp_path):
    for lives in process_pool(2).run(whole_lives, str(tmp_path)):
        for name, results in lives.items():
            assert_equal(results, name)


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(ts.get_strategy, id="none"),
        pytest.param(lambda: ts.OneDeviceStrategy("cpu:0"), id="one", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", METRICS)
def test_one_replica(name, strategy, tmp_path):
    assert_equal(whole_life(strategy(), name, tmp_path), name)


@pytest.mark.parametrize("name", METRICS)
def test_saved_by_three_replicas_and_restored_by_others(name, tmp_path):
    strategy = mirrored(3)
    with strategy.scope():
        metric = METRICS[name][0]()
    update(strategy, metric, name, 7)
    path = ts.train.Checkpoint(metric=metric).save(f"{tmp_path}/metric")
    for other in (ts.get_strategy(), mirrored(2)):
        with other.scope():
            restored = METRICS[name][0]()
        ts.train.Checkpoint(metric=restored).restore(path).assert_consumed()
        rest = tuple(x[7:] for x in data(name))
        for batch in (
            other.experimental_distribute_dataset(rest, batch_size=3) if other.num_replicas_in_sync > 1 else [rest]
        ):
            other.run(restored.update_state, args=tuple(batch))
        assert_equal({"resumed": (restored.result(), expected(name))}, name)


@pytest.mark.parametrize("name", METRICS)
def test_in_and_outside_of_run(name):
    """Inside run a result is the replica's own; outside an update counts once; calling does both."""
    strategy = mirrored(2)
    with strategy.scope():
        metric, called = METRICS[name][0](), METRICS[name][0]()
    first, second = tuple(x[:4] for x in data(name)), tuple(x[4:] for x in data(name))
    parts = strategy.experimental_distribute_values_from_function(
        lambda context: (first, second)[context.replica_id_in_sync_group]
    )

    def step(part):
        called(*part)
        return metric(*part), metric.result()

    own = strategy.experimental_local_results(strategy.run(step, args=(parts,)))
    for (from_call, result), part in zip(own, (first, second), strict=True):
        plain = METRICS[name][0]()
        plain.update_state(*part)
        assert torch.equal(from_call, result)
        assert torch.equal(result, plain.result())
    assert_equal({"outside": (metric.result(), expected(name))}, name)
    again = METRICS[name][0]()
    for _ in range(2):
        again.update_state(*data(name))
    assert_equal({"called outside": (called(*data(name)), again.result())}, name)
    assert_equal({"after": (called.result(), again.result())}, name)
    bodies = strategy.experimental_local_results(metric)
    assert [type(body) for body in bodies] == [type(again)] * 2
    assert torch.equal(bodies[0].result(), own[0][1])


@pytest.mark.parametrize("name", METRICS)
def test_pickles(name):
    strategy = mirrored(2)
    with strategy.scope():
        metric = METRICS[name][0]()
    update(strategy, metric, name)
    copied = pickle.loads(pickle.dumps(metric))  # a plain metric of what all replicas saw
    assert type(copied) is type(METRICS[name][0]())
    assert torch.equal(copied.result(), metric.result())


@pytest.mark.parametrize("name", METRICS)
def test_a_config_makes_an_equal_metric(name):
    metric = METRICS[name][0]()
    config = metric.get_config()
    assert (config["name"], config["dtype"]) == (metric.name, "float64")
    if name != "MeanMetricWrapper":  # whose function stays one
        config = json.loads(json.dumps(config))
    equal = type(metric).from_config(config)
    assert equal.get_config() == metric.get_config()
    equal.update_state(*data(name))
    assert torch.equal(equal.result(), expected(name))


def test_made_outside_the_scope():
    strategy = mirrored(4)
    metric = ts.metrics.Mean()
    strategy.run(lambda: metric.update_state(ts.get_replica_context().replica_id_in_sync_group + 1.0))
    assert metric.result().item() == 2.5  # as measured with tf


def metrics_from_outside():
    strategy = ts.MirroredStrategy()
    outside = ts.metrics.Mean(name="outside")
    with strategy.scope():
        inside = ts.metrics.Mean(name="inside")

    def step():
        value = torch.tensor(ts.get_replica_context().replica_id_in_sync_group + 1.0)
        own = ts.metrics.Mean(name="made in run")
        for metric in (own, inside, outside):
            metric.update_state(value)
        return own.result()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = [strategy.run(step).item(), strategy.run(step).item()]
    return results, inside.result().item(), [str(warning.message) for warning in caught]


def test_made_outside_the_scope_of_processes(process_pool):
    for rank, (results, inside, messages) in enumerate(process_pool(2).run(metrics_from_outside)):
        assert results == [rank + 1.0, rank + 1.0]
        assert inside == 1.5
        (message,) = messages
        assert message.startswith("Metric 'outside' was made outside `strategy.scope()`")


def result_of_one_metric_on_each_rank():
    strategy = ts.MirroredStrategy()
    with strategy.scope():
        metrics = [ts.metrics.Mean(name="loss"), ts.metrics.Mean(name="accuracy")]
    strategy.run(lambda: None)
    with pytest.raises(ts.errors.DisagreementError, match="merging of metric states of Mean loss"):
        metrics[0 if strategy.is_chief else 1].result()


def test_ranks_that_compute_different_metrics(process_pool):
    process_pool(2).run(result_of_one_metric_on_each_rank)


class Plain(ts.metrics.Metric):
    """A mean error, of Python numbers: those of one replica."""

    def __init__(self, name="plain"):
        super().__init__(name=name)
        self.reset_state()

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total += float((y_true - y_pred).abs().sum())
        self.seen.append(len(y_true))

    def result(self):
        return self.total / max(1, sum(self.seen))

    def reset_state(self):
        self.total = 0.0
        self.seen = []


class PlainTorchmetrics(torchmetrics.Metric):
    """The same as torchmetrics has it, with a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.tensor(0.0))
        self.limit = 3.0

    def update(self, y_pred, y_true):
        self.total = self.total + (y_true - y_pred).abs().sum()

    def compute(self):
        return self.total


def warnings_of(strategy, metric):
    """What is said when a metric is computed twice after one update on each replica."""
    values = torch.arange(5.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in strategy.experimental_distribute_dataset((values, -values), batch_size=5):
            strategy.run(metric.update, args=batch)
        metric.compute(), metric.compute()
    return [str(warning.message) for warning in caught]


def warnings_of_plain_attributes():
    strategy = ts.MirroredStrategy()
    with strategy.scope():
        metric = Plain()
    return warnings_of(strategy, metric)


def test_numbers_in_plain_attributes_are_warned_of(process_pool):
    strategy = mirrored(2)
    with strategy.scope():
        ours, theirs = Plain(), PlainTorchmetrics()
    expected = "The metric Plain keeps 'total', 'seen' in plain attributes, which differ between replicas."
    for messages in (warnings_of(strategy, ours), *process_pool(2).run(warnings_of_plain_attributes)):
        (message,) = messages
        assert message.startswith(expected)
        assert 'self.total = self.add_weight("total")' in message
    (message,) = warnings_of(strategy, theirs)
    assert "keeps 'total' in" in message
    assert 'self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")' in message
    assert warnings_of(mirrored(1), Plain()) == []
