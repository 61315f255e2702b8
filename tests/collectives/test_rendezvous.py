"""The rendezvous: who is waited for, what is compared, what it costs the store."""

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed import HashStore

import torchstrategy as ts
from torchstrategy.base.job import Job
from torchstrategy.cluster_resolver.cluster_spec import ClusterSpec
from torchstrategy.collectives import rendezvous


def job_of(rank, size, **changes):
    fields = {"source": "a test", "reason": "", "cluster_spec": ClusterSpec({}), "task_type": None, "task_id": None}
    return Job(rank=rank, size=size, **{"address": "127.0.0.1", "port": 1, **fields, **changes})


def meet_all(store, descriptions, timeout_s=20.0, only=None):
    """Let ranks meet, each in a thread; return each one's error."""
    size = len(descriptions)

    def meet(rank):
        try:
            rendezvous._wait_for_all(store, job_of(rank, size), {"version": descriptions[rank]}, timeout_s)
        except (RuntimeError, ts.errors.OpError) as error:
            return error

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(meet, only or range(size)))


def test_equal_processes_meet_and_others_differ():
    assert meet_all(HashStore(), ["1"] * 5) == [None] * 5
    errors = meet_all(HashStore(), ["1", "1", "2"])
    assert all(isinstance(error, ts.errors.DisagreementError) for error in errors)
    assert "version: rank 2 has 2, rank 0 has 1" in str(errors[2]) or "rank 1 has 1" in str(errors[2])


def test_those_that_do_not_come_are_named():
    errors = meet_all(HashStore(), ["1"] * 4, timeout_s=0.3, only=[0, 2])
    assert all("Rank 1, Rank 3 did not make its strategy within 0.3 s" in str(error) for error in errors)


def test_many_processes_ask_the_store_for_little():
    size, store = 100, HashStore()
    counted = {"check": 0, "multi_get": 0, "add": 0}

    class Counting:
        def __getattr__(self, name):
            if name in counted:
                counted[name] += 1
            return getattr(store, name)

    for rank in range(1, size):
        store.set(f"here/{rank}", '{"version": "1"}')
        store.add("arrived", 1)
    rendezvous._wait_for_all(Counting(), job_of(0, size), {"version": "1"}, 20.0)
    assert sum(counted.values()) <= 4


class Watch:
    """Knows of one rank that has ended."""

    position = "making its strategy number 2"
    failure = None

    def __init__(self, ended):
        self.has_left = lambda rank: rank == ended


def test_a_rank_that_has_ended_is_not_waited_for():
    with pytest.raises(ts.errors.ReplicaFailedError, match="Rank 1 has ended its program"):
        rendezvous._wait_for_all(HashStore(), job_of(0, 3), {}, 60.0, Watch(1))
    store = HashStore()
    store.set("here/1", "{}")  # it came before it ended
    rendezvous._wait_for_all(store, job_of(0, 2), {}, 60.0, Watch(1))


def test_ranks_of_different_attempts_are_told(monkeypatch):
    store = HashStore()
    store.set("torchstrategy/attempt/1", "0")
    monkeypatch.setattr(rendezvous, "_open_store", lambda job, timeout_s: store)
    job = job_of(0, 2, attempt=1, hosted=True)
    with pytest.raises(ts.errors.DeadlineExceededError, match=r"attempt 1 .* but rank 1 was in attempt 0"):
        rendezvous.meet(job, {}, timeout_s=0.2)


def test_a_process_that_comes_again_is_refused(monkeypatch):
    store = HashStore()
    store.add("torchstrategy/0/job/joined/0", 1)
    monkeypatch.setattr(rendezvous, "_open_store", lambda job, timeout_s: store)
    with pytest.raises(RuntimeError, match="has joined this job before"):
        rendezvous.meet(job_of(0, 2, port=2), {}, timeout_s=0.2)


@pytest.mark.parametrize("address", ["127.0.1.1", "::1"])
def test_an_address_that_leads_nowhere_is_named_on_all_ranks(address):
    job = job_of(1, 2, source="TF_CONFIG")
    with pytest.raises(RuntimeError, match=f"Rank 0 knows itself as {address}"):
        rendezvous._number_hosts(job, ["a", "b"], [address, "10.0.0.2"])
    assert rendezvous._number_hosts(job, ["a", "a"], [address, address]) == (0, 0)
    assert rendezvous._number_hosts(job, ["b", "a"], ["10.0.0.1", "10.0.0.2"]) == (0, 1)


def test_an_address_of_a_family_without_a_route_is_passed_over(monkeypatch):
    look_up = socket.getaddrinfo

    def with_ipv6(address, port, **options):
        nowhere = (socket.AF_INET6, socket.SOCK_DGRAM, 17, "", ("fe80::1", port, 0, 0))  # without an interface
        return [nowhere, *([] if address == "nowhere" else look_up(address, port, **options))]

    monkeypatch.setattr(socket, "getaddrinfo", with_ipv6)
    assert rendezvous._own_address("127.0.0.1", 1) == "127.0.0.1"
    with pytest.raises(RuntimeError, match="No interface of this host leads to nowhere"):
        rendezvous._own_address("nowhere", 1)


def test_a_process_that_cannot_connect_says_which_it_is(monkeypatch):
    store = HashStore()
    monkeypatch.setattr(rendezvous, "_open_store", lambda job, timeout_s: store)

    def meet(rank):
        try:
            rendezvous.meet(job_of(rank, 2, port=3), {}, timeout_s=1.0)
        except RuntimeError as error:
            return error

    def watch(store, rank, *args):
        raise (TimeoutError if rank else ConnectionError)(f"from rank {rank}")

    monkeypatch.setattr(rendezvous, "FailureWatch", watch)
    with ThreadPoolExecutor(2) as threads:
        refused, late = threads.map(meet, range(2))
    assert type(refused) is RuntimeError
    assert "Rank 0, which the others reach at 127.0.0.1, can't connect to all of them: from rank 0" in str(refused)
    assert isinstance(late, ts.errors.DeadlineExceededError)


def listeners(port):
    """Return the addresses at which something of this host listens on a port, as the kernel writes them."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return [address for address, own in (row[1].split(":") for row in rows if row[3] == "0A") if int(own, 16) == port]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_the_store_listens_at_its_address_alone(address):
    job = job_of(0, 1, address=address, port=free_port())
    store = rendezvous._open_store(job, 20.0)
    assert listeners(job.port) == ["0100007F"]
    other = rendezvous._open_store(job_of(1, 2, address=address, port=job.port), 20.0)
    store.set("name", "value")
    assert other.get("name") == b"value"
    again = rendezvous._open_store(job, 20.0)  # a further strategy's, or a process group of the user's
    assert again.get("name") == b"value"


@pytest.mark.parametrize("address", ["host-1", "0.0.0.0", "192.0.2.1"])
def test_where_others_may_know_another_address_torch_listens(address):
    """Names, all addresses, and one that is not of this host, as behind a gateway."""
    assert rendezvous._listen(job_of(0, 2, address=address, port=free_port())) is None
