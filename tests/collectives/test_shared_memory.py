"""Collectives through shared memory, with a thread for each rank."""

import gc
import time
from pathlib import Path

import pytest
import torch

from tests.collectives.groups import Group, no_check, on_ranks
from torchstrategy.collectives import shared_memory

CHUNK_BYTES = shared_memory.chunk_bytes  # the tests put a small one in its place
DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.complex64),
]
# Of float32; chunks have 1024 numbers here, and 512 of tensors of up to 2048; tensors of more than 512 are added in two
# steps between 3 and more.
LENGTHS = [0, 1, 2, 5, 31, 512, 513, 1024, 1025, 2048, 2049, 3000, 4096, 10_001]


@pytest.fixture(scope="module", autouse=True)
def small_chunks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory, "chunk_bytes", lambda size: 4096)
        patch.setattr(shared_memory, "_ONE_STEP_BYTES", 2048)
        patch.setattr(shared_memory, "_SMALL_BYTES", 8192)
        yield


@pytest.fixture(scope="module", params=[2, 3, 4])
def backends(request):
    group = Group([0] * request.param)
    yield group.share_memory()
    group.close()


def values(rank, length, dtype):
    generator = torch.Generator().manual_seed(rank)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(length, generator=generator, dtype=torch.float64).to(dtype) * (rank + 1)
    return torch.randint(0, 100, (length,), generator=generator).to(dtype)


def expected_sum(size, length, dtype):
    parts = [values(rank, length, dtype) for rank in range(size)]
    is_narrow = dtype in (torch.float16, torch.bfloat16)
    total = parts[0].float() if is_narrow else parts[0]
    for part in parts[1:]:
        total = total + part
    return total.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_are_added_in_the_order_of_ranks_bit_for_bit(backends, dtype):
    def run(rank):
        tensors = [values(rank, length, dtype) for length in LENGTHS]
        for tensor in tensors:
            backends[rank].start_sum(tensor)(no_check)
        return tensors

    for found in on_ranks(len(backends), run):
        for length, tensor in zip(LENGTHS, found, strict=True):
            assert torch.equal(tensor, expected_sum(len(backends), length, dtype)), (length, dtype)


def test_tensors_are_summed_where_they_lie_as_if_they_were_one(backends):
    lists = [[7], [3, 0, 5], [600] * 5, [1, 5000, 2, 40, 3000, 0], [9] * 700]

    def run(rank):
        found = []
        for number, sizes in enumerate(lists):
            whole = values(rank + number, sum(sizes), torch.float32)
            tensors = [part.clone().view(-1, 1) for part in whole.split(sizes)]
            backends[rank].start_sum_of(tensors)(no_check)
            backends[rank].start_sum(whole)(no_check)
            found.append((tensors, whole))
        return found

    for found in on_ranks(len(backends), run):
        for sizes, (tensors, whole) in zip(lists, found, strict=True):
            assert all(map(torch.equal, (tensor.view(-1) for tensor in tensors), whole.split(sizes)))


def test_not_a_number_and_infinities_are_the_same_bits_everywhere(backends):
    def run(rank):
        bits = torch.tensor([0x7FC00001 + rank, 0x7F800000, 0x7F800000], dtype=torch.int32).repeat(700)
        tensor = bits.view(torch.float32)
        tensor[2::3] *= -1 if rank % 2 else 1
        backends[rank].start_sum(tensor)(no_check)
        return tensor.view(torch.int32)

    first, *others = on_ranks(len(backends), run)
    assert first.view(torch.float32)[:3].isnan().tolist() == [True, False, True]
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.slow
def test_operations_of_all_kinds_follow_each_other(backends):
    """Mixed at random, and waited for later than started: what one overwrites another must have read."""
    size = len(backends)

    def run(rank):
        choices = torch.Generator().manual_seed(9)
        found = []
        for step in range(150):
            kind = int(torch.randint(3, (), generator=choices))
            length = int(torch.randint(1, 7000, (), generator=choices))
            if kind == 0:
                tensors = [values(rank, length, torch.float32) + step, values(rank, 10, torch.float64)]
                waits = [backends[rank].start_sum(tensor) for tensor in tensors]
                for wait in reversed(waits):
                    wait(no_check)
                found += tensors
            elif kind == 1:
                own = torch.full((length,), (rank + step) % 256, dtype=torch.uint8)
                outputs = [torch.empty_like(own) for _ in range(size)]
                backends[rank].start_all_gather(outputs, own)(no_check)
                assert [output.unique().tolist() for output in outputs] == [[(r + step) % 256] for r in range(size)]
            else:
                own = torch.full((length,), (rank + step) % 256, dtype=torch.uint8)
                backends[rank].start_broadcast(own)(no_check)
                assert own.unique().tolist() == [step % 256]
            if (step + rank) % 7 == 0:
                time.sleep(0.001)
        return found

    first, *others = on_ranks(size, run)
    assert len(first) > 50
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_nothing_is_left_behind():
    def num_mappings():
        gc.collect()
        return Path("/proc/self/maps").read_text().count("memfd:torchstrategy")

    before = num_mappings()
    group = Group([0, 0])
    backends = group.share_memory()
    sockets = [peer for backend in backends for peer in backend._peers.values()]
    assert num_mappings() == before + 2
    assert not list(Path("/dev/shm").glob("*torchstrategy*"))
    del backends
    assert num_mappings() == before
    assert [connection.fileno() for connection in sockets] == [-1, -1]
    group.close()


def test_a_lost_rank_ends_the_wait():
    group = Group([0, 0, 0])
    backends = group.share_memory()
    for peer in backends[2]._peers.values():
        peer.close()
    for rank in (0, 1):
        with pytest.raises(ConnectionError):
            backends[rank].start_sum(torch.ones(5000))(no_check)
    group.close()


def test_the_check_ends_the_wait_for_a_rank_that_does_not_come():
    group = Group([0, 0])
    backends = group.share_memory()
    calls = []

    def check():
        calls.append(1)
        if len(calls) == 3:
            raise TimeoutError("enough")

    with pytest.raises(TimeoutError, match="enough"):
        backends[0].start_sum(torch.ones(10))(check)
    assert len(calls) == 3
    group.close()


def test_ranks_out_of_step_are_found():
    group = Group([0, 0])
    backends = group.share_memory()
    next(iter(backends[1]._peers.values())).send(b"\x07")
    with pytest.raises(ConnectionError, match="lost step"):
        backends[0].start_sum(torch.ones(10))(no_check)
    group.close()


def test_a_rank_alone_on_its_host_has_no_backend():
    group = Group([0, 1, 0])
    first, alone, third = group.share_memory()
    assert alone is None

    def run(rank):
        tensor = torch.full((3,), rank + 1.0)
        {0: first, 2: third}[rank].start_sum(tensor)(no_check)
        return tensor.tolist()

    assert on_ranks(3, lambda rank: None if rank == 1 else run(rank)) == [[4.0] * 3, None, [4.0] * 3]
    group.close()


@pytest.mark.parametrize("name", ["_allocate", "_listen", "_share"])
def test_every_rank_learns_why_memory_can_not_be_shared(name, monkeypatch):
    original = getattr(shared_memory, name)
    calls = []

    def fail_once(*args):
        calls.append(args)
        if len(calls) == 1:
            raise OSError(28, "No space left on device")
        return original(*args)

    monkeypatch.setattr(shared_memory, name, fail_once)
    monkeypatch.setattr(shared_memory, "_SET_UP_S", 1.0)
    group = Group([0, 0, 1])
    reasons = group.share_memory()
    assert len(set(reasons)) == 1
    assert "No space left on device" in reasons[0]
    group.close()


def test_other_systems_are_told(monkeypatch):
    monkeypatch.setattr(shared_memory.sys, "platform", "darwin")
    group = Group([0, 0])
    assert group.share_memory() == ["rank 0: shared memory between processes needs Linux, and this is darwin"] * 2
    group.close()


def test_memory_is_bounded():
    for size in range(2, 129):
        chunk = CHUNK_BYTES(size)
        assert chunk * 3 * (size + 1) <= 64 << 20
        assert chunk % 64 == 0
