"""The coordinator with real servers, each a process of its own."""

import functools
import logging
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import torchstrategy as ts


@pytest.fixture
def coordinator(strategy):
    return ts.coordinator.ClusterCoordinator(strategy)


def add(a, b=0):
    return a + b


class Scaler:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x):
        return x * self.factor

    def scale(self, x):
        return x * self.factor


def wait_until(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# Functions and results


@pytest.mark.parametrize(
    ("fn", "args", "kwargs", "expected"),
    [
        (add, (1, 2), None, 3),
        (add, [1], {"b": 2.5}, 3.5),
        (lambda: None, None, None, None),
        (functools.partial(add, 1), (2,), {}, 3),
        (Scaler(3), (2,), None, 6),
        (Scaler(3).scale, (2,), None, 6),
        (ts.function(add), (1, 2), None, 3),
        (lambda: {"a": [1, (True, "text")], 3: None}, (), None, {"a": [1, (True, "text")], 3: None}),
    ],
)
def test_schedule(coordinator, fn, args, kwargs, expected):
    assert coordinator.schedule(fn, args, kwargs).fetch() == expected


def test_fetch_and_get(coordinator):
    def fn(x):
        return {"scalar": x.sum(), "rows": x, "number": 1}

    result = coordinator.schedule(fn, args=(torch.ones(2, 3),))
    fetched, got = result.fetch(), result.get()
    assert type(fetched["scalar"]) is np.float32
    assert isinstance(fetched["rows"], np.ndarray)
    assert isinstance(got["scalar"], torch.Tensor)
    assert fetched["scalar"] == got["scalar"] == 6
    assert fetched["number"] == got["number"] == 1


def test_fetch_of_a_structure(coordinator):
    values = [coordinator.schedule(add, args=(i,)) for i in range(3)]
    assert coordinator.fetch({"all": values, "other": (None, "x")}) == {"all": [0, 1, 2], "other": (None, "x")}
    assert coordinator.fetch(5) == 5


def test_variables_are_on_the_parameter_servers(strategy, coordinator):
    with strategy.scope():
        count = ts.Variable(0.0)

    def increment(by):
        count.assign_add(by)

    for i in range(20):
        coordinator.schedule(increment, args=(float(i),))
    coordinator.join()
    assert coordinator.done()
    assert float(count) == sum(range(20))


def test_captured_values_are_those_of_the_moment(coordinator):
    results = []
    for i in range(5):
        results.append(coordinator.schedule(lambda i=i: i))
    values = [1]
    results.append(coordinator.schedule(lambda x: x, args=(values,)))
    values.append(2)
    assert coordinator.fetch(results) == [0, 1, 2, 3, 4, [1]]


@pytest.mark.parametrize("nested", [False, True])
def test_remote_value_is_no_argument(coordinator, nested):
    value = coordinator.schedule(add, args=(1,))
    args = [[{"x": value}]] if nested else [value]
    with pytest.raises(ValueError, match=r"fetch\(\)"):
        coordinator.schedule(add, args=args)
    with pytest.raises(ValueError, match=r"fetch\(\)"):
        coordinator.schedule(lambda: value)
    coordinator.join()
    assert value.fetch() == 1


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((3,), "schedule needs a function. Received: 3"),
        ((add, 3), "args must be a tuple or list"),
        ((add, "ab"), "args must be a tuple or list"),
        ((add, (), [1]), "kwargs must be a dictionary"),
        ((add, (threading.Lock(),)), "lock"),
    ],
)
def test_wrong_arguments(coordinator, arguments, match):
    with pytest.raises(TypeError, match=match):
        coordinator.schedule(*arguments)
    coordinator.join()
    assert coordinator.done()


def test_coordinator_is_not_sent(coordinator):
    with pytest.raises(TypeError, match="ClusterCoordinator can't be sent"):
        coordinator.schedule(lambda: coordinator.join())


def test_result_that_cant_come_back(coordinator):
    result = coordinator.schedule(lambda: {"x": {1, 2}})
    with pytest.raises(TypeError, match=r"set as result\['x'\]"):
        coordinator.join()
    with pytest.raises(TypeError, match=r"set as result\['x'\]"):
        result.fetch()


def test_several_threads_schedule(strategy, coordinator):
    with strategy.scope():
        count = ts.Variable(0.0)

    def increment():
        count.assign_add(1.0)

    def schedule():
        for _ in range(30):
            coordinator.schedule(increment)

    threads = [threading.Thread(target=schedule) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    coordinator.join()
    assert float(count) == 120


# One coordinator for each strategy


def test_singleton(strategy, coordinator):
    again = ts.experimental.coordinator.ClusterCoordinator(strategy)
    assert again is coordinator
    assert again.strategy is strategy
    assert again.schedule(add, args=(1,)).fetch() == 1


@pytest.mark.parametrize("other", [ts.OneDeviceStrategy("cpu"), None, "worker"])
def test_other_strategies(other):
    with pytest.raises(TypeError, match=r"needs a ts\.ParameterServerStrategy"):
        ts.coordinator.ClusterCoordinator(other)


@pytest.mark.parametrize("variable", ["TORCHSTRATEGY_STUCK_AFTER_S", "TF_COORDINATOR_IGNORE_TRANSIENT_PS_FAILURES"])
def test_wrong_settings(strategy, monkeypatch, variable):
    monkeypatch.setenv(variable, "soon")
    with pytest.raises(ValueError, match=f"{variable} must be a number"):
        ts.coordinator.ClusterCoordinator(strategy)
    monkeypatch.delenv(variable)
    assert ts.coordinator.ClusterCoordinator(strategy).schedule(add, args=(1,)).fetch() == 1


def test_worker_index(coordinator):
    def index():
        time.sleep(0.02)
        return ts.coordinator.experimental_get_current_worker_index()

    indices = coordinator.fetch([coordinator.schedule(index) for _ in range(20)])
    assert set(indices) == {0, 1}
    with pytest.raises(RuntimeError, match="Cannot retrieve the worker index"):
        index()


# Errors


def fail(message):
    raise KeyError(message)


@pytest.mark.parametrize("method", ["join", "done", "schedule"])
def test_error_is_raised_once_and_cancels(coordinator, method):
    wait_until(lambda: all(worker.can_run for worker in coordinator._cluster.workers))
    slow = [coordinator.schedule(time.sleep, args=(0.1,)) for _ in range(2)]
    bad = coordinator.schedule(fail, args=("first",))
    queued = [coordinator.schedule(time.sleep, args=(0.1,)) for _ in range(20)]
    with pytest.raises(KeyError, match="first"):
        bad.fetch()
    call = functools.partial(coordinator.schedule, add, (1,)) if method == "schedule" else getattr(coordinator, method)
    with pytest.raises(KeyError, match="first") as info:
        wait_until(call)  # until what still runs has ended, done() says False
    notes = "\n".join([*info.value.__notes__, str(info.value.__cause__)])  # which has it before Python 3.11
    assert "raised in fail, which /job:worker/task:" in notes
    assert "raise KeyError(message)" in notes
    coordinator.join()
    assert coordinator.done()
    assert coordinator.fetch(slow) == [None, None]
    with pytest.raises(ts.errors.CancelledError, match="KeyError: 'first'"):
        queued[-1].fetch()
    assert coordinator.schedule(add, args=(1, 1)).fetch() == 2


def test_what_waits_behind_a_function_that_fails_does_not_run(strategy, coordinator):
    with strategy.scope():
        count = ts.Variable(0, trainable=False)

    def fail_slowly():
        time.sleep(0.1)
        raise KeyError("slow")

    for _ in range(3):
        wait_until(lambda: all(worker.can_run for worker in coordinator._cluster.workers))
        values = [coordinator.schedule(fail_slowly) for _ in coordinator._cluster.workers]
        values += [coordinator.schedule(count.assign_add, args=(1,)) for _ in range(6)]
        with pytest.raises(KeyError, match="slow"):
            coordinator.join()
        for value in values[len(coordinator._cluster.workers) :]:
            with pytest.raises(ts.errors.CancelledError):
                value.fetch()
    assert int(count) == 0


def test_fetch_does_not_clear_the_error(coordinator):
    bad = coordinator.schedule(fail, args=("x",))
    for _ in range(2):
        with pytest.raises(KeyError):
            coordinator.fetch([bad])
    with pytest.raises(KeyError):
        coordinator.join()
    coordinator.join()


def test_error_classes(coordinator):
    class OwnError(ValueError):
        pass

    def raise_own():
        raise OwnError("mine")

    result = coordinator.schedule(raise_own)
    with pytest.raises(ValueError, match="OwnError: mine"):
        coordinator.join()
    with pytest.raises(ValueError, match="OwnError: mine"):
        result.fetch()


# Per-worker datasets


def next_of(iterator):
    return next(iterator)


def test_dataset_of_a_function(coordinator):
    def dataset_fn():
        return ts.data.Dataset.from_tensor_slices(torch.arange(3))

    iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))
    values = coordinator.fetch([coordinator.schedule(next_of, args=(iterator,)) for _ in range(3)])
    assert set(values) <= {0, 1, 2}
    assert values.count(0) in (1, 2)  # each worker has all of it

    def read_on():
        for _ in range(4):
            coordinator.schedule(next_of, args=(iterator,))  # raises, too, once one has failed
        coordinator.join()

    with pytest.raises(ts.errors.OutOfRangeError, match="End of sequence"):
        read_on()
    coordinator.join()
    fresh = iter(coordinator.create_per_worker_dataset(dataset_fn))
    assert coordinator.schedule(next_of, kwargs={"iterator": fresh}).fetch() == 0


def test_dataset_that_is_given(coordinator):
    loader = DataLoader(TensorDataset(torch.arange(6)), batch_size=2)
    dataset = coordinator.create_per_worker_dataset(loader)
    result = coordinator.schedule(lambda batches: [batch[0].tolist() for batch in batches], args=(dataset,))
    assert result.fetch() == [[0, 1], [2, 3], [4, 5]]
    iterator = iter(dataset)
    assert coordinator.schedule(next_of, args=(iterator,)).fetch()[0].tolist() == [0, 1]


def test_dataset_function_with_an_input_context(coordinator):
    def dataset_fn(context):
        numbers = (context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync)
        return [numbers]

    iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))
    assert coordinator.schedule(next_of, args=(iterator,)).fetch() == (1, 0, 1)


def test_dataset_distributed_on_the_worker(strategy, coordinator):
    def per_worker_fn():
        return strategy.distribute_datasets_from_function(
            lambda context: [torch.tensor([context.num_replicas_in_sync])]
        )

    iterator = iter(coordinator.create_per_worker_dataset(per_worker_fn))
    assert coordinator.schedule(next_of, args=(iterator,)).fetch().tolist() == [1]


def test_elements_are_not_on_the_coordinator(coordinator):
    dataset = coordinator.create_per_worker_dataset([1, 2])
    iterator = iter(dataset)
    assert iter(iterator) is iterator
    assert isinstance(iterator, ts.coordinator.PerWorkerValues)
    for call in (lambda: next(iterator), iterator.get_next):
        with pytest.raises(NotImplementedError, match="elements of a per-worker dataset are on the workers"):
            call()


def test_dataset_function_that_raises(coordinator):
    def dataset_fn():
        raise OSError("no such bucket")

    iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))
    with pytest.raises(OSError, match="no such bucket") as info:
        wait_until(lambda: coordinator.join())  # until the first worker has called it
    assert any("made the dataset of test_dataset_function_that_raises" in note for note in info.value.__notes__)
    for value in iterator._values:
        with pytest.raises(OSError, match="no such bucket"):
            value.fetch()


@pytest.mark.parametrize("dataset", [3, None])
def test_what_is_no_dataset(coordinator, dataset):
    with pytest.raises(TypeError, match="needs a dataset, or a function that returns one"):
        coordinator.create_per_worker_dataset(dataset)


@pytest.mark.parametrize(
    "make",
    [
        lambda _: iter([1, 2]),
        lambda _: (x for x in range(3)),
        lambda _: {"x": [1, 2]},
        lambda dataset: dataset,
        iter,
    ],
    ids=["iterator", "generator", "dictionary", "dataset", "its iterator"],
)
def test_what_is_gone_through_once_or_not_by_batches_is_no_dataset(coordinator, make):
    value = make(coordinator.create_per_worker_dataset([1, 2]))
    with pytest.raises(TypeError, match=rf"again and again, batch by batch: .* a {type(value).__name__}$"):
        coordinator.create_per_worker_dataset(value)


def test_dataset_that_cant_be_sent(coordinator):
    with pytest.raises(TypeError, match="can't be sent"):
        coordinator.create_per_worker_dataset([threading.Lock()])


def test_per_worker_values_of_other_kinds(coordinator):
    with pytest.raises(ValueError, match="create_per_worker_dataset"):
        coordinator.schedule(add, args=(ts.coordinator.PerWorkerValues([1, 2]),))


# Waiting


def wait_for_file(path):
    while not path.exists():
        time.sleep(0.01)


def test_nothing_waits_behind_a_slow_function(coordinator, tmp_path):
    wait_until(lambda: all(worker.can_run for worker in coordinator._cluster.workers))
    slow = coordinator.schedule(wait_for_file, args=(tmp_path / "go on",))
    coordinator.fetch([coordinator.schedule(add, args=(i,)) for i in range(10)])
    assert not coordinator.done()
    (tmp_path / "go on").touch()
    slow.fetch()


def test_stuck_functions_are_described(strategy, caplog):
    coordinator = ts.coordinator.ClusterCoordinator(strategy, stuck_after_s=0.3)

    def sleep_well():
        time.sleep(1.5)

    with caplog.at_level(logging.WARNING, "torchstrategy"):
        coordinator.schedule(sleep_well)
        coordinator.join()
    text = caplog.text
    assert "No scheduled function has ended for 0 s" in text
    assert "sleep_well on /job:worker/task:" in text
    assert "Threads of the coordinator" in text
    assert "in join" in text  # where this process waits
    assert "Threads of /job:worker/task:" in text
    assert "time.sleep(1.5)" in text  # where the worker is


@pytest.mark.parametrize("method", ["join", "fetch"])
def test_ctrl_c(coordinator, method, tmp_path):
    result = coordinator.schedule(wait_for_file, args=(tmp_path / "go on",))
    timer = threading.Timer(0.2, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        coordinator.join() if method == "join" else result.fetch()
    timer.join()
    (tmp_path / "go on").touch()
    coordinator.join()


@pytest.mark.parametrize(
    "make", [lambda: ts.data.Dataset.range(4), lambda: DataLoader(torch.arange(4))], ids=["Dataset", "DataLoader"]
)
def test_an_iterator_of_this_process_is_refused_with_the_remedy(coordinator, make):
    with pytest.raises(TypeError, match=r"Iter(ator)? can't be sent.* Give the dataset to create_per_worker_dataset"):
        coordinator.schedule(next, args=(iter(make()),))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("last", "expected"),
    [
        ("coordinator.schedule(time.sleep, args=(30,))", "2 scheduled function(s) had not ended"),
        ("coordinator.schedule(int, args=('x',))", "A scheduled function had failed, which a join() would have raised"),
        ("coordinator.join()", ""),
    ],
)
def test_a_program_that_ends_without_join_is_told(cluster, last, expected):
    program = f"""
import time, torchstrategy as ts
strategy = ts.ParameterServerStrategy(ts.cluster_resolver.TFConfigClusterResolver(), max_staleness=0)
coordinator = ts.coordinator.ClusterCoordinator(strategy)
{"" if "int" in last else "coordinator.schedule(time.sleep, args=(0.7,))"}
result = {last}
time.sleep(0.4)
"""
    environment = {**os.environ, "TF_CONFIG": cluster.tf_config()}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert expected in done.stderr
    assert ("scheduled function" in done.stderr) == bool(expected)
    assert "will run again" not in done.stderr


def test_closing_the_strategy_ends_the_wait(strategy, coordinator):
    result = coordinator.schedule(time.sleep, args=(30,))
    errors = []

    def wait(call):
        try:
            call()
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=wait, args=(call,)) for call in (coordinator.join, result.fetch)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    strategy.close()
    for thread in threads:
        thread.join(10)
    assert [isinstance(error, (ts.errors.UnavailableError, ts.errors.CancelledError)) for error in errors] == [True] * 2
    assert all("The strategy was closed" in str(error) and "failed" not in str(error) for error in errors)
    with pytest.raises(ts.errors.UnavailableError, match="closed"):
        coordinator.schedule(add, args=(1,))


def test_staleness_0_is_sequential(cluster):
    strategy = ts.ParameterServerStrategy(cluster.resolver(), max_staleness=0)
    coordinator = ts.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        v = ts.Variable(1.0)

    def step(i):
        v.assign(v * 2 + i)
        return float(v)

    results = coordinator.fetch([coordinator.schedule(step, args=(i,)) for i in range(10)])
    expected, x = [], 1.0
    for i in range(10):
        x = x * 2 + i
        expected.append(x)
    assert results == expected
    strategy.close()
