"""``ServerDef``: which task of which cluster a server is, and tf's rules that find it out of arguments."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchstrategy.cluster_resolver.cluster_spec import ClusterSpec
from torchstrategy.errors import InternalError, NotFoundError

__all__ = ["PROTOCOL", "ServerDef", "make_server_def"]

PROTOCOL = "zmq"
_PROTOCOLS = (PROTOCOL, "grpc")  # programs for tf name the second one, and mean whatever there is


@dataclass(frozen=True)
class ServerDef:
    """One task's server, as ``tf.train.ServerDef`` describes it.

    Args:
        cluster: all tasks.
        job_name: the server's job.
        task_index: its index there.
        protocol: how it talks; ``"zmq"`` is all there is.
        default_session_config: the server's settings, as ``ts.Server``'s ``config``.

    Example:
        >>> cluster = ts.cluster_resolver.ClusterSpec({"ps": ["host1:2222"], "worker": ["host2:2222", "host3:2222"]})
        >>> definition = ts.train.ServerDef(cluster, "worker", 1)
        >>> definition.address
        'host3:2222'
    """

    cluster: ClusterSpec
    job_name: str
    task_index: int = 0
    protocol: str = PROTOCOL
    default_session_config: Mapping[str, Any] | None = None

    @property
    def address(self) -> str:
        """The server's address in the cluster."""
        return self.cluster.task_address(self.job_name, self.task_index)


def make_server_def(
    server_or_cluster_def: Any,
    job_name: str | None,
    task_index: int | None,
    protocol: str | None,
    config: Mapping[str, Any] | None,
) -> ServerDef:
    """Return what arguments of ``Server`` mean. A job or index is found out only where there is just one.

    Args:
        server_or_cluster_def: a ``ServerDef``, a ``ClusterSpec``, a dictionary that one can be made of, or TensorFlow's
            messages of these names.
        job_name: the job; wins over that of a ``ServerDef``.
        task_index: the index; wins over that of a ``ServerDef``.
        protocol: ``"zmq"``; ``"grpc"`` is taken for it.
        config: the server's settings.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a job or index is needed, or there is no such job whose only task could be meant.
        InternalError: the cluster has no such job or task; tf's class for it.
        NotFoundError: there is no such protocol.
    """
    if _is_server_def(server_or_cluster_def):
        given = server_or_cluster_def
        cluster = _cluster(given.cluster)
        job_name = given.job_name if job_name is None else job_name
        task_index = given.task_index if task_index is None else task_index
        protocol = given.protocol if protocol is None else protocol
        config = getattr(given, "default_session_config", None) if config is None else config
    else:
        cluster = _cluster(server_or_cluster_def)
        job_name = _only_job(cluster) if job_name is None else job_name
        task_index = _only_task(cluster, job_name) if task_index is None else task_index
    if not isinstance(job_name, str):
        raise TypeError(f"job_name must be a string. Received: {job_name!r}")
    task_index = _integer(task_index)
    _check_task(cluster, job_name, task_index)
    return ServerDef(cluster, job_name, task_index, _checked_protocol(protocol), config)


def _is_server_def(value: Any) -> bool:
    return all(hasattr(value, name) for name in ("cluster", "job_name", "task_index", "protocol"))


def _cluster(value: Any) -> ClusterSpec:
    jobs = getattr(value, "job", None)
    if jobs is not None and not isinstance(value, Mapping):  # tf's ClusterDef
        value = {job.name: dict(job.tasks) for job in jobs}
    if not isinstance(value, (ClusterSpec, Mapping)):
        raise TypeError(
            "server_or_cluster_def must be a ts.train.ServerDef, a ts.train.ClusterSpec, or a dictionary such as "
            f"{{'ps': ['host1:2222'], 'worker': ['host2:2222']}}. Received: {value!r}"
        )
    return ClusterSpec(value)


def _only_job(cluster: ClusterSpec) -> str:
    if len(cluster.jobs) != 1:
        raise ValueError(f"Must specify an explicit job_name: one of {cluster.jobs}.")
    return cluster.jobs[0]


def _only_task(cluster: ClusterSpec, job_name: str) -> int:
    indices = cluster.task_indices(job_name)
    if len(indices) != 1:
        raise ValueError(f"Must specify an explicit task_index: job {job_name!r} has the tasks {indices}.")
    return indices[0]


def _integer(task_index: Any) -> int:
    try:
        return operator.index(task_index)
    except TypeError:
        raise TypeError(f"task_index must be an integer. Received: {task_index!r}") from None


def _check_task(cluster: ClusterSpec, job_name: str, task_index: int) -> None:
    if job_name not in cluster.jobs:
        raise InternalError(f"Job {job_name!r} was not defined in the cluster. Its jobs are {cluster.jobs}.")
    if task_index not in cluster.task_indices(job_name):
        raise InternalError(
            f"Task {task_index} was not defined in job {job_name!r}. Its tasks are {cluster.task_indices(job_name)}."
        )


def _checked_protocol(protocol: Any) -> str:
    if protocol is not None and not isinstance(protocol, str):
        raise TypeError(f"protocol must be a string. Received: {protocol!r}")
    if protocol is not None and protocol not in _PROTOCOLS:
        raise NotFoundError(f"There is no server for the protocol {protocol!r}. Leave it out, or say {PROTOCOL!r}.")
    return PROTOCOL
