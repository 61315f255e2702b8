"""Resolvers that are given their cluster: ``SimpleClusterResolver``, and ``UnionResolver`` of several others."""

from __future__ import annotations

from typing import Any

from torchstrategy.cluster_resolver.cluster_spec import ClusterSpec
from torchstrategy.cluster_resolver.resolver import ClusterResolver, format_master_url

__all__ = ["SimpleClusterResolver", "UnionResolver"]


class SimpleClusterResolver(ClusterResolver):
    """Says what it was given.

    Args:
        cluster_spec: the cluster.
        master: what ``master()`` returns.
        task_type: this process's job.
        task_id: its index there.
        environment: what ``environment`` returns.
        num_accelerators: what ``num_accelerators()`` returns; ``None`` means none.
        rpc_layer: the protocol in front of addresses that ``master`` returns.

    Raises:
        TypeError: ``cluster_spec`` is no ``ClusterSpec``.

    Example:
        >>> spec = ts.cluster_resolver.ClusterSpec({"worker": ["host1:2222", "host2:2222"]})
        >>> resolver = ts.cluster_resolver.SimpleClusterResolver(spec, task_type="worker", task_id=1)
        >>> resolver.master("worker", 1)
        'host2:2222'
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec,
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: dict[str, int] | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        if not isinstance(cluster_spec, ClusterSpec):
            raise TypeError(
                "cluster_spec must be a ts.cluster_resolver.ClusterSpec, such as "
                f"ClusterSpec({{'worker': ['host1:2222']}}). Received: {cluster_spec!r}"
            )
        self._cluster_spec = cluster_spec
        self._master = master
        self._task_type = task_type
        self._task_id = task_id
        self._environment = environment
        self._num_accelerators = dict(num_accelerators or {})
        self._rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """Return the cluster that the constructor was given."""
        return self._cluster_spec

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the master that the constructor was given, or the address of a task.

        Args:
            task_type: the task's job.
            task_id: its index there; without both of them the constructor's ``master`` is returned.
            rpc_layer: a protocol to put in front.

        Raises:
            ValueError: there is no such task.
        """
        address = self._master
        if task_type is not None and task_id is not None:
            address = self._cluster_spec.task_address(task_type, task_id)
        return format_master_url(address, rpc_layer or self.rpc_layer)

    @property
    def environment(self) -> str | None:
        """What the constructor was given."""
        return self._environment

    def num_accelerators(
        self,
        task_type: str | None = None,  # noqa: ARG002
        task_id: int | None = None,  # noqa: ARG002
        config_proto: Any = None,  # noqa: ARG002
    ) -> dict[str, int]:
        """Return what the constructor was given, whatever the arguments are."""
        return dict(self._num_accelerators)


class UnionResolver(ClusterResolver):
    """The tasks of several resolvers; everything else is that of the first one.

    Lists of tasks are put one after another in the order of the arguments. If the indices of a job are not 0, 1, 2, ...
    in one of the resolvers, its tasks keep their indices in all of them.

    Args:
        *args: the resolvers.
        task_type: this process's job; ``None`` means that of the first resolver. By keyword, as the others.
        task_id: its index there; ``None`` means that of the first resolver.
        rpc_layer: the protocol in front of addresses; ``None`` means that of the first resolver.

    Raises:
        ValueError: no resolver is given, or another keyword.
        TypeError: an argument is no resolver.

    Example:
        >>> def simple(cluster):
        ...     return ts.cluster_resolver.SimpleClusterResolver(ts.cluster_resolver.ClusterSpec(cluster))
        >>> union = ts.cluster_resolver.UnionResolver(simple({"worker": ["a:1"]}), simple({"worker": ["b:1"]}))
        >>> union.cluster_spec()
        ClusterSpec({'worker': ['a:1', 'b:1']})
    """

    def __init__(self, *args: ClusterResolver, **kwargs: Any) -> None:
        self._task_type = kwargs.pop("task_type", None)
        self._task_id = kwargs.pop("task_id", None)
        self._rpc_layer = kwargs.pop("rpc_layer", None)
        if kwargs:
            raise ValueError(f"Expected the keywords task_type, task_id and rpc_layer. Received: {sorted(kwargs)}")
        if not args:
            raise ValueError("UnionResolver needs at least one ClusterResolver.")
        for resolver in args:
            if not isinstance(resolver, ClusterResolver):
                raise TypeError(f"All arguments must be cluster resolvers. Received: {resolver!r}")
        self._resolvers = args

    def cluster_spec(self) -> ClusterSpec:
        """Return the tasks of all resolvers.

        Raises:
            KeyError: two resolvers have the same index of a job whose indices are kept.
        """
        parts: dict[str, list[dict[int, str]]] = {}
        for resolver in self._resolvers:
            spec = resolver.cluster_spec()
            for job in spec.jobs:
                tasks = {index: spec.task_address(job, index) for index in spec.task_indices(job)}
                parts.setdefault(job, []).append(tasks)
        return ClusterSpec({job: _merge(job, tasks) for job, tasks in parts.items()})

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the address of a task, or the first resolver's master.

        Args:
            task_type: the task's job.
            task_id: its index there; without both of them the first resolver is asked.
            rpc_layer: a protocol to put in front.

        Raises:
            ValueError: there is no such task.
        """
        if task_type is None or task_id is None:
            return self._resolvers[0].master(rpc_layer=rpc_layer)
        return format_master_url(self.cluster_spec().task_address(task_type, task_id), rpc_layer or self.rpc_layer)

    @property
    def task_type(self) -> str | None:
        """This process's job, which was given or assigned, else the first resolver's."""
        return self._resolvers[0].task_type if self._task_type is None else self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """This process's index in its job, which was given or assigned, else the first resolver's."""
        return self._resolvers[0].task_id if self._task_id is None else self._task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def rpc_layer(self) -> str | None:
        """The protocol in front of addresses, which was given or assigned, else the first resolver's."""
        return self._resolvers[0].rpc_layer if self._rpc_layer is None else self._rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    @property
    def environment(self) -> str | None:
        """The first resolver's environment."""
        return self._resolvers[0].environment

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> dict[str, int]:
        """Return what the first resolver says.

        Args:
            task_type: a task's job.
            task_id: its index there.
            config_proto: without meaning here.
        """
        return self._resolvers[0].num_accelerators(task_type, task_id, config_proto)


def _merge(job: str, parts: list[dict[int, str]]) -> dict[int, str]:
    if all(sorted(tasks) == list(range(len(tasks))) for tasks in parts):
        return dict(enumerate(tasks[index] for tasks in parts for index in range(len(tasks))))
    merged: dict[int, str] = {}
    for tasks in parts:
        if both := sorted(merged.keys() & tasks.keys()):
            raise KeyError(f"Several resolvers have the tasks {both} of job {job!r}, whose indices are kept.")
        merged.update(tasks)
    return merged
