"""Sums that travel in 16 bits, between ranks that are threads of this process."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

from tests.collectives.groups import GoneByNow, Group, no_check, on_ranks
from torchstrategy.base.options import PowerSGD
from torchstrategy.collectives.backends import C10dBackend, HierarchicalBackend
from torchstrategy.collectives.compression import NarrowBackend, compressed
from torchstrategy.collectives.native_groups import NativeBackend

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SIZES = [2, 3, 4]


class Recorded(C10dBackend):
    """Gloo, with the number of bytes that this rank hands over."""

    def __init__(self, group):
        super().__init__(group, "gloo")
        self.num_bytes = 0

    def start_all_gather(self, outputs, tensor):
        self.num_bytes += tensor.nbytes
        return super().start_all_gather(outputs, tensor)

    def start_all_to_all(self, output, tensor):
        self.num_bytes += tensor.nbytes
        return super().start_all_to_all(output, tensor)


def gloo(store, rank, size):
    return Recorded(dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=30)))


@pytest.fixture(scope="module")
def groups():
    made = {}
    for size in SIZES:
        group = Group([0] * size)
        store = PrefixStore("narrow", group.store)
        made[size] = on_ranks(size, lambda rank, size=size, store=store: gloo(store, rank, size))
        group.close()
    return made


@pytest.fixture(params=SIZES)
def backends(request, groups):
    return groups[request.param]


def parts_of(size, numel, dtype=torch.float32):
    generator = torch.Generator().manual_seed(numel)
    return [torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype) for _ in range(size)]


def sums_of(backends, name, parts, piece_numbers=0):
    def run(rank):
        tensor = parts[rank].clone()
        NarrowBackend(backends[rank], len(backends), name, piece_numbers).start_sum(tensor)(no_check)
        return tensor

    return on_ranks(len(backends), run)


def rounded_sum(parts, name):
    """Return what the sum must be to the bit: rounded parts, added in the order of ranks, rounded again."""
    total = parts[0].to(DTYPES[name]).float()
    for part in parts[1:]:
        total = total + part.to(DTYPES[name]).float()
    return (total.to(DTYPES[name]) if len(parts) > 2 else total).to(parts[0].dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("numel", [0, 1, 2, 3, 5, 1001])
def test_sums(backends, name, numel, dtype):
    parts = parts_of(len(backends), numel, dtype)
    for found in sums_of(backends, name, parts):
        assert found.dtype is dtype
        assert torch.equal(found, rounded_sum(parts, name))


@pytest.mark.parametrize("numel", [1, 4, 5, 12])
def test_sums_in_pieces(backends, numel):
    parts = parts_of(len(backends), numel)
    for found in sums_of(backends, "bf16", parts, piece_numbers=4):
        assert torch.equal(found, rounded_sum(parts, "bf16"))


def test_of_two_ranks_float64_is_added_in_float64(groups):
    parts = [torch.tensor([2.0**30], dtype=torch.float64), torch.tensor([1.0], dtype=torch.float64)]
    assert [found.tolist() for found in sums_of(groups[2], "bf16", parts)] == [[2.0**30 + 1]] * 2


def test_a_scalar_and_a_matrix(backends):
    for shape in ((), (3, 2)):
        for found in sums_of(backends, "bf16", [torch.full(shape, 0.5)] * len(backends)):
            assert torch.equal(found, torch.full(shape, 0.5 * len(backends)))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.float16], ids=str)
def test_other_types_travel_as_they_are(backends, dtype):
    parts = [torch.arange(7).to(dtype) + rank for rank in range(len(backends))]
    for found in sums_of(backends, "fp16", parts):
        assert torch.equal(found, torch.stack(parts).sum(0).to(dtype))


def test_overflow_is_infinite_on_all_ranks(backends):
    parts = [torch.tensor([1.0, 70000.0 if rank == 1 else 0.0, -70000.0]) for rank in range(len(backends))]
    for found in sums_of(backends, "fp16", parts):
        assert found.tolist() == [len(backends), torch.inf, -torch.inf]
    for found in sums_of(backends, "bf16", parts):
        assert torch.isfinite(found).all()


def test_a_sum_that_overflows_is_infinite_where_it_travels_in_16_bits(backends):
    expected = 100_000.0 if len(backends) == 2 else torch.inf
    parts = [torch.full((5,), 50_000.0 if rank < 2 else 0.0) for rank in range(len(backends))]
    for found in sums_of(backends, "fp16", parts):
        assert found.tolist() == pytest.approx([expected] * 5, rel=1e-3)


@pytest.mark.parametrize("name", DTYPES)
def test_nan_and_infinity_reach_all_ranks(backends, name):
    parts = [torch.ones(5) for _ in backends]
    parts[0][0], parts[-1][1], parts[0][2], parts[-1][2] = torch.nan, torch.inf, torch.inf, -torch.inf
    for found in sums_of(backends, name, parts):
        assert torch.equal(torch.isnan(found), torch.tensor([True, False, True, False, False]))
        assert found[1] == torch.inf
        assert found[3:].tolist() == [len(backends)] * 2


def test_bytes_on_the_way(backends):
    size, numel = len(backends), 1200
    before = [backend.num_bytes for backend in backends]
    sums_of(backends, "bf16", parts_of(size, numel))
    # Two ranks give each other everything; of more, each gets its part of everybody's and gives its sum.
    expected = 2 * numel if size == 2 else 2 * numel + 2 * numel // size
    assert [backend.num_bytes - n for backend, n in zip(backends, before, strict=True)] == [expected] * size


def test_nothing_is_sent_before_the_end_is_waited_for(groups):
    """So sums that are started in one order and waited for in another keep one order on all ranks."""
    backend = groups[2][0]
    before = backend.num_bytes
    for tensor in (torch.ones(3), torch.ones(3, dtype=torch.int64)):
        NarrowBackend(backend, 2, "bf16").start_sum(tensor)
    assert backend.num_bytes == before


def test_the_wait_ends_when_a_rank_has_failed(groups):
    check = GoneByNow()
    with pytest.raises(TimeoutError, match="enough"):
        NarrowBackend(NeverThere(), 2, "bf16").start_sum(torch.ones(3))(check)
    assert check.calls == 1


class NeverThere(C10dBackend):
    """A backend whose other ranks don't come."""

    def __init__(self):
        super().__init__(None)

    def start_all_gather(self, outputs, tensor):
        return lambda check: check()


@pytest.mark.parametrize("hosts", [(0, 0, 1), (0, 1, 0, 1), (0, 1, 1, 2, 1)], ids=str)
def test_inside_a_host_sums_are_exact(hosts):
    group = Group(hosts)
    local = group.share_memory()
    num_hosts = len(set(hosts))
    parts = parts_of(group.size, 1001)

    def run(rank):
        leaders = None
        if hosts.index(hosts[rank]) == rank:
            store = PrefixStore("leaders", group.store)
            leaders = compressed(gloo(store, hosts[rank], num_hosts), num_hosts, "bf16")
        tensor = parts[rank].clone()
        HierarchicalBackend(hosts, rank, local[rank], leaders).start_sum(tensor)(no_check)
        return tensor

    exact = [sum(part for part, host in zip(parts, hosts, strict=True) if host == h) for h in range(num_hosts)]
    for found in on_ranks(group.size, run):
        assert torch.equal(found, rounded_sum(exact, "bf16"))
    group.close()


def test_what_is_not_compressed_keeps_its_backend(groups):
    backend = groups[2][0]
    assert compressed(backend, 2, None) is backend
    assert compressed(backend, 2, PowerSGD()) is backend
    narrow = compressed(backend, 2, "fp16")
    assert (type(narrow), narrow.route) == (NarrowBackend, "gloo as fp16")


def test_only_gloo_sends_pieces(groups):
    parts = parts_of(2, 600_000)

    def run(rank):
        tensor, backend = parts[rank].clone(), Counting(groups[2][rank]._group)
        compressed(backend, 2, "bf16").start_sum(tensor)(no_check)
        return tensor, backend.num_gathers

    for found, num_gathers in on_ranks(2, run):
        assert num_gathers == 3
        assert torch.equal(found, rounded_sum(parts, "bf16"))
    nccl = NativeBackend(groups[2][0]._group, "NCCL", torch.device("cpu"))
    assert compressed(nccl, 2, "bf16")._piece_numbers == 0


class Counting(C10dBackend):
    num_gathers = 0

    def start_all_gather(self, outputs, tensor):
        self.num_gathers += 1
        return super().start_all_gather(outputs, tensor)


def test_bytes_of_other_collectives_stay_as_they_are(backends):
    def run(rank):
        backend = NarrowBackend(backends[rank], len(backends), "bf16")
        own = torch.full((10,), rank + 5, dtype=torch.uint8)
        outputs = [torch.zeros_like(own) for _ in backends]
        backend.start_all_gather(outputs, own)(no_check)
        backend.start_broadcast(own)(no_check)
        return [output.unique().tolist() for output in outputs], own.unique().tolist()

    size = len(backends)
    assert on_ranks(size, run) == [([[rank + 5] for rank in range(size)], [5])] * size
