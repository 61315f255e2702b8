"""Threads, turns, merge points, and failures."""

import gc
import threading
import weakref

import pytest
import torch
from torch import nn

import torchstrategy as ts
from tests.replicas.runs import Boom, all_reduce, assert_usable, on_replicas, replica_id
from torchstrategy.replicas.runner import MergeRequest, Runner


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("when", ["before", "after"])
def test_exception_releases_the_others(strategy, failing, when):
    unwound = []

    def fn():
        try:
            if when == "after":
                all_reduce()
            if replica_id() == failing:
                raise Boom("bad batch")
            all_reduce()
        finally:
            unwound.append(replica_id())

    for _ in range(3):
        unwound.clear()
        with pytest.raises(Boom, match="bad batch") as caught:
            strategy.run(fn)
        assert f"replica {failing} on cpu:{failing}" in caught.value.__notes__[0]
        assert failing in unwound
        assert_usable(strategy)


def test_waiting_replicas_can_not_swallow_the_failure(strategy):
    def fn():
        if replica_id() == 1:
            raise Boom
        try:
            all_reduce()
        except Exception:  # noqa: BLE001 - the point of the test
            return "went on"
        finally:
            with pytest.raises(BaseException):  # noqa: B017, PT011 - another merge point while it unwinds
                all_reduce()
        return None

    with pytest.raises(Boom):
        strategy.run(fn)
    assert_usable(strategy)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, StopIteration, GeneratorExit])
def test_any_exception_comes_through(strategy, kind):
    def fn():
        all_reduce()
        if replica_id() == 1:
            raise kind

    with pytest.raises(kind):
        strategy.run(fn)
    assert_usable(strategy)


def test_interrupt_while_the_caller_waits(monkeypatch):
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    assert_usable(strategy)
    hold, entered = threading.Event(), threading.Event()
    runner = strategy.hosting._runners[0]
    thread_class = type(runner._threads[0])
    wait = thread_class.wait_paused

    def interrupted(self):
        entered.wait(5)
        raise KeyboardInterrupt

    def fn():
        if replica_id() == 1:
            entered.set()
            hold.wait(5)
        all_reduce()

    monkeypatch.setattr(thread_class, "wait_paused", interrupted)
    with pytest.raises(KeyboardInterrupt):
        strategy.run(fn)
    monkeypatch.setattr(thread_class, "wait_paused", wait)
    assert_usable(strategy)
    hold.set()
    assert_usable(strategy)


def test_error_inside_a_merge_function(strategy):
    def merge(_):
        raise Boom("in merge")

    with pytest.raises(Boom, match="in merge"):
        strategy.run(lambda: ts.get_replica_context().merge_call(merge))
    assert_usable(strategy)


def test_different_numbers_of_merge_points(strategy):
    with pytest.raises(
        RuntimeError, match=r"(?s)different number of merge_call.*replica 0.*waits in all_reduce.*returned"
    ):
        strategy.run(lambda: all_reduce() if replica_id() == 0 else None)
    assert_usable(strategy)


def test_different_kinds_of_merge_points(strategy):
    def fn():
        context = ts.get_replica_context()
        if replica_id() == 0:
            context.all_gather(torch.ones(1), axis=0)
        else:
            context.all_reduce("sum", torch.ones(1))

    with pytest.raises(RuntimeError, match=r"(?s)waits in all_gather.*waits in all_reduce"):
        strategy.run(fn)
    assert_usable(strategy)


def test_different_shapes_and_dtypes(strategy):
    def shapes():
        ts.get_replica_context().all_reduce("sum", torch.ones(1 + (replica_id() == 1)))

    def dtypes():
        ts.get_replica_context().all_reduce("sum", torch.ones(1, dtype=torch.float64 if replica_id() == 1 else None))

    for fn in (shapes, dtypes):
        with pytest.raises(ts.errors.InvalidArgumentError):
            strategy.run(fn)
        assert_usable(strategy)


def test_nested_run_is_refused(strategy):
    with pytest.raises(RuntimeError, match="merge_call"):
        strategy.run(lambda: strategy.run(lambda: None))
    assert_usable(strategy)


def test_run_inside_a_merge_function(strategy):
    def merge(current, x):
        assert ts.in_cross_replica_context()
        doubled = current.run(lambda v: v * 2 + 0 * all_reduce(), args=(x,))
        return current.reduce("sum", doubled)

    n = strategy.num_replicas_in_sync
    results = on_replicas(
        strategy, lambda: ts.get_replica_context().merge_call(merge, args=(torch.tensor(float(replica_id())),)).item()
    )
    assert set(results) == {float(n * (n - 1))}
    assert_usable(strategy)


def test_merge_function_acts_from_outside(strategy):
    with strategy.scope():
        model = nn.Linear(1, 1)

    def merge(_):
        model.mode = "merged"
        with torch.no_grad():
            model.weight.fill_(2.0)

    def fn():
        model.mode = replica_id()
        ts.get_replica_context().merge_call(merge)
        return model.mode

    assert set(on_replicas(strategy, fn)) == {"merged"}
    assert set(on_replicas(strategy, lambda: model.weight.item())) == {2.0}


def test_results_and_arguments_are_freed(strategy):
    class Big:
        pass

    big = Big()
    alive = weakref.ref(big)
    strategy.run(lambda x: None, args=(big,))
    del big
    assert alive() is None

    def fn():
        result = Big()
        made.append(weakref.ref(result))
        return result

    made = []
    strategy.run(fn)
    assert [ref() for ref in made] == [None] * strategy.num_replicas_in_sync


def test_turns_pass_at_merge_points_only():
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])
    order = []

    def fn():
        order.append(replica_id())
        all_reduce()
        order.append(replica_id())

    strategy.run(fn)
    assert order == [0, 1, 2, 0, 1, 2]


# Collectives and autograd.


def test_all_reduce_and_all_gather_twice_differentiable(strategy):
    n = strategy.num_replicas_in_sync

    def fn():
        x = torch.tensor([1.0 + replica_id()], requires_grad=True)
        total = ts.get_replica_context().all_reduce("sum", x**2)
        gathered = ts.get_replica_context().all_gather(x**3, axis=0)
        y = (total**2).sum() / n + gathered.sum() / n
        (grad,) = torch.autograd.grad(y, x, create_graph=True)
        (second,) = torch.autograd.grad(grad.sum(), x)
        return grad.detach(), second

    values = torch.tensor([1.0 + i for i in range(n)], dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad((values**2).sum() ** 2 + (values**3).sum(), values, create_graph=True)
    grads, seconds = zip(*on_replicas(strategy, fn), strict=True)
    torch.testing.assert_close(torch.cat(grads).double(), expected.detach())
    # Replica i differentiates the sum of all replicas' first gradients.
    (summed,) = torch.autograd.grad(expected.sum(), values)
    torch.testing.assert_close(torch.cat(seconds).double(), summed)


def test_merge_points_in_backward(strategy):
    """A hook that all-reduces while autograd runs."""
    with strategy.scope():
        model = nn.Linear(1, 1)
    seen = []

    def hook(grad):
        seen.append(replica_id())
        return ts.get_replica_context().all_reduce("mean", grad)

    def fn():
        x = torch.tensor([[1.0 + replica_id()]])
        handle = model.weight.register_hook(hook)
        all_reduce()
        model(x).sum().backward()
        handle.remove()
        return model.weight.grad.item()

    n = strategy.num_replicas_in_sync
    assert set(on_replicas(strategy, fn)) == {(n + 1) / 2}
    assert sorted(seen) == list(range(n))


def test_dropped_strategy_ends_its_threads():
    def use():
        strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
        with strategy.scope():
            model = nn.Linear(1, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step():
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()

        strategy.run(step)
        return weakref.ref(strategy), strategy.hosting._runners[0]._threads[:]

    alive, threads = use()
    gc.collect()  # the model and the optimizer, whose parameters' hooks refer to the strategy
    gc.collect()
    assert alive() is None
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()


# The runner by itself.


class NoTurns:
    def starts(self, local_id):
        pass

    def ends(self, local_id, *, failed):
        pass


def make_runner(*, concurrent=False):
    return Runner(2, NoTurns(), lambda fn, payloads: fn(payloads), concurrent=concurrent)


def summed(runner, i):
    return runner.merge(i, MergeRequest("sum", lambda payloads: [sum(payloads)] * 2, i + 1))


@pytest.mark.parametrize("concurrent", [False, True])
def test_runner_closes(concurrent):
    runner = make_runner(concurrent=concurrent)
    assert runner.run([lambda: summed(runner, 0), lambda: summed(runner, 1)], str) == [3, 3]
    threads = list(runner._threads)
    assert len(threads) == 1
    runner.close()
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()
    assert runner.run([lambda: 3, lambda: 4], str) == [3, 4]
    runner.close()


def test_replicas_that_never_meet_share_the_callers_thread():
    runner = make_runner()
    here = threading.get_ident()
    assert runner.run([threading.get_ident, threading.get_ident], str) == [here, here]
    assert not runner._threads
    first, second = runner.run(
        [lambda: (summed(runner, 0), threading.get_ident()), lambda: (summed(runner, 1), threading.get_ident())], str
    )
    assert first == (3, here)
    assert second[1] != here
    runner.close()


def test_a_late_merge_point_is_a_mismatch_and_unwinds():
    runner = make_runner()
    unwound = []

    def late():
        try:
            return summed(runner, 1)
        finally:
            unwound.append(True)

    with pytest.raises(RuntimeError, match=r"(?s)0: returned.*1: waits in sum"):
        runner.run([lambda: 1, late], str)
    assert unwound == [True]
    assert runner.run([lambda: summed(runner, 0), lambda: summed(runner, 1)], str) == [3, 3]
    runner.close()


def test_a_dict_by_parameter_that_was_made_outside_is_named(strategy):
    with strategy.scope():
        model = nn.Linear(1, 1)
    rates = dict.fromkeys(model.parameters(), 0.1)
    with pytest.raises(KeyError) as caught:
        strategy.run(lambda: [rates[parameter] for parameter in model.parameters()])
    assert "A dict by parameter that was made outside `run` has those of replica 0" in caught.value.__notes__[1]
    with pytest.raises(KeyError) as caught:
        strategy.run(lambda: {}["name"])
    assert "A dict by parameter" not in "".join(caught.value.__notes__)
