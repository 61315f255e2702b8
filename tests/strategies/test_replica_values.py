import traceback

import pytest
import torch

import torchstrategy as ts
from tests.programs import cpu_devices

STRATEGIES = [
    ts.get_strategy,
    lambda: ts.OneDeviceStrategy("cpu:0"),
    lambda: ts.MirroredStrategy(["cpu:0"]),
    lambda: ts.MultiWorkerMirroredStrategy(devices=["cpu:0"]),
    lambda: ts.experimental.CentralStorageStrategy(["cpu:0"]),
    lambda: ts.MirroredStrategy(["cpu:0", "cpu:1"]),
]


@pytest.mark.parametrize("make", STRATEGIES)
def test_what_is_combined_over_replicas_has_no_graph(make):
    strategy = make()
    with strategy.scope():
        model = torch.nn.Linear(1, 1)

    def loss():
        return model(torch.ones(2, 1))

    value = strategy.run(loss)
    assert all(own.requires_grad for own in strategy.experimental_local_results(value))
    combined = [
        strategy.reduce("SUM", value),
        strategy.reduce("MEAN", {"a": value})["a"],
        strategy.reduce("MEAN", value, axis=0),
        strategy.reduce("MEAN", torch.ones(1, requires_grad=True) * 2),  # a plain value
        strategy.gather(value, axis=0),
        strategy.run(lambda: ts.get_replica_context().merge_call(lambda s, x: s.reduce("SUM", x), args=(loss(),))),
    ]
    if strategy is not ts.get_strategy():
        combined.append(strategy.extended.reduce_to("SUM", value, "cpu:0"))
    assert [own.requires_grad for own in combined] == [False] * len(combined)
    summed = strategy.run(lambda: ts.get_replica_context().all_reduce("SUM", loss()))
    assert all(own.requires_grad for own in strategy.experimental_local_results(summed))


@pytest.mark.parametrize("make", STRATEGIES)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_the_mean_of_integers_is_of_a_sum_that_does_not_overflow(make, dtype):
    strategy, largest = make(), torch.iinfo(dtype).max
    value = strategy.run(lambda: torch.full((2,), largest, dtype=dtype))
    means = [
        strategy.reduce("MEAN", value),
        strategy.reduce("MEAN", value, axis=0),
        strategy.run(lambda v: ts.get_replica_context().all_reduce("MEAN", v), args=(value,)),
    ]
    if strategy is not ts.get_strategy():
        means.append(strategy.extended.reduce_to("MEAN", value, "cpu:0"))
    for mean in means:
        assert all((own == largest).all() for own in strategy.experimental_local_results(mean))


def step(batch):
    return float(batch + "no number") if isinstance(batch, float) else batch


def step_of_two(x, y):
    return x + y


@pytest.mark.parametrize("make", STRATEGIES)
def test_a_batch_that_was_spread_over_the_parameters_is_told_of(make):
    strategy = make()
    with pytest.raises(TypeError, match="takes 1 positional argument but 2 were given") as raised:
        strategy.run(step, args=(torch.ones(2), torch.ones(2)))
    assert "To give it one batch, write args=(batch,)." in raised.value.__notes__[-1]
    assert len(traceback.extract_tb(raised.value.__traceback__)) == 2  # this test's line, and that of `run`
    for fn, args in ((step_of_two, (1,)), (step_of_two, (1, 2, 3)), (step, (1.0,))):  # those who err otherwise
        with pytest.raises(TypeError) as raised:
            strategy.run(fn, args=args)
        assert "write args=(batch,)" not in str(getattr(raised.value, "__notes__", ""))


def test_a_step_that_was_called_without_run_is_told_so():
    strategy = ts.MirroredStrategy(cpu_devices(2))
    (batch,) = strategy.experimental_distribute_dataset(torch.ones(4, 2), batch_size=4)
    with pytest.raises(ValueError, match=r"linear\(\) was given a PerReplica, one value.*strategy\.run\(fn, args"):
        torch.nn.Linear(2, 1)(batch)
    with pytest.raises(
        RuntimeError, match=r"^The actual batch size is not known.*distribute_dataset\(loader\)`, not over"
    ):
        strategy.run(lambda _: ts.get_replica_context().actual_batch_size(), args=(torch.ones(4),))
