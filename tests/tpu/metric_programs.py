"""What tests of metrics and variables run in processes with virtual devices, beside ``MirroredStrategy``."""

from __future__ import annotations

import copy
import pickle

import torch
import torchmetrics

import torchstrategy as ts
from tests.programs import cpu_devices
from torchstrategy.base import tree
from torchstrategy.base.devices import Placement
from torchstrategy.tpu.metrics import SpmdMetrics

METRICS = {
    "mean": (lambda: ts.metrics.Mean(), "values"),
    "accuracy": (lambda: ts.metrics.SparseCategoricalAccuracy(), "classes"),
    "top 2": (lambda: ts.metrics.SparseTopKCategoricalAccuracy(k=2), "classes"),
    "auc": (lambda: ts.metrics.AUC(num_thresholds=10), "binary"),
    "precisions": (lambda: ts.metrics.Precision([0.7, 0.2, 0.5]), "binary"),
    "recall of the best": (lambda: ts.metrics.Recall(top_k=2, class_id=1), "one-hot"),
    "iou": (lambda: ts.metrics.MeanIoU(3, ignore_class=1, sparse_y_pred=False), "classes"),
    "torchmetrics accuracy": (lambda: torchmetrics.Accuracy("multiclass", num_classes=3), "scores first"),
    "items": (lambda: torchmetrics.CatMetric(nan_strategy="disable"), "values"),
    "collection": (
        lambda: torchmetrics.MetricCollection([torchmetrics.MeanSquaredError(), torchmetrics.MeanAbsoluteError()]),
        "pairs",
    ),
}


def batch_of(kind, size, generator):
    scores = torch.rand(size, 3, generator=generator)
    classes = torch.randint(3, (size,), generator=generator)
    return {
        "values": (scores[:, 0],),
        "pairs": (scores[:, 0], scores[:, 1]),
        "classes": (classes, scores),
        "scores first": (scores, classes),
        "one-hot": (torch.nn.functional.one_hot(classes, 3), scores),
        "binary": ((classes > 0).float(), scores[:, 0]),
    }[kind]


def strategies():
    """The strategy under test, and one with as many CPU replicas."""
    tpu = ts.TPUStrategy()
    return tpu, ts.MirroredStrategy(cpu_devices(tpu.num_replicas_in_sync))


def numbers(value):
    return [torch.as_tensor(leaf).detach().cpu().double().tolist() for leaf in tree.all_leaves(value)]


def accumulate(strategy, name):
    """Update in ``run`` with full, partial and tiny batches; read, reset and update outside it."""
    make, kind = METRICS[name]
    with strategy.scope():
        metric = make()
    n = strategy.num_replicas_in_sync
    generator = torch.Generator().manual_seed(0)
    batches = [batch_of(kind, size, generator) for size in (2 * n, 2 * n, n + 1, 2 * n, 1)]
    dataset = strategy.experimental_distribute_dataset(batches)
    takes_nothing = isinstance(metric, ts.metrics.Metric)

    def update(*batch):
        if takes_nothing or len(batch[0]):
            metric.update(*batch)

    @ts.function
    def step(batch):
        strategy.run(update, args=batch)

    results = []
    for _ in range(2):
        for batch in dataset:
            step(batch)
            results.append(numbers(metric.compute()))
        metric.reset()
    metric.update(*batches[0])  # outside `run` an update counts once
    results.append(numbers(metric.compute()))
    step(next(iter(dataset)))
    results.append(numbers(metric.compute()))
    return results


def compare_metric(name):
    tpu, mirrored = strategies()
    return accumulate(tpu, name), accumulate(mirrored, name)


def count_compilations():
    """Compilations of five epochs with a metric that is read and reset after each of them."""
    tpu = ts.TPUStrategy()
    with tpu.scope():
        metric, items = ts.metrics.Mean(), torchmetrics.CatMetric(nan_strategy="disable")

    def update(x):
        metric.update_state(x)
        items.update(x)

    step = ts.function(lambda x: tpu.run(update, args=(x,)))
    dataset = tpu.experimental_distribute_dataset(torch.arange(16.0), batch_size=4)
    counts = []
    for _ in range(5):
        for x in dataset:
            step(x)
        assert metric.result() == 7.5
        assert len(items.compute()) == 16
        metric.reset_state()
        items.reset()
        counts.append(tpu.num_compilations)
    return counts


def invalid_predictions():
    """What becomes of predictions that are no probabilities."""
    tpu = ts.TPUStrategy()
    with tpu.scope():
        auc, precision = ts.metrics.AUC(num_thresholds=5), ts.metrics.Precision()
        iou = ts.metrics.IoU(2, target_class_ids=[0])

    @ts.function
    def step():
        def update():  # the flaws themselves would be counted nowhere
            auc.update_state(torch.tensor([1.0, 0.0]), torch.tensor([2.0, 0.5]))
            precision.update_state(torch.tensor([1.0, 0.0]), torch.tensor([torch.nan, 0.1]))
            iou.update_state(torch.tensor([1, 1]), torch.tensor([5, 1]))

        tpu.run(update)

    step()
    return float(auc.result()), float(precision.result()), float(iou.result())


def same_values_for_all():
    """Counts of values that are the same on all replicas: all are counted."""
    tpu = ts.TPUStrategy()
    with tpu.scope():
        auc, counts = ts.metrics.AUC(num_thresholds=5), ts.metrics.FalseNegatives([0.6, 0.1])

    def update():
        for metric in (auc, counts):
            metric.update_state(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0.2, 0.5, 0.7]))

    ts.function(lambda: tpu.run(update))()
    return float(auc.result()), counts.result().tolist()


def read_inside():
    """A replica's own result inside ``run``, and what ``experimental_local_results`` gives of a metric."""

    def program(strategy):
        with strategy.scope():
            metric = ts.metrics.Mean()
        values = torch.arange(4.0 * strategy.num_replicas_in_sync)
        dataset = strategy.experimental_distribute_dataset(values, batch_size=8)

        @ts.function
        def step(x):
            def update(x):
                metric.update_state(x)
                return metric.result()

            return strategy.run(update, args=(x,))

        inside = [numbers(strategy.experimental_local_results(step(x))) for x in dataset]
        own = [float(copied.result()) for copied in strategy.experimental_local_results(metric)]
        return inside, own

    return [program(strategy) for strategy in strategies()]


def assign(strategy, synchronization, aggregation, method, trainable):
    """Everything that can be done to a variable: its values after each step, or the error's class."""
    with strategy.scope():
        v = ts.Variable(torch.tensor([2.0, 3.0]), trainable, synchronization=synchronization, aggregation=aggregation)
    seen = []

    def note(what, read):
        try:
            seen.append((what, numbers(read())))
        except (ValueError, RuntimeError) as error:
            seen.append((what, type(error).__name__))

    def look(what):
        note(what, lambda: strategy.experimental_local_results(v))
        note(what, v.read_value)

    def fn(x):
        replica = torch.as_tensor(ts.get_replica_context().replica_id_in_sync_group)
        return getattr(v, method)(torch.stack([x.sum(), replica.to(x) * 2])) + v

    n = strategy.num_replicas_in_sync
    look("made")
    for x in strategy.experimental_distribute_dataset([torch.arange(2.0 * n), torch.arange(n + 1.0)]):
        note("run", lambda x=x: strategy.experimental_local_results(strategy.run(fn, args=(x,))))
        look("after run")
    for name in ("assign_add", "assign"):
        note(name, lambda name=name: getattr(v, name)(torch.tensor([4.0, 8.0])).numel())
        look(name)
    note("read", lambda: strategy.experimental_local_results(strategy.run(lambda: v * 1)))
    note("copy", lambda: strategy.experimental_local_results(copy.deepcopy(v)))
    note("sum", lambda: strategy.reduce("sum", v))
    note("mean", lambda: strategy.reduce("mean", v))
    return seen, repr(v).replace(", device='xla:0'", "")


def compare_variable(synchronization, aggregation):
    tpu, mirrored = strategies()
    modes = ts.VariableSynchronization[synchronization], ts.VariableAggregation[aggregation]
    kinds = [(method, trainable) for method in ("assign", "assign_add") for trainable in (False, True)]
    kinds = [kind for kind in kinds if synchronization == "ON_WRITE" or not kind[1]]
    return [[assign(strategy, *modes, *kind) for kind in kinds] for strategy in (tpu, mirrored)]


def train_variables():
    """An optimizer of a module's and of free variables; a variable that counts steps; one made inside ``run``."""

    def program(strategy):
        with strategy.scope():
            scale = ts.Variable(torch.tensor([1.0, 2.0]), name="scale")
            steps = ts.Variable(0, trainable=False, aggregation=ts.VariableAggregation.ONLY_FIRST_REPLICA)
            optimizer = torch.optim.SGD([scale], lr=0.1, momentum=0.9)
        n = strategy.num_replicas_in_sync
        made = []

        @ts.function
        def step(x):
            def fn(x):
                if not made:
                    made.append(ts.Variable(torch.tensor([5.0]), trainable=False))
                loss = ts.nn.compute_average_loss((x[:, None] * scale).square().sum(1), global_batch_size="actual")
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                steps.assign_add(1)
                return loss.detach() + made[0].sum()

            return strategy.reduce("sum", strategy.run(fn, args=(x,)))

        data = [torch.arange(2.0 * n), torch.arange(n + 1.0), torch.arange(2.0 * n)]
        losses = [float(step(x)) for x in strategy.experimental_distribute_dataset(data)]
        return losses, scale.detach().cpu().tolist(), int(steps)

    return [program(strategy) for strategy in strategies()]


def step_what_replicas_have_assigned(size):
    """An optimizer's step of a variable that each replica has given a value of its own; the error's message."""
    strategy = ts.TPUStrategy()
    with strategy.scope():
        scale = ts.Variable(torch.tensor([1.0]))
        optimizer = torch.optim.SGD([scale], lr=0.1)

    def fn(x):
        scale.assign_add(x.sum(0, keepdim=True))
        (x * scale).sum().backward()
        optimizer.step()

    (x,) = strategy.experimental_distribute_dataset([torch.arange(float(size))])
    try:
        strategy.run(fn, args=(x,))
    except RuntimeError as error:
        return str(error)
    return None


def read_over_hosts():
    strategy = ts.TPUStrategy()
    several = Placement(8, 0, strategy.placement.devices, replicas_per_copy=4)
    try:
        SpmdMetrics(strategy.hosting.state, strategy.runtime, several).adopt(ts.metrics.Mean())
    except NotImplementedError as error:
        return str(error)
    return None


def copied_and_moved():
    """What copies hold, whether moving returns the object, and the sum after a second epoch."""

    def program(strategy):
        with strategy.scope():
            metric = torchmetrics.SumMetric(nan_strategy="disable")
        found = []
        for _ in range(2):
            (batch,) = strategy.experimental_distribute_dataset(torch.arange(8.0), batch_size=8)
            strategy.run(lambda x: metric.update(x), args=(batch,))
            copies = [copy.deepcopy(metric), metric.clone(), pickle.loads(pickle.dumps(metric))]
            found += [float(copied.compute()) for copied in copies]
            found += [metric.to("cpu") is metric, float(metric.compute())]
        return found

    return [program(strategy) for strategy in strategies()]
