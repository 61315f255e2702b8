"""The doctor's check of TPUs. It starts no runtime, because only one process at a time can hold a chip."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator

import torch

from torchstrategy.base.job import Job
from torchstrategy.cli.host import Host
from torchstrategy.cli.report import Finding
from torchstrategy.xla.runtime import check_installation

__all__ = ["check_tpus"]

_SECTION = "This host"
_INSTALL = "pip install 'torchstrategy[tpu]'"


def check_tpus(host: Host, job: Job | None) -> Iterator[Finding]:
    """Compare the TPU chips of this host with what is installed, and with the processes that want one."""
    if host.torch_xla_version is None:
        if host.num_tpu_chips:
            text = f"{host.num_tpu_chips} chip(s), but torch_xla is not installed"
            yield Finding(_SECTION, "TPUs", "warn", text, _INSTALL)
        return
    pair = f"torch_xla {host.torch_xla_version} with torch {torch.__version__}"
    try:
        check_installation()
    except ImportError as error:
        yield Finding("Versions", "torch_xla", "FAIL", f"{pair} can't be used", str(error))
        return
    yield Finding("Versions", "torch_xla", "ok", pair)
    yield _devices(host, job)


def _devices(host: Host, job: Job | None) -> Finding:
    chips, chosen = host.num_tpu_chips, host.environ.get("PJRT_DEVICE")
    if chosen == "CPU":
        count = host.environ.get("CPU_NUM_DEVICES", "1")
        if chips:
            text = f"PJRT_DEVICE=CPU: {count} virtual device(s) instead of {chips} chip(s)"
            return Finding(_SECTION, "TPUs", "warn", text, "export PJRT_DEVICE=TPU, unless you want virtual devices")
        return Finding(_SECTION, "TPUs", "info", f"{count} virtual device(s) on the CPU")
    if not chips and chosen == "TPU":
        remedy = "use a TPU host, or export PJRT_DEVICE=CPU CPU_NUM_DEVICES=4 for virtual devices"
        return Finding(_SECTION, "TPUs", "FAIL", "PJRT_DEVICE=TPU, but this host has no TPU chip", remedy)
    if not chips:
        return Finding(_SECTION, "TPUs", "info", "none")
    if _version("libtpu") is None:
        return Finding(_SECTION, "TPUs", "FAIL", f"{chips} chip(s), but libtpu is not installed", _INSTALL)
    num_workers = 1 if job is None or job.local_size is None else job.local_size
    if num_workers not in (1, chips):
        text = f"{num_workers} processes on this host, {chips} chips: start one process for each chip or one for all"
        return Finding(_SECTION, "TPUs", "FAIL", text, f"--nproc-per-node={chips}, or no launcher on a single host")
    text = f"{chips} chip(s), libtpu {_version('libtpu')}"
    return Finding(_SECTION, "TPUs", "ok", text if num_workers == 1 else f"{text}, one for each process")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
