"""What is copied for each replica, how the copies stay in step, and what is refused."""

import gc
import io
import threading
import types
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import torchstrategy as ts
from torchstrategy.replicas.copies import tensors_held
from torchstrategy.replicas.mirrored import bodies, mirror_of


@pytest.fixture(params=[2, 3])
def strategy(request):
    return ts.MirroredStrategy([f"cpu:{i}" for i in range(request.param)])


def make(strategy, build):
    with strategy.scope():
        return build()


def on_replicas(strategy, fn):
    results = strategy.experimental_local_results(strategy.run(fn))
    return results if len(results) > 1 else results * strategy.num_replicas_in_sync  # the same object on all


def replica_id():
    return ts.get_replica_context().replica_id_in_sync_group


def linear_and_sgd(lr=0.1, **options):
    model = nn.Linear(2, 1)
    nn.init.constant_(model.weight, 0.5)
    return model, torch.optim.SGD(model.parameters(), lr=lr, **options)


def sum_step(model, optimizer):
    """Gradient 1 on every replica, for every parameter."""
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def step_with(scheduler, model, optimizer):
    sum_step(model, optimizer)
    scheduler.step()


def copies_equal(*models):
    for model in models:
        first, *others = bodies(model)
        for other in others:
            torch.testing.assert_close(dict(other.state_dict()), dict(first.state_dict()))
    return True


# Optimizers and schedulers.

SCHEDULERS = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3], 0.1),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=8),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
}


def train_with_scheduler(strategy, name, made, stepped):
    rates = []
    with strategy.scope():
        model, optimizer = linear_and_sgd(momentum=0.9)
    if made == "late":
        strategy.run(lambda: None)
    with strategy.scope():
        scheduler = SCHEDULERS[name](optimizer)
    metric = (1.0,) if name == "ReduceLROnPlateau" else ()

    def step():
        sum_step(model, optimizer)
        if stepped == "inside":
            scheduler.step(*metric)

    for _ in range(5):
        strategy.run(step)
        if stepped == "outside":
            scheduler.step(*metric)
        rates.append(optimizer.param_groups[0]["lr"])
    assert copies_equal(model)
    strategy.run(lambda: None)
    assert len({body.param_groups[0]["lr"] for body in bodies(optimizer)}) == 1
    assert scheduler.get_last_lr() == [rates[-1]]
    return rates


@pytest.mark.parametrize("stepped", ["inside", "outside"])
@pytest.mark.parametrize("made", ["early", "late"])
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step:UserWarning")
def test_schedulers_equal_one_replica(name, made, stepped):
    two, one = (
        train_with_scheduler(ts.MirroredStrategy(d), name, made, stepped) for d in (["cpu:0", "cpu:1"], ["cpu:0"])
    )
    assert two == pytest.approx(one, rel=1e-12)
    assert len(set(two)) > 1


def test_scheduler_state_round_trip(strategy):
    model, optimizer = make(strategy, linear_and_sgd)
    scheduler = make(strategy, lambda: lr_scheduler.StepLR(optimizer, 1, 0.5))
    for _ in range(3):
        strategy.run(lambda: step_with(scheduler, model, optimizer))
    state = scheduler.state_dict()
    assert state["last_epoch"] == 3
    scheduler.load_state_dict({**state, "last_epoch": 7})
    assert on_replicas(strategy, lambda: scheduler.last_epoch) == (7,) * strategy.num_replicas_in_sync


def test_scheduler_before_optimizer_still_warns(strategy):
    _, optimizer = make(strategy, linear_and_sgd)
    scheduler = make(strategy, lambda: lr_scheduler.StepLR(optimizer, 1))
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        strategy.run(scheduler.step)


def test_learning_rate_changed_outside_and_inside(strategy):
    model, optimizer = make(strategy, linear_and_sgd)
    n = strategy.num_replicas_in_sync
    strategy.run(lambda: sum_step(model, optimizer))
    optimizer.param_groups[0]["lr"] = 0.01
    start = model.bias.item()
    strategy.run(lambda: sum_step(model, optimizer))
    assert start - model.bias.item() == pytest.approx(0.01 * n, rel=1e-3)

    def inside():
        for group in optimizer.param_groups:
            group["lr"] = 0.2

    strategy.run(inside)
    assert optimizer.param_groups[0]["lr"] == 0.2
    assert {body.param_groups[0]["lr"] for body in bodies(optimizer)} == {0.2}


def test_tensor_learning_rate(strategy):
    model, optimizer = make(strategy, lambda: linear_and_sgd(torch.tensor(0.1), foreach=False))
    strategy.run(lambda: sum_step(model, optimizer))
    optimizer.param_groups[0]["lr"].fill_(0.0)
    before = model.weight.detach().clone()
    strategy.run(lambda: sum_step(model, optimizer))
    torch.testing.assert_close(model.weight.detach(), before)
    assert copies_equal(model)


def test_add_param_group_outside(strategy):
    def build():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        return model, torch.optim.SGD(model[0].parameters(), lr=0.1)

    model, optimizer = make(strategy, build)
    strategy.run(lambda: None)
    optimizer.add_param_group({"params": model[1].parameters(), "lr": 0.5})
    assert len(optimizer.param_groups) == 2
    before = model[1].bias.item()
    strategy.run(lambda: sum_step(model, optimizer))
    assert before - model[1].bias.item() == pytest.approx(0.5 * strategy.num_replicas_in_sync, rel=1e-4)
    assert copies_equal(model)


def test_optimizer_state_round_trip(strategy):
    model, optimizer = make(strategy, lambda: linear_and_sgd(momentum=0.9))
    for _ in range(2):
        strategy.run(lambda: sum_step(model, optimizer))
    state = optimizer.state_dict()
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    kept = {k: {n: t.clone() for n, t in entry.items()} for k, entry in state["state"].items()}
    strategy.run(lambda: sum_step(model, optimizer))
    after = model.weight.detach().clone()
    model.load_state_dict(weights)
    optimizer.load_state_dict({**state, "state": kept})
    buffers = [body.state[body.param_groups[0]["params"][0]]["momentum_buffer"] for body in bodies(optimizer)]
    assert len({buffer.data_ptr() for buffer in buffers}) == len(buffers)
    strategy.run(lambda: sum_step(model, optimizer))
    torch.testing.assert_close(model.weight.detach(), after)
    assert copies_equal(model)


def test_optimizer_state_edited_outside(strategy):
    model, optimizer = make(strategy, lambda: linear_and_sgd(momentum=0.9))
    strategy.run(lambda: sum_step(model, optimizer))
    for entry in optimizer.state.values():
        entry["momentum_buffer"].zero_()
    before = model.bias.item()
    strategy.run(lambda: sum_step(model, optimizer))
    assert before - model.bias.item() == pytest.approx(0.1 * strategy.num_replicas_in_sync, rel=1e-4)
    assert copies_equal(model)


def test_optimizer_hooks_and_zero_grad_outside(strategy):
    model, optimizer = make(strategy, linear_and_sgd)
    calls = []
    early = optimizer.register_step_post_hook(lambda *_: calls.append("early"))
    strategy.run(lambda: None)
    late = optimizer.register_step_pre_hook(lambda *_: calls.append("late"))
    strategy.run(lambda: sum_step(model, optimizer))
    n = strategy.num_replicas_in_sync
    assert (calls.count("early"), calls.count("late")) == (n, n)
    early.remove()
    late.remove()
    optimizer.zero_grad()
    assert model.weight.grad is None
    assert set(on_replicas(strategy, lambda: model.weight.grad)) == {None}
    strategy.run(lambda: sum_step(model, optimizer))
    assert len(calls) == 2 * n


def test_gradient_dropped_or_zeroed_outside_reaches_all(strategy):
    model, _ = make(strategy, linear_and_sgd)
    for clear in (lambda: setattr(model.weight, "grad", None), lambda: model.weight.grad.zero_()):
        strategy.run(lambda: model(torch.ones(1, 2)).sum().backward())
        clear()
        found = on_replicas(strategy, lambda: model.weight.grad is None or model.weight.grad.sum().item() == 0)
        assert set(found) == {True}
        model.zero_grad()


def test_several_optimizers_and_late_ones(strategy):
    def build():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        return model, torch.optim.SGD(model[0].parameters(), lr=0.1)

    model, first = make(strategy, build)
    strategy.run(lambda: None)
    second = make(strategy, lambda: torch.optim.Adam(model[1].parameters(), lr=0.1))
    late = make(strategy, lambda: nn.Sequential(model, nn.Linear(1, 1)))
    third = make(strategy, lambda: torch.optim.SGD(late[1].parameters(), lr=0.1))
    start = {k: v.clone() for k, v in late.state_dict().items()}

    def step():
        late(torch.ones(1, 2)).sum().backward()
        for optimizer in (first, second, third):
            optimizer.step()
            optimizer.zero_grad()

    strategy.run(step)
    assert all(not torch.equal(v, start[k]) for k, v in late.state_dict().items())
    assert copies_equal(late)
    assert late[0] is model


def test_sam_like_wrapper_equals_one_replica():
    class SAM(torch.optim.Optimizer):
        def __init__(self, params, rho=0.5, lr=0.1):
            super().__init__(params, {"rho": rho, "lr": lr})
            self.base_optimizer = torch.optim.SGD(self.param_groups, lr=lr, momentum=0.9)
            self.param_groups = self.base_optimizer.param_groups

        @torch.no_grad()
        def step(self, closure):
            closure = torch.enable_grad()(closure)
            moved = []
            for group in self.param_groups:
                for p in group["params"]:
                    e = p.grad * group["rho"]
                    p.add_(e)
                    moved.append((p, e))
            self.zero_grad()
            loss = closure()
            for p, e in moved:
                p.sub_(e)
            self.base_optimizer.step()
            self.zero_grad()
            return loss

    def train(devices):
        strategy = ts.MirroredStrategy(devices)
        torch.manual_seed(0)
        with strategy.scope():
            model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
            optimizer = SAM(model.parameters())
        x = torch.randn(12, 2, dtype=torch.float64)

        def step(inputs):
            def closure():
                loss = ts.nn.compute_average_loss(model(inputs).square().sum(1), global_batch_size="actual")
                loss.backward()
                return loss

            closure()
            return optimizer.step(closure).detach()

        losses = []
        for batch in strategy.experimental_distribute_dataset(x, batch_size=5):
            losses.append(float(strategy.experimental_local_results(strategy.run(step, args=(batch,)))[0]))
        return torch.cat([p.detach().flatten() for p in model.parameters()]), losses

    torch.testing.assert_close(train(["cpu:0", "cpu:1", "cpu:2"]), train(["cpu:0"]), rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad:UserWarning")  # torch's own, in LBFGS
@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_equals_one_replica(line_search):
    def train(devices):
        strategy = ts.MirroredStrategy(devices)
        torch.manual_seed(0)
        with strategy.scope():
            model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
            optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn=line_search)
        x = torch.randn(11, 2, dtype=torch.float64)
        y = x.sum(1, keepdim=True).sin()

        def step(inputs):
            x, y = inputs

            def closure():
                optimizer.zero_grad()
                loss = ts.nn.compute_average_loss((model(x) - y).square().sum(1), global_batch_size="actual")
                loss.backward()
                return loss

            return optimizer.step(closure)

        losses = []
        for batch in list(strategy.experimental_distribute_dataset((x, y), batch_size=11)) * 3:
            losses.append(float(strategy.experimental_local_results(strategy.run(step, args=(batch,)))[0]))
        return losses

    many, one = train(["cpu:0", "cpu:1"]), train(["cpu:0"])
    assert many == pytest.approx(one, rel=1e-6)
    assert many[-1] < many[0]


# Moving averages.


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("made", ["early", "late"])
def test_moving_average_of_weights(strategy, inside, made):
    model, optimizer = make(strategy, linear_and_sgd)
    if made == "late":
        strategy.run(lambda: None)
    ema = make(strategy, lambda: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5)))
    expected = None
    for _ in range(3):
        strategy.run(lambda: sum_step(model, optimizer))
        current = model.weight.detach().clone()
        expected = current if expected is None else 0.5 * expected + 0.5 * current
        if inside:
            strategy.run(lambda: ema.update_parameters(model))
        else:
            ema.update_parameters(model)
    torch.testing.assert_close(ema.module.weight.detach(), expected)
    assert ema.n_averaged.item() == 3
    strategy.run(lambda: None)
    assert copies_equal(ema, model)


# Compiled and checkpointed models.


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("made", ["early", "late"])
def test_compiled_model(backend, made):
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    model, optimizer = make(strategy, linear_and_sgd)
    if made == "late":
        strategy.run(lambda: None)
    compiled = make(strategy, lambda: torch.compile(model, backend=backend))
    before = model.bias.item()
    for _ in range(2):
        strategy.run(lambda: sum_step(compiled, optimizer))
    assert before - model.bias.item() == pytest.approx(0.4, rel=1e-4)
    assert copies_equal(model)
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fullgraph", [True, False])
def test_compiled_function_around_a_facade_is_refused(fullgraph):
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    model, _ = make(strategy, linear_and_sgd)
    forward = torch.compile(lambda x: model(x) * 2, backend="eager", fullgraph=fullgraph)
    with pytest.raises(RuntimeError, match="Compile the model itself"):
        strategy.run(lambda: forward(torch.ones(1, 2)))
    strategy.run(lambda: model(torch.ones(1, 2)))
    torch._dynamo.reset()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing(strategy, use_reentrant):
    def build():
        return nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 1))

    model = make(strategy, build)

    def grads(checkpointed):
        model.zero_grad()
        torch.manual_seed(replica_id())
        x = torch.ones(3, 2, requires_grad=True)
        out = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=use_reentrant) if checkpointed else model(x)
        out.sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    def fn():
        for a, b in zip(grads(True), grads(False), strict=True):
            torch.testing.assert_close(a, b)

    strategy.run(fn)


def test_generator_on_a_module(strategy):
    def build():
        model = nn.Linear(1, 1)
        model.generator = torch.Generator().manual_seed(3)
        return model

    model = make(strategy, build)
    generator = model.generator

    def draw():
        return torch.rand(2, generator=model.generator)

    first = on_replicas(strategy, draw)
    second = on_replicas(strategy, draw)
    rows = [tuple(row.tolist()) for row in (*first, *second)]
    assert len(set(rows)) == len(rows)
    assert model.generator is generator
    model.generator.manual_seed(3)
    torch.testing.assert_close(on_replicas(strategy, draw), first)


# Parameters that stand in another place between two runs.


def exchanged(first, second):
    first.weight, second.weight = second.weight, first.weight
    first.weight.register_hook(lambda gradient: gradient * 0.5)


def tied(first, second):
    first.weight = second.weight


def weights_after(num_replicas, move, when):
    """Train with sums of two batches each."""
    strategy = ts.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
    with strategy.scope():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 2, dtype=torch.float64), nn.Tanh(), nn.Linear(2, 2, dtype=torch.float64))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x, number):
        ts.nn.compute_average_loss((model(x) - 1).square().sum(1), global_batch_size=4).backward()
        if number % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()

    data = torch.arange(8.0, dtype=torch.float64).reshape(4, 2) / 8
    for number in range(6):
        if number == when:
            move(model[0], model[2])
        for batch in strategy.experimental_distribute_dataset(data, batch_size=4):
            strategy.run(step, args=(batch, number))
    return torch.stack([model[0].weight.detach(), model[2].weight.detach()])


@pytest.mark.parametrize("when", [1, 2, 3])
@pytest.mark.parametrize("move", [exchanged, tied])
def test_parameters_that_change_places_between_runs(move, when):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nor has a gradient been changed
        torch.testing.assert_close(weights_after(2, move, when), weights_after(1, move, when), rtol=0, atol=1e-12)


# Modules and optimizers of which only an attribute knows, such as a teacher that hides in a list.


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))]
        self.optimizers = {"own": torch.optim.SGD([p for layer in self.layers for p in layer.parameters()], lr=0.1)}
        self.schedulers = (lr_scheduler.StepLR(self.optimizers["own"], 1),)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def train_on(self, x):
        self.optimizers["own"].zero_grad()
        self(x).sum().backward()
        self.optimizers["own"].step()


def registered_on_one_object(holder):
    holder.layers[1][1] = nn.Sigmoid()
    holder.layers[1].append(nn.Tanh())
    del holder.layers[1][0]


def taken_and_given_back(holder):
    layers = holder.layers
    del holder.layers
    holder.layers = layers
    holder.layers.append(nn.Linear(1, 1))
    holder.layers[0].weight.mul_(2)


HELD_CHANGES = {
    "values": lambda holder: holder.layers[0].weight.mul_(2),
    "modes": lambda holder: holder.layers[1].eval(),
    "attribute": lambda holder: setattr(holder.layers[1][1], "momentum", 0.5),
    "children": registered_on_one_object,
    "the attribute": taken_and_given_back,
    "rate": lambda holder: holder.optimizers["own"].param_groups[0].update(lr=0.5),
    "state": lambda holder: holder.optimizers["own"].state.clear(),
    "step of a scheduler": lambda holder: (holder.schedulers[0].step(), setattr(holder.schedulers[0], "gamma", 0.2)),
}


@pytest.mark.parametrize("change", HELD_CHANGES.values(), ids=HELD_CHANGES)
def test_what_only_an_attribute_holds_is_one_object_of_each_replica(change):
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    holder = make(strategy, Holder)
    per_replica = ts.PerReplica([torch.tensor([[1.0, 2.0], [0.0, 3.0]]), torch.tensor([[5.0, 1.0], [1.0, 1.0]])])
    gc.collect()  # the facades must not depend on when this happens
    strategy.run(holder.train_on, args=(per_replica,))

    def state():
        optimizer = holder.optimizers["own"]
        held = [[*layer.state_dict().values()] for layer in holder.layers], [str(layer) for layer in holder.layers]
        scheduler = {k: v for k, v in holder.schedulers[0].state_dict().items() if k[0] != "_"}
        assert holder.schedulers[0].optimizer.param_groups is optimizer.param_groups
        is_training = [layer.training for layer in holder.layers]
        return str((held, optimizer.state_dict(), scheduler, is_training, holder(torch.ones(2, 2))))

    with torch.no_grad():
        change(holder)
        gc.collect()
        first, second = on_replicas(strategy, state)
    assert first == second  # averages of the layers' buffers, too


def test_a_metric_in_a_dict_of_a_module_is_that_of_all_replicas():
    class Judge(nn.Module):
        def __init__(self):
            super().__init__()
            self.metrics = {"mean": ts.metrics.Mean(), "others": [ts.metrics.Mean()]}

        def judge(self, x):
            self.metrics["mean"].update_state(x)
            self.metrics["others"][0].update_state(x)

    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    judge = make(strategy, Judge)
    gc.collect()
    strategy.run(judge.judge, args=(ts.PerReplica([torch.zeros(1), torch.ones(1)]),))
    assert [float(judge.metrics["mean"].result()), float(judge.metrics["others"][0].result())] == [0.5, 0.5]
    judge.metrics["mean"].reset_state()
    strategy.run(judge.judge, args=(ts.PerReplica([torch.full((1,), 2.0), torch.ones(1)]),))
    assert [float(judge.metrics["mean"].result()), float(judge.metrics["others"][0].result())] == [1.5, 1.0]


# Lifetime.


def test_a_thread_or_a_stream_does_not_lead_to_the_whole_program():
    """TensorBoard's thread keeps ``sys.stderr``, from which one comes in a notebook to what all its cells have made."""

    class KernelStream(io.StringIO):
        kernel = None

    thread, stream, own = threading.Thread(), KernelStream(), torch.ones(2)
    thread.kernel = stream.kernel = types.SimpleNamespace(names={"images": torch.ones(3)})
    assert [id(tensor) for tensor in tensors_held({"callbacks": [thread, stream], "own": own}, {})] == [id(own)]


def add_hooks_that_refer_to(model):
    model.register_forward_hook(lambda *_: None if model.training else 1)
    model.weight.register_hook(lambda grad: grad * (1 if model.training else 0))


def use_and_drop(strategy):
    model, optimizer = make(strategy, linear_and_sgd)
    scheduler = make(strategy, lambda: lr_scheduler.StepLR(optimizer, 1))
    add_hooks_that_refer_to(model)
    strategy.run(step_with, args=(scheduler, model, optimizer))
    model(torch.ones(1, 2))
    things = [model, optimizer, scheduler, model.weight, *bodies(model), *bodies(optimizer)]
    return [weakref.ref(thing) for thing in things]


def test_dropped_objects_are_freed(strategy):
    alive = use_and_drop(strategy)
    gc.collect()
    assert [type(ref()).__name__ for ref in alive if ref() is not None] == []
    other = make(strategy, linear_and_sgd)
    strategy.run(lambda: sum_step(*other))
    assert copies_equal(other[0])


def test_many_short_lived_models(strategy):
    for i in range(30):
        model, optimizer = make(strategy, lambda i=i: linear_and_sgd(lr=0.1 * i))
        before = model.bias.item()
        strategy.run(lambda: sum_step(model, optimizer))  # noqa: B023 - run calls it at once
        assert before - model.bias.item() == pytest.approx(0.1 * i * strategy.num_replicas_in_sync, abs=1e-5)


def test_change_outside_survives_the_end_of_another_object(strategy):
    model, _ = make(strategy, linear_and_sgd)
    other, _ = make(strategy, linear_and_sgd)
    strategy.run(lambda: None)
    with torch.no_grad():
        model.weight.fill_(7.0)
    del other, _
    gc.collect()
    assert set(on_replicas(strategy, lambda: model.weight.sum().item())) == {14.0}


# What is refused.


def test_uncopyable_attribute_is_refused_and_can_be_fixed(strategy):
    model, optimizer = make(strategy, linear_and_sgd)
    scheduler = make(strategy, lambda: lr_scheduler.StepLR(optimizer, 1))
    model.lock = threading.Lock()
    for _ in range(2):
        with pytest.raises(TypeError, match=r"Linear can't be copied for each replica.*lock"):
            strategy.run(lambda: None)
        assert all(mirror_of(obj) is None for obj in (model, optimizer, scheduler))
        assert type(model) is nn.Linear
    del model.lock
    strategy.run(lambda: step_with(scheduler, model, optimizer))
    assert copies_equal(model)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def test_uncopyable_attribute_set_later_is_refused(strategy):
    model, _ = make(strategy, linear_and_sgd)
    strategy.run(lambda: None)
    with pytest.raises(TypeError, match="can't be copied for each replica"):
        model.lock = threading.Lock()
    strategy.run(lambda: None)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: nn.LazyLinear(1), "not initialised yet"),
        (lambda: nn.Sequential(nn.ReLU(), nn.LazyBatchNorm1d()), "not initialised yet"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_lazy_modules_are_refused(strategy, build, message):
    model = make(strategy, build)
    with pytest.raises(TypeError, match=message):
        strategy.run(lambda: None)
    with strategy.scope():
        model(torch.ones(2, 2))
    strategy.run(lambda: model(torch.ones(2, 2)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*TorchScript.*")
def test_scripted_module_is_refused(strategy):
    model = make(strategy, lambda: torch.jit.trace(nn.Linear(1, 1), torch.ones(1, 1)))
    with pytest.raises(TypeError, match="TorchScript"):
        strategy.run(lambda: None)
    del model


@pytest.mark.parametrize("name", ["DistributedDataParallel", "FullyShardedDataParallel"])
def test_modules_that_synchronise_by_themselves_are_refused(strategy, name):
    base = nn.parallel.DistributedDataParallel if name == "DistributedDataParallel" else nn.Module
    cls = type(name, (base,), {"__init__": lambda self: nn.Module.__init__(self)})
    model = make(strategy, cls)
    with pytest.raises(TypeError, match="synchronises by itself"):
        strategy.run(lambda: None)
    del model


def test_non_leaf_attribute_is_refused(strategy):
    def build():
        model = nn.Linear(1, 1)
        model.activation = model(torch.ones(1, 1))
        return model

    model = make(strategy, build)
    with pytest.raises(TypeError, match="results of a forward pass"):
        strategy.run(lambda: None)
    del model


class Slotted:
    __slots__ = ("__weakref__", "value")


class Listy(list):
    pass


@pytest.mark.parametrize("build", [Slotted, lambda: Listy([1])])
def test_objects_that_keep_data_elsewhere_are_refused(strategy, build):
    model, _ = make(strategy, linear_and_sgd)
    obj = strategy.replicate(build())
    with pytest.raises(TypeError, match="can't be hosted for several replicas"):
        strategy.run(lambda: None)
    assert mirror_of(model) is None
    del obj


@pytest.mark.parametrize("value", [[1], 3, (1, 2)])
def test_builtin_values_can_not_be_replicated(strategy, value):
    with pytest.raises(TypeError, match="plain Python class"):
        strategy.replicate(value)


def test_model_made_outside_the_scope_is_refused(strategy):
    model = nn.Linear(2, 1)
    outside = torch.optim.SGD(model.parameters(), lr=0.1)
    with strategy.scope():
        inside = torch.optim.SGD(model.parameters(), lr=0.1)
    for optimizer in (outside, inside):
        with pytest.raises(RuntimeError, match=r"strategy.scope\(\)"):
            strategy.run(lambda: sum_step(model, optimizer))  # noqa: B023 - run calls it at once
        model.zero_grad()


def test_step_outside_run_is_refused(strategy):
    model, optimizer = make(strategy, linear_and_sgd)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="outside `run`"):
            optimizer.step()
        strategy.run(lambda: None)
    assert mirror_of(model) is not None


def test_gradients_made_outside_are_refused(strategy):
    model, optimizer = make(strategy, linear_and_sgd)
    strategy.run(lambda: sum_step(model, optimizer))
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(RuntimeError, match="changed outside `run`"):
            strategy.run(lambda: None)
    optimizer.zero_grad()
    strategy.run(lambda: sum_step(model, optimizer))
    assert copies_equal(model)


def test_no_warnings_in_ordinary_use(strategy):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, optimizer = make(strategy, linear_and_sgd)
        scheduler = make(strategy, lambda: lr_scheduler.StepLR(optimizer, 1))
        for _ in range(3):
            strategy.run(lambda: sum_step(model, optimizer))
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-4)


# GradScaler.


def train_scaled(devices, bad_step=1, style="plain"):
    """Steps with a scaler; on one of them one replica's gradient overflows. Returns the weights after each step."""
    strategy = ts.MirroredStrategy(devices)
    with strategy.scope():
        model, optimizer = linear_and_sgd(lr=0.01, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    data = strategy.experimental_distribute_dataset(torch.arange(24.0).reshape(12, 2) / 24, batch_size=4)

    def step(inputs, bad):
        optimizer.zero_grad()
        loss = ts.nn.compute_average_loss(model(inputs).sum(1), global_batch_size="actual")
        if bad and replica_id() == strategy.num_replicas_in_sync - 1:
            loss = loss + (model.weight.sum() * 0 + 1) * float("inf") * model.bias.sum()
        scaler.scale(loss).backward()
        if style == "unscale":
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()

    rows = []
    for i, batch in enumerate(data):
        strategy.run(step, args=(batch, i == bad_step))
        rows.append([*model.weight.flatten().tolist(), scaler.get_scale()])
        assert {body.get_scale() for body in bodies(scaler)} == {rows[-1][-1]}
    assert copies_equal(model)
    assert scaler.state_dict()["scale"] == rows[-1][-1]
    return rows


@pytest.mark.parametrize("style", ["plain", "unscale"])
def test_all_replicas_skip_together(style):
    two, one = train_scaled(["cpu:0", "cpu:1"], style=style), train_scaled(["cpu:0"], style=style)
    assert two[1][:2] == two[0][:2]
    assert [row[-1] for row in two] == [8.0, 4.0, 4.0]
    for row, expected in zip(two, one, strict=True):
        assert row == pytest.approx(expected, rel=1e-5)


def test_scaler_changed_outside_reaches_all(strategy):
    model, optimizer = make(strategy, linear_and_sgd)
    scaler = make(strategy, lambda: torch.amp.GradScaler("cpu", init_scale=4.0))

    def step():
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    strategy.run(step)
    scaler.update(32.0)
    assert set(on_replicas(strategy, scaler.get_scale)) == {32.0}
    scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0})
    assert set(on_replicas(strategy, scaler.get_scale)) == {2.0}
    strategy.run(step)
    assert copies_equal(model)


def test_marks_end_after_a_skipped_step(strategy):
    model, optimizer = make(strategy, linear_and_sgd)
    scaler = make(strategy, lambda: torch.amp.GradScaler("cpu", init_scale=4.0))

    def step():
        scaler.scale(model(torch.full((1, 2), float("inf"))).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        model(torch.ones(1, 2)).sum().backward()  # accumulates: allowed, the skipped step's marks are gone

    strategy.run(step)
    assert scaler.get_scale() == 2.0
