"""The recipe under a cluster that is described, and what happens when a server is lost."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from subprocess import PIPE

import pytest

from tests import warm
from tests.recipes import layouts
from torchstrategy.base.addresses import ReservedPorts

RECIPE = str(layouts.RECIPES / "parameter_server.py")
SMALL = ["steps_per_epoch=10", "folder=run"]
EPOCH = re.compile(r"^Epoch (\d), loss: \d\.\d{4}, accuracy: 0\.\d{4}, test accuracy: (0\.\d{4})$", re.MULTILINE)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return f"data={layouts.write_images(tmp_path_factory.mktemp('images') / 'images.npz', 1000, 200)}"


@pytest.mark.slow
def test_trains_and_a_second_start_goes_on(tmp_path, data):
    def start(*options):
        process = warm.run([sys.executable, RECIPE, *SMALL, data, *options], tmp_path)
        assert process.returncode == 0, process.stdout + process.stderr
        said.append(process.stdout)
        return EPOCH.findall(process.stdout)

    said = []

    first = start("epochs=2", "cluster.ps=1")
    assert [epoch for epoch, _ in first] == ["1", "2"]
    assert float(first[1][1]) > 0.3
    assert [epoch for epoch, _ in start("epochs=3", "strategy.placement=by_size", "strategy.max_staleness=2")] == ["3"]
    assert start("epochs=3") == []
    assert "Going on after epoch 3: " in said[-1]


@pytest.fixture
def cluster(tmp_path, data):
    """Processes of a chief and a ps that run the recipe, and a worker, a server that finds none of its modules."""
    with ReservedPorts(3) as ports:
        addresses = [[f"127.0.0.1:{port}"] for port in ports.numbers]
    jobs = dict(zip(("chief", "worker", "ps"), addresses, strict=True))
    programs = {"chief": [RECIPE, *SMALL, data], "worker": ["-m", "torchstrategy", "server"], "ps": [RECIPE]}
    with contextlib.ExitStack() as stack:

        def start(job, *options):
            task = json.dumps({"cluster": jobs, "task": {"type": job, "index": 0}})
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": "", "TF_CONFIG": task}
            command = [sys.executable, *programs[job], *options]
            with (tmp_path / job).open("w") as log:
                process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        yield start


@pytest.mark.slow
def test_a_cluster_is_made_of_the_same_command_or_of_bare_servers(cluster, tmp_path):
    servers = [cluster("ps"), cluster("worker")]
    chief = cluster("chief", "epochs=1")
    assert chief.wait(110) == 0, (tmp_path / "chief").read_text()
    assert [epoch for epoch, _ in EPOCH.findall((tmp_path / "chief").read_text())] == ["1"]
    for server in servers:
        assert server.poll() is None, "it waits for the next coordinator"
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=20) == 0


@pytest.mark.slow
def test_a_lost_parameter_server_ends_the_recipe(cluster, tmp_path):
    ps, _, chief = cluster("ps"), cluster("worker"), cluster("chief", "epochs=1000")
    end = time.monotonic() + 60
    while "Epoch 1, " not in (tmp_path / "chief").read_text():
        assert time.monotonic() < end, (tmp_path / "chief").read_text()
        time.sleep(0.05)
    ps.kill()
    assert chief.wait(timeout=60) == 1
    text = (tmp_path / "chief").read_text()
    # Which of the connections to the server notices its end first, and so how the message begins, is a matter of time.
    assert re.search(r"/job:ps/task:0 at 127\.0\.0\.1:\d+", text)
    assert "Error executing job" in text, "it raises"


@pytest.mark.slow
@pytest.mark.parametrize("task", ["worker", "chief", "evaluator"])
def test_a_task_that_has_nothing_to_do_ends(task, tmp_path):
    """One that served would wait for a coordinator for ever; an evaluator that coordinated would train as well."""
    jobs = ["chief", "evaluator", "ps", "worker"] if task == "evaluator" else ["chief", "worker"]
    cluster = {job: ["127.0.0.1:1"] for job in jobs}
    task = {"cluster": cluster, "task": {"type": task, "index": 0}}
    environment = {**os.environ, "TF_CONFIG": json.dumps(task)}
    with pytest.raises(subprocess.CalledProcessError) as caught:
        subprocess.run([sys.executable, RECIPE], cwd=tmp_path, env=environment, stderr=PIPE, timeout=100, check=True)
    assert b"This is no task of a chief, workers and ps in TF_CONFIG: " in caught.value.stderr
