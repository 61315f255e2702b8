"""``GCEClusterResolver``: the machines of an instance group of Google Compute Engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torchstrategy.base.addresses import join_address
from torchstrategy.cluster_resolver.cluster_spec import ClusterSpec
from torchstrategy.cluster_resolver.resolver import ClusterResolver, make_service

__all__ = ["GCEClusterResolver"]


class GCEClusterResolver(ClusterResolver):
    """Asks Google Compute Engine for the running machines of an instance group.

    Tasks are in the alphabetical order of their addresses. Each machine has to be told its own ``task_id``.

    Args:
        project: name of the project.
        zone: zone of the instance group.
        instance_group: name of the instance group.
        port: the port of every task.
        task_type: the job that the machines belong to.
        task_id: this machine's index there.
        rpc_layer: the protocol in front of addresses that ``master`` returns.
        credentials: Google's credentials; ``"default"`` asks ``google.auth`` for them.
        service: a client of the API ``compute``, version ``v1``, or what acts like one; ``None`` makes one.

    Raises:
        ImportError: the client's package is not installed and no service is given.
    """

    def __init__(  # noqa: PLR0913 - tf's arguments
        self,
        project: str,
        zone: str,
        instance_group: str,
        port: int,
        task_type: str = "worker",
        task_id: int = 0,
        rpc_layer: str = "grpc",
        credentials: Any = "default",
        service: Any = None,
    ) -> None:
        self._where = {"project": project, "zone": zone}
        self._instance_group = instance_group
        self._port = port
        self._task_type: str = task_type
        self._task_id = task_id
        self._rpc_layer = rpc_layer
        self._service = make_service("compute", credentials) if service is None else service

    def cluster_spec(self) -> ClusterSpec:
        """Return the machines that run now."""
        addresses = sorted(self._address(instance) for instance in self._instances())
        return ClusterSpec({self._task_type: addresses})

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the address of a task, this machine's own unless told otherwise.

        Args:
            task_type: the task's job.
            task_id: its index there.
            rpc_layer: a protocol to put in front.

        Raises:
            ValueError: there is no such task.
        """
        return self._own_or_given(task_type, task_id, rpc_layer)

    @property
    def task_type(self) -> str:
        """The job that the machines belong to; it can't be assigned, as in tf.

        Raises:
            RuntimeError: it is assigned.
        """
        return self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:  # noqa: ARG002
        raise RuntimeError("The task_type of a GCEClusterResolver is set when it is made: pass it to the constructor.")

    def _instances(self) -> Iterator[dict[str, Any]]:
        groups = self._service.instanceGroups()
        request = groups.listInstances(
            **self._where, instanceGroup=self._instance_group, body={"instanceState": "RUNNING"}, orderBy="name"
        )
        while request is not None:
            response = request.execute()
            yield from response.get("items", [])
            request = groups.listInstances_next(previous_request=request, previous_response=response)

    def _address(self, instance: dict[str, Any]) -> str:
        name = instance["instance"].split("/")[-1]
        details = self._service.instances().get(**self._where, instance=name).execute()
        return join_address(details["networkInterfaces"][0]["networkIP"], self._port)
