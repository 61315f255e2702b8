"""Steps are recorded, and what there is of them is saved, however a training ends."""

import contextlib
import functools
import json
import math
import os

import pytest
import torch
from torch.autograd import profiler as autograd_profiler

import torchstrategy as ts
from torchstrategy.profiler import recording


def read(path):
    """Return the events of a trace after a check of what viewers need."""
    trace = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    for event in trace["traceEvents"]:
        assert event["ph"] in "XMifs", event
        assert event["ph"] != "X" or (event["dur"] >= 0 and event["ts"] >= 0), event
        assert {"name", "pid", "tid"} <= event.keys()
    return trace["traceEvents"]


def labels(path):
    events = [event["name"].removeprefix("ts::") for event in read(path) if event["name"].startswith("ts::")]
    return [name for name in events if name != "input"]


def steps(path):
    return sum(event["name"].startswith("ProfilerStep#") for event in read(path))


def test_nothing_happens_without_a_profile(tmp_path):
    profile = ts.profiler.Profile(tmp_path, skip=1, record=0)
    batches = [1, 2]
    assert profile.steps(batches) is batches
    profile.step()
    profile.end_epoch()
    assert not list(tmp_path.iterdir())


def test_the_steps_that_are_asked_for_are_recorded(tmp_path, capsys):
    profile = ts.profiler.Profile(tmp_path, skip=2, record=3)
    for number in profile.steps(range(8)):
        with torch.profiler.record_function(f"ts::replica {number}"):
            torch.ones(2) + 1
    path = tmp_path / "rank_0.json"
    assert labels(path) == ["replica 2", "replica 3", "replica 4"]
    assert steps(path) == 3
    assert not autograd_profiler._is_profiler_enabled
    out = capsys.readouterr().out
    assert "(means of 3 steps)" in out
    assert str(path.parent) in out
    assert list(profile.steps([5])) == [5]
    assert capsys.readouterr().out == ""


def test_an_epoch_may_end_before(tmp_path, capsys):
    """Steps are counted over the epochs; a recording ends with its epoch, because tests follow."""
    profile = ts.profiler.Profile(tmp_path, skip=3, record=5)
    assert list(profile.steps(range(2))) == [0, 1]
    assert "Nothing was recorded" in capsys.readouterr().out
    for number in profile.steps(range(3)):
        with torch.profiler.record_function(f"ts::replica {number}"):
            pass
    assert labels(tmp_path / "rank_0.json") == ["replica 1", "replica 2"]
    assert "(means of 2 steps)" in capsys.readouterr().out


@pytest.mark.parametrize(("failing", "expected"), [(1, 1), (2, 1), (3, 2)])
def test_a_loop_that_fails_leaves_its_trace(tmp_path, capsys, failing, expected):
    """The step with the error does not count, unless there is no other one."""
    with pytest.raises(ArithmeticError, match="mine"):
        train(ts.profiler.Profile(tmp_path, skip=1, record=5), failing)
    assert "ts::input" in [event["name"] for event in read(tmp_path / "rank_0.json")]
    assert max(1, steps(tmp_path / "rank_0.json")) == expected
    assert f"(means of {expected} steps)" in capsys.readouterr().out
    assert not autograd_profiler._is_profiler_enabled


def train(profile, failing):
    with profile:
        batches = profile.steps(range(9))  # is held by this frame: it does not end by itself
        for number in batches:
            fail_at(failing, number)


def fail_at(failing, number):
    torch.ones(2) + 1
    if number == failing:
        raise ArithmeticError("mine")


def test_a_loop_that_is_left_leaves_its_trace(tmp_path):
    """What comes after the loop is not recorded, and neither is a second loop."""
    with ts.profiler.Profile(tmp_path, skip=1, record=5) as profile:
        for number in profile.steps(range(9)):
            if number == 2:
                break
        assert not autograd_profiler._is_profiler_enabled
        assert profile.steps(batches := [1]) is batches
    assert steps(tmp_path / "rank_0.json") == 1


def test_a_loop_that_is_left_before_the_recording_counts(tmp_path, capsys):
    with ts.profiler.Profile(tmp_path, skip=3, record=1) as profile:
        for number in profile.steps(range(9)):
            if number == 2:
                break
        assert capsys.readouterr().out == ""
        assert list(profile.steps(range(2))) == [0, 1]
    assert steps(tmp_path / "rank_0.json") == 1


@pytest.fixture
def running(monkeypatch):
    """How many of torch's profilers were started and not stopped: torch's own flag is set while one records only."""
    number = [0]

    def make(**options):
        made = make_profiler(**options)
        for name, change in (("start", 1), ("stop", -1)):
            monkeypatch.setattr(made, name, functools.partial(call, getattr(made, name), change))
        return made

    def call(method, change):
        number[0] += change
        method()

    make_profiler = recording.make_profiler
    monkeypatch.setattr(recording, "make_profiler", make)
    return number


@pytest.mark.parametrize("failing", [None, 1])
def test_a_block_that_ends_in_the_warm_up_leaves_no_profiler_running(tmp_path, capsys, running, failing):
    with contextlib.suppress(ArithmeticError), ts.profiler.Profile(tmp_path, skip=3, record=1) as profile:
        assert running == [1]
        for number in profile.steps(range(2)):
            fail_at(failing, number)
    assert running == [0]
    assert capsys.readouterr().out.count("Nothing was recorded") == 1
    assert not list(tmp_path.iterdir())


def test_a_profile_that_is_made_and_not_used_runs_no_profiler(tmp_path, running):
    profile = ts.profiler.Profile(tmp_path, skip=1, record=1)
    assert running == [0]
    with profile:
        pass
    assert running == [0]


def test_a_loop_that_is_left_and_held_ends_with_the_next_one(tmp_path):
    with ts.profiler.Profile(tmp_path, skip=1, record=5) as profile:
        held = profile.steps(range(9))
        for number in held:
            if number == 2:
                break
        assert list(profile.steps(range(5))) == list(range(5))
        held.close()
    assert steps(tmp_path / "rank_0.json") == 1


@pytest.mark.parametrize("failing", [0, 8])
def test_before_and_after_the_recording_a_failure_leaves_no_trace_of_itself(tmp_path, failing):
    with pytest.raises(ArithmeticError, match="mine"):
        train(ts.profiler.Profile(tmp_path, skip=3, record=2), failing)
    assert not autograd_profiler._is_profiler_enabled
    path = tmp_path / "rank_0.json"
    assert path.exists() == (failing == 8)
    assert failing == 0 or steps(path) == 2


def test_a_trace_that_cannot_be_saved_hides_no_error(tmp_path, capsys):
    (tmp_path / "profile").write_text("a file where the folder should be")
    with pytest.raises(ArithmeticError, match="mine"):
        train(ts.profiler.Profile(tmp_path / "profile", skip=1, record=5), failing=2)
    assert "What was recorded can't be saved: " in capsys.readouterr().out
    with pytest.raises(FileExistsError):
        train(ts.profiler.Profile(tmp_path / "profile", skip=1, record=5), failing=None)
    assert not autograd_profiler._is_profiler_enabled


def test_a_fit_that_fails_leaves_its_trace(tmp_path):
    """An error in the model's fourth step, while two to six are recorded."""
    strategy, calls = ts.MirroredStrategy(["cpu:0", "cpu:1"]), []
    with strategy.scope():
        model = ts.Model(torch.nn.Linear(2, 1))

    def loss(outputs, targets):
        calls.append(None)
        fail_at(7, len(calls))  # of two in a step
        return torch.nn.functional.mse_loss(outputs, targets, reduction="none")

    model.compile("sgd", loss)
    profile = ts.profiler.Profile(tmp_path, strategy, skip=1, record=5)
    how = {
        "batch_size": 2,
        "verbose": 0,
        "callbacks": [ts.callbacks.LambdaCallback(on_train_batch_end=lambda *_: profile.step())],
    }
    with pytest.raises(ArithmeticError, match="mine"), profile:
        model.fit(torch.ones(20, 2), torch.ones(20, 1), **how)
    path = tmp_path / "rank_0.json"
    assert steps(path) == 2
    assert labels(path).count("replica 0") >= 2


def fit_and_fail_on_one_rank(folder):
    strategy = ts.MirroredStrategy(["cpu:0"])
    rank, calls = strategy.workers.rank, []
    with strategy.scope():
        model = ts.Model(torch.nn.Linear(2, 1))

    def loss(outputs, targets):
        calls.append(None)
        fail_at(4 if rank == 1 else None, len(calls))
        return torch.nn.functional.mse_loss(outputs, targets, reduction="none")

    model.compile("sgd", loss)
    profile = ts.profiler.Profile(folder, strategy, skip=1, record=5)
    with profile:
        callbacks = [ts.callbacks.LambdaCallback(on_train_batch_end=lambda *_: profile.step())]
        model.fit(torch.ones(20, 2), torch.ones(20, 1), batch_size=2, verbose=0, callbacks=callbacks)


@pytest.mark.slow
def test_if_one_rank_fails_all_leave_their_traces(tmp_path):
    with ts.testing.ProcessPool(2) as pool:
        one, other = pool.outcomes(fit_and_fail_on_one_rank, tmp_path)
    assert isinstance(one.error, ts.errors.ReplicaFailedError)
    assert isinstance(other.error, ArithmeticError)
    for rank in (0, 1):
        path = tmp_path / f"rank_{rank}.json"
        assert steps(path) == 2
        assert f"replica {rank}" in labels(path)


def test_an_estimator_that_fails_leaves_its_trace(tmp_path):
    class Fail(ts.estimator.SessionRunHook):
        def after_run(self, run_context, run_values):
            fail_at(4, run_context.session.global_step)

    def input_fn():
        return ts.data.Dataset.from_tensors(({"feats": [1.0]}, [1.0])).repeat(100).batch(10)

    class Step(ts.estimator.SessionRunHook):
        def after_run(self, run_context, run_values):
            profile.step()

    columns = [ts.feature_column.numeric_column("feats")]
    regressor = ts.estimator.LinearRegressor(columns, model_dir=str(tmp_path / "model"))
    with pytest.raises(ArithmeticError, match="mine"), ts.profiler.Profile(tmp_path, skip=1, record=5) as profile:
        regressor.train(input_fn, hooks=[Step(), Fail()])
    assert steps(tmp_path / "rank_0.json") >= 2


def test_a_trace_is_what_perfetto_reads(tmp_path):
    """JSON with ``traceEvents``; slices are complete, and those of a thread lie within one another or apart."""
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])

    def step():
        x = torch.ones(8, requires_grad=True)
        ts.get_replica_context().all_reduce("SUM", (x * 2).sum()).backward()

    with ts.profiler.Profile(tmp_path, strategy, skip=1, record=3) as profile:
        for _ in profile.steps(range(4)):
            strategy.run(step)
    events = read(tmp_path / "rank_0.json")
    slices = [event for event in events if event["ph"] == "X"]
    assert {"ts::replica 0", "ts::replica 1", "aten::sum"} <= {event["name"] for event in slices}
    rows = {}
    for event in slices:
        assert isinstance(event["name"], str)
        assert event["name"]
        assert all(isinstance(event[key], (int, float)) and math.isfinite(event[key]) for key in ("ts", "dur"))
        if event.get("cat") in ("user_annotation", "cpu_op"):
            assert all(isinstance(event[key], int) for key in ("pid", "tid"))
            rows.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    rounding = 0.01  # times are microseconds with three digits
    for spans in rows.values():
        ends = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while ends and ends[-1] <= start + rounding:
                ends.pop()
            assert not ends or end <= ends[-1] + rounding
            ends.append(end)
    named = {(event["name"], event["args"]["name"]) for event in events if event["name"].endswith("_name")}
    assert ("process_name", "rank 0") in named
    assert {name for kind, name in named if kind == "thread_name"} & {"replica 0", "replica 1", "replica 0, replica 1"}


@pytest.mark.parametrize("wrong", [{"skip": 0}, {"record": -1}, {"record": "all"}, {"skip": True}])
def test_wrong_numbers_of_steps_are_refused(tmp_path, wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(
        ValueError, match=rf"Profile\({name}=\.\.\.\) must be an integer of at least .* Received: {value!r}"
    ):
        ts.profiler.Profile(tmp_path, **wrong)


@pytest.mark.parametrize("begin", [torch.profiler.profile, torch.autograd.profiler.profile])
def test_a_profile_does_not_end_another_one(tmp_path, begin):
    with begin() as outer:
        profile = ts.profiler.Profile(tmp_path, skip=1, record=2)
        with pytest.raises(RuntimeError, match=r"Another profiler of torch is recording.*Use one of them"), profile:
            pytest.fail("it began")
        torch.ones(2).neg()
    names = {event.key for event in outer.key_averages()}
    assert "aten::neg" in names
    assert not list(tmp_path.iterdir())


def test_two_profiles_of_the_same_steps(tmp_path):
    first, second = (ts.profiler.Profile(tmp_path, skip=1, record=2, name=name) for name in ("a", "b"))
    with pytest.raises(RuntimeError, match="Another profiler of torch is recording"), first, second:
        list(second.steps(first.steps(range(5))))
    assert not autograd_profiler._is_profiler_enabled
    with pytest.raises(TypeError, match=r"strategy must be a strategy or None\. Received: 'run'"):
        ts.profiler.Profile(tmp_path, "run")


def test_the_profiler_prints_nothing_and_the_environment_stays(tmp_path, capfd, monkeypatch):
    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
    with ts.profiler.Profile(tmp_path, skip=1, record=1) as profile:
        for _ in profile.steps(range(3)):
            torch.ones(2) + 1
            assert "KINETO_LOG_LEVEL" not in os.environ
    captured = capfd.readouterr()
    assert captured.out.startswith("Where the time of a step goes")
    assert captured.err == ""
