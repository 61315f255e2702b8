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


def test_a_gradient_that_nobody_else_holds_stays_where_it_was(process_pool):
    for answers in ([programs.keeps_gradients(cpu_devices(2))], process_pool(2).run(programs.keeps_gradients, None)):
        for is_same, total in answers:
            assert is_same
            assert total == 3.0


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_a_gradient_that_only_one_replica_has(num_replicas, process_pool):
    found = [programs.missing_on_some(cpu_devices(num_replicas))]
    found += process_pool(num_replicas).run(programs.missing_on_some, None)
    for gaps, first, second in found:
        torch.testing.assert_close(gaps, 2 * torch.arange(24.0).view(4, 6).t()[:, ::2])
        assert first.tolist() == [num_replicas] * 2
        assert second.tolist() == [2 * num_replicas] * 3


def test_the_programs_own_tensors_stay_what_they_were(process_pool):
    """A function's gradient may be a part of what it has saved, which torch takes as it is."""
    expected, _ = programs.train_on_kept_batches(cpu_devices(1))
    in_process = [programs.train_on_kept_batches(cpu_devices(2))]
    by_processes = process_pool(2).run(programs.train_on_kept_batches, None)
    for found, _ in (*in_process, *by_processes):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    examples = torch.arange(12, dtype=torch.float64).view(4, 1, 3)
    for number, own in enumerate(value for row in in_process[0][1] for value in row):
        assert torch.equal(own, examples[number])
    for rank, (_, kept) in enumerate(by_processes):
        assert all(torch.equal(own, examples[2 * k + rank]) for k, (own,) in enumerate(kept))


def test_who_else_holds_a_gradient_or_its_memory_keeps_it(process_pool):
    in_process = programs.gradients_that_others_hold(cpu_devices(2))
    by_processes = process_pool(2).run(programs.gradients_that_others_hold, None)
    for rows, coefficients in (in_process, *by_processes):
        assert coefficients == [1.0, 2.0, 3.0, 4.0, 5.0]
        for results in rows:
            for grads, _ in results:
                assert grads[:3] == [[3.0] * 5, [3.0] * 5, [2.0, 4.0, 6.0, 8.0, 10.0]]
                assert grads[3] == [2 - 3j] * 3
        assert all(is_kept for results in (rows[0], rows[2]) for _, is_kept in results)


def test_what_a_gradient_is_outlasts_a_parameters_absence(process_pool):
    for answers in process_pool(2).run(programs.a_parameter_leaves_and_returns, None):
        assert answers == (3.0,)
