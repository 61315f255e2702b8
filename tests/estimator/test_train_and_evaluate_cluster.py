"""``train_and_evaluate`` with a process for each task."""

import os

import pytest

import torchstrategy as ts
from tests.estimator.cluster_tasks import Tasks
from torchstrategy.estimator.eval_metrics import read_eval_metrics

TASKS = ("chief0", "worker0", "evaluator0")


def evaluated_steps(tasks):
    return read_eval_metrics(tasks.model_dir / "eval")


@pytest.mark.end_to_end
def test_chief_worker_and_evaluator(tmp_path):
    with Tasks(tmp_path, ["chief", "worker"], strategy="multi_worker", exports=True) as tasks:
        tasks.start(*TASKS)
        chief, worker, evaluator = tasks.results(*TASKS)
        assert [chief["result"], worker["result"], evaluator["result"]] == [None, None, None]
        assert chief["input_contexts"] == [["train", 2, 0]]
        assert worker["input_contexts"] == [["train", 2, 1]]
        assert {tuple(call) for call in evaluator["input_contexts"]} == {("eval", None, None)}
        # measured with tf.estimator 2.15; the data is not sharded
        assert chief["variables"] == pytest.approx(
            {"w": 1.9517569541931152, "b": 0.45590710639953613, "global_step": 4}
        )
        assert worker["variables"] == chief["variables"]
        assert tasks.steps("chief0") == tasks.steps("worker0")
        assert [step for step, _ in tasks.steps("chief0")] == [0, 1, 2, 3]
        assert list(evaluated_steps(tasks))[-1] == 4
        assert evaluated_steps(tasks)[4]["loss"] == pytest.approx(0.3829292, rel=1e-5)
        (export,) = os.listdir(tasks.model_dir / "export" / "final")
        assert ts.estimator.export.load(tasks.model_dir / "export" / "final" / export).signatures
        assert tasks.log("chief0").count("The cluster names no evaluator") == 1


@pytest.mark.slow
def test_workers_without_a_chief_with_sharded_data(tmp_path):
    with Tasks(tmp_path, ["worker", "worker"], strategy="multi_worker", shard=True) as tasks:
        tasks.start("worker0", "worker1")
        first, second = tasks.results("worker0", "worker1")
        assert (first["input_contexts"], second["input_contexts"]) == ([["train", 2, 0]], [["train", 2, 1]])
        losses = [loss for _, loss in tasks.steps("worker1")]
        # measured with tf.estimator 2.15
        assert losses == pytest.approx([21.0, 124.85633850097656, 2.861142635345459, 12.575368881225586], rel=1e-5)
        assert not (tasks.model_dir / "eval").exists()


@pytest.mark.parametrize(
    "strategy", [*(pytest.param(n, marks=pytest.mark.slow) for n in ("mirrored", "central_storage")), None]
)
def test_an_evaluator_that_is_in_the_cluster_follows_a_chief_alone(tmp_path, strategy):
    with Tasks(tmp_path, ["chief", "evaluator"], strategy=strategy, max_steps=6) as tasks:
        tasks.start("chief0", "evaluator0")
        chief, evaluator = tasks.results("chief0", "evaluator0")
        assert chief["result"] is evaluator["result"] is None
        assert chief["variables"]["global_step"] == 6
        assert list(evaluated_steps(tasks))[-1] == 6
        assert "no evaluator" not in tasks.log("chief0")


@pytest.mark.slow
def test_the_evaluator_ends_when_the_data_has_ended_the_training(tmp_path):
    # this evaluator is in the cluster, and makes the strategy too, as the program does in every task
    jobs = ["chief", "worker", "evaluator"]
    with Tasks(tmp_path, jobs, strategy="multi_worker", max_steps=None, repeat=False) as tasks:
        tasks.start(*TASKS)
        chief, _, _ = tasks.results(*TASKS)
        assert chief["variables"]["global_step"] == 4
        assert list(evaluated_steps(tasks))[-1] == 4
        assert "training has ended" in tasks.log("evaluator0")


@pytest.mark.slow
def test_two_devices_in_each_of_two_processes(tmp_path):
    settings = {"strategy": "multi_worker", "devices": ["cpu:0", "cpu:1"], "shard": True, "max_steps": 3}
    with Tasks(tmp_path, ["chief", "worker"], **settings) as tasks:
        tasks.start("chief0", "worker0")
        chief, worker = tasks.results("chief0", "worker0")
        assert chief["variables"] == worker["variables"]
        # even numbers on the chief's replicas, odd ones on the worker's: the first losses are 13, 125, 29 and 173
        assert tasks.steps("worker0")[0] == [0, pytest.approx((13 + 125 + 29 + 173) / 4)]
