"""``ClusterResolver``: what can say which tasks a cluster has and which of them this process is."""

from __future__ import annotations

import abc
import importlib
from typing import Any

from torchstrategy.base import how_to_install
from torchstrategy.base.devices import kind_of, visible_devices
from torchstrategy.cluster_resolver.cluster_spec import ClusterSpec

__all__ = ["ClusterResolver", "format_master_url", "import_optional", "make_service", "visible_accelerators"]


class ClusterResolver(abc.ABC):
    """Says which tasks a cluster has and which of them this process is.

    A subclass has ``cluster_spec`` and ``master``, and sets ``task_type`` and ``task_id`` if it knows them. Both may be
    assigned by the user, where the environment doesn't say which task this is.

    Example:
        >>> class OneHost(ts.cluster_resolver.ClusterResolver):
        ...     def cluster_spec(self):
        ...         return ts.cluster_resolver.ClusterSpec({"worker": ["localhost:2222"]})
        ...
        ...     def master(self, task_type=None, task_id=None, rpc_layer=None):
        ...         return ""
        >>> resolver = OneHost()
        >>> resolver.task_type, resolver.task_id = "worker", 0
        >>> resolver.task_type
        'worker'
    """

    _task_type: str | None = None
    _task_id: int | None = None
    _rpc_layer: str | None = None

    @abc.abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Return the tasks of the cluster, as they are known now.

        Returns:
            The cluster; an empty one if there is none.
        """

    @abc.abstractmethod
    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the address of a task, this process's own unless told otherwise.

        Args:
            task_type: the task's job.
            task_id: its index there.
            rpc_layer: a protocol to put in front, as ``"grpc"`` in ``"grpc://host:port"``.

        Returns:
            The address; an empty string if there is no cluster.
        """

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: Any = None,  # noqa: ARG002 - tf's argument
    ) -> dict[str, int]:
        """Return how many accelerators a task has, by kind.

        Args:
            task_type: the task's job; this process's own task by default.
            task_id: its index there.
            config_proto: without meaning here.

        Returns:
            For example ``{"GPU": 4}``; an empty dictionary without accelerators. What this process sees is what every
            task is taken to have.
        """
        self.master(task_type, task_id)  # as tf does: a task that is not there is an error
        return visible_accelerators()

    @property
    def environment(self) -> str | None:
        """Where the program runs, as tf's ``"google"``; empty if nothing is known."""
        return ""

    @property
    def task_type(self) -> str | None:
        """This process's job, such as ``"worker"``; ``None`` if it is not known."""
        return self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """This process's index in its job; ``None`` if it is not known."""
        return self._task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def rpc_layer(self) -> str | None:
        """The protocol in front of addresses that ``master`` returns; nothing in this library depends on it."""
        return self._rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    def _own_or_given(self, task_type: str | None, task_id: int | None, rpc_layer: str | None) -> str:
        """Return the address of a task; of this process's own where an argument is ``None``."""
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if task_type is None or task_id is None:
            return ""
        return format_master_url(self.cluster_spec().task_address(task_type, task_id), rpc_layer or self.rpc_layer)


def format_master_url(address: str, rpc_layer: str | None = None) -> str:
    """Return an address with its protocol in front, if there is one."""
    return f"{rpc_layer}://{address}" if rpc_layer else address


def visible_accelerators() -> dict[str, int]:
    """Return how many accelerators this process sees, by tf's names of their kinds."""
    counts: dict[str, int] = {}
    for name in visible_devices():
        kind = name.split(":")[0]
        if kind != "cpu":
            label = kind_of(kind).tf_name or kind.upper()
            counts[label] = counts.get(label, 0) + 1
    return counts


def import_optional(module: str, extra: str, what: str) -> Any:
    """Import a module of an optional package.

    Args:
        module: the module.
        extra: the extra of this package that installs it.
        what: what the caller needs it for, or instead of what.

    Raises:
        ImportError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"This resolver needs {what}: {how_to_install(extra)}") from error


def make_service(api: str, credentials: Any, discovery_url: str | None = None) -> Any:
    """Return a client of one of Google's interfaces, version ``v1``.

    Args:
        api: its name, such as ``"compute"``.
        credentials: Google's credentials; ``"default"`` asks ``google.auth`` for them.
        discovery_url: where the client finds what the interface offers; ``None`` means Google's place.

    Raises:
        ImportError: the client's package is not installed.
    """
    discovery = import_optional("googleapiclient.discovery", "gce", "Google's API client, or the argument service")
    if credentials == "default":
        credentials, _ = import_optional("google.auth", "gce", "Google's API client").default()
    where = {} if discovery_url is None else {"discoveryServiceUrl": discovery_url}
    return discovery.build(api, "v1", credentials=credentials, **where)
