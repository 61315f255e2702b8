"""PowerSGD between ranks that are threads of this process, against the algorithm as the paper has it."""

import threading

import numpy as np
import pytest
import torch
from torch import nn

from tests.collectives.groups import on_ranks
from torchstrategy.base.options import PowerSGD
from torchstrategy.gradients import power_sgd
from torchstrategy.gradients.power_sgd import LowRankSums

SHAPES = [(12, 7), (9,), (8, 3, 2, 2), (1, 50), (), (0, 4)]


class Ranks:
    """Ranks whose sums meet in this process."""

    def __init__(self, size, options):
        self.size = size
        self.sent = [0] * size
        self._barrier = threading.Barrier(size)
        self._brought = [None] * size
        self.sums = [LowRankSums(options, lambda tensors, rank=rank: self._sum(rank, tensors)) for rank in range(size)]
        self.parameters = []

    def _sum(self, rank, tensors):
        self.sent[rank] = sum(tensor.numel() for tensor in tensors) + self.sent[rank]
        self._brought[rank] = [tensor.clone() for tensor in tensors]
        self._barrier.wait(10)
        totals = [sum(column[1:], column[0]) for column in zip(*self._brought, strict=True)]
        self._barrier.wait(10)
        return totals, 1

    def make_parameters(self, shapes, dtype=torch.float64):
        self.parameters = [[nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes] for _ in self.sums]

    def step(self, gradients, indices=None, apart=0.0):
        """Sum gradients ``[rank][parameter]`` of the parameters at ``indices``; all ranks get the same bits.

        Unless they may be ``apart``.
        """
        indices = list(range(len(gradients[0]))) if indices is None else indices

        def run(rank):
            parameters = [self.parameters[rank][k] for k in indices]
            return self.sums[rank](indices, parameters, gradients[rank])[0]

        with torch.no_grad():
            found = on_ranks(self.size, run)
        for other in found[1:]:
            torch.testing.assert_close(other, found[0], rtol=0, atol=apart, equal_nan=True)
        assert [total.shape for total in found[0]] == [grad.shape for grad in gradients[0]]
        return found[0]

    def states(self):
        return [one.state(parameters) for one, parameters in zip(self.sums, self.parameters, strict=True)]


def gradients_of(size, shapes, step, dtype=torch.float64):
    generator = torch.Generator().manual_seed(step)
    return [
        [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
        for _ in range(size)
    ]


def start_of(index, shape, rank):
    """Return what the first power step begins with."""
    size = (int(np.prod(shape[1:])), rank)
    return torch.randn(size, generator=torch.Generator().manual_seed(index), dtype=torch.float64).numpy()


class Reference:
    """Algorithms 1 and 2 of the paper for one matrix, in NumPy: averages, and the error against the average."""

    def __init__(self, size, start):
        self.errors = [0.0] * size
        self.q = start

    def step(self, matrices):
        deltas = [matrix + error for matrix, error in zip(matrices, self.errors, strict=True)]
        p = np.mean([delta @ self.q for delta in deltas], 0)
        for column in range(p.shape[1]):  # Gram-Schmidt
            for before in range(column):
                p[:, column] -= (p[:, before] @ p[:, column]) * p[:, before]
            p[:, column] /= np.linalg.norm(p[:, column])
        self.q = np.mean([delta.T @ p for delta in deltas], 0)
        average = p @ self.q.T
        self.errors = [delta - average for delta in deltas]
        return average * len(matrices)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_sums_are_those_of_the_paper(size, rank):
    ranks = Ranks(size, PowerSGD(rank, start_after=0, min_compression=1))
    ranks.make_parameters(SHAPES)
    compressed = [k for k, shape in enumerate(SHAPES) if k in (0, 2)]
    references = {k: Reference(size, start_of(k, SHAPES[k], rank)) for k in compressed}
    for step in range(5):
        gradients = gradients_of(size, SHAPES, step)
        found = ranks.step(gradients)
        for k, shape in enumerate(SHAPES):
            parts = [row[k].numpy() for row in gradients]
            if k in references:
                expected = references[k].step([part.reshape(shape[0], -1) for part in parts])
            else:
                expected = np.sum(parts, 0)
            np.testing.assert_allclose(found[k].numpy(), expected.reshape(shape), rtol=1e-10, atol=1e-10)


def test_nothing_is_lost_for_good():
    """What sums have left out so far is what the ranks keep."""
    ranks = Ranks(3, PowerSGD(1, start_after=0))
    ranks.make_parameters([(20, 30)])
    true = compressed = torch.zeros(20, 30, dtype=torch.float64)
    for step in range(20):
        gradients = gradients_of(3, [(20, 30)], step)
        true = true + sum(row[0] for row in gradients)
        compressed = compressed + ranks.step(gradients)[0]
    kept = sum(one._memories[parameters[0]].rest for one, parameters in zip(ranks.sums, ranks.parameters, strict=True))
    torch.testing.assert_close(true - compressed, kept, rtol=0, atol=1e-10)


def test_how_ranks_divide_the_data_makes_no_difference():
    shapes = [(20, 30), (5,)]
    results = []
    for size in (1, 2, 4):
        ranks = Ranks(size, PowerSGD(2, start_after=1))
        ranks.make_parameters(shapes)
        totals = []
        for step in range(4):
            rows = gradients_of(4, shapes, step)
            joined = [[sum(column) for column in zip(*rows[i::size], strict=True)] for i in range(size)]
            totals += ranks.step(joined)
        results.append(totals)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def test_a_sum_of_low_rank_is_exact():
    ranks = Ranks(2, PowerSGD(2, start_after=0))
    ranks.make_parameters([(20, 30)])
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        pair = [
            torch.outer(*(torch.randn(n, generator=generator, dtype=torch.float64) for n in (20, 30))) for _ in range(2)
        ]
        torch.testing.assert_close(ranks.step([[part] for part in pair])[0], sum(pair), rtol=0, atol=1e-10)


def test_first_sums_are_in_full():
    ranks = Ranks(2, PowerSGD(1, start_after=2))
    ranks.make_parameters([(20, 30)])
    exact = []
    for step in range(4):
        gradients = gradients_of(2, [(20, 30)], step)
        exact.append(torch.equal(ranks.step(gradients)[0], gradients[0][0] + gradients[1][0]))
    assert exact == [True, True, False, False]
    assert ranks.sent[0] == 2 * 600 + 2 * 50


@pytest.mark.parametrize(
    ("shape", "dtype", "is_compressed"),
    [
        ((20, 30), torch.float32, True),
        ((20, 30), torch.bfloat16, False),
        ((20, 30), torch.complex64, False),
        ((4, 4), torch.float32, True),  # 8 numbers of 16
        ((4, 3), torch.float32, False),
        ((400,), torch.float32, False),
        ((1, 400), torch.float32, False),
        ((3, 40, 4, 4), torch.float32, False),
        ((12, 4, 3, 3), torch.float32, True),
    ],
    ids=str,
)
def test_what_is_compressed(shape, dtype, is_compressed):
    ranks = Ranks(2, PowerSGD(1, start_after=0, min_compression=2 if shape != (3, 40, 4, 4) else 3))
    ranks.make_parameters([shape], dtype)
    ranks.step(gradients_of(2, [shape], 0, dtype))
    rows, numel = shape[0], int(np.prod(shape))
    assert ranks.sent == [rows + numel // rows if is_compressed else numel] * 2


def test_each_parameter_has_its_own_memory():
    """Parameters of equal shape, some of them without gradient now and then, and in another order of sums."""
    together, apart = (Ranks(2, PowerSGD(1, start_after=1)) for _ in range(2))
    shapes = [(20, 30), (20, 30)]
    together.make_parameters(shapes)
    apart.make_parameters(shapes)
    for step in range(5):
        gradients = gradients_of(2, shapes, step)
        found = together.step(gradients)
        for k in (1, 0):
            alone = apart.step([[row[k]] for row in gradients], indices=[k])
            torch.testing.assert_close(alone[0], found[k], rtol=0, atol=1e-12)
    assert together.states() == apart.states()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", [0, 1])
def test_what_is_not_finite_reaches_all_ranks_and_leaves_no_trace(value, where):
    """Whether it is in a matrix or in a gradient that travels in full: the step is skipped."""
    shapes = [(20, 30), (5,)]
    disturbed, other = (Ranks(2, PowerSGD(2, start_after=1)) for _ in range(2))
    disturbed.make_parameters(shapes)
    other.make_parameters(shapes)
    for step in range(4):
        if step in (0, 2):
            gradients = gradients_of(2, shapes, 100 + step)
            gradients[1][where].view(-1)[3] = value
            states = disturbed.states()
            found = disturbed.step(gradients)
            assert not torch.isfinite(found[where]).all()
            assert torch.isfinite(found[1 - where]).all()
            assert disturbed.states() == states
        gradients = gradients_of(2, shapes, step)
        for a, b in zip(disturbed.step(gradients), other.step(gradients), strict=True):
            assert torch.equal(a, b)


def test_a_gradient_of_zeros_does_not_end_it():
    """A column of zeros would stay one for good."""
    ranks = Ranks(2, PowerSGD(2, start_after=0))
    ranks.make_parameters([(20, 30)])
    zeros = [[torch.zeros(20, 30, dtype=torch.float64)] for _ in range(2)]
    assert ranks.step(zeros)[0].count_nonzero() == 0
    errors = []
    gradients = gradients_of(2, [(20, 30)], 1)
    total = gradients[0][0] + gradients[1][0]
    applied = torch.zeros_like(total)
    for rows in (gradients, zeros, zeros, zeros):
        applied = applied + ranks.step(rows)[0]
        errors.append(float((total - applied).norm()))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.9 * errors[0]


def test_small_numbers_do_not_vanish():
    """In float32 the product of a small gradient with a small start would be zero."""
    ranks = Ranks(2, PowerSGD(4, start_after=0, min_compression=1))
    ranks.make_parameters([(20, 30)], torch.float32)
    for step in range(6):
        rows = [[grad * 1e-30 for grad in row] for row in gradients_of(2, [(20, 30)], step, torch.float32)]
        found = ranks.step(rows)[0]
        assert torch.isfinite(found).all()
        assert float(found.double().norm()) > 0.3 * float((rows[0][0] + rows[1][0]).double().norm())


def test_ranks_that_round_differently_are_no_further_apart_with_each_sum(monkeypatch):
    """As processors of several kinds do: the next power step begins with a sum, which has the same bits everywhere."""
    ranks = Ranks(3, PowerSGD(2, start_after=0))
    ranks.make_parameters([(20, 30)], torch.float32)
    exact = power_sgd._orthonormal

    def rounded(left):
        basis = exact(left)
        return basis * (1 + 2.0**-23 * torch.randint(-1, 2, basis.shape))

    monkeypatch.setattr(power_sgd, "_orthonormal", rounded)
    for step in range(40):
        ranks.step(gradients_of(3, [(20, 30)], step, torch.float32), apart=1e-5)


def test_a_gradient_with_other_strides_and_one_that_is_an_expanded_number():
    ranks = Ranks(1, PowerSGD(1, start_after=0))
    ranks.make_parameters([(12, 4, 3, 3), (20, 30)])
    dense = gradients_of(1, [(12, 4, 3, 3)], 0)[0][0]
    strided = dense.to(memory_format=torch.channels_last)
    other = Ranks(1, PowerSGD(1, start_after=0))
    other.make_parameters([(12, 4, 3, 3), (20, 30)])
    ones = torch.ones((), dtype=torch.float64).expand(20, 30)
    for _ in range(2):
        found, expected = ranks.step([[strided, ones]]), other.step([[dense, ones.contiguous()]])
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    assert torch.equal(strided, dense)  # as the program made it
    torch.testing.assert_close(found[1], ones, rtol=0, atol=1e-12)


def test_ranks_with_different_pasts_begin_anew(caplog):
    """As if one of them came back: nobody may compress what another sends in full."""
    shapes = [(20, 30)]
    ranks = Ranks(2, PowerSGD(1, start_after=1))
    ranks.make_parameters(shapes)
    for step in range(3):
        ranks.step(gradients_of(2, shapes, step))
    assert len(set(ranks.states())) == 1
    with caplog.at_level("INFO", "torchstrategy"):
        ranks.sums[1].forget(ranks.parameters[1])
    assert "begins anew" in caplog.text
    assert len(set(ranks.states())) == 2
    for one, parameters in zip(ranks.sums, ranks.parameters, strict=True):  # as the sum of gradients does then
        one.forget(parameters)
    gradients = gradients_of(2, shapes, 9)
    assert torch.equal(ranks.step(gradients)[0], gradients[0][0] + gradients[1][0])


def test_a_parameter_that_is_gone_is_forgotten():
    ranks = Ranks(1, PowerSGD(1, start_after=0))
    ranks.make_parameters([(20, 30)])
    ranks.step(gradients_of(1, [(20, 30)], 0))
    assert len(ranks.sums[0]._memories) == 1
    ranks.parameters.clear()
    assert len(ranks.sums[0]._memories) == 0


def test_a_parameter_of_another_shape_begins_anew():
    ranks = Ranks(1, PowerSGD(1, start_after=1))
    ranks.make_parameters([(20, 30)])
    for step in range(2):
        ranks.step(gradients_of(1, [(20, 30)], step))
    gradients = gradients_of(1, [(30, 20)], 0)
    assert torch.equal(ranks.step(gradients)[0], gradients[0][0])


def test_autocast_and_a_default_device_make_no_difference():
    """A program may step inside of both."""
    plain, other = (Ranks(1, PowerSGD(2, start_after=0)) for _ in range(2))
    for ranks in (plain, other):
        ranks.make_parameters([(20, 30)], torch.float32)
    for step in range(3):
        gradients = gradients_of(1, [(20, 30)], step, torch.float32)
        expected = plain.step(gradients)[0]
        parameters = other.parameters[0]
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
            (found,), _ = other.sums[0]([0], parameters, gradients[0])
        assert torch.equal(found, expected)


def test_the_programs_random_numbers_stay_as_they_are():
    state = torch.get_rng_state()
    ranks = Ranks(1, PowerSGD(1, start_after=0))
    ranks.make_parameters([(20, 30)])
    ranks.step(gradients_of(1, [(20, 30)], 0))
    assert torch.equal(torch.get_rng_state(), state)
