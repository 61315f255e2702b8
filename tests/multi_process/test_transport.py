"""Whichever way data takes between processes, the numbers are the same, and a lost rank is named."""

import time

import pytest
import torch

import torchstrategy as ts
from tests.multi_process import transport_programs as programs


@pytest.fixture(scope="module")
def expected():
    """What RING gives, between two and three processes."""
    found = {}
    for size in (2, 3):
        with ts.testing.ProcessPool(size) as pool:
            found[size] = pool.run(programs.collectives, "ring")
    return found


def assert_equal(found, expected):
    first = found[0]
    for rank, (result, wanted) in enumerate(zip(found, expected, strict=True)):
        for key in ("sums", "mixed", "trained"):
            assert all(torch.equal(a, b) for a, b in zip(result[key], first[key], strict=True)), (rank, key)
            for a, b in zip(result[key], wanted[key], strict=True):
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        for row, wanted_row in zip(result["gathered"], wanted["gathered"], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(row, wanted_row, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(result["first"], wanted["first"], strict=True))


@pytest.mark.end_to_end
def test_gloo_gives_what_is_expected(expected):
    for size, results in expected.items():
        factor = sum(range(1, size + 1))
        for result in results:
            for length, total in zip(programs.LENGTHS, result["sums"], strict=True):
                torch.testing.assert_close(total, torch.arange(length, dtype=torch.float64).sin().float() * factor)
            small, narrow, imaginary = result["mixed"]
            assert (small.dtype, small.item()) == (torch.int16, sum(range(size)))
            assert narrow.tolist() == [size] * 3
            assert imaginary.item() == size * 1j + sum(range(size))
        assert results[0]["lines"] == [f"Communication between {size} processes (RING): tensors over gloo."]


@pytest.mark.end_to_end
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["auto", "plain-ring", "python-backend"])
def test_every_way_gives_the_same(name, size, expected, process_pool):
    found = process_pool(size).run(programs.collectives, name)
    assert_equal(found, expected[size])
    ways = {
        "auto": "(AUTO): up to 16,384 bytes in messages; tensors through shared memory.",
        "plain-ring": "(plain-ring): all tensors over 'plain-ring'.",
        "python-backend": "(python-backend): all tensors over 'python-backend'.",
    }
    assert found[0]["lines"] == [f"Communication between {size} processes {ways[name]}"]
    for result in found:
        assert result["calls"] == ({"allreduce", "allgather", "broadcast"} if name == "python-backend" else set())


def test_without_memory_to_share_gloo_takes_over(expected, process_pool):
    found = process_pool(2).run(programs.without_shared_memory)
    assert_equal(found, expected[2])
    way = "Communication between 2 processes (AUTO): up to 16,384 bytes in messages; tensors over gloo."
    reason = "can't share memory, so gloo carries their tensors. (rank 1: [Errno 28] No space left on device)"
    assert found[0]["lines"] == [f"The processes of a host {reason}", way]
    assert found[1]["lines"] == []


@pytest.mark.parametrize("length", [1, 10_000, 1_000_000])
def test_different_lengths_are_found_before_data_moves(length, process_pool):
    for message, after in process_pool(2).run(programs.differing_sizes, length):
        assert f"rank 0: torch.float32[{length}]" in message
        assert f"rank 1: torch.float32[{length + 1}]" in message
        assert after == "[2.0]"


@pytest.mark.parametrize("how", ["killed", pytest.param("stopped", marks=pytest.mark.slow), "fails"])
def test_a_rank_lost_in_the_middle_of_shared_memory_is_named(how):
    start = time.monotonic()
    with ts.testing.ProcessPool(2) as pool, pytest.raises(ts.testing.RemoteError) as caught:
        pool.run(programs.lost_in_the_middle, how)
    assert time.monotonic() - start < 50
    error = caught.value.errors[0]
    if how == "stopped":
        assert isinstance(error, (ts.errors.DeadlineExceededError, RuntimeError))
        assert "rank 1" in str(error).lower()
        return
    _, text, again = str(error).split("|")
    assert text.startswith("ReplicaFailedError: ")
    assert "rank 1" in text.lower()
    assert again  # what comes later is refused
    if how == "fails":
        assert "MemoryError: no memory for the fourth chunk" in text
        assert isinstance(caught.value.errors[1], MemoryError)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kinds", "messages"),
    [
        (
            "fails-on-one-rank",
            (RuntimeError, RuntimeError),
            (
                "Rank 1 could not make the communication 'fails-on-one-rank'",
                "failed on rank 1: OSError: no such network card",
            ),
        ),
        ("lacks-broadcast", (TypeError, TypeError), ("lacks start_broadcast.", "lacks start_broadcast.")),
        ("never-registered", (ValueError, ValueError), ("never-registered", "never-registered")),
    ],
)
def test_communication_that_can_not_be_made(name, kinds, messages, process_pool):
    with pytest.raises(ts.testing.RemoteError) as caught:
        process_pool(2).run(programs.make_strategy, name)
    for rank in range(2):
        assert isinstance(caught.value.errors[rank], kinds[rank])
        assert messages[rank] in str(caught.value.errors[rank])


def test_a_mistake_in_a_users_algorithm_is_told_everywhere(process_pool):
    with pytest.raises(ts.testing.RemoteError) as caught:
        process_pool(2).run(programs.reduce_once, "fails-later")
    assert isinstance(caught.value.errors[1], ZeroDivisionError)
    assert isinstance(caught.value.errors[0], ts.errors.ReplicaFailedError)
    assert "ZeroDivisionError: a mistake in the algorithm" in str(caught.value.errors[0])


@pytest.mark.slow
def test_names_know_no_letter_case_and_the_factory_gets_the_deadline(process_pool):
    first, second = process_pool(2).run(programs.factory_time_out_is_the_strategys)
    assert first == second
    assert 20.0 <= first <= 30.0
