"""The rendezvous: who is waited for, what is compared, what it costs the store."""

import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import HashStore

import torchstrategy as ts
from torchstrategy.base import addresses
from torchstrategy.base.job import Job
from torchstrategy.cluster_resolver.cluster_spec import ClusterSpec
from torchstrategy.collectives import rendezvous, rounds
from torchstrategy.collectives.joining import Roll, report_end, store_of_job
from torchstrategy.collectives.rounds import mark_as_of_one_round, wait_for_all


def job_of(rank, size, **changes):
    fields = {"source": "a test", "reason": "", "cluster_spec": ClusterSpec({}), "task_type": None, "task_id": None}
    return Job(rank=rank, size=size, **{"address": "127.0.0.1", "port": 1, **fields, **changes})


def meet_all(store, descriptions, timeout_s=20.0, only=None):
    """Let ranks meet, each in a thread; return each one's error."""
    size = len(descriptions)

    def meet(rank):
        try:
            wait_for_all(store, job_of(rank, size), {"version": descriptions[rank]}, timeout_s)
        except (RuntimeError, ts.errors.OpError) as error:
            return error

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(meet, only or range(size)))


def test_equal_processes_meet_and_others_differ():
    assert meet_all(HashStore(), ["1"] * 5) == [None] * 5
    errors = meet_all(HashStore(), ["1", "1", "2"])
    assert all(isinstance(error, ts.errors.DisagreementError) for error in errors)
    assert "version: rank 2 has 2, rank 0 has 1" in str(errors[2]) or "rank 1 has 1" in str(errors[2])


def test_a_difference_is_told_to_all_that_have_come_before_the_others_do(monkeypatch):
    monkeypatch.setattr(rounds, "_LAST_WORDS_S", 0.2)
    errors = meet_all(HashStore(), ["1", "1", "1", "2"], timeout_s=60.0, only=[0, 1, 3])
    for rank, error in zip([0, 1, 3], errors, strict=True):
        assert isinstance(error, ts.errors.DisagreementError)
        assert "rank 3 has 2" in str(error)
        assert f"rank {rank} has" in str(error)


def test_those_that_do_not_come_are_named():
    errors = meet_all(HashStore(), ["1"] * 4, timeout_s=0.3, only=[0, 2])
    assert all("Rank 1, Rank 3 did not make its strategy within 0.3 s" in str(error) for error in errors)


def test_who_is_waited_for_is_said_again_and_again(monkeypatch, caplog):
    """Long before the end, in the words of the error at the end."""
    for name in ("PATIENCE_S", "AGAIN_S"):
        monkeypatch.setattr(rounds, name, 0.02)
    cluster = ClusterSpec({"worker": ["a:1", "b:2"]})
    with pytest.raises(ts.errors.DeadlineExceededError) as raised:
        wait_for_all(HashStore(), job_of(0, 2, cluster_spec=cluster, task_type="worker", task_id=0), {}, 0.3)
    why = "A process that does not come was not started, can't reach 127.0.0.1:1, or its program has not"
    lines = [line for line in caplog.messages if "Rank 1 (worker 1 at b:2)" in line]
    assert len(lines) > 1
    assert all(line.startswith("Waiting for Rank 1") and why in line for line in lines)
    assert str(raised.value).startswith("Rank 1 (worker 1 at b:2) did not make its strategy within 0.3 s.")
    assert why in str(raised.value)


def test_many_processes_ask_the_store_for_little():
    size, store = 100, HashStore()
    counted = []

    class Counting:
        def __getattr__(self, name):
            def call(*args):
                found = getattr(store, name)(*args)
                counted.append(len(str((args, found))))
                return found

            return call

    cluster = str(list(range(1000)))  # of a description, which all have and one has to send
    for rank in range(2):
        counted.clear()
        store.add("arrived", size - 1)
        assert wait_for_all(Counting(), job_of(rank, size), {"cluster": cluster}, 20.0)
        store.add("arrived", -size)
    assert len(counted) == 3
    assert sum(counted) < 500


class Watch:
    """Knows of one rank that has ended."""

    position = "making its strategy number 2"
    failure = None

    def __init__(self, ended):
        self.gone = {ended}


def test_a_rank_that_has_ended_is_not_waited_for():
    with pytest.raises(ts.errors.ReplicaFailedError, match="Rank 1 has ended its program"):
        wait_for_all(HashStore(), job_of(0, 3), {}, 60.0, Watch(1))
    store = HashStore()
    store.append("here", "1 ")  # it came before it ended
    store.add("arrived", 1)
    wait_for_all(store, job_of(0, 2), {}, 60.0, Watch(1))


def test_a_process_that_comes_again_is_refused(monkeypatch):
    store = HashStore()
    store.add("torchstrategy/0/job/joined/0", 1)
    monkeypatch.setattr(rendezvous, "_open_store", lambda job, timeout_s: store)
    with pytest.raises(RuntimeError, match="has joined this job before"):
        rendezvous.meet(job_of(0, 2, port=2), {}, timeout_s=0.2)


def cards(*names, address="127.0.0.1"):
    store = HashStore()
    for rank, name in reversed(list(enumerate(names))):
        store.append("cards", f'[{rank}, "{name}", "{address}"]\n')
    return store


def test_the_last_rank_says_who_is_on_which_host():
    size = 1000
    store = cards(*(["x" * 100] * size))
    assert rendezvous._hosts_of_all(store, job_of(7, size), is_last=True) == (0,) * size
    assert len(store.get("hosts")) < 30
    store.delete_key("cards")
    assert rendezvous._hosts_of_all(store, job_of(8, size), is_last=False) == (0,) * size
    for names in ["abcabc", "aabbccd", "a" * 8 + "bab", [f"host {rank // 8}" for rank in range(size)]]:
        store = cards(*names, address="10.0.0.1")
        hosts = tuple(list(dict.fromkeys(names)).index(name) for name in names)
        assert rendezvous._hosts_of_all(store, job_of(0, len(names)), is_last=True) == hosts
    assert len(store.get("hosts")) < 30
    store = cards("a", "b")
    for rank in range(2):
        with pytest.raises(RuntimeError, match=r"Rank 0 knows itself as 127\.0\.0\.1, which .* can't reach"):
            rendezvous._hosts_of_all(store, job_of(rank, 2), is_last=rank == 0)


def test_the_hosts_are_known_though_the_last_rank_is_stopped():
    store = cards("a", "a", "a")
    store.set_timeout(timedelta(seconds=0.1))
    assert rendezvous._hosts_of_all(store, job_of(1, 3), is_last=False) == (0, 0, 0)


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
    assert addresses.listen_at(address, free_port()) is None


@contextlib.contextmanager
def rolls(size, store=None):
    """Ranks of one job that are there; the first one keeps the roll."""
    own, made = store or HashStore(), []
    for rank in range(size):
        made.append(Roll(rank, size))
        made[-1].join(own, "127.0.0.1")
    until(lambda: len(made[0]._members) == size - 1 and all(roll._connection is not None for roll in made[1:]))
    yield made
    for roll in reversed(made):
        roll.leave()


def until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.01)


def die(roll):
    """Close the connections without a word, as the kernel does for a process that dies."""
    roll._learn = lambda failure: None  # it notices nothing any more
    connections = list(roll._members) if roll._keeps else [roll._connection]
    for connection in connections:
        connection.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("gone", [0, 2])
def test_a_rank_that_dies_while_others_gather_is_told_to_all(gone):
    with rolls(4) as made:
        die(made[gone])
        for roll in made[:gone] + made[gone + 1 :]:
            failure = roll.wait_for_failure(20.0)
            assert failure["rank"] == gone
            assert "has died while the job was starting (process " in failure["error"]


def test_a_rank_that_leaves_the_roll_is_not_missed():
    with rolls(3) as made:
        made[1].leave()
        until(lambda: len(made[0]._members) == 1)
        assert [roll.failure for roll in made] == [None] * 3
        made[2].fail(OSError("no disk"))
        for roll in (made[0], made[2]):
            assert "OSError: no disk" in roll.wait_for_failure(20.0)["error"]
        assert made[1].failure is None


def test_whoever_waits_hears_from_a_launcher_how_a_rank_has_ended(monkeypatch):
    store = HashStore()
    mark_as_of_one_round(store)
    monkeypatch.setattr(rendezvous, "_open_store", lambda job, timeout_s: store)
    errors = {}

    def meet(rank):
        try:
            rendezvous.meet(job_of(rank, 4, port=4, hosted=True), {}, timeout_s=60.0)
        except ts.errors.ReplicaFailedError as error:
            errors[rank] = str(error)

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in (0, 2)]
    for thread in threads:
        thread.start()
    until(lambda: len(store.get("torchstrategy/0/job/here").split()) == 2)
    own = store_of_job(store, 0)
    report_end(own, 1, "has ended before the job had started: exit status 3 (process 4 on there)")
    report_end(own, 3, "has ended before the job had started: killed by SIGTERM (process 5 on there)")
    for thread in threads:
        thread.join(timeout=20)
    assert sorted(errors) == [0, 2]
    for text in errors.values():
        assert text.startswith("Rank 1 has ended before the job had started: exit status 3 (process 4 on there). ")
        assert "Not here yet: Rank 3." in text


def test_a_store_whose_launcher_has_ended_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(rendezvous, "_LAUNCHER_ENDED_S", 0.1)
    with pytest.raises(RuntimeError, match="The launcher keeps it: did it start"):
        rendezvous._open_store(job_of(1, 2, port=free_port(), hosted=True), 60.0)
