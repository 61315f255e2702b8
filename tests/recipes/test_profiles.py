import json
import math
import subprocess
import sys

import profiles
import pytest
import torch
from omegaconf import OmegaConf
from torch.autograd import profiler as autograd_profiler

import torchstrategy as ts
from tests.recipes import layouts

QUICK = ["profile=true", "profile_steps={skip: 2, record: 3}"]


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    monkeypatch.setenv("KINETO_LOG_LEVEL", "6")


def config(skip=1, record=2, profile=True):
    return OmegaConf.create({"profile": profile, "profile_steps": {"skip": skip, "record": record}})


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
    profile = profiles.Profile(config(profile=False), tmp_path)
    batches = [1, 2]
    assert profile.steps(batches) is batches
    profile.step()
    profile.end_epoch()
    assert not list(tmp_path.iterdir())


def test_the_steps_that_are_asked_for_are_recorded(tmp_path, capsys):
    profile = profiles.Profile(config(skip=2, record=3), tmp_path)
    for number in profile.steps(range(8)):
        with torch.profiler.record_function(f"ts::replica {number}"):
            torch.ones(2) + 1
    path = tmp_path / "profile" / "rank_0.json"
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
    profile = profiles.Profile(config(skip=3, record=5), tmp_path)
    assert list(profile.steps(range(2))) == [0, 1]
    assert "Nothing was recorded" in capsys.readouterr().out
    for number in profile.steps(range(3)):
        with torch.profiler.record_function(f"ts::replica {number}"):
            pass
    assert labels(tmp_path / "profile" / "rank_0.json") == ["replica 1", "replica 2"]
    assert "(means of 2 steps)" in capsys.readouterr().out


@pytest.mark.parametrize(("failing", "expected"), [(1, 1), (2, 1), (3, 2)])
def test_a_loop_that_fails_leaves_its_trace(tmp_path, capsys, failing, expected):
    """The step with the error does not count, unless there is no other one."""
    with pytest.raises(ArithmeticError, match="mine"):
        train(profiles.Profile(config(record=5), tmp_path), failing)
    assert "ts::input" in [event["name"] for event in read(tmp_path / "profile" / "rank_0.json")]
    assert max(1, steps(tmp_path / "profile" / "rank_0.json")) == expected
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
    with profiles.Profile(config(record=5), tmp_path) as profile:
        for number in profile.steps(range(9)):
            if number == 2:
                break
    assert steps(tmp_path / "profile" / "rank_0.json") == 1
    assert not autograd_profiler._is_profiler_enabled


@pytest.mark.parametrize("failing", [0, 8])
def test_before_and_after_the_recording_a_failure_leaves_no_trace_of_itself(tmp_path, failing):
    with pytest.raises(ArithmeticError, match="mine"):
        train(profiles.Profile(config(skip=3), tmp_path), failing)
    path = tmp_path / "profile" / "rank_0.json"
    assert path.exists() == (failing == 8)
    assert failing == 0 or steps(path) == 2


def test_a_trace_that_cannot_be_saved_hides_no_error(tmp_path, capsys):
    (tmp_path / "profile").write_text("a file where the folder should be")
    with pytest.raises(ArithmeticError, match="mine"):
        train(profiles.Profile(config(record=5), tmp_path), failing=2)
    assert "What was recorded before the error can't be saved: " in capsys.readouterr().out
    with pytest.raises(FileExistsError):
        train(profiles.Profile(config(record=5), tmp_path), failing=None)
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
    profile = profiles.Profile(config(record=5), tmp_path, strategy)
    how = {"batch_size": 2, "verbose": 0, "callbacks": [profiles.ProfileCallback(profile)]}
    with pytest.raises(ArithmeticError, match="mine"), profile:
        model.fit(torch.ones(20, 2), torch.ones(20, 1), **how)
    path = tmp_path / "profile" / "rank_0.json"
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
    profile = profiles.Profile(config(record=5), folder, strategy)
    with profile:
        callbacks = [profiles.ProfileCallback(profile)]
        model.fit(torch.ones(20, 2), torch.ones(20, 1), batch_size=2, verbose=0, callbacks=callbacks)


@pytest.mark.slow
def test_if_one_rank_fails_all_leave_their_traces(tmp_path):
    with ts.testing.ProcessPool(2) as pool:
        one, other = pool.outcomes(fit_and_fail_on_one_rank, tmp_path)
    assert isinstance(one.error, ts.errors.ReplicaFailedError)
    assert isinstance(other.error, ArithmeticError)
    for rank in (0, 1):
        path = tmp_path / "profile" / f"rank_{rank}.json"
        assert steps(path) == 2
        assert f"replica {rank}" in labels(path)


def test_an_estimator_that_fails_leaves_its_trace(tmp_path):
    class Fail(ts.estimator.SessionRunHook):
        def after_run(self, run_context, run_values):
            fail_at(4, run_context.session.global_step)

    def input_fn():
        return ts.data.Dataset.from_tensors(({"feats": [1.0]}, [1.0])).repeat(100).batch(10)

    columns = [ts.feature_column.numeric_column("feats")]
    regressor = ts.estimator.LinearRegressor(columns, model_dir=str(tmp_path / "model"))
    with pytest.raises(ArithmeticError, match="mine"), profiles.Profile(config(record=5), tmp_path) as profile:
        regressor.train(input_fn, hooks=[profiles.ProfileHook(profile), Fail()])
    assert steps(tmp_path / "profile" / "rank_0.json") >= 2


def test_a_workers_function_that_fails_leaves_its_trace(tmp_path, monkeypatch):
    monkeypatch.setattr(ts.coordinator, "experimental_get_current_worker_index", lambda: 3)
    batches = iter(range(9))

    @profiles.WorkerProfile(config(record=5), tmp_path).recorded
    def train_step(failing):
        """What a worker does."""
        number = profiles.next_batch(batches)
        fail_at(failing, number)
        return number

    assert (train_step.__name__, train_step.__doc__) == ("train_step", "What a worker does.")
    assert [train_step(3) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ArithmeticError, match="mine"):
        train_step(3)
    path = tmp_path / "profile" / "worker_3.json"
    assert steps(path) == 3 - 1
    assert train_step(9) == 4, "the worker goes on"
    assert not autograd_profiler._is_profiler_enabled


def test_calls_are_recorded_beside_what_is_timed(tmp_path, capsys):
    calls = []
    folder = profiles.case_path(tmp_path, "ours, bf16", "2 hosts")
    profiles.record_calls(lambda: calls.append(torch.ones(2) + 1), {"skip": 2, "record": 3}, folder, name="rank 1")
    assert len(calls) == 5
    assert steps(tmp_path / "ours_bf16_2_hosts" / "profile" / "rank_1.json") == 3
    assert "(means of 3 steps)" in capsys.readouterr().out


def test_traces_of_processes_that_tell_nothing_are_told(tmp_path, capsys):
    for rank in (10, 9):
        profiles.record_calls(lambda: torch.ones(2) + 1, {"skip": 1, "record": 1}, tmp_path, name=f"rank {rank}")
    capsys.readouterr()
    profiles.tell_of_traces(tmp_path, "rank_*")
    out = capsys.readouterr().out
    assert "rank 9     rank 10\n" in out
    assert f"Traces, for https://ui.perfetto.dev: {tmp_path / 'profile'}\n" in out
    profiles.tell_of_traces(tmp_path, "worker_*")
    assert "No steps of worker_* were recorded" in capsys.readouterr().out


def test_a_trace_is_what_perfetto_reads(tmp_path):
    """JSON with ``traceEvents``; slices are complete, and those of a thread lie within one another or apart."""
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])

    def step():
        x = torch.ones(8, requires_grad=True)
        ts.get_replica_context().all_reduce("SUM", (x * 2).sum()).backward()

    profiles.record_calls(lambda: strategy.run(step), {"skip": 1, "record": 3}, tmp_path, strategy)
    events = read(tmp_path / "profile" / "rank_0.json")
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


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_each_process_writes_a_trace_and_the_chief_tells_of_all(tmp_path):
    options = ["model=mlp", "epochs=1", "max_steps=7", "batch_size_per_replica=32", layouts.TWO_LOCAL, *QUICK]
    out = layouts.run_all(layouts.launcher("custom_loop.py", *options, nproc=2), tmp_path)
    assert out.count("Where the time of a step goes") == 1
    assert "rank 0      rank 1\n" in out
    assert "rank 1: computing: replica 2 " in out
    (folder,) = tmp_path.glob("outputs/custom_loop/*/profile")
    assert {path.name for path in folder.iterdir()} == {"rank_0.json", "rank_1.json"}
    for rank in (0, 1):
        path = folder / f"rank_{rank}.json"
        names = labels(path)
        own = [f"replica {2 * rank}", f"replica {2 * rank + 1}"]
        assert [names.count(name) for name in own] == [3, 3]
        assert steps(path) == 3
        assert f"wait for rank {1 - rank}" in names
        assert any(name.startswith("move the sum of gradients") and "bytes by" in name for name in names)
        rows = [event["args"]["name"] for event in read(path) if event["name"].endswith("_name")]
        assert {f"rank {rank}", *own} <= set(rows)
    again = [sys.executable, str(layouts.RECIPES / "traces.py"), *map(str, sorted(folder.iterdir()))]
    table = subprocess.run(again, capture_output=True, text=True, check=True, timeout=60).stdout
    assert table.strip() in out


@pytest.mark.slow
def test_the_guide_has_a_profile_of_each_model(tmp_path):
    out = layouts.run_all(layouts.alone("fit.py", "guide=true", "hydra.run.dir=run", *QUICK), tmp_path)
    for number in (1, 2, 4):
        for year, num_steps in (("2021", 3), ("2024", 1)):  # an execution of the latter has ten steps
            path = tmp_path / "run" / f"{year}_{number}_replicas" / "profile" / "rank_0.json"
            assert steps(path) == num_steps
            assert "replica 0" in labels(path)
    assert out.count("Where the time of a step goes") == 6


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("recipe", "options", "files"),
    [
        ("fit", ["model=mlp", "epochs=1", "launcher.nproc=2"], ["profile/rank_0.json", "profile/rank_1.json"]),
        ("gan", ["epochs=1", "max_steps=7", "width=8", "save_every=1"], ["profile/rank_0.json"]),
        ("fault_tolerant", ["epochs=1"], ["profile/rank_0.json"]),
        ("sharded_files", ["stop_at_step=7"], ["profile/rank_0.json"]),
        ("fit", ["model=mlp", "epochs=1", "compare=[default]"], ["default/profile/rank_0.json"]),
        ("estimator", ["max_steps=7", "save_every=7"], ["profile/rank_0.json"]),
        ("estimator", ["linear=true"], ["profile/rank_0.json"]),
        (
            "estimator",
            ["cluster.ps=1", "cluster.workers=1", "max_steps=60", "save_every=60"],
            ["tasks/chief_0/profile/chief_0.json", "tasks/worker_0/profile/worker_0.json"],
        ),
        (
            "parameter_server",
            ["model=mlp", "cluster.ps=1", "epochs=1", "steps_per_epoch=40"],
            ["profile/coordinator.json", "profile/worker_0.json", "profile/worker_1.json"],
        ),
    ],
)
def test_every_recipe_has_a_profile(tmp_path, recipe, options, files):
    folder = tmp_path / "run"
    where = f"hydra.run.dir={folder}" if recipe in ("fit", "gan") else f"folder={folder}"
    out = layouts.run_all(layouts.alone(f"{recipe}.py", *options, where, *QUICK), tmp_path)
    found = {str(path.relative_to(folder)) for path in folder.rglob("profile/*.json")}
    assert found == set(files)
    assert "Where the time of a step goes" in out
    for file in files:
        assert steps(folder / file) == 3
        kinds = {name.partition(" ")[0] for name in labels(folder / file)}
        assert kinds & {"replica", "function"} or file == "profile/coordinator.json"
