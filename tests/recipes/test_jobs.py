import json
import os

import jobs
import pytest
from omegaconf import OmegaConf
from torch.distributed import TCPStore

import torchstrategy as ts

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}


@pytest.fixture(autouse=True)
def _fresh():
    yield
    jobs.start_time.cache_clear()
    jobs._job_store.cache_clear()


@pytest.fixture
def store(monkeypatch):
    """The store of a launcher, and the variables by which it tells of two processes."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in {**TORCHRUN, "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    return store


def start_time_of(monkeypatch, rank):
    """Return what a new process of this rank takes for the job's time of start."""
    monkeypatch.setenv("RANK", str(rank))
    jobs.start_time.cache_clear()
    return jobs.start_time()


def tf_config(port, task_type, index, num_workers=2):
    cluster = {"worker": [f"127.0.0.1:{port}", "127.0.0.1:1"][:num_workers]}
    return json.dumps({"cluster": cluster, "task": {"type": task_type, "index": index}})


def free_port():
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).port


def test_recipes_are_found_by_new_processes():
    assert os.path.dirname(jobs.__file__) in os.environ["PYTHONPATH"].split(os.pathsep)


def test_independent_copies_are_refused(monkeypatch):
    one = ts.OneDeviceStrategy("cpu:0")
    jobs.check_strategy(one)
    monkeypatch.setenv("TF_CONFIG", tf_config(2222, "worker", 0))
    with pytest.raises(ValueError, match=r"2 processes, but OneDeviceStrategy joins only 1.*multi_worker_mirrored"):
        jobs.check_strategy(one)


def test_several_replicas_of_one_process_are_copies_too(monkeypatch):
    two = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    monkeypatch.setenv("TF_CONFIG", tf_config(2222, "worker", 0))
    with pytest.raises(ValueError, match=r"2 processes, but MirroredStrategy joins only 1"):
        jobs.check_strategy(two)


def test_an_evaluator_does_not_train(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", tf_config(2222, "evaluator", 0))
    with pytest.raises(ValueError, match=r"TF_CONFIG says that this process is the evaluator, but the recipe trains"):
        jobs.check_strategy(ts.OneDeviceStrategy("cpu:0"))


def test_one_process_takes_the_time():
    assert jobs.world_size() == 1
    assert jobs.attempt() == 0
    assert jobs.start_time() == jobs.start_time()


def test_ranks_take_the_start_time_of_the_chief(monkeypatch, store):
    first = start_time_of(monkeypatch, 0)
    assert start_time_of(monkeypatch, 1) == first
    assert jobs.world_size() == 2


def test_a_restart_keeps_the_start_time(monkeypatch, store):
    first = start_time_of(monkeypatch, 0)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert jobs.attempt() == 1
    assert start_time_of(monkeypatch, 0) == first


def test_chief_of_a_cluster_keeps_the_store(monkeypatch):
    port = free_port()
    monkeypatch.setenv("TF_CONFIG", tf_config(port, "worker", 0))
    first = jobs.start_time()
    monkeypatch.setenv("TF_CONFIG", tf_config(port, "worker", 1))
    chiefs_store = jobs._job_store("127.0.0.1", port, True)
    jobs.start_time.cache_clear()
    assert jobs.start_time() == first
    del chiefs_store


def test_a_chief_whose_port_is_taken_says_how_to_do_without(monkeypatch):
    other = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TF_CONFIG", tf_config(other.port, "worker", 0))
    with pytest.raises(RuntimeError, match=r"Rank 0 of 2 can't agree .*:\d+ on a run directory: .*hydra\.run\.dir=FOL"):
        jobs.start_time()


@pytest.mark.parametrize(
    ("launcher", "message"),
    [
        ({"nproc": 0, "max_restarts": 0}, r"launcher\.nproc must be an integer of at least 1\. Received: 0"),
        ({"nproc": "two", "max_restarts": 0}, r"launcher\.nproc must be an integer of at least 1\. Received: 'two'"),
        ({"nproc": 2, "max_restarts": -1}, r"launcher\.max_restarts must be an integer of at least 0\. Received: -1"),
    ],
)
def test_wrong_numbers(launcher, message):
    with pytest.raises(ValueError, match=message):
        jobs.launched(lambda config: None)(OmegaConf.create({"launcher": launcher}))


@pytest.mark.parametrize("launcher", [{"nproc": 2, "max_restarts": 0}, {"nproc": 1, "max_restarts": 1}])
def test_two_launchers_are_refused(monkeypatch, store, launcher):
    with pytest.raises(
        ValueError, match=r"processes in each of 2, because torchrun has started several already\. Leav"
    ):
        jobs.launched(lambda config: None)(OmegaConf.create({"launcher": launcher}))


def test_by_default_the_function_is_simply_called(monkeypatch, store):
    config = OmegaConf.create({"launcher": {"nproc": 1, "max_restarts": 0}})
    assert jobs.launched(lambda config: config)(config) is config
