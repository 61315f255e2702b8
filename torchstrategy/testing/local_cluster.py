"""A cluster of servers on this host, for programs with a coordinator, and ways to break it."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import types
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import forkserver, reduction
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import numpy as np
import torch

from torchstrategy.base.addresses import ReservedPorts
from torchstrategy.cluster_resolver.cluster_spec import ClusterSpec
from torchstrategy.cluster_resolver.simple import SimpleClusterResolver
from torchstrategy.errors import UnimplementedError
from torchstrategy.ps.parameter_server_strategy import close_strategies_of
from torchstrategy.ps.server import Server
from torchstrategy.testing.processes import process_context, signal_process

__all__ = ["LocalCluster"]

_PR_SET_PDEATHSIG = 1
_START_TIMEOUT_S = 120.0
_END_S = 2.0

Task = tuple[str, int]
_open_clusters: weakref.WeakSet[LocalCluster] = weakref.WeakSet()


class LocalCluster:
    """Workers and parameter servers, each a process of this host that runs a ``ts.Server``.

    The caller's process is the coordinator, ``chief`` 0. Servers survive coordinators, so that one cluster serves many
    tests. They end with the ``with`` block, and at the latest with this process. A server computes with one thread, or
    as many as ``OMP_NUM_THREADS`` says; what it prints goes to a file, which ``log`` reads.

    Args:
        num_workers: how many workers there are.
        num_ps: how many parameter servers.
        config: the servers' settings, as the ``config`` of ``ts.Server``.
        environment: environment variables that the servers get besides this process's.

    Raises:
        ValueError: a number is not positive.
        UnimplementedError: on Windows.

    Example:
        >>> with ts.testing.LocalCluster(num_workers=2, num_ps=1) as cluster:
        ...     cluster.cluster_spec.jobs, cluster.resolver().task_type
        (['chief', 'ps', 'worker'], 'chief')
    """

    def __init__(
        self,
        num_workers: int,
        num_ps: int = 1,
        *,
        config: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        if num_workers < 1 or num_ps < 1:
            raise ValueError(f"A cluster has at least 1 worker and 1 ps. Received: {num_workers} and {num_ps}")
        if not hasattr(signal, "SIGCONT"):
            raise UnimplementedError(
                f"A LocalCluster needs signals and inherited files, which {sys.platform} does not have. Use Linux "
                "(WSL) or macOS, or start each ts.Server in a terminal of its own: torchstrategy server."
            )
        self._config = config
        self._environment = dict(environment or {})
        self._servers: dict[Task, _ServerProcess] = {}
        self._resources = contextlib.ExitStack()
        self._finalizer = weakref.finalize(self, _close, self._servers, self._resources)
        _open_clusters.add(self)
        counts = {"chief": 1, "ps": num_ps, "worker": num_workers}
        addresses = {job: [self._reserve_address() for _ in range(count)] for job, count in counts.items()}
        self.cluster_spec = ClusterSpec(addresses)
        # Files without a name: nothing is left of them, also if this process is killed.
        self._logs = {task: tempfile.TemporaryFile() for task in self.tasks}  # noqa: SIM115 - closed with the others
        for file in self._logs.values():
            self._resources.enter_context(file)

    @property
    def tasks(self) -> list[tuple[str, int]]:
        """Job and index of each server."""
        return [(job, index) for job in ("ps", "worker") for index in self.cluster_spec.task_indices(job)]

    def start(self) -> LocalCluster:
        """Start the servers that don't run, and let those go on that are stopped; wait until all of them serve.

        Returns:
            The cluster.

        Raises:
            RuntimeError: a server did not start; the message has what it printed. Or the cluster was closed.
        """
        if not self._finalizer.alive:
            raise RuntimeError("The cluster was closed. Make a new one.")
        for server in self._servers.values():
            if server.is_alive:
                server.send_signal(signal.SIGCONT)
        missing = [task for task in self.tasks if task not in self._servers or not self._servers[task].is_alive]
        for task in missing:
            self._start(task)
        for task in missing:
            self._wait_until_ready(task)
        return self

    def close(self) -> None:
        """End the servers."""
        self._finalizer()

    def tf_config(self, job: str = "chief", index: int = 0) -> str:
        """Return the environment variable ``TF_CONFIG`` of a task, by default of the coordinator.

        Args:
            job: the task's job.
            index: its index.
        """
        return json.dumps({"cluster": self.cluster_spec.as_dict(), "task": {"type": job, "index": index}})

    def resolver(self) -> SimpleClusterResolver:
        """Return what a strategy of the coordinator needs."""
        return SimpleClusterResolver(self.cluster_spec, task_type="chief", task_id=0, rpc_layer="grpc")

    def pid(self, job: str, index: int) -> int:
        """Return the process id of a server.

        Args:
            job: its job.
            index: its index.
        """
        return int(self._server(job, index).process.pid)

    def is_alive(self, job: str, index: int) -> bool:
        """Say whether a server's process exists; a stopped one does.

        Args:
            job: its job.
            index: its index.
        """
        return self._server(job, index).is_alive

    def log(self, job: str, index: int) -> str:
        """Return what a server has printed, since the first start of its task.

        Args:
            job: its job.
            index: its index.
        """
        self._server(job, index)
        descriptor = self._logs[job, index].fileno()
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")

    def kill(self, job: str, index: int) -> None:
        """End a server's process at once, as the system does when memory runs out (SIGKILL).

        Args:
            job: its job.
            index: its index.
        """
        self._server(job, index).kill()

    def stop_signal(self, job: str, index: int) -> None:
        """Halt a server's process (SIGSTOP): its connections stay open, and it says nothing.

        On Linux this returns once all its threads have halted.

        Args:
            job: its job.
            index: its index.
        """
        self._server(job, index).halt()

    def cont(self, job: str, index: int) -> None:
        """Let a halted server go on (SIGCONT).

        Args:
            job: its job.
            index: its index.
        """
        self._server(job, index).send_signal(signal.SIGCONT)

    def restart(self, job: str, index: int) -> None:
        """Start a new process for a task, at its address; the old one is killed if it still is there.

        Args:
            job: the task's job.
            index: its index.

        Raises:
            RuntimeError: the server did not start.
        """
        self.kill(job, index)
        self._start((job, index))
        self._wait_until_ready((job, index))

    def __enter__(self) -> LocalCluster:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            close_strategies_of(self.cluster_spec)  # which would warn of servers that are lost
        finally:
            self.close()

    def _reserve_address(self) -> str:
        (port,) = self._resources.enter_context(ReservedPorts(1)).numbers
        return f"127.0.0.1:{port}"

    def _server(self, job: str, index: int) -> _ServerProcess:
        if (job, index) not in self._servers:
            raise ValueError(f"No server of {job} {index} was started. The cluster has {self.tasks}.")
        return self._servers[job, index]

    def _start(self, task: Task) -> None:
        context = process_context()
        here, there = context.Pipe()
        environment = {**os.environ, **self._environment}
        output = _Shared(self._logs[task].fileno())
        arguments = (there, environment, self.cluster_spec.as_dict(), *task, self._config, output)
        # Not a daemon of multiprocessing: such a process can't have the children that a DataLoader starts.
        process = context.Process(target=_serve, args=arguments, name=f"{task[0]}-{task[1]}")
        with _without_program():
            process.start()
        there.close()
        self._servers[task] = _ServerProcess(process, here)

    def _wait_until_ready(self, task: Task) -> None:
        connection = self._servers[task].connection
        with contextlib.suppress(EOFError, OSError):
            if connection.poll(_START_TIMEOUT_S) and connection.recv() == "ready":
                return
        raise RuntimeError(f"The server of {task[0]} {task[1]} did not start. It printed:\n{self.log(*task)}")


@dataclass
class _ServerProcess:
    process: Any
    connection: Connection

    @property
    def is_alive(self) -> bool:
        return bool(self.process.is_alive())

    def send_signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def halt(self) -> None:
        signal_process(self.process, signal.SIGSTOP)

    def ask_to_end(self) -> None:
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):  # it has ended in this moment
                self.send_signal(signal.SIGCONT)
        self.connection.close()  # the other end takes it for the end

    def end(self, deadline: float) -> None:
        self.process.join(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


class _Shared:
    """An open file that a new process gets, too."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __getstate__(self) -> Any:
        return reduction.DupFd(self.descriptor)

    def __setstate__(self, duplicate: Any) -> None:
        self.descriptor = duplicate.detach()


def _close(servers: dict[Task, _ServerProcess], resources: contextlib.ExitStack) -> None:
    for server in servers.values():
        server.ask_to_end()
    deadline = time.monotonic() + _END_S
    for server in servers.values():
        server.end(deadline)
    servers.clear()
    resources.close()


@atexit.register  # runs before multiprocessing's, which would wait for the servers
def _close_all() -> None:
    for cluster in list(_open_clusters):
        cluster.close()


def _serve(
    connection: Connection,
    environment: dict[str, str],
    cluster: dict[str, list[str]],
    job: str,
    index: int,
    config: Mapping[str, Any] | None,
    output: _Shared,
) -> None:
    """Be one task's server, in a process of its own, until the connection to the process that started it closes."""
    _end_with_parent()
    for standard in (1, 2):
        os.dup2(output.descriptor, standard)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the one that has the cluster ends us
    multiprocessing.set_start_method(None, force=True)  # a loader's processes start as they do in other programs
    os.environ.clear()
    os.environ.update(environment)
    threads = environment.get("OMP_NUM_THREADS", "").partition(",")[0]
    torch.set_num_threads(int(threads) if threads.isdigit() and int(threads) else 1)
    torch.seed()  # the forked generators are all the same
    np.random.seed()
    server = Server(cluster, job, index, config=config)
    connection.send("ready")
    with contextlib.suppress(EOFError, OSError):
        connection.recv()
    server.stop()


@contextlib.contextmanager
def _without_program() -> Iterator[None]:
    """Keep new processes from running the program's main module again: servers know nothing of it."""
    program = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = program


def _end_with_parent() -> None:
    """Be killed when the forking server ends, also while this process is stopped.

    That server ends when all processes have closed a pipe, which this one is given in case it wants to fork, too.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    server: Any = forkserver._forkserver
    os.close(server._forkserver_alive_fd)
    server._forkserver_alive_fd = server._forkserver_address = server._forkserver_pid = None  # it would get another one
