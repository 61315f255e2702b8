"""What was summed is remembered as long as it is true: every program is right, or refused with its remedy."""

import gc
import re
import threading
import warnings
import weakref
from typing import ClassVar

import pytest
import torch
from torch import nn

import torchstrategy as ts
from tests.gradients import ledger_programs as programs
from tests.programs import cpu_devices


@pytest.fixture(scope="module")
def one():
    return programs.answers(cpu_devices(1))


@pytest.fixture(scope="module")
def in_process():
    return programs.answers(cpu_devices(2))


@pytest.fixture(scope="module")
def by_processes(process_pool):
    return process_pool(2).run(programs.answers, None, timeout_s=100)


@pytest.mark.parametrize("is_equal", [False, True], ids=["other gradients", "equal gradients"])
@pytest.mark.parametrize("name", programs.RIGHT)
def test_is_right(name, is_equal, one, in_process, by_processes):
    key = (name, is_equal)
    assert in_process[key] == pytest.approx(one[key] * 2)
    assert [answers[key] for answers in by_processes] == [pytest.approx(one[key])] * 2


@pytest.mark.parametrize("is_equal", [False, True], ids=["other gradients", "equal gradients"])
@pytest.mark.parametrize("name", programs.REFUSED)
def test_is_refused(name, is_equal, one, in_process, by_processes):
    _, message, if_equal = programs.REFUSED[name]
    key = (name, is_equal)
    if if_equal and not is_equal:  # replicas that hold different gradients can't hold the sum
        assert in_process[key] == pytest.approx(one[key] * 2)
        assert [answers[key] for answers in by_processes] == [pytest.approx(one[key])] * 2
        return
    for found in (in_process[key], *(answers[key] for answers in by_processes)):
        assert re.search(message, found), found


def test_concurrent_replicas():
    for name, step in programs.RIGHT.items():
        strategy_weights = [
            programs.train(devices, step, is_equal=False) for devices in (cpu_devices(1), cpu_devices(2))
        ]
        assert strategy_weights[1] == pytest.approx(strategy_weights[0] * 2), name


def test_gradients_that_are_nan_everywhere_are_no_sums_of_the_program():
    """A training that ends in NaN is not told that it has summed by itself."""

    def step(model, optimizer, loss, run):
        ts.get_replica_context().all_reduce("sum", torch.ones(()))
        (gradient,) = torch.autograd.grad(loss(), model.weight)
        model.weight.grad = gradient * float("nan")
        optimizer.step()

    assert programs.train(cpu_devices(2), step, is_equal=False) == pytest.approx([float("nan")] * 2, nan_ok=True)


def test_nothing_is_kept_on_tensors_and_no_gradient_is_kept_alive():
    strategy = ts.MirroredStrategy(cpu_devices(2))
    with strategy.scope():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients = []

    def step():
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        gradients.extend(weakref.ref(parameter.grad) for parameter in model.parameters())
        return [(vars(p), vars(p.grad)) for p in model.parameters()]

    for found in strategy.experimental_local_results(strategy.run(step)):
        assert all(names == ({}, {}) for names in found)
    strategy.run(lambda: optimizer.zero_grad())
    gc.collect()
    assert all(gradient() is None for gradient in gradients)


def train_once(strategy):
    with strategy.scope():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    strategy.run(step)
    assert strategy.gradients.ledger._notes


def test_what_is_known_of_a_parameter_goes_with_it():
    strategy = ts.MirroredStrategy(cpu_devices(2))
    train_once(strategy)
    gc.collect()
    assert not strategy.gradients.ledger._notes


def trained_weight():
    strategy = ts.MirroredStrategy(cpu_devices(2))
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    weight = next(iter(model.parameters()))

    def step():
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()

    strategy.run(step)
    assert weight._post_accumulate_grad_hooks
    return weight


def test_hooks_of_parameters_go_with_the_strategy():
    weight = trained_weight()
    gc.collect()
    assert not weight._post_accumulate_grad_hooks


def engine(loss):
    """Compute gradients as code in C++ does: past all functions of Python that the library sees."""
    torch.autograd.Variable._execution_engine.run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def train_by(devices, where):
    """Return the weight after a step whose gradient code in C++ computes.

    Args:
        devices: of the replicas.
        where: ``"a step's run"``, ``"another run"`` before it, or ``"no run"``.
    """
    strategy = ts.MirroredStrategy(devices)
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    nn.init.zeros_(model.weight)

    def compute():
        engine(model(torch.ones(1, 1, dtype=torch.float64)).sum())

    def step():
        if where == "a step's run":
            compute()
        optimizer.step()

    strategy.run(lambda: None)
    if where == "another run":
        strategy.run(compute)
    elif where == "no run":
        compute()
    strategy.run(step)
    return model.weight.item()


@pytest.mark.parametrize("where", ["a step's run", "another run"])
def test_gradients_that_code_in_cpp_computes_are_summed(where):
    assert train_by(cpu_devices(2), where) == train_by(cpu_devices(1), where) * 2 == -2


def test_gradients_that_code_in_cpp_computes_outside_run_are_refused():
    with pytest.raises(RuntimeError, match="outside `run`"):
        train_by(cpu_devices(2), "no run")


@pytest.mark.parametrize("look", ["check_sync", "run"])
def test_passes_outside_run_are_refused_however_the_strategy_has_looked(look, process_pool):
    found = [programs.passes_outside_run(cpu_devices(2), look)]
    found += process_pool(2).run(programs.passes_outside_run, None, look)
    for message in found:
        assert "outside `run`" in message


class Meets(torch.autograd.Function):
    """The identity, whose backward calls what is in a list."""

    others: ClassVar[list] = []

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        for other in Meets.others:
            other()
        return grad


def two_layers():
    strategy = ts.MirroredStrategy(cpu_devices(2))
    with strategy.scope():
        model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return strategy, model, optimizer


def pass_around(model, other):
    """Make a pass that calls ``other`` when the second layer's gradient is there, and the first one's is not."""
    Meets.others = [other]
    try:
        model[1](Meets.apply(model[0](torch.ones(1, 1)))).sum().backward()
    finally:
        Meets.others = []


def in_a_thread(compute):
    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()


def test_a_pass_of_another_thread_does_not_look_for_this_one():
    strategy, model, optimizer = two_layers()
    problems = []

    def plain_pass():
        def compute():
            try:
                nn.Linear(1, 1)(torch.ones(1, 1)).sum().backward()
            except RuntimeError as error:
                problems.append(error)

        in_a_thread(compute)

    def step():
        model(torch.ones(1, 1)).sum().backward()
        ts.get_replica_context().sum_gradients(optimizer)
        with pytest.raises(RuntimeError, match="already the sum"):
            pass_around(model, plain_pass)

    strategy.run(step)
    assert not problems


@pytest.mark.parametrize("by", ["thread", "engine"])
def test_a_pass_of_a_thread_or_of_cpp_belongs_to_the_replica_whose_turn_it_is(by):
    strategy = ts.MirroredStrategy(cpu_devices(2))
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step():
        optimizer.zero_grad()
        loss = model(torch.ones(1, 1)).sum()
        if by == "thread":
            in_a_thread(loss.backward)
        else:
            engine(loss)
        return model.weight.grad.clone()

    for _ in range(2):
        assert [grad.item() for grad in strategy.experimental_local_results(strategy.run(step))] == [1, 1]
    strategy.run(optimizer.step)


def test_a_refusal_that_the_program_passes_over_comes_again():
    strategy, model, optimizer = two_layers()

    def fail():
        raise ZeroDivisionError

    def step():
        model(torch.ones(1, 1)).sum().backward()
        ts.get_replica_context().sum_gradients(optimizer)
        with pytest.raises(ZeroDivisionError):
            pass_around(model, fail)
        optimizer.step()

    with pytest.raises(RuntimeError, match="zero_grad"):
        strategy.run(step)


def test_a_run_of_another_thread_is_refused_and_leaves_this_one_alone():
    strategy, model, optimizer = two_layers()
    said = []

    def other_run():
        def run():
            try:
                strategy.run(lambda: None)
            except RuntimeError as error:
                said.append(str(error))

        in_a_thread(run)

    def step():
        model(torch.ones(1, 1)).sum().backward()
        ts.get_replica_context().sum_gradients(optimizer)
        with pytest.raises(RuntimeError, match="already the sum"):
            pass_around(model, other_run)

    strategy.run(step)
    assert len(said) == 2
    assert not any("already the sum" in text for text in said)


def test_the_error_of_a_run_is_not_hidden():
    strategy = ts.MirroredStrategy(cpu_devices(2))
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step():
        model(torch.ones(1, 1)).sum().backward()
        ts.get_replica_context().sum_gradients(optimizer)
        engine(model(torch.ones(1, 1)).sum())  # adds to a sum, which is found when the run is over
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        strategy.run(step)


def test_a_strategy_whose_replicas_run_at_once_does_not_live_as_long_as_a_parameter():
    def trained():
        strategy = ts.MirroredStrategy(cpu_devices(2), concurrent=True)
        train_once(strategy)
        with strategy.scope():
            model = nn.Linear(1, 1, bias=False)
        strategy.run(lambda: model(torch.ones(1, 1)).sum().backward())
        return weakref.ref(strategy), next(iter(model.parameters()))

    strategy, weight = trained()
    gc.collect()
    assert strategy() is None
    assert not weight._post_accumulate_grad_hooks


@pytest.mark.parametrize("sparse", [False, True])
def test_a_parameter_that_an_optimizer_has_twice_is_summed_once(sparse):
    strategy = ts.MirroredStrategy(cpu_devices(2))
    with strategy.scope():
        model = nn.Embedding(1, 1, sparse=sparse)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of it
            optimizer = torch.optim.SGD([model.weight, model.weight], lr=1.0)

    def step():
        optimizer.zero_grad()
        scale = 1.0 + ts.get_replica_context().replica_id_in_sync_group
        (scale * model(torch.zeros(1, dtype=torch.int64))).sum().backward()
        ts.get_replica_context().sum_gradients(optimizer)
        return model.weight.grad.to_dense().item()

    for _ in range(3):
        assert strategy.experimental_local_results(strategy.run(step)) == (3.0, 3.0)


def test_passes_in_runs_of_another_strategy_leave_nothing():
    first, second = (ts.MirroredStrategy(cpu_devices(2)) for _ in range(2))
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = first.replicate(model, optimizer)
    with second.scope():
        other = nn.Linear(1, 1, bias=False)
    first.run(lambda: None)
    second.run(lambda: None)
    weight = next(iter(other.parameters()))

    def step():
        optimizer.zero_grad()
        (model(torch.ones(1, 1)) * weight).sum().backward()
        optimizer.step()

    for _ in range(3):
        first.run(step)
    assert not second.gradients.ledger._reached
    stepper = torch.optim.SGD([weight], lr=1.0)
    with pytest.raises(RuntimeError):
        second.run(stepper.step)


def test_a_pass_that_fails_half_way_is_known_of():
    strategy, model, optimizer = two_layers()

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ZeroDivisionError

    def step():
        with pytest.raises(ZeroDivisionError):
            model[1](Fails.apply(model[0](torch.ones(1, 1)))).sum().backward()
        ts.get_replica_context().sum_gradients(optimizer)
        with pytest.raises(RuntimeError, match="already the sum"):
            model(torch.ones(1, 1)).sum().backward()

    strategy.run(step)
    notes = strategy.gradients.ledger.notes_of(model.parameters())
    assert all(note is not None for note in notes)


def test_the_program_may_replace_a_function_of_torch_in_run(monkeypatch):
    strategy = ts.MirroredStrategy(cpu_devices(2))
    original = torch.autograd.backward
    calls = []

    def own(*args, **kwargs):
        calls.append(1)
        return inner(*args, **kwargs)

    def replace():
        nonlocal inner
        if not calls:
            inner, torch.autograd.backward = torch.autograd.backward, own
        torch.ones(1, requires_grad=True).sum().backward()

    inner = None
    try:
        strategy.run(replace)
        assert torch.autograd.backward is own
        strategy.run(lambda: torch.ones(1, requires_grad=True).sum().backward())
        assert torch.autograd.backward is own
        assert len(calls) == 4
    finally:
        torch.autograd.backward = original


def test_a_captured_step_of_several_processes_is_refused(process_pool):
    for text in process_pool(2).run(programs.captures_a_step):
        assert re.search(
            r"A CUDA graph is being captured at ledger_programs.py:\d+ .*Capture forward and backward", text
        )
