"""The ways of data between ranks that are threads of this process."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

from tests.collectives.groups import GoneByNow, Group, exchange_bodies, no_check, on_ranks
from torchstrategy.collectives import backends as module
from torchstrategy.collectives.backends import (
    C10dBackend,
    HierarchicalBackend,
    MessageBackend,
    StagedBackend,
    from_bytes,
    to_bytes,
)
from torchstrategy.collectives.summing import as_bytes

HOSTS = [(0, 0), (0, 1), (0, 0, 1), (0, 1, 0, 1), (0, 1, 1, 2, 1)]


def gloo(store, rank, size):
    return C10dBackend(dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=30)))


def make_gloo(group):
    return on_ranks(group.size, lambda rank: gloo(PrefixStore("gloo", group.store), rank, group.size))


def make_messages(group):
    return [MessageBackend(records) for records in group.records]


def make_hierarchical(group):
    local = group.share_memory()
    num_hosts = len(set(group.hosts))

    def make(rank):
        is_leader = group.hosts.index(group.hosts[rank]) == rank
        store = PrefixStore("leaders", group.store)
        leaders = gloo(store, group.hosts[rank], num_hosts) if is_leader and num_hosts > 1 else None
        return HierarchicalBackend(group.hosts, rank, local[rank], leaders)

    return on_ranks(group.size, make)


@pytest.fixture(scope="module", params=HOSTS, ids=str)
def group(request):
    made = Group(request.param)
    yield made
    made.close()


@pytest.fixture(scope="module", params=[make_gloo, make_messages, make_hierarchical])
def backends(request, group):
    return request.param(group)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64, torch.uint8, torch.complex64], ids=str)
def test_sum(backends, dtype):
    def run(rank):
        tensor = torch.arange(3001).remainder(7).to(dtype) + rank
        scalar = torch.tensor(rank + 1, dtype=dtype)
        waits = [backends[rank].start_sum(tensor), backends[rank].start_sum(scalar)]
        for wait in waits:
            wait(no_check)
        return tensor, scalar

    size = len(backends)
    expected = (torch.arange(3001).remainder(7) * size + sum(range(size))).to(dtype)
    for tensor, scalar in on_ranks(size, run):
        assert torch.equal(tensor, expected)
        assert scalar == sum(range(1, size + 1))


def test_all_gather_and_broadcast(backends):
    def run(rank):
        own = torch.full((1000,), rank + 5, dtype=torch.uint8)
        outputs = [torch.zeros_like(own) for _ in backends]
        backends[rank].start_all_gather(outputs, own)(no_check)
        backends[rank].start_broadcast(own)(no_check)
        return [output.unique().tolist() for output in outputs], own.unique().tolist()

    size = len(backends)
    assert on_ranks(size, run) == [([[rank + 5] for rank in range(size)], [5])] * size


@pytest.mark.parametrize("make", [make_messages, make_hierarchical])
def test_no_wait_begins_once_a_rank_has_failed(make):
    group = Group([0, 0])
    backend = make(group)[0]
    for start in (backend.start_sum, backend.start_broadcast):
        check = GoneByNow()
        with pytest.raises(TimeoutError, match="enough"):
            start(torch.ones(3, dtype=torch.uint8))(check)
        assert check.calls == 1
    group.close()


@pytest.mark.parametrize("other", [b'[1,"all_reduce"]', b"#too long"])
def test_messages_out_of_step_are_found(other):
    group = Group([0, 0])
    backend = MessageBackend(group.records[0])
    tensor = torch.ones(2, dtype=torch.uint8)

    def run(rank):
        if rank == 1:
            return exchange_bodies(group.records[1], other)
        with pytest.raises(ConnectionError, match="lost step"):
            backend.start_sum(tensor)(no_check)
        return tensor.tolist()

    assert on_ranks(2, run) == [[1, 1], [b"#\x01\x01", other]]
    group.close()


def test_waiting_for_gloo_notices_failures_and_goes_on_meanwhile():
    group = Group([0, 0])
    backends = make_gloo(group)
    tensors = [torch.ones(2), torch.ones(2)]
    wait = backends[0].start_sum(tensors[0])
    with pytest.raises(TimeoutError, match="enough"):
        wait(GoneByNow())
    calls = []

    def third_time(other=[None]):  # noqa: B006 - keeps the other rank's part until it is due
        calls.append(1)
        if len(calls) == 2:
            other[0] = backends[1].start_sum(tensors[1])

    wait(third_time)
    assert len(calls) == 2
    assert tensors[0].tolist() == [2.0, 2.0]
    group.close()


def test_a_broken_process_group_is_a_connection_error():
    class Work:
        def wait(self, timeout):
            raise RuntimeError("Connection reset by peer")

    with pytest.raises(ConnectionError, match="reset by peer"):
        C10dBackend(Returning(Work())).start_sum(torch.ones(1))(no_check)


@pytest.mark.parametrize("error", [None, "Connection reset by peer"])
def test_what_ends_at_the_end_of_a_slice_of_waiting_has_not_timed_out(monkeypatch, error):
    monkeypatch.setattr(module, "_POLL", timedelta(seconds=0.05))

    class Work:
        is_over = False

        def wait(self, timeout):
            if self.is_over and error is None:
                return
            if self.is_over:
                raise RuntimeError(error)
            time.sleep(timeout.total_seconds())
            self.is_over = True  # just after torch has decided that the time is up
            raise RuntimeError("Operation timed out!")

        def is_completed(self):
            return self.is_over

    wait = C10dBackend(Returning(Work())).start_sum(torch.ones(1))
    if error is None:
        wait(no_check)
    else:
        with pytest.raises(ConnectionError, match=error):
            wait(no_check)


class Returning:
    """A process group whose sums are a given work."""

    def __init__(self, work):
        self.work = work

    def allreduce(self, tensors, options):
        return self.work


class Elsewhere:
    """Stands for a tensor of an accelerator."""

    def __init__(self, values):
        self.values = torch.tensor(values, dtype=torch.uint8)

    def cpu(self):
        return self.values.clone()

    def copy_(self, source):
        self.values.copy_(source)


class Doubling:
    """A backend of two equal ranks."""

    def start_sum(self, tensor):
        return lambda check: tensor.mul_(2)

    def start_broadcast(self, tensor):
        return lambda check: tensor.add_(1)


def test_tensors_of_accelerators_go_through_the_cpu():
    backend = StagedBackend(Doubling())
    tensor = Elsewhere([1, 2])
    wait = backend.start_sum(tensor)
    assert tensor.values.tolist() == [1, 2]
    wait(no_check)
    assert tensor.values.tolist() == [2, 4]
    backend.start_broadcast(tensor)(no_check)
    assert tensor.values.tolist() == [3, 5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.bfloat16, torch.complex128], ids=str)
@pytest.mark.parametrize("shape", [(), (3, 2), (0,)], ids=str)
def test_bytes_and_back(dtype, shape):
    tensor = torch.ones(shape).to(dtype)
    tensor = tensor.t() if tensor.dim() == 2 else tensor
    found = from_bytes(to_bytes(tensor), dtype)
    assert torch.equal(found, tensor.reshape(-1))
    found.zero_()  # in memory of its own


@pytest.mark.parametrize("num_rows", [0, 1])
def test_bytes_of_a_column_of_few_elements(num_rows):
    column = torch.ones(2, 3)[:num_rows, 0]
    assert torch.equal(from_bytes(to_bytes(column), column.dtype), column)
    assert len(as_bytes(column)) == column.nbytes
