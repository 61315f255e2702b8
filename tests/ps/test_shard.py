"""Parameter servers that save themselves, and those that take their place."""

import contextlib
import importlib
import logging
import os
import pickle
import secrets
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch

import torchstrategy as ts
from tests.clusters import new_cluster
from torchstrategy.checkpoint import fencing
from torchstrategy.checkpoint.storage import new_tensor, spilled_to
from torchstrategy.errors import DataLossError, FailedPreconditionError, NotFoundError, UnavailableError
from torchstrategy.ps import shard as shard_module
from torchstrategy.ps.client import ParameterClient
from torchstrategy.ps.layout import Placer
from torchstrategy.ps.links import ServerLink
from torchstrategy.ps.service import ParameterService
from torchstrategy.ps.shard import Shard
from torchstrategy.ps.transport.control_loop import ControlLoop
from torchstrategy.ps.transport.messages import Message
from torchstrategy.ps.transport.secret import Secret

WAIT_S = 30.0
NEVER_S = 1e6
SECRET = Secret(secrets.token_hex(32))
SESSION = SimpleNamespace(id="s", is_valid=True, role="coordinator", hello={"client": "c"})


class Counting(torch.optim.Optimizer):
    """What users write: it counts its steps in an attribute and in its group."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.5, "k": 0})
        self.num_steps = 0

    @torch.no_grad()
    def step(self):
        self.num_steps += 1
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["lr"] / (self.num_steps * group["k"]) * p.grad


class Job:
    """A server that saves itself, and a client that waits for it."""

    def __init__(self, folder, grace_s=20.0):
        self.cluster = new_cluster(["ps", "worker"])
        self.folder = folder
        self.server = self.start()
        self.loop = ControlLoop()
        self.link = ServerLink(0, self.cluster["ps"][0], grace_s=grace_s)
        self.link.connect(self.loop, {"role": "coordinator", "incarnation": 1})
        assert self.link.wait(WAIT_S)
        self.client = ParameterClient([self.link])
        self.placer = Placer(1)

    def start(self):
        config = {"checkpoint_dir": self.folder, "save_checkpoints_secs": NEVER_S}
        return ts.Server(self.cluster, "ps", 0, config=config)

    def save(self):
        self.server._shard._save(self.server._service.held)

    def restart(self, *, is_killed=False):
        if is_killed:
            self.server._shard._ended.set()  # so that it is not saved
        self.server.stop()
        self.server = self.start()

    def create(self, number, value, *, trainable=True):
        spec = self.placer.place(number, f"v{number}", tuple(value.shape), value.dtype, trainable)
        self.client.create(spec, value)
        return spec

    def value(self, spec):
        return self.client.pull([spec], {})[spec.id][1]

    def close(self):
        self.loop.close()
        self.server.stop()


@pytest.fixture
def job(tmp_path):
    made = Job(str(tmp_path))
    yield made
    made.close()


def define(client, number, optimizer, specs):
    group = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    definition = {"class": type(optimizer), "defaults": optimizer.defaults}
    definition["groups"] = [{**group, "params": [spec.id for spec in specs]}]
    attributes = {"num_steps": 0} if isinstance(optimizer, Counting) else {}
    client.define_optimizer(number, pickle.dumps({**definition, "attributes": attributes}), specs)


VALUES = (
    torch.tensor(True),
    torch.tensor(7),
    torch.empty(0, 3),
    torch.arange(5, dtype=torch.bfloat16),
    torch.arange(100_000, dtype=torch.float64),
    torch.randn(3, 4, dtype=torch.complex64),
)


def test_all_values_are_there_again(job):
    specs = [job.create(number, value, trainable=number % 2 == 0) for number, value in enumerate(VALUES)]
    job.restart()
    for spec, value in zip(specs, VALUES, strict=True):
        assert torch.equal(job.value(spec), value)
        assert job.value(spec).dtype == value.dtype
    job.client.update(specs[4], "assign_add", torch.ones(100_000, dtype=torch.float64))
    assert torch.equal(job.value(specs[4]), VALUES[4] + 1)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, 0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "asgd": lambda p: torch.optim.ASGD(p, 0.1),
    "a user's": Counting,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_goes_on(job, name):
    """Its state, changed hyper-parameters, and what it keeps in its groups and attributes."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(40, 3, dtype=torch.float64, generator=generator)
    plain = torch.nn.Parameter(first.clone())
    optimizer = OPTIMIZERS[name]([plain])
    spec = job.create(0, first)
    define(job.client, 7, OPTIMIZERS[name]([torch.nn.Parameter(first.clone())]), [spec])
    for step in range(6):
        if step == 2:
            optimizer.param_groups[0]["lr"] = 0.03
            job.client.set_hyper(7, [{"lr": 0.03}])
        if step % 3 == 2:
            job.restart()
        plain.grad = torch.randn(40, 3, dtype=torch.float64, generator=generator)
        optimizer.step()
        job.client.push(7, {0: plain.grad})
    assert torch.allclose(job.value(spec), plain, rtol=0, atol=1e-12)
    with pytest.raises(Exception, match="There is an optimizer 7 already"):
        define(job.client, 7, optimizer, [spec])


def test_what_was_not_saved_is_lost_and_a_warning_says_so(job, caplog):
    spec = job.create(0, torch.zeros(4))
    job.save()
    versions = job.client.update(spec, "assign_add", torch.ones(4))
    job.restart(is_killed=True)
    job.client.update(spec, "assign_add", torch.full((4,), 5.0))  # waits, and makes as many changes as before
    known = {0: versions}
    assert (
        job.client.pull([spec], known)[0][1].tolist() == [5.0] * 4
    )  # versions of the lost values are never used again
    (line,) = [line for line in caplog.messages if "is back" in line]
    assert "restarted from its checkpoint of" in line
    assert "what changed after that is lost" in line


def test_what_is_written_in_pieces_is_written_anew(job, monkeypatch):
    """It would be mixed of old and new, for ever."""
    spec = job.create(0, torch.zeros(8))
    job.save()
    own, num_pieces = job.client._ask, 0

    def ask_in_between(kind, *args, **kwargs):
        nonlocal num_pieces
        num_pieces += kind == "write"
        if num_pieces == 3:
            job.restart(is_killed=True)
        return own(kind, *args, **kwargs)

    monkeypatch.setattr(job.client, "_ask", ask_in_between)
    job.client.write_from(spec, torch.ones(8), chunk_bytes=8)
    monkeypatch.undo()
    assert num_pieces == 8
    assert job.value(spec).tolist() == [1.0] * 8


def test_nothing_is_lost_if_the_server_was_stopped(job, caplog):
    spec = job.create(0, torch.zeros(4))
    job.save()
    job.client.update(spec, "assign_add", torch.ones(4))
    job.restart()
    assert job.value(spec).tolist() == [1.0] * 4
    assert any("is back" in line and "its variables are as they were" in line for line in caplog.messages)


def test_servers_that_end_one_after_another(job):
    """The second has not saved anything of its own but what it was restored from."""
    spec = job.create(0, torch.zeros(4))
    job.save()
    job.client.update(spec, "assign_add", torch.ones(4))
    for _ in range(2):
        job.restart(is_killed=True)
        assert job.value(spec).tolist() == [0.0] * 4


def test_what_is_lost_is_told_though_the_next_server_ends_well(job, caplog):
    """A loop starts the killed one again and is told to end, all before a client is back."""
    spec = job.create(0, torch.zeros(4))
    job.save()
    job.client.update(spec, "assign_add", torch.ones(4))
    job.server._shard._ended.set()  # killed
    job.server.stop()
    elsewhere = {**job.cluster, "ps": ["localhost:0"]}
    assert ts.Server(elsewhere, "ps", 0, config={"checkpoint_dir": job.folder}).stop()
    job.server = job.start()
    assert job.value(spec).tolist() == [0.0] * 4
    (line,) = [line for line in caplog.messages if "is back" in line]
    assert "what changed after that is lost" in line


def test_what_is_lost_is_told_to_who_does_not_wait(tmp_path, caplog):
    """It may have asked nothing while the server was away."""
    job = Job(str(tmp_path), grace_s=0.0)
    job.create(0, torch.zeros(4))
    job.save()
    before = job.link.incarnation
    job.restart(is_killed=True)
    deadline = time.monotonic() + WAIT_S
    while job.link.incarnation == before:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    job.close()
    assert any("what changed after that is lost" in line for line in caplog.messages)


def test_a_variable_that_was_not_saved_is_named(job):
    job.create(0, torch.zeros(4))
    job.save()
    late = job.create(1, torch.zeros(4))
    job.restart(is_killed=True)
    with pytest.raises(NotFoundError, match="after the checkpoint from which this server was started again"):
        job.value(late)


def test_a_server_without_a_checkpoint_is_another_one(job):
    """It was killed before anything was saved."""
    spec = job.create(0, torch.zeros(4))
    job.restart(is_killed=True)
    with pytest.raises(UnavailableError, match="was restarted, and its variables are gone"):
        job.value(spec)


def test_a_newer_coordinator_begins_anew(job):
    spec = job.create(0, torch.zeros(4))
    job.restart()
    loop = ControlLoop()
    link = ServerLink(0, job.cluster["ps"][0])
    link.connect(loop, {"role": "coordinator", "incarnation": 2})
    assert link.wait(WAIT_S)
    with pytest.raises(NotFoundError):
        ParameterClient([link]).pull([spec], {})
    loop.close()
    with pytest.raises(UnavailableError):
        job.value(spec)
    job.save()
    assert shard_module.read_checkpoint(_files(job.folder)[-1])["objects"]["shard"]["state"]["parts"] == []


def test_a_server_that_does_not_come_back(tmp_path):
    job = Job(str(tmp_path), grace_s=1.0)
    spec = job.create(0, torch.zeros(4))
    job.server.stop()
    with pytest.raises(UnavailableError, match=r"waited for in vain for 1 seconds.*restore the last checkpoint"):
        job.value(spec)
    job.close()


def _files(folder):
    folder = os.path.join(folder, "ps-0")
    return sorted(os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(".pt"))


def make(folder, *, task="/job:ps/task:0", secret=SECRET):
    """Return the service of a parameter server, and what saves it, without a listener."""
    service, replaced = ParameterService(), []
    incarnation = secrets.token_hex(8)
    shard = Shard(
        service,
        str(folder),
        task=task,
        incarnation=incarnation,
        secret=secret,
        every_s=NEVER_S,
        replaced=lambda: replaced.append(True),
    )
    service.admit({"role": "coordinator", "incarnation": 1, "client": "c"})
    return SimpleNamespace(service=service, shard=shard, replaced=replaced, incarnation=incarnation)


def ask(service, kind, number, *tensors, **fields):
    rows = {"create": [0, 0, "v", True], "update": [0, 0, "assign_add"], "pull": [0, 0, -1]}
    return service.tensor(
        SESSION, Message(kind, {"parts": [rows[kind]], **fields, **({"once": number} if number else {})}, tensors)
    )


def value_in(service):
    return ask(service, "pull", 0).tensors[0].tolist()


@pytest.fixture
def saved(tmp_path):
    """A server with one variable, and two checkpoints of it: of 1 and 2."""
    one = make(tmp_path)
    one.shard.start()
    ask(one.service, "create", 1, torch.zeros(2))
    for number in (1, 2):
        ask(one.service, "update", number, torch.ones(2))
        one.shard._try()
    yield one
    one.shard.close()


def test_a_request_whose_reply_was_lost_is_known(saved, tmp_path):
    two = make(tmp_path)
    two.shard.start()
    ask(two.service, "update", 2, torch.ones(2))
    assert value_in(two.service) == [2.0, 2.0]
    ask(two.service, "update", 3, torch.ones(2))
    assert value_in(two.service) == [3.0, 3.0]
    assert two.service.admit({"role": "worker"})["restored"].keys() == {saved.incarnation}
    two.shard.close()


@pytest.mark.parametrize("save", ["_try", "close"])
def test_a_change_is_not_saved_without_its_reply(saved, tmp_path, save):
    """Else the client, which has none, asks again, and the next server does it twice."""
    update, is_changed, may_reply = saved.service._answers["update"], threading.Event(), threading.Event()

    def slow(*args):
        reply = update(*args)
        is_changed.set()
        may_reply.wait(WAIT_S)
        return reply

    saved.service._answers["update"] = slow
    saved.service.held.num_changes += 1
    saver = threading.Thread(target=getattr(saved.shard, save))
    client = threading.Thread(target=ask, args=(saved.service, "update", 3, torch.ones(2)))
    client.start()
    assert is_changed.wait(WAIT_S)
    saver.start()
    saver.join(0.1)
    may_reply.set()
    saver.join(WAIT_S)
    client.join(WAIT_S)
    two = make(tmp_path)
    two.shard.start()
    ask(two.service, "update", 3, torch.ones(2))
    assert value_in(two.service) == [3.0, 3.0]
    two.shard.close()


def test_only_two_checkpoints_are_kept(saved, tmp_path):
    ask(saved.service, "update", 3, torch.ones(2))
    saved.shard._try()
    assert sorted(name for name in os.listdir(tmp_path) if name.endswith(".pt")) == ["shard-2.pt", "shard-3.pt"]
    before = {name: os.stat(tmp_path / name).st_mtime_ns for name in os.listdir(tmp_path)}
    saved.shard._try()  # nothing has changed
    assert before == {name: os.stat(tmp_path / name).st_mtime_ns for name in os.listdir(tmp_path)}


def damage(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def test_a_damaged_checkpoint(saved, tmp_path, caplog):
    damage(tmp_path / "shard-2.pt")
    two = make(tmp_path)
    two.shard.start()
    assert value_in(two.service) == [1.0, 1.0]
    assert any("shard-2" in line and "Going on from the checkpoint before it" in line for line in caplog.messages)
    two.shard.close()
    for name in os.listdir(tmp_path):
        if name.endswith(".pt"):
            damage(tmp_path / name)
    with pytest.raises(DataLossError, match="shard-"):
        make(tmp_path).shard.start()


@contextlib.contextmanager
def another_process(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(fencing, "_writer", lambda: "another process")
        yield


def test_a_process_that_was_replaced_saves_no_more(saved, tmp_path, caplog, monkeypatch):
    """Not even if the other one has not changed anything yet; and it serves no one any more."""
    two = make(tmp_path)
    with another_process(monkeypatch):
        two.shard.start()
    ask(saved.service, "update", 3, torch.ones(2))
    saved.shard._try()
    assert saved.replaced == [True]
    assert isinstance(saved.shard.failure, FailedPreconditionError)
    assert any("has been replaced, and serves no one any more" in line for line in caplog.messages)
    ask(two.service, "update", 3, torch.ones(2))
    with another_process(monkeypatch):
        two.shard.close()
    three = make(tmp_path)
    three.shard.start()
    assert value_in(three.service) == [3.0, 3.0]
    servers = three.service.held.restored
    assert servers[saved.incarnation] is not None  # which was replaced
    assert servers[two.incarnation] is None  # which has ended well
    three.shard.close()


def test_a_process_that_was_replaced_and_is_only_read_ends_as_well(saved, tmp_path, monkeypatch):
    two = make(tmp_path)
    with another_process(monkeypatch):
        two.shard.start()
    value_in(saved.service)
    saved.shard._try()
    assert saved.replaced == [True]
    with another_process(monkeypatch):
        two.shard.close()


def test_a_server_that_was_replaced_ends(tmp_path, monkeypatch):
    job = Job(str(tmp_path))
    job.create(0, torch.zeros(4))
    job.save()
    other = make(tmp_path / "ps-0", secret=job.server._listener.secret)
    with another_process(monkeypatch):
        other.shard.start()
    job.create(1, torch.zeros(4))  # which is saved soon
    with pytest.raises(FailedPreconditionError, match="another process has saved shard-2 there in the meantime"):
        job.server.join()
    job.server._shard._thread.join(WAIT_S)
    assert not job.server._shard._thread.is_alive()
    job.close()


def test_a_server_that_does_not_get_its_address_takes_no_ones_place(job, monkeypatch):
    spec = job.create(0, torch.zeros(4))
    job.save()
    with another_process(monkeypatch), pytest.raises(OSError, match="can't be listened at"):
        job.start()
    job.client.update(spec, "assign_add", torch.ones(4))
    job.server._shard._try()
    assert job.server._shard.failure is None
    assert job.value(spec).tolist() == [1.0] * 4


def test_a_directory_that_cannot_be_written_is_an_error_at_the_start(tmp_path):
    path = tmp_path / "file"
    path.touch()
    server = ts.Server(new_cluster(["ps"]), "ps", 0, config={"checkpoint_dir": str(path)}, start=False)
    with pytest.raises(NotADirectoryError, match="is a file, where a directory is needed"):
        server.start()
    path.unlink()
    server.start()
    assert server.stop()
    assert ts.Server(new_cluster(["ps"]), "ps", 0, config={"checkpoint_dir": str(path)}, start=False).stop()


def test_checkpoints_of_others_are_refused(saved, tmp_path):
    with pytest.raises(ValueError, match="is a checkpoint of /job:ps/task:0, and this is /job:ps/task:1"):
        make(tmp_path, task="/job:ps/task:1").shard.start()
    with pytest.raises(ValueError, match="written with another secret than that of the given text"):
        make(tmp_path, secret=Secret(secrets.token_hex(32))).shard.start()


def test_a_pickle_that_somebody_has_changed_is_not_read(saved, tmp_path, monkeypatch):
    """Whoever can write to the directory can't run code in the server."""
    define_control(saved.service)
    saved.shard._try()
    read = shard_module.read_checkpoint

    def changed(*args, **kwargs):
        content = read(*args, **kwargs)
        content["objects"]["shard"]["state"]["optimizers"][7]["definition"] += b"x"
        return content

    monkeypatch.setattr(shard_module, "read_checkpoint", changed)
    monkeypatch.setattr(shard_module.pickle, "loads", lambda _: pytest.fail("It was read."))
    with pytest.raises(ValueError, match="another secret"):
        make(tmp_path).shard.start()


def define_control(service):
    plain = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], 1.0)
    groups = [{**{k: v for k, v in plain.param_groups[0].items() if k != "params"}, "params": [0]}]
    blob = pickle.dumps({"class": torch.optim.SGD, "defaults": plain.defaults, "groups": groups})
    answers = []
    session = SimpleNamespace(**vars(SESSION), reply=lambda number, message: answers.append(message))
    service.control(session, Message("optimizer", {"optimizer": 7, "sharded": []}, blobs=(blob,)))
    deadline = time.monotonic() + WAIT_S
    while not answers and time.monotonic() < deadline:
        time.sleep(0.01)
    assert answers[0].kind == "ok"


def test_an_optimizer_that_is_not_installed_here(saved, tmp_path, monkeypatch):
    define_control(saved.service)
    saved.shard._try()
    monkeypatch.setattr(shard_module.Definition, "load", lambda *_: importlib.import_module("of_the_program"))
    with pytest.raises(ImportError, match=r"shard-3 has an optimizer that can't be made here: No module named"):
        make(tmp_path).shard.start()


def test_a_full_disk_is_a_warning(saved, caplog, monkeypatch):
    ask(saved.service, "update", 3, torch.ones(2))
    with monkeypatch.context() as patch:
        patch.setattr(shard_module, "write_checkpoint", lambda *_: exec("raise OSError(28, 'No space left on device')"))
        saved.shard._try()
    assert any("could not be saved" in line and "No space left" in line for line in caplog.messages)
    assert saved.service.held.num_saved != saved.service.held.num_changes
    saved.shard._try()
    assert saved.service.held.num_saved == saved.service.held.num_changes


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="of POSIX")
def test_a_full_disk_does_not_end_the_process(tmp_path, monkeypatch):
    """What is written to a file in memory, for which there is no room, would be a SIGBUS."""
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: exec("raise OSError(28, 'No space left on device')"))
    with spilled_to(str(tmp_path)), pytest.raises(OSError, match="No space left"):
        new_tensor((1 << 20,), torch.float32)
    assert os.listdir(tmp_path) == []


def test_tasks_without_a_coordinator_are_told(tmp_path, caplog):
    one = make(tmp_path)
    one.shard.start()
    one.service.admit({"role": "chief", "client": "chief", "incarnation": 1})
    one.shard.close()
    assert any("saves nothing" in line and "their chief saves them" in line for line in caplog.messages)
    assert os.listdir(tmp_path) == []


def test_a_coordinator_after_tasks_without_one_is_saved(tmp_path):
    one = make(tmp_path)
    one.shard.start()
    assert not one.service.admit({"role": "chief", "client": "chief", "incarnation": 2})["is_saved"]
    one.service.superseded(3)
    assert one.service.admit({"role": "coordinator", "client": "c", "incarnation": 3})["is_saved"]
    one.shard.close()


def test_new_things_are_saved_soon(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_module, "_SOON_S", 0.0)
    one = make(tmp_path)
    one.shard.start()
    ask(one.service, "create", 1, torch.zeros(2))
    deadline = time.monotonic() + WAIT_S
    while one.service.held.num_saved != one.service.held.num_changes:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    one.shard.close()


@contextlib.contextmanager
def server_process(cluster, folder):
    addresses = [f"--{job}={','.join(own)}" for job, own in cluster.items()]
    command = [sys.executable, "-m", "torchstrategy", "server", *addresses, "--job=ps", "--task=0"]
    command += ["--checkpoint-dir", str(folder), "--save-checkpoints-secs", "0.2"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_changes_of_a_program_are_made_once_while_servers_are_told_to_end(tmp_path, caplog):
    """As Kubernetes does when a node is emptied."""
    cluster = new_cluster(["ps", "worker"])
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(server_process(cluster, tmp_path))
        loop = ControlLoop()
        stack.callback(loop.close)
        link = ServerLink(0, cluster["ps"][0], grace_s=60.0)
        link.connect(loop, {"role": "coordinator", "incarnation": 1})
        assert link.wait(60)
        client = ParameterClient([link])
        spec = Placer(1).place(0, "v", (1000,), torch.float64, True)
        client.create(spec, torch.zeros(1000, dtype=torch.float64))
        num_changes, is_over = 0, threading.Event()

        def change():
            nonlocal num_changes
            while not is_over.is_set():
                client.update(spec, "assign_add", torch.ones(1000, dtype=torch.float64))
                num_changes += 1

        thread = threading.Thread(target=change)
        thread.start()
        for _ in range(3):
            before = num_changes
            while num_changes < before + 100:
                time.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
            process = stack.enter_context(server_process(cluster, tmp_path))
        is_over.set()
        thread.join(60)
        assert set(client.pull([spec], {})[0][1].tolist()) == {float(num_changes)}
    assert not [line for line in caplog.messages if "is lost" in line]


@pytest.mark.slow
def test_training_goes_on_when_servers_are_killed(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    config = {"checkpoint_dir": str(tmp_path), "save_checkpoints_secs": 0.3}
    with ts.testing.LocalCluster(2, 2, config=config) as cluster:
        strategy = ts.ParameterServerStrategy(cluster.resolver())
        coordinator = ts.coordinator.ClusterCoordinator(strategy)
        with strategy.scope():
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
            optimizer = torch.optim.Adam(model.parameters(), 0.01)

        def step(seed):
            x = torch.randn(16, 4, generator=torch.Generator().manual_seed(seed))
            optimizer.zero_grad()
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            return float(loss)

        results = []
        for index in (0, 1, 0):
            results += [coordinator.schedule(step, args=(number,)) for number in range(100)]
            coordinator.join()
            time.sleep(0.7)
            results += [coordinator.schedule(step, args=(number,)) for number in range(100)]
            cluster.kill("ps", index)
            time.sleep(0.3)
            cluster.restart("ps", index)
        coordinator.join()
        assert len([result.fetch() for result in results]) == 600
        assert results[-1].fetch() < 0.3 * results[0].fetch()
        assert sum("was restarted from its checkpoint" in line for line in caplog.messages) == 3
        strategy.close()
