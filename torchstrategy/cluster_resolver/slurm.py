"""``SlurmClusterResolver``: the tasks of a Slurm step."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, MutableMapping
from functools import cached_property
from typing import Any, NamedTuple

import torch

from torchstrategy.base.log import warn_once
from torchstrategy.cluster_resolver.cluster_spec import ClusterSpec
from torchstrategy.cluster_resolver.resolver import ClusterResolver

__all__ = ["SlurmClusterResolver", "expand_hostlist", "expand_tasks_per_node", "is_step_of_several"]

_PART = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_HOSTS = re.compile(r"([^\[\]]*)(?:\[([^\[\]]+)\])?")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?", re.ASCII)


def expand_hostlist(hostlist: str) -> list[str]:
    """Return the host names that Slurm's short form stands for, in its order.

    Args:
        hostlist: names separated by commas; a name may end in ranges of numbers in brackets. Numbers keep the leading
            zeros of their range; a range that runs backwards is empty.

    Raises:
        ValueError: the text has another form, such as two pairs of brackets in one name or text after one.

    Example:
        >>> from torchstrategy.cluster_resolver.slurm import expand_hostlist
        >>> expand_hostlist("gpu[08-10,12],login")
        ['gpu08', 'gpu09', 'gpu10', 'gpu12', 'login']
    """
    if not hostlist:
        return []
    parts = _PART.findall(hostlist)
    if not parts or ",".join(parts) != hostlist.removesuffix(","):
        raise _bad_hostlist(hostlist)
    return [host for part in parts for host in _expand_part(part, hostlist)]


def expand_tasks_per_node(tasks_per_node: str) -> list[int]:
    """Return the number of tasks on each host that Slurm's short form stands for.

    Args:
        tasks_per_node: numbers separated by commas; ``"4(x2)"`` is ``"4,4"``.

    Raises:
        ValueError: the text has another form.

    Example:
        >>> from torchstrategy.cluster_resolver.slurm import expand_tasks_per_node
        >>> expand_tasks_per_node("4(x2),3")
        [4, 4, 3]
    """
    counts: list[int] = []
    for part in tasks_per_node.split(","):
        match = _COUNT.fullmatch(part)
        if match is None:
            raise ValueError(f"Numbers of tasks must look like '4(x2),3'. Received: {tasks_per_node!r}")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _expand_part(part: str, hostlist: str) -> Iterator[str]:
    match = _HOSTS.fullmatch(part)
    if match is None:
        raise _bad_hostlist(hostlist)
    prefix, ranges = match.groups()
    if ranges is None:
        yield prefix
        return
    for one in ranges.split(","):
        found = _RANGE.fullmatch(one)
        if found is None:
            raise _bad_hostlist(hostlist)
        first, last = found[1], found[2] or found[1]
        yield from (f"{prefix}{number:0{len(first)}d}" for number in range(int(first), int(last) + 1))


def _bad_hostlist(hostlist: str) -> ValueError:
    return ValueError(f"Host names must look like 'n[01-03,7],login'. Received: {hostlist!r}")


_VISIBLE = "CUDA_VISIBLE_DEVICES"


class _Change(NamedTuple):
    environ: MutableMapping[str, str]  # held, so that no other mapping gets its id
    step: frozenset[tuple[str, str]]
    to: str
    before: str


# By the id of the environment: what a resolver of this process set the variable to. A second one starts from before.
_changes: dict[int, _Change] = {}


class _Place(NamedTuple):
    host: str
    local_rank: int


class SlurmClusterResolver(ClusterResolver):
    """Reads the variables that ``srun`` sets for each task of a step.

    Tasks are numbered as Slurm numbers them. Jobs share them in alphabetical order. ``task_type`` and ``task_id`` are
    ``None`` until ``cluster_spec`` was called, as in tf.

    Where the step doesn't say on which host a task is (``SLURM_NODEID``), hosts are taken in the alphabetical order of
    their names, as in tf. In a real step that order would give task 0, which runs on ``n9``, the address of ``n10``.

    Args:
        jobs: number of tasks of each job; ``None`` means that all are workers.
        port_base: port of the first task on each host; the others have the next ones.
        gpus_per_node: GPUs on each host; ``None`` means those that this process sees.
        gpus_per_task: GPUs for each task; ``None`` divides those of the host by the largest number of tasks on one.
        tasks_per_node: tasks on each host, or a dictionary from host to number; ``None`` reads Slurm's.
        auto_set_gpu: let ``cluster_spec`` set ``CUDA_VISIBLE_DEVICES`` to this task's GPUs; it must then be called
            before anything uses CUDA. Without GPUs, or where Slurm has given each task its own, nothing is set.
        rpc_layer: the protocol in front of addresses that ``master`` returns.
        environ: the environment variables to use instead of ``os.environ``.

    Raises:
        RuntimeError: a variable is missing, or ``jobs`` and hosts have different numbers of tasks.
        ValueError: a variable can't be read.

    Example:
        >>> environ = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_NODELIST": "n[1-2]"}
        >>> environ |= {"SLURM_STEP_TASKS_PER_NODE": "2,1"}
        >>> resolver = ts.cluster_resolver.SlurmClusterResolver(environ=environ, auto_set_gpu=False)
        >>> resolver.cluster_spec()
        ClusterSpec({'worker': ['n1:8888', 'n1:8889', 'n2:8888']})
        >>> resolver.get_task_info()
        ('worker', 1)
    """

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | Mapping[str, int] | None = None,
        auto_set_gpu: bool = True,  # noqa: FBT001, FBT002 - tf's position
        rpc_layer: str = "grpc",
        *,
        environ: MutableMapping[str, str] | None = None,
    ) -> None:
        self._environ = os.environ if environ is None else environ
        self._rank = self._number("SLURM_PROCID")
        self._jobs = dict(jobs) if jobs is not None else {"worker": self._number("SLURM_STEP_NUM_TASKS")}
        self._port_base = port_base
        self._gpus_per_node = gpus_per_node
        self._gpus_per_task = gpus_per_task
        self._auto_set_gpu = auto_set_gpu
        self._rpc_layer = rpc_layer
        self._tasks_on_host = self._count_tasks(tasks_per_node)
        self._places = self._place_tasks()
        if sum(self._jobs.values()) != len(self._places):
            raise RuntimeError(
                f"Requested {sum(self._jobs.values())} tasks but only {len(self._places)} were assigned. The jobs are "
                f"{self._jobs}, the hosts have {self._tasks_on_host}."
            )

    def cluster_spec(self) -> ClusterSpec:
        """Return the tasks of the step, find out which one this is, and set ``CUDA_VISIBLE_DEVICES`` if asked to.

        Raises:
            RuntimeError: Slurm has started this task on another host than its number says.
            ValueError: the host has fewer GPUs than its tasks need.
            IndexError: ``SLURM_PROCID`` is beyond the last task, so that it can't be given GPUs.
        """
        self._check_own_place()
        addresses = [f"{place.host}:{self._port_base + place.local_rank}" for place in self._places]
        cluster: dict[str, list[str]] = {}
        start = 0
        for job, num_tasks in sorted(self._jobs.items()):
            cluster[job] = addresses[start : start + num_tasks]
            if 0 <= self._rank - start < num_tasks:
                self.task_type, self.task_id = job, self._rank - start
            start += num_tasks
        if self._auto_set_gpu:
            self._set_visible_gpus()
        return ClusterSpec(cluster)

    def get_task_info(self) -> tuple[str | None, int | None]:
        """Return ``(task_type, task_id)``, which ``cluster_spec`` finds out."""
        return self.task_type, self.task_id

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the address of a task, this process's own unless told otherwise.

        Args:
            task_type: the task's job.
            task_id: its index there.
            rpc_layer: a protocol to put in front.

        Returns:
            The address; an empty string as long as the task is not known.

        Raises:
            ValueError: there is no such task.
        """
        return self._own_or_given(task_type, task_id, rpc_layer)

    def num_accelerators(
        self,
        task_type: str | None = None,  # noqa: ARG002
        task_id: int | None = None,  # noqa: ARG002
        config_proto: Any = None,  # noqa: ARG002
    ) -> dict[str, int]:
        """Return how many GPUs each task has, whatever the arguments are.

        Raises:
            ValueError: the host has fewer GPUs than its tasks need.
        """
        num_gpus = self._num_gpus_of_task
        return {"GPU": num_gpus} if num_gpus else {}

    @property
    def local_rank(self) -> int | None:
        """This task's number on its host; ``None`` if it is none of the step's. Not in tf."""
        return self._places[self._rank].local_rank if 0 <= self._rank < len(self._places) else None

    @property
    def local_size(self) -> int | None:
        """Number of tasks on this task's host; ``None`` if it is none of the step's. Not in tf."""
        in_step = 0 <= self._rank < len(self._places)
        return self._tasks_on_host[self._places[self._rank].host] if in_step else None

    def _variable(self, name: str) -> str:
        if name not in self._environ:
            raise RuntimeError(f"{name} not found in environment. Not running inside a SLURM step? Start with srun.")
        return self._environ[name]

    def _number(self, name: str) -> int:
        text = self._variable(name)
        try:
            return int(text)
        except ValueError:
            raise ValueError(f"{name} must be an integer. Received: {text!r}") from None

    # Where the tasks are

    @property
    def _is_real_step(self) -> bool:
        return "SLURM_NODEID" in self._environ

    def _count_tasks(self, tasks_per_node: int | Mapping[str, int] | None) -> dict[str, int]:
        """Return the number of tasks on each host, in the order in which tasks are given to hosts."""
        if isinstance(tasks_per_node, Mapping):
            found = {host: int(count) for host, count in tasks_per_node.items()}
        else:
            hosts = expand_hostlist(self._variable("SLURM_STEP_NODELIST"))
            if tasks_per_node is None:
                counts = expand_tasks_per_node(self._variable("SLURM_STEP_TASKS_PER_NODE"))
                if len(counts) != len(hosts):
                    raise RuntimeError(
                        f"SLURM_STEP_NODELIST has {len(hosts)} hosts, but SLURM_STEP_TASKS_PER_NODE has {len(counts)} "
                        f"numbers. Received: {hosts} and {counts}"
                    )
            else:
                counts = [int(tasks_per_node)] * len(hosts)
            found = dict(zip(hosts, counts, strict=True))
        if not self._is_real_step:
            return dict(sorted(found.items()))
        order = expand_hostlist(self._environ.get("SLURM_STEP_NODELIST", ""))
        return dict(sorted(found.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))

    def _place_tasks(self) -> list[_Place]:
        """Return for each task its host and its number there."""
        chunks = self._chunks_of_hosts()
        left = dict(self._tasks_on_host)
        places: list[_Place] = []
        while any(left.values()):
            for host, chunk in chunks.items():
                done = self._tasks_on_host[host] - left[host]
                taken = min(chunk, left[host])
                places += [_Place(host, local_rank) for local_rank in range(done, done + taken)]
                left[host] -= taken
        return places

    def _chunks_of_hosts(self) -> dict[str, int]:
        """Return how many consecutive tasks each host gets in its turn: all its own, unless srun has ``-m``."""
        distribution = self._environ.get("SLURM_DISTRIBUTION", "block") if self._is_real_step else "block"
        kind, _, size = distribution.lower().split(":")[0].split(",")[0].partition("=")
        if kind == "cyclic":
            return dict.fromkeys(self._tasks_on_host, 1)
        if kind == "plane":
            size = size or self._variable("SLURM_DIST_PLANESIZE")
            return dict.fromkeys(self._tasks_on_host, max(int(size), 1) if size.isdigit() else 1)
        return dict(self._tasks_on_host)

    def _check_own_place(self) -> None:
        if not self._is_real_step or not 0 <= self._rank < len(self._places):
            return
        hosts = expand_hostlist(self._environ.get("SLURM_STEP_NODELIST", ""))
        node = self._number("SLURM_NODEID")
        host = self._places[self._rank].host
        if 0 <= node < len(hosts) and hosts[node] != host:
            raise RuntimeError(
                f"Task {self._rank} should be on host {host}, but Slurm started it on {hosts[node]} (SLURM_NODEID="
                f"{node}), so other tasks would look for it in the wrong place. Start the step with "
                "`srun --distribution=block`, or give tasks_per_node as they are."
            )

    # GPUs

    @property
    def _step(self) -> frozenset[tuple[str, str]]:
        return frozenset((name, value) for name, value in self._environ.items() if name.startswith("SLURM_"))

    @cached_property
    def _visible_gpus(self) -> list[str]:
        """The GPUs of the host as ``CUDA_VISIBLE_DEVICES`` names them; read once, because this class sets it."""
        text = self._environ.get(_VISIBLE)
        if text is None:
            return [str(index) for index in range(torch.cuda.device_count())]  # CUDA itself must not start yet
        change = _changes.get(id(self._environ))
        if change is not None and (change.step, change.to) == (self._step, text):
            text = change.before
        return [name.strip() for name in text.split(",") if name.strip()]

    @property
    def _max_tasks_on_host(self) -> int:
        return max(self._tasks_on_host.values(), default=1) or 1

    @property
    def has_own_gpus(self) -> bool:
        """Whether Slurm has given each task GPUs of its own, so that all that this one sees are its own. Not in tf."""
        is_chosen = self._gpus_per_node is not None or self._gpus_per_task is not None
        if is_chosen or _VISIBLE not in self._environ or not self._visible_gpus:
            return False
        return "SLURM_GPUS_PER_TASK" in self._environ or len(self._visible_gpus) < self._max_tasks_on_host

    @property
    def _num_gpus_of_task(self) -> int:
        num_visible = len(self._visible_gpus) if self._gpus_per_node is None else self._gpus_per_node
        if self.has_own_gpus:
            return num_visible
        most = self._max_tasks_on_host
        per_task = num_visible // most if self._gpus_per_task is None else self._gpus_per_task
        too_few = 0 < num_visible < most if self._gpus_per_task is None else per_task * most > num_visible
        if too_few:
            raise ValueError(
                f"A host with {num_visible} GPUs has {most} tasks, which need {per_task or 1} each. Start fewer tasks "
                "on a host, or pass gpus_per_task=0 to train on CPUs."
            )
        return per_task

    def _set_visible_gpus(self) -> None:
        per_task = self._num_gpus_of_task
        if not 0 <= self._rank < len(self._places):
            raise IndexError(f"SLURM_PROCID={self._rank}, but the step has {len(self._places)} tasks, numbered from 0.")
        if not per_task or self.has_own_gpus:
            return
        names = self._visible_gpus
        if self._gpus_per_node is not None and len(names) < self._gpus_per_node:
            names = [str(index) for index in range(self._gpus_per_node)]
        first = self._places[self._rank].local_rank * per_task
        own = ",".join(names[first : first + per_task])
        if self._environ.get(_VISIBLE) != own:
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                warn_once(
                    f"SlurmClusterResolver sets {_VISIBLE}={own}, but CUDA was used before, so that this process keeps "
                    "the GPUs that it saw. Make the resolver, or the strategy with it, before anything uses a GPU."
                )
            _changes[id(self._environ)] = _Change(self._environ, self._step, own, ",".join(names))
            self._environ[_VISIBLE] = own


def is_step_of_several(environ: Mapping[str, str]) -> bool:
    """Say whether Slurm started this process as one of several tasks, and not a shell in which a user works.

    Args:
        environ: the environment variables.
    """
    is_shell = "SLURM_PTY_PORT" in environ and _has_terminal()  # steps that are started in the shell inherit the port
    count = environ.get("SLURM_STEP_NUM_TASKS", "1")
    return "SLURM_PROCID" in environ and count not in ("", "0", "1") and not is_shell


def _has_terminal() -> bool:
    try:
        return os.isatty(0)
    except OSError:
        return False
