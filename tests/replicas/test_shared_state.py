"""What each replica of a process changes in a run, although there is one of it for all, is told of."""

import contextlib
import copy
import re
import warnings

import pytest
import torch

import torchstrategy as ts
from tests.programs import cpu_devices


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


class Plain:
    """An object of the program's."""

    def __init__(self):
        self.hidden, self.confusion, self.total, self.losses = None, torch.zeros(3, 3), 0.0, []


def recurrent(strategy, place):
    """Carry the hidden state of a recurrent network from batch to batch, and return the last state."""
    torch.manual_seed(0)
    with strategy.scope():
        model = torch.nn.RNN(2, 3, batch_first=True)
        model.hidden = None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hidden, held, obj = None, {"h": None}, Plain()

    def step(x, given=None):
        nonlocal hidden
        before = {"nonlocal": hidden, "dict": held["h"], "object": obj.hidden, "module": model.hidden, "args": given}
        optimizer.zero_grad()
        output, now = model(x, before[place])
        now = now.detach()
        if place == "nonlocal":
            hidden = now
        elif place == "dict":
            held["h"] = now
        elif place == "object":
            obj.hidden = now
        elif place == "module":
            model.hidden = now
        ts.nn.compute_average_loss(output.square().sum((1, 2)), global_batch_size=4).backward()
        optimizer.step()
        return now

    last = None
    for x in strategy.experimental_distribute_dataset(torch.ones(12, 5, 2), batch_size=4):
        last = strategy.run(step, args=(x, last) if place == "args" else (x,))
    return model.weight_hh_l0.detach().clone()


@pytest.mark.parametrize("place", ["nonlocal", "dict", "object"])
def test_a_state_that_is_carried_where_all_replicas_find_it_is_warned_of(place):
    name = {"nonlocal": "hidden", "dict": r"held\['h'\]", "object": "obj.hidden"}[place]
    with pytest.warns(UserWarning, match=f"^`{name}` was set by each of 2 replicas.*`args` takes") as caught:
        recurrent(ts.MirroredStrategy(cpu_devices(2)), place)
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("place", ["module", "args"])
def test_a_state_that_each_replica_has_for_itself_is_right(place):
    found, expected = (
        recurrent(make(), place) for make in (lambda: ts.MirroredStrategy(cpu_devices(2)), ts.get_strategy)
    )
    torch.testing.assert_close(found, expected)


def test_a_value_of_which_the_program_sees_the_last_replicas_is_warned_of():
    strategy, last = ts.MirroredStrategy(cpu_devices(2)), None

    def step(x):
        nonlocal last
        last = x.sum().item()

    values = strategy.experimental_distribute_values_from_function(lambda c: torch.ones(3 + c.replica_id_in_sync_group))
    with pytest.warns(UserWarning, match="^`last` was set by each of 2 replicas"):
        strategy.run(step, args=(values,))
    assert last == 4


def test_what_adds_up_or_is_alike_is_not_warned_of():
    strategy, obj, loss, total = ts.MirroredStrategy(cpu_devices(2)), Plain(), None, torch.zeros(())

    def step(x):
        nonlocal loss, total
        total = total + x.sum()
        obj.total += x.sum().item()
        obj.confusion = obj.confusion + x.sum()
        obj.losses.append(x.sum())
        loss = ts.get_replica_context().all_reduce("SUM", x.sum())

    values = strategy.experimental_distribute_values_from_function(lambda c: torch.ones(5 + c.replica_id_in_sync_group))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        strategy.run(step, args=(values,))
    assert (float(total), obj.total, float(loss)) == (11, 11, 11)


def test_how_a_function_is_called_wrongly_is_still_said():
    with pytest.raises(TypeError, match=r"`args` is spread over the parameters|args=\(batch,\)"):
        ts.MirroredStrategy(cpu_devices(2)).run(lambda batch: batch, args=(torch.ones(2), torch.ones(2)))
