"""Tasks of an Estimator's cluster that are killed: what is started again goes on from the last checkpoint."""

import pytest

from tests.estimator.cluster_tasks import Tasks
from torchstrategy.checkpoint.reader import latest_checkpoint
from torchstrategy.estimator.eval_metrics import read_eval_metrics

MAX_STEPS = 40
SAVE_STEPS = 5
SETTINGS = {
    "strategy": "multi_worker",
    "shard": True,
    "shuffle": True,
    "examples": 64,
    "momentum": 0.5,
    "save_steps": SAVE_STEPS,
    "max_steps": MAX_STEPS,
}
JOBS = ["chief", "worker"]
TASKS = ("chief0", "worker0", "evaluator0")


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Steps and variables of a training in which nothing is killed."""
    with Tasks(tmp_path_factory.mktemp("unbroken"), JOBS, **SETTINGS) as tasks:
        tasks.start("chief0", "worker0")
        chief, _ = tasks.results("chief0", "worker0")
        return tasks.steps("chief0"), chief["variables"]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("killed", ["chief0", pytest.param("worker0", marks=pytest.mark.slow)])
def test_a_killed_task_and_a_new_start(tmp_path, unbroken, killed):
    steps, variables = unbroken
    with Tasks(tmp_path, JOBS, **SETTINGS, keeps_position=True, step_s=0.05) as tasks:
        tasks.start(*TASKS)
        tasks.wait_for_step("worker0", 2 * SAVE_STEPS + 2)
        tasks.kill(killed)
        other = "worker0" if killed == "chief0" else "chief0"
        assert tasks.wait(other) != [0]
        assert "has died" in tasks.log(other) or "does not answer" in tasks.log(other)
        assert tasks.processes["evaluator0"].poll() is None  # it waits for further checkpoints
        saved = int(latest_checkpoint(tasks.model_dir).rpartition("-")[2])
        before = tasks.steps("chief0")
        assert before == steps[: len(before)]
        tasks.start("chief0", "worker0")
        results = tasks.results(*TASKS)
        after = tasks.steps("chief0")[len(before) :]
    # it goes on from the last checkpoint, with the data that follows; nothing is trained twice in what is kept
    assert before[-1][0] - saved <= SAVE_STEPS
    assert after == steps[saved:]
    assert [result["variables"] for result in results] == [variables] * 3
    assert list(read_eval_metrics(tasks.model_dir / "eval"))[-1] == MAX_STEPS


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_without_the_position_the_data_starts_anew(tmp_path, unbroken):
    steps, variables = unbroken
    with Tasks(tmp_path, JOBS, **SETTINGS, step_s=0.05) as tasks:
        tasks.start("chief0", "worker0")
        tasks.wait_for_step("worker0", SAVE_STEPS + 1)
        tasks.kill("worker0")
        tasks.wait("chief0")
        saved = int(latest_checkpoint(tasks.model_dir).rpartition("-")[2])
        before = len(tasks.steps("chief0"))
        tasks.start("chief0", "worker0")
        chief, worker = tasks.results("chief0", "worker0")
        after = tasks.steps("chief0")[before:]
    assert [step for step, _ in after] == list(range(saved, MAX_STEPS))
    assert after != steps[saved:]
    assert chief["variables"] == worker["variables"] != variables


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_evaluator_disturbs_nobody_and_catches_up(tmp_path, unbroken):
    steps, variables = unbroken
    with Tasks(tmp_path, JOBS, **SETTINGS, step_s=0.05) as tasks:
        tasks.start(*TASKS)
        tasks.wait_until(lambda: (tasks.model_dir / "eval").exists(), "an evaluation")
        tasks.kill("evaluator0")
        chief, _ = tasks.results("chief0", "worker0")
        assert tasks.steps("chief0") == steps
        assert chief["variables"] == variables
        tasks.start("evaluator0")
        tasks.results("evaluator0")
    assert list(read_eval_metrics(tasks.model_dir / "eval"))[-1] == MAX_STEPS
