"""Tracebacks show the program's lines; the library's are left out."""

import contextlib
import os
import sys
import traceback

import pytest
import torch

import torchstrategy as ts
from torchstrategy.base import log

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="an error keeps its calls in Python 3.10")


def fail():
    raise ValueError("the program's")


def names_of(error):
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


@pytest.fixture
def strategy():
    return ts.MirroredStrategy(["cpu:0", "cpu:1"])


def test_an_error_of_a_replica_function_shows_no_calls_of_the_library(strategy):
    with pytest.raises(ValueError, match="the program's") as caught:
        strategy.run(fail)
    assert names_of(caught.value)[1:] == ["fail"]
    assert caught.value.__context__ is None


def test_an_error_of_the_library_shows_which_line_of_the_program_it_is_about(strategy):
    def step():
        ts.get_replica_context().all_reduce("WRONG", torch.ones(1))

    with pytest.raises(ValueError, match="WRONG") as caught:
        strategy.run(step)
    assert names_of(caught.value)[1:] == ["step"]


def test_an_error_of_the_library_in_fit_shows_the_line_that_called_it(strategy):
    with strategy.scope():
        model = ts.Model(torch.nn.Linear(1, 2))
        model.compile(optimizer="sgd", loss=torch.nn.CrossEntropyLoss())
    with pytest.raises(ValueError, match="from 0 to 1") as caught:
        model.fit(torch.ones(4, 1), torch.full((4,), 5), verbose=0)
    assert names_of(caught.value) == ["test_an_error_of_the_library_in_fit_shows_the_line_that_called_it"]
    with pytest.raises(ValueError, match="failed on its first batch") as caught:
        model.fit(torch.ones(4, 3), torch.ones(4), verbose=0)
    assert len(names_of(caught.value)) == 1
    files = [frame.filename for frame in traceback.extract_tb(caught.value.__cause__.__traceback__)]
    assert all(is_of_torch(file) for file in files)
    assert files[-1].endswith("linear.py")


@pytest.mark.parametrize("method", ["train", "evaluate", "predict", "train_and_evaluate"])
def test_an_error_of_the_programs_functions_in_an_estimator_shows_the_programs_lines(method, tmp_path):
    def model_fn(features, labels, mode):
        module = torch.nn.Linear(1, 1)
        train_op = torch.optim.SGD(module.parameters(), lr=0.1)
        return ts.estimator.EstimatorSpec(
            mode, module=module, predictions=lambda _: fail(), loss=lambda *_: fail(), train_op=train_op
        )

    def input_fn():
        return ts.data.Dataset.from_tensor_slices((torch.ones(4, 1), torch.ones(4, 1))).batch(2)

    estimator = ts.estimator.Estimator(model_fn, tmp_path)
    calls = {
        "train": lambda: estimator.train(input_fn),
        "evaluate": lambda: estimator.evaluate(input_fn),
        "predict": lambda: next(estimator.predict(input_fn)),
        "train_and_evaluate": lambda: ts.estimator.train_and_evaluate(
            estimator, ts.estimator.TrainSpec(input_fn, max_steps=1), ts.estimator.EvalSpec(input_fn)
        ),
    }
    with pytest.raises(ValueError, match="the program's") as caught:
        calls[method]()
    assert names_of(caught.value)[1:] == ["<lambda>", "<lambda>", "fail"]


def is_of_torch(file):
    return file.startswith(os.path.dirname(torch.__file__))


def test_an_error_of_torch_shows_torchs_calls(strategy):
    with strategy.scope():
        layer = torch.nn.Linear(1, 2)

    def step():
        layer(torch.ones(1, 3))

    with pytest.raises(RuntimeError, match="cannot be multiplied") as caught:
        strategy.run(step)
    assert names_of(caught.value)[1] == "step"
    assert all(is_of_torch(frame.filename) for frame in traceback.extract_tb(caught.value.__traceback__)[2:])
    assert names_of(caught.value)[-1] == "forward"


def of_library(statement):
    """Return a function of the library's that fails in its own way."""
    namespace = {}
    exec(compile(f"def inner(*_):\n    {statement}", log.__file__, "exec"), namespace)
    return namespace["inner"]


@pytest.mark.parametrize("statement", ["None.nothing", "open('/nowhere')"])
def test_what_else_fails_in_the_library_shows_where(strategy, monkeypatch, statement):
    monkeypatch.setattr(strategy.hosting, "run", of_library(statement))
    with pytest.raises((AttributeError, OSError)) as caught:
        strategy.run(fail)
    assert names_of(caught.value)[1:] == ["run", "_run_replicas", "_call_hosting", "inner"]


def test_an_interruption_shows_the_programs_lines_only(strategy):
    def step():
        context = ts.get_replica_context()
        with contextlib.ExitStack() as stack:
            stack.callback(of_library("raise KeyboardInterrupt"))
            context.all_reduce("SUM", torch.ones(1))

    with pytest.raises(KeyboardInterrupt) as caught:
        strategy.run(step)
    assert names_of(caught.value)[1:] == ["step"]


def test_a_folder_of_the_programs_may_have_the_name_of_torch():
    assert log.is_users_file(os.path.join("home", "torch", "train.py"))
    assert log.is_users_file(os.path.dirname(log._PACKAGE[:-1]) + "/torchstrategy_trials/train.py")
    assert not log.is_users_file(torch.nn.functional.__file__)
    assert not log.is_users_file(ts.nn.__file__)


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


def test_a_progress_bar_around_a_dataset_is_no_line_of_the_program():
    source = "def bar(calls):\n    for call in calls:\n        yield call()\n"
    bars: dict[str, object] = {}
    exec(compile(source, "/env/lib/python3.11/site-packages/tqdm/std.py", "exec"), bars)
    own: dict[str, object] = {}
    exec(compile(source, "/home/me/batches.py", "exec"), own)
    with_bar, without = (next(make([log.call_site])) for make in (bars["bar"], lambda calls: (c() for c in calls)))
    assert with_bar.startswith("test_log.py:")
    assert with_bar.partition(" ")[0] == without.partition(" ")[0]  # the chief alone may have a bar
    assert next(own["bar"]([log.call_site])) == "batches.py:3 (bar)"
