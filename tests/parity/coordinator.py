"""What this library gives in tf.distribute's measured cases of coordinators: a function for each case.

``CASES`` are those of a cluster of 2 workers and 2 parameter servers that stays as it is, ``FAULTS`` break theirs.
"""

import threading
import time
from types import SimpleNamespace

import torch

import torchstrategy as ts

CASES = {}
FAULTS = {}


def case(name, cases=CASES):
    def note(fn):
        cases[name] = fn
        return fn

    return note


def fault(name):
    return case(name, FAULTS)


def join(coordinator):
    """Return what ``join`` gave: ``["ok", None]``, or the name of its error."""
    try:
        coordinator.join()
    except Exception as error:  # noqa: BLE001 - a result
        return [type(error).__name__, None]
    return ["ok", None]


def fetched(value):
    """Return how a fetch ended: ``"ok"``, or the name of its error."""
    try:
        value.fetch()
    except Exception as error:  # noqa: BLE001 - a result
        return type(error).__name__
    return "ok"


def wait_until(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.01)


def wait_for_workers(coordinator, *indices):
    workers = coordinator._cluster.workers
    wait_until(lambda: all(workers[index].can_run for index in indices))


def add(a, b):
    return a + b


def bad():
    raise ts.errors.InvalidArgumentError("bad")


# The strategy


def make_strategy(run):
    inputs = run.case["inputs"]
    resolver = ts.cluster_resolver.SimpleClusterResolver(
        ts.cluster_resolver.ClusterSpec(inputs["cluster"]), task_type=inputs["task_type"], task_id=inputs["task_id"]
    )
    return ts.ParameterServerStrategy(resolver)


for name in ("ps.init.empty", "ps.init.noworker", "ps.init.chief_not_in_spec"):
    case(name)(make_strategy)


@case("ps.info")
def info(run):
    extended = run.strategy.extended
    return {
        "num_replicas_in_sync": run.strategy.num_replicas_in_sync,
        "worker_devices": list(extended.worker_devices),
        "parameter_devices": list(extended.parameter_devices),
        "num_workers": run.strategy._num_workers,
        "num_ps": run.strategy._num_ps,
    }


def devices(*variables):
    """Return where variables are, as TF names it; a plain one is in the coordinator's process."""
    own = [getattr(v, "placement", ("/job:chief/replica:0/task:0/device:CPU:0",))[0] for v in variables]
    return [name.replace("/replica:0", "") for name in own]


@case("ps.roundrobin")
def round_robin(run):
    with run.strategy.scope():
        return devices(*(ts.Variable(float(i)) for i in range(5)))


@case("ps.explicit_device")
def explicit_device(run):
    with run.strategy.scope(), torch.device("/job:ps/task:1/device:CPU:0"):
        return devices(ts.Variable(1.0))


@case("ps.outside_scope")
def outside_scope(run):
    return devices(ts.Variable(1.0))[0]


@case("ps.nontrainable_int_string")
def other_dtypes(run):
    with run.strategy.scope():
        ts.Variable(0.0)
        return devices(ts.Variable(0.0, trainable=False), ts.Variable(torch.tensor(1)), ts.Variable(torch.tensor(True)))


# Functions


@case("co.badstrategy")
def bad_strategy(run):
    return ts.coordinator.ClusterCoordinator(ts.MirroredStrategy(["cpu:0", "cpu:1"]))


@case("co.schedule_py_fn")
def schedule_function(run):
    return type(run.coordinator.schedule(lambda: 5)).__name__


@case("co.py_fn_fetch")
def fetch_of_function(run):
    return run.coordinator.schedule(lambda: 5).fetch()


@case("co.fetch")
def fetch(run):
    return run.coordinator.fetch(run.coordinator.schedule(add, args=(torch.tensor(1.0), 2.0))).item()


@case("co.rv.fetch_type")
def fetch_types(run):
    value = run.coordinator.schedule(add, args=(torch.tensor(1.0), 2.0))
    return [type(value.fetch()).__name__, {"Tensor": "EagerTensor"}.get(type(value.get()).__name__)]


@case("co.none_out")
def none_out(run):
    return run.coordinator.schedule(lambda: None).fetch()


@case("co.args_remote_value")
def remote_value_argument(run):
    return run.coordinator.schedule(add, args=(run.coordinator.schedule(lambda: 1), 2))


@case("co.join_done")
def join_and_done(run):
    run.coordinator.schedule(lambda: 1)
    return [run.coordinator.join(), run.coordinator.done()]


@case("co.gather_inside")
def gather_inside(run):
    strategy = run.strategy
    return run.coordinator.schedule(lambda: strategy.gather(torch.tensor([3.0]), axis=0)).fetch().tolist()


@case("co.create_var_inside")
def variable_inside(run):
    strategy = run.strategy

    def make():
        with strategy.scope():
            ts.Variable(1.0)

    run.coordinator.schedule(make)
    run.coordinator.join()


# Per-worker datasets


def next_of(iterator):
    return next(iterator)


@case("pwd.from_dataset")
def from_dataset(run):
    iterator = iter(run.coordinator.create_per_worker_dataset(ts.data.Dataset.range(5)))
    wait_for_workers(run.coordinator, 0, 1)

    def slow_next(iterator):
        time.sleep(0.2)  # so that each worker calls it once
        return next(iterator)

    values = [run.coordinator.schedule(slow_next, args=(iterator,)) for _ in range(2)]
    return [int(value) for value in run.coordinator.fetch(values)]


@case("pwd.after_error_join")
def join_after_error(run):
    iterator = iter(run.coordinator.create_per_worker_dataset(ts.data.Dataset.range(1)))
    for _ in range(3):
        run.coordinator.schedule(next_of, args=(iterator,))
    assert join(run.coordinator) == ["OutOfRangeError", None]
    return run.coordinator.join()


@case("pwd.next_on_coordinator")
def next_on_coordinator(run):
    return next(iter(run.coordinator.create_per_worker_dataset(ts.data.Dataset.range(5))))


@case("pwd.distribute_datasets_from_function")
def distribute_from_function(run):
    strategy = run.strategy

    def dataset_fn(context):
        seen = torch.tensor([context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync])
        return ts.data.Dataset.range(4).batch(2).map(lambda batch: (seen, batch))

    dataset = run.coordinator.create_per_worker_dataset(lambda: strategy.distribute_datasets_from_function(dataset_fn))
    context, batch = run.coordinator.schedule(next_of, args=(iter(dataset),)).fetch()
    return [[context.tolist()], batch.tolist()]


# Errors


@case("wi.outside")
def index_outside(run):
    return ts.coordinator.experimental_get_current_worker_index()


@case("err.done_raises")
def done_raises(run):
    value = run.coordinator.schedule(bad)
    fetched(value)
    try:
        run.coordinator.done()
    except ts.errors.OpError as error:
        return type(error).__name__
    return None


@case("err.which_cancelled")
def which_cancelled(run):
    with run.strategy.scope():
        count = ts.Variable(0.0)

    def slow():
        time.sleep(0.2)
        count.assign_add(1.0)

    wait_for_workers(run.coordinator, 0, 1)
    functions = [slow, slow, bad, *[slow] * 10]
    values = [run.coordinator.schedule(fn) for fn in functions]
    joined = join(run.coordinator)[0]
    ends = [fetched(value) for value in values]
    return {"join": joined, "fetch": ends, "count": float(count), "done": run.coordinator.done()}


@case("err.trace_time")
def error_of_schedule(run):
    def fn():
        raise KeyError("while tracing")

    run.coordinator.schedule(fn)  # TF raises here
    return join(run.coordinator)


@case("err.python_fn")
def error_of_function(run):
    value = run.coordinator.schedule(lambda: 1 / 0)
    return [join(run.coordinator)[0], fetched(value)]


# Faults


class Counting:
    """A variable that functions count with, one dataset, and what a fault is judged by."""

    def __init__(self, run):
        self.run = run
        self.coordinator = run.coordinator
        with run.strategy.scope():
            self.v, self.u = v, u = ts.Variable(0.0), ts.Variable(0.0)
        self.iterator = iter(self.coordinator.create_per_worker_dataset(ts.data.Dataset.range(10**6)))

        def step(iterator):
            next(iterator)
            time.sleep(0.005)
            v.assign_add(1.0)

        def touch_u():
            u.assign_add(1.0)

        self.step, self.touch_u = step, touch_u

    def schedule(self, count):
        return [self.coordinator.schedule(self.step, args=(self.iterator,)) for _ in range(count)]


@fault("fault.worker_kill_restart")
def worker_kill_restart(run):
    counting = Counting(run)
    counting.schedule(20)
    run.coordinator.join()
    before = float(counting.v)
    wait_for_workers(run.coordinator, 0, 1)
    values = counting.schedule(300)
    run.cluster.kill("worker", 1)
    run.coordinator.join()
    done = run.coordinator.done()
    run.cluster.restart("worker", 1)
    joined = join(run.coordinator)
    after = float(counting.v)
    ends = [fetched(value) for value in values]
    wait_for_workers(run.coordinator, 1)
    counting.schedule(40)
    return {
        "before": before,
        "done_while_worker_down": done,
        "join": joined,
        "v_after": after,
        "at_least_expected": after >= 320,
        "fetch_status": {end: ends.count(end) for end in ends},
        "second_round_join": join(run.coordinator),
        "v_final": float(counting.v),
    }


@fault("fault.worker_kill_no_restart")
def worker_kill_no_restart(run):
    counting = Counting(run)
    counting.schedule(20)
    run.coordinator.join()
    run.cluster.kill("worker", 1)
    start = time.monotonic()
    counting.schedule(200)
    joined = join(run.coordinator)
    v = float(counting.v)
    return {"join": joined, "v": v, "ge220": v >= 220, "seconds_lt_30": time.monotonic() - start < 30}


@fault("fault.dead_worker_resource")
def dead_worker_resource(run):
    counting = Counting(run)
    wait_for_workers(run.coordinator, 0, 1)
    run.cluster.kill("worker", 1)
    workers = run.coordinator._cluster.workers
    wait_until(lambda: not workers[1].can_run)
    return {"fetch_dead_worker_iterator": fetched(counting.iterator._values[1])}


@fault("fault.all_workers_dead_then_one_back")
def all_workers_dead(run):
    counting = Counting(run)
    counting.schedule(1)
    run.coordinator.join()
    for index in range(2):
        run.cluster.kill("worker", index)
    counting.schedule(5)
    result = SimpleNamespace(join=None)
    ended = threading.Event()

    def wait():
        result.join = join(run.coordinator)
        ended.set()

    thread = threading.Thread(target=wait)
    thread.start()
    blocked = not ended.wait(1.0)
    run.cluster.restart("worker", 0)
    still_blocked = not ended.wait(20.0)
    run.cluster.restart("worker", 1)
    thread.join()
    return {
        "join_blocked_15s_with_all_workers_dead": blocked,
        "still_blocked_35s_after_worker0_back": still_blocked,
        "join_after_both_back": [result.join],
        "v": float(counting.v),
    }


@fault("fault.ps_kill_unused")
def ps_kill_unused(run):
    counting = Counting(run)
    counting.schedule(20)
    run.coordinator.join()
    run.cluster.kill("ps", 1)
    wait_until(lambda: run.strategy._ps_failure(1) is not None)
    counting.schedule(20)
    result = {"join_closures_not_using_dead_ps": join(run.coordinator), "v": float(counting.v)}
    run.coordinator.schedule(counting.touch_u)
    return {**result, "join_closures_using_dead_ps": join(run.coordinator)}
