import pytest

import torchstrategy as ts

ClusterSpec = ts.cluster_resolver.ClusterSpec
TWO_JOBS = {"worker": ["a:1", "b:2"], "ps": ["c:3"]}


def test_dense_jobs():
    spec = ClusterSpec(TWO_JOBS)
    assert spec.jobs == ["worker", "ps"]
    assert spec.num_tasks("worker") == 2
    assert spec.task_indices("worker") == [0, 1]
    assert spec.job_tasks("worker") == ["a:1", "b:2"]
    assert spec.as_dict() == TWO_JOBS
    assert spec
    assert repr(spec) == "ClusterSpec({'ps': ['c:3'], 'worker': ['a:1', 'b:2']})"


def test_sparse_jobs():
    spec = ClusterSpec({"worker": {"3": "b:2", 1: "a:1"}})
    assert spec.num_tasks("worker") == 2
    assert spec.task_indices("worker") == [1, 3]
    assert spec.job_tasks("worker") == [None, "a:1", None, "b:2"]
    assert spec.as_dict() == {"worker": {1: "a:1", 3: "b:2"}}
    with pytest.raises(ValueError, match=r"No task with index 2 in job 'worker'. Its tasks are \[1, 3\]"):
        spec.task_address("worker", 2)


def test_empty_job():
    spec = ClusterSpec({"worker": []})
    assert spec
    assert spec.as_dict() == {"worker": {}}
    with pytest.raises(ValueError, match="'worker' has no tasks"):
        spec.job_tasks("worker")


@pytest.mark.parametrize("method", ["num_tasks", "task_indices", "job_tasks"])
def test_unknown_job(method):
    with pytest.raises(ValueError, match="No such job in cluster: 'chief'"):
        getattr(ClusterSpec(TWO_JOBS), method)("chief")


@pytest.mark.parametrize(
    ("cluster", "error", "message"),
    [
        ("worker", TypeError, "must be a dictionary"),
        (None, TypeError, "must be a dictionary"),
        (["a:1"], TypeError, "must be a dictionary"),
        ({"worker": "a:1"}, TypeError, "tasks for job 'worker' must be a list"),
        ({"worker": 3}, TypeError, "tasks for job 'worker' must be a list"),
        ({"worker": [None]}, TypeError, "address of task 0 of job 'worker' must be a string"),
        ({"worker": {0: 5}}, TypeError, "must be a string"),
        ({7: ["a:1"]}, TypeError, "name must be a string"),
        ({"worker": {"x": "a:1"}}, ValueError, "index of a task of job 'worker' must be an integer"),
    ],
)
def test_bad_clusters(cluster, error, message):
    with pytest.raises(error, match=message):
        ClusterSpec(cluster)


def test_copies_are_independent():
    tasks = {"worker": {0: "a:1"}}
    spec = ClusterSpec(tasks)
    copy = ClusterSpec(spec)
    tasks["worker"][1] = "b:1"
    spec.as_dict()["worker"].append("c:1")
    assert spec.as_dict() == copy.as_dict() == {"worker": ["a:1"]}
    assert spec == copy
    assert spec != ClusterSpec(TWO_JOBS)
    assert (spec == "worker") is False
