"""Sums are right whatever memory the gradients share, and may be written to it where nobody else reads it."""

import pytest
import torch

from tests.gradients import memory_programs as programs
from tests.programs import cpu_devices


@pytest.fixture(scope="module")
def one():
    return programs.train_all(cpu_devices(1))


@pytest.fixture(scope="module")
def others(process_pool):
    found = [programs.train_all(cpu_devices(2))]
    for size in (2, 3):
        found += process_pool(size).run(programs.train_all, None, timeout_s=100)
    return found


@pytest.mark.parametrize("name", programs.NETS)
def test_replicas_equal_one(name, one, others):
    for found in others:
        for (expected,), values in zip(one[name], found[name], strict=True):
            for value in values:
                torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10)


def test_a_gradient_stays_the_tensor_that_it_was(process_pool):
    for answers in ([programs.keeps_gradients(cpu_devices(2))], process_pool(2).run(programs.keeps_gradients, None)):
        for is_same, total in answers:
            assert is_same
            assert total == 3.0
