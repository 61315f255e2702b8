"""ParameterServerStrategy over real server processes: the strategy itself, training, and checkpoints."""

import contextlib
import copy
import re
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import torchstrategy as ts
from torchstrategy.coordinator import ClusterCoordinator
from torchstrategy.experimental.partitioners import FixedShardsPartitioner, MinSizePartitioner

Simple = ts.cluster_resolver.SimpleClusterResolver
Spec = ts.cluster_resolver.ClusterSpec


@pytest.fixture(scope="module")
def cluster():
    with ts.testing.LocalCluster(num_workers=2, num_ps=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def large_cluster():
    with ts.testing.LocalCluster(num_workers=1, num_ps=3) as cluster:
        yield cluster


@pytest.fixture
def connect():
    strategies = []

    def make(cluster, *args, **kwargs):
        strategy = ts.ParameterServerStrategy(cluster.resolver(), *args, timeout_seconds=60, **kwargs)
        strategies.append(strategy)
        return strategy, ClusterCoordinator(strategy)

    yield make
    for strategy in strategies:
        strategy.close()


def make_model():
    torch.manual_seed(0)
    return nn.ModuleDict({
        "table": nn.Embedding(13, 4, dtype=torch.float64),
        "net": nn.Sequential(nn.Linear(4, 5, dtype=torch.float64), nn.Tanh(), nn.Linear(5, 1, dtype=torch.float64)),
    })  # fmt: skip


def train_step(model, optimizer, indices):
    optimizer.zero_grad()
    loss = model["net"](model["table"](indices)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(13, (6,), generator=generator) for _ in range(count)]


def train_plain(model, optimizer, data):
    for indices in data:
        train_step(model, optimizer, indices)


def assert_equal_models(own, other):
    for (name, value), expected in zip(own.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("partitioner", [None, FixedShardsPartitioner(3), MinSizePartitioner(8, 2)])
def test_one_function_at_a_time_trains_like_one_process(cluster, connect, partitioner):
    strategy, coordinator = connect(cluster, partitioner, max_staleness=0)
    with strategy.scope():
        model = make_model()
        optimizer = torch.optim.Adam(model.parameters(), 0.05)
    plain = make_model()
    plain_optimizer = torch.optim.Adam(plain.parameters(), 0.05)
    results = [coordinator.schedule(train_step, args=(model, optimizer, indices)) for indices in batches(20)]
    coordinator.join()
    losses = [train_step(plain, plain_optimizer, indices) for indices in batches(20)]
    torch.testing.assert_close(torch.stack([r.get() for r in results]), torch.stack(losses), rtol=0, atol=1e-12)
    assert_equal_models(model, plain)


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        lambda p: Scaled(p, 0.1),
        lambda p: torch.optim.Adam(p, torch.tensor(0.1)),
    ],
)
@pytest.mark.parametrize("gamma", [0.7, 0.999999])
def test_a_function_steps_with_the_rate_of_when_it_was_scheduled(cluster, connect, make_optimizer, gamma):
    strategy, coordinator = connect(cluster, max_staleness=0)
    with strategy.scope():
        model = make_model()
        optimizer = make_optimizer(model.parameters())
    plain = make_model()
    plain_optimizer = make_optimizer(plain.parameters())
    own, expected = (torch.optim.lr_scheduler.ExponentialLR(o, gamma) for o in (optimizer, plain_optimizer))
    for indices in batches(10):
        coordinator.schedule(train_step, args=(model, optimizer, indices))
        train_step(plain, plain_optimizer, indices)
        own.step()
        expected.step()
    coordinator.join()
    assert_equal_models(model, plain)


def test_a_checkpoint_restores_into_other_layouts(cluster, large_cluster, connect, tmp_path):
    strategy, coordinator = connect(cluster, FixedShardsPartitioner(2), max_staleness=0)
    with strategy.scope():
        model = make_model()
        optimizer = torch.optim.Adam(model.parameters(), 0.05)
        steps = ts.Variable(0, trainable=False, dtype=torch.int64)
    for indices in batches(4):
        coordinator.schedule(train_step, args=(model, optimizer, indices))
    coordinator.join()
    steps.assign(4)
    path = ts.train.Checkpoint(model=model, optimizer=optimizer, steps=steps).save(tmp_path / "ckpt")

    plain = make_model()
    plain_optimizer = torch.optim.Adam(plain.parameters(), 0.05)
    train_plain(plain, plain_optimizer, batches(4))
    alone, alone_steps = make_model().requires_grad_(True), torch.tensor(0)
    alone_optimizer = torch.optim.Adam(alone.parameters(), 0.05)
    ts.train.Checkpoint(model=alone, optimizer=alone_optimizer, steps=alone_steps).restore(path).assert_consumed()
    assert int(alone_steps) == 4
    assert_equal_models(alone, plain)
    train_plain(plain, plain_optimizer, batches(3))
    train_plain(alone, alone_optimizer, batches(3))
    assert_equal_models(alone, plain)

    other, other_coordinator = connect(large_cluster, FixedShardsPartitioner(5), max_staleness=0)
    with other.scope():
        other_model = make_model()
        other_optimizer = torch.optim.Adam(other_model.parameters(), 0.05)
        other_steps = ts.Variable(0, trainable=False, dtype=torch.int64)
    checkpoint = ts.train.Checkpoint(model=other_model, optimizer=other_optimizer, steps=other_steps)
    checkpoint.restore(path).assert_consumed()
    for indices in batches(3):
        other_coordinator.schedule(train_step, args=(other_model, other_optimizer, indices))
    other_coordinator.join()
    assert int(other_steps) == 4
    assert_equal_models(other_model, plain)

    mirrored = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    with mirrored.scope():
        mirrored_model = make_model()
        mirrored_optimizer = torch.optim.Adam(mirrored_model.parameters(), 0.05)
    ts.train.Checkpoint(model=mirrored_model, optimizer=mirrored_optimizer).restore(path).expect_partial()
    half = ts.nn.scale_regularization_loss

    def step(indices):
        mirrored_optimizer.zero_grad()
        half(mirrored_model["net"](mirrored_model["table"](indices)).square().mean()).backward()
        mirrored_optimizer.step()

    for indices in batches(3):
        mirrored.run(step, args=(indices,))
    assert_equal_models(mirrored_model, plain)


@contextlib.contextmanager
def most_memory():
    """Note the most memory, in bytes, that this process has of its own during a block."""
    noted = []
    ended = threading.Event()

    def watch():
        while not ended.is_set():
            status = Path("/proc/self/status").read_text()
            noted.append(1024 * int(re.search(r"RssAnon:\s+(\d+) kB", status).group(1)))
            ended.wait(0.005)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield noted
    finally:
        ended.set()
        thread.join()


@pytest.mark.slow
def test_a_checkpoint_larger_than_the_memory_it_takes(cluster, connect, tmp_path):
    strategy, coordinator = connect(cluster, FixedShardsPartitioner(16))
    rows = 1 << 20
    num_bytes = 4 * 32 * rows
    with strategy.scope():
        table = nn.Embedding(rows, 32, sparse=True)
        optimizer = torch.optim.SparseAdam(table.parameters(), 0.1)
    coordinator.schedule(_look_up, args=(table, optimizer))
    coordinator.join()
    checkpoint = ts.train.Checkpoint(table=table, optimizer=optimizer)
    with most_memory() as noted:
        path = checkpoint.save(tmp_path / "ckpt")
    assert max(noted) - noted[0] < num_bytes / 2
    assert (tmp_path / "ckpt-1.pt").stat().st_size > 3 * num_bytes
    assert list(tmp_path.glob(".spilled*")) == []
    first = table(torch.tensor([5])).detach()
    with torch.no_grad():
        table.weight.copy_(torch.zeros(()))
    assert not table(torch.tensor([5])).any()
    with most_memory() as noted:
        checkpoint.restore(path)
    assert max(noted) - noted[0] < num_bytes / 2
    torch.testing.assert_close(table(torch.tensor([5])).detach(), first)


def _look_up(table, optimizer):
    table(torch.tensor([5, 7])).sum().backward()
    optimizer.step()


def test_a_function_may_run_in_the_coordinators_program(cluster, connect):
    strategy, _ = connect(cluster)
    with strategy.scope():
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
    plain = copy.deepcopy(model)
    plain_optimizer = torch.optim.SGD(plain.parameters(), 0.05)
    with pytest.warns(UserWarning, match="the function runs here"):
        strategy.run(train_step, args=(model, optimizer, batches(1)[0]))
    train_step(plain, plain_optimizer, batches(1)[0])
    assert_equal_models(model, plain)


@pytest.mark.filterwarnings("ignore:ParameterServerStrategy.run was called")
def test_a_cut_embedding_trains_in_the_coordinators_program(cluster, connect):
    strategy, _ = connect(cluster, FixedShardsPartitioner(2))
    with strategy.scope():
        model = make_model()
        optimizer = torch.optim.Adam(model.parameters(), 0.05)
    plain = make_model()
    plain_optimizer = torch.optim.Adam(plain.parameters(), 0.05)
    for indices in batches(3):
        strategy.run(train_step, args=(model, optimizer, indices))
        train_step(plain, plain_optimizer, indices)
    assert_equal_models(model, plain)


def test_gradients_of_a_worker_are_applied_by_the_coordinator(cluster, connect):
    strategy, coordinator = connect(cluster, FixedShardsPartitioner(2))
    with strategy.scope():
        model = make_model()
        optimizer = torch.optim.Adam(model.parameters(), 0.05)
    plain = make_model()
    plain_optimizer = torch.optim.Adam(plain.parameters(), 0.05)

    def gradients(indices):
        model["net"](model["table"](indices)).square().mean().backward()
        return [parameter.grad for parameter in model.parameters()]

    for indices in batches(3):
        found = coordinator.schedule(gradients, args=(indices,)).get()
        for parameter, grad in zip(model.parameters(), found, strict=True):
            parameter.grad = grad
        optimizer.step()
        train_step(plain, plain_optimizer, indices)
    assert_equal_models(model, plain)


def test_round_robin_and_by_size(cluster, connect):
    strategy, _ = connect(cluster)
    with strategy.scope():
        made = [ts.Variable(0.0), ts.Variable(1, trainable=False), ts.Variable(torch.ones(3))]
    assert [v.placement[0][-20:] for v in made] == [f"/task:{k}/device:CPU:0" for k in (0, 1, 0)]
    strategy, _ = connect(cluster, placement="by_size")
    with strategy.scope():
        made = [ts.Variable(torch.ones(100)), ts.Variable(0.0), ts.Variable(0.0), ts.Variable(torch.ones(200))]
    assert [v.binding.spec.parts[0].ps for v in made] == [0, 1, 1, 1]


def test_strategy_attributes(cluster, connect):
    strategy, _ = connect(cluster)
    assert strategy.num_replicas_in_sync == 1
    assert strategy.cluster_resolver.task_type == "chief"
    assert strategy.extended.worker_devices == ("/device:CPU:0",)
    assert strategy.extended.parameter_devices == (
        "/job:ps/replica:0/task:0/device:CPU:0",
        "/job:ps/replica:0/task:1/device:CPU:0",
    )
    with strategy.scope():
        v = ts.Variable(1.0)
    assert strategy.extended.variable_created_in_scope(v)
    assert not strategy.extended.variable_created_in_scope(torch.zeros(1))
    with pytest.raises(ValueError, match="create_per_worker_dataset"):
        strategy.experimental_distribute_dataset(torch.zeros(3), batch_size=1)


@pytest.mark.parametrize(
    ("jobs", "task", "message"),
    [
        ({}, None, "no cluster to train on: .* Set TF_CONFIG"),
        ({"worker": ["127.0.0.1:1"]}, None, "at least one parameter server"),
        ({"ps": ["127.0.0.1:1"]}, None, "at least one worker"),
        ({"ps": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"], "chief": ["a:1", "b:1"]}, None, "at most one chief"),
        ({"ps": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"], "x": ["a:1"]}, None, "a job 'x'"),
        ({"ps": ["a:1"], "worker": ["b:1"], "master": ["c:1"]}, None, "'master' is called 'chief'"),
        ({"ps": ["127.0.0.1:1"], "worker": ["127.0.0.1:1"]}, None, "lists 127.0.0.1:1 twice, for ps 0 and worker 0"),
        ({"ps": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"]}, ("chief", 0), "which the cluster does not have"),
        ({"ps": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"]}, ("worker", 0), "run ts.Server"),
    ],
)
def test_a_wrong_cluster_is_refused(jobs, task, message):
    resolver = Simple(Spec(jobs), task_type=task and task[0], task_id=task and task[1])
    with pytest.raises(ValueError, match=message):
        ts.ParameterServerStrategy(resolver)


def test_wrong_arguments_are_refused(cluster):
    with pytest.raises(TypeError, match="cluster_resolver"):
        ts.ParameterServerStrategy({"ps": []})
    with pytest.raises(TypeError, match="variable_partitioner"):
        ts.ParameterServerStrategy(cluster.resolver(), 3)
    with pytest.raises(ValueError, match="placement must be one of"):
        ts.ParameterServerStrategy(cluster.resolver(), placement="random")
    with pytest.raises(ValueError, match="max_staleness"):
        ts.ParameterServerStrategy(cluster.resolver(), max_staleness=-1)


def test_a_missing_server_is_named():
    resolver = Simple(Spec({"ps": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"]}))
    with pytest.raises(ts.errors.DeadlineExceededError, match=r"No answer from /job:ps/task:0 at 127.0.0.1:1 within"):
        ts.ParameterServerStrategy(resolver, timeout_seconds=0.3)


def test_a_lazy_module_must_be_called_first(cluster, connect):
    strategy, coordinator = connect(cluster)
    with strategy.scope():
        lazy = nn.LazyLinear(2)
    with pytest.raises(ValueError, match="Call the module once with an example input"):
        coordinator.schedule(lazy, args=(torch.ones(1, 3),))


class Scaled(torch.optim.Optimizer):
    """Plain descent with an attribute of its own."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})
        self.factor = 2.0

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter -= self.factor * group["lr"] * parameter.grad


def test_an_optimizer_of_the_users(cluster, connect):
    strategy, coordinator = connect(cluster, FixedShardsPartitioner(2), max_staleness=0)
    with strategy.scope():
        model = make_model()
        optimizer = Scaled(model.parameters(), 0.05)
    plain = make_model()
    plain_optimizer = Scaled(plain.parameters(), 0.05)
    for indices in batches(3):
        coordinator.schedule(train_step, args=(model, optimizer, indices))
        train_step(plain, plain_optimizer, indices)
    assert coordinator.fetch(coordinator.schedule(lambda: optimizer.factor)) == 2.0
    coordinator.join()
    assert_equal_models(model, plain)


def test_a_refused_optimizer_is_refused_once(cluster, connect):
    strategy, coordinator = connect(cluster)
    scope = strategy.scope()
    scope.__enter__()
    model = make_model()
    refused = torch.optim.LBFGS(model.parameters())
    with pytest.raises(NotImplementedError, match="LBFGS"):
        scope.__exit__(None, None, None)
    with strategy.scope():
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
    coordinator.schedule(train_step, args=(model, optimizer, batches(1)[0]))
    coordinator.join()
    with pytest.raises(NotImplementedError, match="LBFGS"):
        coordinator.schedule(lambda: refused.step())


def test_workers_forget_functions_that_the_program_dropped(cluster, connect, monkeypatch):
    monkeypatch.setattr("torchstrategy.ps.coordinator.worker._MIN_KNOWN", 5)
    _, coordinator = connect(cluster)

    def schedule(k):
        return coordinator.schedule(lambda: k)

    for _ in range(30):
        assert coordinator.fetch([schedule(k) for k in range(10)]) == list(range(10))
    kept = 0.5
    assert coordinator.fetch([coordinator.schedule(lambda: kept) for _ in range(3)]) == [0.5] * 3
    assert sum(len(worker._known) for worker in coordinator._cluster.workers) < 200


def test_the_default_dtype_is_the_coordinators(cluster, connect):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        strategy, coordinator = connect(cluster, max_staleness=0)
        with strategy.scope():
            model = make_model()
            optimizer = torch.optim.NAdam(model.parameters(), 0.05)
        plain = make_model()
        plain_optimizer = torch.optim.NAdam(plain.parameters(), 0.05)
        for indices in batches(4):
            coordinator.schedule(train_step, args=(model, optimizer, indices))
            train_step(plain, plain_optimizer, indices)
        assert coordinator.schedule(torch.ones, args=(2,)).get().dtype == torch.float64
        coordinator.join()
        assert_equal_models(model, plain)
    finally:
        torch.set_default_dtype(before)
    _, coordinator = connect(cluster)
    assert coordinator.schedule(torch.ones, args=(2,)).get().dtype == before


def test_jobs_that_are_mixed_up_are_named(cluster):
    spec = cluster.cluster_spec.as_dict()
    swapped = Simple(Spec({"ps": spec["worker"], "worker": spec["ps"]}))
    with pytest.raises(ts.errors.UnavailableError, match="it is a worker and no parameter server; do all tasks have"):
        ts.ParameterServerStrategy(swapped, timeout_seconds=30)
    half = Simple(Spec({"ps": spec["ps"][:1], "worker": spec["ps"][1:]}))
    strategy = ts.ParameterServerStrategy(half, timeout_seconds=30)
    coordinator = ClusterCoordinator(strategy)

    def schedule_and_join():
        coordinator.schedule(len, args=("ab",))
        coordinator.join()

    with pytest.raises(ts.errors.UnavailableError, match="it is a parameter server and no worker"):
        schedule_and_join()
    strategy.close()
