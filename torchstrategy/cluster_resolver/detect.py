"""Which job this process belongs to: one order of precedence over all that can say so."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace

from torchstrategy.base.addresses import split_address
from torchstrategy.base.context import set_within
from torchstrategy.base.job import Job
from torchstrategy.base.log import users_frame, warn_once, warn_once_at
from torchstrategy.cluster_resolver.cluster_spec import ClusterSpec
from torchstrategy.cluster_resolver.multi_worker_util import (
    id_in_cluster,
    normalize_cluster_spec,
    task_count,
    validate_addresses,
    validate_cluster_spec,
)
from torchstrategy.cluster_resolver.resolver import ClusterResolver
from torchstrategy.cluster_resolver.slurm import SlurmClusterResolver, is_step_of_several
from torchstrategy.cluster_resolver.tf_config import TFConfigClusterResolver, names_no_cluster
from torchstrategy.cluster_resolver.torchrun import TorchrunClusterResolver, TorchrunEnvironment, is_one_of_several

__all__ = ["explain", "find_job", "training_nothing", "trains_nothing", "warn_of_independent_copies"]

# What is wrong with a source is one of these; JSONDecodeError is a ValueError.
_ERRORS = (ValueError, TypeError, RuntimeError, LookupError)
_trains_nothing: ContextVar[bool] = ContextVar("trains_nothing", default=False)


@dataclass(frozen=True)
class _Finding:
    """What one source says: a job, or why there is none, or what is wrong."""

    source: str
    says: str
    job: Job | None = None
    error: Exception | None = None


def find_job(resolver: ClusterResolver | None = None, environ: Mapping[str, str] | None = None) -> Job | None:
    """Return the job that this process belongs to.

    The first of these that names a cluster is taken: a resolver that is given, ``torchrun``'s variables (which Ray
    Train sets as well), ``TF_CONFIG``, a Slurm step of several tasks. The workers that train together are the chief and
    the workers of the cluster; an evaluator has a job of its own.

    Args:
        resolver: a cluster resolver; the environment is then not asked.
        environ: the environment variables; ``None`` means those of this process.

    Returns:
        The job; ``None`` if this process stands alone.

    Raises:
        ValueError: the cluster or this process's task in it can't be used; the message says what to write.
        TypeError: ``resolver`` is no resolver, ``TF_CONFIG`` has another form than expected, or the task's index is no
            integer.
        RuntimeError: the launcher's variables are incomplete.

    Example:
        >>> from torchstrategy.cluster_resolver.detect import find_job
        >>> tf_config = '{"cluster": {"worker": ["host1:2222", "host2:2222"]}, "task": {"type": "worker", "index": 1}}'
        >>> job = find_job(environ={"TF_CONFIG": tf_config})
        >>> job.rank, job.size, job.address, job.port
        (1, 2, 'host1', 2222)
    """
    environ = os.environ if environ is None else environ
    return _job_of_environment(environ) if resolver is None else _job_of_resolver(resolver, environ)


def explain(environ: Mapping[str, str] | None = None) -> list[str]:
    """Say for each source of the environment what it says, and whether it is taken and why.

    Args:
        environ: the environment variables; ``None`` means those of this process.

    Returns:
        One line for each source, in the order of precedence.

    Example:
        >>> from torchstrategy.cluster_resolver.detect import explain
        >>> for line in explain({"SLURM_STEP_NUM_TASKS": "1"}):
        ...     print(line)
        torchrun: WORLD_SIZE is not set. Not taken.
        TF_CONFIG: not set. Not taken.
        SLURM: this is not one of several tasks of a step. Not taken.
        alone: nothing names other processes. Taken.
    """
    lines = []
    winner: str | None = None
    for finding in _findings(os.environ if environ is None else environ):
        if winner is None and (finding.job is not None or finding.error is not None):
            winner = finding.source
            verdict = "Taken." if finding.error is None else "Taken, which fails: mend it or unset it."
        elif finding.job is None and finding.error is None:
            verdict = "Not taken."
        else:
            verdict = f"Not taken, because {winner} comes first."
        lines.append(f"{finding.source}: {finding.says} {verdict}")
    alone = "nothing names other processes. Taken." if winner is None else f"not taken, because of {winner}."
    return [*lines, f"alone: {alone}"]


def trains_nothing() -> bool:
    """Say whether what runs only evaluates, so that copies stay equal."""
    return _trains_nothing.get()


def warn_of_independent_copies(strategy_name: str, environ: Mapping[str, str]) -> None:
    """Warn, once, if a strategy that joins no other processes runs in one of several that train together.

    Workers of a cluster with parameter servers do not: each may have a strategy of its own.

    Args:
        strategy_name: the strategy's class.
        environ: the environment variables.
    """
    source = None if trains_nothing() else _source_of_several(environ)
    if source is not None:
        also = "ts.MirroredStrategy() or, on several hosts, " if source == "WORLD_SIZE" else ""
        warn_once(
            f"{strategy_name} joins no other processes, but {source} says that this process is one of several: each of "
            f"them trains an independent copy. Use {also}ts.MultiWorkerMirroredStrategy() to train one model together."
        )


@contextlib.contextmanager
def training_nothing() -> Iterator[None]:
    """Let a strategy run in one process of several without a warning: copies that only evaluate stay equal."""
    with set_within(_trains_nothing, value=True):
        yield


def _source_of_several(environ: Mapping[str, str]) -> str | None:
    """Return what says that others train with this process; ``None`` if what comes first says something else."""
    if is_one_of_several(environ):  # even if the other variables are missing
        return "WORLD_SIZE"
    first = next((finding for finding in _findings(environ) if finding.job or finding.error), None)
    job = None if first is None else first.job
    return first.source if first and job and job.size > 1 and "ps" not in job.cluster_spec.jobs else None


def _job_of_environment(environ: Mapping[str, str]) -> Job | None:
    findings = _findings(environ)
    for position, finding in enumerate(findings):
        if finding.error is not None:
            raise finding.error
        if finding.job is not None:
            others = _not_used(findings[position + 1 :], finding.job)
            return replace(finding.job, reason=finding.job.reason + others)
    _warn_of_task_alone(TFConfigClusterResolver(environ=environ))
    return None


def _warn_of_task_alone(resolver: ClusterResolver) -> None:
    """Warn if ``TF_CONFIG`` names a task of no cluster: as in tf it trains alone, but a key may be misspelt."""
    if not isinstance(resolver, TFConfigClusterResolver) or not names_no_cluster(resolver):
        return
    if resolver.task_type not in (None, "evaluator"):
        warn_once_at(
            users_frame(),
            f'TF_CONFIG says that this process is {resolver.task_type} {resolver.task_id}, but has no "cluster": '
            "it trains alone. Is the key spelt right?",
            of=None,
        )


def _not_used(findings: Sequence[_Finding], taken: Job | None = None) -> str:
    """Name the sources that are set but not used; not those that agree, as all do that one launcher sets."""
    names = [
        finding.source
        for finding in findings
        if finding.error
        or (finding.job and (taken is None or (finding.job.rank, finding.job.size) != (taken.rank, taken.size)))
    ]
    return f"; {' and '.join(names)} {'is' if len(names) == 1 else 'are'} set too and not used" if names else ""


def _findings(environ: Mapping[str, str]) -> list[_Finding]:
    return [_look(source, read, environ) for source, read in _SOURCES.items()]


def _look(source: str, read: Callable[[Mapping[str, str]], Job | str], environ: Mapping[str, str]) -> _Finding:
    try:
        found = read(environ)
    except _ERRORS as error:
        return _Finding(source, f"{error}", error=error)
    if isinstance(found, str):
        return _Finding(source, found)
    says = f"rank {found.rank} of {found.size}" + (f", {found.task_type} {found.task_id}" if found.task_type else "")
    return _Finding(
        source, f"{says}; they meet at {found.address}:{found.port}." if found.size > 1 else f"{says}.", found
    )


def _read_torchrun(environ: Mapping[str, str]) -> Job | str:
    found = TorchrunEnvironment.detect(environ)
    if found is None:
        return "WORLD_SIZE is 1." if environ.get("WORLD_SIZE") else "WORLD_SIZE is not set."
    return _job_of_torchrun(found, TorchrunClusterResolver(environ=environ))


def _job_of_torchrun(found: TorchrunEnvironment, resolver: ClusterResolver) -> Job:
    source, says = "torchrun", "torchrun's variables are set"
    if _is_worker_of_ray(found):
        source, says = "Ray Train", "Ray Train has set torchrun's variables"
    return Job(
        source=source,
        reason=f"{says} (RANK={found.rank}, WORLD_SIZE={found.world_size})",
        cluster_spec=ClusterSpec({"worker": [found.store_address]}),
        task_type="worker",
        task_id=found.rank,
        rank=found.rank,
        size=found.world_size,
        address=found.master_addr,
        port=found.master_port,
        hosted=found.agent_store,
        attempt=found.restart_count,
        local_rank=found.local_rank,
        local_size=found.local_world_size,
        resolver=resolver,
    )


def _is_worker_of_ray(found: TorchrunEnvironment) -> bool:
    """Say whether Ray Train has set these variables, which all its workers have loaded."""
    try:
        context = sys.modules["ray.train"].get_context()
        return (context.get_world_rank(), context.get_world_size()) == (found.rank, found.world_size)
    except (KeyError, AttributeError, RuntimeError):  # not loaded, another Ray, or not in one of its workers
        return False


def _read_tf_config(environ: Mapping[str, str]) -> Job | str:
    resolver = TFConfigClusterResolver(environ=environ)
    spec = resolver.cluster_spec()
    if not spec:
        return "it has no cluster." if "TF_CONFIG" in environ else "not set."
    return _job_of_cluster("TF_CONFIG", "TF_CONFIG has a cluster", spec, resolver)


def _read_slurm(environ: Mapping[str, str]) -> Job | str:
    if not is_step_of_several(environ):
        is_shell = "SLURM_PTY_PORT" in environ and "SLURM_STEP_NUM_TASKS" in environ
        return "this is a shell in a step." if is_shell else "this is not one of several tasks of a step."
    resolver = SlurmClusterResolver(port_base=_port_of_step(environ), auto_set_gpu=False, environ=dict(environ))
    spec = resolver.cluster_spec()
    reason = f"this is task {environ['SLURM_PROCID']} of {spec.num_tasks('worker')} of a SLURM step"
    job = _job_of_cluster("SLURM", reason, spec, resolver)
    attempt = environ.get("SLURM_RESTART_COUNT", "0")
    return replace(
        job,
        attempt=int(attempt) if attempt.isdigit() else 0,
        local_rank=None if resolver.has_own_gpus else resolver.local_rank,
        local_size=resolver.local_size,
    )


_SOURCES: dict[str, Callable[[Mapping[str, str]], Job | str]] = {
    "torchrun": _read_torchrun,
    "TF_CONFIG": _read_tf_config,
    "SLURM": _read_slurm,
}


def _port_of_step(environ: Mapping[str, str]) -> int:
    """Return a port for a step's first task: steps that share a host should not meet each other."""
    numbers = [environ.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    job, step = (int(number) if number.isdigit() else 0 for number in numbers)
    return 20_000 + (job + 577 * step) % 10_000


def _job_of_resolver(resolver: ClusterResolver, environ: Mapping[str, str]) -> Job | None:
    if not isinstance(resolver, ClusterResolver):
        raise TypeError(
            f"cluster_resolver must be a ts.cluster_resolver.ClusterResolver. Received: {resolver!r}. Pass for example "
            "ts.cluster_resolver.TFConfigClusterResolver()."
        )
    if isinstance(resolver, TorchrunClusterResolver):
        found = resolver.detect()
        return _job_of_torchrun(found, resolver) if found else None
    found_spec = resolver.cluster_spec()  # first: some resolvers know their task only afterwards
    if not found_spec:
        _warn_of_task_alone(resolver)
        return None
    spec = normalize_cluster_spec(found_spec)
    name = type(resolver).__name__
    others = [
        finding
        for finding in _findings(environ)
        if finding.source != "TF_CONFIG" or not isinstance(resolver, TFConfigClusterResolver)
    ]
    return _job_of_cluster(name, f"the strategy was given a {name}{_not_used(others)}", spec, resolver)


def _job_of_cluster(source: str, reason: str, spec: ClusterSpec, resolver: ClusterResolver) -> Job:
    """Return the job of a task of a cluster.

    Raises:
        ValueError: the task is not one that trains, is none of the cluster's, or an address can't be used.
    """
    task_type, task_id = resolver.task_type, resolver.task_id
    if task_type is None or task_id is None:
        raise ValueError(
            "When `cluster_spec` is given, you must also specify `task_type` and `task_id`: each process has to know "
            f"which task it is. {source} has the cluster {spec} and task_type={task_type!r}, task_id={task_id!r}. "
            + _how_to_name_the_task(source)
        )
    if not isinstance(task_id, int):
        raise TypeError(f"{source}: task_id must be an integer. Received: {task_id!r}")
    if task_type == "ps":
        raise ValueError(
            f"{source} says that this process is {task_type} {task_id}, but a parameter server takes no part when "
            "workers train in step. Run this program on the chief and the workers only."
        )
    try:
        validate_cluster_spec(spec, task_type, task_id)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
    validate_addresses(spec, source)
    if task_id < 0:
        raise ValueError(f"{source}: a task's index must be 0 or more. Received: {task_type!r} {task_id}")
    is_evaluator = task_type == "evaluator"
    size = 1 if is_evaluator else task_count(spec, "chief") + task_count(spec, "worker")
    address, port = ("", 0)
    if size > 1:
        leader = "chief" if task_count(spec, "chief") else "worker"
        address, port = split_address(spec.task_address(leader, 0), f"{leader} 0 in {source}")
    return Job(
        source=source,
        reason=reason,
        cluster_spec=spec,
        task_type=task_type,
        task_id=task_id,
        rank=0 if is_evaluator else id_in_cluster(spec, task_type, task_id),
        size=size,
        address=address,
        port=port,
        resolver=resolver,
    )


def _how_to_name_the_task(source: str) -> str:
    if source == "TF_CONFIG":
        return 'Add for example "task": {"type": "worker", "index": 0}, with another index on each worker.'
    return "Set the resolver's task_type and task_id, for example to 'worker' and 0."
