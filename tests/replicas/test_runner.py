"""Threads, turns, merge points, failures, and what the caller's context means for the replicas."""

import contextvars
import gc
import threading
import time
import weakref

import pytest
import torch
from torch import nn

import torchstrategy as ts
from tests.programs import guide_losses
from torchstrategy.log import info_once
from torchstrategy.replicas.runner import MergeRequest, Runner


@pytest.fixture(params=[(2, False), (3, False), (2, True)], ids=["2", "3", "2-concurrent"])
def strategy(request):
    count, concurrent = request.param
    return ts.MirroredStrategy([f"cpu:{i}" for i in range(count)], concurrent=concurrent)


def on_replicas(strategy, fn):
    results = strategy.experimental_local_results(strategy.run(fn))
    return results if len(results) > 1 else results * strategy.num_replicas_in_sync


def replica_id():
    return ts.get_replica_context().replica_id_in_sync_group


def all_reduce(value=1.0):
    return ts.get_replica_context().all_reduce("sum", torch.tensor(value)).item()


def assert_usable(strategy):
    assert set(on_replicas(strategy, all_reduce)) == {float(strategy.num_replicas_in_sync)}


class Boom(Exception):
    pass


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


def test_another_strategy_inside_run_is_refused(strategy):
    other = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    with pytest.raises(RuntimeError):
        strategy.run(lambda: other.run(lambda: None))
    with pytest.raises(RuntimeError):
        strategy.run(lambda: other.scope().__enter__())
    assert_usable(strategy)


def test_run_from_another_thread(strategy):
    with strategy.scope():
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    results = []

    def step():
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()

    def work():
        strategy.run(step)
        results.append(model.bias.item())

    before = model.bias.item()
    for target in (work, work):
        thread = threading.Thread(target=target)
        thread.start()
        thread.join()
    strategy.run(lambda: optimizer.zero_grad())
    assert results[0] == pytest.approx(before - 0.1 * strategy.num_replicas_in_sync, rel=1e-4)
    assert len(results) == 2


def test_two_threads_at_once_are_refused(strategy):
    inside, leave, errors = threading.Event(), threading.Event(), []

    def fn():
        inside.set()
        leave.wait(5)

    thread = threading.Thread(target=strategy.run, args=(fn,))
    thread.start()
    inside.wait(5)
    with pytest.raises(RuntimeError, match="one thread at a time"):
        strategy.run(lambda: None)
    leave.set()
    thread.join()
    assert not errors
    assert_usable(strategy)


def test_modes_of_the_caller_hold_inside(strategy):
    def modes():
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            str(torch.get_autocast_dtype("cpu")),
        )

    expected = modes()
    assert set(on_replicas(strategy, modes)) == {expected}
    with torch.no_grad():
        assert set(on_replicas(strategy, modes)) == {(False, *expected[1:])}
    with torch.inference_mode():
        assert {m[:2] for m in on_replicas(strategy, modes)} == {(False, True)}
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            assert set(on_replicas(strategy, modes)) == {(True, False, True, str(dtype))}
            with torch.autocast("cpu", enabled=False):
                assert {m[2] for m in on_replicas(strategy, modes)} == {False}
    assert set(on_replicas(strategy, modes)) == {expected}


def test_context_variables_hold_inside(strategy):
    variable = contextvars.ContextVar("variable", default=0)
    token = variable.set(5)
    try:
        assert set(on_replicas(strategy, variable.get)) == {5}
    finally:
        variable.reset(token)


def test_function_and_dispatch_modes_are_refused(strategy):
    class Function(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    class Dispatch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    for mode in (Function, Dispatch):
        with mode(), pytest.raises(RuntimeError, match=mode.__name__):
            strategy.run(lambda: None)
    with torch.device("meta"):
        assert {str(d) for d in on_replicas(strategy, lambda: torch.ones(1).device)} == {"cpu"}
    assert_usable(strategy)


def test_scopes_do_not_leak_into_replicas(strategy):
    def fn():
        assert not ts.in_cross_replica_context()
        return ts.get_strategy() is strategy

    with strategy.scope():
        assert all(on_replicas(strategy, fn))


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


def test_concurrent_replicas_really_overlap():
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"], concurrent=True)
    barrier = threading.Barrier(2, timeout=5)
    strategy.run(barrier.wait)


def test_concurrent_guide_program_equals_turns():
    concurrent = guide_losses(["cpu:0", "cpu:1"])
    original = ts.MirroredStrategy

    class Concurrent(original):
        def __init__(self, devices):
            super().__init__(devices, concurrent=True)

    ts.MirroredStrategy = Concurrent
    try:
        assert guide_losses(["cpu:0", "cpu:1"]) == pytest.approx(concurrent, abs=1e-7)
    finally:
        ts.MirroredStrategy = original


@pytest.fixture
def concurrent():
    return ts.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"], concurrent=True)


def test_many_short_concurrent_runs(concurrent):
    """Everything that replica functions use at once: metrics, variables, losses, buffers, logs, fresh parameters."""
    with concurrent.scope():
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        metric = ts.metrics.Mean()
        counter = ts.Variable(torch.zeros(()), aggregation=ts.VariableAggregation.SUM)
    x = torch.arange(36.0).view(12, 3)
    batch = next(iter(concurrent.experimental_distribute_dataset(x, batch_size=12)))

    def step(x, i):
        optimizer.zero_grad()
        losses = model(x).square().sum(dim=1)
        ts.nn.compute_average_loss(losses, global_batch_size="actual").backward()
        info_once(f"message {i}")
        optimizer.step()
        metric.update_state(losses.detach() * 0 + 1)
        counter.assign_add(torch.ones(()))
        return all_reduce()

    for i in range(150):
        assert set(concurrent.run(step, args=(batch, i)).values) == {3.0}
    assert metric.result() == 1
    assert counter == 450
    first, *others = concurrent.experimental_local_results(model[0].weight)
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0)


def test_concurrent_replicas_say_a_message_once(concurrent, monkeypatch):
    monkeypatch.setattr("torchstrategy.log._said", set())
    said = []
    monkeypatch.setattr("torchstrategy.log.logger.info", said.append)
    barrier = threading.Barrier(3)

    def fn(i):
        barrier.wait(10)
        info_once(f"message {i}")

    for i in range(50):
        concurrent.run(fn, args=(i,))
    assert said == [f"message {i}" for i in range(50)]


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_concurrent_runs_that_fail_and_others_in_between(concurrent, failing):
    def fn(fails):
        for k in range(3):
            if fails and replica_id() == failing and k == 1:
                raise Boom
            all_reduce()

    num_threads = torch.get_num_threads()
    for i in range(40):
        if i % 2:
            with pytest.raises(Boom):
                concurrent.run(fn, args=(True,))
        else:
            concurrent.run(fn, args=(False,))
    assert_usable(concurrent)
    assert torch.get_num_threads() == num_threads


def test_failed_replica_0_waits_for_running_ones(concurrent):
    done = []

    def fn():
        if replica_id() == 0:
            raise Boom
        time.sleep(0.05)
        done.append(replica_id())

    with pytest.raises(Boom):
        concurrent.run(fn)
    assert sorted(done) == [1, 2]
    assert_usable(concurrent)


def test_interrupt_of_the_wait_after_a_failure(monkeypatch, concurrent):
    assert_usable(concurrent)
    hold = threading.Event()
    thread_class = type(concurrent.hosting._runners[0]._threads[0])
    wait = thread_class.wait_paused

    def interrupted(self):
        raise KeyboardInterrupt

    def fn():
        if replica_id() == 0:
            monkeypatch.setattr(thread_class, "wait_paused", interrupted)
            raise Boom
        hold.wait(5)

    with pytest.raises(KeyboardInterrupt):
        concurrent.run(fn)
    monkeypatch.setattr(thread_class, "wait_paused", wait)
    assert_usable(concurrent)
    hold.set()
    assert_usable(concurrent)


def test_threads_are_divided_between_concurrent_replicas(concurrent):
    before = torch.get_num_threads()
    torch.set_num_threads(6)
    try:

        def fn():
            inside = torch.get_num_threads()
            merged = ts.get_replica_context().merge_call(lambda _: torch.get_num_threads())
            return inside, merged, torch.get_num_threads()

        results = concurrent.experimental_local_results(concurrent.run(lambda: [list(fn())]))
        assert all(result == [[2, 6, 2]] for result in results)
        assert torch.get_num_threads() == 6
    finally:
        torch.set_num_threads(before)


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
        handle = model.weight.register_hook(hook) if replica_id() == 0 else None
        all_reduce()
        model(x).sum().backward()
        if handle is not None:
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
