"""The number of compiled programs, and the warnings of loops that keep compiling."""

import functools
import warnings

import pytest
import torch
from torch import nn

import torchstrategy as ts
from torchstrategy.base.values import PerReplica
from torchstrategy.tpu import compilations
from torchstrategy.xla import runtime

TOO_MANY = compilations._TOO_MANY


class Strategy:
    """A strategy on this process's devices with one linear layer and its optimizer."""

    def __init__(self, make_optimizer=None):
        from torchstrategy.xla import system

        if system.current() is None:
            ts.tpu.experimental.initialize_tpu_system()
        self.strategy = ts.TPUStrategy()
        with self.strategy.scope():
            self.model = nn.Linear(4, 3)
            make = make_optimizer or (lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9))
            self.optimizer = make(self.model.parameters())

    def train_step(self, inputs, number=0):
        self.optimizer.zero_grad()
        loss = self.model(inputs).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def run(self, step, batch_sizes, *, with_number=False):
        """Return how many programs each step compiled, and the warnings."""

        @ts.function
        def function(inputs, number):
            args = (inputs, number) if with_number else (inputs,)
            return self.strategy.reduce("SUM", self.strategy.run(step, args=args))

        batches = self.strategy.experimental_distribute_dataset([torch.ones(size, 4) for size in batch_sizes])
        found = []
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for number, inputs in enumerate(batches):
                before = self.strategy.num_compilations
                function(inputs, number + 2)
                found.append(self.strategy.num_compilations - before)
        return found, [str(warning.message) for warning in told]


def expected_compilations():
    own = Strategy()
    return own.run(own.train_step, [8] * 6 + [6, 8, 6])


def test_a_loop_compiles_twice_and_once_more_for_a_partial_batch(xla_process):
    found, told = xla_process(2, fresh=True).run(expected_compilations)
    assert found == [1, 1, 0, 0, 0, 0, 1, 0, 0]
    assert told == []


def scheduled_compilations(name):
    optimizers = {
        "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
        "adam": lambda parameters: torch.optim.Adam(parameters, 0.1),
        "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.1),
    }
    own = Strategy(optimizers[name])
    with own.strategy.scope():
        scheduler = torch.optim.lr_scheduler.LambdaLR(own.optimizer, lambda step: 1 / (2 + step))

    def step(inputs):
        loss = own.train_step(inputs)
        scheduler.step()
        return loss

    return own.run(step, [8] * 8)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_learning_rates_and_step_counts_are_no_part_of_a_program(xla_process, name):
    found, told = xla_process(2, fresh=True).run(scheduled_compilations, name)
    assert sum(found[:2]) <= 2
    assert found[2:] == [0] * 6
    assert told == []


def changing_shapes():
    own = Strategy()
    return own.run(own.train_step, range(2, 2 + 2 * 2 * TOO_MANY, 2))


def test_changing_shapes_are_warned_of_once(xla_process):
    found, told = xla_process(2, fresh=True).run(changing_shapes)
    assert len(found) == 2 * TOO_MANY
    assert min(found) >= 1
    (message,) = told
    assert f"`Strategy.train_step` was compiled {TOO_MANY} times in the last {TOO_MANY} steps" in message
    assert f"`inputs` from ({TOO_MANY - 1}, 4) float32 to ({TOO_MANY}, 4) float32" in message
    assert "drop_remainder=True" in message


def test_shapes_are_told_with_how_many_replicas_have_them():
    shares = PerReplica([torch.ones(rows, 4) for rows in (2, 1, 1, 0)])
    expected = "[(2, 4) float32, 2 times (1, 4) float32, (0, 4) float32]"
    assert compilations._describe(compilations._static(shares)) == expected


def changing_numbers():
    own = Strategy()

    def power(inputs, number):
        return (inputs**number).sum()

    return own.run(power, [8] * (TOO_MANY + 2), with_number=True)


def test_a_changing_number_is_named(xla_process):
    found, told = xla_process(2, fresh=True).run(changing_numbers)
    assert found == [1] * (TOO_MANY + 2)
    (message,) = told
    assert f"`power` was compiled {TOO_MANY} times" in message
    assert f"`number` from {TOO_MANY} to {TOO_MANY + 1}" in message


def changes_inside():
    own = Strategy()
    exponent = [1]

    def power(inputs):
        exponent[0] += 1
        return (inputs ** exponent[0]).sum()

    found = own.run(power, [8] * (TOO_MANY + 2))
    factor = [1.5]

    def scaled(inputs):
        factor[0] += 1
        return (inputs * factor[0]).sum()

    return found, own.run(scaled, [8] * (TOO_MANY + 2))


def test_what_changes_inside_the_function_is_found_and_factors_are_no_cause(xla_process):
    (found, told), (found_scaled, told_scaled) = xla_process(2, fresh=True).run(changes_inside)
    assert found == [1] * (TOO_MANY + 2)
    (message,) = told
    assert "No argument has changed, so something in the function differs" in message
    assert found_scaled == [1] + [0] * (TOO_MANY + 1)
    assert told_scaled == []


def new_models():
    told = []
    for _ in range(TOO_MANY):
        own = Strategy()
        found, warned = own.run(own.train_step, [8] * 2)
        told += warned
    with own.strategy.scope():
        own.model = nn.Linear(4, 2)
        own.optimizer = torch.optim.SGD(own.model.parameters(), 0.1, momentum=0.9)
    found, warned = own.run(own.train_step, [8] * 3)
    return found, told + warned


def test_new_models_are_expected_to_be_compiled(xla_process):
    found, told = xla_process(2, fresh=True).run(new_models)
    assert found == [1, 1, 0]
    assert told == []


class CountingRuntime:
    """Counts what a test says was compiled."""

    def __init__(self):
        self.compiled = 0

    def num_compilations(self):
        return self.compiled


def test_arguments_are_called_what_the_function_calls_them():
    watch = compilations.Compilations(CountingRuntime())

    def step(batch, *rest, flag):
        return batch

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for number in range(TOO_MANY):
            batch = {"x": torch.ones(number), "y": ts.PerReplica([torch.ones(2), torch.ones(number)])}
            watch.note(step, ((batch, 1), {"flag": True}))
            watch._runtime.compiled += 1
            watch.look()
    (warning,) = told
    last = TOO_MANY - 1
    text = str(warning.message)
    assert f"`batch['x']` from ({last - 1},) float32 to ({last},) float32" in text
    assert f"`batch['y']` from [(2,) float32, ({last - 1},) float32] to [(2,) float32, ({last},) float32]" in text


def test_a_named_function_is_counted_and_shown_by_its_name():
    watch = compilations.Compilations(CountingRuntime())

    def step(mode, batch):
        return mode, batch

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for number in range(TOO_MANY):
            for mode in ("train", "test") if number < TOO_MANY - 1 else ("train",):
                watch.note(runtime.named(functools.partial(step, mode), f"Net.{mode}"), ((torch.ones(number),), {}))
                watch._runtime.compiled += 1
                watch.look()
    (warning,) = told
    assert f"`Net.train` was compiled {TOO_MANY} times" in str(warning.message)
    assert f"`batch` from ({TOO_MANY - 2},) float32" in str(warning.message)


def test_compilations_now_and_then_are_not_warned_of():
    watch = compilations.Compilations(CountingRuntime())

    def step(batch):
        return batch

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(10 * TOO_MANY):
            watch.note(step, ((torch.ones(number),), {}))
            watch._runtime.compiled += number % 4 == 0
            watch.look()
        watch.note(step, ((torch.ones(1),), {}))  # a step that fails is never looked at
        watch._runtime.compiled += 1
        watch.note(step, ((torch.ones(1),), {}))
        watch.look()
        assert len(watch._histories) == 1
        watch.forget()
        assert not watch._histories
