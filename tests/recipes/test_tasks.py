"""Tasks of a cluster as processes of this host; instead of a recipe they run a few lines."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tasks

RECIPE = """
import json, os, sys, time
from pathlib import Path
config = json.loads(os.environ["TF_CONFIG"])
task = config["task"]
name = f"{task['type']}_{task['index']}"
attempt = int(os.environ["RECIPE_ATTEMPT"])
record = {"cluster": config["cluster"], "options": sys.argv[1:], "pid": os.getpid()}
Path(f"{name}-{attempt}.json").write_text(json.dumps(record))
print(f"I am {name}")
if task["type"] == "ps" or "wait" in sys.argv:
    time.sleep(1000)
if f"fail={name}" in sys.argv and attempt < 2:
    sys.exit(3)
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "recipe.py"
    path.write_text(RECIPE)
    return path


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def records(folder):
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*-*.json")}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").exists(), reason="finds processes as Linux tells them")
def test_every_task_runs_the_recipe(recipe, tmp_path, capfd):
    numbers = {"ps": 1, "chief": 1, "worker": 2, "evaluator": 1}
    tasks.LocalTasks(recipe, ["a=1"], numbers, tmp_path / "tasks", max_restarts=0).run()
    found = records(tmp_path)
    assert set(found) == {"ps_0-0", "chief_0-0", "worker_0-0", "worker_1-0", "evaluator_0-0"}
    (cluster,) = {json.dumps(record["cluster"]) for record in found.values()}
    assert {job: len(addresses) for job, addresses in json.loads(cluster).items()} == {"ps": 1, "chief": 1, "worker": 2}
    assert found["worker_1-0"]["options"] == ["a=1", f"hydra.run.dir={tmp_path / 'tasks' / 'worker_1'}"]
    assert not any(is_running(record["pid"]) for record in found.values()), "the parameter server ends with the others"
    assert (tmp_path / "tasks" / "worker_1" / "output.log").read_text() == "I am worker_1\n"
    assert "[evaluator 0] I am evaluator_0\n" in capfd.readouterr().out


@pytest.mark.slow
def test_a_task_that_fails_is_started_again(recipe, tmp_path, capfd):
    tasks.LocalTasks(recipe, ["fail=worker_0"], {"worker": 2}, tmp_path / "tasks", max_restarts=2).run()
    assert set(records(tmp_path)) == {"worker_0-0", "worker_0-1", "worker_0-2", "worker_1-0"}
    assert capfd.readouterr().out.count("worker 0 ended with exit status 3; starting it again") == 2


@pytest.mark.slow
def test_a_task_that_fails_too_often_ends_all(recipe, tmp_path):
    numbers = {"worker": 1, "evaluator": 1}
    with pytest.raises(RuntimeError, match=r"worker 0 ended with exit status 3\. What it printed: .*worker_0"):
        tasks.LocalTasks(recipe, ["fail=worker_0"], numbers, tmp_path / "tasks", max_restarts=1).run()
    assert {"worker_0-0", "worker_0-1"} <= set(records(tmp_path))
    assert "worker_0-2" not in records(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").exists(), reason="finds processes as Linux tells them")
def test_tasks_end_with_their_starter(recipe, tmp_path):
    program = (
        f"import sys; sys.path.insert(0, {str(Path(tasks.__file__).parent)!r}); import tasks, pathlib; "
        f"tasks.LocalTasks(pathlib.Path({str(recipe)!r}), ['wait'], {{'worker': 2}}, pathlib.Path('tasks'), 0).run()"
    )
    starter = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path)
    try:
        wait_for(lambda: len(records(tmp_path)) == 2)
    finally:
        starter.kill()
        starter.wait()
    pids = [record["pid"] for record in records(tmp_path).values()]
    wait_for(lambda: not any(map(is_running, pids)))


def wait_for(condition, timeout_s=60.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)
