"""Groups may be made at any time, several in one process; an evaluator stands outside."""

import pytest
import torch

import torchstrategy as ts
from tests.multi_worker import programs


@pytest.mark.slow
def test_groups_are_made_at_any_time_and_do_not_disturb_each_other():
    with ts.testing.ProcessPool(2, launcher="TF_CONFIG") as pool:
        assert pool.run(programs.groups) == [[2.0, 4.0, 2.0, 4.0, 2.0, 4.0, 2.0]] * 2


@pytest.mark.slow
def test_one_training_after_another():
    expected = programs.train(5)[1]
    with ts.testing.ProcessPool(2, launcher="TF_CONFIG") as pool:
        for found in [*pool.run(programs.two_trainings), *pool.run(programs.two_trainings)]:
            for weights in found:
                torch.testing.assert_close(weights, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.end_to_end
def test_an_evaluator_stands_outside_the_group(tmp_path):
    with ts.testing.ProcessPool(4, launcher="TF_CONFIG") as pool:
        *workers, evaluator = pool.run(programs.with_evaluator, tmp_path)
    assert [row["task"] for row in workers] == ["chief", "worker", "worker"]
    assert [row["is_chief"] for row in workers] == [True, False, False]
    assert all(row["replicas"] == row["total"] == 3 for row in workers)
    assert evaluator == {"task": "evaluator", "replicas": 1, "total": 1.0, "is_chief": True, "alone": True}
