"""Regularizers of parameters and losses that layers add, on one replica and on several."""

import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import torchstrategy as ts
from tests.programs import cpu_devices, largest_difference, strategy_for
from torchstrategy.errors import InvalidArgumentError
from torchstrategy.losses import layer_losses

L2 = ts.regularizers.L2(0.5)


class Activity(nn.Module):
    """Adds the mean of what it lets through."""

    def __init__(self, factor=1.0):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        if self.training:
            ts.add_loss(self.factor * x.square().mean())
        return x


def values(model):
    return [loss.item() for loss in ts.losses_of(model)]


def number_of_losses(model):
    """Return the number as a tensor: equal integers of all replicas would be returned once."""
    return torch.tensor(len(ts.losses_of(model)))


def linear(*shape):
    layer = nn.Linear(*shape)
    for parameter in layer.parameters():
        nn.init.ones_(parameter)
    return layer


def mirrored(num_replicas):
    return ts.MirroredStrategy(cpu_devices(num_replicas))


def on_replicas(strategy, fn, *args):
    return [result.tolist() for result in strategy.experimental_local_results(strategy.run(fn, args=args))]


# Regularizers


def test_regularizers_of_all_submodules():
    model = nn.Sequential(linear(2, 3), nn.ReLU(), nn.Sequential(linear(3, 1)))
    assert ts.losses_of(model) == []
    ts.regularize(model, "0.weight", L2)
    ts.regularize(model[0], "bias", ts.regularizers.L1(1.0))
    ts.regularize(model, "2.0.weight", lambda weight: weight.sum())
    assert values(model) == [3.0, 3.0, 3.0]
    assert values(model[2]) == [3.0]
    assert "regular" not in str(model.state_dict().keys())
    sum(ts.losses_of(model)).backward()
    assert model[0].weight.grad.tolist() == [[1.0, 1.0]] * 3
    ts.regularize(model, "0.weight", None)
    assert values(model) == [3.0, 3.0]


def test_regularize_returns_the_layer_as_a_keyword_of_its_constructor_would_in_keras():
    model = nn.Sequential(ts.regularize(linear(2, 3), "weight", L2), ts.regularize(nn.Linear(3, 1), "bias", None))
    assert values(model) == [3.0]
    assert ts.regularize(model, "0.bias", L2) is model


def test_what_cant_be_regularized():
    model = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1, bias=False))
    for name in ("weight", "0.weights", "2.weight", "", "1.bias", "0"):
        with pytest.raises(ValueError, match=r"has no parameter .*It has: 0\.bias, 0\.weight, 1\.weight"):
            ts.regularize(model, name, L2)
    with pytest.raises(ValueError, match="It has: no parameters"):
        ts.regularize(nn.ReLU(), "weight", L2)
    with pytest.raises(ValueError, match="and 5 more"):
        ts.regularize(nn.ParameterList([torch.zeros(1)] * 25), "weight", L2)
    for bad in (ts.regularizers.L2, "l2", 0.1):
        with pytest.raises(TypeError, match=r"like ts.regularizers.L2\(1e-4\)"):
            ts.regularize(model, "0.weight", bad)
    with pytest.raises(TypeError, match="name must be"):
        ts.regularize(model, model[0].weight, L2)
    with pytest.raises(TypeError, match=r"Expected a torch.nn.Module"):
        ts.regularize([model], "weight", L2)
    with pytest.raises(TypeError, match=r"Expected a torch.nn.Module"):
        ts.losses_of(None)
    ts.regularize(model, "0.weight", L2)
    with pytest.raises(ValueError, match=r"has a regularizer already: L2\(l2=0.5\)"):
        ts.regularize(model, "0.weight", ts.regularizers.L1())
    assert len(ts.losses_of(model)) == 1


def test_tied_weights_and_shared_modules_count_once():
    layer = linear(2, 2)
    model = nn.ModuleDict({"a": layer, "b": linear(2, 2), "same": layer})
    model["b"].weight = layer.weight
    ts.regularize(model, "a.weight", L2)
    assert values(model) == [2.0]


def test_parametrized_weight():
    layer = linear(2, 3)
    ts.regularize(layer, "weight", L2)
    parametrizations.weight_norm(layer)
    nn.init.constant_(layer.parametrizations.weight.original0, 2.0)  # the norm of each row
    assert values(layer) == [pytest.approx(6.0)]
    ts.regularize(layer, "weight", None)
    ts.regularize(layer, "weight", L2)
    ts.regularize(layer, "parametrizations.weight.original0", L2)
    assert values(layer) == pytest.approx([6.0, 6.0])
    with pytest.raises(ValueError, match=r"It has: bias, weight, parametrizations\.weight\.original0"):
        ts.regularize(layer, "other", L2)


def test_copies_have_the_regularizers_and_states_do_not():
    model = nn.Sequential(linear(2, 3))
    ts.regularize(model, "0.weight", L2)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert values(again) == [3.0]
        nn.init.zeros_(again[0].weight)
        assert values(again) == [0.0]
    assert values(model) == [3.0]
    fresh = nn.Sequential(nn.Linear(2, 3))
    fresh.load_state_dict(model.state_dict())
    assert values(fresh) == []


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_regularizers_on_replicas(num_replicas, when):
    strategy = mirrored(num_replicas)
    with strategy.scope():
        model = nn.Sequential(linear(2, 3), nn.ReLU())
    if when == "after":
        strategy.run(lambda: None)
    ts.regularize(model, "0.weight", L2)
    ts.regularize(model[0], "bias", L2)

    def fn():
        losses = ts.losses_of(model)
        ts.nn.scale_regularization_loss(losses).backward()
        return torch.stack(losses).detach(), model[0].weight.grad.clone()

    for losses, grad in strategy.experimental_local_results(strategy.run(fn)):
        assert losses.tolist() == [3.0, 1.5]
        assert grad.tolist() == [[1.0 / num_replicas] * 2] * 3
    strategy.run(lambda: model.zero_grad())
    assert values(model) == [3.0, 1.5]
    assert sorted(model.state_dict()) == ["0.bias", "0.weight"]
    with pytest.raises(ValueError, match=r"It has: 0\.bias, 0\.weight"):
        ts.regularize(model, "weight", L2)
    ts.regularize(model, "0.bias", None)
    assert on_replicas(strategy, lambda: number_of_losses(model)) == [1] * num_replicas
    assert values(copy.deepcopy(model)) == [3.0]
    assert values(pickle.loads(pickle.dumps(model))) == [3.0]


# Added losses


def test_losses_are_those_of_the_last_call():
    model = nn.Sequential(Activity(), nn.Flatten(), Activity(0.5))
    ts.regularize(nn.Sequential(model, linear(2, 1)), "1.weight", L2)
    assert values(model) == []
    for _ in range(3):
        model(torch.full((1, 2), 2.0))
        assert values(model) == [4.0, 2.0]
    model.eval()(torch.ones(1, 2))
    assert values(model) == []


def test_regularizers_come_first():
    model = nn.Sequential(Activity(), linear(1, 1))
    ts.regularize(model, "1.weight", L2)
    model(torch.full((1, 1), 2.0))
    assert values(model) == [0.5, 4.0]


def test_a_shared_layer_adds_twice():
    layer = Activity()
    model = nn.Sequential(layer, nn.Linear(1, 1), layer)
    for _ in range(2):
        x = torch.full((1, 1), 3.0)
        model(x)
        assert values(model) == [9.0, pytest.approx(model[1](x).item() ** 2)]


def test_a_part_that_is_called_alone():
    layer = Activity()
    inner = nn.Sequential(layer, nn.Identity())
    model = nn.Sequential(inner, layer)
    x = torch.ones(1)
    inner(x)
    assert values(model) == [1.0]
    model(2 * x)
    assert values(model) == [4.0, 4.0]  # without the first call's
    inner(3 * x)
    assert values(model) == [9.0]
    layer.eval()
    model(x)
    assert values(model) == []
    layer.train()
    inner(x)
    layer.eval()
    layer(x)
    assert values(inner) == values(model) == []


def test_a_new_whole_around_a_part_that_adds_nothing_now():
    layer = Activity()
    layer(torch.ones(1))
    model = nn.Sequential(layer).eval()
    model(torch.ones(1))
    assert values(model) == []


def test_a_part_that_leaves_out_its_layer():
    class Optional(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Activity()

        def forward(self, x, penalised=True):
            return self.layer(x) if penalised else x

    part = Optional()
    nn.Sequential(part)(torch.ones(1))
    assert values(part) == [1.0]
    part(torch.ones(1), penalised=False)
    assert values(part) == []


def test_a_module_that_calls_itself():
    class Recursive(nn.Module):
        def forward(self, x, depth):
            ts.add_loss(x)
            return x if depth == 0 else self(x + 1, depth - 1)

    model = Recursive()
    for _ in range(2):
        model(torch.tensor(1.0), 2)
        assert values(model) == [1.0, 2.0, 3.0]


def test_a_call_that_fails():
    class Failing(nn.Module):
        def forward(self, x, fails):
            ts.add_loss(x)
            if fails:
                raise ValueError("wrong")
            return x

    model = nn.ModuleList([Failing()])[0]
    with pytest.raises(ValueError, match="wrong"):
        model(torch.tensor(1.0), fails=True)
    model(torch.tensor(2.0), fails=False)
    assert values(model) == [2.0]


def test_in_a_helper_of_the_layer():
    class Helped(nn.Module):
        def penalise(self, x):
            (lambda: ts.add_loss(x))()

        def forward(self, x):
            self.penalise(x)
            return x

    model = nn.Sequential(Helped())
    model(torch.tensor(2.0))
    assert values(model) == values(model[0]) == [2.0]


def test_graphs_of_earlier_calls_are_freed():
    model = nn.Sequential(nn.Linear(2, 2), Activity())
    model(torch.ones(1, 2))
    (first,) = ts.losses_of(model)
    reference = weakref.ref(first)
    del first
    assert reference() is not None
    model(torch.ones(1, 2))
    assert reference() is None
    (last,) = ts.losses_of(model)
    reference = weakref.ref(last)
    del last, model
    gc.collect()
    assert reference() is None


def test_named_module():
    model = nn.Sequential(Activity(), nn.Identity())
    ts.add_loss(torch.tensor(5.0), module=model)
    assert values(model) == [5.0]
    model(torch.ones(1))
    assert values(model) == [1.0]
    ts.add_loss(torch.tensor(5.0), module=model[1])
    assert values(model) == [1.0, 5.0]
    model(torch.ones(1))
    assert values(model) == [1.0]

    class Naming(nn.Module):
        def __init__(self, other):
            super().__init__()
            self.inner = nn.Identity()
            self.others = [other]

        def forward(self, x, ours=True):
            ts.add_loss(x, module=self.inner if ours else self.others[0])
            return x

    model = Naming(nn.Identity())
    for _ in range(2):
        model(torch.tensor(3.0))
        assert values(model) == values(model.inner) == [3.0]
    with pytest.raises(ValueError, match="Identity is not part of Naming, which is being called"):
        model(torch.tensor(3.0), ours=False)


def test_where_no_module_is_called():
    with pytest.raises(RuntimeError, match=r"`model\(x\)` \(not `model.forward\(x\)`\).*module=self"):
        ts.add_loss(torch.tensor(1.0))
    with pytest.raises(RuntimeError, match="while no module is being called"):
        Activity().forward(torch.ones(1))
    assert Activity().eval().forward(torch.ones(1)).item() == 1.0


@pytest.mark.parametrize(
    ("value", "error"),
    [(1.0, TypeError), ([torch.tensor(1.0)], TypeError), (torch.tensor(True), InvalidArgumentError)],
)
def test_bad_values(value, error):
    model = nn.Identity()
    with pytest.raises(error, match="The value of add_loss must be"):
        ts.add_loss(value, module=model)
    assert ts.losses_of(model) == []
    with pytest.raises(TypeError, match=r"Expected a torch\.nn\.Module"):
        ts.add_loss(torch.tensor(1.0), module="model")


def test_copies_and_pickles_are_without_added_losses():
    model = nn.Sequential(nn.Linear(1, 1), Activity())
    model(torch.ones(1, 1))
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert values(again) == []
        for factor in (1.0, 2.0):
            x = torch.full((1, 1), factor)
            again(x)
            assert values(again) == [pytest.approx(model[0](x).item() ** 2)]
    assert len(values(model)) == 1
    assert sorted(model.state_dict()) == ["0.bias", "0.weight"]


def test_models_without_added_losses_have_no_hooks():
    model = nn.Sequential(nn.Linear(1, 1), Activity().eval())
    ts.regularize(model, "0.weight", L2)
    model(torch.ones(1, 1))
    ts.losses_of(model)
    assert [dict(module._forward_pre_hooks) for module in model.modules()] == [{}] * 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo's own, at any break in a graph
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_under_torch_compile(backend):
    model = nn.Sequential(nn.Linear(2, 2), Activity(), nn.Tanh(), Activity(3.0))
    compiled = torch.compile(model, backend=backend)
    for factor in (1.0, 2.0, 3.0):
        x = torch.full((1, 2), factor)
        compiled(x)
        losses = ts.losses_of(compiled)
        (grad,) = torch.autograd.grad(sum(losses), model[0].weight)
        assert len(losses) == 2
        model(x)
        assert [loss.item() for loss in losses] == pytest.approx(values(model))
        torch.testing.assert_close(grad, torch.autograd.grad(sum(ts.losses_of(model)), model[0].weight)[0])
    ts.regularize(compiled, "0.weight", L2)
    assert len(ts.losses_of(compiled)) == len(ts.losses_of(model)) == 3


def test_module_compile():
    model = nn.Sequential(Activity(), nn.Tanh())
    model.compile(backend="eager")
    for factor in (1.0, 2.0):
        model(torch.full((1,), factor))
        assert values(model) == [factor**2]


# On replicas


def test_replicas_have_their_own_losses():
    strategy = mirrored(3)
    with strategy.scope():
        layer = Activity()
        model = nn.Sequential(layer, nn.Identity(), layer)

    def fn():
        replica_id = ts.get_replica_context().replica_id_in_sync_group
        model(torch.tensor(replica_id + 1.0))
        return torch.stack(ts.losses_of(model))

    for _ in range(3):
        assert on_replicas(strategy, fn) == [[1.0, 1.0], [4.0, 4.0], [9.0, 9.0]]
        assert values(model) == [1.0, 1.0]
    model(torch.tensor(5.0))
    assert values(model) == [25.0, 25.0]
    assert on_replicas(strategy, lambda: number_of_losses(model)) == [2, 2, 2]
    assert on_replicas(strategy, fn)[2] == [9.0, 9.0]
    model.eval()
    strategy.run(lambda: model(torch.tensor(1.0)))
    assert on_replicas(strategy, lambda: number_of_losses(model)) == [0, 0, 0]


def test_replicas_that_run_at_the_same_time():
    strategy = ts.MirroredStrategy(cpu_devices(3), concurrent=True)
    with strategy.scope():
        model = nn.Sequential(*[Activity() for _ in range(20)])

    def fn():
        x = ts.get_replica_context().replica_id_in_sync_group + 1.0
        for _ in range(5):
            model(torch.tensor(x))
        return torch.stack(ts.losses_of(model))

    assert on_replicas(strategy, fn) == [[1.0] * 20, [4.0] * 20, [9.0] * 20]


def test_losses_from_before_the_first_run():
    strategy = mirrored(2)
    with strategy.scope():
        model = nn.Sequential(nn.Linear(1, 1), Activity())
    model(torch.ones(1, 1))

    def fn():
        model(torch.ones(1, 1))
        model(torch.zeros(1, 1))
        return number_of_losses(model)

    assert on_replicas(strategy, fn) == [1, 1]


def test_only_some_replicas_add_a_loss():
    strategy = mirrored(2)
    with strategy.scope():
        model = nn.Sequential(Activity())

    def fn(adds):
        model.train(ts.get_replica_context().replica_id_in_sync_group in adds)
        model(torch.ones(1))
        return number_of_losses(model)

    for adds in ([1], [1], [0], [], [0, 1], [0, 1]):
        assert on_replicas(strategy, fn, adds) == [int(i in adds) for i in range(2)]


def test_run_called_in_a_forward():
    strategy = mirrored(2)
    with strategy.scope():
        model = nn.Sequential(Activity())

    class Trainer(nn.Module):
        def forward(self):
            return [on_replicas(strategy, step) for _ in range(3)]

    def step():
        model(torch.ones(1))
        return number_of_losses(model)

    assert Trainer()() == [[1, 1]] * 3


class PenalisedNet(nn.Module):
    """Adds losses of its activations, of its weights, and a mean that an empty share turns into nan."""

    def __init__(self, weight_loss=False, activity_loss=False):
        super().__init__()
        self.first, self.second = nn.Linear(5, 4), nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.ones(4))
        self.weight_loss, self.activity_loss = weight_loss, activity_loss

    def forward(self, x):
        hidden = torch.tanh(self.first(x)) * self.scale
        if self.weight_loss:
            ts.add_loss(1e-2 * self.second.weight.square().sum())
        if self.activity_loss:
            ts.add_loss(0.1 * (hidden.square().mean(0) * self.scale.exp()).sum())
        return self.second(hidden)


def train(devices, batch_size, num_examples, regularized=True, weight_loss=False, activity_loss=False):
    """Train with layer losses; return the parameters and the summed losses of all steps."""
    torch.manual_seed(11)
    strategy = strategy_for(devices)
    x, y = torch.randn(num_examples, 5), torch.randint(3, (num_examples,))
    with strategy.scope():
        model = PenalisedNet(weight_loss, activity_loss)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    if regularized:
        ts.regularize(model, "first.weight", ts.regularizers.L1L2(l1=1e-2, l2=1e-2))
        ts.regularize(model.second, "bias", ts.regularizers.L2(1e-1))
    loss_object = ts.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    dataset = strategy.experimental_distribute_dataset((x, y), batch_size=batch_size)

    def train_step(images, labels):
        optimizer.zero_grad()
        loss = ts.nn.compute_average_loss(loss_object(labels, model(images)), global_batch_size="actual")
        loss = loss + ts.nn.scale_regularization_loss(ts.losses_of(model))
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses = [
        float(strategy.reduce("sum", strategy.run(train_step, args=batch), axis=None))
        for _ in range(2)
        for batch in dataset
    ]
    assert len(ts.losses_of(model)) == 2 * regularized + weight_loss + activity_loss
    return [parameter.detach().flatten().tolist() for parameter in model.parameters()] + [losses]


def train_plainly(batch_size, num_examples, activity_loss=False):
    """What ``train`` does, written with torch alone."""
    torch.manual_seed(11)
    x, y = torch.randn(num_examples, 5), torch.randint(3, (num_examples,))
    model = PenalisedNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    losses = []
    for _ in range(2):
        for images, labels in zip(x.split(batch_size), y.split(batch_size), strict=True):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss = loss + 1e-2 * (model.first.weight.abs() + model.first.weight.square()).sum()
            loss = loss + 1e-1 * model.second.bias.square().sum()
            if activity_loss:
                hidden = torch.tanh(model.first(images)) * model.scale
                loss = loss + 0.1 * (hidden.square().mean(0) * model.scale.exp()).sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return [parameter.detach().flatten().tolist() for parameter in model.parameters()] + [losses]


# batch size and number of examples: tails of 1 and 3 leave replicas without examples
TAILS = [(4, 9), (5, 13)]
WEIGHTS_ONLY = {"weight_loss": True}
ACTIVITY = {"activity_loss": True}


@pytest.mark.parametrize(("batch_size", "num_examples"), TAILS)
@pytest.mark.parametrize("num_replicas", [0, 1, 2, 3])
def test_weight_regularizers_are_exact(num_replicas, batch_size, num_examples):
    expected = train_plainly(batch_size, num_examples)
    assert largest_difference(train(cpu_devices(num_replicas), batch_size, num_examples), expected) < 1e-6


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_added_losses_of_weights_are_exact(num_replicas):
    expected = train([], 4, 9, **WEIGHTS_ONLY)
    assert largest_difference(train(cpu_devices(num_replicas), 4, 9, **WEIGHTS_ONLY), expected) < 1e-6


@pytest.mark.parametrize("num_replicas", [0, 1, 2, 3])
def test_added_losses_of_activations_are_exact_for_equal_shares(num_replicas):
    expected = train_plainly(6, 12, **ACTIVITY)
    assert largest_difference(train(cpu_devices(num_replicas), 6, 12, **ACTIVITY), expected) < 1e-6


def test_two_processes(process_pool):
    pool = process_pool(2)
    for batch_size, num_examples in TAILS:
        for result in pool.run(train, None, batch_size, num_examples):
            assert largest_difference(result, train_plainly(batch_size, num_examples)) < 1e-6
    for result in pool.run(train, None, 4, 9, True, True):
        assert largest_difference(result, train([], 4, 9, **WEIGHTS_ONLY)) < 1e-6
    for result in pool.run(train, None, 6, 12, True, False, True):
        assert largest_difference(result, train_plainly(6, 12, **ACTIVITY)) < 1e-6
    in_threads = train(cpu_devices(2), 4, 9, **ACTIVITY)
    for result in pool.run(train, None, 4, 9, True, False, True):
        assert largest_difference(result, in_threads) < 1e-6


def activity_on_shares(strategy, x):
    """Return the sum over replicas of a mean's loss, and of its gradient."""
    with strategy.scope():
        model = nn.Sequential(nn.Linear(1, 1, bias=False), Activity())
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        nn.init.ones_(model[0].weight)
    (batch,) = strategy.experimental_distribute_dataset(x, batch_size=len(x))

    def fn(part):
        model(part)
        loss = ts.nn.scale_regularization_loss(ts.losses_of(model))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return strategy.reduce("sum", strategy.run(fn, args=(batch,)), axis=None).item(), 1.0 - model[0].weight.item()


def test_uneven_shares_follow_the_rule_of_tf():
    x = torch.tensor([[1.0], [2.0], [3.0]])
    means = [(1.0 + 4.0) / 2, 9.0]
    assert activity_on_shares(mirrored(1), x) == (pytest.approx(14 / 3), pytest.approx(28 / 3))
    assert activity_on_shares(mirrored(2), x) == (pytest.approx(sum(means) / 2), pytest.approx(sum(means)))


def test_an_empty_share_counts_as_nothing():
    loss, gradient = activity_on_shares(mirrored(2), torch.tensor([[3.0]]))
    assert (loss, gradient) == (pytest.approx(9.0 / 2), pytest.approx(9.0))


class Adding(nn.Module):
    """Adds what a function makes of its activations and its weight."""

    def __init__(self, loss):
        super().__init__()
        self.layer, self.loss = nn.Linear(3, 2), loss

    def forward(self, x):
        y = self.layer(x)
        ts.add_loss(self.loss(y, self.layer.weight))
        return y


@pytest.mark.parametrize(
    ("loss", "is_sum"),
    [
        (lambda y, w: 0.1 * y.square().sum(), True),
        (lambda y, w: -y.sum((0, 1)), True),
        (lambda y, w: y.square().sum(1), True),
        (lambda y, w: 0.1 * y.square().mean(), False),
        (lambda y, w: y.square().sum(1).mean(), False),
        (lambda y, w: y.sum() / len(y), False),
        (lambda y, w: 0.1 * w.square().sum(), False),
    ],
)
def test_a_sum_over_a_share_is_warned_of(loss, is_sum):
    strategy = mirrored(2)
    with strategy.scope():
        model = Adding(loss)
    (batch,) = strategy.experimental_distribute_dataset(torch.ones(4, 3), batch_size=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy.run(lambda x: model(x).sum(), args=(batch,))
    assert len(caught) == is_sum
    if is_sum:
        assert "test_layer_losses.py" in str(caught[0].message)
        assert "is a sum over the examples of this replica's share of the batch" in str(caught[0].message)


def test_nan_is_not_hidden_where_there_are_examples():
    loss, _ = activity_on_shares(mirrored(2), torch.tensor([[float("nan")], [1.0]]))
    assert loss != loss


def test_a_loop_sees_regularizers_and_losses_that_come_later():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    losses = layer_losses.LayerLosses()
    assert losses.of(model) == []
    ts.regularize(model, "0.weight", ts.regularizers.L2(0.5))
    assert len(losses.of(model)) == 1
    other = copy.deepcopy(model)
    ts.regularize(model, "0.weight", None)
    assert losses.of(model) == []
    losses.begin()
    assert len(losses.of(other)) == 1
    ts.add_loss(torch.ones(()), model)
    losses.begin()
    assert [loss.item() for loss in losses.of(model)] == [1.0]
