import json
import subprocess
import sys

import profiles
import pytest
import torch
from omegaconf import OmegaConf
from torch.autograd import profiler as autograd_profiler

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


def test_a_training_that_fails_leaves_its_trace(tmp_path):
    profile = profiles.Profile(config(), tmp_path)

    def train():
        for number in profile.steps(range(9)):
            if number == 2:
                raise ArithmeticError("mine")

    with pytest.raises(ArithmeticError, match="mine"):
        train()
    assert steps(tmp_path / "profile" / "rank_0.json") == 1
    assert not autograd_profiler._is_profiler_enabled


@pytest.mark.parametrize(
    ("options", "match"),
    [({"profile": "yes"}, "profile must be"), ({"skip": 0}, "profile_steps.skip"), ({"record": 1.5}, "record")],
)
def test_wrong_options(tmp_path, options, match):
    with pytest.raises(ValueError, match=match):
        profiles.Profile(config(**options), tmp_path)


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
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("recipe", "options", "files"),
    [
        ("fit", ["model=mlp", "epochs=1", "launcher.nproc=2"], ["profile/rank_0.json", "profile/rank_1.json"]),
        ("gan", ["epochs=1", "max_steps=7", "width=8", "save_every=1"], ["profile/rank_0.json"]),
        ("fault_tolerant", ["epochs=1"], ["profile/rank_0.json"]),
        ("sharded_files", ["stop_at_step=7"], ["profile/rank_0.json"]),
        ("estimator", ["max_steps=7", "save_every=7"], ["profile/rank_0.json"]),
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
    ids=["fit", "gan", "fault_tolerant", "sharded_files", "estimator", "estimator with ps", "parameter_server"],
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
