import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.cli.fake_host import FakeHost, make_job, only
from torchstrategy.cli import doctor, main
from torchstrategy.cli.doctor import check_backends_here, check_whole_job
from torchstrategy.cli.host import Host

ROOT = Path(__file__).parents[2]
LAUNCHED = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TF_CONFIG"}


def test_all_checks_of_a_host_alone():
    job, findings = doctor.examine(FakeHost())
    assert job is None
    assert [finding.name for finding in findings if finding.status in ("warn", "FAIL")] == []
    sections = [finding.section for finding in findings]
    expected = ["Job", "Versions", "This host", "Network", "Changed in this process"]
    assert list(dict.fromkeys(sections)) == expected
    assert sections == sorted(sections, key=expected.index)


def test_a_cluster_in_which_much_is_wrong():
    config = {"cluster": {"worker": ["node0:2222", "node9:2222"]}, "task": {"type": "worker", "index": 0}}
    environ = {"TF_CONFIG": json.dumps(config), "GLOO_SOCKET_IFNAME": "ib0"}
    job, findings = doctor.examine(FakeHost(environ=environ, shm_bytes=64 << 20, busy=(2222,)))
    assert (job.rank, job.size) == (0, 2)
    wrong = {finding.name: finding.status for finding in findings if finding.status in ("warn", "FAIL")}
    assert wrong == {"worker:1": "FAIL", "store": "warn", "/dev/shm": "warn", "GLOO_SOCKET_IFNAME": "FAIL"}
    assert all(finding.remedy for finding in findings if finding.status in ("warn", "FAIL"))


def test_what_is_printed(monkeypatch, capsys):
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(doctor, "Host", FakeHost)
    assert main(["doctor", "--quick"]) == 0
    assert "0 warn, 0 FAIL" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "Host", lambda: FakeHost(environ={"WORLD_SIZE": "2"}))
    assert main(["doctor", "--quick", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {"status", "findings"}
    assert report["status"] == "FAIL"
    assert all(set(finding) == {"section", "name", "status", "detail", "remedy"} for finding in report["findings"])


def test_other_ranks_of_a_job_print_only_what_is_wrong(monkeypatch, capsys):
    environ = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "node0",
        "MASTER_PORT": "29500",
    }
    monkeypatch.setattr(doctor, "Host", lambda: FakeHost(environ=environ))
    monkeypatch.setattr(doctor, "check_whole_job", lambda job, timeout_s: [])
    assert main(["doctor", "--join"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("rank 1:\nThis host\n  warn  threads")


def test_joining_without_a_job_fails():
    (finding,) = check_whole_job(None, 1.0)
    assert finding.status == "FAIL"
    assert "torchstrategy launch" in finding.remedy
    (finding,) = check_whole_job(make_job(size=1), 1.0)
    assert finding.status == "FAIL"


def test_a_small_collective(process_pool):
    one_float_s, many_floats_s = process_pool(2).run(doctor._time_backend, "gloo", 30.0)[1]
    assert one_float_s > 0
    assert many_floats_s > 0


def test_a_wrong_sum_is_an_error():
    with pytest.raises(RuntimeError, match="1 of 1 sums are wrong: expected 3, received 2"):
        doctor._time(lambda num_floats: 2 * torch.ones(num_floats), 3)


def test_a_backend_that_fails(monkeypatch):
    class FailingPool:
        def __init__(self, *arguments):
            raise TimeoutError("The worker processes did not start")

    monkeypatch.setattr(doctor, "ProcessPool", FailingPool)
    (finding,) = check_backends_here(FakeHost(), 1.0)
    assert (finding.name, finding.status) == ("gloo", "FAIL")
    assert "did not start" in finding.detail


@pytest.mark.slow
def test_a_backend_that_fails_in_the_processes_prints_no_traceback(monkeypatch, capfd):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none_such")
    finding = next(iter(check_backends_here(FakeHost(), 60.0)))
    assert (finding.name, finding.status) == ("gloo", "FAIL")
    assert "none_such" in finding.detail
    assert "Traceback" not in capfd.readouterr().err


def run_command(*arguments, **environment):
    clean = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    return subprocess.run(
        [sys.executable, "-m", "torchstrategy", *arguments],
        env={**clean, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.slow
def test_this_host():
    ended = run_command("doctor", "--json")
    report = json.loads(ended.stdout)
    by_name = {finding["name"]: finding for finding in report["findings"]}
    assert by_name["job"]["status"] == "ok"
    (collective,) = [
        finding for finding in report["findings"] if (finding["section"], finding["name"]) == ("Collectives", "gloo")
    ]
    assert collective["status"] == "ok", collective
    assert "all-reduce of one float" in collective["detail"]
    assert ended.returncode == (report["status"] == "FAIL")


@pytest.mark.slow
def test_all_ranks_of_a_job():
    ended = run_command(
        "launch", "--nproc-per-node=2", "-m", "torchstrategy", "doctor", "--join", "--json", OMP_NUM_THREADS="1"
    )
    report = json.loads(ended.stdout)
    by_name = {finding["name"]: finding for finding in report["findings"]}
    assert by_name["whole job"]["status"] == "ok", ended
    assert by_name["whole job"]["detail"].startswith("2 replicas of 2 processes, all-reduce of one float")
    assert by_name["TF_CONFIG"]["status"] == "ok"  # the launcher's agrees with its own variables
    assert ended.returncode == (report["status"] == "FAIL")


@pytest.mark.gpu
def test_nccl():
    assert only(check_backends_here(Host(), 60.0), "nccl").status == "ok"
