"""Tracebacks show the program's lines; the library's between them are left out."""

import sys
import traceback

import pytest
import torch

import torchstrategy as ts

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="an error keeps its calls in Python 3.10")


def fail():
    raise ValueError("the program's")


def names_of(error):
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


@pytest.fixture
def strategy():
    return ts.MirroredStrategy(["cpu:0", "cpu:1"])


def test_an_error_of_a_replica_function_shows_no_calls_of_the_library_but_run(strategy):
    with pytest.raises(ValueError, match="the program's") as caught:
        strategy.run(fail)
    assert names_of(caught.value)[1:] == ["run", "fail"]
    assert caught.value.__context__ is None


def test_an_error_of_the_library_shows_where_it_was_raised(strategy):
    def step():
        ts.get_replica_context().all_reduce("WRONG", torch.ones(1))

    with pytest.raises(ValueError, match="WRONG") as caught:
        strategy.run(step)
    names = names_of(caught.value)
    assert names[1:4] == ["run", "step", "all_reduce"]
    assert len(names) > 4


def test_an_error_of_a_models_step_shows_few_calls_of_the_library(strategy):
    class Failing(ts.Model):
        def test_step(self, data):
            fail()

    with strategy.scope():
        model = Failing(torch.nn.Linear(1, 1))
        model.compile(optimizer="sgd", loss="mse")
    with pytest.raises(ValueError, match="the program's") as caught:
        model.evaluate(torch.ones(4, 1), torch.ones(4, 1), verbose=0)
    names = names_of(caught.value)
    assert names[-2:] == ["test_step", "fail"]
    assert sum("torchstrategy/" in frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)) <= 6


def test_all_calls_are_shown_if_wanted(strategy, monkeypatch):
    monkeypatch.setenv("TORCHSTRATEGY_FULL_TRACEBACK", "1")
    with pytest.raises(ValueError, match="the program's") as caught:
        strategy.run(fail)
    assert {"_run_replicas", "_call_hosting"} < set(names_of(caught.value))


def test_strategies_datasets_and_contexts_say_what_they_are(strategy):
    """As in tf Python's own text comes first, which programs may look for."""
    start, _, rest = repr(strategy).partition(" at 0x")
    assert start == "<torchstrategy.strategies.mirrored_strategy.MirroredStrategy object"
    assert rest.endswith(": 2 replicas on cpu:0, cpu:1>")
    assert repr(ts.OneDeviceStrategy("cpu:0")).endswith(": 1 replica on cpu:0>")
    dataset = strategy.experimental_distribute_dataset([1.0, 2.0], batch_size=2)
    assert repr(dataset).endswith(": for 2 replicas on cpu:0, cpu:1>")
    contexts = strategy.run(lambda: repr(ts.get_replica_context()))
    assert contexts.values[1].endswith(": replica 1 of 2 on cpu:1>")
