"""Estimators whose processes step together train as the same replicas of one process do."""

import pytest

from tests.estimator import training_on_ranks
from torchstrategy.testing import ProcessPool


@pytest.mark.end_to_end
@pytest.mark.parametrize("num_local", [1, 2])
def test_losses_weights_and_steps_are_those_of_one_process(tmp_path, process_pool, num_local):
    expected = training_on_ranks.train(tmp_path / "one", 2 * num_local)
    found = process_pool(2).run(training_on_ranks.train, tmp_path / "two", num_local)
    for rank, (losses, values, contexts) in enumerate(found):
        assert losses == pytest.approx(expected[0], rel=1e-6)
        assert values == pytest.approx(expected[1], rel=1e-6)
        assert contexts == [[2, rank]] * 2
    assert sorted(path.name for path in (tmp_path / "two").glob("*.pt")) == [f"model.ckpt-{i}.pt" for i in (0, 2, 3)]


@pytest.mark.parametrize(("lengths", "steps"), [([6, 1], 2), ([1, 6], 2), ([0, 6], None)])
def test_training_ends_where_one_process_has_no_batch(tmp_path, process_pool, lengths, steps):
    found = process_pool(2).run(training_on_ranks.train, tmp_path, 1, lengths)
    assert found[0][:2] == found[1][:2]
    if steps is None:
        assert found[0][0] == []
    else:
        assert found[0][1][2] == steps  # one in each call


@pytest.mark.parametrize("num_local", [1, 2])
@pytest.mark.parametrize("lengths", [[2, 3], [5, 0], [0, 5]])
def test_evaluation_counts_the_batches_of_all_processes(tmp_path, process_pool, num_local, lengths):
    results = process_pool(2).run(training_on_ranks.evaluate, tmp_path, num_local, lengths)
    assert results[0] == results[1]
    # labels are 1, 3, ..., 19
    assert results[0] == pytest.approx({"loss": 133.0, "mae": 10.0, "global_step": 0})


@pytest.mark.end_to_end
@pytest.mark.parametrize("where", ["model_fn", "hook"])
def test_a_failure_of_one_process_ends_the_others(tmp_path, where):
    with ProcessPool(2, timeout_s=60.0) as pool:  # whose processes can't meet again
        found = pool.run(training_on_ranks.fail_on_one_rank, tmp_path, where)
    assert found == ["ReplicaFailedError", "KeyError"]


def test_a_failure_of_all_processes_leaves_them_able_to_train(tmp_path, process_pool):
    found = process_pool(2).run(training_on_ranks.diverge_and_train_again, tmp_path)
    assert found == [("NanLossDuringTrainingError", 2)] * 2


def test_the_chiefs_checkpoint_says_whether_there_is_nothing_left_to_train(tmp_path, process_pool):
    assert process_pool(2).run(training_on_ranks.skip, tmp_path) == [0, 0]


def test_infinite_losses_that_cancel_are_no_number(tmp_path, process_pool):
    assert process_pool(2).run(training_on_ranks.cancel, tmp_path) == ["NanLossDuringTrainingError"] * 2


def test_the_chief_can_not_evaluate_alone_with_the_strategy_of_all(tmp_path, process_pool):
    for message in process_pool(2).run(training_on_ranks.train_and_evaluate_together, tmp_path):
        assert "the chief evaluates alone" in message
