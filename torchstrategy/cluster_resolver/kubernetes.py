"""``KubernetesClusterResolver``: the pods that carry a job's labels."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Any

from torchstrategy.base.addresses import join_address
from torchstrategy.cluster_resolver.cluster_spec import ClusterSpec
from torchstrategy.cluster_resolver.resolver import ClusterResolver, import_optional

__all__ = ["KubernetesClusterResolver", "KubernetesExecutableLocation"]


class KubernetesExecutableLocation(enum.Enum):
    """Where the program runs, which says how it finds the cluster's API: in a pod of the cluster, or elsewhere."""

    WITHIN_CLUSTER = 0
    OFF_CLUSTER = 1


class KubernetesClusterResolver(ClusterResolver):
    """Asks Kubernetes for the running pods of each job.

    It can't say which task this process is: assign ``task_type`` and ``task_id``. Pods come in the order of the label
    selectors, and of their names within one selector.

    Args:
        job_to_label_mapping: for each job a list of label selectors; ``None`` means
            ``{"worker": ["job-name=tensorflow"]}``, as in tf.
        tf_server_port: the port of every task.
        rpc_layer: the protocol in front of addresses that ``master`` returns.
        override_client: a ``kubernetes.client.CoreV1Api`` that is ready for use, or what acts like one; ``None`` makes
            one.
        executable_location: where this program runs; matters without ``override_client`` only.
        namespace: the pods' namespace, for an account that must not list all of them; ``None`` means all. Not in tf.
        use_pod_ip: give the pods' own addresses. tf gives those of the machines that they run on, which reach a pod
            with ``hostNetwork: true`` only. Not in tf.

    Raises:
        ImportError: the client's package is not installed and no client is given.
        ValueError: ``executable_location`` is something else.

    Example:
        >>> from types import SimpleNamespace as Of
        >>> def pod(name, ip):
        ...     return Of(metadata=Of(name=name), status=Of(phase="Running", host_ip=ip, pod_ip=ip))
        >>> client = Of(list_pod_for_all_namespaces=lambda label_selector: Of(items=[pod("b", "::2"), pod("a", "::1")]))
        >>> resolver = ts.cluster_resolver.KubernetesClusterResolver(override_client=client)
        >>> resolver.task_type, resolver.task_id = "worker", 0
        >>> resolver.cluster_spec()
        ClusterSpec({'worker': ['[::1]:8470', '[::2]:8470']})
    """

    def __init__(
        self,
        job_to_label_mapping: Mapping[str, Iterable[str]] | None = None,
        tf_server_port: int = 8470,
        rpc_layer: str = "grpc",
        override_client: Any = None,
        executable_location: KubernetesExecutableLocation = KubernetesExecutableLocation.WITHIN_CLUSTER,
        *,
        namespace: str | None = None,
        use_pod_ip: bool = False,
    ) -> None:
        if not isinstance(executable_location, KubernetesExecutableLocation):
            raise ValueError(
                "executable_location must be a ts.cluster_resolver.KubernetesExecutableLocation. "
                f"Received: {executable_location!r}"
            )
        self._client = _make_client(executable_location) if override_client is None else override_client
        self._selectors = dict(job_to_label_mapping or {"worker": ["job-name=tensorflow"]})
        for job, selectors in self._selectors.items():
            if isinstance(selectors, str):
                raise TypeError(f"Job {job!r} must have a list of label selectors. Received: {selectors!r}")
        self._port = tf_server_port
        self._rpc_layer = rpc_layer
        self._namespace = namespace
        self._use_pod_ip = use_pod_ip

    def cluster_spec(self) -> ClusterSpec:
        """Return the pods that run now.

        Raises:
            RuntimeError: a pod is not running.
        """
        return ClusterSpec(
            {
                job: [self._address(pod) for selector in selectors for pod in self._pods(selector)]
                for job, selectors in self._selectors.items()
            }
        )

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the address of a task, this process's own unless told otherwise.

        Args:
            task_type: the task's job.
            task_id: its index there.
            rpc_layer: a protocol to put in front.

        Returns:
            The address; an empty string if neither arguments nor attributes name a task.

        Raises:
            ValueError: there is no such task.
            RuntimeError: a pod is not running.
        """
        return self._own_or_given(task_type, task_id, rpc_layer)

    def _pods(self, selector: str) -> list[Any]:
        if self._namespace is None:
            found = self._client.list_pod_for_all_namespaces(label_selector=selector)
        else:
            found = self._client.list_namespaced_pod(self._namespace, label_selector=selector)
        return sorted(found.items, key=lambda pod: str(pod.metadata.name))

    def _address(self, pod: Any) -> str:
        if pod.status.phase != "Running":
            raise RuntimeError(
                f"Pod {pod.metadata.name!r} is not running; phase: {pod.status.phase!r}. Make the resolver when all "
                "pods of the job run, or choose them with labels that only these have."
            )
        return join_address(pod.status.pod_ip if self._use_pod_ip else pod.status.host_ip, self._port)


def _make_client(location: KubernetesExecutableLocation) -> Any:
    client = import_optional("kubernetes.client", "kubernetes", "the Kubernetes client, or override_client")
    config = import_optional("kubernetes.config", "kubernetes", "the Kubernetes client, or override_client")
    if location is KubernetesExecutableLocation.WITHIN_CLUSTER:
        config.load_incluster_config()
    else:
        config.load_kube_config()
    return client.CoreV1Api()
