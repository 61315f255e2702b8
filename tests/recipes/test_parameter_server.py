"""The recipe's command lines, with servers in processes of their own, and what happens when one of them is lost."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import clicks
import clusters
import parameter_server
import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

import torchstrategy as ts
from tests import warm
from tests.recipes import layouts

RECIPE = Path(__file__).parents[2] / "recipes" / "parameter_server.py"
ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": ""}
SMALL = ["model=mlp", "steps_per_epoch=20", "cluster.ps=1"]
SUMMARY = re.compile(
    r"^Test (?P<metric>\w+): (?P<value>0\.\d{4}) after (?P<epochs>\d) epochs with (?P<workers>\d) worker\(s\) and "
    r"(?P<ps>\d) parameter server\(s\) in [\d.]+ s; files: (?P<folder>.+)$",
    re.MULTILINE,
)
RESTORED = re.compile(r"^Test \w+ after restoring the saved model without strategy: ([\d.]+)$", re.MULTILINE)


def start(folder, *options):
    return warm.run([sys.executable, RECIPE, *options], folder, environment=ENVIRON)


def finished(process):
    assert process.returncode == 0, process.stdout + process.stderr
    return summary(process.stdout)


def summary(output):
    (match,) = SUMMARY.finditer(output)
    (restored,) = RESTORED.findall(output)
    assert float(restored) == pytest.approx(float(match["value"]), abs=1e-3)
    return match.groupdict()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_trains_and_a_second_start_goes_on(tmp_path):
    first = start(tmp_path, *SMALL, "epochs=2", "folder=run")
    found = finished(first)
    assert (found["metric"], found["epochs"], found["workers"], found["ps"]) == ("accuracy", "2", "2", "1")
    assert float(found["value"]) > 0.3
    assert len(re.findall(r"^Epoch \d, Loss: ", first.stdout, re.MULTILINE)) == 2
    run_path = Path(found["folder"])
    assert run_path == tmp_path / "run"
    assert len(list(run_path.glob("events.out.tfevents.*"))) == 1
    assert (run_path / "learning_curve.png").stat().st_size > 10_000
    assert sorted(path.name for path in (run_path / "servers").iterdir()) == [
        "ps_0.log",
        "worker_0.log",
        "worker_1.log",
    ]
    assert "Lost" not in first.stdout

    second = start(tmp_path, *SMALL, "epochs=3", "folder=run", "cluster.ps=2", "partitioner=fixed_shards")
    assert finished(second)["ps"] == "2"
    assert "Going on with epoch 3, from " in second.stdout
    assert re.findall(r"^Epoch (\d), Loss: ", second.stdout, re.MULTILINE) == ["3"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_clicks_are_predicted_as_well_as_by_one_process(tmp_path):
    data = {"num_rows": 5000, "num_train": 20_000, "num_test": 5000, "seed": 0}
    options = [f"data.{name}={value}" for name, value in data.items()]
    small_parts = ["partitioner.min_shard_bytes=1000", "strategy.placement=by_size", "strategy.max_staleness=2"]
    found = finished(start(tmp_path, "model=clicks", *options, *small_parts, "seed=1"))
    assert found["metric"] == "auc"
    assert float(found["value"]) == pytest.approx(train_alone(data), abs=0.02)


def train_alone(data):
    """Return the AUC of the clicks model after one pass in this process."""
    train_data, test_data = clicks.load_clicks(**data)
    torch.manual_seed(1)
    config = OmegaConf.load(RECIPE.parents[1] / "conf/model/clicks.yaml")
    model = clicks.ClickModel(data["num_rows"], 16, 64)
    optimizers = [
        torch.optim.Adam(model.dense.parameters(), lr=0.002),
        torch.optim.SparseAdam(model.embedding.parameters(), lr=0.003),
    ]
    for *inputs, labels in torch.utils.data.DataLoader(train_data, config.batch_size, shuffle=True, drop_last=True):
        for optimizer in optimizers:
            optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(model(*inputs), labels).backward()
        for optimizer in optimizers:
            optimizer.step()
    auc = ts.metrics.AUC(from_logits=True)
    with torch.no_grad():
        auc.update_state(test_data.tensors[2], model(*test_data.tensors[:2]))
    return float(auc.result())


@pytest.mark.slow
def test_a_cluster_is_made_of_the_same_command_or_of_bare_servers(tmp_path):
    """The ps runs the recipe, and the worker a server that finds none of the recipe's modules."""
    addresses = layouts.free_addresses(3)
    cluster = {"chief": addresses[:1], "worker": addresses[1:2], "ps": addresses[2:]}
    recipe = [str(RECIPE), *SMALL, "epochs=1", "folder=run"]

    def open_task(job, arguments):
        task = json.dumps({"cluster": cluster, "task": {"type": job, "index": 0}})
        return subprocess.Popen(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env={**ENVIRON, "TF_CONFIG": task},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    chief, ps = open_task("chief", recipe), open_task("ps", recipe)
    worker = open_task("worker", ["-m", "torchstrategy", "server"])
    try:
        output = chief.communicate(timeout=110)[0]
        assert chief.returncode == 0, output
        assert summary(output)["workers"] == "1"
        assert [path.name for path in tmp_path.iterdir()] == ["run"]
        assert not (tmp_path / "run" / "servers").exists(), "it has started none"
        for server in (ps, worker):
            assert server.poll() is None, "it waits for the next coordinator"
            server.send_signal(signal.SIGINT)
            assert server.wait(timeout=20) == 0
    finally:
        for task in (chief, ps, worker):
            task.kill()
            task.communicate()


def start_in_background(folder, *options):
    """Start the recipe; return its process and the file with what it prints."""
    output_path = folder / "output"
    with output_path.open("w") as output:
        command = [sys.executable, str(RECIPE), *options]
        return subprocess.Popen(command, cwd=folder, env=ENVIRON, stdout=output, stderr=output), output_path


def wait_for(condition, timeout_s=60.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def servers_of(folder):
    """Return the process ids of the servers that a recipe in a folder has started, by task."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if b"clusters.py" not in path.joinpath("cmdline").read_bytes() or path.joinpath("cwd").resolve() != folder:
                continue
            environ = dict(line.split("=", 1) for line in path.joinpath("environ").read_text().split("\0") if line)
            task = json.loads(environ["TF_CONFIG"])["task"]
            found[task["type"], task["index"]] = int(path.name)
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").exists(), reason="finds the servers as Linux tells them")
def test_a_lost_worker_is_replaced_and_servers_end_with_the_recipe(tmp_path):
    recipe, output_path = start_in_background(tmp_path, *SMALL, "cluster.workers=1", "epochs=1000", "folder=run")
    try:
        wait_for(lambda: "Epoch 1, " in output_path.read_text())
        first = servers_of(tmp_path)
        assert set(first) == {("worker", 0), ("ps", 0)}
        os.kill(first["worker", 0], signal.SIGKILL)
        wait_for(lambda: "worker 0 was killed by SIGKILL; starting it again" in output_path.read_text())
        num_epochs = output_path.read_text().count("Test Loss")
        wait_for(lambda: output_path.read_text().count("Test Loss") > num_epochs + 1)
        assert recipe.poll() is None
        second = servers_of(tmp_path)
        assert second["ps", 0] == first["ps", 0]
        assert second["worker", 0] != first["worker", 0]
    finally:
        recipe.kill()
        recipe.wait()
    wait_for(lambda: not servers_of(tmp_path))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").exists(), reason="finds the servers as Linux tells them")
def test_a_lost_parameter_server_ends_the_recipe(tmp_path):
    recipe, output_path = start_in_background(tmp_path, *SMALL, "epochs=1000", "folder=run")
    try:
        wait_for(lambda: "Epoch 1, " in output_path.read_text())
        os.kill(servers_of(tmp_path)["ps", 0], signal.SIGKILL)
        assert recipe.wait(timeout=60) == 1
    finally:
        recipe.kill()
        recipe.wait()
    text = output_path.read_text()
    # Which of the connections to the server notices its end first, and so how the message begins, is a matter of time.
    assert re.search(r"^.*/job:ps/task:0 at 127\.0\.0\.1:\d+.*\nThe same command with", text, re.MULTILINE)
    assert f"The same command with folder={tmp_path / 'run'} goes on after the last epoch." in text
    assert not servers_of(tmp_path)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((0, 1, 0), r"cluster\.ps must be an integer of at least 1\. Received: 0"),
        ((1, "two", 0), r"cluster\.workers must be an integer of at least 1\. Received: 'two'"),
        ((1, 1, -1), r"cluster\.max_restarts must be an integer of at least 0\. Received: -1"),
    ],
)
def test_wrong_numbers_of_servers(tmp_path, numbers, message):
    num_ps, num_workers, max_restarts = numbers
    with (
        pytest.raises(ValueError, match=message),
        clusters.find_or_start(num_ps, num_workers, tmp_path / "servers", max_restarts),
    ):
        pass
    assert not (tmp_path / "servers").exists()


def test_a_cluster_that_is_described_is_taken(monkeypatch, tmp_path):
    cluster = {"chief": ["localhost:1"], "ps": ["localhost:2"], "worker": ["localhost:3"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "chief", "index": 0}}))
    assert clusters.serve() is False
    with clusters.find_or_start(0, 0, tmp_path / "servers", 0) as resolver:
        assert resolver.cluster_spec().as_dict() == cluster
    assert not (tmp_path / "servers").exists()


def test_a_cluster_without_parameter_servers_is_refused(monkeypatch, tmp_path):
    task = {"cluster": {"worker": ["localhost:2"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(task))
    assert clusters.serve() is False
    with clusters.find_or_start(1, 1, tmp_path / "servers", 0) as resolver:
        pass
    with pytest.raises(ValueError, match="at least one parameter server, job 'ps'"):
        ts.ParameterServerStrategy(resolver)


def test_tables_with_sparse_gradients_have_an_optimizer_of_their_own():
    config = OmegaConf.create(
        {
            "optimizer": {"_target_": "torch.optim.Adam", "_partial_": True, "lr": 0.1},
            "embedding_optimizer": {"_target_": "torch.optim.SparseAdam", "_partial_": True, "lr": 0.2},
        }
    )
    model = nn.ModuleDict(
        {"table": nn.Embedding(3, 2, sparse=True), "names": nn.Embedding(3, 2), "top": nn.Linear(2, 1)}
    )
    optimizers = parameter_server.make_optimizers(config, model)
    dense, sparse = optimizers["optimizer"], optimizers["embedding_optimizer"]
    assert [parameter.shape for parameter in sparse.param_groups[0]["params"]] == [(3, 2)]
    assert sparse.param_groups[0]["params"][0] is model["table"].weight
    assert len(dense.param_groups[0]["params"]) == 3
    assert (dense.param_groups[0]["lr"], sparse.param_groups[0]["lr"]) == (0.1, 0.2)
    assert list(parameter_server.make_optimizers(config, nn.Linear(2, 1))) == ["optimizer"]
