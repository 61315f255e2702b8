"""What a task is in its cluster: chief or not, its number among the workers, and how many these are.

The rules are those of tf's module of the same name. Workers that train together are the chief, if there is one, and the
tasks of the job ``worker``, in this order.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchstrategy.base.context import current_frame
from torchstrategy.cluster_resolver.cluster_spec import ClusterSpec, ClusterSpecLike

__all__ = [
    "collective_leader",
    "coordination_leader",
    "has_worker_context",
    "hint_of_jobs",
    "id_in_cluster",
    "is_chief",
    "normalize_cluster_spec",
    "should_load_checkpoint",
    "should_save_checkpoint",
    "task_count",
    "validate_addresses",
    "validate_cluster_spec",
    "worker_count",
]

_TASK_TYPES = ("chief", "worker", "evaluator", "ps", None)


def normalize_cluster_spec(cluster_spec: ClusterSpecLike) -> ClusterSpec:
    """Return a cluster as a ``ClusterSpec``.

    Args:
        cluster_spec: a ``ClusterSpec`` or a dictionary as for its constructor.

    Raises:
        ValueError: it is something else.

    Example:
        >>> from torchstrategy.cluster_resolver.multi_worker_util import normalize_cluster_spec
        >>> normalize_cluster_spec({"worker": ["host1:2222"]})
        ClusterSpec({'worker': ['host1:2222']})
    """
    if isinstance(cluster_spec, ClusterSpec):
        return cluster_spec
    if isinstance(cluster_spec, dict):
        return ClusterSpec(cluster_spec)
    raise ValueError(f"cluster_spec must be a dictionary or a ClusterSpec. Received: {cluster_spec!r}")


def task_count(cluster_spec: ClusterSpecLike, task_type: str | None) -> int:
    """Return how many tasks a job has; 0 if it is not in the cluster.

    Args:
        cluster_spec: the cluster.
        task_type: the job.
    """
    spec = normalize_cluster_spec(cluster_spec)
    return spec.num_tasks(task_type) if task_type in spec.jobs else 0


def validate_cluster_spec(cluster_spec: ClusterSpecLike, task_type: str | None, task_id: int | None) -> None:
    """Check that a cluster is one whose workers can train together, and that a task is one of it.

    An evaluator need not be in the cluster.

    Args:
        cluster_spec: the cluster.
        task_type: the task's job: ``"chief"``, ``"worker"``, ``"evaluator"``, ``"ps"`` or ``None``.
        task_id: its index there.

    Raises:
        ValueError: a job has another name, there are several chiefs or evaluators, or the task is not in the cluster.

    Example:
        >>> from torchstrategy.cluster_resolver.multi_worker_util import validate_cluster_spec
        >>> validate_cluster_spec({"worker": ["host1:2222"]}, "worker", 0)
    """
    spec = normalize_cluster_spec(cluster_spec)
    names = "'chief', 'worker', 'evaluator' and 'ps'"
    if unknown := [job for job in spec.jobs if job not in _TASK_TYPES]:
        raise ValueError(f"The jobs of a cluster are {names}. Received also {unknown}: {spec}{hint_of_jobs(unknown)}")
    if task_type not in _TASK_TYPES:
        raise ValueError(f"The types of tasks are {names}. Received: {task_type!r}{hint_of_jobs([task_type])}")
    if task_type is not None and task_type != "evaluator" and task_type not in spec.jobs:
        raise ValueError(f"This task's type is {task_type!r}, but the cluster has the jobs {spec.jobs} only: {spec}")
    for job in ("chief", "evaluator"):
        if (count := task_count(spec, job)) > 1:
            raise ValueError(f"There must be at most one {job!r}. Received {count}: {spec}")
    if task_type in spec.jobs:
        _check_index(spec, task_type, task_id)


def hint_of_jobs(unknown: Sequence[str | None]) -> str:
    """Return what to write in the place of a job that only TensorFlow 1 has; empty for others.

    Args:
        unknown: the jobs that are not known.
    """
    return ". TensorFlow 1's 'master' is called 'chief'." if "master" in unknown else ""


def validate_addresses(spec: ClusterSpec, source: str) -> None:
    """Check that no address has a protocol in front, and that no two tasks that work together have the same one.

    An evaluator works with nobody.

    Args:
        spec: the cluster.
        source: who has it, for the message.

    Raises:
        ValueError: an address can't be that of its task.

    Example:
        >>> from torchstrategy.cluster_resolver.multi_worker_util import validate_addresses
        >>> validate_addresses(ts.train.ClusterSpec({"worker": ["a:1", "a:1"]}), "TF_CONFIG")
        Traceback (most recent call last):
        ValueError: TF_CONFIG lists a:1 twice, for worker 0 and worker 1. Each task needs a host and port of its own.
    """
    seen: dict[str, str] = {}
    for job in spec.jobs:
        for index in spec.task_indices(job):
            task, address = f"{job} {index}", spec.task_address(job, index)
            scheme, separator, rest = address.rpartition("://")
            if separator:
                raise ValueError(
                    f"The address of {task} in {source} must be host:port: write {rest!r}, without "
                    f"{scheme + separator!r}. Received: {address!r}"
                )
            other = task if job == "evaluator" else seen.setdefault(address, task)
            if other != task:
                raise ValueError(
                    f"{source} lists {address} twice, for {other} and {task}. Each task needs a host and port of its "
                    "own."
                )


def is_chief(cluster_spec: ClusterSpecLike, task_type: str | None, task_id: int | None) -> bool:
    """Say whether a task is the one that saves and prints for its group.

    Args:
        cluster_spec: the cluster.
        task_type: the task's job.
        task_id: its index there.

    Returns:
        True for a chief, an evaluator, and worker 0 of a cluster without chief.

    Raises:
        ValueError: as ``validate_cluster_spec``.

    Example:
        >>> from torchstrategy.cluster_resolver.multi_worker_util import is_chief
        >>> is_chief({"worker": ["host1:2222", "host2:2222"]}, "worker", 0)
        True
    """
    spec = normalize_cluster_spec(cluster_spec)
    validate_cluster_spec(spec, task_type, task_id)
    if task_type in ("chief", "evaluator"):
        return True
    return "chief" not in spec.jobs and task_type == "worker" and task_id == 0


def collective_leader(cluster_spec: ClusterSpecLike, task_type: str | None, task_id: int | None) -> str:
    """Return tf's name of the task that leads collectives.

    Args:
        cluster_spec: the cluster.
        task_type: the asking task's job.
        task_id: its index there.

    Returns:
        ``"/job:chief/replica:0/task:0"``, or that of worker 0 without a chief; an empty string for an empty cluster and
        an evaluator, which trains with nobody.

    Raises:
        ValueError: as ``validate_cluster_spec``, or the cluster has neither chief nor worker.
    """
    spec = normalize_cluster_spec(cluster_spec)
    if not spec:
        return ""
    validate_cluster_spec(spec, task_type, task_id)
    return "" if task_type == "evaluator" else _first_task(spec, ("chief", "worker"))


def coordination_leader(cluster_spec: ClusterSpecLike) -> str:
    """Return tf's name of the task at which a cluster meets.

    Args:
        cluster_spec: the cluster.

    Returns:
        The name of ps 0 if there is one, else that of the chief or of worker 0; an empty string for an empty cluster.

    Raises:
        ValueError: the cluster has none of them.
    """
    spec = normalize_cluster_spec(cluster_spec)
    return _first_task(spec, ("ps", "chief", "worker")) if spec else ""


def worker_count(cluster_spec: ClusterSpecLike, task_type: str | None) -> int:
    """Return with how many tasks a task of some type works, itself among them.

    Args:
        cluster_spec: the cluster.
        task_type: the task's job.

    Returns:
        The number of chiefs and workers, or of evaluators for an evaluator.

    Raises:
        ValueError: as ``validate_cluster_spec``, or for a ps.
        KeyError: an evaluator that is not in the cluster.

    Example:
        >>> from torchstrategy.cluster_resolver.multi_worker_util import worker_count
        >>> worker_count({"chief": ["host0:2222"], "worker": ["host1:2222"], "ps": ["host2:2222"]}, "worker")
        2
    """
    spec = normalize_cluster_spec(cluster_spec)
    validate_cluster_spec(spec, task_type, 0)
    if task_type not in ("chief", "worker", "evaluator"):
        raise ValueError(f"Workers are counted for a chief, a worker or an evaluator. Received: {task_type!r}")
    if task_type == "evaluator":
        if "evaluator" not in spec.jobs:
            raise KeyError("evaluator")
        return task_count(spec, "evaluator")
    return task_count(spec, "chief") + task_count(spec, "worker")


def id_in_cluster(cluster_spec: ClusterSpecLike, task_type: str | None, task_id: int | None) -> int:
    """Return a task's number among those that train together: the chief is 0, the workers follow.

    Args:
        cluster_spec: the cluster.
        task_type: the task's job.
        task_id: its index there.

    Raises:
        ValueError: as ``validate_cluster_spec``, or the task is a ps or none at all.

    Example:
        >>> from torchstrategy.cluster_resolver.multi_worker_util import id_in_cluster
        >>> id_in_cluster({"chief": ["host0:2222"], "worker": ["host1:2222"]}, "worker", 0)
        1
    """
    spec = normalize_cluster_spec(cluster_spec)
    validate_cluster_spec(spec, task_type, task_id)
    if task_type == "chief":
        return 0
    if task_type in ("worker", "evaluator") and task_id is not None:
        return task_id + (task_count(spec, "chief") if task_type == "worker" else 0)
    raise ValueError(f"A chief, a worker or an evaluator has a number. Received: {task_type!r}, {task_id!r}")


def has_worker_context() -> bool:
    """Say whether a strategy is current, so that ``should_save_checkpoint`` has an answer."""
    return current_frame() is not None


def should_save_checkpoint() -> bool:
    """Say whether this process saves checkpoints for the current strategy's processes.

    Raises:
        RuntimeError: no strategy is current.

    Example:
        >>> from torchstrategy.cluster_resolver.multi_worker_util import should_save_checkpoint
        >>> with ts.OneDeviceStrategy("cpu:0").scope():
        ...     should_save_checkpoint()
        True
    """
    frame = current_frame()
    if frame is None:
        raise RuntimeError("No strategy is current: ask inside `with strategy.scope():`, or ask strategy.is_chief.")
    return bool(frame.strategy.is_chief)


def should_load_checkpoint() -> bool:
    """Say whether this process loads checkpoints: every one does.

    Raises:
        RuntimeError: no strategy is current.
    """
    should_save_checkpoint()
    return True


def _check_index(spec: ClusterSpec, task_type: str, task_id: int | None) -> None:
    count = task_count(spec, task_type)
    if task_id is None or task_id >= count:
        raise ValueError(
            f"This task's index is {task_id!r}, but the cluster has {count} task(s) of type {task_type!r}, numbered "
            f"from 0: {spec}"
        )


def _first_task(spec: ClusterSpec, jobs: tuple[str, ...]) -> str:
    for job in jobs:
        if job in spec.jobs:
            return f"/job:{job}/replica:0/task:0"
    raise ValueError(f"A cluster needs a chief or a worker. Received: {spec}")
