"""Ways to start a recipe: in one process, by TF_CONFIG, torchrun or the library's own launcher."""

import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np

from tests import warm
from torchstrategy.base.addresses import ReservedPorts

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
TWO_LOCAL = "strategy.devices=[cpu:0,cpu:1]"


def write_images(path, num_train=230, num_test=50):
    """Write the first images of the recipes' data, so many; the last batch of a hundred has thirty."""
    with np.load(RECIPES / "data" / "fashion_mnist_slice.npz") as arrays:
        numbers = {"train": num_train, "test": num_test}
        np.savez(path, **{name: arrays[name][: numbers[name.partition("_")[0]]] for name in arrays})
    return path


def run_all(commands, folder):
    """Run commands, each with environment variables of its own, at the same time; return what the first one printed.

    Raises:
        RuntimeError: an exit status is not 0.
    """
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        paths = [Path(place) / str(i) for i in range(len(commands))]
        processes = [
            warm.start(command, folder, {**os.environ, "OMP_NUM_THREADS": "1", **environ}, path, path)
            for (command, environ), path in zip(commands, paths, strict=True)
        ]
        try:
            statuses = [process.wait(110) for process in processes]
        finally:
            for process in processes:
                process.kill()
        outputs = [path.read_text(encoding="utf-8") for path in paths]
    if any(statuses):
        raise RuntimeError(f"The processes ended with the exit statuses {statuses}:\n" + "\n".join(outputs))
    return outputs[0]


def alone(recipe, *options):
    return [([sys.executable, str(RECIPES / recipe), *options], {})]


def _started_by(module, recipe, options, nproc, max_restarts, strategy):
    flags = [f"--nproc-per-node={nproc}", f"--max-restarts={max_restarts}"]
    return [([sys.executable, "-m", *module, *flags, str(RECIPES / recipe), *options, *strategy], {})]


def launch(recipe, *options, nproc, max_restarts=0, strategy=()):
    return _started_by(["torchstrategy", "launch"], recipe, options, nproc, max_restarts, strategy)


def torchrun(recipe, *options, nproc, max_restarts=0, strategy=()):
    return _started_by(["torch.distributed.run"], recipe, options, nproc, max_restarts, strategy)


def tf_config(recipe, *options, num_workers, chief=False, evaluator=False, strategy=()):
    """Return a command for each worker; worker 0 is the chief if there is to be one, and the evaluator comes last."""
    with ReservedPorts(num_workers) as ports:
        addresses = [f"127.0.0.1:{port}" for port in ports.numbers]
    cluster = {"chief": addresses[:1], "worker": addresses[1:]} if chief else {"worker": addresses}
    tasks = [(task_type, index) for task_type, hosts in cluster.items() for index in range(len(hosts))]
    command = [sys.executable, str(RECIPES / recipe), *options, *strategy]
    return [
        (command, {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": task_type, "index": index}})})
        for task_type, index in [*tasks, *[("evaluator", 0)] * evaluator]
    ]
