"""Chief and workers of one cluster, all in this process: each strategy has its own connections."""

import functools
import threading
import time

import pytest
import torch
import torch.nn.functional as F

import torchstrategy as ts
from tests.clusters import as_task, new_cluster
from torchstrategy.base.context import current_frame, pop_frame, push_frame
from torchstrategy.errors import DeadlineExceededError, InvalidArgumentError, UnavailableError
from torchstrategy.ps.between_graph import BetweenGraphParameterServerStrategy
from torchstrategy.ps.server import serve_until_chief_ends

X = torch.arange(12.0).reshape(4, 3) / 10
Y = X.sum(1, keepdim=True)


@pytest.fixture
def cluster():
    return new_cluster(["ps", "ps", "chief", "worker", "worker"])


@pytest.fixture
def servers(cluster):
    running = [ts.Server(cluster, "ps", index) for index in range(2)]
    yield running
    for server in running:
        server.stop()


@pytest.fixture
def start_task(cluster):
    """Make a task's strategy."""
    made = []

    def task(job, index=0, num_replicas=1, timeout_seconds=20.0):
        resolver = ts.cluster_resolver.SimpleClusterResolver(
            ts.cluster_resolver.ClusterSpec(cluster), task_type=job, task_id=index
        )
        devices = [f"cpu:{k}" for k in range(num_replicas)]
        made.append(BetweenGraphParameterServerStrategy(resolver, devices=devices, timeout_seconds=timeout_seconds))
        return made[-1]

    yield task
    for strategy in made:
        strategy.close()


@pytest.fixture
def start(servers, start_task):
    """Make a task's strategy where servers run."""
    return start_task


def wait_until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


class Program:
    """What each task runs: a linear model with a shared count of steps."""

    def __init__(self, strategy, optimizer=torch.optim.SGD, seed=0, **options):
        self.strategy = strategy
        torch.manual_seed(seed)
        with strategy.scope():
            self.step_count = ts.Variable(0, dtype=torch.int64, trainable=False, name="global_step")
            self.model = torch.nn.Linear(3, 1)
            self.optimizer = optimizer(self.model.parameters(), **{"lr": 0.1, **options})

    def loss(self, x, y):
        return F.mse_loss(self.model(x), y, reduction="sum") / 4

    def step(self, x=X, y=Y):
        def fn(x, y):
            self.optimizer.zero_grad()
            loss = self.loss(x, y)
            loss.backward()
            self.optimizer.step()
            return loss.detach()

        batch = next(iter(self.strategy.experimental_distribute_dataset([(x, y)])))
        loss = self.strategy.reduce("sum", self.strategy.run(fn, args=batch))
        self.step_count.assign_add(1)
        return loss

    @property
    def weights(self):
        self.strategy.run(lambda: None)  # pulls
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


def plain_weights(batches, optimizer=torch.optim.SGD, seed=0, **options):
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 1)
    optimizer = optimizer(model.parameters(), **{"lr": 0.1, **options})
    for x, y in batches:
        optimizer.zero_grad()
        (F.mse_loss(model(x), y, reduction="sum") / 4).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]), optimizer


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_steps_of_chief_and_workers_count_for_one_set_of_variables(start, num_replicas, optimizer):
    chief = Program(start("chief", num_replicas=num_replicas), optimizer)
    chief.step()
    workers = [Program(start("worker", index, num_replicas), optimizer, seed=index + 1) for index in range(2)]
    workers[0].step(2 * X)
    workers[1].step(X, 3 * Y)
    chief.step()

    expected, plain = plain_weights([(X, Y), (2 * X, Y), (X, 3 * Y), (X, Y)], optimizer)
    for program in (chief, *workers):
        assert torch.allclose(program.weights, expected, atol=1e-6)
        assert int(program.step_count) == 4
    state = chief.optimizer.state_dict()["state"]
    for key, values in plain.state_dict()["state"].items():
        for name, value in values.items():
            assert torch.allclose(state[key][name], value, atol=1e-6), name


def test_every_replica_of_a_process_sees_what_others_made_of_the_parameters(start):
    chief, worker = Program(start("chief", num_replicas=2)), None
    chief.step()
    worker = Program(start("worker", num_replicas=2))
    worker.step()
    own = chief.strategy.experimental_local_results(chief.strategy.run(lambda: chief.model.weight.detach().clone()))
    assert torch.equal(own[0], own[1])
    assert torch.equal(own[0].flatten(), worker.weights[:3])


def test_two_steps_in_one_run_use_new_parameters(start):
    program = Program(start("chief"))

    def twice():
        for _ in range(2):
            program.optimizer.zero_grad()
            program.loss(X, Y).backward()
            program.optimizer.step()

    program.strategy.run(twice)
    assert torch.allclose(program.weights, plain_weights([(X, Y)] * 2)[0])


def test_a_worker_waits_for_the_chief_and_its_own_values_do_not_count(start):
    chief = Program(start("chief"))
    worker = Program(start("worker"), seed=5)
    with torch.no_grad():
        worker.model.weight.fill_(100.0)
    seen = []
    thread = threading.Thread(target=lambda: seen.append(worker.weights.clone()))
    thread.start()
    thread.join(0.5)
    assert not seen  # the chief has not restored yet
    with torch.no_grad():
        chief.model.weight.fill_(7.0)
    chief.strategy.wait_until_ready()
    thread.join(20)
    assert seen[0][:3].tolist() == [7.0, 7.0, 7.0]


def test_a_worker_says_for_whom_it_has_waited_in_vain(start):
    worker = Program(start("worker", timeout_seconds=0.3))
    with pytest.raises(DeadlineExceededError, match=r"/job:chief/task:0 has not come .* within 0\.3 seconds"):
        worker.strategy.wait_until_ready()


def test_the_limit_of_one_wait_wins(start):
    worker = Program(start("worker"))
    with pytest.raises(DeadlineExceededError, match=r"within 0\.2 seconds"):
        worker.strategy.wait_until_ready(0.2)


def test_a_process_of_the_cluster_can_evaluate_alone(start, cluster, tmp_path):
    chief = Program(start("chief", num_replicas=2))
    chief.step()
    path = ts.train.Checkpoint(model=chief.model).write(str(tmp_path / "saved"))
    alone = chief.strategy.alone()
    assert alone.alone() is alone
    assert alone.num_replicas_in_sync == 2
    program = Program(alone, seed=4)
    ts.train.Checkpoint(model=program.model).restore(path)
    assert torch.equal(program.weights, chief.weights)
    program.step()  # of its own
    assert not torch.equal(program.weights, chief.weights)


def test_missing_parameter_servers_are_named(cluster):
    resolver = ts.cluster_resolver.SimpleClusterResolver(
        ts.cluster_resolver.ClusterSpec(cluster), task_type="chief", task_id=0
    )
    strategy = BetweenGraphParameterServerStrategy(resolver, timeout_seconds=0.3)
    with pytest.raises(DeadlineExceededError, match=r"/job:ps/task:0 at .*type 'ps'"):
        strategy.scope()


def bigger(strategy):
    with strategy.scope():
        ts.Variable(0, dtype=torch.int64, trainable=False, name="global_step")
        return torch.nn.Linear(4, 1)


def longer(strategy):
    program = Program(strategy)
    with strategy.scope():
        return program, torch.nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (bigger, r"Variable 1 is 'weight' of shape \[1, 4\] and float32 in this task and 'weight' of shape \[1, 3\]"),
        (lambda s: Program(s, torch.optim.Adam), r"Optimizer 0 is a Adam of the variables .* a SGD"),
        (longer, "This task has 5 variables and 1 optimizers, the chief 3 and 1; it lacks weight, bias"),
    ],
)
def test_another_program_is_refused(start, make, message):
    chief = Program(start("chief"))
    chief.strategy.wait_until_ready()
    strategy = start("worker")
    kept = make(strategy)  # noqa: F841 - what nobody has is not shared
    with pytest.raises(InvalidArgumentError, match=message):
        strategy.run(lambda: None)


def test_a_chief_that_comes_back_restores_and_the_workers_go_on(start, tmp_path):
    chief = Program(start("chief"), torch.optim.Adam)
    chief.step()
    path = ts.train.Checkpoint(model=chief.model, optimizer=chief.optimizer, step=chief.step_count).write(
        str(tmp_path / "saved")
    )
    worker = Program(start("worker"), torch.optim.Adam)
    worker.step()

    successor = Program(start("chief"), torch.optim.Adam, seed=9)
    checkpoint = ts.train.Checkpoint(model=successor.model, optimizer=successor.optimizer, step=successor.step_count)
    checkpoint.restore(path)
    successor.strategy.wait_until_ready()
    assert torch.allclose(successor.weights, plain_weights([(X, Y)], torch.optim.Adam)[0])

    worker.step(2 * X)
    assert int(successor.step_count) == 2
    expected, _ = plain_weights([(X, Y), (2 * X, Y)], torch.optim.Adam)
    assert torch.allclose(successor.weights, expected, atol=1e-6)
    assert float(successor.optimizer.state_dict()["state"][0]["step"]) == 2
    with pytest.raises(UnavailableError, match="another chief"):
        chief.step()


def test_gradients_of_variables_that_are_gone_are_left_out(start):
    chief = Program(start("chief"))
    chief.step()
    worker = Program(start("worker"))
    successors = []

    def in_another_process(fn):
        frame = current_frame()
        pop_frame(frame)
        try:
            return fn()
        finally:
            push_frame(frame)

    def run():
        worker.optimizer.zero_grad()
        worker.loss(X, Y).backward()
        successors.append(in_another_process(lambda: Program(start("chief"), seed=3)))
        in_another_process(successors[0].strategy.wait_until_ready)
        worker.optimizer.step()

    worker.strategy.run(run)
    assert torch.allclose(successors[0].weights, plain_weights([], seed=3)[0])
    assert torch.equal(worker.weights, successors[0].weights)


def test_a_step_that_one_server_has_made_is_not_made_there_again(start, servers):
    """A server whose connection was lost and is back does not know the worker, which attaches itself once more."""
    chief, worker = Program(start("chief")), Program(start("worker"))
    chief.step()
    worker.step()
    shared = worker.strategy._shared
    step = shared.step

    def forget_and_step(optimizers):
        servers[1]._service.training._attached.clear()
        step(optimizers)

    shared.step = forget_and_step
    worker.step()
    assert torch.allclose(worker.weights, plain_weights([(X, Y)] * 3)[0])


@pytest.mark.parametrize("job", ["chief", "worker"])
@pytest.mark.parametrize("kind", ["push", "pull", "update"])
def test_a_parameter_server_that_is_back(start, servers, job, kind):
    """The connections to both are lost before a reply has come; nothing is made twice or left out."""
    programs = {name: Program(start(name)) for name in ("chief", "worker")}
    programs["chief"].step()
    programs["worker"].step()
    lost = []
    for link, server in zip(programs[job].strategy._shared.client.links, servers, strict=True):
        lose_reply(server._service, link, kind, lost)
    programs[job].step()
    assert len(lost) == (1 if kind == "update" else 2)  # the count is on one of them
    assert torch.allclose(programs[job].weights, plain_weights([(X, Y)] * 3)[0])
    programs[job].step()
    assert int(programs[job].step_count) == 4


def test_a_chief_that_loses_a_server_before_it_publishes(start):
    chief = Program(start("chief"))
    client = chief.strategy._shared.client
    publish = client.publish

    def lose_and_publish():
        lose(client.links[0])
        publish()

    client.publish = lose_and_publish
    chief.step()
    worker = Program(start("worker"))
    worker.step()
    assert torch.allclose(chief.weights, plain_weights([(X, Y)] * 2)[0])


def lose(link):
    """Lose the connection, which is made again."""
    is_done = threading.Event()
    link.peer.loop.call_soon(lambda: (link.peer._lose("by the test"), is_done.set()))
    assert is_done.wait(20)


def lose_reply(service, link, kind, lost):
    """Lose the connection once when a request of a kind was answered."""
    answer = service.tensor

    def answer_and_lose(session, message):
        reply = answer(session, message)
        if message.kind == kind and link not in lost and session.hello["client"] == link.peer._hello["client"]:
            lost.append(link)
            lose(link)
        return reply

    service.tensor = answer_and_lose


def test_a_lost_parameter_server_is_named(start, servers):
    program = Program(start("chief"))
    program.step()
    servers[1].stop()
    with pytest.raises(UnavailableError, match=r"/job:ps/task:1.*Start all tasks"):  # noqa: PT012
        for _ in range(20):
            program.step()


def test_a_restarted_parameter_server_is_told_from_the_lost_one(start, servers, cluster):
    program = Program(start("chief"))
    program.step()
    servers[1].stop()
    servers[1] = ts.Server(cluster, "ps", 1)
    link = program.strategy._shared.client.links[1]
    wait_until(lambda: "was restarted" in str(link.failure))
    with pytest.raises(UnavailableError, match=r"/job:ps/task:1.*was restarted.*Start all tasks of the cluster again"):
        program.step()


def test_replicas_assign_to_a_shared_variable_together(start):
    strategy = start("chief", num_replicas=2)
    made = {}
    with strategy.scope():
        for aggregation in ts.VariableAggregation:
            made[aggregation.name] = ts.Variable(0.0, trainable=False, aggregation=aggregation, name=aggregation.name)

    def add(name):
        value = torch.tensor(ts.get_replica_context().replica_id_in_sync_group + 1.0)
        return made[name].assign_add(value)

    for name, expected in (("SUM", 3.0), ("MEAN", 1.5), ("ONLY_FIRST_REPLICA", 1.0)):
        results = strategy.experimental_local_results(strategy.run(add, args=(name,)))
        assert [float(result) for result in results] == [expected] * 2
        assert float(made[name]) == expected
    with pytest.raises(ValueError, match="needs an aggregation method"):
        strategy.run(add, args=("NONE",))


def test_a_shared_flag_is_seen_by_all(start):
    flags = []
    for job in ("chief", "worker"):
        strategy = start(job)
        with strategy.scope():
            flags.append(ts.Variable(False, dtype=torch.bool, trainable=False))
        strategy.wait_until_ready()
    assert not bool(flags[1])
    flags[0].assign(True)
    assert bool(flags[1])


def test_trainable_variables_are_shared(start):
    made = []
    for job in ("chief", "worker"):
        strategy = start(job, num_replicas=2)
        with strategy.scope():
            v = ts.Variable([1.0, 2.0], name="v")
            optimizer = torch.optim.SGD([v], lr=1.0)

        def fn(v=v, optimizer=optimizer):
            optimizer.zero_grad()
            v.sum().backward()
            optimizer.step()

        strategy.run(fn)
        made.append((strategy, v))
    made[0][0].run(lambda: None)
    assert [v.tolist() for _, v in made] == [[-3.0, -2.0]] * 2


def test_what_the_program_writes_to_parameters_is_assigned(start):
    chief = Program(start("chief", num_replicas=2))
    chief.step()
    worker = Program(start("worker"))
    with torch.no_grad():
        chief.model.weight.fill_(2.0)
    chief.step()
    expected = chief.weights
    assert torch.equal(worker.weights, expected)

    def clamp():
        with torch.no_grad():
            worker.model.weight.clamp_(max=0.5)

    worker.strategy.run(clamp)
    assert worker.weights[:3].max() <= 0.5
    assert torch.equal(chief.weights, worker.weights)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_what_is_written_where_torch_does_not_count_it_is_assigned(start, num_replicas):
    """To what ``data`` gives, in its place, and by a batch norm outside ``run``."""
    strategy = start("chief", num_replicas=num_replicas)
    with strategy.scope():
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
        v = ts.Variable([1.0, 2.0])
        optimizer = torch.optim.SGD([*model.parameters(), v], lr=0.0)

    def step():
        optimizer.zero_grad()
        (model.eval()(X) * v).sum().backward()
        optimizer.step()

    strategy.run(step)
    model[0].weight.data.fill_(2.0)
    model[0].bias.data = torch.full((2,), 3.0)
    v.data.fill_(4.0)
    model.train()(X)
    means = model[1].running_mean.clone()
    strategy.run(step)
    assert [set(value.flatten().tolist()) for value in (*model[0].parameters(), v)] == [{2.0}, {3.0}, {4.0}]
    assert torch.equal(model[1].running_mean, means)
    assert means.abs().min() > 0.1
    assert repr(model[0].bias) == repr(torch.nn.Parameter(torch.full((2,), 3.0)))


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_moving_averages_are_those_of_all_processes(start, num_replicas):
    def batches(strategy):
        with strategy.scope():
            norm = torch.nn.BatchNorm1d(3)
            optimizer = torch.optim.SGD(norm.parameters(), lr=0.0)

        def fn(x):
            optimizer.zero_grad()
            norm(x).sum().backward()
            optimizer.step()

        data = strategy.experimental_distribute_dataset([X])
        return norm, lambda: [strategy.run(fn, args=(batch,)) for batch in data]

    plain = torch.nn.BatchNorm1d(3)
    first, step = batches(start("chief", num_replicas=num_replicas))
    step()
    _norm, step_worker = batches(start("worker", num_replicas=num_replicas))
    step_worker()
    step()
    assert int(first.num_batches_tracked) == 3
    if num_replicas == 1:
        for _ in range(3):
            plain(X)
        assert torch.allclose(first.running_mean, plain.running_mean)
        assert torch.allclose(first.running_var, plain.running_var)


def test_buffers_with_infinite_values_are_assigned(start):
    """What an observer of ranges, or a best value so far, begins with can't be changed by adding."""

    class Lowest(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("lowest", torch.full((2,), float("inf")))

        def forward(self, value):
            self.lowest[0] = torch.minimum(self.lowest[0], value)

    def make(strategy):
        with strategy.scope():
            module = Lowest()
        return module, lambda value: strategy.run(lambda: module(torch.tensor(value)))

    module, lower = make(start("chief"))
    lower(3.0)
    other, lower_in_worker = make(start("worker"))
    lower_in_worker(2.0)
    lower(5.0)
    assert module.lowest.tolist() == other.lowest.tolist() == [2.0, float("inf")]


def test_sparse_gradients_change_their_rows_only(start):
    chief = start("chief", num_replicas=2)
    with chief.scope():
        table = torch.nn.Embedding(6, 2, sparse=True)
        optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    before = table.weight.detach().clone()

    def fn(rows):
        optimizer.zero_grad()
        table(rows).sum().backward()
        optimizer.step()

    for batch in chief.experimental_distribute_dataset([torch.tensor([1, 4, 4, 5])]):
        chief.run(fn, args=(batch,))
    expected = before - torch.tensor([0, 1, 0, 0, 2, 1.0])[:, None]
    assert torch.allclose(table.weight, expected)


def test_each_process_steps_with_its_own_learning_rate(start):
    chief, worker = Program(start("chief"), lr=0.1), None
    chief.strategy.wait_until_ready()
    worker = Program(start("worker"))
    scheduler = torch.optim.lr_scheduler.StepLR(worker.optimizer, 1, gamma=0.0)
    worker.step()
    scheduler.step()
    before = worker.weights
    worker.step()
    assert torch.equal(worker.weights, before)
    chief.step()
    assert not torch.equal(worker.weights, before)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_schedulers_count_steps(start, num_replicas, recwarn):
    program = Program(start("chief", num_replicas=num_replicas))
    with program.strategy.scope():
        early = torch.optim.lr_scheduler.ExponentialLR(program.optimizer, 0.5)
    program.step()
    early.step()
    late = torch.optim.lr_scheduler.ExponentialLR(program.optimizer, 0.5)
    program.step()
    late.step()
    program.step()
    assert not [w for w in recwarn if "lr_scheduler" in str(w.message)]
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    for rate in (0.1, 0.05, 0.025):
        model.zero_grad()
        (F.mse_loss(model(X), Y, reduction="sum") / 4).backward()
        torch.optim.SGD(model.parameters(), lr=rate).step()
    assert torch.allclose(program.weights[:3], model.weight.flatten())


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_gradient_scaler_leaves_out_steps_that_overflow(start, num_replicas):
    program = Program(start("chief", num_replicas=num_replicas))
    with program.strategy.scope():
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def fn(factor):
        program.optimizer.zero_grad()
        scaler.scale(program.loss(X, Y) * factor / program.strategy.num_replicas_in_sync).backward()
        scaler.step(program.optimizer)
        scaler.update()

    program.strategy.run(fn, args=(float("inf"),))
    assert torch.equal(program.weights, plain_weights([])[0])
    program.strategy.run(fn, args=(1.0,))
    assert torch.allclose(program.weights, plain_weights([(X, Y)])[0])


def test_a_module_without_shapes_is_refused_each_time(start):
    strategy = start("chief")
    with strategy.scope():
        model = torch.nn.LazyLinear(1)
    for _ in range(2):
        with pytest.raises(ValueError, match="'weight' of a lazy module has no shape yet"):
            strategy.run(lambda: model(X))


def test_parameters_that_share_memory_are_refused_each_time(start):
    strategy = start("chief")
    with strategy.scope():
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        model[1].weight = torch.nn.Parameter(model[0].weight.data)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"'0\.weight' and '1\.weight' share memory"):
            strategy.run(lambda: model(torch.ones(1, 2)))


def test_an_optimizer_made_outside_the_scope_is_taken_up(start):
    program = Program(start("chief"))
    program.optimizer = torch.optim.SGD(program.model.parameters(), lr=0.1)
    program.step()
    worker = Program(start("worker"))
    worker.optimizer = torch.optim.SGD(worker.model.parameters(), lr=0.1)
    assert torch.allclose(worker.weights, plain_weights([(X, Y)])[0])


def test_what_an_optimizer_refuses(start):
    program = Program(start("chief"))
    program.step()
    with pytest.raises(RuntimeError, match="outside `run`"):
        program.optimizer.step()
    with pytest.raises(RuntimeError, match="can't be added"):
        program.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    with pytest.raises(ValueError, match="can't be made in `run`"):
        program.strategy.run(lambda: ts.Variable(0, trainable=False))


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_what_was_made_outside_the_scope_is_not_trained_here_alone(start, num_replicas):
    strategy, model = start("chief", num_replicas=num_replicas), torch.nn.Linear(3, 1)
    with strategy.scope():
        kept = torch.nn.Linear(1, 1)  # noqa: F841
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fn():
        model(X).sum().backward()
        optimizer.step()

    with pytest.raises(RuntimeError, match=r"strategy\.scope\(\)"):
        strategy.run(fn)


def test_a_checkpoint_has_what_the_workers_made(start, tmp_path):
    chief = Program(start("chief"))
    chief.step()
    worker = Program(start("worker"))
    worker.step()
    path = ts.train.Checkpoint(model=chief.model, step=chief.step_count).write(str(tmp_path / "saved"))
    plain, count = torch.nn.Linear(3, 1), ts.Variable(0, dtype=torch.int64)
    ts.train.Checkpoint(model=plain, step=count).restore(path).assert_consumed()
    assert torch.allclose(plain.weight.flatten(), plain_weights([(X, Y)] * 2)[0][:3])
    assert int(count) == 2


def test_a_closed_strategy_begins_another_training(start):
    chief, worker = start("chief"), start("worker")
    for seed in (1, 2):
        first = Program(chief, seed=seed)
        first.step()
        second = Program(worker)
        assert torch.allclose(second.weights, plain_weights([(X, Y)], seed=seed)[0])
        second.step()
        assert int(second.step_count) == 2
        chief.close()
        worker.close()


def test_a_worker_that_has_finished_waits_for_the_next_training(start):
    chief, worker = start("chief"), start("worker", timeout_seconds=0.3)
    Program(chief).step()
    Program(worker).step()
    worker.close()
    late = Program(start("worker", 1))
    assert int(late.step_count) == 2  # one that comes late finds the training that was
    with pytest.raises(DeadlineExceededError):
        Program(worker).step()


@pytest.mark.parametrize(("job", "index", "position"), [("chief", 0, 0), ("worker", 0, 1), ("worker", 1, 2)])
def test_input_contexts_count_chief_and_workers(start, job, index, position):
    strategy, seen = start(job, index, num_replicas=2), []

    def dataset_fn(context):
        seen.append((context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync))
        return [X]

    strategy.distribute_datasets_from_function(dataset_fn)
    assert seen == [(3, position, 2)]
    seen.clear()
    per_replica = ts.InputOptions(experimental_replication_mode=ts.InputReplicationMode.PER_REPLICA)
    strategy.distribute_datasets_from_function(dataset_fn, per_replica)
    assert seen == [(6, 2 * position, 2), (6, 2 * position + 1, 2)]


@pytest.mark.parametrize(("job", "message"), [("ps", "is a parameter server"), ("evaluator", "is the evaluator")])
def test_other_tasks_may_make_the_strategy_but_not_train(cluster, job, message):
    with as_task(cluster, job):
        strategy = BetweenGraphParameterServerStrategy()
    assert not strategy.is_chief
    with pytest.raises(RuntimeError, match=message):
        strategy.scope()


def test_without_a_cluster_it_trains_here():
    with as_task(None):
        strategy = BetweenGraphParameterServerStrategy(devices=["cpu:0", "cpu:1"])
    program = Program(strategy)
    program.step()
    program.step()
    assert strategy.is_chief
    assert int(program.step_count) == 2
    assert torch.allclose(program.weights, plain_weights([(X, Y)] * 2)[0])
    strategy.close()


@pytest.mark.parametrize(
    ("jobs", "job", "message"),
    [
        (["chief", "worker"], "chief", "must have a parameter server"),
        (["ps"], "ps", "'chief' or 'worker' that trains"),
        (["ps", "chief", "master"], "chief", "at most one chief"),
        (["ps", "worker", "tpu"], "worker", r"the jobs \['tpu'\]"),
        (["ps", "worker"], "chief", "which the cluster does not have"),
    ],
)
def test_clusters_that_are_none(jobs, job, message):
    with as_task(new_cluster(jobs), job), pytest.raises(ValueError, match=message):
        BetweenGraphParameterServerStrategy()


def test_a_cluster_with_one_address_twice():
    with as_task({"ps": ["a:1"], "worker": ["a:1"]}, "worker"), pytest.raises(ValueError, match="lists a:1 twice"):
        BetweenGraphParameterServerStrategy()


def test_worker_0_is_the_chief_where_there_is_none():
    for index, is_chief in ((0, True), (1, False)):
        with as_task(new_cluster(["ps", "worker", "worker"]), "worker", index):
            strategy = BetweenGraphParameterServerStrategy()
        assert strategy.is_chief is strategy.extended.should_checkpoint is is_chief
        assert strategy.extended.experimental_should_init is is_chief
        assert strategy.extended.experimental_between_graph


def serve(cluster):
    threads = [threading.Thread(target=serve_until_chief_ends, args=(cluster, index)) for index in range(2)]
    for thread in threads:
        thread.start()
    return threads


def test_a_parameter_server_serves_until_chief_and_workers_are_done(cluster, start_task):
    threads = serve(cluster)
    first = Program(start_task("chief"))
    first.step()
    first.strategy.close(finished=False)  # as if it were killed
    threads[0].join(0.5)
    assert threads[0].is_alive()
    chief, workers = Program(start_task("chief")), []
    chief.step()
    for index in range(2):
        workers.append(Program(start_task("worker", index)))
        workers[index].step()
    chief.strategy.close()
    threads[0].join(0.5)
    assert threads[0].is_alive()
    workers[0].step()
    for worker in workers:
        worker.strategy.close()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def test_a_parameter_server_waits_for_a_worker_that_is_lost_after_the_chiefs_end(cluster, start_task):
    threads = serve(cluster)
    chief, worker = Program(start_task("chief")), Program(start_task("worker"))
    chief.step()
    worker.step()
    start_task("worker", 1).leave()
    chief.strategy.close()
    links = worker.strategy._shared.client.links
    opens = [link.peer.open for link in links]
    for link in links:
        link.peer.open = lambda: None
        link.peer.loop.call_soon(functools.partial(link.peer._lose, "by the test"))
    for thread in threads:
        thread.join(0.5)
        assert thread.is_alive()
    for link, reopen in zip(links, opens, strict=True):
        link.peer.loop.call_soon(reopen)
    worker.step()
    assert torch.allclose(worker.weights, plain_weights([(X, Y)] * 3)[0])
    worker.strategy.close()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def test_a_killed_worker_does_not_keep_a_parameter_server(cluster, start_task, monkeypatch):
    monkeypatch.setenv("TORCHSTRATEGY_PS_GRACE_S", "0.5")
    threads = serve(cluster)
    chief, workers = Program(start_task("chief")), [start_task("worker", index) for index in range(2)]
    chief.step()
    for worker in workers:
        Program(worker).step()
    chief.strategy.close()
    for worker in workers:
        worker.close(finished=False)  # as if it were killed
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def test_nobody_is_waited_for_who_does_not_train(cluster):
    threads = serve(cluster)
    for job, index in (("worker", 0), ("chief", 0), ("worker", 1)):
        with as_task(cluster, job, index):
            BetweenGraphParameterServerStrategy().leave()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    with as_task(cluster, "worker", 1):
        BetweenGraphParameterServerStrategy().leave(0.2)  # the servers are gone
    with as_task(None):
        BetweenGraphParameterServerStrategy().leave()
