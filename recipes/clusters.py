"""Clusters with parameter servers: the one that TF_CONFIG describes, or one that a recipe starts on this host.

``python clusters.py`` serves the task of TF_CONFIG until its standard input is closed. So the servers that a recipe
starts end with it, even if it is killed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import checks
from tqdm import tqdm

import torchstrategy as ts

Task = tuple[str, int]


def serve() -> bool:
    """Serve until Ctrl-C if TF_CONFIG says that this process is a worker or ps of a cluster with parameter servers.

    Returns:
        False at once where it is not: then it is the coordinator.
    """
    resolver = ts.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type not in ("worker", "ps") or "ps" not in resolver.cluster_spec().jobs:
        return False
    server = ts.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id)
    try:
        server.join()
    except KeyboardInterrupt:
        server.stop()
    return True


@contextlib.contextmanager
def find_or_start(
    num_ps: int, num_workers: int, log_path: Path, max_restarts: int
) -> Iterator[ts.cluster_resolver.ClusterResolver]:
    """Give the cluster that this process is to coordinate.

    Args:
        num_ps: parameter servers to start, where TF_CONFIG describes no cluster.
        num_workers: workers to start there.
        log_path: a folder for what they print.
        max_restarts: how often each worker is started again when it ends. Parameter servers are not, because the
            parameters are lost with them.

    Yields:
        A resolver for ``ts.ParameterServerStrategy``. Servers that were started end with the block.

    Raises:
        ValueError: a number is too small.
    """
    resolver = ts.cluster_resolver.TFConfigClusterResolver()
    if resolver.cluster_spec():
        yield resolver
        return
    options = {"cluster": {"ps": num_ps, "workers": num_workers, "max_restarts": max_restarts}}
    checks.integers(options, "cluster.ps", "cluster.workers")
    checks.integers(options, "cluster.max_restarts", least=0)
    servers = LocalServers(num_ps, num_workers, log_path, max_restarts)
    try:
        tqdm.write(f"Started {num_ps} parameter server(s) and {num_workers} worker(s); what they print: {log_path}")
        yield ts.cluster_resolver.SimpleClusterResolver(
            ts.cluster_resolver.ClusterSpec(servers.addresses), task_type="chief", task_id=0
        )
    finally:
        servers.stop()


class LocalServers:
    """Server processes of this host; a worker that ends is started again, as a cluster manager would.

    Args:
        num_ps: parameter servers.
        num_workers: workers.
        log_path: a folder for what they print.
        max_restarts: of each worker.
    """

    def __init__(self, num_ps: int, num_workers: int, log_path: Path, max_restarts: int) -> None:
        ports = iter(free_ports(num_ps + num_workers + 1))
        numbers = {"chief": 1, "worker": num_workers, "ps": num_ps}
        self.addresses = {job: [f"127.0.0.1:{next(ports)}" for _ in range(n)] for job, n in numbers.items()}
        self.processes: dict[Task, subprocess.Popen[bytes]] = {}
        self._log_path = log_path
        self._num_threads = max(1, (os.cpu_count() or 1) // (num_ps + num_workers))
        self._is_stopping = False
        self._lock = threading.Lock()
        log_path.mkdir(parents=True, exist_ok=True)
        tasks = [(job, index) for job in ("ps", "worker") for index in range(numbers[job])]
        for task in tasks:
            self._start(task)
        for task in tasks:
            restarts = max_restarts if task[0] == "worker" else 0
            threading.Thread(target=self._watch, args=(task, restarts), daemon=True).start()

    def stop(self) -> None:
        """End all of them."""
        with self._lock:
            self._is_stopping = True
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait()
            process.stdin.close()

    def _start(self, task: Task) -> None:
        job, index = task
        config = {"cluster": self.addresses, "task": {"type": job, "index": index}}
        environ = {"OMP_NUM_THREADS": str(self._num_threads), **os.environ, "TF_CONFIG": json.dumps(config)}
        with self._log_file(task).open("ab") as log:
            self.processes[task] = subprocess.Popen(
                [sys.executable, __file__],
                env=environ,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the recipe; they end with it
            )

    def _watch(self, task: Task, num_restarts: int) -> None:
        """Say that a server has ended, and start it again."""
        while True:
            status = self.processes[task].wait()
            with self._lock:
                if self._is_stopping:
                    return
                then = "starting it again" if num_restarts else "it stays away"
                tqdm.write(f"{task[0]} {task[1]} {describe(status)}; {then}. What it printed: {self._log_file(task)}")
                if not num_restarts:
                    return
                num_restarts -= 1
                self.processes[task].stdin.close()
                self._start(task)

    def _log_file(self, task: Task) -> Path:
        return self._log_path / f"{task[0]}_{task[1]}.log"


def free_ports(number: int) -> list[int]:
    """Return ports of this host that were free a moment ago."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [server.getsockname()[1] for server in sockets]
    for server in sockets:
        server.close()
    return ports


def describe(status: int) -> str:
    """Return in words how a process has ended."""
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"


def end_with_starter() -> None:
    """End this process when whoever holds the other end of its standard input is gone."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    threading.Thread(target=end_with_starter, daemon=True).start()
    if not serve():
        raise SystemExit("TF_CONFIG must say that this process is a worker or a parameter server.")
