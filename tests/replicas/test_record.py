"""What a scope records, and that nothing of it is left when the scope closes."""

import gc
import sys
import weakref

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import torchstrategy as ts
from torchstrategy.replicas import record
from torchstrategy.replicas.mirrored import bodies, mirror_of
from torchstrategy.replicas.record import owner, recorded_classes, start_recording, stop_recording


@pytest.fixture
def strategy():
    return ts.MirroredStrategy(["cpu:0", "cpu:1"])


def constructors():
    subclasses = [cls for cls in vars(lr_scheduler).values() if isinstance(cls, type)]
    return {cls: cls.__init__ for cls in (*recorded_classes(), *subclasses)}


def test_constructors_are_patched_only_while_a_scope_is_open(strategy):
    with strategy.scope():
        pass  # from now on those of optimizers and schedulers are
    before = constructors()
    with strategy.scope():
        assert nn.Module.__init__ is not before[nn.Module]
        with strategy.scope():
            pass
        assert nn.Module.__init__ is not before[nn.Module]
    assert constructors() == before
    with pytest.raises(ValueError, match="stop"), strategy.scope():
        raise ValueError("stop")
    assert constructors() == before


def test_recording_counts_its_openings():
    before = nn.Module.__init__
    start_recording()
    start_recording()
    stop_recording()
    assert nn.Module.__init__ is not before
    stop_recording()
    assert nn.Module.__init__ is before


def test_owner(strategy):
    outside = nn.Linear(1, 1)
    with strategy.scope():
        model = nn.Sequential(nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu")
        scheduler = lr_scheduler.StepLR(optimizer, 1)
    for obj in (model, model[0], optimizer, scaler, scheduler):
        assert owner(obj) is strategy
    assert owner(outside) is None
    strategy.run(lambda: None)
    for obj in (model, model[0], optimizer, scaler, scheduler):
        assert owner(obj) is strategy
        assert [owner(body) for body in bodies(obj)] == [strategy] * 2


@pytest.mark.parametrize(
    "build",
    [
        lambda o: lr_scheduler.ReduceLROnPlateau(o),
        lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [1]),
        lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], o),
    ],
)
def test_schedulers_that_skip_their_base_class_constructor(strategy, build):
    with strategy.scope():
        model = nn.Linear(1, 1)
        scheduler = build(torch.optim.SGD(model.parameters(), lr=0.1))
    assert owner(scheduler) is strategy


class Around(torch.optim.Optimizer):
    """Lookahead, as packages have it: an optimizer around another one, whose groups it shares."""

    def __init__(self, optimizer):
        self.optimizer, self.param_groups, self.state = optimizer, optimizer.param_groups, optimizer.state
        self.defaults, self.count = optimizer.defaults, 0
        self.slow = [parameter.detach().clone() for parameter in optimizer.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self):
        self.optimizer.step()
        self.count += 1
        self.param_groups[0]["count"] = self.param_groups[0].get("count", 0) + 1
        for parameter, slow in zip(self.param_groups[0]["params"], self.slow, strict=True):
            if self.count % 2 == 0:
                parameter.copy_(slow.lerp_(parameter, 0.5))


def train_around(strategy):
    with strategy.scope():
        model = nn.Linear(2, 1, bias=False, dtype=torch.float64)
        nn.init.constant_(model.weight, 0.5)
        optimizer = Around(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9)

    def step(x):
        optimizer.optimizer.zero_grad()
        ts.nn.compute_average_loss(model(x).square().sum(1), global_batch_size=6).backward()
        optimizer.step()

    inputs = torch.linspace(0, 1, 12).double().reshape(6, 2)
    for x in list(strategy.experimental_distribute_dataset(inputs, batch_size=6)) * 4:
        strategy.run(step, args=(x,))
        scheduler.step()
    return model.weight.detach(), optimizer.param_groups[0]["lr"], optimizer.optimizer.param_groups[0]["count"]


def test_an_optimizer_that_skips_its_base_class_constructor(strategy):
    weight, *others = train_around(strategy)
    expected, *expected_others = train_around(ts.OneDeviceStrategy("cpu:0"))
    torch.testing.assert_close(weight, expected)
    assert others == expected_others == [pytest.approx(0.1 * 0.9**4), 4]


def test_objects_made_by_replica_functions_are_their_own(strategy):
    made = []

    def fn():
        model = nn.Linear(1, 1)
        model(torch.ones(1, 1)).sum().backward()
        made.append(model)

    with strategy.scope():
        strategy.run(fn)
    strategy.run(fn)
    assert all(mirror_of(model) is None and owner(model) is None for model in made)
    assert len(made) == 4


def test_objects_that_die_before_the_first_run(strategy):
    with strategy.scope():
        nn.Linear(1, 1)
        kept = nn.Linear(1, 1)
    gc.collect()
    assert list(strategy.record) == [kept]
    strategy.run(lambda: None)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_what_a_compiler_makes_in_the_scope_is_not_the_programs(strategy, backend):
    """One rank may compile where another does not, and then they would bring different objects."""
    torch._dynamo.reset()
    with strategy.scope():
        compiled = torch.compile(nn.Linear(1, 1), backend=backend)
        compiled(torch.ones(3, 1)).sum().backward()
    assert [type(obj).__name__ for obj in strategy.record] == ["Linear", "OptimizedModule"]


def test_module_made_outside_but_reachable(strategy):
    inner = nn.Linear(1, 1)
    with strategy.scope():
        model = nn.Sequential(inner)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()

    before = inner.bias.item()
    strategy.run(step)
    assert mirror_of(inner) is not None
    assert inner.bias.item() == pytest.approx(before - 0.2, rel=1e-4)


def test_two_strategies_keep_apart():
    first, second = (ts.MirroredStrategy(["cpu:0", "cpu:1"]) for _ in range(2))
    with first.scope():
        a = nn.Linear(1, 1)
    with second.scope():
        b = nn.Linear(1, 1)
    first.run(lambda: None)
    second.run(lambda: None)
    assert (owner(a), owner(b)) == (first, second)
    # Inside another strategy's run a facade acts as from outside.
    assert first.experimental_local_results(first.run(lambda: id(b.weight)))[0] == id(b.weight)


def test_replicate_twice_records_once(strategy):
    class Thing:
        pass

    thing = strategy.replicate(Thing())
    assert strategy.replicate(thing) is thing
    assert len(list(strategy.record)) == 1
    assert owner(thing) is strategy


def test_a_strategy_that_is_collected_while_a_scope_ends_does_not_disturb_it():
    """Python 3.11 collects garbage amid ``list(dict.items())``, whose items are new tuples."""
    gc.collect()
    before, amid, kept = constructors(), [], []

    class Cycle:
        def __init__(self):
            self.itself = self

    def collected(_):
        amid.append(sys._getframe().f_back.f_code is record._restore.__code__)
        if sum(amid) == 4:  # the first times, what makes the snapshot is made
            record._restore()
        arm()

    def arm():
        kept.append(weakref.ref(Cycle(), collected))

    thresholds = gc.get_threshold()
    record.start_recording()
    tuples = [(number, number) for number in range(5000)]  # Python keeps some that are free
    arm()
    gc.set_threshold(1)
    try:
        record.stop_recording()
    finally:
        gc.set_threshold(*thresholds)
        kept.clear()
    assert any(amid)
    assert tuples
    assert constructors() == before
