import torch

from torchstrategy.gradients.plan import _NUM_UNLIKE, Plans


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
