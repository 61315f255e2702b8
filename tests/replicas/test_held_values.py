"""What the program holds of an object's attributes and changes there, without the object, reaches every replica."""

import array
import itertools
import random
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import torchstrategy as ts
from tests.replicas.runs import on_replicas


class Slots:
    __slots__ = ("gain",)

    def __init__(self):
        self.gain = 1.0


class Thing:
    def __init__(self):
        self.value, self.gain, self.drawn = torch.ones(1), 1.0, None

    def draw(self):
        self.drawn = [torch.rand(1).item(), random.random(), np.random.rand()]

    def configured(self, gain):
        self.gain = gain
        return self


def attribute(name, value):
    return lambda held: setattr(held, name, value)


#: What an attribute is, what is done to it, and what shows it.
CASES = {
    "list": (lambda: [1.0], lambda held: held.append(2.0), list),
    "end of a long list": (lambda: [0] * 10_000, lambda held: held.append(1), sum),
    "middle of a list in a dict": (lambda: {"a": [1, 2, 3]}, lambda held: held["a"].insert(1, 7), str),
    "dict": (dict, lambda held: held.update(a=1), dict),
    "set": (set, lambda held: held.add(1), sorted),
    "deque": (lambda: deque([1.0], maxlen=2), lambda held: held.append(2.0), list),
    "bytes": (lambda: bytearray(b"a"), lambda held: held.extend(b"b"), bytes),
    "numbers": (lambda: array.array("d", [1.0]), lambda held: held.append(2.0), list),
    "array": (lambda: np.ones(3), lambda held: held.__setitem__(1, 5.0), lambda held: held.tolist()),
    "large array": (lambda: np.ones(1 << 16), lambda held: held.__imul__(2.0), lambda held: held.sum()),
    "object": (lambda: SimpleNamespace(gain=1.0), attribute("gain", 2.0), lambda held: held.gain),
    "object with slots": (Slots, attribute("gain", 2.0), lambda held: held.gain),
    "random numbers": (lambda: random.Random(1), lambda held: held.random(), lambda held: held.getstate()),
    "numpy's random numbers": (
        lambda: np.random.default_rng(1),
        lambda held: held.random(),
        lambda held: held.bit_generator.state,
    ),
    "numpy's older random numbers": (
        lambda: np.random.RandomState(1),
        lambda held: held.rand(),
        lambda held: held.get_state()[1].tolist(),
    ),
    "count": (itertools.count, next, repr),
    "tensor": (lambda: torch.ones(1), lambda held: held.add_(1.0), lambda held: held.item()),
    "tensor's data": (lambda: torch.ones(1), lambda held: held.data.add_(1.0), lambda held: held.item()),
    "tensor in a dict": (lambda: {"a": torch.ones(1)}, lambda held: held["a"].add_(1.0), lambda held: held["a"].item()),
    "data of a tensor in an object": (
        lambda: SimpleNamespace(a=[{"b": torch.ones(1)}]),
        lambda held: held.a[0]["b"].data.add_(1.0),
        lambda held: held.a[0]["b"].item(),
    ),
}


@pytest.fixture
def strategy():
    return ts.MirroredStrategy(["cpu:0", "cpu:1"])


@pytest.mark.filterwarnings("ignore:Pickle, copy, and deepcopy support will be removed from itertools")
@pytest.mark.parametrize("way", ["from before", "read", "set", "set anew"])
@pytest.mark.parametrize("name", CASES)
def test_a_change_of_what_is_held_reaches_every_replica(strategy, name, way):
    make, change, show = CASES[name]
    held = make()
    with strategy.scope():
        model = nn.Identity()
        model.held = held if way == "from before" else make() if way == "read" else None
    if way != "set":
        strategy.run(lambda: None)
    if way == "read":
        held = model.held
    elif way != "from before":
        model.held = held
    if way != "set anew":
        strategy.run(lambda: None)
    change(held)
    expected = make()
    change(expected)
    assert on_replicas(strategy, lambda: show(model.held)) == (show(expected),) * 2
    change(held)
    change(expected)
    assert on_replicas(strategy, lambda: show(model.held)) == (show(expected),) * 2


def test_what_a_run_made_of_an_attribute_stays_the_replicas_own(strategy):
    with strategy.scope():
        model = nn.Identity()
        model.ids = []
    add = lambda: model.ids.append(ts.get_replica_context().replica_id_in_sync_group)  # noqa: E731
    for _ in range(2):
        strategy.run(add)
    assert on_replicas(strategy, lambda: model.ids) == ([0, 0], [1, 1])


def test_what_two_objects_hold_stays_one_object(strategy):
    shared = SimpleNamespace(gain=1.0)
    with strategy.scope():
        models = [nn.Identity(), nn.Identity()]
        for model in models:
            model.shared = shared
    strategy.run(lambda: None)
    shared.gain = 2.0
    found = on_replicas(strategy, lambda: (models[0].shared is models[1].shared, models[0].shared.gain))
    assert found == ((True, 2.0),) * 2


@pytest.mark.parametrize(
    "write",
    [
        lambda model: vars(model).update(gain=2.0),
        lambda model: model.__dict__.__setitem__("gain", 2.0),
        lambda model: object.__setattr__(model, "gain", 2.0),
    ],
)
def test_attributes_that_are_written_past_the_module(strategy, write):
    class Model(nn.Module):
        gain = 1.0

    with strategy.scope():
        model = Model()
    strategy.run(lambda: None)
    write(model)
    assert model.gain == 2.0
    assert on_replicas(strategy, lambda: model.gain) == (2.0, 2.0)


@pytest.mark.parametrize("is_buffer", [True, False])
def test_data_of_tensors_that_came_after_the_first_runs(strategy, is_buffer):
    with strategy.scope():
        model = nn.Identity()
    strategy.run(lambda: None)
    model.register_buffer("new", torch.ones(1)) if is_buffer else setattr(model, "new", torch.ones(1))
    strategy.run(lambda: None)
    model.new.data.add_(1.0)
    assert on_replicas(strategy, lambda: model.new.item()) == (2.0, 2.0)


def test_a_state_dict_of_an_optimizer_is_its_state(strategy):
    with strategy.scope():
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step():
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()

    strategy.run(step)
    optimizer.state_dict()["state"][0]["momentum_buffer"].zero_()
    found = on_replicas(strategy, lambda: optimizer.state[model.weight]["momentum_buffer"].item())
    assert found == (0.0, 0.0)


def test_transforms_of_a_model_outside_run(strategy):
    with strategy.scope():
        model = nn.Linear(2, 1)
    strategy.run(lambda: None)

    def loss(parameters):
        return torch.func.functional_call(model, parameters, (torch.ones(1, 2),)).sum()

    gradients = torch.func.grad(loss)({name: value.detach() for name, value in model.named_parameters()})
    assert gradients["weight"].tolist() == [[1.0, 1.0]]
    weights = on_replicas(strategy, lambda: model.weight.detach().clone())
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], model.weight)


def test_data_of_tensors_of_objects_that_are_no_modules(strategy):
    counter = strategy.replicate(Thing())
    strategy.run(lambda: None)
    counter.value.data.add_(1.0)
    assert on_replicas(strategy, lambda: counter.value.item()) == (2.0, 2.0)


def test_a_method_that_draws_gives_the_replicas_the_same(strategy):
    thing = strategy.replicate(Thing())
    strategy.run(lambda: None)
    torch.manual_seed(0)
    thing.draw()
    after = torch.rand(1)
    torch.manual_seed(0)
    expected = torch.rand(1).item()
    assert torch.equal(after, torch.rand(1)), "it drew once"
    found = on_replicas(strategy, lambda: thing.drawn)
    assert found[0] == found[1]
    assert found[0][0] == expected


def test_a_method_that_returns_its_object_returns_the_facade(strategy):
    thing = strategy.replicate(Thing())
    strategy.run(lambda: None)
    same = thing.configured(2.0)
    same.gain += 1.0
    assert same is thing
    assert on_replicas(strategy, lambda: thing.gain) == (3.0, 3.0)


def test_a_class_method_gets_the_plain_class(strategy):
    class Model(nn.Module):
        gain = 1.0

        @classmethod
        def configure(cls, gain):
            cls.gain = gain

    with strategy.scope():
        model = Model()
    strategy.run(lambda: None)
    model.configure(2.0)
    assert on_replicas(strategy, lambda: model.gain) == (2.0, 2.0)


def test_gradients_that_are_set_to_zero_outside_stay_sums(strategy):
    with strategy.scope():
        model = nn.Linear(1, 1)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=1)

    def step():
        def closure():
            optimizer.zero_grad()
            loss = model(torch.ones(1, 1)).square().sum() / 2
            loss.backward()
            return loss

        optimizer.step(closure)

    strategy.run(step)
    optimizer.zero_grad(set_to_none=False)
    model.zero_grad(set_to_none=False)
    strategy.run(step)
    assert on_replicas(strategy, lambda: model.weight.grad is not None) == (True, True)


# Writes past torch's version counter, outside run, to tensors that replica functions write to as well.


class Written(nn.Module):
    """What its buffers and attributes hold is each replica's own, or made anew, in each run."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(2))
        self.register_buffer("alike", torch.zeros(2))
        self.attribute, self.held = torch.zeros(2), {"list": [torch.zeros(2)]}

    def forward(self, x):
        self.total += x.sum()
        self.attribute = self.attribute + 1
        self.held["list"][0] = self.held["list"][0] + x.sum()
        return self.total.clone(), self.alike.clone(), self.attribute.clone(), self.held["list"][0].clone()


WRITTEN = {
    "a buffer": (0, lambda model: model.total),
    "a buffer beside it": (1, lambda model: model.alike),
    "an attribute": (2, lambda model: model.attribute),
    "in an attribute": (3, lambda model: model.held["list"][0]),
}
UNSEEN_WRITES = {
    "in place": lambda tensor: tensor.data.fill_(7.0),
    "to a view": lambda tensor: tensor.data.view(-1).fill_(7.0),
    "other memory": lambda tensor: setattr(tensor, "data", torch.full((2,), 7.0)),
}


@pytest.mark.parametrize("write", UNSEEN_WRITES)
@pytest.mark.parametrize("what", WRITTEN)
def test_writes_by_data_reach_what_replicas_write_to(what, write):
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = Written()
    position, read = WRITTEN[what]
    (data,) = strategy.experimental_distribute_dataset(torch.tensor([[1.0], [1.0], [2.0], [2.0]]), batch_size=4)
    for number in range(4):
        if number in (2, 3):
            UNSEEN_WRITES[write](read(model))
        strategy.run(model, args=(data,))
    seen = strategy.experimental_local_results(strategy.run(model, args=(data,)))
    steps = {0: [2.0, 4.0], 1: [0.0, 0.0], 2: [1.0, 1.0], 3: [2.0, 4.0]}[position]
    assert [own[position].tolist() for own in seen] == [[7 + 2 * step] * 2 for step in steps]
