"""What goes wrong in ``fit`` on one of two processes ends both, with a message that says what; none waits for ever."""

import time

import pytest

import torchstrategy as ts
from tests.fit import fit_fault_programs as programs
from tests.multi_worker.lost import check_survivors
from torchstrategy.errors import DisagreementError, ReplicaFailedError
from torchstrategy.testing.faults import Fault


def errors_of(pool, program, *args):
    start = time.monotonic()
    with pytest.raises(ts.testing.RemoteError) as caught:
        pool.run(program, *args)
    assert time.monotonic() - start < 50  # nobody waited for a time-out of the pool
    return caught.value.errors


@pytest.mark.end_to_end
@pytest.mark.parametrize("rank", range(2))
@pytest.mark.parametrize("where", ["step", "callback"])
def test_an_error_on_one_rank_is_told_to_the_other(where, rank, process_pool):
    errors = errors_of(process_pool(2), programs.strikes, Fault("error", rank, 3), where)
    assert isinstance(errors[rank], OSError)
    assert isinstance(errors[1 - rank], ReplicaFailedError)
    assert f"Rank {rank} " in str(errors[1 - rank])
    assert "OSError: injected" in str(errors[1 - rank])


@pytest.mark.parametrize("where", ["step", "callback"])
@pytest.mark.parametrize("kind", ["kill", "exit"])
def test_a_rank_that_is_gone_is_named(kind, where):
    with ts.testing.ProcessPool(2) as pool:
        outcomes = pool.outcomes(programs.strikes, Fault(kind, 1, 3), where)
    if kind == "kill":
        check_survivors(outcomes, 1, timeout_s=20)
    else:
        assert isinstance(outcomes[0].error, ReplicaFailedError)
        assert "Rank 1" in str(outcomes[0].error)


def test_weights_that_one_rank_cannot_load_are_told_to_the_other(tmp_path):
    path = str(tmp_path / "weights.pt")
    with ts.testing.ProcessPool(2) as pool:
        (waited,), (own, _) = pool.run(programs.loads_weights_where_one_rank_cannot, path)
    assert own == "no weights for me"
    assert waited.startswith(f"Rank 1 failed in loading weights of {path}: ValueError: no weights for me")


# Each argument by itself is in test_rank_comparison.py.
UNLIKE = {
    "loss": "compile(loss=...): rank 0: CrossEntropyLoss(",
    "executions": "compile(steps_per_execution=...): rank 0: 1; rank 1: 2",
    "epochs": "fit(epochs=...): rank 0: 1; rank 1: 2",
    "validation": "fit(validation_data=...): rank 0: data; rank 1: nothing",
    "checkpoints": "fit(callbacks=...): rank 0: [ModelCheckpoint]; rank 1: []",
    "stopping": "fit(callbacks=...): rank 0: [EarlyStopping]; rank 1: []",
    "values": "checksum of the arrays",
    "length": "number of examples",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", UNLIKE)
def test_ranks_that_train_unlike_are_told_in_what(name, process_pool):
    for error in errors_of(process_pool(2), programs.trains_unlike, name).values():
        assert isinstance(error, DisagreementError)
        assert UNLIKE[name] in str(error)


def test_ranks_that_train_alike_agree(process_pool):
    first, second = process_pool(2).run(programs.trains_unlike, "nothing")
    assert first == second


def test_logs_may_be_read_on_one_rank(process_pool):
    (first, num_read), (second, _) = process_pool(2).run(programs.reads_logs_on_one_rank)
    assert first == second
    assert num_read == 12


@pytest.mark.parametrize("method", ["evaluate", "predict", "compute", "save_weights"])
def test_a_call_on_one_rank_in_which_all_must_meet_is_named(method, process_pool, tmp_path):
    for error in errors_of(process_pool(2), programs.evaluates_on_one_rank, method, str(tmp_path)).values():
        assert isinstance(error, (DisagreementError, ReplicaFailedError))
        assert "fit_fault_programs.py" in str(error)


@pytest.mark.parametrize("rank", range(2))
def test_a_rank_that_stops_stops_all(rank, process_pool):
    assert process_pool(2).run(programs.stops_on_one_rank, rank) == [1, 1]


def test_an_error_that_all_ranks_catch_does_not_spoil_the_next_fit(process_pool):
    first, second = process_pool(2).run(programs.goes_on_after_an_error)
    assert first == second
    assert first[1] < first[0]


@pytest.mark.end_to_end
def test_an_error_that_one_rank_catches_is_told_to_the_other():
    with ts.testing.ProcessPool(2) as pool:
        own, told = pool.run(programs.catches_an_error_on_one_rank, timeout_s=45)
    assert own.startswith("OSError: injected")
    assert told.startswith("ReplicaFailedError: Rank 0 failed in Model.fit: OSError: injected")


def test_a_loss_that_is_nan_on_one_rank_ends_the_training_on_all(process_pool):
    assert process_pool(2).run(programs.has_nan) == [[3, 1], [3, 1]]
