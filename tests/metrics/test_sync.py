"""torchmetrics metrics over replicas: in threads and in processes, equal to one metric that sees all the data."""

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from torch.utils.data import TensorDataset
from torchmetrics import aggregation, classification, regression, wrappers

import torchstrategy as ts

pytestmark = pytest.mark.filterwarnings("ignore:Metric .* will save all targets and predictions")

NUM_CLASSES = 4
METRICS = {
    "mean": lambda: aggregation.MeanMetric(),
    "sum": lambda: aggregation.SumMetric(),
    "max": lambda: aggregation.MaxMetric(),
    "min": lambda: aggregation.MinMetric(),
    "cat": lambda: aggregation.CatMetric(),
    "mse": lambda: regression.MeanSquaredError(),
    "r2": lambda: regression.R2Score(),
    "pearson": lambda: regression.PearsonCorrCoef(),  # stacked: its compute combines the replicas
    "spearman": lambda: regression.SpearmanCorrCoef(),  # lists
    "accuracy": lambda: classification.MulticlassAccuracy(NUM_CLASSES),
    "confusion": lambda: classification.MulticlassConfusionMatrix(NUM_CLASSES),
    "auroc": lambda: classification.MulticlassAUROC(NUM_CLASSES),
    "classwise": lambda: wrappers.ClasswiseWrapper(classification.MulticlassAccuracy(NUM_CLASSES, average=None)),
    "collection": lambda: torchmetrics.MetricCollection(
        {
            "top1": classification.MulticlassAccuracy(NUM_CLASSES, top_k=1, average="micro"),
            "top3": classification.MulticlassAccuracy(NUM_CLASSES, top_k=3, average="micro"),
            "precision": classification.MulticlassPrecision(NUM_CLASSES),
        }
    ),
    "ts.mean": lambda: ts.metrics.Mean(),
    "custom": lambda: Custom(),
}
SCORES = {"accuracy", "confusion", "auroc", "classwise", "collection"}
ONE_ARGUMENT = {"mean", "sum", "max", "min", "cat", "ts.mean"}


class Custom(torchmetrics.Metric):
    """Has every kind of reduction that the others lack."""

    full_state_update = False

    def __init__(self):
        super().__init__()
        self.add_state("average", torch.tensor(0.0), dist_reduce_fx="mean")
        self.add_state("product", torch.tensor(1.0), dist_reduce_fx=prod)
        self.add_state("items", [], dist_reduce_fx=None)
        self.add_state("flags", torch.zeros(3, dtype=torch.bool), dist_reduce_fx="max")

    def update(self, values, _):
        self.average = torch.tensor(4.0)
        self.product = self.product * (1 + values.square()).prod() ** 0.01
        self.items.append(values.to(torch.float64))
        self.flags = self.flags | torch.tensor([True, False, False])

    def compute(self):
        total = torch.cat(self.items).sum()
        return {"average": self.average, "product": self.product, "items": total, "flags": self.flags}


def prod(stacked):
    return stacked.prod(0)


def data(name, num_examples):
    generator = torch.Generator().manual_seed(7)
    if name in SCORES:
        scores = torch.randn(num_examples, NUM_CLASSES, generator=generator).softmax(-1)
        return scores, torch.randint(NUM_CLASSES, (num_examples,), generator=generator)
    inputs = torch.randn(num_examples, generator=generator)
    return inputs, inputs + torch.randn(num_examples, generator=generator)


def evaluate(strategy, name, num_examples=11, batch_size=4):
    """Update a metric in replica context and return it."""
    with strategy.scope():
        metric = METRICS[name]()
    dataset = strategy.experimental_distribute_dataset(TensorDataset(*data(name, num_examples)), batch_size=batch_size)

    def step(*batch):
        if len(batch[0]):  # some metrics can't take empty batches
            metric.update(*batch[: 1 if name in ONE_ARGUMENT else 2])

    for batch in dataset:
        strategy.run(step, args=tuple(batch))
    return metric


def expected(name, num_examples=11):
    metric = METRICS[name]()
    metric.update(*data(name, num_examples)[: 1 if name in ONE_ARGUMENT else 2])
    return metric.compute()


def mirrored(num_replicas):
    return ts.MirroredStrategy(devices=[f"cpu:{i}" for i in range(num_replicas)])


def states(strategy, metric):
    return [
        {
            name: repr((getattr(m, "_update_count", 0), m.metric_state))
            for name, m in body.named_modules()
            if hasattr(m, "metric_state")
        }
        for body in strategy.experimental_local_results(metric)
    ]


def assert_close(actual, wanted):
    if isinstance(wanted, dict):
        assert actual.keys() == wanted.keys()
        for key, value in wanted.items():
            assert_close(actual[key], value)
    elif wanted.dtype == torch.bool:
        assert torch.equal(actual, wanted)
    else:
        torch.testing.assert_close(actual.sort().values if actual.ndim == 1 else actual,
                                   wanted.sort().values if wanted.ndim == 1 else wanted)  # fmt: skip


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_computed_over_all_replicas(name, num_replicas):
    strategy = mirrored(num_replicas)
    metric = evaluate(strategy, name)
    before = states(strategy, metric)
    assert_close(metric.compute(), expected(name))
    assert states(strategy, metric) == before
    assert_close(metric.compute(), expected(name))


@pytest.mark.parametrize("name", ["cat", "pearson", "confusion", "collection", "custom", "ts.mean"])
def test_replicas_without_data_do_not_count(name):
    metric = evaluate(mirrored(4), name, num_examples=5, batch_size=3)  # shares 1, 1, 1, 0 and 1, 1, 0, 0
    assert_close(metric.compute(), expected(name, 5))


def compute_in_processes(names):
    strategy = ts.MirroredStrategy()
    results = {}
    for name in names:
        metric = evaluate(strategy, name)
        results[name] = metric.compute()
        metric.reset()
        if name not in ("cat", "auroc", "spearman", "custom", "r2", "pearson", "collection"):
            metric.update(*data(name, 6)[: 1 if name in ONE_ARGUMENT else 2])
            results[f"{name} after reset"] = metric.compute()
    return results


def test_computed_over_all_processes(process_pool):
    for results in process_pool(2).run(compute_in_processes, list(METRICS)):
        for name in METRICS:
            assert_close(results[name], expected(name))
        assert_close(results["mean after reset"], expected("mean", 6))


def compute_in_run_with_a_default_group(store_path):
    strategy = ts.MirroredStrategy()
    dist.init_process_group("gloo", init_method=f"file://{store_path}", rank=strategy.workers.rank, world_size=2)
    try:
        with strategy.scope():
            metric = aggregation.SumMetric()

        def step():
            metric.update(ts.get_replica_context().replica_id_in_sync_group + 1.0)
            return metric.compute(), metric(10.0)

        own, batch = strategy.run(step)
        return own.item(), batch.item(), metric.compute().item()
    finally:
        dist.destroy_process_group()


def test_torchmetrics_does_not_synchronise_by_itself(process_pool, tmp_path):
    results = process_pool(2).run(compute_in_run_with_a_default_group, str(tmp_path / "store"))
    assert results == [(1.0, 10.0, 23.0), (2.0, 10.0, 23.0)]


def hosted_by(hosting, process_pool, fn):
    """Return what ``fn(strategy)`` returns with two replicas; of processes, the first one's."""
    return fn(mirrored(2)) if hosting == "threads" else process_pool(2).run(call_in_process, fn)[0]


def call_in_process(fn):
    return fn(ts.MirroredStrategy())


def own_and_all(strategy):
    with strategy.scope():
        metric = ts.metrics.Mean()

    def step():
        metric.update_state(ts.get_replica_context().replica_id_in_sync_group + 1.0)
        return metric.result()

    own = [value.item() for value in strategy.experimental_local_results(strategy.run(step))]
    return own[0], metric.result().item()


def reset_everywhere(strategy):
    with strategy.scope():
        metric = ts.metrics.Mean()
        collection = torchmetrics.MetricCollection({"mean": aggregation.MeanMetric()})

    def step():
        metric.update_state(5.0)
        collection.update(5.0)

    def results():
        return [m.update_count for m in (metric, collection["mean"])]

    strategy.run(step)
    metric.reset_state()
    collection.reset()
    counts = strategy.experimental_local_results(strategy.run(results))
    strategy.run(step)
    return counts, metric.result().item(), collection.compute()["mean"].item()


def updated_before_the_first_run(strategy):
    with strategy.scope():
        metric = aggregation.SumMetric()
    metric.update(5.0)
    strategy.run(lambda: metric.update(1.0))
    return metric.compute().item()


def called_outside(strategy):
    with strategy.scope():
        metric = ts.metrics.SparseCategoricalAccuracy()
    labels, scores = torch.tensor([0, 1]), torch.eye(2)
    strategy.run(lambda: metric.update_state(labels, 1 - scores))
    return metric(labels, scores).item(), metric.result().item()


def tracked(strategy):
    with strategy.scope():
        tracker = wrappers.MetricTracker(aggregation.SumMetric(), maximize=True)
    for value in (3.0, 1.0):
        tracker.increment()
        strategy.run(lambda value=value: tracker.update(value))
    return tracker.compute().item(), tracker.compute_all().tolist(), tracker.best_metric()


@pytest.mark.parametrize("hosting", ["threads", "processes"])
def test_tracker(process_pool, hosting):
    assert hosted_by(hosting, process_pool, tracked) == (2.0, [6.0, 2.0], 6.0)


def test_extremes_of_what_was_computed():
    strategy = mirrored(2)
    with strategy.scope():
        metric = wrappers.MinMaxMetric(aggregation.SumMetric())
    computed = []
    for value in (3.0, -5.0, 1.0):
        strategy.run(lambda value=value: metric.update(value))
        computed.append({name: result.item() for name, result in metric.compute().items()})
    assert computed == [
        {"raw": 6.0, "max": 6.0, "min": 6.0},
        {"raw": -4.0, "max": 6.0, "min": -4.0},
        {"raw": -2.0, "max": 6.0, "min": -4.0},
    ]


def test_looking_at_a_metric_changes_nothing():
    strategy = mirrored(2)
    with strategy.scope():
        metric = aggregation.SumMetric()
        collection = torchmetrics.MetricCollection({"cat": aggregation.CatMetric()})
    looked_at = []
    for _ in range(2):
        strategy.run(lambda: (metric.update(1.0), collection.update(1.0)))
        looked_at += [metric.sum_value, metric.update_called, collection["cat"].value, vars(metric)]
        metric.update(10.0)
        collection.update(10.0)
    assert metric.compute().item() == 24.0
    assert collection.compute()["cat"].tolist() == [1.0, 10.0, 1.0, 10.0, 1.0, 1.0]


def test_methods_can_be_handed_to_run():
    strategy = mirrored(2)
    with strategy.scope():
        metric = ts.metrics.Mean()
    values = strategy.experimental_distribute_values_from_function(lambda ctx: ctx.replica_id_in_sync_group + 1.0)
    for _ in range(2):  # the first run makes the replicas
        strategy.run(metric.update_state, args=(values,))
    own = strategy.experimental_local_results(strategy.run(metric.result))
    assert [value.item() for value in own] == [1.0, 2.0]


@pytest.mark.parametrize("hosting", ["threads", "processes"])
@pytest.mark.parametrize(
    ("fn", "by_threads", "by_processes"),
    [
        (own_and_all, (1.0, 1.5), None),
        # A value from outside counts once for each process.
        (updated_before_the_first_run, 7.0, 12.0),
        (called_outside, (pytest.approx(1 / 3),) * 2, (pytest.approx(0.5),) * 2),
    ],
)
def test_contexts(process_pool, hosting, fn, by_threads, by_processes):
    wanted = by_threads if hosting == "threads" or by_processes is None else by_processes
    assert hosted_by(hosting, process_pool, fn) == wanted


def test_reset_acts_on_every_replica(process_pool):
    assert hosted_by("threads", process_pool, reset_everywhere) == (([0, 0], [0, 0]), 5.0, 5.0)
    assert hosted_by("processes", process_pool, reset_everywhere) == (([0, 0],), 5.0, 5.0)


def copies(strategy):
    """A copy or a pickle of a recorded metric is a plain metric of what this process's replicas have seen."""
    with strategy.scope():
        metric = aggregation.SumMetric()
        collection = torchmetrics.MetricCollection([aggregation.SumMetric()])
        model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ModuleList([aggregation.SumMetric()]))
    strategy.run(lambda: (metric.update(1.0), collection.update(1.0), model[1][0].update(1.0)))
    results = [pickle.loads(pickle.dumps(model))[1][0].compute(), copy.deepcopy(model)[1][0].compute() + 10]
    results = [float(value) for value in results]
    for original in (metric, collection):
        for copied in (copy.deepcopy(original), pickle.loads(pickle.dumps(original)), original.clone()):
            copied.update(10.0)
            value = copied.compute()
            results.append((value["SumMetric"] if isinstance(value, dict) else value).item())
            copied.reset()
    return results, metric.compute().item(), collection.compute()["SumMetric"].item()


@pytest.mark.parametrize(("hosting", "expected"), [("threads", 12.0), ("processes", 11.0)])
def test_copies_are_plain(process_pool, hosting, expected):
    assert hosted_by(hosting, process_pool, copies) == ([expected - 10] + [expected] * 7, 2.0, 2.0)


def moved(strategy, metrics, _):
    assert [metric.to("cpu") is metric for metric in metrics] == [True, True]
    torch.nn.ModuleList(metrics).double()


def looked_into(strategy, metrics, path):
    """What reads a state: what it holds afterwards is not the program's doing."""
    checkpoint = ts.train.Checkpoint(total=metrics[0], seen=metrics[1])
    checkpoint.write(path)
    dict.fromkeys(metrics, "as a key")
    [*metrics[0].named_modules(), metrics[0].sum_value, metrics[1].value, metrics[0].metric_state]
    checkpoint.restore(path)


def updated_outside(strategy, metrics, _):
    hash(metrics[0])
    metrics[0].update(0.0)


def assigned(strategy, metrics, _):
    metrics[0].sum_value = metrics[0].compute()


@pytest.mark.parametrize("do", [moved, looked_into, updated_outside, assigned])
def test_each_replicas_part_counts_once_whatever_is_done_outside(do, tmp_path):
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])
    with strategy.scope():
        metrics = [aggregation.SumMetric(), aggregation.CatMetric()]

    def step(numbers):
        for metric in metrics:
            metric.update(numbers)

    for _ in range(2):
        (numbers,) = strategy.experimental_distribute_dataset(torch.arange(9.0), batch_size=9)
        strategy.run(step, args=(numbers,))
        do(strategy, metrics, str(tmp_path / "metrics"))
    assert metrics[0].compute() == 72
    assert metrics[1].compute().sort().values.tolist() == sorted([*range(9)] * 2)


def saved_and_loaded(strategy):
    """Save on the chief alone, a metric and a model that contains one; then load on all processes."""
    with strategy.scope():
        metric = aggregation.SumMetric()
        model = torch.nn.ModuleDict({"layer": torch.nn.Linear(1, 1), "metric": aggregation.SumMetric()})
    for persistent in (metric, model["metric"]):
        persistent.persistent(True)
    update(strategy, (metric, model["metric"]), 3.0)
    states = (metric.state_dict(), model.state_dict()) if strategy.is_chief else None
    sums = [0.0, 0.0] if states is None else [states[0]["sum_value"].item(), states[1]["metric.sum_value"].item()]
    if states is None:
        states = {"sum_value": torch.tensor(-1.0)}, {**model.state_dict(), "metric.sum_value": torch.tensor(-1.0)}
    update(strategy, (metric, model["metric"]), 100.0)
    metric.load_state_dict(states[0])
    model.load_state_dict(states[1])
    update(strategy, (metric, model["metric"]), 1.0)
    return sums, metric.compute().item(), model["metric"].compute().item()


def update(strategy, metrics, value):
    strategy.run(lambda: [metric.update(value) for metric in metrics] and None)


def test_state_dict_of_persistent_metrics(process_pool):
    assert hosted_by("threads", process_pool, saved_and_loaded) == ([6.0, 6.0], 8.0, 8.0)
    # A state_dict is this process's: it does not communicate.
    assert process_pool(2).run(call_in_process, saved_and_loaded) == [([3.0, 3.0], 5.0, 5.0), ([0.0, 0.0], 5.0, 5.0)]


def test_small_shares_do_not_let_different_metrics_share_a_state():
    strategy = mirrored(2)
    with strategy.scope():
        metrics = METRICS["collection"]()
    right = torch.tensor([[0.9, 0.1, 0.0, 0.0]])
    second = torch.tensor([[0.4, 0.5, 0.1, 0.0]])
    for scores in (right, second):  # after the first batch, the top-1 and top-3 accuracies are equal
        strategy.run(lambda x: metrics.update(x, torch.tensor([0])), args=(scores,))
    assert metrics.compute()["top1"].item() == 0.5
    assert metrics.compute()["top3"].item() == 1.0


@pytest.mark.parametrize("groups", [True, [["accuracy", "recall"]]])
def test_collections_that_formed_groups_before(groups):
    strategy = mirrored(2)
    with strategy.scope():
        metrics = torchmetrics.MetricCollection(
            {"accuracy": classification.BinaryAccuracy(), "recall": classification.BinaryRecall()},
            compute_groups=groups,
        )
    metrics.update(torch.tensor([1.0, 0.0]), torch.tensor([1, 0]))
    strategy.run(lambda: metrics.update(torch.tensor([0.0]), torch.tensor([1])))
    for _ in range(2):
        assert metrics.compute()["accuracy"].item() == 0.5
        assert {name: metric.compute().item() for name, metric in metrics.items()} == pytest.approx(
            {"accuracy": 0.5, "recall": 1 / 3}
        )


def test_one_replica_with_updates_is_enough():
    strategy = mirrored(3)
    with strategy.scope():
        metric = regression.MeanSquaredError()

    def step():
        if ts.get_replica_context().replica_id_in_sync_group == 2:
            metric.update(torch.tensor([1.0]), torch.tensor([3.0]))

    strategy.run(step)
    assert metric.compute().item() == 4.0  # and no warning that it was not updated
    with strategy.scope():
        untouched = regression.MeanSquaredError()
    strategy.run(lambda: untouched.update_count)
    with pytest.warns(UserWarning, match="was called before"):
        untouched.compute()


def test_results_that_carry_a_graph_can_be_merged():
    strategy = mirrored(2)
    with strategy.scope():
        metric = aggregation.MeanMetric()
        model = torch.nn.Linear(1, 1)
    losses = strategy.experimental_local_results(strategy.run(lambda: metric(model(torch.ones(2, 1)).mean())))
    assert losses[0].requires_grad
    assert not metric.compute().requires_grad


def test_networks_inside_metrics_are_not_copied():
    class Perceptual(torchmetrics.Metric):
        def __init__(self):
            super().__init__()
            self.network = torch.nn.Linear(2, 2)
            self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")

        def update(self, values):
            self.total += self.network(values).sum()

        def compute(self):
            return self.network.weight.data_ptr()

    strategy = mirrored(2)
    with strategy.scope():
        metric = Perceptual()
    strategy.run(lambda: metric.update(torch.ones(1, 2)))
    assert metric.compute() == metric.network.weight.data_ptr()


def state_that_is_not_a_tensor():
    strategy = ts.MirroredStrategy()
    with strategy.scope():
        metric = aggregation.CatMetric()
    strategy.run(lambda: metric.value.append("text"))
    with pytest.raises(TypeError, match="must be tensors to be merged over processes"):
        metric.compute()


def test_states_that_are_not_tensors(process_pool):
    process_pool(2).run(state_that_is_not_a_tensor)


def test_metrics_are_saved_as_plain_objects():
    strategy = mirrored(2)
    with strategy.scope():
        metric = aggregation.SumMetric()
    strategy.run(lambda: metric.update(1.0))
    buffer = io.BytesIO()
    torch.save(metric, buffer)
    buffer.seek(0)
    assert type(torch.load(buffer, weights_only=False)) is aggregation.SumMetric


@pytest.mark.end_to_end
def test_importing_the_library_does_not_import_torchmetrics():
    code = "import sys, torchstrategy; assert 'torchmetrics' not in sys.modules; torchstrategy.metrics.Mean"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
