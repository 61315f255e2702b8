"""Random training programs: with and without overlapped sums, N replicas are one, in processes and in one process."""

import functools

import pytest

from tests.parity import random_programs
from tests.parity.random_programs import make_program
from tests.parity.random_training import default_strategy, mirrored, run_random_program
from tests.programs import assert_equal, cpu_devices

FEW, MANY = range(8), range(8, 80)
SEEDS = [*FEW, *(pytest.param(seed, marks=pytest.mark.slow) for seed in MANY)]
#: Small buckets, so that these small models have several.
BYTES_PER_PACK = 200
pytestmark = [
    pytest.mark.filterwarnings("ignore:A gradient was changed in place:UserWarning"),
    pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),
]


@functools.cache
def expected(seed, num_replicas):
    """Return what one replica gives; after clipping of parts, what replicas in turns do."""
    if make_program(seed).clips_locally:
        return run_random_program(mirrored, seed, devices=cpu_devices(num_replicas))
    return run_random_program(default_strategy, seed)


def check(found, seed, num_replicas):
    assert_equal(found, expected(seed, num_replicas), 1e-10, note=make_program(seed))


@pytest.mark.parametrize(("num_replicas", "concurrent"), [(2, False), (3, False), (2, True)])
@pytest.mark.parametrize("seed", SEEDS)
def test_replicas_in_one_process(seed, num_replicas, concurrent):
    found = run_random_program(mirrored, seed, devices=cpu_devices(num_replicas), concurrent=concurrent)
    check(found, seed, num_replicas)


@pytest.mark.slow
@pytest.mark.parametrize(("num_processes", "overlap"), [(2, False), (2, True), (3, True)])
@pytest.mark.parametrize("seed", SEEDS)
def test_processes(seed, num_processes, overlap, process_pool):
    options = {"overlap": overlap, "bytes_per_pack": BYTES_PER_PACK}
    for found in process_pool(num_processes).run(run_random_program, mirrored, seed, **options):
        check(found, seed, num_processes)


@pytest.mark.parametrize("seed", SEEDS)
def test_replicas_in_two_processes(seed, process_pool):
    for found in process_pool(2).run(run_random_program, mirrored, seed, devices=cpu_devices(2)):
        check(found, seed, 4)


def test_programs_repeat():
    assert make_program(5) == make_program(5)
    assert len({make_program(seed) for seed in FEW}) == len(FEW)


def test_the_few_programs_have_everything():
    features = set().union(*(make_program(seed).features for seed in FEW))
    wanted = {*random_programs.LAYERS, *random_programs.BACKWARDS, *random_programs.EDITS, *random_programs.ZEROING}
    wanted |= {*random_programs.OPTIMIZERS}
    assert wanted | {"scaled", "overflow", "decays", "freezes inside", "evaluates", "2 optimizers"} <= features
