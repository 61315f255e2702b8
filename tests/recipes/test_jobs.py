import jobs
import pytest
from torch.distributed import TCPStore


@pytest.fixture(autouse=True)
def _fresh():
    jobs.start_time.cache_clear()
    yield
    jobs.start_time.cache_clear()


def test_independent_copies_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    jobs.check_num_replicas(2)
    with pytest.raises(ValueError, match=r"WORLD_SIZE=2 processes.*only 1 replica.*Choose strategy=mirrored"):
        jobs.check_num_replicas(1)


def test_ranks_take_the_start_time_of_the_chief(monkeypatch):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    times = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        times.append(jobs.start_time())
        jobs.start_time.cache_clear()
    assert times[0] == times[1]


def test_several_processes_without_a_store_need_a_given_folder(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with pytest.raises(RuntimeError, match=r"pass the same hydra\.run\.dir=FOLDER"):
        jobs.start_time()
