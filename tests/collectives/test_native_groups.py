"""Groups for which only the accelerator waits neither keep a rank from ending, nor change their order between ranks."""

import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import torchstrategy as ts
from tests.clusters import free_ports, run_programs
from tests.collectives import native_programs as programs
from tests.collectives.groups import GoneByNow, no_check
from torchstrategy.collectives import native_groups
from torchstrategy.collectives.native_groups import NativeBackend, NativeGroups
from torchstrategy.collectives.summing import plan_buckets

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
accelerator = pytest.mark.accelerator


class Recording:
    """A group whose collectives are over at once; it notes what is done to it."""

    error: Exception | None = None

    def __init__(self):
        self.log = []

    def allreduce(self, tensors, options):
        self.log.append(("allreduce", tensors[0].shape, options.reduceOp))
        return self

    def wait(self):
        self.log.append("wait")
        if self.error is not None:
            raise self.error

    def abort(self):
        self.log.append("abort")


def make(group=None):
    return NativeBackend(group or Recording(), "NCCL", CPU)


def test_only_the_accelerator_waits_and_what_waits_for_a_lost_rank_is_ended():
    group = Recording()
    backend = make(group)
    backend.start_sum(torch.ones(2, dtype=torch.complex64))(no_check)
    assert group.log == [("allreduce", (2, 2), dist.ReduceOp.SUM), "wait"]
    with pytest.raises(TimeoutError):
        backend.start_sum(torch.ones(2))(GoneByNow())
    assert group.log[-1] == "abort"
    with pytest.raises(ConnectionError, match="NCCL was ended in the middle of it"):
        backend.start_sum(torch.ones(2))(no_check)


@pytest.mark.parametrize(
    ("error", "is_aborted", "expected"),
    [
        (dist.DistBackendError("remote process exited"), False, ConnectionError),
        (RuntimeError("aborted"), True, ConnectionError),
        (RuntimeError("out of memory"), False, RuntimeError),
    ],
    ids=str,
)
def test_only_errors_of_connections_are_about_lost_ranks(error, is_aborted, expected):
    group = Recording()
    group.error = error
    backend = make(group)
    wait = backend.start_sum(torch.ones(2))
    if is_aborted:
        backend.abort()
    with pytest.raises(expected, match=str(error)) as caught:
        wait(no_check)
    assert type(caught.value) is expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int32])
def test_results_keep_their_bits_unless_the_group_is_ended_while_they_are_waited_for(dtype):
    """Also -0.0, and what the accelerator does only when the program has gone on."""
    backend = make()
    tensor = torch.tensor([1.0, -0.0]).to(dtype)
    backend._spoil([tensor, torch.tensor(1.0)])
    assert torch.equal(tensor, torch.tensor([1.0, -0.0]).to(dtype))
    assert str(tensor) == str(torch.tensor([1.0, -0.0]).to(dtype))
    backend.abort()
    backend._spoil([tensor])
    assert bool((tensor == -1).all() if dtype is torch.int32 else tensor.isnan().all())


def test_an_end_that_blocks_keeps_nobody(monkeypatch):
    monkeypatch.setattr(native_groups, "_ABORT_S", 0.1)
    is_over = threading.Event()
    group = Recording()
    group.abort = is_over.wait
    backend = make(group)
    backend.abort()
    assert backend.is_aborted
    is_over.set()


class Accelerator:
    """Stands for a backend whose accelerator waits, or does not."""

    def __init__(self, *, is_blocked):
        self.is_blocked = lambda: is_blocked
        self.ended = threading.Event()
        self.abort = self.ended.set


FAILURE = {"rank": 1}


@pytest.fixture
def failures(monkeypatch):
    monkeypatch.setattr(native_groups, "_ON_ITS_WAY_S", 0.05)
    monkeypatch.setattr(native_groups, "_LOOK_S", 0.01)
    return [FAILURE]


def watched(failures, *, is_blocked):
    groups, group = NativeGroups(lambda: failures[0] if failures else None), Accelerator(is_blocked=is_blocked)
    groups.add(group)
    return groups, group


@pytest.mark.parametrize(("is_blocked", "has_died"), [(False, True), (True, False)])
def test_groups_are_ended_for_a_dead_rank_and_for_a_failed_one_if_it_is_waited_for(failures, is_blocked, has_died):
    groups, group = watched(failures, is_blocked=is_blocked)
    groups.note_failure(has_died=has_died)
    assert group.ended.wait(20)
    assert groups.failure is FAILURE


def test_a_failure_that_all_ranks_have_and_outlive_ends_no_group(failures):
    groups, group = watched(failures, is_blocked=False)
    groups.note_failure(has_died=False)
    assert not group.ended.wait(0.2)
    failures.clear()
    deadline = time.monotonic() + 20
    while groups._is_watched:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    failures.append(FAILURE)  # the next one finds a watch again
    groups.note_failure(has_died=False)
    groups.note_failure(has_died=True)
    assert group.ended.wait(20)


@pytest.mark.parametrize("first_bytes", [1, 8, 40])
def test_the_first_bucket_may_be_smaller(first_bytes):
    tensors = [torch.zeros(2), torch.zeros(1, dtype=torch.float64), *[torch.zeros(2)] * 5]
    buckets = plan_buckets(tensors, 24, first_bytes)
    assert buckets == {1: [[0], [1], [2, 3, 4], [5, 6]], 8: [[0], [1], [2, 3, 4], [5, 6]]}.get(
        first_bytes, [[0, 2, 3, 4, 5], [1], [6]]
    )


@accelerator
@pytest.mark.slow
@pytest.mark.parametrize("reads", ["in the sum", "later", "an error"])
@pytest.mark.parametrize("how", ["kill", "fail"])
def test_a_rank_that_is_lost_while_an_accelerator_waits_for_it(how, reads, tmp_path):
    """Blocked in a sum or in a read of a number, the survivor is told who is lost; nothing is saved any more."""
    (tmp_path / "saved").mkdir()
    with ts.testing.ProcessPool(2) as pool:
        first, _ = pool.outcomes(programs.lose_a_rank, how, reads, str(tmp_path / "saved" / "checkpoint"))
    assert first.error is None, first.traceback
    errors, files, num_aborts = first.value
    assert errors[:3] == [""] * 3
    text, *later = errors[3:]
    assert ("Rank 1 does not answer: its process has died" if how == "kill" else "boom") in text
    assert "the sum of gradients" in text
    if reads != "in the sum":
        assert "waiting for it in Strategy.run, after the sum of gradients (collective number" in text
        assert "native_programs.py:" in text
    assert all("Rank 1" in error for error in later), later  # steps, and a checkpoint
    assert files == []
    assert num_aborts == 1


@accelerator
@pytest.mark.slow
@pytest.mark.parametrize("rank_that_dies", ["none", "1"])
def test_the_program_ends_while_sums_are_under_way_that_nobody_joins(rank_that_dies, tmp_path):
    (port,) = free_ports(1)
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": str(ROOT)}
    ranks = [{**common, "RANK": str(r), "LOCAL_RANK": str(r), "LOCAL_WORLD_SIZE": "2"} for r in range(2)]
    arguments = ["-m", "tests.collectives.native_programs", rank_that_dies]
    (status, _, errors), *_ = run_programs(arguments, ranks, tmp_path, timeout_s=150)
    assert status == 0, errors


@accelerator
@pytest.mark.slow
@pytest.mark.parametrize("in_a_thread", [False, True])
def test_all_ranks_have_one_order_of_early_sums_and_other_collectives(in_a_thread):
    with ts.testing.ProcessPool(3, timeout_s=120) as pool:
        results = pool.run(programs.train_out_of_step, True, in_a_thread, bytes_per_pack=400)
        expected, order_at_steps, _ = pool.run(programs.train_out_of_step, False, in_a_thread, bytes_per_pack=400)[0]
    for values, log, taken in results:
        assert log == results[0][1]
        assert values == pytest.approx(expected, abs=1e-10)
        assert taken == results[0][2]
    assert results[0][1] != order_at_steps  # some began early


@accelerator
@pytest.mark.slow
def test_buckets_of_every_size_give_the_same_numbers():
    sizes = [1, 10_000, 1 << 20, 0]
    with ts.testing.ProcessPool(2) as pool:
        results = pool.run(programs.train_with_buckets, sizes)
    (expected, many), *others = results[0]
    for values, _ in others:
        assert values == pytest.approx(expected, abs=1e-10)
    assert results[1] == results[0]
    assert many[4] == 6  # one for each tensor
    assert others[-1][1][4] == 2  # a small one, and the rest


@accelerator
@pytest.mark.slow
def test_ranks_with_devices_of_other_kinds_make_no_group():
    with ts.testing.ProcessPool(2) as pool:
        for text in pool.run(programs.bring_another_kind):
            assert text.startswith("0 groups: Every process must bring as many devices, of the same kinds:\n")
            assert "  rank 0: ['standin:0']\n  rank 1: ['cpu:0']" in text
