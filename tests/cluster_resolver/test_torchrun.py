import pytest

import torchstrategy as ts
from torchstrategy.cluster_resolver.torchrun import TorchrunEnvironment

FULL = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def test_reads_everything():
    found = TorchrunEnvironment.detect({**FULL, "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert found == TorchrunEnvironment(3, 4, 1, 2, "127.0.0.1", 29500, agent_store=True)


@pytest.mark.parametrize("environ", [{}, {"WORLD_SIZE": "1"}, {"WORLD_SIZE": ""}, {"RANK": "0"}])
def test_one_process(environ):
    assert TorchrunEnvironment.detect(environ) is None


@pytest.mark.parametrize("name", FULL)
def test_missing_and_bad_variables(name):
    if name != "WORLD_SIZE":
        with pytest.raises(RuntimeError, match=f"{name} not set.*torchrun"):
            TorchrunEnvironment.detect({key: value for key, value in FULL.items() if key != name})
    if name != "MASTER_ADDR":
        with pytest.raises(RuntimeError, match=f"{name} must be an integer"):
            TorchrunEnvironment.detect({**FULL, name: "two"})


@pytest.mark.parametrize("change", [{"RANK": "4"}, {"RANK": "-1"}, {"WORLD_SIZE": "0"}])
def test_a_rank_that_cannot_be(change):
    with pytest.raises(RuntimeError, match="RANK must be from 0 to WORLD_SIZE - 1"):
        TorchrunEnvironment.detect({**FULL, **change})


def test_resolver_reads_the_variables_again():
    environ = dict(FULL)
    resolver = ts.cluster_resolver.TorchrunClusterResolver(environ=environ)
    assert resolver.cluster_spec().as_dict() == {"worker": ["127.0.0.1:29500"]}
    assert (resolver.task_type, resolver.task_id, resolver.world_size) == ("worker", 3, 4)
    assert resolver.master() == resolver.master("worker", 0) == "127.0.0.1:29500"
    with pytest.raises(ValueError, match="No task with index 3"):
        resolver.master("worker", 3)
    environ.update(RANK="2", MASTER_ADDR="fe80::1")
    assert (resolver.task_id, resolver.master(rpc_layer="x")) == (2, "x://[fe80::1]:29500")
    environ.clear()
    assert (resolver.task_type, resolver.task_id, resolver.world_size, resolver.master()) == (None, None, 1, "")
    assert not resolver.cluster_spec()


def test_resolver_takes_what_is_assigned(monkeypatch):
    monkeypatch.setattr("torchstrategy.cluster_resolver.resolver.visible_devices", lambda: ["cuda:0", "cpu:0"])
    resolver = ts.cluster_resolver.TorchrunClusterResolver(environ=FULL)
    resolver.task_type, resolver.task_id = "chief", 0
    assert (resolver.task_type, resolver.task_id, resolver.num_accelerators()) == ("chief", 0, {"GPU": 1})
