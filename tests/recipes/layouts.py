"""Ways to start a recipe: in one process, by TF_CONFIG, torchrun or its own launcher."""

import json
import os
import socket
import sys
import tempfile
from pathlib import Path

from tests import warm

RECIPES = Path(__file__).parents[2] / "recipes"
MULTI_WORKER = "strategy=multi_worker_mirrored"
TWO_LOCAL = "strategy.devices=[cpu:0,cpu:1]"


def run_all(commands, folder):
    """Run commands, each with environment variables of its own, at the same time; return what the first one printed.

    Raises:
        RuntimeError: an exit status is not 0.
    """
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


def launcher(recipe, *options, nproc):
    return alone(recipe, *options, MULTI_WORKER, f"launcher.nproc={nproc}")


def torchrun(recipe, *options, nproc, max_restarts=0):
    flags = [f"--nproc-per-node={nproc}", f"--max-restarts={max_restarts}"]
    command = [sys.executable, "-m", "torch.distributed.run", *flags, str(RECIPES / recipe), *options, MULTI_WORKER]
    return [(command, {})]


def tf_config(recipe, *options, num_workers, chief=False):
    addresses = free_addresses(num_workers)
    cluster = {"chief": addresses[:1], "worker": addresses[1:]} if chief else {"worker": addresses}
    tasks = [(task_type, index) for task_type, hosts in cluster.items() for index in range(len(hosts))]
    command = [sys.executable, str(RECIPES / recipe), *options, MULTI_WORKER]
    return [
        (command, {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": task_type, "index": index}})})
        for task_type, index in tasks
    ]


def free_addresses(number):
    """Return addresses of this host whose ports were free a moment ago."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    addresses = [f"127.0.0.1:{server.getsockname()[1]}" for server in sockets]
    for server in sockets:
        server.close()
    return addresses
