"""The doctor's check of TPUs, on hosts of tests: nothing of torch_xla is imported."""

import importlib.util
import re
from pathlib import Path

import pytest

import torchstrategy as ts
from tests.cli.fake_host import FakeHost, make_job, only
from torchstrategy.cli import host_checks
from torchstrategy.cli.host import count_tpu_chips
from torchstrategy.cli.host_checks import check_tpus


@pytest.fixture
def installed(monkeypatch):
    """Installs torch_xla and libtpu, as far as the checks see; what is passed is the pair's fault."""

    def install(fault=None, libtpu="0.0.30"):
        def check():
            if fault is not None:
                raise ImportError(fault)

        monkeypatch.setattr(host_checks, "check_installation", check)
        monkeypatch.setattr(host_checks, "version_of", lambda package: libtpu)

    return install


def test_nothing_is_said_where_there_is_nothing():
    assert list(check_tpus(FakeHost(), None)) == []


def test_chips_without_torch_xla():
    (finding,) = check_tpus(FakeHost(num_tpu_chips=4), None)
    assert (finding.status, finding.detail) == ("warn", "4 chip(s), but torch_xla is not installed")
    assert finding.remedy == "pip install 'torch-xla[tpu]==2.9.*' 'torch==2.9.*'"


def test_a_pair_that_does_not_fit(installed):
    installed("torch_xla 2.9.0 does not fit to torch 2.13.0")
    (finding,) = check_tpus(FakeHost(num_tpu_chips=4, torch_xla_version="2.9.0"), None)
    assert (finding.section, finding.status) == ("Versions", "FAIL")
    assert finding.remedy == "torch_xla 2.9.0 does not fit to torch 2.13.0"


@pytest.mark.parametrize(
    ("chips", "environ", "status"),
    [
        (0, {}, "FAIL"),
        (0, {"TPU_SKIP_MDS_QUERY": "0"}, "FAIL"),
        (0, {"TPU_SKIP_MDS_QUERY": "1"}, "info"),
        (0, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "info"),
        (4, {}, "info"),
    ],
)
def test_torch_tpu_without_a_tpu_hangs(chips, environ, status):
    (finding,) = check_tpus(FakeHost(environ=environ, num_tpu_chips=chips, torch_tpu_version="0.1.0"), None)
    assert (finding.name, finding.status) == ("torch_tpu", status)
    assert ("TORCH_DEVICE_BACKEND_AUTOLOAD=0" in (finding.remedy or "")) == (status == "FAIL")


def test_torch_tpu_comes_with_no_extra():
    """It would hang every CPU host that installs it."""
    assert not re.search("torch.tpu", Path("pyproject.toml").read_text(encoding="utf-8"))


def test_the_tpu_system_says_that_torch_tpu_is_there(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "torch_tpu" else None)
    with pytest.raises(ImportError, match=r"torch_xla, which is not installed, but torch_tpu is.*torchrun"):
        ts.tpu.experimental.initialize_tpu_system()


@pytest.mark.parametrize(
    ("chips", "environ", "local_size", "libtpu", "status", "detail"),
    [
        (4, {}, None, "0.0.30", "ok", "4 chip(s), libtpu 0.0.30"),
        (4, {"PJRT_DEVICE": "TPU"}, 4, "0.0.30", "ok", "4 chip(s), libtpu 0.0.30, one for each process"),
        (4, {}, 1, "0.0.30", "ok", "4 chip(s), libtpu 0.0.30"),
        (4, {}, 2, "0.0.30", "FAIL", "2 processes on this host, 4 chips"),
        (4, {}, None, None, "FAIL", "4 chip(s), but libtpu is not installed"),
        (4, {"PJRT_DEVICE": "CPU"}, None, "0.0.30", "warn", "PJRT_DEVICE=CPU: 1 virtual device(s) instead"),
        (0, {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"}, None, None, "info", "4 virtual device(s) on the CPU"),
        (0, {"PJRT_DEVICE": "TPU"}, None, None, "FAIL", "PJRT_DEVICE=TPU, but this host has no TPU chip"),
        (0, {}, None, None, "info", "none"),
    ],
)
def test_devices(installed, chips, environ, local_size, libtpu, status, detail):
    installed(libtpu=libtpu)
    job = None if local_size is None else make_job(local_size=local_size)
    found = list(check_tpus(FakeHost(environ=environ, num_tpu_chips=chips, torch_xla_version="2.9.0"), job))
    assert only(found, "torch_xla").status == "ok"
    finding = only(found, "TPUs")
    assert finding.status == status
    assert finding.detail.startswith(detail)
    assert (finding.remedy is not None) == (status in ("warn", "FAIL"))


def test_chips_are_counted_on_the_bus(tmp_path):
    devices = [("0x1ae0", "0x005e"), ("0x1ae0", "0x0063"), ("0x1ae0", "0x0001"), ("0x10de", "0x005e")]
    for name, (vendor, device) in zip("abcd", devices, strict=True):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(f"{vendor}\n")
        (tmp_path / name / "device").write_text(f"{device}\n")
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "vendor").write_text("0x1ae0\n")  # and no device
    assert count_tpu_chips(tmp_path) == 2
