"""What the caller's thread, modes and context mean for replicas."""

import contextvars
import threading

import pytest
import torch
from torch import nn

import torchstrategy as ts
from tests.programs import strategy_for
from tests.replicas.runs import assert_usable, on_replicas


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


def test_what_replicas_get_for_a_run_in_inference_mode_can_be_trained_later():
    """An evaluation before the training, and one after a layer was replaced."""

    def train(devices):
        strategy = strategy_for(devices)
        with strategy.scope():
            model = torch.nn.Linear(2, 1)
        torch.nn.init.ones_(model.weight)
        model.factor = torch.ones(())
        model.bias = torch.nn.Parameter(torch.zeros(1))
        (x,) = strategy.experimental_distribute_dataset(torch.ones(4, 2), batch_size=4)

        def loss(x):
            return ts.nn.compute_average_loss(model.factor * model(x).square().sum(1), global_batch_size="actual")

        def step(x):
            loss(x).backward()
            optimizer.step()
            optimizer.zero_grad()

        for number in range(1, 3):
            with torch.inference_mode():
                strategy.run(loss, args=(x,))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            strategy.run(step, args=(x,))
            model.factor = torch.full((), 1.0 + number)
            model.bias = torch.nn.Parameter(torch.ones(1))
        return [*model.weight.flatten().tolist(), model.bias.item()]

    assert train(["cpu:0", "cpu:1"]) == pytest.approx(train([]))
