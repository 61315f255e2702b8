"""``train_and_evaluate`` with parameter servers and no coordinator: every task is a process of this host."""

import re

import numpy as np
import pytest

from tests.estimator.cluster_tasks import Tasks
from torchstrategy.estimator.warm_start import load_variables

JOBS = ("chief", "worker", "worker", "ps", "ps")
ALL = ("ps0", "ps1", "chief0", "worker0", "worker1", "evaluator0")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def saved(tasks, step):
    return load_variables(str(tasks.model_dir / f"model.ckpt-{step}"))


def last_step(tasks):
    return max(int(path.name.rpartition("-")[2].split(".")[0]) for path in tasks.model_dir.glob("model.ckpt-*"))


@pytest.mark.parametrize("strategy", [None, "parameter_server"])
def test_chief_and_workers_train_one_model(tmp_path, strategy):
    settings = {"strategy": strategy, "evaluates_alike": strategy is not None, "momentum": 0.5}
    with Tasks(tmp_path, JOBS, max_steps=60, save_steps=20, step_s=0.02, **settings) as tasks:
        tasks.start(*ALL)
        results = dict(zip(ALL[2:], tasks.results(*ALL[2:]), strict=True))
        assert tasks.wait("ps0", "ps1") == [0, 0]
        assert all(result["result"] is None for result in results.values())
        end = last_step(tasks)
        assert 60 <= end <= 62  # each of the others may finish the step that it has begun
        assert end <= results["chief0"]["variables"]["global_step"] <= 62  # the others go on while it saves
        numbers = {name: len(tasks.steps(name)) for name in ("chief0", "worker0", "worker1")}
        assert sum(numbers.values()) in (60, 61, 62)
        assert all(numbers.values())
        assert abs(results["chief0"]["variables"]["w"] - 2) < 1.0
        assert "optimizer/w/momentum_buffer" in saved(tasks, end)
        events = list((tasks.model_dir / "eval").glob("events*"))
        assert events
        pipelines = {name: results[name]["input_contexts"][0] for name in ("chief0", "worker0", "worker1")}
        if strategy:
            assert pipelines == {"chief0": ["train", 3, 0], "worker0": ["train", 3, 1], "worker1": ["train", 3, 2]}


def test_a_worker_may_go_and_come_back(tmp_path):
    with Tasks(tmp_path, JOBS, strategy="parameter_server", max_steps=150, save_steps=50, step_s=0.05) as tasks:
        tasks.start("ps0", "ps1", "chief0", "worker0", "worker1")
        tasks.wait_for_step("chief0", 1)
        tasks.wait_for_step("worker1", 5)
        tasks.kill("worker1")
        made = len(tasks.steps("worker1"))
        first = tasks.steps("chief0")[-1][0]
        tasks.wait_for_step("chief0", first + 5)  # the others go on
        tasks.start("worker1")
        tasks.results("chief0", "worker0", "worker1")
        assert len(tasks.steps("worker1")) > made
        assert tasks.wait("ps0", "ps1") == [0, 0]
        assert last_step(tasks) >= 150


def test_a_chief_that_was_killed_goes_on_from_its_checkpoint(tmp_path):
    with Tasks(tmp_path, JOBS, strategy="parameter_server", max_steps=500, save_steps=10, step_s=0.05) as tasks:
        # So many steps that the workers are not done before the chief has started again.
        tasks.start("ps0", "ps1", "chief0", "worker0", "worker1")
        tasks.wait_for_step("chief0", 25)
        tasks.kill("chief0")
        made = len(tasks.steps("worker0"))
        at_death = last_step(tasks)
        tasks.wait_until(lambda: len(tasks.steps("worker0")) > made + 2, "a step without the chief")
        tasks.start("chief0")
        tasks.results("chief0", "worker0", "worker1")
        assert f"Restoring parameters from {tasks.model_dir}/model.ckpt-{at_death}" in tasks.log("chief0")
        assert "has begun anew" in tasks.log("worker0")
        assert 500 <= last_step(tasks) <= 502
        assert tasks.wait("ps0", "ps1") == [0, 0]


def test_a_killed_parameter_server_is_named_and_all_tasks_can_start_again(tmp_path):
    with Tasks(tmp_path, JOBS, strategy="parameter_server", max_steps=60, save_steps=10, step_s=0.05) as tasks:
        training = ("chief0", "worker0", "worker1")
        tasks.start("ps0", "ps1", *training)
        tasks.wait_for_step("chief0", 15)
        tasks.kill("ps1")
        assert tasks.wait(*training) == [1, 1, 1]
        for name in training:
            # What notices it first words it: one of the connections to the server, or the attempt at another one.
            assert re.search(r"UnavailableError: .*/job:ps/task:1 at ", tasks.log(name))
            assert "Start all tasks of the cluster again" in tasks.log(name)
        before = last_step(tasks)
        tasks.kill("ps0")
        tasks.start("ps0", "ps1", *training)
        tasks.results(*training)
        assert f"model.ckpt-{before}" in tasks.log("chief0")
        assert 60 <= last_step(tasks) <= 62


def test_all_tasks_end_at_once_where_nothing_is_left_to_train(tmp_path):
    with Tasks(tmp_path, JOBS, strategy="parameter_server", max_steps=5, save_steps=5) as tasks:
        for _ in range(2):
            tasks.start(*ALL)
            assert tasks.wait(*ALL) == [0] * len(ALL)  # also those that came when the chief had ended
        assert "Skipping training since max_steps has already saved." in tasks.log("chief0")


def test_one_training_task_steps_as_a_single_process(tmp_path):
    """With the chief alone nothing is asynchronous, so that the numbers are those of training without a cluster."""
    folders = [tmp_path / name for name in ("cluster", "local")]
    ends = []
    for folder, jobs, names in (
        (folders[0], ("chief", "ps", "ps"), ("ps0", "ps1", "chief0")),
        (folders[1], (), ("worker0",)),
    ):
        folder.mkdir()
        with Tasks(folder, jobs, max_steps=5, momentum=0.9) as tasks:
            tasks.start(*names)
            tasks.results(names[-1])
            ends.append(saved(tasks, 5))
    for name, value in ends[1].items():
        assert np.allclose(ends[0][name], value, atol=1e-6), name
