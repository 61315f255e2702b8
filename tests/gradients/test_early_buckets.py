"""What a bucket copies, when it says that its copy is out of date, and when other buckets are needed."""

import pytest
import torch
from torch import nn

from torchstrategy.gradients.early_buckets import EarlyPlan
from torchstrategy.gradients.ledger import GradientLedger
from torchstrategy.gradients.plan import Plans

LEDGER, PLANS = GradientLedger(1, lambda: 0, at_once=True), Plans()


def watched(parameters):
    for parameter in parameters:
        LEDGER.watch(parameter, 0)
    return parameters


def backward(parameters, factor=1.0):
    """Add gradients as a replica's backward pass does."""
    sum((factor * parameter).sum() for parameter in parameters).backward()


def mark(parameter):
    """Make a gradient a sum over replicas."""
    LEDGER.note_sum([parameter], None)


@pytest.fixture
def parameters():
    return watched([nn.Parameter(torch.arange(float(size))) for size in (2, 3, 4)])


@pytest.fixture
def plan(parameters):
    plan = EarlyPlan(PLANS.of(parameters), parameters, {"cpu"}, LEDGER)
    for _ in range(2):
        plan.note_sum(range(len(parameters)))
    plan.plan_buckets([2, 1, 0], 1 << 20)
    return plan


@pytest.fixture
def bucket(plan):
    (bucket,) = plan.open_buckets({})
    return bucket


def test_own_gradients_are_copied_in_the_order_of_the_bucket(bucket, parameters):
    backward(parameters[:2], 2.0)
    assert bucket.fill_with_own()
    flat = bucket.flat
    assert flat.tolist() == [0, 0, 0, 0, 2, 2, 2, 2, 2]  # a missing one counts as zeros
    assert bucket.is_good()


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.grad.mul_(2),
        lambda p: setattr(p, "grad", p.grad * 2),
        lambda p: setattr(p, "grad", p.grad.to_sparse()),
        mark,
    ],
    ids=["in place", "replaced", "sparse", "summed"],
)
def test_gradients_that_backward_has_not_left_so(change, bucket, parameters):
    backward(parameters)
    change(parameters[1])
    assert not bucket.fill_with_own()
    assert bucket.flat is None


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.grad.mul_(2),
        lambda p: p.grad.data.neg_(),
        lambda p: setattr(p, "grad", None),
        lambda p: setattr(p.grad, "data", torch.ones(5)),
        mark,
        lambda p: backward([p]),
    ],
    ids=["in place", "past the version counter", "dropped", "other data", "summed", "another backward"],
)
def test_what_makes_a_copy_useless(change, bucket, parameters):
    backward(parameters)
    bucket.fill_with_own()
    assert bucket.is_good()
    change(parameters[1])
    assert not bucket.is_good()


def test_gradients_that_are_not_copied_yet(bucket, parameters):
    assert bucket.is_good()
    backward(parameters)
    parameters[1].grad.mul_(2)
    assert bucket.is_good()  # it will be copied as it is
    mark(parameters[1])
    assert not bucket.is_good()


def test_a_copy_for_ranks_that_have_started(bucket, parameters):
    backward(parameters)
    parameters[1].grad = parameters[1].grad.to_sparse()
    parameters[0].grad.mul_(3)
    assert not bucket.is_good()
    bucket.fill_with_any()
    assert bucket.flat.tolist() == [1, 1, 1, 1, 0, 0, 0, 3, 3]


def test_the_gradients_of_a_model_that_was_dropped(bucket, parameters):
    backward(parameters)
    parameters.clear()
    assert not bucket.fill_with_own()
    assert not bucket.is_good()
    bucket.fill_with_any()
    assert bucket.flat.tolist() == [0] * 9


def test_missing_passes(plan, parameters):
    plan.expected = [2, 1, 1]
    (bucket,) = plan.open_buckets({id(parameters[0]): 1, id(parameters[2]): 1})
    assert bucket.missing == 2


@pytest.mark.parametrize("device_types", [{"cpu"}, {"cuda"}])
def test_the_first_plan_comes_at_the_second_sum_on_every_rank(device_types, parameters):
    plan = EarlyPlan(PLANS.of(parameters), parameters, device_types, LEDGER)
    assert [plan.note_sum([0, 1]) for _ in range(2)] == [False, True]
    plan.plan_buckets([0, 1, 2], 1 << 20)
    assert plan.buckets == ([[0, 1]] if device_types == {"cpu"} else [])
    assert not plan.note_sum([0, 1])
    assert plan.note_sum([2]) == (device_types == {"cpu"})


def test_a_gradient_that_never_comes_any_more_leaves_its_bucket(plan):
    assert [plan.note_sum([0, 2]) for _ in range(8)] == [False] * 7 + [True]
    plan.plan_buckets([0, 1, 2], 1 << 20)
    assert plan.buckets == [[0, 2]]


def test_pauses_grow_until_a_step_is_good(plan):
    pauses = []
    for is_good in [False] * 11 + [True, False]:
        plan.note_outcome(is_good=is_good)
        pauses.append(plan.pause)
    assert pauses == [0, 1, 3, 7, 15, 31, 63, 127, 255, 255, 255, 0, 0]
