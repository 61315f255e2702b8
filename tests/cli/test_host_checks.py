import re
from pathlib import Path

import pytest
import torch

from tests.cli.fake_host import FakeHost, make_job, only
from torchstrategy import patches
from torchstrategy.base import __version__
from torchstrategy.cli.host_checks import (
    check_backends,
    check_cores,
    check_gpus,
    check_open_files,
    check_patches,
    check_shared_memory,
    check_versions,
)
from torchstrategy.cluster_resolver.cluster_spec import ClusterSpec


def test_versions_are_stated():
    (finding,) = check_versions(FakeHost(cuda_version="13.0", driver_version="580.1"))
    assert f"torchstrategy {__version__}" in finding.detail
    assert "CUDA 13.0, NVIDIA driver 580.1" in finding.detail


def test_a_torch_that_was_not_tested_is_named(monkeypatch):
    page = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    newest = re.search(r"The tests run with torch [\d.]+ and ([\d.]+)", page)[1]
    for version, number in ((f"{newest}.1+cpu", 1), ("2.9.0", 1), ("2.99.0a0+git1", 2), ("3.0", 2)):
        monkeypatch.setattr(torch, "__version__", version)
        _, *untested = found = list(check_versions(FakeHost()))
        assert len(found) == number
        for finding in untested:
            assert finding.status == "warn"
            assert f"not among the tested versions, of which {newest} is the newest" in finding.detail
            assert f"torch=={newest}.*" in finding.remedy


def test_missing_gloo_fails(monkeypatch):
    assert only(check_backends(FakeHost()), "gloo").status == "ok"
    monkeypatch.setattr("torch.distributed.is_gloo_available", lambda: False)
    assert only(check_backends(FakeHost()), "gloo").status == "FAIL"


def test_a_driver_without_nccl_is_strange(monkeypatch):
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: False)
    assert only(check_backends(FakeHost()), "NCCL").status == "info"
    assert only(check_backends(FakeHost(driver_version="580.1")), "NCCL").status == "warn"


@pytest.mark.parametrize(
    ("setting", "local_size", "status", "remedy"),
    [
        (None, None, "ok", None),
        (None, 4, "warn", "export OMP_NUM_THREADS=2"),
        ("2", 4, "ok", None),
        ("8", 4, "warn", "export OMP_NUM_THREADS=2"),
        ("1", 16, "ok", None),  # more processes than cores: it can't be less than one thread
        ("2,1", 4, "ok", None),
    ],
)
def test_threads(setting, local_size, status, remedy):
    host = FakeHost(environ={} if setting is None else {"OMP_NUM_THREADS": setting})
    finding = only(check_cores(host, make_job(local_size=local_size)), "threads")
    assert (finding.status, finding.remedy) == (status, remedy)


@pytest.mark.parametrize(("shm_bytes", "status"), [(64 << 20, "warn"), (None, "warn"), (65 << 20, "ok")])
def test_shared_memory_of_a_container(shm_bytes, status):
    (finding,) = check_shared_memory(FakeHost(shm_bytes=shm_bytes))
    assert finding.status == status
    assert (finding.remedy is not None and "--shm-size" in finding.remedy) == (status == "warn")


@pytest.mark.parametrize(
    ("limit", "size", "status"), [(1024, 2, "ok"), (256, 2, "warn"), (1024, 512, "warn"), (-1, 512, "ok")]
)
def test_open_files(limit, size, status):
    (finding,) = check_open_files(FakeHost(max_open_files=limit), make_job(size=size))
    assert finding.status == status


def test_no_limit_of_open_files_on_this_system():
    assert list(check_open_files(FakeHost(max_open_files=None), None)) == []


def test_hidden_gpus():
    environ = {"CUDA_VISIBLE_DEVICES": ""}
    (finding,) = check_gpus(FakeHost(environ=environ, cuda_version="13.0"), None)
    assert finding.status == "warn"
    assert "unset CUDA_VISIBLE_DEVICES" in finding.remedy
    finding, tuning = check_gpus(FakeHost(environ=environ), None)  # nothing to hide in a CPU build
    assert finding.status == tuning.status == "info"
    assert "ts.utils.tune(model, optimizer)" in tuning.detail


@pytest.mark.parametrize(
    ("num_gpus", "local_rank", "environ", "status"),
    [
        (4, 0, {}, "ok"),
        (2, 0, {}, "FAIL"),
        (2, 3, {"CUDA_VISIBLE_DEVICES": "0,1"}, "FAIL"),
        (1, 0, {"CUDA_VISIBLE_DEVICES": "3"}, "warn"),
        (1, None, {"CUDA_VISIBLE_DEVICES": "3"}, "ok"),  # as SLURM does with --gpus-per-task
    ],
)
def test_four_processes_share_the_gpus(num_gpus, local_rank, environ, status):
    host = FakeHost(environ=environ, num_gpus=num_gpus, cuda_version="13.0")
    (finding,) = check_gpus(host, make_job(local_size=4, local_rank=local_rank))
    assert finding.status == status
    if status == "FAIL":
        assert f"--nproc-per-node={num_gpus}" in finding.remedy


def test_processes_of_one_host_that_nothing_numbers():
    job = make_job(
        cluster_spec=ClusterSpec({"chief": ["node0:1"], "worker": ["node0:2", "node1:1"], "ps": ["node0:3"]})
    )
    assert only(check_cores(FakeHost(), job), "threads").remedy == "export OMP_NUM_THREADS=4"
    (finding,) = check_gpus(FakeHost(num_gpus=2, cuda_version="13.0"), job)
    assert finding.status == "FAIL"
    assert "2 processes on this host" in finding.detail
    environ = {"CUDA_VISIBLE_DEVICES": "1"}
    (finding,) = check_gpus(FakeHost(environ=environ, num_gpus=2, cuda_version="13.0"), job)
    assert finding.status == "ok"
    (finding,) = check_gpus(FakeHost(num_gpus=2, cuda_version="13.0"), make_job())  # one process on each host
    assert finding.status == "ok"


def test_a_driver_but_no_gpu():
    (finding,) = check_gpus(FakeHost(driver_version="580.1"), None)
    assert finding.status == "warn"


def test_patches_are_listed():
    end = patches.note("torch.thing", "a test needs it", "it is over")
    try:
        listed = {finding.name: finding for finding in check_patches()}
    finally:
        end()
    assert (listed["torch.thing"].status, listed["torch.thing"].detail) == ("info", "a test needs it; until it is over")
    assert "patches" not in listed


def test_where_nothing_is_patched_the_doctor_says_where_to_read(monkeypatch):
    monkeypatch.setattr(patches, "active", list)
    (finding,) = check_patches()
    assert "pydoc torchstrategy.patches" in finding.detail
