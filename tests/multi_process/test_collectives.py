import functools
import re

import numpy as np
import pytest
import torch

import torchstrategy as ts
from tests.multi_process import programs
from tests.programs import cpu_devices

Divergence = ts.errors.DivergenceError
HOSTINGS = pytest.mark.parametrize("devices", [None, cpu_devices(2)], ids=["1 each", "2 each"])


@HOSTINGS
def test_all_reduce_and_gather_and_their_gradients(devices, process_pool):
    results = process_pool(2).run(programs.collectives, devices)
    n = 2 if devices is None else 4
    total = sum((i + 1) ** 2 for i in range(n))
    upstream = sum(range(1, n + 1))
    rows = torch.cat([torch.full((i, 2), float(i)) for i in range(n)])
    flat = torch.cat([torch.arange(float(i)) for i in range(n)])
    found = [value for result in results for value in result["local"]]
    assert [int(value["id"]) for value in found] == list(range(n))
    for i, value in enumerate(found):
        assert value["sum"] == total
        assert value["other"].tolist() == [sum(range(n))]
        assert value["grad"] == 2 * (i + 1) * upstream
        assert value["mean"] == sum(range(n)) / n
        assert value["mean"].dtype is torch.float64
        assert torch.equal(value["gathered"], rows)
        assert torch.equal(value["gather_grad"], torch.full((i, 2), float(upstream)))
    for result in results:
        assert result["reduce"] == sum(range(n))
        assert result["mean_over_axis"] == pytest.approx(float(flat.mean()))
        assert torch.equal(result["gather"], flat)


@HOSTINGS
def test_every_dtype_travels(devices, process_pool):
    results = process_pool(2).run(programs.dtypes, devices)
    n = 2 if devices is None else 4
    num_rows = sum(range(n))
    for result in results:
        for dtype in programs.DTYPES:
            gathered = result[f"gather {dtype}"]
            assert torch.equal(gathered, torch.ones(num_rows, 2, dtype=dtype)), dtype
            if dtype is not torch.bool:
                assert torch.equal(result[f"reduce {dtype}"], torch.full((2,), num_rows, dtype=dtype)), dtype
        assert torch.equal(result["sparse"], torch.eye(5)[:n].sum(0))


@HOSTINGS
def test_results_may_be_changed_in_place_and_differentiated_twice(devices, process_pool):
    n = 2 if devices is None else 4
    y = sum(i * i for i in range(1, n + 1)) + n
    total = sum(range(1, n + 1))
    # The loss is the sum over replicas of y * y.
    expected = [[y, 4 * n * y * i, 4 * n * (2 * i * total + y)] for i in range(1, n + 1)]
    for found in process_pool(2).run(programs.differentiated, devices):
        assert list(found) == expected


def test_gather_is_in_data_order_in_every_hosting(process_pool):
    expected = [list(range(7)), list(range(7, 11))]
    assert programs.in_order(cpu_devices(4)) == expected
    for devices in (None, cpu_devices(2)):
        assert process_pool(2).run(programs.in_order, devices) == [expected] * 2


def test_disagreements_are_explained_and_leave_the_job_usable(process_pool):
    for messages in process_pool(2).run(programs.disagreements):
        run, reduce, many, long, last = messages
        assert "rank 0: all_reduce(SUM) of (dict, ['first'], [*])" in run
        assert "rank 1: all_reduce(SUM) of (dict, ['second'], [*])" in run
        assert "rank 1: Strategy.reduce(SUM) of (dict, ['second'], [*])" in reduce
        assert "first difference is at position 70:\n  rank 0: torch.float32[1] (80 in all)" in many
        assert "rank 1: torch.float32[2] (80 in all)" in many
        assert len(many) < 400
        assert long == "no error"
        assert last == "2.0"


def test_models_of_other_shapes_are_named_by_their_first_parameter_that_differs(process_pool):
    for message, last in process_pool(2).run(programs.other_models):
        assert "Build the same model on every rank.\nThe first difference is at position 2:\n" in message
        assert "  rank 0: 1.weight of Sequential, torch.float32[2, 3] (4 in all)\n" in message
        assert "  rank 1: 1.weight of Sequential, torch.float32[3, 3] (4 in all)" in message
        assert last == 2.0


def test_an_exchange_may_start_early(process_pool):
    for one, where, between, several, once_more, uneven, refused, last in process_pool(2).run(
        programs.exchanges_started_early
    ):
        assert one == once_more == [1, 0.5]
        assert re.match(r"after the start of one( of strategy number \d+)? \(collective number ", where)
        assert several == [[61], [101]]
        assert uneven.endswith("uneven: the ranks must bring the same count of numbers.\n  rank 0: 1\n  rank 1: 2")
        assert between == last == 2.0  # the job stays usable
        assert refused[0] == refused[1]
        assert "rank 0: yours (number " in refused[0]
        assert "rank 1: mine (number " in refused[0]


@pytest.mark.slow
def test_gradients_of_all_kinds_equal_in_process_replicas(process_pool):
    expected = programs.mixed_gradients(cpu_devices(2))
    first, second = process_pool(2).run(programs.mixed_gradients, None)
    for name, value in expected.items():
        torch.testing.assert_close(first[name], value, rtol=0, atol=1e-6, msg=name)
        assert torch.equal(first[name], second[name]), name
    assert expected["tiny.0"] != 1
    assert expected["tiny.1"] == 1


def test_line_search_sees_the_summed_loss(process_pool):
    expected = programs.line_search(["cpu:0"])
    for found in (programs.line_search(cpu_devices(2)), *process_pool(2).run(programs.line_search, None)):
        assert found == pytest.approx(expected, abs=1e-9)


def test_a_gradient_replaced_after_the_sum_is_not_summed_again(process_pool):
    assert programs.replaced_gradient(cpu_devices(2)) == pytest.approx(3.0)
    assert process_pool(2).run(programs.replaced_gradient, None) == pytest.approx([3.0, 3.0])


def test_absent_and_sparse_gradients_and_buffers_equal_in_process_replicas(process_pool):
    expected = programs.partial_gradients(cpu_devices(2))
    assert expected["never"] == [True, True]
    assert expected["sparse"]
    for result in process_pool(2).run(programs.partial_gradients, None):
        assert result["never"] == expected["never"]
        assert result["sparse"]
        for name, value in expected["state"].items():
            torch.testing.assert_close(result["state"][name], value, rtol=0, atol=1e-6)


@HOSTINGS
def test_an_infinite_gradient_on_one_replica_skips_the_step_on_all(devices, process_pool):
    for weights, scales in process_pool(2).run(programs.scaled_step, devices, bad_replica=1):
        assert set(weights) == {1.0}
        assert set(scales) == {4.0}


@HOSTINGS
def test_scaled_step_sums_once(devices, process_pool):
    n = 2 if devices is None else 4
    for weights, _ in process_pool(2).run(programs.scaled_step, devices, bad_replica=None):
        assert set(weights) == {1.0 - 0.25 * sum(range(1, n + 1))}


def test_ranks_draw_different_and_reproducible_random_numbers(process_pool):
    (first, again, in_step), (other, other_again, _) = process_pool(2).run(programs.random_masks)
    assert first == again
    assert other == other_again
    assert first != other
    assert in_step
    torch.manual_seed(5)
    assert first == torch.rand(3).tolist()


def test_initial_values_are_the_chiefs(process_pool):
    first, second = process_pool(2).run(programs.own_scale)
    assert first == second


def test_two_strategies_in_one_job(process_pool):
    assert process_pool(2).run(programs.two_strategies) == [[2.0, 2.0, 2.0]] * 2


def test_hyper_parameters_that_make_no_difference(process_pool):
    process_pool(2).run(programs.changes_a_rate, "foreach", True, False)
    process_pool(2).run(programs.changes_a_rate, "lr", 0.1, 0.1 + 1e-9)
    process_pool(2).run(programs.changes_a_rate, "lr", 0.5, np.float64(0.5))
    process_pool(2).run(programs.changes_a_rate, "lr", 0.5, torch.tensor(0.5))
    process_pool(2).run(programs.changes_a_rate, "note", "of rank 0", None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "kind", "message"),
    [
        (programs.step_outside_run, RuntimeError, "outside `run`"),
        (programs.foreign_model, RuntimeError, "not made in `strategy.scope"),
        (functools.partial(programs.loads_on_the_chief_only, 1), Divergence, "parameter 'weight' of Linear"),
        (functools.partial(programs.loads_on_the_chief_only, 5), Divergence, "parameter 'weight' of Linear"),
        (functools.partial(programs.changes_a_rate, "lr", 0.1, 0.2), Divergence, "'lr' is 0.1 on rank 0 and 0.2 on"),
        (functools.partial(programs.changes_a_rate, "lr", 0.5, torch.tensor(0.25)), Divergence, "and 0.25 on rank 1"),
        (functools.partial(programs.changes_a_rate, "lr", 0.5, np.float32(0.25)), Divergence, "and 0.25 on rank 1"),
        (functools.partial(programs.changes_a_rate, "betas", (0.9, 0.9), (0.8, 0.9)), Divergence, "'betas' is [0.9, "),
        (functools.partial(programs.changes_a_rate, "lr", 0.1, None), Divergence, "and 'no number' on rank 1"),
        (programs.groups_differently, Divergence, "'number of parameters' is 4 on rank 0 and 1 on rank 1 in group 0"),
        (programs.steps_different_optimizers, Divergence, "rank 0 steps SGD and rank 1 Adam"),
        (programs.different_models, ts.errors.InvalidArgumentError, "rank 1"),
    ],
)
def test_unsynchronised_training_is_refused(program, kind, message, process_pool):
    with pytest.raises(ts.testing.RemoteError) as caught:
        process_pool(2).run(program)
    for rank in range(2):
        assert isinstance(caught.value.errors[rank], kind), caught.value
        assert message in str(caught.value.errors[rank])


def test_collectives_from_different_lines_warn_once(process_pool):
    for total, (message,) in process_pool(2).run(programs.from_different_lines):
        assert total == 3.0
        assert "The ranks meet in Strategy.reduce(SUM), but from different lines:\n  rank 0: programs.py:" in message


def test_metric_is_that_of_all_processes_before_the_first_run(process_pool):
    assert process_pool(2).run(programs.metric_before_the_first_run) == [(1.5, 2.25, 0.0)] * 2


def test_assigning_to_a_variable_of_one_process_warns_once(process_pool):
    for (message,) in process_pool(2).run(programs.variable_made_outside):
        assert "was not made in a scope" in message
