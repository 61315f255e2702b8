"""One seed for everything that a program draws."""

import linecache
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

import torchstrategy as ts
from torchstrategy import patches


def draw_all():
    return random.random(), np.random.rand(3).tolist(), torch.rand(3).tolist()


@pytest.mark.parametrize("seed", [0, 5, 2**32 - 1, np.int64(5)])
def test_seeds_all_three(seed):
    ts.utils.set_random_seed(seed)
    first = draw_all()
    ts.utils.set_random_seed(int(seed))
    assert draw_all() == first
    ts.utils.set_random_seed(6)
    assert all(a != b for a, b in zip(draw_all(), first, strict=True))


@pytest.mark.parametrize("seed", [-1, 2**32, 1.0, "1", None, True])
def test_refused_seeds_change_nothing(seed):
    ts.utils.set_random_seed(5)
    first = draw_all()
    ts.utils.set_random_seed(5)
    with pytest.raises(ValueError, match="integer from 0"):
        ts.utils.set_random_seed(seed)
    assert draw_all() == first


@pytest.mark.parametrize("devices", [["cpu:0"], ["cpu:0", "cpu:1"]])
def test_refused_inside_run(devices):
    with pytest.raises(RuntimeError, match="inside `run`"):
        ts.MirroredStrategy(devices).run(ts.utils.set_random_seed, args=(3,))


class Noise(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self, seed):
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def forward(self, count):
        return torch.rand(count, generator=self.generator)


def weights_masks_and_noise(devices, num_steps=3):
    """For each step and replica of this process."""
    ts.utils.set_random_seed(3)
    strategy = ts.MirroredStrategy(devices)
    with strategy.scope():
        model = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5))
        noise = nn.Sequential(Noise(3))

    def step():
        return model[0].weight.detach().clone(), model[1](torch.ones(64)), noise(8)

    return [strategy.experimental_local_results(strategy.run(step)) for _ in range(num_steps)]


@pytest.fixture(params=[2, 4])
def in_process(request):
    return weights_masks_and_noise([f"cpu:{i}" for i in range(request.param)])


def test_replicas_start_alike_and_draw_differently(in_process):
    ts.utils.set_random_seed(3)
    weights = nn.Linear(4, 64).weight
    assert all(torch.equal(own, weights) for step in in_process for own, _, _ in step)
    for i in (1, 2):
        drawn = {tuple(replica[i].tolist()) for step in in_process for replica in step}
        assert len(drawn) == 3 * len(in_process[0])


def test_processes_draw_what_replicas_of_one_process_draw(in_process, process_pool):
    num_local = len(in_process[0]) // 2
    ranks = process_pool(2).run(weights_masks_and_noise, [f"cpu:{i}" for i in range(num_local)])
    for expected, *steps in zip(in_process, *ranks, strict=True):
        found = [replica for step in steps for replica in step]
        torch.testing.assert_close(found, list(expected), rtol=0, atol=0)


def draws_of_the_program(devices):
    """What a module's generator gives outside `run`, where ranks may decide something together, and inside."""
    strategy = ts.MirroredStrategy(devices)
    with strategy.scope():
        noise = Noise(3)
    drawn = []
    for _ in range(2):
        drawn.append([torch.rand(4, generator=noise.generator).tolist()])
        drawn[-1] += [x.tolist() for x in strategy.experimental_local_results(strategy.run(noise, args=(4,)))]
        noise.generator.manual_seed(9)
    return drawn


def test_a_generator_seeded_again_starts_new_streams_everywhere(process_pool):
    in_process = draws_of_the_program(["cpu:0", "cpu:1"])
    first, second = process_pool(2).run(draws_of_the_program, None)
    for expected, (outside, own), (other_outside, other) in zip(in_process, first, second, strict=True):
        assert [outside, own, other] == expected
        assert other_outside == outside
    assert in_process[0] != in_process[1]


@pytest.mark.slow
def test_kept_memory_is_not_fetched_again():
    program = """
import resource, torch, torchstrategy as ts
def faults(count):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(count):
        torch.ones(2 ** 21)  # 8 MiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
worked = ts.utils.keep_freed_memory()
faults(2)  # it keeps what these take
print(worked, faults(20))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    worked, count = done.stdout.split()
    if worked != "True":
        pytest.skip("this C library has no mallopt")
    assert int(count) < 10 * 2048  # half of what 20 tensors take when nothing is kept


def test_memory_is_not_kept_by_other_c_libraries(monkeypatch):
    monkeypatch.setattr("torchstrategy.patches.ctypes.CDLL", lambda name: object())
    assert ts.utils.keep_freed_memory() is False


def test_only_sources_that_can_be_read_again_are_forgotten():
    own = (4, None, ["1/0\n"], "<cell 1>")
    linecache.cache["<cell 1>"] = own
    first = linecache.getline(torch.__file__, 1)
    patches.forget_sources()
    assert torch.__file__ not in linecache.cache
    assert linecache.cache.pop("<cell 1>") == own
    assert first
    assert linecache.getline(torch.__file__, 1) == first


@pytest.mark.parametrize(("num_replicas", "concurrent"), [(2, True), (2, False), (1, True)])
def test_concurrent_replicas_on_the_cpu_keep_memory(monkeypatch, num_replicas, concurrent):
    calls = []
    monkeypatch.setattr("torchstrategy.replicas.threaded_hosting.keep_freed_memory", lambda: calls.append(1))
    ts.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)], concurrent=concurrent)
    assert calls == [1] * (concurrent and num_replicas > 1)
