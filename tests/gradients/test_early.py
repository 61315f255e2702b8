"""Sums that begin during ``backward`` change no number, in worker processes over every route."""

import functools
from pathlib import Path

import pytest
import torch

import torchstrategy as ts
from tests.clusters import free_ports, run_programs
from tests.gradients import early_programs as programs
from tests.gradients.early_programs import PROGRAMS
from tests.gradients.edit_programs import edited_late_as_on_an_accelerator
from tests.testing.networks import network_or_skip
from torchstrategy.gradients import early_buckets

ROOT = Path(__file__).parents[2]
ROUTES = {"shared memory": "AUTO", "gloo": "RING"}
#: How many of the 6 gradients of a step were summed early in each of its sums, where nothing else can be expected.
TAKEN = {
    "plain": [0, 0, 6, 6, 6, 6, 6, 6],
    "gradients_kept_as_zeros": [0, 0, 6, 6, 6, 6, 6, 6],
    "accumulation": [0, 0, 6, 6, 0, 0, 0, 0, 6],
    "clipped_before_the_sum": [0] * 12,
    "clipped_after_the_sum": [0, 0, 0, 0, *[6, 0] * 6],
    "tied_weights": [0, 0, 5, 5, 5, 5, 5, 5],
    "gan": [0, 0, 0, 0, *[4, 6] * 8],
    "other_collectives": [0, 0, 6, 6, 6, 6, 6, 6],
}


def check_equal(results):
    for found in results:
        for name, (reference, overlapped, taken) in found.items():
            assert overlapped == pytest.approx(reference, abs=1e-5 if name == "types_and_buffers" else 1e-10), name
            assert all(number == number for number in reference), name
            assert overlapped == results[0][name][1], name  # on all ranks
            assert taken == results[0][name][2], name
            assert any(taken) or name == "clipped_before_the_sum", name


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_two_processes_get_the_same_numbers_with_and_without_overlap(name, process_pool):
    results = process_pool(2).run(programs.run, [name], "AUTO")
    check_equal(results)
    reference, overlapped, taken = results[0][name]
    assert overlapped == reference  # a sum of two numbers does not depend on their order
    assert taken == TAKEN.get(name, taken)


@pytest.mark.end_to_end
@pytest.mark.parametrize("name", ["plain", "unused_parameters", "a_rank_without_backward"])
def test_three_processes_over_gloo(name, process_pool):
    check_equal(process_pool(3).run(programs.run, [name], "RING"))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("route", ROUTES)
def test_all_programs_with_one_strategy(route, size, process_pool):
    check_equal(process_pool(size).run(programs.run, list(PROGRAMS), ROUTES[route], timeout_s=280))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_two_hosts(size):
    names = ["plain", "unused_parameters", "sparse_gradients", "a_rank_without_backward", "clipped_before_the_sum"]
    with network_or_skip(2) as hosts, ts.testing.ProcessPool(size, timeout_s=280, network=hosts) as pool:
        check_equal(pool.run(programs.run, names, "AUTO"))


@pytest.mark.parametrize("route", ROUTES)
def test_sums_begin_before_the_backward_pass_has_ended(route, process_pool):
    for events in process_pool(2).run(programs.events_of, ROUTES[route]):
        steps = "|".join(map(str, events)).split("|step|")
        assert steps[0] == "end of backward"  # nothing is known of the first steps
        assert steps[1] == "0|end of backward"
        for step in steps[3:8]:
            assert step == "6|start|start|start|end of backward"


@pytest.mark.slow
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("how", ["kill", "fail", pytest.param("stop", marks=pytest.mark.slow)])
def test_a_rank_that_is_lost_while_a_bucket_flies(how, route):
    with ts.testing.ProcessPool(2) as pool:
        silent = [1] if how == "stop" else []
        outcomes = pool.outcomes(programs.lose_while_a_bucket_flies, 1, how, ROUTES[route], silent=silent)
    assert isinstance(outcomes[0].error, ts.errors.ReplicaFailedError), outcomes[0].error
    text = {"kill": "its process has died", "fail": "ValueError: boom", "stop": "no sign of life"}[how]
    assert "Rank 1" in str(outcomes[0].error)
    assert text in str(outcomes[0].error)


@pytest.mark.slow
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("route", ROUTES)
def test_what_comes_after_a_lost_rank_is_refused(route, is_late):
    with ts.testing.ProcessPool(2) as pool:
        other, own = pool.run(functools.partial(programs.errors_after_a_loss, is_late=is_late), ROUTES[route])
    assert own[0] == "5: ValueError: in the middle of backward"
    assert [error.split(": ")[0] for error in own] == ["5", "6", "7", "reduce"]
    assert all("this rank failed earlier" in error for error in own[1:2])
    assert [error.split(": ")[0] for error in other] == ["5", "6", "7", "reduce"]
    assert all("Rank 1 (replica 1) failed" in error for error in other)


def test_overlap_that_is_asked_for_where_it_has_no_effect(process_pool):
    for replicas, power_sgd, registered, rounded, shared_memory in process_pool(2).run(programs.warnings_about_overlap):
        for lines in (replicas, power_sgd, registered):
            (line,) = lines
            assert "don't begin during `backward`: overlap=True has an effect with one replica in each process" in line
        assert rounded == shared_memory == []


@pytest.mark.parametrize("route", ROUTES)
def test_an_optimizer_that_is_dropped_while_its_sums_are_under_way(route, process_pool):
    for events, are_gone in process_pool(2).run(programs.dropped_objects, ROUTES[route]):
        assert all(are_gone)
        end = events.index("dropped")
        assert events[end - 3 : end] == ["start", "start", "start"]
        assert events[end + 1 : end + 4] == ["end of backward", "step", 0]  # what was under way is thrown away
        assert events[-1] == 6


@pytest.mark.slow
@pytest.mark.parametrize("route", ROUTES)
def test_a_program_that_makes_optimizers_again_and_again(route, process_pool):
    for reference, overlapped, num_known in process_pool(2).run(programs.new_optimizers, ROUTES[route]):
        assert overlapped == reference
        assert num_known <= 2


@pytest.mark.parametrize("route", ROUTES)
def test_processes_that_are_forked_while_sums_are_under_way(route, process_pool):
    for reference, overlapped, taken in process_pool(2).run(programs.run_with_forks, ROUTES[route]):
        assert overlapped == reference
        assert taken == TAKEN["plain"]


def test_changes_past_the_version_counter_that_begin_late_on_an_accelerator(process_pool):
    for taken in process_pool(2).run(edited_late_as_on_an_accelerator, "AUTO"):
        assert taken == [0, 0, 6, 6, 6, 6, 3, 0, 0, 0]


@pytest.mark.parametrize("size", [1, 7, 2048, 200_000])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_edits_that_keep_the_sum_of_elements_are_noticed(dtype, size):
    grad = torch.randn(2, size, generator=torch.Generator().manual_seed(1)).to(dtype)
    grad[1] = -grad[0]
    edits = [
        lambda g: g.mul_(0.5),
        lambda g: g.neg_(),
        lambda g: g.clamp_(-0.5, 0.5),
        lambda g: g.copy_(g.flip(0)),
        lambda g: g[:, -1].zero_(),
    ]
    for edit in edits:
        edited = grad.clone()
        edit(edited)
        assert not early_buckets._equal(early_buckets._totals([grad, None]), early_buckets._totals([edited, None]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("route", "compression", "hosts"),
    [
        pytest.param("shared memory", "", "0,0", id="shared memory", marks=pytest.mark.slow),
        pytest.param("gloo", "", "0,0", id="gloo"),
        pytest.param("gloo", "bf16", "0,0", id="gloo as bf16", marks=pytest.mark.slow),
        pytest.param("shared memory", "", "0,1,1", id="two hosts", marks=pytest.mark.slow),
    ],
)
def test_a_rank_can_end_while_its_sums_are_under_way(route, compression, hosts, tmp_path):
    ports = free_ports(1)
    size = str(len(hosts.split(",")))
    common = {"WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[0]), "PYTHONPATH": str(ROOT)}
    ranks = [{**common, "RANK": str(r), "LOCAL_RANK": str(r), "LOCAL_WORLD_SIZE": size} for r in range(int(size))]
    arguments = ["-m", "tests.gradients.ends_while_a_bucket_flies", ROUTES[route], compression, hosts]
    for status, _, errors in run_programs(arguments, ranks, tmp_path, timeout_s=150):
        assert status == 0, errors
