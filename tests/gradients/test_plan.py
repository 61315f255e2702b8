import numpy as np
import pytest
import torch

from torchstrategy.gradients.ledger import GradientLedger
from torchstrategy.gradients.notes import State
from torchstrategy.gradients.plan import _NUM_UNLIKE, Plans, look_at


def due(plan, writes, check_every=100):
    found = plan.is_due(writes, check_every)
    plan.num_sums += 1
    return found


def test_ranks_that_write_unequally_often_are_compared_only_so_often_between_two_comparisons():
    parameter = torch.nn.Parameter(torch.ones(2))
    plan = Plans().of([parameter])
    found = [due(plan, [step, 2 * step]) for step in range(300)]  # rank 1 writes twice in each step
    assert found[:2] == [True, True]
    for first in (2, 100, 200):  # after a comparison that is due anyway it looks again
        last = first // 100 * 100 + 99
        assert found[first:last] == [True] * _NUM_UNLIKE + [False] * (last - first - _NUM_UNLIKE)
        assert found[last]


def test_ranks_that_write_equally_often_are_compared_at_first_and_now_and_then():
    parameter = torch.nn.Parameter(torch.ones(2))
    plan = Plans().of([parameter])
    assert [k for k in range(200) if due(plan, [k, k])] == [0, 1, 99, 199]


def test_a_plan_is_of_its_parameters_only():
    first, second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    plans = Plans()
    plan = plans.of([first, second])
    assert plan.is_of([first, second])
    assert not plan.is_of([second, first])
    assert not plan.is_of([first])
    assert plans.of([second, first]) is not plan
    assert plans.of([first, second]) is plan
    del second
    assert not plan.is_alive()


# What may be written to.

LAST = {"memory_format": torch.channels_last}


def may_overwrite(parameters, make):
    """Say of each parameter whether its gradient may be overwritten, where ``backward`` made it as ``make`` does.

    Args:
        parameters: get the gradients.
        make: returns one for each.
    """
    ledger = GradientLedger(1, lambda: 0)
    ledger.begin_run()
    for parameter, grad in zip(parameters, make(), strict=True):
        ledger.watch(parameter, 0)
        parameter.grad = grad
    del grad
    for parameter, note in zip(parameters, ledger.notes_of(parameters), strict=True):
        if parameter.grad is not None:
            note.set(State.LOCAL, parameter.grad, 1)
    look = look_at(parameters, Plans().of(parameters), ledger)
    assert look.fits
    assert look.are_as_made
    return look.may_overwrite


def parameters_of(count, shape=(2,), **kwargs):
    return [torch.nn.Parameter(torch.zeros(shape, **kwargs)) for _ in range(count)]


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_memory_of_a_gradients_own_may_be_written_to(memory_format):
    shape = (2, 3, 4, 5)
    parameters = [torch.nn.Parameter(torch.zeros(shape).to(memory_format=memory_format)) for _ in range(3)]
    assert may_overwrite(parameters, lambda: [torch.zeros_like(p).detach() for p in parameters]) == [True] * 3
    assert may_overwrite(parameters_of(2, ()), lambda: [torch.zeros(()), None]) == [True, True]
    assert may_overwrite(parameters_of(1, (0,)), lambda: [torch.zeros(0)]) == [True]


KEPT = []


def kept():
    """Return a gradient that the program holds as well."""
    KEPT[:] = [torch.zeros(2)]
    return KEPT


def parts_of_one():
    return list(torch.zeros(4).view(2, 2).unbind())


OTHER_USES = {
    "held by the program": kept,
    "of a graph": lambda: [torch.ones(2, requires_grad=True) * 1],
    "leaf": lambda: [torch.ones(2, requires_grad=True)],
    "expanded": lambda: [torch.ones(1).expand(2)],
    "strided": lambda: [torch.ones(4)[::2]],
    "of NumPy": lambda: [torch.from_numpy(np.zeros(2, np.float32))],
    "of two parameters": lambda: [torch.ones(2)] * 2,
    "parts of one": parts_of_one,
    "negated lazily": lambda: [torch.zeros(2, dtype=torch.complex64).conj().imag],
}


@pytest.mark.parametrize("make", OTHER_USES.values(), ids=OTHER_USES)
def test_memory_with_other_uses_may_not_be_written_to(make):
    parameters = parameters_of(len(make()))
    assert not any(may_overwrite(parameters, make))


def test_a_gradient_in_another_format_is_not_where_the_sum_belongs():
    (parameter,) = parameters_of(1, (2, 3, 4, 5))
    assert may_overwrite([parameter], lambda: [torch.zeros(2, 3, 4, 5).to(**LAST)]) == [False]
    assert may_overwrite([parameter], lambda: [torch.zeros(2, 3, 4, 5)]) == [True]


def test_a_look_sees_that_a_layout_has_changed():
    ledger, plans = GradientLedger(1, lambda: 0), Plans()
    ledger.begin_run()
    (parameter,) = parameters_of(1, (2, 3, 4, 5))
    ledger.watch(parameter, 0)
    plan = plans.of([parameter])
    assert look_at([parameter], plan, ledger).fits
    for data in (parameter.data.to(**LAST), parameter.data.double(), parameter.data[:1].clone()):
        parameter.data = data
        assert plans.last_of([parameter]) is plan
        assert not look_at([parameter], plan, ledger).fits
        assert plans.of([parameter]) is not plan
        plan = plans.of([parameter])
        assert look_at([parameter], plan, ledger).fits


def test_a_gradient_that_is_there_twice_may_not_be_written_to():
    parameter, other = parameters_of(2)
    ledger = GradientLedger(1, lambda: 0)
    ledger.begin_run()
    for each in (parameter, other):
        ledger.watch(each, 0)
    parameter.sum().backward()
    other.sum().backward()
    twice = [parameter, other, parameter]
    assert look_at(twice, Plans().of(twice), ledger).may_overwrite == [False, True, False]


def test_a_missing_gradient_of_a_parameter_with_gaps():
    parameters = [torch.nn.Parameter(torch.ones(4, 6).t()[:, ::2])]
    look = look_at(parameters, Plans().of(parameters), GradientLedger(1))
    assert (look.fits, look.may_overwrite) == (False, [False])


def test_a_look_says_what_is_there():
    ledger = GradientLedger(1, lambda: 0)
    ledger.begin_run()
    dense, sparse, missing, assigned = parameters = parameters_of(4)
    for parameter in parameters:
        ledger.watch(parameter, 0)
    (dense.sum() * 2).backward()
    sparse.grad = torch.ones(2).to_sparse()
    assert missing.grad is None
    look = look_at([dense, sparse, missing], Plans().of([dense, sparse, missing]), ledger)
    assert (look.dense, look.sparse, look.are_as_made) == (0b001, 0b010, True)
    assigned.grad = torch.ones(2)
    look = look_at(parameters, Plans().of(parameters), ledger)
    assert (look.dense, look.sparse, look.are_as_made) == (0b1001, 0b0010, False)
    assert look.may_overwrite[3] is False
    dense.grad *= 2
    look = look_at([dense], Plans().of([dense]), ledger)
    assert (look.are_as_made, look.may_overwrite) == (False, [False])
