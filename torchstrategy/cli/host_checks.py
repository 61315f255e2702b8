"""The doctor's checks of this host: versions, cores, memory, files, GPUs.

Each takes the host, and the job if it cares.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator

import torch
import torch.distributed as dist

from torchstrategy import patches
from torchstrategy.base import __version__, how_to_install
from torchstrategy.base.job import Job
from torchstrategy.cli.host import Finding, Host, Status, version_of
from torchstrategy.xla.runtime import check_installation

__all__ = [
    "check_backends",
    "check_cores",
    "check_gpus",
    "check_open_files",
    "check_patches",
    "check_shared_memory",
    "check_tpus",
    "check_versions",
]

_INSTALL = how_to_install("tpu")


def check_tpus(host: Host, job: Job | None) -> Iterator[Finding]:
    """Compare the TPU chips of this host with what is installed, and with the processes that want one."""
    if host.torch_tpu_version is not None:
        yield _torch_tpu(host)
    if host.torch_xla_version is None:
        if host.num_tpu_chips and host.torch_tpu_version is None:
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


def _torch_tpu(host: Host) -> Finding:
    """Look for the trap of a host without TPU: autograd asks every accelerator, and this one asks Google's network."""
    name = f"torch_tpu {host.torch_tpu_version}"
    if host.num_tpu_chips:
        text = f"{name}: a process for each of {host.num_tpu_chips} chip(s)"
        return Finding("Versions", "torch_tpu", "info", text)
    if host.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        return Finding("Versions", "torch_tpu", "info", f"{name}, which `import torch` does not load")
    if host.environ.get("TPU_SKIP_MDS_QUERY", "").lower() in ("1", "true"):
        return Finding("Versions", "torch_tpu", "info", f"{name}, which does not ask the metadata server")
    text = f"{name} on a host without TPU: each `backward` hangs, also on the CPU, while it asks for a metadata server"
    remedy = "pip uninstall torch_tpu, or export TORCH_DEVICE_BACKEND_AUTOLOAD=0 (or TPU_SKIP_MDS_QUERY=1)"
    return Finding("Versions", "torch_tpu", "FAIL", text, remedy)


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
    if version_of("libtpu") is None:
        return Finding(_SECTION, "TPUs", "FAIL", f"{chips} chip(s), but libtpu is not installed", _INSTALL)
    num_workers = 1 if job is None or job.local_size is None else job.local_size
    if num_workers not in (1, chips):
        text = f"{num_workers} processes on this host, {chips} chips: start one process for each chip or one for all"
        return Finding(_SECTION, "TPUs", "FAIL", text, f"--nproc-per-node={chips}, or no launcher on a single host")
    text = f"{chips} chip(s), libtpu {version_of('libtpu')}"
    return Finding(_SECTION, "TPUs", "ok", text if num_workers == 1 else f"{text}, one for each process")


_SECTION = "This host"
_NEWEST_TORCH = (2, 13)  # with which the tests run
_MIB = 1 << 20
_SMALL_SHM_MIB = 64  # what container runtimes give by default
_MIN_OPEN_FILES = 1024
_FILES_PER_RANK = 4


def check_versions(host: Host) -> Iterator[Finding]:
    """State the versions that all hosts must share."""
    versions = {"Python": platform.python_version(), "torchstrategy": __version__, "torch": torch.__version__}
    versions |= {name: found for name in ("torch-xla", "numpy") if (found := version_of(name))}
    versions |= {"CUDA": host.cuda_version} if host.cuda_version else {}
    versions |= {"NVIDIA driver": host.driver_version} if host.driver_version else {}
    yield Finding("Versions", "versions", "info", ", ".join(f"{name} {version}" for name, version in versions.items()))
    if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) > _NEWEST_TORCH:
        newest = ".".join(map(str, _NEWEST_TORCH))
        text = f"{torch.__version__} is not among the tested versions, of which {newest} is the newest"
        yield Finding("Versions", "torch", "warn", text, f"pip install 'torch=={newest}.*', if something goes wrong")


def check_patches() -> Iterator[Finding]:
    """List what the library has changed of torch and Python in this process."""
    active = patches.active()
    for patch in active:
        yield Finding("Changed in this process", patch.what, "info", f"{patch.why}; until {patch.until}")
    if not active:
        text = "nothing of torch or Python; `python -m pydoc torchstrategy.patches` says what a job changes, and when"
        yield Finding("Changed in this process", "patches", "info", text)


def check_backends(host: Host) -> Iterator[Finding]:
    """Look for the backends of torch.distributed."""
    if not dist.is_available() or not dist.is_gloo_available():
        remedy = "install a build of torch with distributed support: pip install torch"
        yield Finding("Versions", "gloo", "FAIL", "this build of torch has no gloo: processes can't meet", remedy)
    else:
        yield Finding("Versions", "gloo", "ok", "available")
    if dist.is_available() and dist.is_nccl_available():
        yield Finding("Versions", "NCCL", "ok", ".".join(map(str, torch.cuda.nccl.version())))  # type: ignore[no-untyped-call]
    elif host.driver_version is not None:
        remedy = "install a CUDA build of torch: https://pytorch.org/get-started"
        yield Finding("Versions", "NCCL", "warn", "not in this build of torch, but a driver is there", remedy)
    else:
        yield Finding("Versions", "NCCL", "info", "not in this build of torch")


def check_cores(host: Host, job: Job | None) -> Iterator[Finding]:
    """Compare threads with cores."""
    yield Finding(_SECTION, "host", "info", f"{host.name}, {platform.platform(terse=True)}, {platform.machine()}")
    setting = host.environ.get("OMP_NUM_THREADS")
    num_workers = _local_size(job)
    text = f"{host.num_cores} core(s), OMP_NUM_THREADS={setting or '(unset)'}"
    share = max(1, host.num_cores // num_workers)
    if setting is None and num_workers > 1:
        text += f": each of {num_workers} processes starts {host.num_cores} threads"
        yield Finding(_SECTION, "threads", "warn", text, f"export OMP_NUM_THREADS={share}")
    elif setting is not None and setting.isdecimal() and int(setting) * num_workers > max(host.num_cores, num_workers):
        text += f": {num_workers} process(es) want {int(setting) * num_workers} cores"
        yield Finding(_SECTION, "threads", "warn", text, f"export OMP_NUM_THREADS={share}")
    else:
        yield Finding(_SECTION, "threads", "ok", text)


def check_shared_memory(host: Host) -> Iterator[Finding]:
    """Look at ``/dev/shm``, through which processes of one host and workers of data loaders pass tensors."""
    remedy = "docker run --shm-size=8g (or --ipc=host); in Kubernetes an emptyDir of medium Memory at /dev/shm"
    if host.shm_bytes is None:
        yield Finding(_SECTION, "/dev/shm", "warn", "missing: data loaders with workers will fail", remedy)
    elif host.shm_bytes <= _SMALL_SHM_MIB * _MIB:
        text = f"{host.shm_bytes / _MIB:.0f} MiB: data loaders with workers run out of it (bus error)"
        yield Finding(_SECTION, "/dev/shm", "warn", text, remedy)
    else:
        yield Finding(_SECTION, "/dev/shm", "ok", f"{host.shm_bytes / _MIB:.0f} MiB")


def check_open_files(host: Host, job: Job | None) -> Iterator[Finding]:
    """Compare the limit of open files with what connections to all ranks need."""
    if host.max_open_files is None:
        return
    needed = max(_MIN_OPEN_FILES, 256 + _FILES_PER_RANK * (job.size if job else 1))
    is_unlimited = host.max_open_files < 0
    if is_unlimited or host.max_open_files >= needed:
        yield Finding(_SECTION, "open files", "ok", "unlimited" if is_unlimited else f"up to {host.max_open_files}")
    else:
        text = f"up to {host.max_open_files}, of {needed} that connections and data loaders may need"
        yield Finding(_SECTION, "open files", "warn", text, f"ulimit -n {needed}")


def check_gpus(host: Host, job: Job | None) -> Iterator[Finding]:
    """Compare the GPUs that torch sees with the processes that want one."""
    visible = host.environ.get("CUDA_VISIBLE_DEVICES")
    num_workers = _local_size(job)
    if visible is not None and visible.strip() in ("", "-1") and host.cuda_version is not None:
        text = f"CUDA_VISIBLE_DEVICES={visible!r} hides all GPUs: training runs on CPUs"
        yield Finding(_SECTION, "GPUs", "warn", text, "unset CUDA_VISIBLE_DEVICES, unless you want CPUs")
    elif host.num_gpus == 0 and host.driver_version is not None:
        remedy = "python -c 'import torch; torch.zeros(1).cuda()' says why; or install a CUDA build of torch"
        yield Finding(_SECTION, "GPUs", "warn", "there is an NVIDIA driver, but torch sees no GPU", remedy)
    elif job is not None and num_workers > 1 and host.num_gpus:
        yield _shared_gpus(host, job, num_workers, is_restricted=visible is not None)
    elif host.num_gpus:
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        yield Finding(_SECTION, "GPUs", "ok", f"{host.num_gpus}: {', '.join(names)}")
    else:
        yield Finding(_SECTION, "GPUs", "info", "none")
        text = (
            "with torch's defaults a step on CPUs may take twice as long as it must; fit tunes its model by itself, "
            "call ts.utils.tune(model, optimizer) in a loop of your own"
        )
        yield Finding(_SECTION, "tuning", "info", text)


def _shared_gpus(host: Host, job: Job, num_workers: int, *, is_restricted: bool) -> Finding:
    found = f"{num_workers} processes on this host, {host.num_gpus} GPU(s)"
    if job.local_rank is None and not is_restricted:
        remedy = "give each process its own CUDA_VISIBLE_DEVICES, or start them with `torchstrategy launch`"
        return Finding(_SECTION, "GPUs", "FAIL", f"{found}: each process takes all, as nothing numbers them", remedy)
    if job.local_rank is None or host.num_gpus >= num_workers:
        return Finding(_SECTION, "GPUs", "ok", found)
    # A launcher may have given each process GPUs of its own; the process of the first number can't tell.
    status: Status = "warn" if is_restricted and job.local_rank < host.num_gpus else "FAIL"
    remedy = f"--nproc-per-node={host.num_gpus}, or CUDA_VISIBLE_DEVICES= to train on CPUs"
    return Finding(_SECTION, "GPUs", status, found, remedy)


def _local_size(job: Job | None) -> int:
    """Return how many of the job's processes run on this host, as far as the launcher or the addresses say so."""
    if job is None:
        return 1
    if job.local_size is not None:
        return job.local_size
    spec = job.cluster_spec
    hosts = {
        (kind, index): spec.task_address(kind, index).rpartition(":")[0]
        for kind in {"chief", "worker"}.intersection(spec.jobs)
        for index in spec.task_indices(kind)
    }
    return max(1, list(hosts.values()).count(hosts.get((str(job.task_type), job.task_id or 0), "")))
