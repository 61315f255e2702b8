"""Metrics written the tf way: states from add_weight, update_state and result overridden."""

import copy
import pickle

import pytest
import torch
import torchmetrics

import torchstrategy as ts


class Fraction(ts.metrics.Metric):
    """Named as tf's guide does: the weight's name is not the attribute's."""

    def __init__(self, name=None, dtype=None, least=0.0):
        super().__init__(name=name, dtype=dtype)
        self.least = least
        self.chosen = self.add_weight(name="c", initializer="zeros")
        self.seen = self.add_weight(name="s")

    def update_state(self, values, sample_weight=None):
        weight = torch.ones_like(values) if sample_weight is None else torch.as_tensor(sample_weight)
        self.chosen += (weight * (values >= self.least)).sum()
        self.seen = self.seen + weight.sum()

    def result(self):
        return self.chosen / self.seen if self.seen else self.seen


class Statistics(ts.metrics.Metric):
    """Has every kind of aggregation and a result with several values."""

    def __init__(self, dtype=None):
        super().__init__(dtype=dtype)
        self.sums = self.add_weight(shape=(2,))
        self.from_five = self.add_weight(initializer=5.0)
        self.product = self.add_weight(initializer="ones", aggregation="max", dtype=torch.float32)
        self.smallest = self.add_weight(initializer=lambda shape, dtype: torch.full(shape, 99, dtype=dtype),
                                        aggregation="min", dtype="int64")  # fmt: skip
        self.average = self.add_weight(aggregation=ts.VariableAggregation.MEAN)
        self.first = self.add_weight(aggregation=ts.VariableAggregation.ONLY_FIRST_REPLICA)

    def update_state(self, value):
        self.sums += torch.tensor([1.0, value])
        self.from_five += value
        self.product *= value
        self.smallest = torch.minimum(self.smallest, torch.tensor(int(value)))
        self.average = torch.tensor(float(value))
        self.first = torch.tensor(float(value))

    def result(self):
        return {name: getattr(self, name) for name in self._defaults} | {"count": 3, "list": [self.sums[0]]}


class Offset(ts.metrics.Mean):
    """Extends a metric of the library as tf programs do."""

    def update_state(self, values, sample_weight=None):
        super().update_state(torch.as_tensor(values) + 100.0, sample_weight)

    def result(self):
        return super().result() * 2


def mirrored(num_replicas):
    return ts.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])


def test_without_a_strategy():
    metric = Fraction(least=2.0)
    assert (metric.name, metric.dtype) == ("fraction", torch.float32)
    assert metric.result().item() == 0.0
    metric.update_state(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    first = metric.result()
    assert metric(torch.tensor([0.0, 0.0]), sample_weight=[2.0, 2.0]).item() == 3 / 8
    assert (first.item(), first.dtype) == (0.75, torch.float32)  # later updates don't change a result
    assert metric.chosen.dtype == torch.float64
    metric.reset_state()
    assert metric.result().item() == 0.0
    assert not metric.update_called


def run_fraction(strategy, num_examples=7, batch_size=5):
    with strategy.scope():
        metric = Fraction("big", least=3.0, dtype="float64")
    values = torch.arange(num_examples, dtype=torch.float64)
    for batch in strategy.experimental_distribute_dataset(values, batch_size=batch_size):
        strategy.run(metric.update_state, args=(batch,))
    own = strategy.experimental_local_results(strategy.run(lambda: metric.result()))
    result = metric.result().item()
    metric.reset_state()
    after_reset = metric.result().item()
    strategy.run(metric.update_state, args=(torch.tensor([1.0, 5.0]),))
    return [value.item() for value in own], result, after_reset, metric.compute().item()


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4])
def test_over_replicas(num_replicas):
    own, *others = run_fraction(mirrored(num_replicas))
    assert others == [4 / 7, 0.0, 0.5]
    assert len(own) == num_replicas
    if num_replicas == 2:  # shares 0 1 2 | 3 4 and 5 | 6
        assert own == [1 / 4, 3 / 3]


def run_fraction_in_process():
    return run_fraction(ts.MirroredStrategy())


def test_over_processes(process_pool):
    assert process_pool(2).run(run_fraction_in_process) == [
        ([1 / 4], 4 / 7, 0.0, 0.5),
        ([3 / 3], 4 / 7, 0.0, 0.5),
    ]


def columns_of_one_row():
    strategy = ts.MirroredStrategy()
    with strategy.scope():
        metric = torchmetrics.CatMetric()
    scores = torch.tensor([[2.0, 0.0]])

    def step():
        metric.update(scores[:, 0])
        metric.value[-1] = scores[:, 0]  # as a metric does that keeps what it was given
        return ts.get_replica_context().all_reduce("SUM", scores[:, 0])

    return strategy.run(step).tolist(), metric.compute().tolist()


def test_processes_reduce_a_column_of_one_row(process_pool):
    assert process_pool(2).run(columns_of_one_row) == [([4.0], [2.0, 2.0])] * 2


def copied_metrics():
    """Copies made in a scope: one of a class that is made there, as if torchmetrics were, and a copy of that."""
    strategy = ts.MirroredStrategy()
    with strategy.scope():

        class Own(ts.metrics.Sum):
            def __setstate__(self, state):
                set_state = torchmetrics.Metric.__setstate__
                getattr(set_state, "__wrapped__", set_state)(self, state)  # which knows nothing of the scope

        first = Own()
        second = copy.deepcopy(first)
    strategy.run(lambda: second.update_state(ts.get_replica_context().replica_id_in_sync_group + 2.0))
    with strategy.scope():
        third = copy.deepcopy(second)
    strategy.run(lambda: third.update_state(ts.get_replica_context().replica_id_in_sync_group + 10.0))
    copy.deepcopy(first)  # has nothing to lose
    with pytest.warns(UserWarning, match="'sum' that is made outside .* holds what this process has seen, of 2"):
        part = copy.deepcopy(second)
    return [metric.result().item() for metric in (first, second, third)], part.result().item()


def test_copies_of_processes(process_pool):
    assert process_pool(2).run(copied_metrics) == [([0.0, 5.0, 26.0], 2.0), ([0.0, 5.0, 26.0], 3.0)]


def statistics(strategy):
    with strategy.scope():
        metric = Statistics()
    strategy.run(lambda: metric.update_state(ts.get_replica_context().replica_id_in_sync_group + 2.0))
    result = metric.result()
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in result.items()}


def statistics_in_process():
    return statistics(ts.MirroredStrategy())


EXPECTED = {
    "sums": [2.0, 5.0],
    "from_five": 10.0,
    "product": 3.0,
    "smallest": 2,
    "average": 2.5,
    "first": 2.0,
    "count": 3,
}


@pytest.mark.parametrize("hosting", ["threads", "processes"])
def test_aggregations(hosting, process_pool):
    result = statistics(mirrored(2)) if hosting == "threads" else process_pool(2).run(statistics_in_process)[1]
    (total,) = result.pop("list")
    assert total.item() == 2.0
    assert result == EXPECTED


def test_replicas_without_updates_are_left_out():
    strategy = mirrored(3)
    with strategy.scope():
        metric = Statistics()

    def step():
        if ts.get_replica_context().replica_id_in_sync_group == 1:
            metric.update_state(4.0)

    strategy.run(step)
    result = metric.result()
    assert (result["average"].item(), result["first"].item(), result["from_five"].item()) == (4.0, 4.0, 9.0)


def test_extending_a_metric_of_the_library():
    metric = Offset()
    assert metric.name == "mean"
    metric.update_state([1.0, 3.0])
    assert metric.update_count == 1
    metric.update([5.0, 7.0])  # torchmetrics' name reaches the same method
    assert metric.update_count == 2
    assert metric.result().item() == metric.compute().item() == 208.0
    assert metric([104.0]).item() == pytest.approx(2 * (4 * 104 + 204) / 5)
    strategy = mirrored(2)
    with strategy.scope():
        metric = Offset()
    strategy.run(lambda: metric.update_state([ts.get_replica_context().replica_id_in_sync_group]))
    assert metric.result().item() == 201.0
    assert metric([101.0]).item() == 2 * (100 + 101 + 201) / 3


def test_computing_again_after_an_update():
    metric = Fraction(least=1.0)
    metric.update_state(torch.tensor([1.0]))
    assert metric.compute().item() == 1.0
    metric.update_state(torch.tensor([0.0]))
    assert metric.compute().item() == 0.5


def test_in_a_collection():
    collection = torchmetrics.MetricCollection({"all": Fraction(), "big": Fraction(least=2.0)})
    collection.update(torch.tensor([1.0, 2.0]))
    collection.update(torch.tensor([1.0, 3.0]))
    assert {name: value.item() for name, value in collection.compute().items()} == {"all": 1.0, "big": 0.5}
    collection.reset()
    assert not collection["all"].update_called


def test_takes_no_part_in_autograd():
    metric = Fraction()
    metric.update_state(torch.ones(2, requires_grad=True), sample_weight=torch.ones(2, requires_grad=True))
    assert not metric.chosen.requires_grad
    assert not metric.result().requires_grad


def test_copies_and_pickles_are_of_their_own():
    metric = Fraction(least=2.0)
    metric.update_state(torch.tensor([1.0, 2.0]))
    for other in (copy.deepcopy(metric), pickle.loads(pickle.dumps(metric)), metric.clone()):
        other.update_state(torch.tensor([2.0, 2.0]))
        assert (other.result().item(), other.update_count) == (0.75, 2)
        other.reset()
        assert other.result().item() == 0.0
    assert metric.result().item() == 0.5


def test_a_failing_update_counts_nothing():
    metric = Fraction()
    with pytest.raises(TypeError):
        metric.update_state(torch.ones(2), 1, 2)
    assert not metric.update_called


def test_the_dtype_comes_first():
    metric = ts.metrics.Metric("float64", "mine")
    assert (metric.dtype, metric.name) == (torch.float64, "mine")
    with pytest.raises(TypeError, match=r"Received: 'mine'\. If that is the metric's name, write name="):
        ts.metrics.Metric("mine", "float64")


def test_dtype_of_results():
    metric = Fraction(dtype="float16")
    metric.update_state(torch.ones(3))
    assert (metric.dtype, metric.result().dtype) == (torch.float16, torch.float16)
    metric.set_dtype(torch.float64)
    assert (metric.dtype, metric.result().dtype, metric.seen.dtype) == (torch.float64,) * 3
    with pytest.raises(TypeError, match="dtype must be"):
        Fraction(dtype="float31")


def test_states_are_saved_under_the_attributes_names():
    metric = Fraction()
    metric.persistent(True)
    assert set(metric.state_dict()) == {"chosen", "seen"}


class Unfinished(ts.metrics.Metric):
    pass


def test_methods_that_a_subclass_must_have():
    metric = Unfinished()
    assert metric.name == "unfinished"
    with pytest.raises(NotImplementedError, match="Unfinished must define update_state"):
        metric.update_state(1.0)
    with pytest.raises(NotImplementedError, match="Unfinished must define result"):
        metric.result()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"name": (2,)}, TypeError, r"Write shape=\(2,\)"),
        ({"initializer": "random"}, ValueError, "initializer must be"),
        ({"shape": (3,), "initializer": [1.0, 2.0]}, ValueError, r"shape \(2,\), but the weight's shape is \(3,\)"),
        ({"aggregation": "median"}, ValueError, "aggregation must be one of SUM"),
        ({"aggregation": ts.VariableAggregation.NONE}, ValueError, "aggregation must be one of SUM"),
        ({"dtype": 3}, TypeError, "dtype must be"),
    ],
)
def test_weights_that_can_not_be(arguments, error, message):
    with pytest.raises(error, match=message):
        Unfinished().add_weight(**arguments)


def test_a_name_that_is_no_string():
    with pytest.raises(TypeError, match="name must be a string"):
        ts.metrics.Sum(torch.float64)


def test_updates_in_inference_mode_and_outside():
    metric = Fraction()
    with torch.inference_mode():
        metric.update_state(torch.ones(2))
        metric.result()
    metric.update_state(torch.ones(2) - 2)
    assert metric.result().item() == 0.5


class Forgetful(ts.metrics.Metric):
    def __init__(self):
        self.total = self.add_weight("total")


def test_a_constructor_that_was_not_called():
    with pytest.raises(RuntimeError, match=r"super\(\).__init__\(\) first in Forgetful"):
        Forgetful()


@pytest.mark.parametrize("metric", [ts.metrics.Mean, ts.metrics.Sum])
def test_values_of_several_replicas_outside_of_run(metric):
    strategy = mirrored(2)
    with strategy.scope():
        metric = metric()
    values = strategy.experimental_distribute_values_from_function(lambda context: torch.ones(1))
    with pytest.raises(TypeError, match=r"given a PerReplica.*strategy.run\(metric.update_state"):
        metric.update_state(values)
    strategy.run(metric.update_state, args=(values,))
    with pytest.raises(TypeError, match=r"given a PerReplica.*strategy.run\(metric.update_state"):
        metric.update_state(1.0, sample_weight=values)


@pytest.mark.parametrize("value", ["text", None, [None], [[1.0], [1.0, 2.0]]])
def test_values_that_are_no_tensors(value):
    with pytest.raises(TypeError, match="A metric needs tensors"):
        ts.metrics.Mean().update_state(value)


def test_a_result_does_not_change_with_later_updates():
    metric = Statistics(dtype="float64")  # the states' own dtype: nothing is converted
    metric.update_state(2.0)
    before = metric.result()
    metric.update_state(3.0)
    assert (before["sums"].tolist(), before["from_five"].item(), before["list"][0].item()) == ([1.0, 2.0], 7.0, 1.0)


class Restarting(ts.metrics.Metric):
    """Resets by hand, as many tf programs do."""

    def __init__(self):
        super().__init__()
        self.total = self.add_weight("total", initializer=7.0)

    def update_state(self, value):
        self.total += value

    def result(self):
        return self.total

    def reset_state(self):
        self.total = 0


def test_a_number_assigned_to_a_state():
    metric = Restarting()
    for reset in (metric.reset_state, metric.reset_states, metric.reset):
        reset()
        assert metric(2.0).item() == 2.0
    strategy = mirrored(2)
    with strategy.scope():
        metric = Restarting()
    strategy.run(lambda: metric.update_state(1.0))
    metric.reset_state()
    strategy.run(lambda: metric.reset_state())
    assert [body.total.tolist() for body in strategy.experimental_local_results(metric)] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("method", "remedy"), [("assign", "state = x"), ("assign_add", "state [+]= x"), ("assign_sub", "state -= x")]
)
def test_states_have_no_methods_of_variables(method, remedy):
    class Ported(ts.metrics.Metric):
        def __init__(self):
            super().__init__()
            self.total = self.add_weight(name="total")

        def update_state(self, values):
            getattr(self.total, method)(values.sum())

    with pytest.raises(AttributeError, match=f"Ported.update_state: states are tensors.*{remedy}"):
        Ported().update_state(torch.ones(2))
