"""``torchstrategy doctor``: what a job would see here, what is wrong with it, and whether its processes can meet."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import chain

import torch
import torch.distributed as dist

from torchstrategy.base.job import Job
from torchstrategy.base.options import CommunicationOptions
from torchstrategy.base.stalls import Process, ask_for_report, find_processes
from torchstrategy.cli.host import Finding, Host, as_json, as_text, has_failed
from torchstrategy.cli.host_checks import (
    check_backends,
    check_cores,
    check_gpus,
    check_open_files,
    check_patches,
    check_shared_memory,
    check_tpus,
    check_versions,
)
from torchstrategy.cli.job_checks import (
    check_addresses,
    check_both_sources,
    check_host_name,
    check_interface_settings,
    check_proxies,
    check_store,
    check_stray_variables,
    detect,
)
from torchstrategy.strategies.default import get_replica_context
from torchstrategy.strategies.multi_worker import MultiWorkerMirroredStrategy
from torchstrategy.testing.processes import ProcessPool, RemoteError

__all__ = ["check_backends_here", "check_running_jobs", "check_whole_job", "examine", "run"]

_SECTION = "Collectives"
_RUNNING = "Running jobs"
_NUM_FLOATS = 1 << 20
_REPEATS = 5
_MAX_GPUS = 8
_REMEDIES = {
    "gloo": "look at GLOO_SOCKET_IFNAME and at the host's name above: processes of one host must reach each other",
    "nccl": "run with NCCL_DEBUG=INFO to see which transport fails; NCCL_P2P_DISABLE=1 tells links between GPUs apart",
}


def check_backends_here(host: Host, timeout_s: float) -> Iterator[Finding]:
    """All-reduce with each backend between new processes on this host.

    Args:
        host: this host.
        timeout_s: seconds for each backend.
    """
    if dist.is_gloo_available():
        yield _between_processes("gloo", 2, timeout_s)
    if dist.is_nccl_available() and host.num_gpus:
        yield _between_processes("nccl", min(host.num_gpus, _MAX_GPUS), timeout_s)


def check_whole_job(job: Job | None, timeout_s: float) -> Iterator[Finding]:
    """All-reduce with all ranks of the job, each of which must run this.

    Args:
        job: the job that this process belongs to.
        timeout_s: seconds to wait for the others.
    """
    if job is None or job.size == 1:
        remedy = "run it as `torchstrategy launch -m torchstrategy doctor --join`, or with TF_CONFIG on every host"
        yield Finding(_SECTION, "whole job", "FAIL", "there is no job to join", remedy)
        return
    try:
        strategy = MultiWorkerMirroredStrategy(None, CommunicationOptions(timeout_seconds=timeout_s))
        times = strategy.run(_time_strategy)
    except Exception as error:  # noqa: BLE001 - whatever goes wrong is what was looked for
        yield _failure(
            "whole job", _as_line(error), "the lines above may say why; run it on every rank at the same time"
        )
        return
    times_of_first = strategy.experimental_local_results(times)[0]
    text = f"{strategy.num_replicas_in_sync} replicas of {job.size} processes, {_as_text(*times_of_first)}"
    yield Finding(_SECTION, "whole job", "ok", text)


def check_running_jobs() -> Iterator[Finding]:
    """Ask one rank of each job that runs on this host where all its ranks are."""
    processes = find_processes()
    if not processes:
        text = (
            "no process of this user belongs to a running job of several processes, on this host or in this container"
        )
        remedy = "run this where the job runs, as its user; a job is there from its first strategy on"
        yield Finding(_RUNNING, "jobs", "FAIL", text, remedy)
    jobs: dict[str, list[Process]] = {}
    for process in processes:
        if process.about is None:
            text = f"process {process.pid} does not answer: it is stopped, or in native code that keeps its interpreter"
            yield Finding(_RUNNING, f"process {process.pid}", "warn", text)
        else:
            jobs.setdefault(process.about["job"], []).append(process)
    for name, members in jobs.items():
        members.sort(key=lambda process: int((process.about or {})["rank"]))
        ranks = ", ".join(f"rank {(process.about or {})['rank']} (process {process.pid})" for process in members)
        text = f"{(members[0].about or {})['size']} ranks, of which here: {ranks}"
        answer = next(filter(None, map(ask_for_report, members)), None)
        text += "\n" + ("no rank has answered in time" if answer is None else "\n".join(answer))
        yield Finding(_RUNNING, name, "warn" if answer is None else "ok", text)


def _between_processes(backend: str, size: int, timeout_s: float) -> Finding:
    try:
        with ProcessPool(size, timeout_s) as pool:
            results = pool.run(_try_backend, backend, timeout_s)
    except (RemoteError, TimeoutError) as error:
        first = next(iter(error.errors.values())) if isinstance(error, RemoteError) else error
        return _failure(backend, _as_line(first), _REMEDIES[backend])
    for result in results:
        if isinstance(result, str):
            return _failure(backend, result, _REMEDIES[backend])
    return Finding(_SECTION, backend, "ok", f"{size} process(es) on this host, {_as_text(*results[0])}")


def _try_backend(backend: str, timeout_s: float) -> tuple[float, float] | str:
    """Run in each process: return the seconds, or what went wrong; an exception would print its traceback too."""
    try:
        return _time_backend(backend, timeout_s)
    except Exception as error:  # noqa: BLE001 - whatever goes wrong is what was looked for
        return _as_line(error)


def _time_backend(backend: str, timeout_s: float) -> tuple[float, float]:
    """Return the seconds of an all-reduce of one float and of 4 MiB."""
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    device = torch.device("cpu" if backend == "gloo" else f"cuda:{dist.get_rank()}")

    def all_reduce(num_floats: int) -> torch.Tensor:
        tensor = torch.ones(num_floats, device=device)
        dist.all_reduce(tensor)
        return tensor

    try:
        return _time(all_reduce, dist.get_world_size())
    finally:
        dist.destroy_process_group()


def _time_strategy() -> tuple[float, float]:
    context = get_replica_context()
    if context is None:
        raise RuntimeError("called outside run")
    device = context.devices[0]
    return _time(lambda n: context.all_reduce("SUM", torch.ones(n, device=device)), context.num_replicas_in_sync)


def _time(all_reduce: Callable[[int], torch.Tensor], num_replicas: int) -> tuple[float, float]:
    medians = []
    for num_floats in (1, _NUM_FLOATS):
        seconds = []
        for _ in range(1 + _REPEATS):
            start = time.perf_counter()
            sums = all_reduce(num_floats)
            wrong = int((sums != num_replicas).sum())  # waits for the result
            seconds.append(time.perf_counter() - start)
            if wrong:
                raise RuntimeError(
                    f"{wrong} of {num_floats} sums are wrong: expected {num_replicas}, received {sums[0].item()}"
                )
        medians.append(statistics.median(seconds[1:]))
    return medians[0], medians[1]


def _as_text(one_float_s: float, many_floats_s: float) -> str:
    return f"all-reduce of one float {one_float_s * 1e3:.2f} ms, of 4 MiB {many_floats_s * 1e3:.2f} ms"


def _as_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip()


def _failure(name: str, text: str, remedy: str) -> Finding:
    return Finding(_SECTION, name, "FAIL", "\n".join(text.splitlines()[:8]), remedy)


def run(options: argparse.Namespace) -> int:
    """Examine this host and print the report; ranks of a job other than the first print only what is wrong.

    Args:
        options: as the command line declares them.

    Returns:
        1 if something will break a job, else 0.
    """
    if options.job:
        findings = list(check_running_jobs())
        sys.stdout.write(as_json(findings) if options.json else as_text(findings))
        return int(has_failed(findings))
    host = Host()
    job, findings = examine(host)
    if options.join:
        findings += check_whole_job(job, options.timeout)
    elif not options.quick:
        findings += check_backends_here(host, options.timeout)
    if options.join and job is not None and job.rank > 0:
        wrong = [finding for finding in findings if finding.status in ("warn", "FAIL")]
        sys.stderr.write(f"rank {job.rank}:\n{as_text(wrong)}" if wrong else "")
    else:
        sys.stdout.write(as_json(findings) if options.json else as_text(findings))
    return int(has_failed(findings))


def examine(host: Host) -> tuple[Job | None, list[Finding]]:
    """Make all checks that start nothing.

    Args:
        host: this host.

    Returns:
        The job that was found, and the report.
    """
    job, findings = detect(host)
    findings += chain(
        check_stray_variables(host, job),
        check_both_sources(host),
        check_addresses(host, job),
        check_store(host, job),
        check_versions(host),
        check_backends(host),
        check_cores(host, job),
        check_shared_memory(host),
        check_open_files(host, job),
        check_gpus(host, job),
        check_tpus(host, job),
        check_host_name(host, job),
        check_interface_settings(host),
        check_proxies(host),
        check_patches(),
    )
    return job, findings
