"""``TFConfigClusterResolver``: the cluster that the environment variable ``TF_CONFIG`` describes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from torchstrategy.cluster_resolver.cluster_spec import ClusterSpec
from torchstrategy.cluster_resolver.resolver import ClusterResolver, format_master_url

__all__ = ["TFConfigClusterResolver", "names_no_cluster", "read_tf_config", "task_in", "task_index"]

_EXAMPLE = '{"cluster": {"worker": ["host1:2222", "host2:2222"]}, "task": {"type": "worker", "index": 0}}'


class TFConfigClusterResolver(ClusterResolver):
    """Reads the cluster and this process's task from ``TF_CONFIG``.

    The variable is read anew each time that something is asked. Arguments, and attributes that are assigned, win over
    it. Whether the task is one of the cluster is checked where it matters: by ``master`` and by strategies.

    Args:
        task_type: this process's job.
        task_id: its index there.
        rpc_layer: the protocol in front of addresses that ``master`` returns.
        environment: what ``environment`` returns.
        environ: the environment variables to read instead of ``os.environ``.

    Example:
        >>> tf_config = '{"cluster": {"worker": ["host1:2222", "host2:2222"]}, "task": {"type": "worker", "index": 1}}'
        >>> resolver = ts.cluster_resolver.TFConfigClusterResolver(environ={"TF_CONFIG": tf_config})
        >>> resolver.task_type, resolver.task_id, resolver.master()
        ('worker', 1, 'host2:2222')
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
        *,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._task_type = task_type
        self._task_id = task_id
        self._rpc_layer = rpc_layer
        self._environment = environment
        self._environ = os.environ if environ is None else environ

    @property
    def task_type(self) -> str | None:
        """This process's job; ``None`` if neither an argument nor ``TF_CONFIG`` names it."""
        if self._task_type is not None:
            return str(self._task_type)
        task = self._task()
        return str(task["type"]) if "type" in task else None

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """This process's index in its job; ``None`` if neither an argument nor ``TF_CONFIG`` has it.

        Raises:
            ValueError: the index is no number.
            TypeError: the index is ``null``.
        """
        if self._task_id is not None:
            return int(self._task_id)
        task = self._task()
        return task_index(task["index"]) if "index" in task else None

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def rpc_layer(self) -> str | None:
        """The protocol in front of addresses that ``master`` returns, from the argument, else from ``TF_CONFIG``'s."""
        return self._value("rpc_layer") if self._rpc_layer is None else self._rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    @property
    def environment(self) -> str | None:
        """What the constructor was given; ``TF_CONFIG`` has no part in it."""
        return self._environment

    def cluster_spec(self) -> ClusterSpec:
        """Return the cluster of ``TF_CONFIG``; an empty one if there is none.

        Raises:
            json.JSONDecodeError: ``TF_CONFIG`` is not JSON.
            TypeError: ``TF_CONFIG`` or its cluster has another form.
        """
        return ClusterSpec(self._value("cluster", {}))

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the address of a task, this process's own unless told otherwise.

        Args:
            task_type: the task's job.
            task_id: its index there.
            rpc_layer: a protocol to put in front.

        Returns:
            ``TF_CONFIG``'s ``session_master`` if there is one; an empty string if the cluster is empty or has only one
            task; else the address.

        Raises:
            ValueError: the task is not one of the cluster.
        """
        session_master = self._value("session_master")
        if session_master is not None:
            return str(session_master)
        spec = self.cluster_spec()
        if not spec or (len(spec.jobs) == 1 and len(spec.job_tasks(spec.jobs[0])) == 1):
            return ""
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        rpc_layer = self.rpc_layer if rpc_layer is None else rpc_layer
        return format_master_url(spec.task_address(task_type, task_id), rpc_layer)  # type: ignore[arg-type]

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> dict[str, int]:
        """Return how many accelerators a task has, by kind.

        Args:
            task_type: the task's job; this process's own task by default.
            task_id: its index there.
            config_proto: without meaning here.

        Raises:
            ValueError: the cluster has several tasks and this is none of them.
        """
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        return super().num_accelerators(task_type, task_id, config_proto)

    def _task(self) -> Mapping[str, Any]:
        return task_in(read_tf_config(self._environ))

    def _value(self, key: str, default: Any = None) -> Any:
        return read_tf_config(self._environ).get(key, default)


def names_no_cluster(resolver: TFConfigClusterResolver) -> bool:
    """Return whether ``TF_CONFIG`` has no cluster at all, not even an empty one."""
    return resolver._value("cluster") is None


def read_tf_config(environ: Mapping[str, str]) -> Mapping[str, Any]:
    """Return what ``TF_CONFIG`` holds; nothing where it is not set.

    Raises:
        json.JSONDecodeError: it is not JSON.
        TypeError: it is no object.
    """
    text = environ.get("TF_CONFIG", "{}")
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        hint = "Unset it" if not text.strip() else f"Write for example {_EXAMPLE}, or unset it"
        raise json.JSONDecodeError(
            f"TF_CONFIG is not JSON: {error.msg}. {hint}. Received: {text!r}", text, error.pos
        ) from None
    if value == []:  # tf looks for its keys in whatever there is
        return {}
    if not isinstance(value, Mapping):
        raise TypeError(f"TF_CONFIG must be a JSON object such as {_EXAMPLE}. Received: {text}")
    return value


def task_in(tf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``TF_CONFIG``'s task; nothing if it has none.

    Raises:
        TypeError: it is no object.
    """
    task = tf_config.get("task", {})
    if not isinstance(task, Mapping):
        raise TypeError(f"TF_CONFIG's task must be an object with type and index. Received: {task!r}")
    return task


def task_index(index: Any) -> int:
    """Return the index of ``TF_CONFIG``'s task as a number, of a fraction the whole one below, as tf does.

    Raises:
        ValueError: it is no number.
        TypeError: it is something else.
    """
    try:
        return int(index)
    except (ValueError, TypeError) as error:
        raise type(error)(f"TF_CONFIG's task.index must be an integer. Received: {index!r}") from None
