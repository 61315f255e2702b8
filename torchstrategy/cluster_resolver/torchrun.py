"""The environment variables that ``torchrun`` sets, read and checked."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from torchstrategy.base.addresses import join_address
from torchstrategy.cluster_resolver.cluster_spec import ClusterSpec
from torchstrategy.cluster_resolver.resolver import ClusterResolver, format_master_url, visible_accelerators

__all__ = [
    "TorchrunClusterResolver",
    "TorchrunEnvironment",
    "is_one_of_several",
]

_REQUIRED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class TorchrunEnvironment:
    """What ``torchrun`` says about this process.

    Args:
        rank: id of the process in the job.
        world_size: processes in the job.
        local_rank: id of the process on its host.
        local_world_size: processes on this host.
        master_addr: host of the job's store.
        master_port: port of the job's store.
        agent_store: the launcher itself hosts the store.
        restart_count: how often the launcher has restarted the job, by this host's count.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    agent_store: bool = False
    restart_count: int = 0

    @property
    def store_address(self) -> str:
        """The job's store as ``host:port``."""
        return join_address(self.master_addr, self.master_port)

    @classmethod
    def detect(cls, environ: Mapping[str, str]) -> TorchrunEnvironment | None:
        """Return the environment of a job of several processes, or ``None`` outside one.

        Args:
            environ: the environment variables.

        Returns:
            The parsed variables; ``None`` if ``WORLD_SIZE`` is unset or 1.

        Raises:
            RuntimeError: ``WORLD_SIZE`` is above 1, but another variable is missing or not an integer, or the rank is
                beyond it.

        Example:
            >>> from torchstrategy.cluster_resolver.torchrun import TorchrunEnvironment
            >>> TorchrunEnvironment.detect({}) is None
            True
        """
        if not is_one_of_several(environ):
            return None
        missing = [name for name in _REQUIRED if not environ.get(name)]
        if missing:
            raise RuntimeError(
                f"WORLD_SIZE={environ['WORLD_SIZE']} says that this process is one of several, but "
                f"{', '.join(missing)} not set. Start the program with `torchrun --nproc-per-node=N program.py`, or "
                "unset WORLD_SIZE to run it alone."
            )
        numbers = {}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
            try:
                numbers[name] = int(environ[name])
            except ValueError:
                raise RuntimeError(f"{name} must be an integer. Received: {environ[name]!r}") from None
        if not 0 <= numbers["RANK"] < numbers["WORLD_SIZE"]:
            raise RuntimeError(
                f"RANK must be from 0 to WORLD_SIZE - 1. Received: RANK={numbers['RANK']} and "
                f"WORLD_SIZE={numbers['WORLD_SIZE']}"
            )
        return cls(
            rank=numbers["RANK"],
            world_size=numbers["WORLD_SIZE"],
            local_rank=numbers["LOCAL_RANK"],
            local_world_size=numbers["LOCAL_WORLD_SIZE"],
            master_addr=environ["MASTER_ADDR"],
            master_port=numbers["MASTER_PORT"],
            agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            restart_count=int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        )


class TorchrunClusterResolver(ClusterResolver):
    """Reads ``torchrun``'s variables: rank r is task r of the job ``worker``.

    The variables are read anew each time that something is asked. ``torchrun`` doesn't tell where other processes are:
    the cluster has one task with an address, that of the job's store, and ``world_size`` says how many there are.

    Args:
        environ: the environment variables to read instead of ``os.environ``.

    Example:
        >>> environ = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
        >>> environ |= {"MASTER_ADDR": "host1", "MASTER_PORT": "29500"}
        >>> resolver = ts.cluster_resolver.TorchrunClusterResolver(environ=environ)
        >>> resolver.task_type, resolver.task_id, resolver.world_size, resolver.cluster_spec()
        ('worker', 2, 4, ClusterSpec({'worker': ['host1:29500']}))
    """

    def __init__(self, *, environ: Mapping[str, str] | None = None) -> None:
        self._environ = os.environ if environ is None else environ

    def cluster_spec(self) -> ClusterSpec:
        """Return the job ``worker`` with task 0 only; an empty cluster outside a job of several processes.

        Raises:
            RuntimeError: ``WORLD_SIZE`` is above 1, but another variable is missing or not an integer.
        """
        found = self.detect()
        return ClusterSpec({"worker": [found.store_address]} if found else {})

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the address of the job's store, or of a task.

        Args:
            task_type: the task's job.
            task_id: its index there; only that of task 0 is known.
            rpc_layer: a protocol to put in front.

        Raises:
            ValueError: the task's address is not known.
        """
        spec = self.cluster_spec()
        if not spec:
            return ""
        address = spec.task_address("worker" if task_type is None else task_type, 0 if task_id is None else task_id)
        return format_master_url(address, rpc_layer or self.rpc_layer)

    @property
    def task_type(self) -> str | None:
        """``"worker"``; ``None`` outside a job of several processes."""
        return "worker" if self._task_type is None and self.detect() else self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """The process's rank; ``None`` outside a job of several processes."""
        found = self.detect() if self._task_id is None else None
        return found.rank if found else self._task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def world_size(self) -> int:
        """Number of processes in the job."""
        found = self.detect()
        return found.world_size if found else 1

    def num_accelerators(
        self,
        task_type: str | None = None,  # noqa: ARG002
        task_id: int | None = None,  # noqa: ARG002
        config_proto: object = None,  # noqa: ARG002
    ) -> dict[str, int]:
        """Return how many accelerators this process sees, by kind.

        Args:
            task_type: without meaning here.
            task_id: without meaning here.
            config_proto: without meaning here.
        """
        return visible_accelerators()

    def detect(self) -> TorchrunEnvironment | None:
        """Return all that ``torchrun`` says, or ``None`` outside a job of several processes."""
        return TorchrunEnvironment.detect(self._environ)


def is_one_of_several(environ: Mapping[str, str]) -> bool:
    """Say whether ``WORLD_SIZE`` tells this process that there are others.

    Args:
        environ: the environment variables.
    """
    return environ.get("WORLD_SIZE", "1").strip() not in ("", "1")
