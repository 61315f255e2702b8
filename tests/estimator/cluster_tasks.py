"""Starting, watching and killing the tasks of an Estimator's cluster, each a process of this host."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

from tests.clusters import LAUNCHER_VARIABLES, new_cluster
from tests.warm import Program

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).parent / "cluster_program.py"


class Tasks:
    """The tasks of a cluster.

    Args:
        folder: where they write.
        jobs: the job of each task of the cluster.
        settings: what the program is told.
    """

    def __init__(self, folder, jobs, **settings):
        self.folder = Path(folder)
        self.model_dir = self.folder / "model"
        self.cluster = new_cluster(jobs)
        self.settings = {"folder": str(folder), "model_dir": str(self.model_dir), **settings}
        self.processes = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes.values():
            process.kill()
            process.wait()

    def start(self, *names):
        """Start tasks, such as ``"chief0"``."""
        for name in names:
            job, index = name.rstrip("0123456789"), int(name[-1])
            environment = {key: value for key, value in os.environ.items() if key not in LAUNCHER_VARIABLES}
            environment["TF_CONFIG"] = json.dumps({"cluster": self.cluster, "task": {"type": job, "index": index}})
            environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCHSTRATEGY_HEARTBEAT_S": "3"}
            output, errors = (self.folder / f"{name}.{ending}" for ending in ("out", "err"))
            output.unlink(missing_ok=True)
            self.processes[name] = Program(
                [PROGRAM, json.dumps(self.settings)], self.folder, environment, output, errors
            )

    def kill(self, name):
        """End a task at once."""
        self.processes[name].send_signal(signal.SIGKILL)
        self.processes[name].wait()

    def wait(self, *names, timeout_s=100.0):
        """Wait for the end of tasks; return their exit statuses."""
        deadline = time.monotonic() + timeout_s
        try:
            return [self.processes[name].wait(max(0.1, deadline - time.monotonic())) for name in names]
        except subprocess.TimeoutExpired as error:
            raise AssertionError(
                "\n".join(f"== {name}\n{self.log(name)[-3000:]}" for name in self.processes)
            ) from error

    def results(self, *names):
        """Wait until tasks end well; return what they print."""
        statuses = self.wait(*names)
        assert statuses == [0] * len(names), "\n".join(f"== {name}\n{self.log(name)[-3000:]}" for name in names)
        return [json.loads((self.folder / f"{name}.out").read_text()) for name in names]

    def log(self, name):
        """Return what a task has logged, since its first start."""
        return (self.folder / f"{name}.err").read_text()

    def steps(self, name):
        """Return number and loss of each step that a task has made, since its first start."""
        path = self.folder / f"{name}.steps"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for_step(self, name, step, timeout_s=120.0):
        """Wait until a task has made a step."""
        self.wait_until(lambda: any(done >= step for done, _ in self.steps(name)), f"step {step} of {name}", timeout_s)

    def wait_until(self, condition, what, timeout_s=120.0):
        """Wait until something is so."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not come:\n" + "\n".join(
                f"== {name}\n{self.log(name)[-3000:]}" for name in self.processes
            )
            time.sleep(0.05)
