"""Processes that share one device: gradients travel between them as between GPUs, but over gloo."""

import pytest
import torch

from tests.gpu.training import ACCELERATORS, on, skip_sparse
from tests.parity.random_programs import make_program
from tests.parity.random_training import default_strategy, mirrored, run_random_program
from tests.programs import assert_equal

pytestmark = [
    pytest.mark.filterwarnings("ignore:A gradient was changed in place:UserWarning"),
    pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),
]
PROGRAMS = [seed for seed in range(10) if not make_program(seed).clips_locally]


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", PROGRAMS)
@pytest.mark.parametrize("device", ACCELERATORS)
def test_two_processes_are_one_replica(seed, overlap, device, process_pool):
    skip_sparse(device, make_program(seed))
    options = {"devices": [device], "implementation": "RING", "overlap": overlap, "bytes_per_pack": 200}
    expected = run_random_program(default_strategy, seed)
    for found in process_pool(2).run(on, device, run_random_program, mirrored, seed, **options):
        assert_equal(found, expected, 1e-8)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", PROGRAMS[:3])
def test_one_process_with_nccl(seed, process_pool):
    """A job of one process makes NCCL's group, through which nothing needs to travel."""
    options = {"devices": ["cuda:0"], "implementation": "NCCL"}
    (found,) = process_pool(1).run(run_random_program, mirrored, seed, **options)
    assert_equal(found, run_random_program(default_strategy, seed), 1e-8)
    assert torch.distributed.is_nccl_available()
