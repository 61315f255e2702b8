"""What cluster.md measured of tf's MultiWorkerMirroredStrategy beyond single values, with real workers."""

import json
import re
from pathlib import Path

import pytest
import torch

import torchstrategy as ts
from tests import programs
from tests.clusters import as_task, new_cluster
from tests.programs import cpu_devices, largest_difference
from tests.strategies import multi_worker_programs as workers

DOUBLE = torch.float64
GUIDE_PATH = Path(__file__).parents[2] / "docs" / "guide" / "multi_worker.md"
PROGRAMS = {
    "sgd, float32": ({}, 1e-6),
    "sgd, float64": ({"dtype": DOUBLE, "epochs": 2}, 1e-10),
    "adam, float64": ({"dtype": DOUBLE, "optimizer_name": "adam", "epochs": 2}, 1e-10),
    "adam, float64, accumulated": ({"dtype": DOUBLE, "optimizer_name": "adam", "accumulation": 3, "epochs": 2}, 1e-10),
    "conv net, adam, float64": ({"net": "conv", "optimizer_name": "adam", "dtype": DOUBLE}, 1e-10),
    "fewer examples than replicas": ({"dtype": DOUBLE, "num_examples": 7, "batch_size": 3, "epochs": 2}, 1e-10),
}


@pytest.fixture(scope="module")
def cluster_of():
    """``cluster_of(n)`` gives a pool of n workers, which TF_CONFIG describes."""
    pools = {}

    def get(size):
        if size not in pools:
            pools[size] = ts.testing.ProcessPool(size, launcher="TF_CONFIG")
        return pools[size]

    yield get
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="module")
def one_replica():
    return {name: programs.train([], **program) for name, (program, _) in PROGRAMS.items()}


@pytest.mark.parametrize(("num_workers", "num_local"), [(2, 1), (3, 1), (2, 2), (4, 1)])
@pytest.mark.parametrize("name", PROGRAMS)
def test_workers_train_like_one_process(name, num_workers, num_local, one_replica, cluster_of):
    program, tolerance = PROGRAMS[name]
    for result in cluster_of(num_workers).run(workers.train, num_local, **program):
        assert largest_difference(one_replica[name], result) <= tolerance


@pytest.mark.parametrize("make", [ts.MultiWorkerMirroredStrategy, ts.MirroredStrategy])
def test_four_replicas_of_one_worker(make, one_replica):
    """The same numbers as 2 workers of 2 replicas, and 4 of 1."""
    program, tolerance = PROGRAMS["adam, float64"]
    result = programs.train(make(devices=cpu_devices(4)), **program)
    assert largest_difference(one_replica["adam, float64"], result) <= tolerance


def test_the_cluster_of_a_resolver_comes_before_the_launcher(process_pool, one_replica):
    cluster = new_cluster(["chief", "worker"])
    program, tolerance = PROGRAMS["sgd, float64"]
    results = process_pool(2).run(workers.train_as_given_by_a_resolver, cluster, **program)
    for rank, (numbers, device, found) in enumerate(results):
        assert largest_difference(one_replica["sgd, float64"], numbers) <= tolerance
        assert device == f"/job:{['chief', 'worker'][rank]}/replica:0/task:0/device:CPU:0"
        assert found == rank


@pytest.mark.parametrize(("num_workers", "num_local"), [(2, 1), (3, 1), (2, 2)])
def test_places_of_workers_and_replicas(num_workers, num_local, cluster_of):
    n = num_workers * num_local
    for rank, found in enumerate(cluster_of(num_workers).run(workers.places, num_local)):
        assert found["ids"] == list(range(n))[rank * num_local : (rank + 1) * num_local]
        assert found["chief"] == found["checkpoint"] == found["summary"] == (rank == 0)
        assert found["devices"] == tuple(f"/job:worker/replica:0/task:{rank}/device:CPU:{i}" for i in range(num_local))
        assert found["gathered"] == [float(i) for i in range(n)]


@pytest.mark.parametrize("num_local", [1, 2])
def test_a_plain_value_counts_once_for_each_process(num_local, cluster_of):
    for found in cluster_of(2).run(workers.plain_values, num_local):
        assert found == {"sum": [3.0], "mean": [1.5], "number": 4.0, "gather": [1.0, 2.0], "over axis": 1.5}


def test_made_late_as_in_a_notebook(cluster_of):
    expected = programs.train([], dtype=DOUBLE)
    for found in cluster_of(2).run(workers.made_late):
        for numbers in found.values():
            assert largest_difference(expected, numbers) <= 1e-10


def test_strategies_of_one_process_in_turns(cluster_of):
    for found in cluster_of(2).run(workers.two_models_in_turns):
        for weights in found[:2]:
            assert weights == pytest.approx(found[2], abs=1e-10)


def test_tutorial(cluster_of, tmp_path):
    """The tutorial's way of saving: each worker in a place of its own, and the chief's is what remains."""
    first = cluster_of(3).run(workers.tutorial, str(tmp_path), 2)
    for rank, found in enumerate(first):
        assert found["chief"] == (rank == 0)
        assert found["kept"] == [["checkpoint", f"ckpt-{i}.pt"] for i in (1, 2)]
        assert (found["losses"], found["weight"]) == (first[0]["losses"], first[0]["weight"])
        assert found["seen"] == 2 * 6.0
    # 2 workers go on with what 3 have saved, and so does a program without a strategy.
    for found in cluster_of(2).run(workers.tutorial, str(tmp_path), 3):
        assert found["kept"] == [["checkpoint", "ckpt-3.pt"]]
        assert found["left"] == ["checkpoint", "ckpt-3.pt"]
        assert found["losses"][0] < first[0]["losses"][0]
        assert found["seen"] == 2 * 6.0 + 4.0
    epoch = torch.tensor(0)
    ts.train.Checkpoint(epoch=epoch).restore(ts.train.latest_checkpoint(tmp_path / "ckpt")).expect_partial()
    assert epoch == 3


def test_a_worker_that_can_not_save_is_named(cluster_of, tmp_path):
    for message, counter in cluster_of(2).run(workers.saved_where_one_worker_cannot, str(tmp_path)):
        assert message.startswith(f"Rank 1 could not write the checkpoint {tmp_path}/of_worker_1/ckpt-1: ")
        assert counter == 1


TWO_WORKERS = {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}


@pytest.mark.parametrize(
    ("cluster", "task", "message"),
    [
        (TWO_WORKERS, ("worker", 2), "ValueError: .*2"),
        (TWO_WORKERS, ("worker", -1), "ValueError: .*-1"),
        (TWO_WORKERS, ("chief", 0), "ValueError: .*chief"),
        (TWO_WORKERS, ("boss", 0), "ValueError: .*boss"),
        ({**TWO_WORKERS, "ps": ["127.0.0.1:3"]}, ("ps", 0), "ValueError: .*ps 0.*parameter server"),
        ({"chief": ["a:1", "b:1"], "worker": ["c:1"]}, ("worker", 0), "ValueError: .*chief"),
        ({"worker": "127.0.0.1:1"}, ("worker", 0), "(ValueError|TypeError): .*list"),
    ],
)
def test_clusters_that_can_not_train(cluster, task, message):
    assert re.match(message, workers.error_of(cluster, task))


def test_a_cluster_without_a_task(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": TWO_WORKERS}))
    expected = "When `cluster_spec` is given, you must also specify `task_type` and `task_id`"
    with pytest.raises(ValueError, match=expected):
        ts.MultiWorkerMirroredStrategy()


@pytest.mark.parametrize("in_cluster", [True, False])
def test_an_evaluator_stands_alone(in_cluster):
    """TF's constructor raises a KeyError for an evaluator that the cluster does not name."""
    cluster = {**TWO_WORKERS, "evaluator": ["127.0.0.1:3"]} if in_cluster else TWO_WORKERS
    with as_task(cluster, "evaluator"):
        strategy = ts.MultiWorkerMirroredStrategy()
        assert strategy.cluster_resolver.task_type == "evaluator"
    assert strategy.num_replicas_in_sync == 1
    assert float(strategy.reduce("SUM", 1.0, axis=None)) == 1.0


@pytest.mark.parametrize(
    ("cluster", "job"),
    [
        (None, "localhost"),
        ({}, "localhost"),
        ({"worker": ["127.0.0.1:1"]}, "worker"),
        ({"chief": ["no-such-host.invalid:1"]}, "chief"),
        ({"worker": ["127.0.0.1:1"], "evaluator": ["127.0.0.1:2"]}, "worker"),
    ],
)
def test_one_worker_needs_no_network(cluster, job):
    with as_task(cluster, job):
        strategy, again = ts.MultiWorkerMirroredStrategy(), ts.MultiWorkerMirroredStrategy()
    assert strategy.num_replicas_in_sync == again.num_replicas_in_sync == 1
    assert strategy.is_chief
    assert strategy.workers is None
    assert strategy.extended.worker_devices == (f"/job:{job}/replica:0/task:0/device:CPU:0",)
    assert strategy.run(lambda: ts.get_replica_context().all_reduce("SUM", torch.tensor(2.0))) == 2.0


def test_classes():
    plain = ts.MultiWorkerMirroredStrategy()
    old = ts.experimental.MultiWorkerMirroredStrategy(communication=ts.experimental.CollectiveCommunication.AUTO)
    for strategy in (plain, old):
        assert isinstance(strategy, ts.MultiWorkerMirroredStrategy)
        assert isinstance(strategy, ts.experimental.MultiWorkerMirroredStrategy)
        assert not isinstance(strategy, ts.MirroredStrategy)
    assert not isinstance(ts.MirroredStrategy(["cpu:0"]), ts.experimental.MultiWorkerMirroredStrategy)


@pytest.mark.parametrize(
    "options", ["NCCL", 3, {"timeout_seconds": 5}, ts.experimental.CommunicationImplementation.RING]
)
def test_bad_communication_options(options):
    with pytest.raises(ValueError, match=r"communication_options must be ts\.experimental\.CommunicationOptions"):
        ts.MultiWorkerMirroredStrategy(communication_options=options)


@pytest.mark.parametrize(
    "resolver", ["TF_CONFIG", {"worker": ["a:1"]}, ts.experimental.CommunicationImplementation.RING]
)
def test_bad_resolver(resolver):
    with pytest.raises(TypeError, match=r"cluster_resolver must be a ts\.cluster_resolver\.ClusterResolver"):
        ts.MultiWorkerMirroredStrategy(resolver)


def test_configuration_of_the_guide():
    """3 workers and 2 parameter servers, which take no part: one warning, and one line as tf's for each strategy."""
    cluster = {**new_cluster(["worker"] * 3), "ps": ["host4:2222", "host5:2222"]}
    found = ts.testing.run_in_processes(workers.run_in_guide_cluster, 3, cluster)  # new processes: they warn once
    for rank, (rows, warnings, num_replicas) in enumerate(found):
        assert num_replicas == 3
        lines = [row for row in rows if "MultiWorkerMirroredStrategy with cluster_spec" in row]
        assert len(lines) == (2 if rank == 0 else 0)  # INFO lines are the chief's
        assert all("task_type = 'worker', task_id = 0, num_workers = 3" in line for line in lines)
        assert all("communication = CommunicationImplementation.AUTO" in line for line in lines)
        assert len(warnings) == 1
        assert "2 parameter server(s)" in warnings[0]


@pytest.mark.end_to_end
def test_program_of_the_guide(cluster_of, tmp_path):
    """It prints the same on one worker and on two, and goes on where others have saved."""
    code = re.search(r"```python\n(.*?)```", GUIDE_PATH.read_text(), re.DOTALL)[1]
    printed = {}
    for sizes in ((1, 2), (2, 3)):
        folder = tmp_path / f"{sizes}"
        folder.mkdir()
        printed[sizes] = ""
        for num_epochs, size in zip((3, 5), sizes, strict=True):
            program = code.replace("NUM_EPOCHS = 3", f"NUM_EPOCHS = {num_epochs}")
            of_chief, *of_others = cluster_of(size).run(workers.run_program, program, str(folder))
            assert of_others == [""] * (size - 1)
            printed[sizes] += of_chief
    assert printed[1, 2] == printed[2, 3]
    assert [line.partition(":")[0] for line in printed[1, 2].splitlines()] == [f"epoch {i}" for i in range(1, 6)]
