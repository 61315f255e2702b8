"""The facade: what the user's object does inside and outside ``run``."""

import copy
import io
import pickle
import types

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import torchstrategy as ts
from torchstrategy.replicas.mirrored import bodies, mirror_of


class Counting(nn.Module):
    """A module with plain attributes of all kinds."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.calls = 0
        self.history = []
        self.options = {"scale": 1.0}
        self.cache = torch.zeros(2)

    def forward(self, x):
        self.calls += 1
        self.history.append(len(x))
        return self.linear(x) * self.options["scale"]

    def doubled(self):
        return self.calls * 2


class Double(nn.Module):
    def forward(self, x):
        return 2 * x

    def right_inverse(self, x):
        return x / 2


@pytest.fixture(params=[2, 3])
def strategy(request):
    return ts.MirroredStrategy([f"cpu:{i}" for i in range(request.param)])


def make(strategy, build):
    with strategy.scope():
        return build()


def started(strategy, build):
    obj = make(strategy, build)
    strategy.run(lambda: None)
    assert mirror_of(obj) is not None
    return obj


def on_replicas(strategy, fn):
    results = strategy.experimental_local_results(strategy.run(fn))
    return results if len(results) > 1 else results * strategy.num_replicas_in_sync  # the same object on all


def equal_everywhere(strategy, fn):
    values = on_replicas(strategy, lambda: copy.deepcopy(fn()))
    for value in values[1:]:
        assert_same(value, values[0])
    return values[0]


def assert_same(value, expected):
    if isinstance(expected, (list, tuple)):
        for item, wanted in zip(value, expected, strict=True):
            assert_same(item, wanted)
    elif isinstance(expected, dict):
        assert value.keys() == expected.keys()
        assert_same(list(value.values()), list(expected.values()))
    elif isinstance(expected, torch.Tensor):
        torch.testing.assert_close(value, expected)
    else:
        assert value == expected


def replica_id():
    return ts.get_replica_context().replica_id_in_sync_group


def test_identity_as_seen_by_user_code(strategy):
    model = started(strategy, Counting)
    assert isinstance(model, Counting)
    assert model.__class__ is Counting
    assert type(model).__name__ == "Counting"
    assert repr(model) == repr(bodies(model)[0])
    assert on_replicas(strategy, lambda: model.__class__ is Counting)[0]
    assert all(type(body) is Counting for body in bodies(model))
    assert [name for name, _ in model.named_modules()] == ["", "linear"]
    assert "linear" in dir(model)


def test_bodies_hold_no_facades(strategy):
    model = started(strategy, lambda: nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.ReLU())))
    assert all(mirror_of(m) is None for body in bodies(model) for m in body.modules())
    assert all(mirror_of(m) is not None for m in model.modules())


def test_plain_attributes_inside_are_each_replicas_own(strategy):
    model = started(strategy, Counting)
    n = strategy.num_replicas_in_sync

    def fn():
        for _ in range(replica_id() + 1):
            model(torch.ones(3, 2))
        return model.calls, len(model.history)

    assert on_replicas(strategy, fn) == tuple((i + 1, i + 1) for i in range(n))
    assert model.calls == 1
    assert model.history == [3]
    assert model.doubled() == 2


def test_plain_attributes_set_outside_reach_all(strategy):
    model = started(strategy, Counting)
    model.calls = 10
    model.history.append("x")
    model.options["scale"] = 3.0
    model.extra = {"new": [1]}
    model.cache.add_(5)
    result = equal_everywhere(strategy, lambda: [model.calls, len(model.history), model.options["scale"], model.cache])
    assert result[:3] == [10, 1, 3.0]
    assert result[3].tolist() == [5, 5]
    assert on_replicas(strategy, lambda: model.extra["new"].append(replica_id())) is not None
    assert model.extra == {"new": [1, 0]}
    del model.extra
    assert not any(on_replicas(strategy, lambda: hasattr(model, "extra")))


def test_names_for_containers_from_before_the_first_run_stay_good(strategy):
    model = make(strategy, Counting)
    history, weight = model.history, model.linear.weight
    strategy.run(lambda: model(torch.ones(1, 2)).sum().item())
    assert history is model.history
    assert history == [1]
    assert weight is model.linear.weight


def test_forward_outside_counts_on_all(strategy):
    model = started(strategy, Counting)
    model(torch.ones(4, 2))
    assert model.calls == 1
    assert equal_everywhere(strategy, lambda: [model.calls, *model.history]) == [1, 4]


def test_vars_outside_is_live(strategy):
    model = started(strategy, Counting)
    vars(model)["calls"] = 7
    assert model.calls == 7
    assert equal_everywhere(strategy, lambda: model.calls) == 7


def test_helper_object_changed_outside(strategy):
    class Config:
        dropout = 0.5

    def build():
        model = nn.Linear(1, 1)
        model.config = Config()
        model.config.dropout = 0.1
        return model

    model = started(strategy, build)
    model.config.dropout = 0.0
    assert equal_everywhere(strategy, lambda: model.config.dropout) == 0.0


def test_train_eval_and_requires_grad(strategy):
    model = started(strategy, lambda: nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)))
    assert model.eval() is model
    assert equal_everywhere(strategy, lambda: [m.training for m in model.modules()]) == [False] * 3
    model.train()
    assert equal_everywhere(strategy, lambda: [m.training for m in model.modules()]) == [True] * 3
    model.requires_grad_(False)
    assert equal_everywhere(strategy, lambda: [p.requires_grad for p in model.parameters()]) == [False] * 2
    strategy.run(lambda: model.train(replica_id() == 0))
    assert model.training
    assert not bodies(model)[1].training


@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU])
def test_recurrent_net_moves_and_trains(strategy, cell):
    model = started(strategy, lambda: cell(2, 3, num_layers=2))
    model.double()
    x = torch.ones(4, 1, 2, dtype=torch.float64)

    def fn():
        out = model(x)[0]
        out.sum().backward()
        return [p.grad.clone() for p in model.parameters()], out.detach()

    grads, out = equal_everywhere(strategy, fn)
    assert out.dtype == torch.float64
    torch.testing.assert_close(out, model(x)[0].detach())
    assert all(g.abs().sum() > 0 for g in grads)
    with torch.no_grad():
        model.weight_ih_l0.zero_()
    torch.testing.assert_close(equal_everywhere(strategy, lambda: model(x)[0].detach()), model(x)[0].detach())


def test_half_precision_and_back_with_gradients(strategy):
    model = started(strategy, lambda: nn.Linear(2, 2))
    strategy.run(lambda: model(torch.ones(1, 2)).sum().backward())
    model.zero_grad()
    model.to(torch.float64)
    assert (
        equal_everywhere(strategy, lambda: model(torch.ones(1, 2, dtype=torch.float64)).detach()).dtype == torch.float64
    )


def test_state_dict_round_trip(strategy):
    model = started(strategy, lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    other = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    other[1].running_mean.fill_(3)
    for assign in (False, True):
        state = {k: v + 1 if v.is_floating_point() else v for k, v in other.state_dict().items()}
        model.load_state_dict(state, assign=assign)
        torch.testing.assert_close(dict(model.state_dict()), state)
        found = equal_everywhere(strategy, lambda: dict(model.state_dict()))
        torch.testing.assert_close(found, state)
        other.load_state_dict(state)


def test_containers_outside(strategy):
    def build():
        return nn.ModuleDict(
            {
                "seq": nn.Sequential(nn.Linear(1, 1), nn.ReLU()),
                "list": nn.ModuleList([nn.Linear(1, 1)]),
                "params": nn.ParameterList([torch.ones(1), torch.zeros(1)]),
            }
        )

    model = started(strategy, build)
    assert len(model["seq"]) == 2
    assert isinstance(model["seq"][0], nn.Linear)
    assert [type(m).__name__ for m in model["seq"]] == ["Linear", "ReLU"]
    assert [p.item() for p in model["params"]] == [1.0, 0.0]
    assert "list" in model
    with strategy.scope():
        model["seq"].append(nn.Tanh())
        model["seq"].insert(0, nn.Flatten())
        model["list"].insert(0, nn.ReLU())
        model["list"].extend([nn.Linear(1, 2)])
        model["new"] = nn.Linear(3, 1)
    del model["seq"][2]
    model["params"].append(nn.Parameter(torch.full((1,), 5.0)))
    names = ["Flatten", "Linear", "Tanh"]
    assert [type(m).__name__ for m in model["seq"]] == names
    shapes = equal_everywhere(
        strategy,
        lambda: [
            [type(m).__name__ for m in model["seq"]],
            [type(m).__name__ for m in model["list"]],
            [p.item() for p in model["params"]],
            list(model.keys()),
            len(list(model.parameters())),
        ],
    )
    assert shapes == [names, ["ReLU", "Linear", "Linear"], [1.0, 0.0, 5.0], ["seq", "list", "params", "new"], 11]
    assert model["seq"](torch.ones(2, 1)).shape == (2, 1)
    model["seq"].pop(0)
    assert equal_everywhere(strategy, lambda: len(model["seq"])) == 2
    assert len(on_replicas(strategy, lambda: id(model["new"]))) == len(bodies(model))


def test_replaced_head_trains(strategy):
    def build():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        return model, torch.optim.SGD(model[0].parameters(), lr=0.1)

    model, optimizer = started_pair(strategy, build)
    with strategy.scope():
        model[1] = nn.Linear(2, 3)
    optimizer.add_param_group({"params": model[1].parameters(), "lr": 0.5})
    before = copy.deepcopy(model.state_dict())

    def step():
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        strategy.run(step)
    n = strategy.num_replicas_in_sync
    torch.testing.assert_close(model[1].bias, before["1.bias"] - 3 * 0.5 * n)
    assert equal_everywhere(strategy, lambda: [p.detach() for p in model.parameters()])


def started_pair(strategy, build):
    pair = make(strategy, build)
    strategy.run(lambda: None)
    return pair


def test_parameter_replaced_and_added_outside(strategy):
    model = started(strategy, lambda: nn.Linear(2, 1))
    model.weight = nn.Parameter(torch.full((1, 2), 4.0))
    model.register_parameter("scale", nn.Parameter(torch.ones(1)))
    model.register_buffer("offset", torch.ones(1))
    model.shift = nn.Parameter(torch.full((1,), 2.0))
    with strategy.scope():
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step():
        (model(torch.ones(1, 2)) * model.scale + model.offset + model.shift).sum().backward()
        optimizer.step()
        return [p.detach() for p in model.parameters()]

    values = equal_everywhere(strategy, step)
    assert values[-1].item() == 2.0 - strategy.num_replicas_in_sync
    with torch.no_grad():
        model.shift.fill_(9.0)
        model.offset.fill_(8.0)
    assert equal_everywhere(strategy, lambda: [model.shift.item(), model.offset.item()]) == [9.0, 8.0]


def test_weights_tied_outside_stay_tied(strategy):
    model = started(strategy, lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    model[1].weight = model[0].weight
    assert model[0].weight is model[1].weight
    assert all(on_replicas(strategy, lambda: model[0].weight is model[1].weight))


@pytest.mark.parametrize("before", [True, False])
def test_forward_hooks(strategy, before):
    class Hooked(nn.Linear):
        seen = 0

        def hook(self, module, args, output):
            self.seen += 1
            return output + 100

    model = make(strategy, lambda: Hooked(1, 1))
    if not before:
        strategy.run(lambda: None)
    handle = model.register_forward_hook(model.hook)
    doubled = model.register_forward_hook(lambda module, args, output: output * 2)
    expected = (model.weight + model.bias + 100).item() * 2
    outputs = on_replicas(strategy, lambda: (model(torch.ones(1, 1)).item(), model.seen))
    assert [output for output, _ in outputs] == pytest.approx([expected] * len(outputs), rel=1e-5)
    assert [seen for _, seen in outputs] == [1] * len(outputs)
    doubled.remove()
    handle.remove()
    outputs = on_replicas(strategy, lambda: model(torch.ones(1, 1)).item())
    assert list(outputs) == pytest.approx([expected / 2 - 100] * len(outputs), rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("before", [True, False])
def test_full_backward_hook_on_all(strategy, before):
    model = make(strategy, lambda: nn.Sequential(nn.Linear(1, 1)))
    if not before:
        strategy.run(lambda: None)
    calls = []
    model[0].register_full_backward_hook(lambda module, grads_in, grads_out: calls.append(replica_id()))
    strategy.run(lambda: model(torch.ones(1, 1, requires_grad=True)).sum().backward())
    assert calls == list(range(strategy.num_replicas_in_sync))


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters_reach_all(strategy, before, kind):
    model = make(strategy, lambda: nn.Linear(1, 1))
    if not before:
        strategy.run(lambda: None)
    calls = []
    handle = getattr(model.weight, kind)(lambda _: calls.append(replica_id()))
    strategy.run(lambda: model(torch.ones(1, 1)).sum().backward())
    assert calls == list(range(strategy.num_replicas_in_sync))
    handle.remove()
    strategy.run(lambda: model(torch.ones(1, 1)).sum().backward())
    assert len(calls) == strategy.num_replicas_in_sync


def test_attributes_of_parameters_are_copied(strategy):
    def build():
        model = nn.Linear(1, 1)
        model.weight.lr_scale = 0.5
        return model

    model = started(strategy, build)
    assert equal_everywhere(strategy, lambda: model.weight.lr_scale) == 0.5


def test_pickle_copy_and_save_see_the_plain_class(strategy):
    model = started(strategy, lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    copies = [pickle.loads(pickle.dumps(model)), copy.deepcopy(model), copy.copy(model)]
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies.append(torch.load(file, weights_only=False))
    for other in copies:
        assert type(other) is nn.Sequential
        assert all(mirror_of(m) is None for m in other.modules())
        torch.testing.assert_close(dict(other.state_dict()), dict(model.state_dict()))
    inside = on_replicas(strategy, lambda: type(copy.deepcopy(model)) is nn.Sequential)
    assert all(inside)


@pytest.mark.parametrize("before", [True, False])
def test_parametrization(strategy, before):
    model = make(strategy, lambda: nn.Sequential(nn.Linear(2, 2, bias=False)))
    if not before:
        strategy.run(lambda: None)
    with strategy.scope():
        parametrize.register_parametrization(model[0], "weight", Double())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    start = model[0].weight.detach().clone()

    def step():
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return model[0].weight.detach()

    weight = equal_everywhere(strategy, step)
    torch.testing.assert_close(weight, model[0].weight.detach())
    torch.testing.assert_close(weight, start - 0.1 * 4 * strategy.num_replicas_in_sync)
    assert parametrize.is_parametrized(model[0])
    model[0].weight = torch.full((2, 2), 6.0)
    assert equal_everywhere(strategy, lambda: model[0].weight.detach()).tolist() == [[6.0, 6.0]] * 2


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "norm",
    [
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        nn.utils.weight_norm,
        nn.utils.spectral_norm,
        lambda module: prune.l1_unstructured(module, "weight", 0.5),
    ],
)
@pytest.mark.parametrize("made", ["early", "late"])
def test_norms_and_masks_of_weights_equal_one_replica(strategy, norm, made):
    def train(current):
        torch.manual_seed(3)
        with current.scope():
            model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
        if made == "late":
            current.run(lambda: None)
        with current.scope():
            for layer in (model[0], model[2]):
                norm(layer)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.linspace(-1, 1, 12).reshape(6, 2)
        data = current.experimental_distribute_dataset(x, batch_size=6)

        def step(inputs):
            optimizer.zero_grad()
            ts.nn.compute_average_loss(model(inputs).square().sum(1), global_batch_size="actual").backward()
            optimizer.step()

        for _ in range(3):
            for batch in data:
                current.run(step, args=(batch,))
        return [p.detach().clone() for p in model.parameters()]

    torch.testing.assert_close(train(strategy), train(ts.MirroredStrategy(["cpu:0"])))


def test_apply_initialises_all(strategy):
    model = started(strategy, lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))

    def init(module):
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.25)
            module.tag = "done"

    model.apply(init)
    assert equal_everywhere(strategy, lambda: [model[1].weight.sum().item(), model[0].tag]) == [1.0, "done"]


def test_functional_call(strategy):
    model = started(strategy, lambda: nn.Linear(1, 1))
    state = {"weight": torch.full((1, 1), 3.0), "bias": torch.zeros(1)}
    for value in (*on_replicas(strategy, lambda: torch.func.functional_call(model, state, torch.ones(1, 1)).item()),):
        assert value == 3.0
    assert torch.func.functional_call(model, state, torch.ones(1, 1)).item() == 3.0


def test_getattr_of_a_users_wrapper(strategy):
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Counting()

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.inner, name)

        def forward(self, x):
            return self.inner(x)

    model = started(strategy, Wrapper)
    assert model.calls == 0
    assert model.linear.weight.shape == (2, 2)
    strategy.run(lambda: model(torch.ones(1, 2)).sum().item())
    assert model.calls == 1
    with pytest.raises(AttributeError, match="nothing"):
        _ = model.nothing


def test_property_and_class_attribute(strategy):
    class Module(nn.Module):
        size = 3

        def __init__(self):
            super().__init__()
            self.width = 1

        @property
        def area(self):
            return self.size * self.width

        @area.setter
        def area(self, value):
            self.width = value // self.size

    model = started(strategy, Module)
    model.area = 12
    assert model.area == 12
    assert equal_everywhere(strategy, lambda: [model.area, model.width]) == [12, 4]


def test_subclass_registry_does_not_see_facades(strategy):
    registry = []

    class Base(nn.Module):
        def __init_subclass__(cls, *, required):
            registry.append(cls)

    class Child(Base, required=1):
        pass

    started(strategy, Child)
    assert registry == [Child]


def test_replicated_object(strategy):
    class Counter:
        def __init__(self):
            self.count, self.items = 0, []

        def add(self, amount):
            self.count += amount
            return self.count

    counter = strategy.replicate(Counter())
    strategy.run(lambda: counter.add(replica_id() + 1))
    assert counter.count == 1
    assert counter.add(10) == 11
    assert on_replicas(strategy, lambda: counter.count) == tuple(11 + i for i in range(strategy.num_replicas_in_sync))
    counter.items.append("outside")
    counter.count = 0
    assert equal_everywhere(strategy, lambda: [counter.count, counter.items]) == [0, ["outside"]]
    assert isinstance(counter, Counter)


def test_replicated_object_that_is_called(strategy):
    class Caller:
        def __init__(self):
            self.calls = []

        def __call__(self, value):
            self.calls.append(value)
            return value

        def __len__(self):
            return len(self.calls)

    caller = strategy.replicate(Caller())
    strategy.run(lambda: caller("inside"))
    assert caller("outside") == "outside"
    assert len(caller) == 2
    assert equal_everywhere(strategy, lambda: [caller.calls, len(caller)]) == [["inside", "outside"], 2]
    assert pickle.loads(pickle.dumps(caller.calls)) == ["inside", "outside"]


def test_update_bn_outside(strategy):
    model = started(strategy, lambda: nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1)))
    torch.optim.swa_utils.update_bn([torch.full((4, 2), 3.0) + torch.eye(4, 2)], model)
    torch.testing.assert_close(model[0].running_mean, torch.full((2,), 3.25))
    assert model[0].momentum == 0.1
    found = equal_everywhere(strategy, lambda: [model[0].running_mean.clone(), model[0].momentum, model.training])
    torch.testing.assert_close(found[0], model[0].running_mean)


def test_tied_embedding_trains_like_one_replica(strategy):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(5, 3)
            self.head = nn.Linear(3, 5, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, x):
            return self.head(self.embedding(x))

    def train(current):
        torch.manual_seed(3)
        with current.scope():
            model = Tied()
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        data = current.experimental_distribute_dataset(torch.arange(10) % 5, batch_size=5)

        def step(inputs):
            optimizer.zero_grad()
            losses = nn.functional.cross_entropy(model(inputs), inputs, reduction="none")
            ts.nn.compute_average_loss(losses, global_batch_size="actual").backward()
            optimizer.step()
            assert model.head.weight is model.embedding.weight

        for batch in data:
            current.run(step, args=(batch,))
        assert model.head.weight is model.embedding.weight
        return model.head.weight.detach().clone()

    torch.testing.assert_close(train(strategy), train(ts.MirroredStrategy(["cpu:0"])))


def test_transformer_inside_and_outside(strategy):
    def build():
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    model = started(strategy, build)
    x = torch.randn(2, 3, 4)
    torch.testing.assert_close(equal_everywhere(strategy, lambda: model(x).detach()), model(x).detach())
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(x), equal_everywhere(strategy, lambda: model(x)))


def test_sparse_gradient_cleared_outside(strategy):
    model = started(strategy, lambda: nn.Embedding(4, 2, sparse=True))
    strategy.run(lambda: model(torch.tensor([1])).sum().backward())
    model.weight.grad.zero_()
    assert set(on_replicas(strategy, lambda: model.weight.grad.to_dense().abs().sum().item())) == {0.0}


def test_forward_replaced_on_the_object(strategy):
    model = started(strategy, lambda: nn.Linear(1, 1))
    plain = type(model).forward
    model.forward = types.MethodType(lambda self, x: plain(self, x) + 50, model)
    outputs = on_replicas(strategy, lambda: model(torch.zeros(1, 1)).item())
    assert list(outputs) == pytest.approx([model.bias.item() + 50] * len(outputs))
    assert model(torch.zeros(1, 1)).item() == pytest.approx(model.bias.item() + 50)


def test_optimizer_and_scheduler_pickle(strategy):
    def build():
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)

    _, optimizer, scheduler = started_pair(strategy, build)
    again = pickle.loads(pickle.dumps((optimizer, scheduler)))
    assert [type(obj) for obj in again] == [torch.optim.SGD, torch.optim.lr_scheduler.StepLR]
    assert again[1].optimizer.param_groups[0]["lr"] == 0.5
    assert copy.deepcopy(optimizer).param_groups[0]["momentum"] == 0.9


def test_structure_changed_inside_is_each_replicas_own_parameter(strategy):
    model = started(strategy, lambda: nn.Linear(1, 1))

    def fn():
        model.hidden = torch.full((1,), float(replica_id()))
        return model.hidden.item()

    assert on_replicas(strategy, fn) == tuple(float(i) for i in range(strategy.num_replicas_in_sync))
    assert model.hidden.item() == 0.0


#: What a program may take between two runs and call in the next one.
METHODS = {
    "clear": lambda objects: objects.optimizer.zero_grad,
    "clear the model": lambda objects: objects.model.zero_grad,
    "step": lambda objects: objects.optimizer.step,
    "schedule": lambda objects: objects.scheduler.step,
    "register": lambda objects: objects.model.register_forward_hook,
}


def weights_by_methods(count, taken):
    strategy = ts.MirroredStrategy([f"cpu:{i}" for i in range(count)])
    with strategy.scope():
        torch.manual_seed(0)
        model = nn.Linear(3, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    objects = types.SimpleNamespace(model=model, optimizer=optimizer, scheduler=scheduler)
    calls = {name: read(objects) for name, read in METHODS.items()}

    def step(x):
        calls["clear the model" if taken == "clear the model" else "clear"]()
        hook = calls["register"](lambda module, inputs, output: output * 0.5)
        ts.nn.compute_average_loss((model(x) - 1).square().sum(1), global_batch_size=4).backward()
        hook.remove()
        calls["step"]()
        calls["schedule"]()

    inputs = torch.arange(12.0).reshape(4, 3).double() / 12
    for _ in range(3):
        for batch in strategy.experimental_distribute_dataset(inputs, batch_size=4):
            strategy.run(step, args=(batch,))
        calls[taken] = METHODS[taken](objects)
    return model.weight.detach().clone()


@pytest.mark.parametrize("taken", METHODS)
def test_a_method_taken_outside_is_the_replicas_own_in_run(taken):
    torch.testing.assert_close(weights_by_methods(2, taken), weights_by_methods(1, taken), rtol=0, atol=1e-12)


def test_a_wrapper_calls_the_method_that_it_took(strategy):
    """In `run`, outside, and of objects with a counterpart for cross-replica context."""
    optimizer, metric = started_pair(
        strategy, lambda: (torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), ts.metrics.Sum())
    )
    calls = []
    clear, update = optimizer.zero_grad, metric.update_state
    optimizer.zero_grad = lambda: (calls.append(1), clear())
    metric.update_state = lambda value: update(2 * value)
    optimizer.zero_grad()
    strategy.run(lambda: (optimizer.zero_grad(), metric.update_state(1.0)))
    assert len(calls) == 2 * strategy.num_replicas_in_sync
    assert metric.result() == 2 * strategy.num_replicas_in_sync


def test_a_method_kept_in_an_attribute_is_each_replicas_own(strategy):
    model, optimizer = started_pair(strategy, lambda: (m := nn.Linear(1, 1), torch.optim.SGD(m.parameters(), lr=1.0)))
    model.clear = optimizer.zero_grad

    def step():
        model(torch.ones(1, 1)).sum().backward()
        kept = model.weight.grad is not None
        model.clear()
        return kept and model.weight.grad is None

    assert list(on_replicas(strategy, step)) == [True] * strategy.num_replicas_in_sync


def test_groups_taken_out_before_others_are_added(strategy):
    model, optimizer = started_pair(strategy, lambda: (m := nn.Linear(1, 1), torch.optim.SGD(m.parameters(), lr=1.0)))
    optimizer.param_groups.clear()
    optimizer.add_param_group({"params": [model.weight], "lr": 0.5})

    def rates():
        return [(group["lr"], [p is model.weight for p in group["params"]]) for group in optimizer.param_groups]

    assert equal_everywhere(strategy, rates) == [(0.5, [True])]
