from types import SimpleNamespace

import pytest

from torchstrategy.cluster_resolver import ClusterSpec
from torchstrategy.errors import InternalError, NotFoundError
from torchstrategy.ps.server.definition import ServerDef, make_server_def

TWO = {"ps": ["a:1"], "worker": ["b:1", "c:1"]}


def made(cluster, job_name=None, task_index=None, protocol=None, config=None):
    definition = make_server_def(cluster, job_name, task_index, protocol, config)
    return definition.job_name, definition.task_index, definition.address


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (({"worker": ["a:1"]},), ("worker", 0, "a:1")),
        (({"worker": {3: "a:1"}},), ("worker", 3, "a:1")),
        ((ClusterSpec({"local": ["a:1"]}),), ("local", 0, "a:1")),
        ((TWO, "ps"), ("ps", 0, "a:1")),
        ((TWO, "worker", 1), ("worker", 1, "c:1")),
        ((ServerDef(ClusterSpec(TWO), "worker", 1),), ("worker", 1, "c:1")),
        ((ServerDef(ClusterSpec(TWO), "worker", 1), None, 0), ("worker", 0, "b:1")),
        ((ServerDef(ClusterSpec(TWO), "worker", 0), "ps"), ("ps", 0, "a:1")),
    ],
)
def test_what_is_not_said_is_found_out(arguments, expected):
    assert made(*arguments) == expected


def test_messages_of_tensorflow_are_understood():
    jobs = [SimpleNamespace(name="ps", tasks={0: "a:1"}), SimpleNamespace(name="worker", tasks={0: "b:1", 1: "c:1"})]
    cluster = SimpleNamespace(job=jobs)
    assert made(cluster, "worker", 1) == ("worker", 1, "c:1")
    assert made(SimpleNamespace(cluster=cluster, job_name="ps", task_index=0, protocol="grpc")) == ("ps", 0, "a:1")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((TWO,), ValueError, r"explicit job_name: one of \['ps', 'worker'\]"),
        ((TWO, None, 0), ValueError, "explicit job_name"),
        ((TWO, "worker"), ValueError, r"explicit task_index: job 'worker' has the tasks \[0, 1\]"),
        (({},), ValueError, "explicit job_name"),
        ((TWO, "chief"), ValueError, "No such job"),
        ((TWO, "chief", 0), InternalError, "'chief' was not defined in the cluster"),
        ((TWO, "worker", 2), InternalError, r"Task 2 was not defined in job 'worker'\. Its tasks are \[0, 1\]"),
        ((TWO, "worker", -1), InternalError, "Task -1"),
        ((TWO, "ps", 0, "carrier pigeon"), NotFoundError, "'carrier pigeon'"),
        ((TWO, "ps", 0, 3), TypeError, "protocol must be a string"),
        ((TWO, "ps", "0"), TypeError, "task_index must be an integer"),
        ((TWO, "ps", 0.0), TypeError, "task_index must be an integer"),
        ((TWO, 3, 0), TypeError, "job_name must be a string"),
        ((None,), TypeError, "server_or_cluster_def must be"),
        ((["a:1"],), TypeError, "server_or_cluster_def must be"),
        (({"worker": "a:1"},), TypeError, "tasks for job 'worker'"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        made(*arguments)


@pytest.mark.parametrize("protocol", [None, "zmq", "grpc"])
def test_there_is_one_protocol(protocol):
    assert make_server_def(TWO, "ps", 0, protocol, None).protocol == "zmq"
