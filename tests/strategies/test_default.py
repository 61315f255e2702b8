import json

import pytest
import torch

import torchstrategy as ts
from torchstrategy.base import log
from torchstrategy.cluster_resolver.detect import training_nothing
from torchstrategy.strategies.default import DefaultStrategy


def test_is_one_object_and_passes_everything_through():
    strategy = ts.get_strategy()
    assert strategy is ts.get_strategy()
    data, value = [torch.ones(2)], object()
    assert strategy.experimental_distribute_dataset(data) is data
    assert strategy.run(lambda x, *, y: (x, y), args=(value,), kwargs={"y": 2}) == (value, 2)
    assert strategy.reduce("SUM", value) is value
    assert strategy.experimental_local_results(value) == (value,)
    assert strategy.num_replicas_in_sync == 1
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 1)).sum().backward()
    strategy.run(optimizer.step)


def test_own_dataset_function_and_values():
    strategy = ts.get_strategy()
    assert strategy.distribute_datasets_from_function(lambda context: [context.num_replicas_in_sync]) == [1]
    assert strategy.experimental_distribute_values_from_function(lambda context: context.num_replicas_in_sync) == 1


def test_wrong_arguments():
    strategy = ts.get_strategy()
    with pytest.raises(TypeError, match="callable"):
        strategy.run(3)
    with pytest.raises(ValueError, match="list or tuple"):
        strategy.run(abs, args=torch.ones(1))
    with pytest.raises(RuntimeError, match="cross-replica context"):
        strategy.run(lambda: strategy.run(lambda: 1))


def test_its_context_is_not_that_of_another_strategys_replicas():
    """As in tf; kept from outside, ``all_reduce`` would return the replica's own value for the sum."""
    outside, value, kept = ts.get_replica_context(), torch.tensor(1.0), []
    mirrored = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    ts.get_strategy().run(lambda: kept.append(ts.get_replica_context()))
    with pytest.raises(RuntimeError, match="is not running here"):
        mirrored.run(lambda: outside.all_reduce("SUM", value))
    with pytest.raises(RuntimeError, match="is not running here"):
        kept[0].all_reduce("SUM", value)
    with pytest.raises(RuntimeError, match="is not running here"):
        outside.merge_call(lambda strategy: outside.merge_call(lambda strategy: None))
    assert outside.all_reduce("SUM", value) == 1.0


@pytest.mark.parametrize("make", [DefaultStrategy, lambda: ts.OneDeviceStrategy("cpu:0")])
def test_independent_copies_are_warned_of_once(make, monkeypatch):
    monkeypatch.setattr(log, "_said", set())
    monkeypatch.setenv("WORLD_SIZE", "2")
    said = []
    monkeypatch.setattr(log.warnings, "warn", lambda message, *args, **kwargs: said.append(message))
    strategy = make()
    for _ in range(2):
        strategy.run(lambda: 1)
    assert len(said) == 1
    assert "WORLD_SIZE says that this process is one of several: each of them trains an independent copy" in said[0]


TWO = {"worker": ["localhost:1111", "localhost:2222"]}
SLURM = {
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "host",
    "SLURM_STEP_TASKS_PER_NODE": "2",
}
MAKE = {
    "DefaultStrategy": DefaultStrategy,
    "OneDeviceStrategy": lambda: ts.OneDeviceStrategy("cpu:0"),
    "MirroredStrategy": lambda: ts.MirroredStrategy(["cpu:0", "cpu:1"]),
    "CentralStorageStrategy": lambda: ts.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"]),
}


def task(cluster, job="worker"):
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": job, "index": 0}})}


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
@pytest.mark.parametrize(
    ("environ", "source"),
    [
        (task(TWO), "TF_CONFIG"),
        (SLURM, "SLURM"),
        (task({**TWO, "evaluator": ["localhost:3333"]}, "evaluator"), None),
        (task({"worker": TWO["worker"][:1]}), None),
        (task({**TWO, "ps": ["localhost:3333"]}), None),  # its workers need not train together
        ({"TF_CONFIG": "{"}, None),
        ({**task(TWO), **SLURM}, "TF_CONFIG"),
        ({**task({"worker": TWO["worker"][:1]}), **SLURM}, None),  # TF_CONFIG comes first
        ({**task({**TWO, "ps": ["localhost:3333"]}), **SLURM}, None),
        ({"TF_CONFIG": "{", **SLURM}, None),
        ({}, None),
    ],
)
def test_copies_of_a_cluster_are_warned_of(make, environ, source, monkeypatch):
    """The variables may be set after the strategy was made that comes with the library."""
    monkeypatch.setattr(log, "_said", set())
    said = []
    monkeypatch.setattr(log.warnings, "warn", lambda message, *args, **kwargs: said.append(message))
    strategy = make() if make is DefaultStrategy else None
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    strategy = strategy or make()
    for _ in range(2):
        strategy.run(lambda: 1)
    assert len(said) == (source is not None)
    assert all(f"{source} says that this process is one of several" in text for text in said)
    assert all("Use ts.MultiWorkerMirroredStrategy() to train one model together." in text for text in said)


def test_an_evaluation_takes_no_warning_from_the_training_after_it(monkeypatch):
    monkeypatch.setattr(log, "_said", set())
    monkeypatch.setenv("WORLD_SIZE", "2")
    strategy = DefaultStrategy()
    with training_nothing():
        strategy.run(lambda: 1)
    with pytest.warns(UserWarning, match="independent copy"):
        strategy.run(lambda: 1)
