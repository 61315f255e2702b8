"""Which way data takes, by size and place."""

import dataclasses
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from tests.collectives.groups import Group, no_check, on_ranks
from torchstrategy.base import devices
from torchstrategy.base.options import CommunicationImplementation, PowerSGD
from torchstrategy.collectives import records, routes, shared_memory
from torchstrategy.collectives.backends import (
    C10dBackend,
    HierarchicalBackend,
    MessageBackend,
    StagedBackend,
)
from torchstrategy.collectives.compression import NarrowBackend
from torchstrategy.collectives.native_groups import make_native_backend
from torchstrategy.collectives.rendezvous import Rendezvous
from torchstrategy.collectives.routes import Routes, choose_implementation, make_routes, usable_compression
from torchstrategy.collectives.shared_memory import SharedMemoryBackend
from torchstrategy.collectives.xla_backend import XlaBackend

AUTO, RING, NCCL = CommunicationImplementation.AUTO, CommunicationImplementation.RING, CommunicationImplementation.NCCL


def routes_of(hosts, implementation=AUTO, hierarchical=None, compression=None):
    group = Group(hosts)

    def make(rank):
        rendezvous = Rendezvous(group.store, None, rank, group.size, "127.0.0.1", group.hosts)
        exchange, timeout = group.exchange(rank), timedelta(seconds=30)
        return make_routes(
            implementation,
            rendezvous,
            group.records[rank],
            exchange,
            no_check,
            timeout,
            hierarchical=hierarchical,
            compression=compression,
        )

    made = on_ranks(group.size, make)
    group.close()
    return made


def kinds(made):
    return {(type(one.small), type(one.large), one.with_record_bytes) for one in made}


@pytest.mark.parametrize(
    ("hosts", "implementation", "hierarchical", "small", "large"),
    [
        ((0, 0), AUTO, None, MessageBackend, SharedMemoryBackend),
        ((0, 0), AUTO, False, MessageBackend, C10dBackend),
        ((0, 1), AUTO, None, MessageBackend, C10dBackend),
        ((0, 1), AUTO, True, MessageBackend, C10dBackend),
        ((0, 0, 1), AUTO, None, MessageBackend, HierarchicalBackend),
        ((0, 0), RING, None, C10dBackend, C10dBackend),
        ((0, 0), RING, True, SharedMemoryBackend, SharedMemoryBackend),
        ((0, 1, 1), RING, True, HierarchicalBackend, HierarchicalBackend),
    ],
)
def test_backends_by_place(hosts, implementation, hierarchical, small, large):
    made = routes_of(hosts, implementation, hierarchical)
    assert kinds(made) == {(small, large, 16384 if implementation is AUTO else 0)}
    for one in made:
        assert type(one.backend_of(torch.ones(4096))) is small
        assert type(one.backend_of(torch.ones(4097))) is large
        assert len({line for other in made for line in other.lines}) == len(one.lines)


def test_tensors_of_accelerators_go_through_the_cpu_unless_the_backend_takes_them():
    (shared, _), (gloo, _) = routes_of((0, 0)), routes_of((0, 0), RING)
    for numel in (10, 10_000):
        elsewhere = torch.empty(numel, device="meta")
        on_gpu = SimpleNamespace(device=torch.device("cuda:0"), nbytes=numel * 4, is_cpu=False, is_cuda=True)
        assert [type(shared.backend_of(tensor)) for tensor in (elsewhere, on_gpu)] == [StagedBackend] * 2
        assert gloo.backend_of(on_gpu) is gloo.large
        assert type(gloo.backend_of(elsewhere)) is StagedBackend


def test_messages_of_many_ranks_are_shorter(monkeypatch):
    monkeypatch.setattr(records, "MAX_MESH_SIZE", 2)
    monkeypatch.setattr(routes, "MAX_MESH_SIZE", 2)
    for one in routes_of((0, 0, 0, 0)):
        assert one.small_bytes == one.with_record_bytes == 4096
        assert one.lines == ["up to 4,096 bytes in messages", "tensors through shared memory"]


def test_who_can_not_share_memory_says_so_once_and_takes_gloo(monkeypatch, caplog):
    def no_memory(card):
        raise OSError("No space left on device")

    monkeypatch.setattr(shared_memory, "_listen", no_memory)
    assert kinds(routes_of((0, 0))) == {(MessageBackend, C10dBackend, 16384)}
    (line,) = [record.getMessage() for record in caplog.records if "share memory" in record.getMessage()]
    assert line.endswith("so gloo carries their tensors. (rank 0: No space left on device)")


def test_gpus_keep_nccl_and_tensors_of_the_cpu_share_memory(monkeypatch):
    made = []

    def fake(store, rank, size, options):
        made.append((rank, size, options._timeout))
        return SimpleNamespace(eager_connect_single_device=made.append)

    fake.Options = SimpleNamespace
    monkeypatch.setattr(dist, "ProcessGroupNCCL", fake, raising=False)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    cuda = dataclasses.replace(devices.kind_of("cuda"), pins_memory=False)
    monkeypatch.setitem(devices._KINDS, "cuda", cuda)
    ranks = torch.device("cuda", 1), HashStore(), 1, 2, timedelta(seconds=30), lambda call: call()
    native = make_native_backend(NCCL, *ranks)
    assert made == [(1, 2, timedelta(seconds=30)), torch.device("cuda", 1)]  # connected ahead
    assert make_native_backend(RING, *ranks) is None
    gpu_tensor = SimpleNamespace(device=torch.device("cuda"), is_cpu=False, nbytes=4)
    for one in routes_of((0, 0), NCCL):
        assert one.with_native(native, 2).lines[0] == "tensors on GPUs over NCCL"
        assert one.backend_of(gpu_tensor) is native
        assert type(one.backend_of(torch.ones(10_000))) is SharedMemoryBackend


@pytest.mark.parametrize(
    ("hosts", "implementation", "backend", "line"),
    [
        ((0, 0), AUTO, SharedMemoryBackend, "tensors through shared memory"),
        ((0, 1), AUTO, NarrowBackend, "tensors over gloo as fp16"),
        ((0, 0), RING, NarrowBackend, "tensors over gloo as fp16"),
        (
            (0, 0, 1),
            AUTO,
            HierarchicalBackend,
            "tensors through shared memory in each of 2 hosts and over gloo as fp16 between them",
        ),
    ],
)
def test_only_what_leaves_a_host_is_compressed(hosts, implementation, backend, line):
    for one in routes_of(hosts, implementation, compression="fp16"):
        assert one.lines[-1] == line
        assert one.network == ("" if backend is SharedMemoryBackend else "gloo")
        if backend is not SharedMemoryBackend:  # how a number is rounded does not depend on the size of its bucket
            assert type(one.backend_of(torch.ones(1))) is type(one.backend_of(torch.ones(5000))) is backend
            assert type(one.backend_of(torch.empty(5000, device="meta"))) is StagedBackend
    for one in routes_of(hosts, implementation, compression=PowerSGD()):  # makes smaller what backends get
        assert type(one.large) is not NarrowBackend
    if backend is HierarchicalBackend:
        leaders = [one.large._leaders for one in routes_of(hosts, implementation, compression="fp16")]
        assert [type(leader) for leader in leaders] == [NarrowBackend, type(None), NarrowBackend]


def test_where_nothing_can_be_compressed_a_line_says_so(caplog):
    def usable(asked, network, device_type="cpu"):
        caplog.clear()
        return usable_compression(asked, Routes(None, None, network=network), device_type), caplog.text

    assert usable(None, "") == (None, "")
    for asked in ("bf16", PowerSGD(rank=7)):
        for network in ("gloo", "NCCL"):
            assert usable(asked, network) == (asked, "")
        for network, device_type, reason in (("", "cpu", "share their host's memory"), ("gloo", "xla", "XLA sums")):
            found, line = usable(asked, network, device_type)
            assert found is None
            assert f"Gradients are not compressed: gradient_compression={asked!r} has no effect" in line
            assert reason in line
    assert usable(PowerSGD(), "'mympi'") == (PowerSGD(), "")
    for name in ("'mympi'", "'gloo'"):  # a way of the user's may have any name
        found, line = usable("fp16", name)
        assert found is None
        assert f"{name} is not known to let ranks exchange parts" in line


def runtime_of(rank, connects_processes):
    return SimpleNamespace(
        device=torch.device("xla", 0), hardware="CPU", connects_processes=connects_processes, ordinal=1 - rank
    )


def test_xla_devices_have_collectives_of_their_own():
    """Unless XLA does not connect them: then their tensors go through the CPU, also where gloo takes those of GPUs."""
    xla_tensor = SimpleNamespace(device=torch.device("xla", 0), is_cpu=False, nbytes=36_000)
    for connects, backend, line in (
        (True, XlaBackend, "tensors on XLA devices by XLA's collectives"),
        (False, StagedBackend, "tensors on XLA's virtual CPU devices through the CPU"),
    ):
        group = Group((0, 1))

        def make(rank, group=group, connects=connects):
            rendezvous = Rendezvous(group.store, None, rank, group.size, "127.0.0.1", group.hosts)
            exchange, timeout = group.exchange(rank), timedelta(seconds=30)
            routes = make_routes(AUTO, rendezvous, group.records[rank], exchange, no_check, timeout, hierarchical=None)
            routes.add_xla(runtime_of(rank, connects), exchange, no_check)
            return routes

        for one in on_ranks(group.size, make):
            assert one.lines[0] == line
            assert type(one.backend_of(xla_tensor)) is backend
            assert type(one.backend_of(torch.ones(9_000))) is C10dBackend
        group.close()


def test_implementation_by_device(monkeypatch):
    with pytest.raises(ValueError, match="XLA devices communicate by XLA's own collectives, not by"):
        choose_implementation(RING, "xla")
    assert choose_implementation(AUTO, "xla") is AUTO
    with pytest.raises(ValueError, match="NCCL needs GPUs, but the replicas are on 'cpu'"):
        choose_implementation(NCCL, "cpu")
    assert choose_implementation(AUTO, "cpu") is AUTO
    assert choose_implementation(RING, "cuda") is RING
    assert choose_implementation("mine", "cpu") == "mine"
    for available, expected in ((True, NCCL), (False, AUTO)):
        monkeypatch.setattr(dist, "is_nccl_available", lambda available=available: available)
        assert choose_implementation(AUTO, "cuda") is expected
    with pytest.raises(ValueError, match="needs a torch that was built with NCCL"):
        choose_implementation(NCCL, "cuda")
