"""N replicas = 1 replica for what custom training loops do besides a plain step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.parity.techniques.registry import data, load_programs, loss_of, run_program
from tests.programs import assert_equal, cpu_devices, strategy_for

PROGRAMS = load_programs()
pytestmark = [  # torch's own, in LBFGS and Adagrad
    pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),
]


@pytest.fixture(scope="module")
def one_replica():
    """What each program gives with the default strategy, computed when it is first asked for."""
    results = {}

    def get(name):
        if name not in results:
            results[name] = run_program([], name)
        return results[name]

    return get


@pytest.mark.parametrize("count", [*(pytest.param(count, marks=pytest.mark.slow) for count in (1, 2)), 3])
@pytest.mark.parametrize("name", PROGRAMS)
def test_replicas_in_one_process(name, count, one_replica):
    assert_equal(run_program(cpu_devices(count), name), one_replica(name), PROGRAMS[name].tolerance)


@pytest.mark.parametrize("name", PROGRAMS)
def test_two_processes(name, one_replica, process_pool):
    for result in process_pool(2).run(run_program, None, name):
        assert_equal(result, one_replica(name), PROGRAMS[name].tolerance)


@pytest.mark.filterwarnings("ignore:A gradient was changed in place:UserWarning")
@pytest.mark.parametrize("count", [2, 3])
def test_clipping_before_the_sum_clips_each_replicas_part(count, process_pool):
    """tf's rule, which is outside the promise: the sum of the clipped parts is applied, and may exceed the limit."""
    x, y = data()
    limit, rate = 0.05, 0.1

    torch.manual_seed(7)
    model = nn.Linear(4, 2).double()
    applied = [torch.zeros_like(p) for p in model.parameters()]
    share = -(-4 // count)
    for own_x, own_y in zip(x[:4].split(share), y[:4].split(share), strict=True):
        model.zero_grad()
        ((model(own_x) - own_y).square().sum() / 4).backward()
        nn.utils.clip_grad_norm_(model.parameters(), limit)
        for total, parameter in zip(applied, model.parameters(), strict=True):
            total += parameter.grad
    expected = [p.detach() - rate * total for p, total in zip(model.parameters(), applied, strict=True)]

    results = [locally_clipped(cpu_devices(count), limit, rate)]
    if count == 2:
        results += process_pool(2).run(locally_clipped, None, limit, rate)
    for result in results:
        torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-10)
    assert nn.utils.get_total_norm(applied) > limit


def locally_clipped(devices, limit, rate):
    torch.manual_seed(7)
    strategy = strategy_for(devices)
    with strategy.scope():
        model = nn.Linear(4, 2).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    x, y = data()
    (inputs,) = strategy.experimental_distribute_dataset((x[:4], y[:4]), batch_size=4)

    def step(x, y):
        loss_of(model, x, y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()

    strategy.run(step, args=inputs)
    return [p.detach() for p in model.parameters()]
