"""``ClusterSpec``: the tasks of a cluster and their addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["ClusterSpec", "ClusterSpecLike"]

Tasks = Sequence[str] | Mapping[int, str] | Mapping[str, str]


class ClusterSpec:
    """The tasks of each job of a cluster, by index, with their addresses, as ``tf.train.ClusterSpec``.

    Job names and addresses must be strings and are not looked at further. Two specs are equal if they have the same
    jobs with the same tasks; a spec is false if it has no job.

    Args:
        cluster: for each job its tasks' addresses ``"host:port"``: a list, or a dictionary from index to address, in
            which indices may be missing. Or another ``ClusterSpec``, whose jobs come out in alphabetical order.

    Raises:
        TypeError: ``cluster`` or a job's tasks are something else, or a name or an address is no string.
        ValueError: an index is no integer.

    Example:
        >>> spec = ts.cluster_resolver.ClusterSpec({"worker": ["host1:2222", "host2:2222"], "ps": {3: "host3:2222"}})
        >>> spec.task_address("worker", 1)
        'host2:2222'
        >>> spec
        ClusterSpec({'ps': {3: 'host3:2222'}, 'worker': ['host1:2222', 'host2:2222']})
    """

    def __init__(self, cluster: ClusterSpecLike) -> None:
        self._jobs: dict[str, dict[int, str]]
        if isinstance(cluster, ClusterSpec):
            self._jobs = {job: dict(tasks) for job, tasks in sorted(cluster._jobs.items())}
        elif isinstance(cluster, Mapping):
            self._jobs = {job: _tasks_by_index(job, tasks) for job, tasks in cluster.items()}
        else:
            raise TypeError(
                "A cluster must be a dictionary from job names to lists of addresses, such as "
                f"{{'worker': ['host1:2222', 'host2:2222']}}, or a ClusterSpec. Received: {cluster!r}"
            )

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs."""
        return list(self._jobs)

    def num_tasks(self, job_name: str) -> int:
        """Return how many tasks a job has; missing indices don't count.

        Args:
            job_name: the job.

        Raises:
            ValueError: there is no such job.
        """
        return len(self._tasks(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Return the indices of a job's tasks, in ascending order.

        Args:
            job_name: the job.

        Raises:
            ValueError: there is no such job.
        """
        return sorted(self._tasks(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Return the address of a task.

        Args:
            job_name: the task's job.
            task_index: its index there.

        Raises:
            ValueError: there is no such job, or no such task in it.
        """
        tasks = self._tasks(job_name)
        if task_index not in tasks:
            raise ValueError(f"No task with index {task_index!r} in job {job_name!r}. Its tasks are {sorted(tasks)}.")
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """Return the addresses of a job's tasks by index, with ``None`` for missing ones.

        Args:
            job_name: the job.

        Raises:
            ValueError: there is no such job, or it has no tasks.
        """
        tasks = self._tasks(job_name)
        if not tasks:
            raise ValueError(f"Job {job_name!r} has no tasks.")
        return [tasks.get(index) for index in range(max(tasks) + 1)]

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """Return for each job a list of its tasks' addresses, or a dictionary by index if indices are missing.

        An empty job gives an empty dictionary.
        """
        return {job: _as_list_if_dense(tasks) for job, tasks in self._jobs.items()}

    def _tasks(self, job_name: str) -> dict[int, str]:
        if job_name not in self._jobs:
            raise ValueError(f"No such job in cluster: {job_name!r}. Its jobs are {self.jobs}.")
        return self._jobs[job_name]

    def __bool__(self) -> bool:
        return bool(self._jobs)

    # tf compares a dictionary as it is: {job: {index: address}} can be equal to a spec, lists never are.
    def __eq__(self, other: object) -> bool:
        return self._jobs == (other._jobs if isinstance(other, ClusterSpec) else other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"ClusterSpec({dict(sorted(self.as_dict().items()))!r})"


ClusterSpecLike = Mapping[str, Tasks] | ClusterSpec


def _tasks_by_index(job: object, tasks: object) -> dict[int, str]:
    if not isinstance(job, str):
        raise TypeError(f"A job's name must be a string. Received: {job!r}")
    if isinstance(tasks, (list, tuple)):
        by_index = dict(enumerate(tasks))
    elif isinstance(tasks, Mapping):
        by_index = {_task_index(job, index): address for index, address in tasks.items()}
    else:
        raise TypeError(
            f"The tasks for job {job!r} must be a list or a dictionary from integers to strings. Received: {tasks!r}"
        )
    for index, address in by_index.items():
        if not isinstance(address, str):
            raise TypeError(f"The address of task {index} of job {job!r} must be a string. Received: {address!r}")
    return by_index


def _task_index(job: str, index: object) -> int:
    try:
        return int(index)  # type: ignore[call-overload, no-any-return]
    except ValueError:
        raise ValueError(f"The index of a task of job {job!r} must be an integer. Received: {index!r}") from None


def _as_list_if_dense(tasks: dict[int, str]) -> list[str] | dict[int, str]:
    indices = sorted(tasks)
    if indices and indices == list(range(len(indices))):
        return [tasks[index] for index in indices]
    return {index: tasks[index] for index in indices}
