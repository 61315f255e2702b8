import contextlib
import copy
import re
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


class Trainer:
    def __init__(self):
        self.num_steps, self.num_examples, self.state = 0, 0, {"step": 0}

    def step(self, x):
        self.num_steps += 1
        self.num_examples += len(x)


def counting_steps(name):
    trainer, number, tensor = Trainer(), 0, torch.tensor(0)
    state = trainer.state

    def own_step(x):
        nonlocal number
        number += 1

    def step_of_a_tensor(x):
        tensor.add_(1)

    def step_of_a_dict(x):
        state["step"] += 1

    def sums(x):
        trainer.num_examples += len(x)

    steps = {"self.num_steps": trainer.step, "number": own_step, "tensor": step_of_a_tensor, "sums": sums}
    return {"state['step']": step_of_a_dict, **steps}[name]


@pytest.mark.parametrize("name", ["self.num_steps", "number", "state['step']", "tensor"])
def test_a_number_that_each_replica_counts_up_is_warned_of(name):
    strategy, step = ts.MirroredStrategy(cpu_devices(2)), counting_steps(name)
    with pytest.warns(UserWarning, match=f"^`{re.escape(name)}` grew by 2 in one run") as caught:
        strategy.run(step, args=(torch.ones(3),))
    assert [warning.filename for warning in caught] == [__file__]


def test_each_of_many_functions_is_looked_at():
    """The code of one that is gone may lie where that of another one lay."""
    strategy = ts.MirroredStrategy(cpu_devices(2))
    for number in range(6):
        names = {f"calls{number}": {"n": 0}}
        exec(compile(f"def step():\n    calls{number}['n'] += 1", f"<cell {number}>", "exec"), names)
        with pytest.warns(UserWarning, match=rf"^`calls{number}\['n'\]` grew by 2 in one run"):
            strategy.run(names.pop("step"))


def test_a_counter_is_named_where_it_lets_replicas_part():
    strategy, calls = ts.MirroredStrategy(cpu_devices(2)), {"n": 0}

    def step():
        calls["n"] += 1
        if calls["n"] % 2 == 0:
            ts.get_replica_context().all_reduce("SUM", torch.ones(1))

    with pytest.warns(UserWarning, match="grew by 2 in one run"), pytest.raises(RuntimeError, match="merge_call"):
        strategy.run(step)


def test_a_module_from_outside_that_each_replica_updates_is_warned_of():
    strategy = ts.MirroredStrategy(cpu_devices(2))
    average = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(1, 1))
    with pytest.warns(UserWarning, match=r"^`average.n_averaged` grew by 2 in one run.*make the object in the scope"):
        strategy.run(lambda: average.update_parameters(average.module))
    trainer = Trainer()
    trainer.average = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(1, 1))
    with pytest.warns(UserWarning, match=r"^`trainer.average.n_averaged` grew by 2 in one run"):
        strategy.run(lambda: trainer.average.update_parameters(trainer.average.module))


def updates(strategy, way):
    """Train with a target network, a copy of the model that is made outside the scope, and return its last weight."""
    with strategy.scope():
        model = torch.nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.nn.init.ones_(model.weight)
    with strategy.scope() if way == "in the scope" else contextlib.nullcontext():
        target = copy.deepcopy(model)

    def update():
        if way == "copied":
            target.load_state_dict(model.state_dict())
        elif way != "by one" or ts.get_replica_context().replica_id_in_sync_group == 0:
            with torch.no_grad():
                target.weight.mul_(0.5).add_(model.weight, alpha=0.5)

    def step(x):
        optimizer.zero_grad()
        ts.nn.compute_average_loss(model(x).square().sum(1), global_batch_size="actual").backward()
        optimizer.step()
        update()

    for x in strategy.experimental_distribute_dataset(torch.ones(8, 1), batch_size=4):
        strategy.run(step, args=(x,))
    return target.weight.item()


def test_weights_from_outside_that_each_replica_updates_are_warned_of():
    with pytest.warns(UserWarning, match=r"^`target.weight` was changed by each of 2 replicas.*in the scope") as caught:
        updates(ts.MirroredStrategy(cpu_devices(2)), "outside")
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("way", ["in the scope", "by one", "copied"])
def test_weights_that_are_updated_once_are_not_warned_of(way):
    assert updates(ts.MirroredStrategy(cpu_devices(2)), way) == pytest.approx(updates(ts.get_strategy(), way))


def test_a_count_of_the_scopes_modules_in_one_from_outside_is_not_warned_of():
    strategy = ts.MirroredStrategy(cpu_devices(2))
    with strategy.scope():
        model = torch.nn.Sequential(torch.nn.BatchNorm1d(1))
    both, part = torch.nn.ModuleList([model]), model[0]

    def twice(x):
        assert part is not both
        return both[0](model(x))

    for _ in range(3):
        strategy.run(twice, args=(torch.ones(3, 1),))
    assert part.num_batches_tracked == 6


def test_numbers_that_add_up_over_replicas_or_are_a_modules_are_not_warned_of():
    strategy = ts.MirroredStrategy(cpu_devices(2))
    with strategy.scope():
        model = torch.nn.Linear(1, 1)
    model.num_steps = 0

    def step(x):
        model.num_steps += 1

    strategy.run(step, args=(torch.ones(3),))
    strategy.run(counting_steps("sums"), args=(torch.ones(3),))
    assert model.num_steps == 1
