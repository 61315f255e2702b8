import json

import pytest

from tests.cli.fake_host import FakeHost, make_job, only
from torchstrategy.cli.job_checks import (
    check_addresses,
    check_both_sources,
    check_store,
    check_stray_variables,
    detect,
)
from torchstrategy.cluster_resolver.cluster_spec import ClusterSpec

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}


def tf_config(index=1, kind="worker", **cluster):
    cluster = cluster or {"worker": ["node0:2222", "node1:2222"]}
    return json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})


def test_a_process_alone():
    job, findings = detect(FakeHost())
    assert job is None
    assert only(findings, "job").status == "ok"
    assert {"torchrun", "TF_CONFIG", "SLURM"} <= {finding.name for finding in findings}


def test_a_job_of_torchrun():
    job, findings = detect(FakeHost(environ=TORCHRUN))
    assert (job.rank, job.size) == (1, 2)
    finding = only(findings, "job")
    assert finding.status == "ok"
    assert "rank 1 of 2" in finding.detail
    assert "node0:29500" in finding.detail


@pytest.mark.parametrize(
    "environ",
    [
        {"WORLD_SIZE": "2"},
        {"TF_CONFIG": "{"},
        {"TF_CONFIG": tf_config(index=7)},
        {"TF_CONFIG": tf_config(kind="ps", index=0, ps=["node0:1"], worker=["node1:2"])},
    ],
)
def test_a_job_that_a_strategy_would_refuse_fails(environ):
    job, findings = detect(FakeHost(environ=environ))
    assert job is None
    assert only(findings, "job").status == "FAIL"


def test_world_size_without_rank():
    (finding,) = check_stray_variables(FakeHost(environ={"WORLD_SIZE": "2"}), None)
    assert (finding.name, finding.status) == ("WORLD_SIZE", "FAIL")
    (finding,) = check_stray_variables(FakeHost(environ={"WORLD_SIZE": "1"}), None)
    assert (finding.name, finding.status) == ("WORLD_SIZE", "warn")
    (finding,) = check_stray_variables(FakeHost(environ={"RANK": "1"}), None)
    assert (finding.name, finding.status) == ("RANK", "warn")
    assert list(check_stray_variables(FakeHost(environ=TORCHRUN), make_job())) == []


def test_a_port_left_in_the_environment():
    host = FakeHost(environ={"MASTER_PORT": "29500"}, busy=(29500,))
    (finding,) = check_stray_variables(host, None)
    assert finding.status == "warn"
    assert "29500" in finding.remedy
    assert list(check_stray_variables(FakeHost(environ={"MASTER_PORT": "29500"}), None)) == []


@pytest.mark.parametrize(
    ("config", "status", "says"),
    [
        (tf_config(index=1), "ok", "rank 1 of 2"),
        (tf_config(index=0), "warn", "rank 0 of 2"),
        (tf_config(index=0, chief=["a:1"], worker=["b:1"]), "ok", "rank 1 of 2"),
        (tf_config(index=1, worker=["a:1", "b:1", "c:1"]), "warn", "rank 1 of 3"),
        ("{}", "warn", "no cluster"),
        ("[", "warn", "no cluster"),
    ],
)
def test_tf_config_and_torchrun_both_set(config, status, says):
    (finding,) = check_both_sources(FakeHost(environ={**TORCHRUN, "TF_CONFIG": config}))
    assert finding.status == status
    assert says in finding.detail


def test_one_source_alone_contradicts_nothing():
    assert list(check_both_sources(FakeHost(environ=TORCHRUN))) == []
    assert list(check_both_sources(FakeHost(environ={"TF_CONFIG": tf_config()}))) == []


def test_addresses_that_answer():
    findings = list(check_addresses(FakeHost(states={("10.0.0.2", 2222): "open"}), make_job()))
    assert [finding.status for finding in findings] == ["ok", "ok"]
    assert only(findings, "other tasks").detail == "1 of 1 other tasks' hosts answer, 1 of the tasks run"


def test_torchrun_knows_no_addresses_to_look_at():
    assert list(check_addresses(FakeHost(), None)) == []
    assert list(check_addresses(FakeHost(names={}), make_job(source="torchrun"))) == []


@pytest.mark.parametrize(("state", "status"), [("silent", "warn"), ("unreachable", "FAIL")])
def test_a_host_that_does_not_answer(state, status):
    finding = only(check_addresses(FakeHost(states={("10.0.0.2", 2222): state}), make_job()), "worker:1")
    assert finding.status == status
    if state == "silent":
        assert "firewall" in finding.detail


def test_a_name_that_does_not_resolve():
    finding = only(check_addresses(FakeHost(names={"node0": "10.0.0.1"}), make_job()), "worker:1")
    assert finding.status == "FAIL"
    assert "node1 does not resolve" in finding.detail


@pytest.mark.parametrize("address", ["node1", "node1:http", ":2222"])
def test_an_address_without_a_port(address):
    job = make_job(cluster_spec=ClusterSpec({"worker": ["node0:2222", address]}))
    assert only(check_addresses(FakeHost(), job), "worker:1").status == "FAIL"


def test_two_tasks_at_one_address():
    job = make_job(cluster_spec=ClusterSpec({"chief": ["node1:2222"], "worker": ["node0:2222", "node1:2222"]}))
    finding = only([f for f in check_addresses(FakeHost(), job) if f.status == "FAIL"], "worker:1")
    assert "chief:0" in finding.detail


def test_own_address_of_another_host():
    finding = only(check_addresses(FakeHost(), make_job(task_id=1, rank=1)), "own address")
    assert finding.status == "warn"
    assert "index" in finding.remedy


def test_own_address_that_others_cannot_reach():
    host = FakeHost(names={"node0": "127.0.1.1", "node1": "10.0.0.2"})
    assert only(check_addresses(host, make_job()), "own address").status == "FAIL"
    alone = make_job(cluster_spec=ClusterSpec({"worker": ["127.0.0.1:1", "127.0.0.1:2"]}))
    assert only(check_addresses(FakeHost(), alone), "own address").status == "ok"


def test_the_port_that_rank_0_will_open():
    (finding,) = check_store(FakeHost(), make_job())
    assert finding.status == "ok"
    (finding,) = check_store(FakeHost(busy=(2222,)), make_job())
    assert finding.status == "warn"
    assert "ss -ltnp" in finding.remedy


@pytest.mark.parametrize(
    ("state", "hosted", "status"),
    [
        ("open", False, "ok"),
        ("open", True, "ok"),
        ("refused", False, "ok"),  # rank 0 may start later
        ("refused", True, "FAIL"),  # but a launcher is there before its workers
        ("silent", False, "FAIL"),
        ("unreachable", True, "FAIL"),
    ],
)
def test_the_store_seen_from_another_rank(state, hosted, status):
    host = FakeHost(states={("10.0.0.1", 2222): state})
    (finding,) = check_store(host, make_job(rank=1, task_id=1, hosted=hosted))
    assert finding.status == status


def test_the_store_s_name_does_not_resolve():
    (finding,) = check_store(FakeHost(names={}), make_job(rank=1))
    assert finding.status == "FAIL"


def test_one_process_needs_no_store():
    assert list(check_store(FakeHost(), None)) == []
    assert list(check_store(FakeHost(), make_job(size=1))) == []
