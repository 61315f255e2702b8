import json

import pytest

import torchstrategy as ts

TFConfig = ts.cluster_resolver.TFConfigClusterResolver


def config(cluster=None, task_type="worker", index=0, **more):
    cluster = cluster or {"worker": ["h1:1", "h2:1"]}
    return json.dumps({"cluster": cluster, "task": {"type": task_type, "index": index}, **more})


def test_each_question_reads_the_variable_again(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    resolver = TFConfig()
    assert (resolver.task_type, resolver.task_id, resolver.master(), resolver.cluster_spec().jobs) == (
        None,
        None,
        "",
        [],
    )
    monkeypatch.setenv("TF_CONFIG", config(index=1))
    assert (resolver.task_type, resolver.task_id, resolver.master()) == ("worker", 1, "h2:1")
    monkeypatch.setenv("TF_CONFIG", config({"chief": ["c:1"], "worker": ["h1:1"]}, "chief", rpc_layer="grpc"))
    assert (resolver.task_type, resolver.task_id, resolver.master()) == ("chief", 0, "grpc://c:1")


def test_what_is_assigned_wins():
    resolver = TFConfig(environ={"TF_CONFIG": config(rpc_layer="grpc+x")})
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "worker", "1", ""
    assert (resolver.task_id, resolver.master(), resolver.rpc_layer) == (1, "h2:1", "")
    resolver.task_id = resolver.rpc_layer = None
    assert resolver.master() == "grpc+x://h1:1"


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("", json.JSONDecodeError, "TF_CONFIG is not JSON.*Unset it"),
        ("{'cluster': {}}", json.JSONDecodeError, "TF_CONFIG is not JSON.*Write for example.*Received"),
        ("null", TypeError, "must be a JSON object"),
        ("3", TypeError, "must be a JSON object"),
        ('{"cluster": ["h1:1"]}', TypeError, "A cluster must be a dictionary"),
        ('{"cluster": null}', TypeError, "A cluster must be a dictionary"),
    ],
)
def test_what_is_wrong_is_said_when_it_is_read(text, error, message):
    resolver = TFConfig(environment="cloud", environ={"TF_CONFIG": text})
    assert resolver.environment == "cloud"
    with pytest.raises(error, match=message):
        resolver.cluster_spec()


@pytest.mark.parametrize(
    ("task", "error", "message"),
    [
        (None, TypeError, "task must be an object"),
        ("worker", TypeError, "task must be an object"),
        ({"index": "x"}, ValueError, "task.index must be an integer. Received: 'x'"),
        ({"index": None}, TypeError, "task.index must be an integer. Received: None"),
    ],
)
def test_bad_tasks(task, error, message):
    with pytest.raises(error, match=message):
        _ = TFConfig(environ={"TF_CONFIG": json.dumps({"task": task})}).task_id


def test_num_accelerators_are_what_torch_sees(monkeypatch):
    resolver = TFConfig(environ={"TF_CONFIG": config(index=2)})
    with pytest.raises(ValueError, match="No task with index 2"):
        resolver.num_accelerators()
    monkeypatch.setattr(
        "torchstrategy.cluster_resolver.resolver.visible_devices", lambda: ["cuda:0", "cuda:1", "cpu:0"]
    )
    assert resolver.num_accelerators("worker", 1) == {"GPU": 2}
    monkeypatch.setattr("torchstrategy.cluster_resolver.resolver.visible_devices", lambda: ["cpu:0"])
    assert resolver.num_accelerators("worker", 1) == {}
