"""Gloo's backend between ranks that are threads of this process: sums in parts, and the network that carries them."""

import contextlib
import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore

from tests.collectives.groups import no_check, on_ranks
from torchstrategy.collectives.backends import C10dBackend, gloo_backend
from torchstrategy.collectives.threaded_backend import ThreadedBackend

TIMEOUT = timedelta(seconds=30)
PART_BYTES = 64


class Counted:
    """A process group that notes how many bytes each of its sums has."""

    def __init__(self, group):
        self.group = group
        self.num_bytes = []

    def allreduce(self, tensors, options):
        self.num_bytes.append(tensors[0].nbytes)
        return self.group.allreduce(tensors, options)


def make_backends(size):
    store = HashStore()
    return on_ranks(size, lambda rank: gloo_backend(store, rank, size, TIMEOUT, "127.0.0.1"))


@pytest.fixture(scope="module", params=[2, 3])
def groups(request):
    return [backend._group for backend in make_backends(request.param)]


def sums_of(backends, parts):
    def run(rank):
        tensor = parts[rank].clone()
        backends[rank].start_sum(tensor)(no_check)
        return tensor

    return on_ranks(len(backends), run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize("shape", [(0,), (8,), (9,), (5, 13), (200,)], ids=str)
def test_sums_in_parts_are_those_in_one(groups, shape, dtype):
    generator = torch.Generator().manual_seed(0)
    parts = [(torch.rand(shape, generator=generator, dtype=torch.float64) * 50).to(dtype) for _ in groups]
    counted = [Counted(group) for group in groups]
    whole = sums_of([C10dBackend(group) for group in groups], parts)
    for threaded in (False, True):
        backends = [C10dBackend(group, part_bytes=PART_BYTES) for group in counted]
        found = sums_of([ThreadedBackend(backend) for backend in backends] if threaded else backends, parts)
        for one in found:
            torch.testing.assert_close(one, whole[0], rtol=1e-6, atol=0)  # of three ranks the order may be another
            assert torch.equal(one, found[0])
            assert len(groups) > 2 or torch.equal(one, whole[0])
    size = parts[0].nbytes
    for group in counted:
        assert len(group.num_bytes) == 2 * max(1, -(-size // PART_BYTES))
        assert max(group.num_bytes) <= PART_BYTES
        assert sum(group.num_bytes) == 2 * size


def test_parts_have_at_most_12_mib_and_are_all_under_way_at_once():
    backends = make_backends(2)
    for backend in backends:
        backend._group = Counted(backend._group)
    numel = 2 * (12 << 20) // 4 + 1
    tensors = [torch.arange(numel, dtype=torch.float32).remainder_(1000) + rank for rank in range(2)]
    waits = on_ranks(2, lambda rank: backends[rank].start_sum(tensors[rank]))
    for backend in backends:
        assert len(backend._group.num_bytes) == 3
        assert max(backend._group.num_bytes) <= 12 << 20
    for wait in waits:
        wait(no_check)
    expected = torch.arange(numel, dtype=torch.float32).remainder_(1000) * 2 + 1
    assert all(torch.equal(tensor, expected) for tensor in tensors)


@pytest.mark.parametrize(
    ("names", "devices"),
    [
        ("", [{"hostname": "127.0.0.1", "lazy_init": True}]),
        ("lo", [{"interface": "lo", "lazy_init": True}]),
        ("lo,,lo,", [{"interface": "lo", "lazy_init": True}, {"interface": "lo", "lazy_init": True}]),
    ],
)
def test_the_interfaces_are_those_of_the_environment_or_the_ones_the_ranks_have_met_on(names, devices, monkeypatch):
    made = []
    create = dist.ProcessGroupGloo.create_device

    def noted(**arguments):
        made.append(arguments)
        return create(**arguments)

    monkeypatch.setattr(dist.ProcessGroupGloo, "create_device", noted)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", names)
    backends = make_backends(2)
    assert made == devices * 2
    for threaded in (backends, [ThreadedBackend(backend) for backend in backends]):
        assert all(found.tolist() == [3.0] for found in sums_of(threaded, [torch.ones(1), torch.full((1,), 2.0)]))


def test_a_rank_connects_to_those_that_it_sends_to():
    size = 16
    before = num_sockets()
    backends = make_backends(size)
    for _ in range(2):
        assert all(
            found.tolist() == [120.0] for found in sums_of(backends, [torch.full((1,), float(r)) for r in range(size)])
        )
    tensors = [torch.full((4,), rank, dtype=torch.uint8) for rank in range(size)]
    on_ranks(size, lambda rank: backends[rank].start_broadcast(tensors[rank])(no_check))
    assert all(tensor.tolist() == [0] * 4 for tensor in tensors)
    assert num_sockets() - before <= size * 7 < size * (size - 1)


def num_sockets():
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return found


def test_an_interface_that_is_not_there(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere7")
    with pytest.raises(RuntimeError, match="nowhere7"):
        gloo_backend(PrefixStore("none", HashStore()), 0, 1, TIMEOUT, "127.0.0.1")
