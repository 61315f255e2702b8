"""Causes are told from numbers that can't be so by chance."""

import torch

from torchstrategy.testing.verification.deviations import Step, Update, ratio
from torchstrategy.testing.verification.gradient_causes import gradient_causes

WEIGHTS = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
RIGHT = torch.tensor([0.3, 0.1, -0.7, 0.2], dtype=torch.float64)


def kinds(final, right=RIGHT, weights=WEIGHTS, rows=(2, 2)):
    """Return the kinds for replicas that step with ``final`` where one replica steps with ``right``."""
    mine = [
        Step(num_rows=size, updates=[Update("sgd", gradients={"w": final}, before={"w": weights})]) for size in rows
    ]
    expected = Step(num_rows=4, updates=[Update("sgd", gradients={"w": right}, before={"w": weights})])
    return [kind for kind, _ in gradient_causes(mine, expected, 1e-10, {})]


def test_multiples_are_named_by_the_number_of_replicas():
    assert kinds(2 * RIGHT) == ["loss not divided"]
    assert kinds(RIGHT / 2) == ["loss divided twice"]
    assert kinds(RIGHT * 0.7) == ["loss scaled"]


def test_a_replica_without_examples_makes_its_mean_count_as_zero():
    assert kinds(RIGHT / 2, rows=(1, 0)) == ["each replica's mean weighs alike"]
    assert kinds(RIGHT / 3, rows=(1, 0, 0)) == ["each replica's mean weighs alike"]


def test_a_penalty_is_a_multiple_of_the_weights_or_of_their_signs():
    assert kinds(RIGHT + 0.2 * WEIGHTS) == ["regularizer not shared"]
    assert kinds(RIGHT + 0.2 * WEIGHTS.sign()) == ["regularizer not shared"]


def test_a_single_number_is_no_evidence_of_a_penalty_or_a_scale():
    assert kinds(RIGHT[:1] + 0.4, RIGHT[:1], WEIGHTS[:1]) == []
    assert kinds(RIGHT[:1] * 2, RIGHT[:1], WEIGHTS[:1]) == ["loss not divided"]


def test_gradients_of_weights_kind_are_not_taken_for_a_penalty():
    assert kinds(2 * WEIGHTS, WEIGHTS) == ["loss not divided"]


def test_rounding_is_no_multiple():
    noise = torch.tensor([1e-9, -3e-9, 2e-9, 1e-9], dtype=torch.float64)
    assert ratio(noise, WEIGHTS, 1e-10, scale=1.0) is None
    assert kinds(RIGHT + noise) == []
