"""Hooks of processes that step together: whatever one of them wants, all do the same."""

import pytest

from tests.estimator import hooks_on_ranks

pytestmark = pytest.mark.parametrize("num_local", [1, 2])


def steps_of(results):
    """Return the global step at which all ranks ended, after checks that nothing else differs."""
    first, *others = results
    for other in others:
        assert other[:3] == first[:3]
    return first[0]


def saved_steps(folder):
    return sorted(int(path.stem.rsplit("-", 1)[1]) for path in folder.glob("model.ckpt-*.pt"))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("early", [False, True])
def test_one_rank_asks_for_the_end(tmp_path, process_pool, num_local, rank, early):
    assert steps_of(process_pool(2).run(hooks_on_ranks.stop_on, tmp_path, num_local, rank, early)) == 3


def test_all_ranks_stop_at_a_step(tmp_path, process_pool, num_local):
    assert steps_of(process_pool(2).run(hooks_on_ranks.stop_at_step, tmp_path, num_local)) == 4


def test_a_listener_on_the_chief_asks_for_the_end(tmp_path, process_pool, num_local):
    assert steps_of(process_pool(2).run(hooks_on_ranks.stop_by_listener, tmp_path, num_local)) == 4
    assert saved_steps(tmp_path) == [0, 2, 4]


def test_early_stopping_is_the_chiefs(tmp_path, process_pool, num_local):
    results = process_pool(2).run(hooks_on_ranks.stop_early, tmp_path, num_local)
    assert steps_of(results) == 5  # asked after steps 1 and 5
    assert [result[3] for result in results] == [[0, 0], []]


def test_checkpoints_come_by_the_chiefs_clock(tmp_path, process_pool, num_local):
    assert steps_of(process_pool(2).run(hooks_on_ranks.save_by_unlike_clocks, tmp_path, num_local)) == 10
    assert saved_steps(tmp_path) == [0, 4, 8, 10]  # it looks at the clock before the step


def test_a_hook_of_the_chief_saves_together_with_the_others(tmp_path, process_pool, num_local):
    found = process_pool(2).run(hooks_on_ranks.save_by_a_hook_of_the_chief, tmp_path, num_local)
    assert found == [(5, [0, 2, 4, 5]), (5, [])]
    assert saved_steps(tmp_path) == [0, 2, 4, 5]


def test_one_rank_asks_for_the_end_before_the_first_step(tmp_path, process_pool, num_local):
    assert process_pool(2).run(hooks_on_ranks.stop_at_once, tmp_path, num_local) == [0, 0]


def test_all_ranks_find_that_the_loss_is_no_number(tmp_path, process_pool, num_local):
    assert process_pool(2).run(hooks_on_ranks.diverge, tmp_path, num_local) == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_hook_that_fails_on_one_rank_ends_all(tmp_path, process_pool, num_local, rank):
    outcomes = process_pool(2).outcomes(hooks_on_ranks.fail_on_rank, tmp_path, num_local, rank)
    assert isinstance(outcomes[rank].error, ArithmeticError)
    assert "on purpose" in str(outcomes[1 - rank].error)


@pytest.mark.slow
def test_each_process_goes_on_with_its_own_data(tmp_path, process_pool, num_local):
    pool = process_pool(2)
    unbroken = pool.run(hooks_on_ranks.keep_position, tmp_path / "unbroken", num_local, -1)
    assert steps_of(unbroken) == (8 if num_local == 1 else 4)
    broken = pool.run(hooks_on_ranks.keep_position, tmp_path / "broken", num_local, 3)
    rest = pool.run(hooks_on_ranks.keep_position, tmp_path / "broken", num_local, -1)
    assert broken[0][1] == unbroken[0][1][:3]
    assert steps_of(rest) == steps_of(unbroken)
    assert rest[0][1] == unbroken[0][1][2:]  # from the checkpoint of step 2 on
    assert rest[0][2] == unbroken[0][2]
