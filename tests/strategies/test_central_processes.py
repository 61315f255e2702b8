"""CentralStorageStrategy in several processes, which share the chief's memory."""

import pytest

import torchstrategy as ts
from tests.programs import cpu_devices, largest_difference
from tests.strategies import central_programs as programs
from tests.strategies.central_programs import EXACT, IN_PROCESSES, VARIANTS


@pytest.mark.parametrize("way", [programs.train, pytest.param(programs.with_copies, marks=pytest.mark.slow)])
@pytest.mark.parametrize("hosting", ["1 each", pytest.param("2 each", marks=pytest.mark.slow)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_numbers_of_mirrored_in_two_processes(variant, hosting, way, process_pool):
    devices = IN_PROCESSES[hosting]
    expected = process_pool(2).run(programs.train, "mirrored", devices, variant)
    found = process_pool(2).run(way, "central", devices, variant)
    for one, other in zip(expected, found, strict=True):
        assert largest_difference(one, other) <= EXACT


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["bf16", ts.experimental.PowerSGD(1, start_after=1)], ids=str)
@pytest.mark.parametrize("hosting", IN_PROCESSES)
def test_numbers_of_mirrored_with_compressed_gradients(hosting, compression, process_pool):
    def run(kind, compression):
        options = ts.experimental.CommunicationOptions(implementation="RING", gradient_compression=compression)
        return process_pool(2).run(programs.train, kind, IN_PROCESSES[hosting], communication_options=options)

    expected = run("mirrored", compression)
    for one, other in zip(expected, run("central", compression), strict=True):
        assert largest_difference(one, other) <= EXACT
    assert largest_difference(expected[0], run("mirrored", None)[0]) > 1e-6


@pytest.mark.filterwarnings("ignore:Buffer .* has got another value on each replica")
@pytest.mark.parametrize("with_hook", [False, True])
@pytest.mark.parametrize("hosting", IN_PROCESSES)
def test_an_optimizer_leaves_buffers_of_anothers_model(hosting, with_hook, process_pool):
    devices = IN_PROCESSES[hosting]
    expected = process_pool(2).run(programs.buffers_of_two_optimizers, "mirrored", devices, with_hook)
    found = process_pool(2).run(programs.buffers_of_two_optimizers, "central", devices, with_hook)
    for one, other in zip(expected, found, strict=True):
        assert largest_difference(one, other) <= EXACT


def test_memory_that_is_exchanged_in_processes(process_pool):
    for variant in ("swapped in run", "kept outside", "hook after"):
        expected = programs.exchange("mirrored", cpu_devices(2), variant)
        for result in process_pool(2).run(programs.exchange, "central", None, variant):
            assert largest_difference(expected, result) <= EXACT


def test_layer_and_parameter_group_that_are_new(process_pool):
    expected = process_pool(1).run(programs.new_layer)[0]
    for result in process_pool(2).run(programs.new_layer):
        # Two equal replicas: the loss is a sum over them, so that each step is twice as long.
        assert len(result) == len(expected) == 4
        assert result != expected
    first, second = process_pool(2).run(programs.new_layer)
    assert first == second


def test_processes_share_the_chiefs_memory(process_pool):
    for devices in IN_PROCESSES.values():
        first, second = process_pool(2).run(programs.shared_memory, devices)
        assert (first["is host"], second["is host"]) == (True, False)
        assert second["private pages"] == [[]] * (1 if devices is None else 2)
        assert first["weight"] == 7.0 * 64 * 64 != second["weight"], "what one rank writes outside run is its own"
        assert first["steps"] == second["steps"] == [3.0, 3.0]
        assert first["moments"] == second["moments"]
        assert min(first["moments"]) > 0
        if devices is not None:
            assert first["state in replicas"] == second["state in replicas"] == [2, 0]


@pytest.mark.parametrize(
    ("rank", "where", "waiting"),
    [(1, "in run", "the sum of gradients"), (0, "in run", "the sum of gradients"),
     (0, "in the update", "the update on the host")],
)  # fmt: skip
def test_a_killed_rank_is_named(rank, where, waiting, process_pool):
    with pytest.raises(ts.testing.RemoteError) as caught:
        process_pool(2).run(programs.dies, rank, where)
    error = caught.value.errors[1 - rank]
    assert isinstance(error, ts.errors.ReplicaFailedError)
    assert f"Rank {rank} does not answer: its process has died" in str(error)
    assert f"waiting for it in {waiting}" in str(error)


def test_an_error_in_the_chiefs_update_names_the_chief(process_pool):
    with pytest.raises(ts.testing.RemoteError) as caught:
        process_pool(2).run(programs.fails_in_the_update)
    assert isinstance(caught.value.errors[0], ValueError)
    assert "Rank 0 (replica 0) failed in Strategy.run: ValueError: boom" in str(caught.value.errors[1])


def test_all_processes_see_a_state_that_was_written_to_outside(process_pool):
    assert process_pool(2).run(programs.state_written_outside) == [[2.0, 2.0]] * 2
