"""Ranks that do not bring the same, or are not set up alike, all raise; none computes something wrong in silence."""

import pytest

import torchstrategy as ts
from tests.multi_worker import programs


def errors_of(size, program, *args, launcher="TF_CONFIG", timeout_s=None):
    with ts.testing.ProcessPool(size, launcher=launcher) as pool:
        outcomes = pool.outcomes(program, *args, timeout_s=timeout_s)
    assert all(outcome.error is not None for outcome in outcomes), [outcome.value for outcome in outcomes]
    return [outcome.error for outcome in outcomes]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("kind", "first", "last"),
    [
        ("shape", "torch.float32[2]", "torch.float32[3]"),
        ("dtype", "torch.float32[2]", "torch.float64[2]"),
        ("gathered dtype", "torch.float32", "torch.int64"),
    ],
)
def test_different_tensors(size, kind, first, last):
    for error in errors_of(size, programs.mismatch, kind):
        assert isinstance(error, ts.errors.InvalidArgumentError), error
        lines = {line.strip().partition(": ")[0]: line for line in str(error).splitlines()}
        assert first in lines["rank 0"]
        assert last in lines[f"rank {size - 1}"]


@pytest.mark.end_to_end
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("kind", "first", "last"),
    [
        ("order", "Strategy.gather", "Strategy.reduce(SUM)"),
        ("reduction", "Strategy.reduce(SUM)", "Strategy.reduce(MEAN)"),
        ("number", "all_reduce(SUM) of (list, None, [*])", "all_reduce(SUM) of (list, None, [*, *])"),
    ],
)
def test_different_operations(size, kind, first, last):
    for error in errors_of(size, programs.mismatch, kind):
        assert isinstance(error, ts.errors.DisagreementError), error
        assert f"rank 0: {first}" in str(error)
        assert f"rank {size - 1}: {last}" in str(error)
        assert str(error).count("programs.py:") >= size  # the calling lines


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["axis", "reduced axis", "axis of all_gather"])
def test_different_axes(kind):
    for error in errors_of(2, programs.mismatch, kind):
        assert isinstance(error, (ts.errors.DisagreementError, ts.errors.InvalidArgumentError)), error


@pytest.mark.end_to_end
@pytest.mark.parametrize("skipped", [0, 4, 9])
def test_a_rank_that_skips_a_step(skipped):
    for error in errors_of(2, programs.skip, 10, skipped):
        assert isinstance(error, (ts.errors.DisagreementError, ts.errors.InvalidArgumentError)), error
        assert "rank 0" in str(error)
        assert "rank 1" in str(error)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "first", "last"),
    [
        ("bytes_per_pack", "bytes_per_pack=0", "bytes_per_pack=1048576"),
        ("timeout_seconds", "timeout_seconds=20", "timeout_seconds=30"),
        ("implementation", "AUTO", "RING"),
        ("strategy", "MultiWorkerMirroredStrategy", "MirroredStrategy"),
        ("devices", "cpu:0", "cpu:1"),
        ("devices over gloo", "must bring as many devices", "cpu:1"),
        ("torch", "torch", "1.0.0"),
        ("torchstrategy", "torchstrategy", "0.0.1"),
    ],
)
def test_different_setups(kind, first, last):
    for rank, error in enumerate(errors_of(2, programs.different_setup, kind, launcher="torchrun")):
        assert isinstance(error, (RuntimeError, ts.errors.DisagreementError)), error
        assert first in str(error), f"rank {rank}: {error}"
        assert last in str(error), f"rank {rank}: {error}"
        assert "rank 0" in str(error), f"rank {rank}: {error}"
        assert "rank 1" in str(error), f"rank {rank}: {error}"


@pytest.mark.slow
def test_one_of_three_is_set_up_differently():
    for rank, error in enumerate(errors_of(3, programs.different_setup, "torch", launcher="torchrun")):
        assert isinstance(error, ts.errors.DisagreementError), f"rank {rank}: {error!r}"
        assert "rank 2 has 1.0.0" in str(error), f"rank {rank}: {error}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "change"),
    [
        (2, {"address of worker": 1, "to": "127.0.0.1:9"}),
        (3, {"address of worker": 1, "to": "127.0.0.1:9"}),
        (2, {"one more": "127.0.0.1:9"}),
        (3, {"one more": "127.0.0.1:9"}),
    ],
)
def test_different_clusters(size, change):
    for rank, error in enumerate(errors_of(size, programs.different_cluster, change, 20.0)):
        assert isinstance(error, ts.errors.DisagreementError), f"rank {rank}: {error!r}"
        assert "127.0.0.1:9" in str(error)
        assert f"rank {size - 1} has" in str(error)
        assert f"rank {rank} has" in str(error)


@pytest.mark.slow
def test_a_worker_that_looks_for_another_leader():
    leader = {"address of worker": 0, "to": "127.0.0.1:9"}
    first, last = errors_of(2, programs.different_cluster, leader, 3.0)
    assert isinstance(first, ts.errors.DeadlineExceededError)
    assert "Rank 1 (worker 1 at 127.0.0.1:" in str(first)
    assert "127.0.0.1:9" in str(last)
    assert isinstance(last, RuntimeError)


@pytest.mark.slow
def test_a_worker_that_knows_fewer_workers():
    for rank, error in enumerate(errors_of(3, programs.different_cluster, {"one less": True}, 3.0)):
        assert isinstance(error, (RuntimeError, ts.errors.DisagreementError)), f"rank {rank}: {error!r}"
        assert "number of processes" in str(error) or "joined" in str(error) or "did not make" in str(error)
