"""Where sums of gradients begin during ``backward``, and what carries them then."""

import pytest
import torch

from torchstrategy.base.options import PowerSGD
from torchstrategy.collectives.backends import C10dBackend, HierarchicalBackend
from torchstrategy.collectives.compression import NarrowBackend
from torchstrategy.collectives.native_groups import NativeBackend
from torchstrategy.collectives.routes import Routes, backends_during_backward, wants_overlap
from torchstrategy.collectives.threaded_backend import ThreadedBackend

GLOO, NCCL = C10dBackend(None, "gloo"), NativeBackend(None, "NCCL", torch.device("cpu"))


def routes_over(backend, network="gloo", **accelerators):
    return Routes(backend, backend, network=network, accelerators=accelerators)


@pytest.mark.parametrize(
    ("asked", "compression", "network", "expected"),
    [
        (None, None, "gloo", True),
        (None, None, "NCCL", True),
        (None, "bf16", "gloo", True),
        (None, None, "", False),  # shared memory
        (True, None, "", True),
        (False, None, "gloo", False),
        (True, PowerSGD(), "gloo", False),
        (True, None, "'mympi'", False),
        (True, None, "'gloo'", False),  # a way of the user's may have any name
    ],
)
def test_who_asks_for_it_gets_it_where_it_is_possible(asked, compression, network, expected):
    assert wants_overlap(asked, compression, routes_over(GLOO, network)) is expected


def test_gloo_and_nccl_work_by_themselves_and_other_backends_in_a_thread():
    assert backends_during_backward(routes_over(GLOO, "NCCL", cuda=NCCL)) == {"cpu": GLOO, "cuda": NCCL}
    for backend in (HierarchicalBackend([0, 1], 0, None, GLOO), NarrowBackend(GLOO, 2, "bf16")):
        (made,) = backends_during_backward(routes_over(backend)).values()
        assert isinstance(made, ThreadedBackend)


@pytest.mark.parametrize("accelerators", [{}, {"cuda": NarrowBackend(NCCL, 2, "bf16")}], ids=["gloo", "NCCL as bf16"])
def test_gradients_on_gpus_wait_for_the_step_unless_nccl_carries_them_as_they_are(accelerators):
    assert list(backends_during_backward(routes_over(GLOO, **accelerators))) == ["cpu"]
