"""Which task of its cluster a process is, as a ``RunConfig`` says it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torchstrategy.cluster_resolver.cluster_spec import ClusterSpec
from torchstrategy.cluster_resolver.multi_worker_util import task_count
from torchstrategy.cluster_resolver.tf_config import task_in, task_index
from torchstrategy.strategies.strategy import Strategy

__all__ = ["Task", "TaskType", "read_task"]


class TaskType:
    """The jobs of a cluster.

    Example:
        >>> ts.estimator.TaskType.CHIEF
        'chief'
    """

    MASTER = "master"
    PS = "ps"
    WORKER = "worker"
    CHIEF = "chief"
    EVALUATOR = "evaluator"


class Task(NamedTuple):
    """What a process is in its cluster; the names are those of ``RunConfig``'s properties."""

    task_type: str = TaskType.WORKER
    task_id: int = 0
    is_chief: bool = True
    cluster_spec: ClusterSpec = ClusterSpec({})
    num_worker_replicas: int = 1
    num_ps_replicas: int = 0
    global_id_in_cluster: int | None = 0
    master: str = ""
    evaluation_master: str = ""


def read_task(tf_config: dict[str, Any], strategy: Strategy | None) -> Task:
    """Return the task that ``TF_CONFIG`` describes, or else the strategy's cluster resolver.

    Args:
        tf_config: the variable's value.
        strategy: what training is distributed by. With one, the workers may do without a chief: worker 0 is it then.

    Raises:
        ValueError: the task is missing, or is not one of the cluster; or a cluster without a strategy has no chief.
        TypeError: the task has another form.
    """
    task = task_in(tf_config)
    cluster_spec = ClusterSpec(tf_config.get("cluster", {}))
    if cluster_spec:
        return _cluster_task(cluster_spec, task, tf_config, needs_chief=strategy is None)
    if task or strategy is None:
        return _local_task(task, tf_config)
    resolver = getattr(strategy, "cluster_resolver", None)
    cluster_spec = ClusterSpec({}) if resolver is None else resolver.cluster_spec()
    workers = strategy.workers
    if workers is not None and task_count(cluster_spec, "worker") + task_count(cluster_spec, "chief") != workers.size:
        # torchrun's resolver knows the address of rank 0 only.
        rank = workers.rank
        return Task(task_id=rank, is_chief=rank == 0, num_worker_replicas=workers.size, global_id_in_cluster=rank)
    if resolver is None or not cluster_spec or resolver.task_type is None:
        return _local_task(task, tf_config)
    task = {"type": resolver.task_type, "index": resolver.task_id}
    return _cluster_task(cluster_spec, task, tf_config, needs_chief=False)


def _local_task(task: Mapping[str, Any], tf_config: dict[str, Any]) -> Task:
    if (task_type := task.get("type", TaskType.WORKER)) != TaskType.WORKER:
        raise ValueError(f'If "cluster" is not set in TF_CONFIG, task type must be worker. Received: {task_type!r}')
    if (task_id := task_index(task.get("index", 0))) != 0:
        raise ValueError(f'If "cluster" is not set in TF_CONFIG, task index must be 0. Received: {task_id}')
    return Task(master=tf_config.get("session_master", ""), evaluation_master=tf_config.get("eval_session_master", ""))


def _cluster_task(
    cluster_spec: ClusterSpec, task: Mapping[str, Any], tf_config: dict[str, Any], *, needs_chief: bool
) -> Task:
    chief_type = _check_chief(cluster_spec, needs_chief=needs_chief)
    task_type, task_id = _check_task(cluster_spec, task)
    evaluation_master = _evaluation_master(task_type, tf_config)
    if task_type == TaskType.EVALUATOR:
        if chief_type == TaskType.MASTER:
            raise ValueError(
                "If the cluster has a job `master`, there is no task type `evaluator`: the master evaluates."
            )
        # It trains with nobody, so it sees no cluster, as in tf.
        return Task(
            task_type,
            task_id,
            is_chief=False,
            num_worker_replicas=0,
            global_id_in_cluster=None,
            evaluation_master=evaluation_master,
        )
    has_chief = chief_type in cluster_spec.jobs
    return Task(
        task_type,
        task_id,
        is_chief=task_type == chief_type or (not has_chief and (task_type, task_id) == (TaskType.WORKER, 0)),
        cluster_spec=cluster_spec,
        num_worker_replicas=task_count(cluster_spec, TaskType.WORKER) + task_count(cluster_spec, chief_type),
        num_ps_replicas=task_count(cluster_spec, TaskType.PS),
        global_id_in_cluster=_global_id(cluster_spec, chief_type, task_type) + task_id,
        master=_master(cluster_spec, task_type, task_id, tf_config),
        evaluation_master=evaluation_master,
    )


def _check_chief(cluster_spec: ClusterSpec, *, needs_chief: bool) -> str:
    """Return what the chief's job is called."""
    if TaskType.MASTER in cluster_spec.jobs and TaskType.CHIEF in cluster_spec.jobs:
        raise ValueError(f"If the cluster has a job `master`, it can't have a `chief` too. Received: {cluster_spec}")
    chief_type = TaskType.MASTER if TaskType.MASTER in cluster_spec.jobs else TaskType.CHIEF
    count = task_count(cluster_spec, chief_type)
    if count == 0 and needs_chief:
        raise ValueError(
            f'If "cluster" is set in TF_CONFIG, it must have one "{chief_type}" node, unless '
            "RunConfig(train_distribute=) has a strategy that trains without one, such as MultiWorkerMirroredStrategy. "
            f"Received: {cluster_spec}"
        )
    if count > 1:
        raise ValueError(f'The "cluster" in TF_CONFIG must have only one "{chief_type}" node. Received: {cluster_spec}')
    return chief_type


def _check_task(cluster_spec: ClusterSpec, task: Mapping[str, Any]) -> tuple[str, int]:
    task_type, task_id = task.get("type"), task.get("index")
    if task_type is None:
        raise ValueError('If "cluster" is set in TF_CONFIG, task type must be set.')
    if task_id is None:
        raise ValueError('If "cluster" is set in TF_CONFIG, task index must be set.')
    if (task_id := task_index(task_id)) < 0:
        raise ValueError(f"Task index must be a non-negative number. Received: {task_id}")
    if task_type == TaskType.EVALUATOR:
        return task_type, task_id
    if task_type not in cluster_spec.jobs:
        raise ValueError(f"{task_type!r} is not a valid task type in the cluster: {cluster_spec}")
    if task_id not in cluster_spec.task_indices(task_type):
        raise ValueError(f"{task_id} is not a valid index for task type {task_type!r} in the cluster: {cluster_spec}")
    return task_type, task_id


def _evaluation_master(task_type: str, tf_config: dict[str, Any]) -> str:
    if task_type != TaskType.EVALUATOR and "eval_session_master" in tf_config:
        raise ValueError(
            'The key "eval_session_master" of TF_CONFIG must not be set for a task that is no evaluator. This task\'s '
            f"type: {task_type!r}"
        )
    return str(tf_config.get("eval_session_master", ""))


def _master(cluster_spec: ClusterSpec, task_type: str, task_id: int, tf_config: dict[str, Any]) -> str:
    if "session_master" in tf_config:
        return str(tf_config["session_master"])
    if sum(cluster_spec.num_tasks(job) for job in cluster_spec.jobs) == 1:
        return ""
    return f"grpc://{cluster_spec.task_address(task_type, task_id)}"


def _global_id(cluster_spec: ClusterSpec, chief_type: str, task_type: str) -> int:
    """Return the number of the job's first task: the chief comes first, then other jobs by name, ps last."""
    order = {chief_type: 0, TaskType.PS: 2}
    jobs = sorted(cluster_spec.jobs, key=lambda job: (order.get(job, 1), job))
    return sum(cluster_spec.num_tasks(job) for job in jobs[: jobs.index(task_type)])
