"""Optimizers, schedulers and gradient scalers that were made outside the scope, for a model that was made inside."""

import gc
import pickle

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import torchstrategy as ts
from tests.programs import cpu_devices, strategy_for
from torchstrategy.replicas import record
from torchstrategy.replicas.mirrored import bodies, mirror_of
from torchstrategy.replicas.record import owner


@pytest.fixture(params=[2, 3])
def strategy(request):
    return ts.MirroredStrategy(cpu_devices(request.param))


def make_model(strategy):
    with strategy.scope():
        model = nn.Linear(2, 1).double()
        nn.init.constant_(model.weight, 0.5)
        nn.init.zeros_(model.bias)
    return model


def train(devices, late, where="outside"):
    """Adam and a schedule; returns the weights and rates after each step."""
    strategy = strategy_for(devices)
    model = make_model(strategy)
    if late:
        strategy.run(lambda: None)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, amsgrad=True)
    scheduler = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8)
    data = strategy.experimental_distribute_dataset(torch.arange(22.0).double().reshape(11, 2) / 22, batch_size=4)

    def step(x):
        optimizer.zero_grad()
        ts.nn.compute_average_loss(model(x).sin().sum(1), global_batch_size="actual").backward()
        optimizer.step()
        if where == "inside":
            scheduler.step()

    rows = []
    for x in list(data) * 2:
        strategy.run(step, args=(x,))
        if where == "outside":
            scheduler.step()
        rows.append([*model.weight.flatten().tolist(), model.bias.item(), optimizer.param_groups[0]["lr"]])
    return rows


@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
def test_optimizer_and_scheduler_work_as_if_made_inside(late, where, process_pool):
    expected = torch.tensor(train([], late, where))
    for count in (1, 2, 3):
        torch.testing.assert_close(torch.tensor(train(cpu_devices(count), late, where)), expected)
    for result in process_pool(2).run(train, None, late, where):
        torch.testing.assert_close(torch.tensor(result), expected)


def test_each_replica_has_its_own(strategy):
    model = make_model(strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    assert owner(optimizer) is None
    strategy.run(lambda: None)
    assert owner(optimizer) is owner(scheduler) is strategy
    assert len({id(body) for body in bodies(optimizer)}) == strategy.num_replicas_in_sync
    for body, own in zip(bodies(optimizer), bodies(model), strict=True):
        assert body.param_groups[0]["params"][0] is own.weight
    assert [schedule.optimizer for schedule in bodies(scheduler)[1:]] == list(bodies(optimizer)[1:])
    assert isinstance(optimizer, torch.optim.SGD)


def test_optimizer_of_a_variable(strategy):
    with strategy.scope():
        variable = ts.Variable(1.0)
    optimizer = torch.optim.SGD([variable], lr=0.25)

    def step():
        optimizer.zero_grad()
        (variable * 2.0).backward()
        optimizer.step()

    strategy.run(step)
    assert float(variable) == 1.0 - 0.5 * strategy.num_replicas_in_sync


def test_step_outside_run_is_refused_before_the_first_run_too(strategy):
    model = make_model(strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="outside `run`"):
            optimizer.step()
        strategy.run(lambda: None)


def test_what_belongs_to_no_strategy_stays_plain(strategy):
    make_model(strategy)
    other = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.5)
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    strategy.run(lambda: None)
    assert mirror_of(optimizer) is mirror_of(scheduler) is owner(optimizer) is None
    start = other.bias.item()
    other(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    scheduler.step()
    assert other.bias.item() == pytest.approx(start - 0.5)


def test_two_strategies_take_up_their_own(strategy):
    second = ts.MirroredStrategy(cpu_devices(2))
    models = make_model(strategy), make_model(second)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    second.run(lambda: None)
    strategy.run(lambda: None)
    assert [owner(optimizer) for optimizer in optimizers] == [strategy, second]


def test_made_inside_run_stays_the_replicas_own(strategy):
    model = make_model(strategy)
    made = []
    strategy.run(lambda: made.append(torch.optim.SGD(model.parameters(), lr=0.1)))
    strategy.run(lambda: None)
    assert [owner(optimizer) for optimizer in made] == [None] * strategy.num_replicas_in_sync


def test_dropped_objects_are_forgotten(strategy):
    model = make_model(strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    key = id(optimizer)
    assert key in record._unclaimed
    del optimizer
    gc.collect()
    assert key not in record._unclaimed


def scaled_steps(devices, made):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if made == "before" else None
    strategy = strategy_for(devices)
    model = make_model(strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if made == "outside":
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    elif made == "inside":
        with strategy.scope():
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def step(bad):
        first = ts.get_replica_context().replica_id_in_sync_group == 0
        optimizer.zero_grad()
        scaler.scale(model(torch.full((1, 2), float("inf") if bad and first else 0.5).double()).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    for bad in (False, True, False):
        strategy.run(step, args=(bad,))
    return [*model.weight.flatten().tolist(), model.bias.item(), scaler.get_scale()]


def test_scaler_sees_all_replicas_where_it_can_and_is_refused_elsewhere(process_pool):
    """Otherwise the replica whose gradient overflows would skip a step that the others take."""
    expected = scaled_steps(cpu_devices(2), "inside")
    for made in ("outside", "before"):  # also before there was a strategy
        for result in process_pool(2).run(scaled_steps, None, made):
            assert result == pytest.approx(expected)
    assert scaled_steps([], "outside")[-1] == scaled_steps(cpu_devices(1), "outside")[-1] == 4.0
    for made in ("outside", "before"):
        with pytest.raises(RuntimeError, match="GradScaler that was made outside"):
            scaled_steps(cpu_devices(2), made)


@pytest.mark.parametrize("inside", [True, False])
def test_scaler_is_pickled_as_the_plain_class(strategy, inside):
    if inside:
        with strategy.scope():
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        strategy.run(lambda: None)
    else:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    again = pickle.loads(pickle.dumps(scaler))
    assert type(again) is torch.amp.GradScaler
    assert again.get_scale() == 4.0


def test_a_class_of_scalers_that_is_made_later_sums_first(strategy):
    class Late(torch.amp.GradScaler):
        def unscale_(self, optimizer):
            seen.append([parameter.grad.clone() for group in optimizer.param_groups for parameter in group["params"]])
            super().unscale_(optimizer)

    model = make_model(strategy)
    seen = []
    with strategy.scope():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = Late("cpu", init_scale=2.0)

    def step():
        own = ts.get_replica_context().replica_id_in_sync_group + 1.0
        scaler.scale(own * model(torch.ones(1, 2).double()).sum()).backward()
        scaler.unscale_(optimizer)

    strategy.run(step)
    total = 2.0 * sum(range(1, strategy.num_replicas_in_sync + 1))
    for gradients in seen:
        assert all(gradient.eq(total).all() for gradient in gradients)


def test_a_parameter_in_the_place_of_one_that_is_gone_is_a_stranger():
    strategy = strategy_for(cpu_devices(2))
    with strategy.scope():
        model = nn.Linear(2, 1)
    strategy.run(lambda: None)
    outside = nn.Linear(2, 1)
    for local_id, weight in enumerate(strategy.experimental_local_results(strategy.run(lambda: model.weight))):
        known = strategy.gradients._parameters[local_id]
        known.update({id(parameter): known[id(weight)] for parameter in outside.parameters()})  # an id comes again
    optimizer = torch.optim.SGD(outside.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        outside(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    with pytest.raises(RuntimeError, match="does not belong to this replica"):
        strategy.run(step)


class Counting(nn.Module):
    """Has a variable, as a buffer or as an attribute."""

    def __init__(self, way, variable):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        if way == "buffer":
            self.register_buffer("seen", variable)
        else:
            self.seen = variable


def outside_variable(*, trainable):
    return ts.Variable(0.0, trainable=trainable, aggregation=ts.VariableAggregation.SUM)


def put_into_a_model(devices, way, when):
    """Count with a variable from outside that is put into a model; return what was said."""
    strategy = strategy_for(devices)
    variable = outside_variable(trainable=way == "parameter")
    if when == "replicated":
        model = strategy.replicate(Counting(way, variable))
    else:
        with strategy.scope():
            model = nn.Linear(1, 1) if when == "later" else Counting(way, variable)
    try:
        strategy.run(lambda: None)
        if when == "later":
            model.seen = variable
    except TypeError as error:
        return str(error)
    strategy.run(lambda: model.seen.assign_add(torch.ones(())))
    return float(model.seen)


@pytest.mark.parametrize("when", ["replicated", "in the scope", "later"])
@pytest.mark.parametrize("way", ["attribute", "buffer", "parameter"])
def test_a_variable_from_outside_is_refused_in_a_model(way, when):
    """Its copies would not be aggregated: each replica would count by itself."""
    found = put_into_a_model(cpu_devices(2), way, when)
    name = "Linear" if when == "later" else "Counting"
    assert found.startswith(f"{name}.seen is a ts.Variable that was made outside `strategy.scope()`"), found
    assert put_into_a_model(cpu_devices(1), way, when) == 1.0


def test_a_variable_from_outside_is_refused_in_a_model_of_processes(process_pool):
    for found in process_pool(2).run(put_into_a_model, None, "buffer", "replicated"):
        assert "made outside `strategy.scope()`" in found
