"""Ray on two nodes of this host: the recipe, whose workers and nodes are lost, and parameter servers as actors."""

import ctypes
import fcntl
import importlib.util
import os
import re
import secrets
import shutil
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torchstrategy as ts
from tests.recipes import layouts
from tests.test_docs import blocks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: make test-engines"),
]
_CLONE_NEWNET, _SIOCSIFFLAGS, _IFF_UP = 0x40000000, 0x8914, 1
# Ray looks often whether workers live, and soon believes that a node is lost.
SETTINGS = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_DEDUP_LOGS": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "5",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_health_check_failure_threshold": "2",
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join([str(layouts.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
}
NODE = {"num_cpus": 1, "object_store_memory": 80_000_000}


def leave_network():
    """Give this process and those that it starts a network with nothing but the loopback, where that is allowed.

    Ray's nodes listen on the host's own address, whatever they are told.
    """
    if sys.platform == "linux" and ctypes.CDLL(None).unshare(_CLONE_NEWNET) == 0:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))


@pytest.fixture(scope="module")
def cluster():
    """One cluster for all tests, whose programs find it by RAY_ADDRESS."""
    leave_network()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SETTINGS.items():
            patch.setenv(name, value)
        from ray.cluster_utils import Cluster  # noqa: PLC0415 - its import reads the variables

        cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
        try:
            cluster.add_node(**NODE)
            patch.setenv("RAY_ADDRESS", cluster.address)
            yield cluster
        finally:
            cluster.shutdown()


def start(folder, *command):
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        cwd=folder,
        env=os.environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_parameter_servers_are_actors(cluster, tmp_path):
    """The program of the guide."""
    page = (layouts.ROOT / "docs" / "guide" / "engines.md").read_text(encoding="utf-8")
    (program,) = [code for _, code, _ in blocks(page) if "ts.Server" in code]
    (tmp_path / "program.py").write_text("import torch\nimport torchstrategy as ts\n" + program)
    with start(tmp_path, "program.py") as process:
        try:
            output, _ = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 0, output
    first, last = map(float, re.search(r"^loss: (\S+), after 20 steps (\S+)$", output, re.MULTILINE).groups())
    assert last < first / 2


def weights(place):
    reader = ts.train.load_checkpoint(f"{place}/training.pt")
    names = [name for name, _ in ts.train.list_variables(f"{place}/training.pt") if name.startswith("model")]
    assert names
    return {name: torch.as_tensor(reader.get_tensor(name)) for name in names}


def test_a_copy_of_the_recipe_loses_a_worker_and_a_node(cluster, tmp_path, monkeypatch):
    """All are named, and the weights are those of one replica that loses nothing."""
    options = copy_recipe(tmp_path, epochs=8)
    (node,) = [node for node in cluster.list_all_nodes() if node is not cluster.head_node]
    output = train(tmp_path, [*options, "kill_at_step=10"], lambda: cluster.remove_node(node, allow_graceful=False))
    assert "(Ray Train has set torchrun's variables (RANK=0, WORLD_SIZE=2))" in output
    assert "Rank 1 does not answer: its process has died" in output
    assert re.findall(r"Started training worker group of size (\d)", output) == ["2", "2", "1"]
    assert re.search("^Trained, steps: 80, epochs: 8, loss: ", output, re.MULTILINE), output
    compare_with_one_replica(tmp_path, options, monkeypatch)


def test_a_copy_of_the_recipe_grows_when_a_node_comes(cluster, tmp_path, monkeypatch):
    for node in cluster.list_all_nodes():
        if node is not cluster.head_node:
            cluster.remove_node(node)
    options = copy_recipe(tmp_path, epochs=30)
    recipe = tmp_path / "ray_train.py"
    program, line = recipe.read_text(), "            steps.assign_add(1)\n"
    assert line in program  # one worker takes its time, or it could have done all before another one comes
    waiting = "            if strategy.num_replicas_in_sync == 1:\n                __import__('time').sleep(0.2)\n"
    recipe.write_text(program.replace(line, line + waiting))
    output = train(
        tmp_path, [*options, "workers.elastic_resize_monitor_interval_s=1"], lambda: cluster.add_node(**NODE)
    )
    recipe.write_text(program)
    assert re.findall(r"Started training worker group of size (\d)", output) == ["1", "2"]
    assert re.search("^Trained, steps: 300, epochs: 30, loss: ", output, re.MULTILINE), output
    compare_with_one_replica(tmp_path, options, monkeypatch)


@pytest.mark.skipif(importlib.util.find_spec("hydra_plugins") is None, reason="needs hydra-ray-launcher")
def test_a_sweep_runs_as_tasks(cluster, tmp_path):
    images = layouts.write_images(tmp_path / "images.npz", num_train=64)
    shutil.copy(layouts.RECIPES / "custom_loop.py", tmp_path)
    shutil.copy(layouts.ROOT / "conf" / "custom_loop.yaml", tmp_path)
    options = ["-m", "hydra/launcher=ray", "seed=0,1", "epochs=1", "tune=false", f"data={images}"]
    options.append("+hydra.launcher.ray.init.object_store_memory=null")  # what the plugin asks for of a Ray of its own
    options.append(f"hydra.sweep.dir={tmp_path / 'multirun'}")  # Ray's processes work where the nodes were started
    with start(tmp_path, "custom_loop.py", *options) as process:
        try:
            output, _ = process.communicate(timeout=200)
        finally:
            process.kill()
    assert process.returncode == 0, output
    assert "Connecting to existing Ray cluster" in output
    assert output.count("Number of replicas: 1") == 2, output
    assert len(list((tmp_path / "multirun").rglob("ckpt-1.pt"))) == 2


def copy_recipe(folder, epochs):
    """Copy the recipe with its configuration; return what it is told, but for what happens to it."""
    images = layouts.write_images(folder / "images.npz", num_train=930)
    shutil.copy(layouts.RECIPES / "ray_train.py", folder)
    shutil.copy(layouts.ROOT / "conf" / "ray_train.yaml", folder)
    return ["dtype=float64", "global_batch_size=100", f"epochs={epochs}", "report_every=4", f"data={images}"]


def train(folder, options, at_step_20):
    """Run the recipe and call a function after a report of 20 steps or more; return what the program prints."""
    lines, has_come = [], False
    with start(folder, "ray_train.py", *options) as process:
        try:
            for line in process.stdout:
                lines.append(line)
                reported = re.search(r"'steps': (\d+)", line)
                if not has_come and reported and int(reported[1]) >= 20:
                    has_come = True
                    at_step_20()
        finally:
            process.kill()
    output = "".join(lines)
    assert process.returncode == 0, output
    return output


def compare_with_one_replica(folder, options, monkeypatch):
    (*_, last) = sorted(
        path.parent for path in (folder / "outputs" / "ray_train" / "training").glob("checkpoint_*/training.pt")
    )
    expected = of_one_replica(folder, options, monkeypatch)
    for name, value in weights(last).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-10)


def of_one_replica(folder, options, monkeypatch):
    """Return the weights of the recipe's function, called here by somebody who keeps what it reports."""
    monkeypatch.setitem(os.environ, "RAY_ADDRESS", "")
    program = f"""
import shutil, sys
import ray.train, ray_train
from hydra import compose, initialize_config_dir
with initialize_config_dir({str(folder)!r}, version_base="1.3"):
    settings = compose("ray_train", {options!r})
def keep(metrics, checkpoint):
    shutil.copytree(checkpoint.path, "one", dirs_exist_ok=True)
ray.train.get_checkpoint = ray.train.get_preemption_info = lambda: None
ray.train.report = keep
ray_train.train(settings)
"""
    subprocess.run([sys.executable, "-c", program], cwd=folder, check=True, timeout=100)
    return weights(Path(folder) / "one")
