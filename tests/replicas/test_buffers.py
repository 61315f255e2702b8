"""Buffers: their mean over replicas that had examples, at ``optimizer.step`` or on demand."""

import gc
import warnings

import pytest
import torch
from torch import nn

import torchstrategy as ts
from torchstrategy.replicas.buffers import _key
from torchstrategy.replicas.edits import OutsideEdits
from torchstrategy.replicas.mirrored import bodies

pytestmark = pytest.mark.filterwarnings("ignore:Buffer .* has got another value on each replica")


@pytest.fixture(params=[2, 3])
def strategy(request):
    return ts.MirroredStrategy([f"cpu:{i}" for i in range(request.param)])


class Tracker(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("mean", torch.zeros(1))
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("flag", torch.zeros(1, dtype=torch.bool))
        self.register_buffer("hidden", torch.zeros(1), persistent=False)

    def forward(self, x):
        if len(x):
            self.mean.copy_(x.mean())
            self.hidden = x.mean().reshape(1)
            self.count += len(x)
            self.flag |= x.max() > 1
        else:
            self.mean.fill_(float("nan"))
        return self.weight * x.sum()


def step_on(strategy, model, optimizer, x, batch_size):
    data = strategy.experimental_distribute_dataset(x, batch_size=batch_size)

    def step(inputs):
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()

    for batch in data:
        strategy.run(step, args=(batch,))


def make(strategy, build=Tracker):
    with strategy.scope():
        model = build()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_mean_over_replicas_and_replica_0s_integers(strategy):
    model, optimizer = make(strategy)
    n = strategy.num_replicas_in_sync
    step_on(strategy, model, optimizer, torch.arange(2.0 * n), 2 * n)
    assert model.mean.item() == pytest.approx((2 * n - 1) / 2)
    assert model.hidden.item() == pytest.approx((2 * n - 1) / 2)
    for body in bodies(model):
        assert body.count.item() == 2
        assert body.flag.item() is False
        torch.testing.assert_close(body.mean, model.mean, rtol=0, atol=0)


class Counter(nn.Module):
    """What it counts is of a replica's share, or of the whole batch."""

    def __init__(self, counts):
        super().__init__()
        self.weight, self.counts = nn.Parameter(torch.ones(1)), counts
        self.register_buffer("total", torch.zeros(1))
        self.register_buffer("number", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        total, number = self.counts(x)
        self.total.mul_(0.9).add_(total)
        self.number += number
        return self.weight * x


def of_share(x):
    return x.sum(), (x > 1.5).sum()


def of_batch(x):
    return ts.get_replica_context().all_reduce("SUM", of_share(x))


def messages(strategy, counts, x):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, optimizer = make(strategy, lambda: nn.Sequential(Counter(counts), nn.Linear(1, 1), nn.BatchNorm1d(1)))
        step_on(strategy, model, optimizer, x, 4)
        return [str(entry.message) for entry in caught]


def test_a_buffer_of_each_replicas_share_is_warned_of(strategy):
    x = torch.arange(11.0)[:, None]
    total, number = messages(strategy, of_share, x)
    assert total.startswith("Buffer 'total' of Counter (shape (1,)) has got another value on each replica")
    assert "their mean is kept" in total
    assert "Buffer 'number' of Counter" in number
    assert "replica 0's is kept" in number
    assert "ts.get_replica_context().all_reduce" in number
    assert messages(strategy, of_batch, x) == []
    assert messages(strategy, lambda x: (1.0, 1), x) == []


def test_empty_shares_do_not_count(strategy):
    model, optimizer = make(strategy)
    step_on(strategy, model, optimizer, torch.tensor([4.0]), 1)
    assert [body.mean.item() for body in bodies(model)] == [4.0] * strategy.num_replicas_in_sync


def test_batch_norm_equals_mean_of_shares(strategy):
    model, optimizer = make(strategy, lambda: nn.Sequential(nn.BatchNorm1d(2)))
    n = strategy.num_replicas_in_sync
    x = torch.randn(4 * n, 2)
    step_on(strategy, model, optimizer, x, 4 * n)
    shares = x.split(4)
    torch.testing.assert_close(model[0].running_mean, 0.1 * torch.stack([s.mean(0) for s in shares]).mean(0))
    torch.testing.assert_close(
        model[0].running_var, 0.9 + 0.1 * torch.stack([s.var(0, unbiased=True) for s in shares]).mean(0)
    )
    assert model[0].num_batches_tracked.item() == 1
    for body in bodies(model):
        torch.testing.assert_close(dict(body.state_dict()), dict(model.state_dict()), rtol=0, atol=0)


def test_batch_norm_in_training_mode_outside_reaches_all(strategy):
    model, _ = make(strategy, lambda: nn.Sequential(nn.BatchNorm1d(2)))
    strategy.run(lambda: None)
    model(torch.randn(8, 2) + 3)
    strategy.run(lambda: None)
    for body in bodies(model):
        torch.testing.assert_close(dict(body.state_dict()), dict(model.state_dict()), rtol=0, atol=0)
    assert model[0].running_mean.sum() > 0.2


def test_sync_buffers_without_a_step(strategy):
    model, _ = make(strategy)
    n = strategy.num_replicas_in_sync
    strategy.run(lambda: model.mean.fill_(ts.get_replica_context().replica_id_in_sync_group))
    assert bodies(model)[-1].mean.item() == n - 1
    strategy.sync_buffers()
    assert [body.mean.item() for body in bodies(model)] == pytest.approx([(n - 1) / 2] * n)
    with pytest.raises(RuntimeError, match="cross-replica context"):
        strategy.run(strategy.sync_buffers)


def test_without_a_step_empty_shares_do_not_count(strategy):
    model, optimizer = make(strategy)
    n = strategy.num_replicas_in_sync
    for num_examples in (1, 2):
        step_on(strategy, model, optimizer, torch.full((2 * n,), 7.0), 2 * n)
        (batch,) = strategy.experimental_distribute_dataset(
            torch.arange(1.0, 1 + num_examples), batch_size=num_examples
        )
        strategy.run(model, args=(batch,))
        strategy.sync_buffers()
        expected = sum(range(1, 1 + num_examples)) / num_examples
        assert [body.mean.item() for body in bodies(model)] == pytest.approx([expected] * n)


def test_what_was_written_outside_is_no_replicas_own(strategy):
    model, _ = make(strategy)
    strategy.run(lambda: None)
    model.mean.fill_(6.0)
    strategy.sync_buffers()
    assert [body.mean.item() for body in bodies(model)] == [6.0] * strategy.num_replicas_in_sync


class Memory(Tracker):
    """Makes a buffer when it is called first."""

    def __init__(self):
        super().__init__()
        self.register_buffer("late", None)

    def forward(self, x):
        self.late = x.clone()
        self.mean.copy_(x)


def test_a_buffer_that_replicas_make_is_not_written_outside(strategy, monkeypatch):
    """A run that fails looks at what there is, and finds it new."""
    monkeypatch.setattr(OutsideEdits, "after_run", lambda *_: None)  # there is seldom time to look at all
    model, _ = make(strategy, Memory)
    for _ in range(3):
        strategy.run(lambda: None)
    strategy.run(lambda: model(torch.full((1,), float(ts.get_replica_context().replica_id_in_sync_group))))
    with pytest.raises(ValueError, match="no number"):
        strategy.run(int, args=("no number",))
    strategy.run(lambda: None)
    strategy.sync_buffers()
    n = strategy.num_replicas_in_sync
    assert [(b.mean.item(), b.late.item()) for b in bodies(model)] == [pytest.approx([(n - 1) / 2] * 2)] * n


def test_what_is_recorded_later_hides_no_change(strategy):
    made = [make(strategy), make(strategy)]
    (model, _), (other, optimizer) = made

    def step():
        model.mean.fill_(ts.get_replica_context().replica_id_in_sync_group)
        optimizer.zero_grad()
        other(torch.ones(2)).backward()
        optimizer.step()

    for _ in range(3):
        strategy.run(step)
    made.append(make(strategy))
    strategy.run(lambda: None)
    strategy.sync_buffers()
    n = strategy.num_replicas_in_sync
    assert [body.mean.item() for body in bodies(model)] == pytest.approx([(n - 1) / 2] * n)


def test_nothing_is_known_of_buffers_that_are_gone(strategy):
    """New ones may lie in their places."""
    for _ in range(3):
        model, optimizer = make(strategy)
        gc.collect()
        step_on(strategy, model, optimizer, torch.ones(4), 4)
    buffers = strategy._buffers
    keys = set(map(_key, buffers.candidates()))
    assert len(keys) == 4
    assert {*buffers._stamps} == keys
    assert {*buffers._num_stores, *buffers._silent._values, *buffers._silent._num_looks} <= keys
    assert len(buffers._of_plan) == 1


def test_buffer_loaded_outside_reaches_all(strategy):
    model, optimizer = make(strategy)
    strategy.run(lambda: None)
    state = model.state_dict()
    state["mean"] = torch.full((1,), 9.0)
    model.load_state_dict(state)
    found = strategy.experimental_local_results(strategy.run(lambda: model.mean.item()))
    assert set(found) == {9.0}
    step_on(strategy, model, optimizer, torch.full((6,), 2.0), 6)
    assert model.mean.item() == pytest.approx(2.0)


def test_buffers_of_models_that_are_not_optimized_travel_too(strategy):
    model, optimizer = make(strategy)
    with strategy.scope():
        other = type(model)()

    def step():
        other.mean.fill_(ts.get_replica_context().replica_id_in_sync_group)
        model(torch.ones(2)).backward()
        optimizer.step()

    strategy.run(step)
    n = strategy.num_replicas_in_sync
    assert [body.mean.item() for body in bodies(other)] == pytest.approx([(n - 1) / 2] * n)


def test_buffers_of_another_optimizers_model_stay_until_its_own_step(strategy):
    (first, first_optimizer), (second, second_optimizer) = make(strategy), make(strategy)
    n = strategy.num_replicas_in_sync

    def step():
        for model in (first, second):
            model(torch.ones(2)).backward()
            model.mean.fill_(ts.get_replica_context().replica_id_in_sync_group)
        first_optimizer.step()
        between = [model.mean.item() for model in (first, second)]
        second_optimizer.step()
        return between, [model.mean.item() for model in (first, second)]

    mean = (n - 1) / 2
    for i, (between, after) in enumerate(strategy.experimental_local_results(strategy.run(step))):
        assert between == pytest.approx([mean, i])
        assert after == pytest.approx([mean, mean])


def test_buffers_without_parameters_go_with_the_modules_around_them(strategy):
    """A batch norm without weights belongs to the net that it is in, and not to the whole that both nets are in."""
    with strategy.scope():
        nets = nn.ModuleDict(
            {
                name: nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.BatchNorm1d(1, affine=False, momentum=1.0)))
                for name in ("first", "second")
            }
        )
        optimizers = {name: torch.optim.SGD(net.parameters(), lr=0.1) for name, net in nets.items()}

    def step(name):
        i = ts.get_replica_context().replica_id_in_sync_group
        for net in nets.values():
            net(torch.tensor([[i], [i + 1.0]])).sum().backward()
        optimizers[name].step()
        return [net[1][0].running_mean.item() for net in nets.values()]

    first, second = zip(*strategy.experimental_local_results(strategy.run(step, args=("second",))), strict=True)
    assert len(set(first)) == strategy.num_replicas_in_sync
    assert len(set(second)) == 1


def test_complex_and_half_buffers(strategy):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("complex", torch.zeros(1, dtype=torch.complex64))
            self.register_buffer("low", torch.zeros(1, dtype=torch.bfloat16))

    with strategy.scope():
        model = Odd()

    def fn():
        i = ts.get_replica_context().replica_id_in_sync_group
        model.complex.fill_(1j * i)
        model.low.fill_(i)

    strategy.run(fn)
    strategy.sync_buffers()
    n = strategy.num_replicas_in_sync
    for body in bodies(model):
        assert body.complex.item().imag == pytest.approx((n - 1) / 2)
        assert body.low.item() == pytest.approx((n - 1) / 2, rel=1e-2)


def test_shapes_that_depend_on_the_share(strategy):
    class Cache(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
            self.register_buffer("last", torch.zeros(0), persistent=False)

        def forward(self, x):
            self.last = x.detach().clone()
            return self.weight * x.sum()

    model, optimizer = make(strategy, Cache)
    step_on(strategy, model, optimizer, torch.arange(7.0), 7)
    assert [len(body.last) for body in bodies(model)] == ([4, 3] if strategy.num_replicas_in_sync == 2 else [3, 3, 1])


class Late(nn.Module):
    """Has a buffer that comes or gets its value after the module was taken up: in ``forward``, or between runs."""

    def __init__(self, when):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.inner = nn.Identity()
        self.when = when
        if when == "filled in run":
            self.register_buffer("mean", None)

    def forward(self, x):
        if self.when == "registered in run" and not hasattr(self, "mean"):
            self.register_buffer("mean", torch.zeros(1))
        if self.when != "registered in run" and getattr(self, "mean", None) is None:
            self.mean = x.mean().reshape(1) if self.when == "filled in run" else None
        elif self.mean is not None:
            self.mean = self.mean + x.mean()
        self.inner(x)
        return self.weight * x.sum()


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, x):
        self.mean += x.mean()


def means_of_late_buffers(devices, when):
    """Return what a buffer holds that adds up the means of its replica's shares, 0.5 and 2.5 in each of two steps."""
    strategy = ts.MirroredStrategy(devices)
    model, optimizer = make(strategy, lambda: Late("" if when.endswith("between runs") else when))
    if when.endswith("between runs"):
        step_on(strategy, model, optimizer, torch.arange(4.0), 4)
        if when.startswith("registered"):
            del model.mean
            model.register_buffer("mean", torch.zeros(1))
        else:
            model.inner = Inner()
    for _ in range(2):
        step_on(strategy, model, optimizer, torch.arange(4.0), 4)
    owner = model.inner if when.startswith("in a module") else model
    return [mean.item() for mean in strategy.experimental_local_results(strategy.run(lambda: owner.mean))]


WHEN = ["registered in run", "filled in run", "registered between runs", "in a module that is put in between runs"]


@pytest.mark.parametrize("when", WHEN)
def test_buffers_that_come_late(when):
    assert means_of_late_buffers(["cpu:0", "cpu:1"], when) == [3.0, 3.0]


def means_on_a_rank():
    return [means_of_late_buffers(None, when) for when in WHEN]


def buffer_of_a_shares_shape():
    strategy = ts.MirroredStrategy()
    model, optimizer = make(strategy, Shaped)
    for _ in range(2):
        step_on(strategy, model, optimizer, torch.arange(3.0), 3)
    return len(model.seen), model.mean.item()


class Shaped(Late):
    """Keeps what it has seen, of another shape where a share is of another size; and a buffer for all ranks."""

    def __init__(self):
        super().__init__("registered in run")
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        self.seen = x
        return super().forward(x)


def test_processes_synchronise_buffers_that_come_late(process_pool):
    assert process_pool(2).run(means_on_a_rank) == [[[3.0]] * len(WHEN)] * 2


def test_a_buffer_that_processes_have_with_other_shapes_is_their_own(process_pool):
    assert process_pool(2).run(buffer_of_a_shares_shape) == [(2, 2.5), (1, 2.5)]
