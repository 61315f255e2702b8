"""The tasks of a cluster as processes of this host, each of which runs a recipe with a TF_CONFIG of its own.

``python tasks.py RECIPE OPTION...`` is how one is started: it ends with its starter, even if that is killed.
"""

from __future__ import annotations

import json
import os
import queue
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import clusters
from tqdm import tqdm

ATTEMPT = "RECIPE_ATTEMPT"  # the variable that tells a task how often it was started again


class LocalTasks:
    """Processes for the tasks of a cluster; one that fails is started again, as a cluster manager would.

    Args:
        recipe: the recipe's file.
        options: its command line.
        numbers: of the tasks of each job. An evaluator is started, but no part of the cluster, as in tf.
        folder: for what each one prints and for its run directory.
        max_restarts: of each task. Parameter servers are not started again, because the parameters are lost with them.
    """

    def __init__(
        self, recipe: Path, options: Sequence[str], numbers: Mapping[str, int], folder: Path, max_restarts: int
    ) -> None:
        self._recipe, self._options, self._folder = recipe, list(options), folder
        self._tasks = [(job, index) for job, number in numbers.items() for index in range(number)]
        ports = iter(clusters.free_ports(sum(numbers.values())))
        self._cluster = {
            job: [f"127.0.0.1:{next(ports)}" for _ in range(number)]
            for job, number in numbers.items()
            if number and job != "evaluator"
        }
        self._restarts_left = {task: 0 if task[0] == "ps" else max_restarts for task in self._tasks}
        self._num_threads = max(1, (os.cpu_count() or 1) // len(self._tasks))
        self._ended: queue.Queue[tuple[clusters.Task, int]] = queue.Queue()
        self._processes: dict[clusters.Task, subprocess.Popen[str]] = {}
        self._threads: list[threading.Thread] = []
        self._attempts = dict.fromkeys(self._tasks, 0)

    def run(self) -> None:
        """Start all tasks and wait until they have ended; parameter servers end with the others.

        Raises:
            RuntimeError: a task failed more often than it may.
        """
        try:
            for task in self._tasks:
                self._start(task)
            running = {task for task in self._tasks if task[0] != "ps"}
            while running:
                task, status = self._ended.get()
                if status == 0:
                    running.discard(task)
                else:
                    self._start_again(task, status)
        finally:
            for process in self._processes.values():
                process.kill()
            for thread in self._threads:
                thread.join()

    def _start(self, task: clusters.Task) -> None:
        job, index = task
        folder = self._log_path(task).parent
        folder.mkdir(parents=True, exist_ok=True)
        tf_config = {"cluster": self._cluster, "task": {"type": job, "index": index}}
        environ = {
            "OMP_NUM_THREADS": str(self._num_threads),
            "PYTHONUNBUFFERED": "1",
            **os.environ,
            "TF_CONFIG": json.dumps(tf_config),
            ATTEMPT: str(self._attempts[task]),
        }
        process = subprocess.Popen(
            [sys.executable, __file__, str(self._recipe), *self._options, f"hydra.run.dir={folder}"],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # Ctrl-C is for the starter; they end with it
        )
        self._processes[task] = process
        self._threads.append(threading.Thread(target=self._follow, args=(task, process), daemon=True))
        self._threads[-1].start()

    def _follow(self, task: clusters.Task, process: subprocess.Popen[str]) -> None:
        """Show what a task prints with its name, and keep it; then tell that it has ended."""
        job, index = task
        with process, self._log_path(task).open("a") as log:
            for line in process.stdout:
                log.write(line)
                log.flush()
                tqdm.write(f"[{job} {index}] {line.rstrip()}")
        self._ended.put((task, process.returncode))

    def _start_again(self, task: clusters.Task, status: int) -> None:
        what = f"{task[0]} {task[1]} {clusters.describe(status)}"
        if not self._restarts_left[task]:
            raise RuntimeError(f"{what}. What it printed: {self._log_path(task)}")
        tqdm.write(f"{what}; starting it again. What it printed: {self._log_path(task)}")
        self._restarts_left[task] -= 1
        self._attempts[task] += 1
        self._start(task)

    def _log_path(self, task: clusters.Task) -> Path:
        return self._folder / f"{task[0]}_{task[1]}" / "output.log"


def attempt() -> int:
    """Return how often this task was started again."""
    return int(os.environ.get(ATTEMPT, "0"))


if __name__ == "__main__":
    threading.Thread(target=clusters.end_with_starter, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
