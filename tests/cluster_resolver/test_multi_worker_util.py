import contextlib

import pytest

import torchstrategy as ts
from torchstrategy.cluster_resolver import multi_worker_util as util

FULL = {"chief": ["c:1"], "worker": ["w:1", "w:2"], "ps": ["p:1", "p:2"], "evaluator": ["e:1"]}
NO_CHIEF = {"worker": ["w:1", "w:2"], "ps": ["p:1"]}


@pytest.mark.parametrize(
    ("cluster", "task_type", "task_id", "is_chief", "number", "count", "leader"),
    [
        (FULL, "chief", 0, True, 0, 3, "chief"),
        (FULL, "worker", 0, False, 1, 3, "chief"),
        (FULL, "worker", 1, False, 2, 3, "chief"),
        (FULL, "evaluator", 0, True, 0, 1, ""),
        (NO_CHIEF, "worker", 0, True, 0, 2, "worker"),
        (NO_CHIEF, "worker", 1, False, 1, 2, "worker"),
    ],
)
def test_tasks_that_train(cluster, task_type, task_id, is_chief, number, count, leader):
    spec = ts.cluster_resolver.ClusterSpec(cluster)
    assert util.is_chief(spec, task_type, task_id) is is_chief
    assert util.id_in_cluster(cluster, task_type, task_id) == number
    assert util.worker_count(spec, task_type) == count
    assert util.collective_leader(spec, task_type, task_id) == (f"/job:{leader}/replica:0/task:0" if leader else "")


@pytest.mark.parametrize(("task_type", "task_id"), [("ps", 0), (None, None)])
def test_tasks_without_a_number(task_type, task_id):
    assert util.is_chief(FULL, task_type, task_id) is False
    with pytest.raises(ValueError, match="has a number"):
        util.id_in_cluster(FULL, task_type, task_id)
    with pytest.raises(ValueError, match="Workers are counted"):
        util.worker_count(FULL, task_type)


def test_an_evaluator_that_is_not_in_the_cluster():
    assert util.is_chief(NO_CHIEF, "evaluator", 3) is True
    with pytest.raises(KeyError, match="evaluator"):
        util.worker_count(NO_CHIEF, "evaluator")


@pytest.mark.parametrize(
    ("cluster", "task_type", "task_id", "message"),
    [
        ({"boss": ["b:1"]}, None, None, r"Received also \['boss'\]"),
        (FULL, "boss", 0, "types of tasks are .* Received: 'boss'$"),
        ({"master": ["m:1"], **NO_CHIEF}, "worker", 0, r"\['master'\].* TensorFlow 1's 'master' is called 'chief'"),
        (NO_CHIEF, "master", 0, "Received: 'master'. TensorFlow 1's 'master' is called 'chief'"),
        (NO_CHIEF, "chief", 0, r"type is 'chief', but the cluster has the jobs \['worker', 'ps'\]"),
        ({"chief": ["a:1", "b:1"]}, "chief", 0, "at most one 'chief'. Received 2"),
        ({"evaluator": ["a:1", "b:1"]}, None, None, "at most one 'evaluator'. Received 2"),
        (FULL, "worker", 2, "index is 2, but the cluster has 2"),
        (FULL, "worker", None, "index is None"),
        (["w:1"], "worker", 0, "must be a dictionary or a ClusterSpec"),
    ],
)
def test_clusters_that_cannot_train(cluster, task_type, task_id, message):
    for function in (util.validate_cluster_spec, util.is_chief, util.id_in_cluster, util.collective_leader):
        with pytest.raises(ValueError, match=message):
            function(cluster, task_type, task_id)


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ({"worker": ["a:1", "b:1", "a:1"]}, "TF_CONFIG lists a:1 twice, for worker 0 and worker 2"),
        ({"chief": ["a:1"], "ps": ["a:1"]}, "TF_CONFIG lists a:1 twice, for chief 0 and ps 0"),
        ({"worker": ["a:1", "http://b:1"]}, "worker 1 in TF_CONFIG must be host:port: write 'b:1', without 'http://'"),
        ({"chief": ["a:1"], "worker": ["a:2", "b:1"], "evaluator": ["a:1"]}, None),
    ],
)
def test_addresses(cluster, message):
    with contextlib.nullcontext() if message is None else pytest.raises(ValueError, match=message):
        util.validate_addresses(util.normalize_cluster_spec(cluster), "TF_CONFIG")


def test_leaders():
    assert util.collective_leader({}, "worker", 5) == util.coordination_leader({}) == ""
    assert util.coordination_leader(FULL) == "/job:ps/replica:0/task:0"
    for leader in (util.coordination_leader, lambda spec: util.collective_leader(spec, "evaluator", 0)):
        assert leader({"evaluator": ["e:1"], "worker": ["w:1"]}) in ("", "/job:worker/replica:0/task:0")
    with pytest.raises(ValueError, match="needs a chief or a worker"):
        util.coordination_leader({"evaluator": ["e:1"]})


def test_task_count():
    assert [util.task_count(FULL, job) for job in ("worker", "ps", "boss", None)] == [2, 2, 0, 0]
    assert util.task_count({"worker": {0: "a:1", 4: "b:1"}}, "worker") == 2


def test_who_saves():
    assert not util.has_worker_context()
    for ask in (util.should_save_checkpoint, util.should_load_checkpoint):
        with pytest.raises(RuntimeError, match="No strategy is current"):
            ask()
    with ts.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        assert util.has_worker_context()
        assert util.should_save_checkpoint()
        assert util.should_load_checkpoint()
