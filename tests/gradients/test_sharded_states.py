"""Optimizer states that are split over ranks change no number, no gradient and no checkpoint."""

import functools

import pytest
import torch

import torchstrategy as ts
from tests.gradients import sharded_programs as programs
from tests.gradients.early_programs import PROGRAMS
from tests.programs import largest_difference, train


def check_equal(results):
    for found in results:
        for name, (whole, split) in found.items():
            assert split == pytest.approx(whole, abs=1e-5 if name == "types_and_buffers" else 1e-10), name
            assert split == results[0][name][1], name  # on all ranks


def test_programs_get_the_same_numbers(process_pool):
    check_equal(process_pool(2).run(programs.run, ["closure"], "AUTO"))


@pytest.mark.slow
@pytest.mark.parametrize("route", ["AUTO", "RING"])
def test_all_programs_get_the_same_numbers(route, process_pool):
    check_equal(process_pool(2).run(programs.run, list(PROGRAMS), route))


@pytest.mark.slow
def test_three_processes_get_the_same_numbers(process_pool):
    check_equal(process_pool(3).run(programs.run, list(PROGRAMS), "AUTO", timeout_s=280))


@pytest.mark.parametrize(
    ("num_processes", "names"),
    [(2, ["Adam"]), *(pytest.param(n, list(programs.OPTIMIZERS), marks=pytest.mark.slow) for n in (2, 4))],
)
def test_optimizers_get_the_same_numbers_with_a_part_of_the_states(num_processes, names, process_pool):
    results = process_pool(num_processes).run(programs.optimizers, names)
    for name in names:
        for whole, split in (found[name] for found in results):
            assert split[0] == pytest.approx(whole[0], abs=1e-10)
            assert split[1] == whole[1]  # every gradient is the sum on every rank
            assert split[2] == whole[2]  # all of the states
        sizes = [found[name][1][3] for found in results]
        assert sum(sizes) == results[0][name][0][3]
        assert max(sizes) < 0.8 * sum(sizes)


@pytest.mark.parametrize(
    ("asked", "devices", "error", "text"),
    [
        (True, ["cpu:0", "cpu:1"], ValueError, "Start a process for each device, by torchrun"),
        ("yes", ["cpu:0"], TypeError, "True, False, or a list of further optimizer classes"),
        ([int], ["cpu:0"], TypeError, "Received: .<class 'int'>"),
    ],
)
@pytest.mark.parametrize("strategy", [ts.MirroredStrategy, ts.MultiWorkerMirroredStrategy])
def test_what_can_not_be_split_is_refused(strategy, asked, devices, error, text):
    with pytest.raises(error, match=text):
        strategy(devices=devices, shard_optimizer_states=asked)


def load(path):
    return torch.load(path + ".pt", weights_only=True)["objects"]


def exactly(value):
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    return {key: exactly(item) for key, item in value.items()} if isinstance(value, dict) else value


@pytest.mark.parametrize("own_path", [False, True])
def test_a_rank_that_does_not_write_keeps_no_others_states(own_path, tmp_path, process_pool):
    (of_chief, whole), (of_other, _) = process_pool(2).run(
        programs.kept_in_a_save, str(tmp_path / "states"), own_path=own_path
    )
    assert of_chief == whole
    assert of_other == whole if own_path else of_other < 0.8 * whole


@pytest.mark.slow
def test_checkpoints_of_split_and_whole_states_are_the_same_and_continue_anywhere(tmp_path, process_pool):
    pools = {1: None, 2: process_pool(2), 3: process_pool(3)}

    def train(size, name, num_steps, *, sharded, restore=None):
        path = str(tmp_path / name)
        run = functools.partial(programs.train_and_save, path, num_steps, sharded=sharded, restore=restore)
        return [run()] if pools[size] is None else pools[size].run(run)

    expected = train(1, "all", 6, sharded=False)[0]["weights"]
    halves = {
        (size, sharded): train(size, f"half-{size}-{sharded}", 3, sharded=sharded)
        for size, sharded in [(1, True), (2, True), (2, False), (3, True)]
    }
    split, whole = (load(halves[2, sharded][0]["path"]) for sharded in (True, False))
    assert exactly(split) == exactly(whole)
    for half in halves.values():
        for size, sharded in [(1, False), (2, True), (2, False), (3, True)]:
            found = train(size, "end", 3, sharded=sharded, restore=half[0]["path"])
            for row in found:
                assert row["weights"] == pytest.approx(expected, abs=1e-10)
            num_loaded = [row["num_loaded"] for row in found]
            assert (sum(num_loaded) == 6) if sharded else num_loaded == [6] * size  # nobody loads others' parts


def test_a_state_dict_of_one_rank_is_an_error_on_all(process_pool):
    outcomes = process_pool(2).outcomes(programs.save_on_one_rank)
    for outcome in outcomes:
        assert isinstance(outcome.error, ts.errors.DisagreementError), outcome.error
        assert "rank 0: Adam.state_dict() (number" in str(outcome.error)
        assert "rank 1: the sum of gradients" in str(outcome.error)


def test_states_that_are_loaded_on_one_rank_are_an_error_on_all(process_pool):
    outcomes = process_pool(2).outcomes(programs.load_on_one_rank)
    for outcome in outcomes:
        assert isinstance(outcome.error, ts.errors.DisagreementError), outcome.error
        assert "The states of Adam are split over ranks, which have not loaded them equally often" in str(outcome.error)
        assert "rank 0: 2 times\n  rank 1: 1 times" in str(outcome.error)


@pytest.mark.slow
def test_optimizers_that_may_look_at_all_parameters_step_whole(process_pool):
    for found in process_pool(2).run(programs.own_optimizers):
        for num_states, (whole, split), lines in found.values():
            assert split == pytest.approx(whole, abs=1e-10)
            assert num_states in (1, 2, 3, 4, 5, 6)
            assert all("not split over ranks" in line for line in lines)
        assert found["unknown"][0] == 6
        assert "shard_optimizer_states=[Signed]" in found["unknown"][2][0]
        assert found["declared"][0] < 6
        assert not found["declared"][2]
        assert "looks at all parameters together" in found["LBFGS"][2][0]


def test_hooks_of_the_program_see_all_gradients_and_all_weights(process_pool):
    whole, split = (process_pool(2).run(functools.partial(programs.seen_by_hooks, sharded=s)) for s in (False, True))
    assert split == whole


def test_a_scaler_and_a_fused_step(process_pool):
    whole, split = (process_pool(2).run(functools.partial(programs.scaled, sharded=s)) for s in (False, True))
    assert split == whole
    assert whole[0][2] != 1024.0


@pytest.mark.slow
@pytest.mark.parametrize("how", ["fail", "kill"])
def test_a_rank_that_is_lost_in_the_step_is_named(how):
    with ts.testing.ProcessPool(2) as pool:
        outcomes = pool.outcomes(programs.fail_in_step, how)
    assert isinstance(outcomes[0].error, ts.errors.ReplicaFailedError), outcomes[0].error
    text = {"fail": "ValueError: in the middle of the step", "kill": "its process has died"}[how]
    for part in ("Rank 1", text, "gathering the weights that Failing has stepped"):
        assert part in str(outcomes[0].error)


@pytest.mark.slow
def test_a_step_that_failed_on_all_ranks_does_not_go_unnoticed():
    with ts.testing.ProcessPool(2) as pool:
        outcomes = pool.outcomes(programs.fail_in_step, "all")
    for outcome in outcomes:
        assert isinstance(outcome.error, ts.errors.DivergenceError), outcome.error


@pytest.mark.slow
def test_fit_and_its_backups(tmp_path, process_pool):
    def fit(name, num_epochs, *, sharded):
        return process_pool(2).run(functools.partial(programs.fit, str(tmp_path / name), num_epochs, sharded=sharded))

    expected = fit("whole", 4, sharded=False)
    fit("split", 2, sharded=True)
    for (weights, num_states, num_parameters), row in zip(fit("split", 4, sharded=True), expected, strict=True):
        assert weights == pytest.approx(row[0], abs=1e-10)
        assert num_states < num_parameters
    split, whole = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("split", "whole"))
    assert exactly(split["training"]) == exactly(whole["training"])
    for weights, *_ in fit("split", 4, sharded=False):  # which has ended
        assert weights == pytest.approx(expected[0][0], abs=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"optimizer_name": "sgd", "clip": 0.5},
        {"optimizer_name": "adam", "accumulation": 2},
        {"optimizer_name": "adam", "net": "conv"},
    ],
)
@pytest.mark.parametrize("num_processes", [2, 3])
def test_training_equals_that_of_one_replica(num_processes, options, process_pool):
    expected = train(None, dtype=torch.float64, epochs=2, **options)
    for found in process_pool(num_processes).run(programs.parity, options):
        assert largest_difference(found, expected) < 1e-10


@pytest.mark.slow
def test_a_hook_that_drops_a_gradient_on_one_rank_is_an_error():
    with ts.testing.ProcessPool(2) as pool:
        errors = [outcome.error for outcome in pool.outcomes(programs.drop_on_one_rank)]
    assert type(errors[0]) is RuntimeError
    assert "The ranks have stepped different parameters of Adam at early_job.py" in str(errors[0])
    assert isinstance(errors[1], ts.errors.ReplicaFailedError)
    assert "Rank 0 (replica 0) failed" in str(errors[1])


@pytest.mark.slow
def test_an_asynchronous_save_has_the_states_of_its_moment(tmp_path, process_pool):
    for expected, saved in process_pool(2).run(programs.save_in_background, str(tmp_path / "run")):
        assert saved == expected
