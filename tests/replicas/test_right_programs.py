"""Programs that plain torch accepts train with several replicas, or are refused with a sentence."""

import os
import re

import pytest
import torch

import torchstrategy as ts
from tests.replicas import right_programs as programs

pytestmark = pytest.mark.filterwarnings("ignore:Buffer .* has got another value on each replica")

SAME_AS_ONE = [programs.abstract_class, programs.generic_class, programs.disabled_scaler, programs.growing]
SAME_IN_EVERY_HOSTING = [programs.gan_with_batch_norm, programs.quantization_aware, programs.own_moving_averages]


def devices(number):
    return [f"cpu:{i}" for i in range(number)]


@pytest.mark.parametrize("program", SAME_AS_ONE)
@pytest.mark.parametrize("number", [2, 3])
def test_replicas_train_as_one_does(program, number):
    assert torch.allclose(program(devices(number)), program(devices(1)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("program", [*SAME_AS_ONE, *SAME_IN_EVERY_HOSTING])
def test_processes_train_as_replicas_in_one_do(program, process_pool):
    expected = program(devices(2))
    for result in process_pool(2).run(program):
        assert torch.allclose(result, expected, rtol=0, atol=1e-6 if expected.dtype is torch.float32 else 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("starts_at", [0, 40])
def test_averages_written_past_their_versions_are_averaged(starts_at):
    strategy = ts.MirroredStrategy(devices(2))
    with strategy.scope():
        model = programs.OwnMovingAverages().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step(x, is_training):
        optimizer.zero_grad()
        (model(x) if is_training else model.layer(x)).sum().backward()
        optimizer.step()

    torch.manual_seed(2)
    values = torch.randn(400, 8, 3).double()
    expected = torch.zeros(3).double()
    for number, x in enumerate(values):
        strategy.run(step, args=(ts.PerReplica(x.split(4)), number >= starts_at))
        if number >= starts_at:  # the mean of both replicas' own averages
            expected = 0.9 * expected + 0.1 * x.mean(0)
    assert torch.allclose(model.mean, expected, rtol=0, atol=1e-12)
    strategy.check_sync()


def test_averages_written_past_their_versions_outside_run_reach_all_replicas():
    strategy = ts.MirroredStrategy(devices(3))
    with strategy.scope():
        model = programs.OwnMovingAverages().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step(x):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    torch.manual_seed(2)
    values = torch.randn(6, 6, 3).double()
    for x in values[:2]:  # in which it is found how the module writes
        strategy.run(step, args=(ts.PerReplica(x.split(2)),))
    for x in values[2:]:
        strategy.run(step, args=(ts.PerReplica(x.split(2)),))
        with torch.no_grad():
            model(x + 7)  # as `update_bn` does
        seen = strategy.experimental_local_results(strategy.run(lambda: model.mean.clone()))
        assert [torch.equal(mean, model.mean) for mean in seen] == [True] * 3


def test_a_scripted_module_trains_on_one_replica():
    torch.manual_seed(0)
    eager = programs.train(devices(1), lambda: torch.nn.Sequential(*_layers()).double())
    # TorchScript differentiates by code of its own, so the last bits may differ.
    torch.testing.assert_close(programs.scripted(devices(1)), eager, rtol=1e-12, atol=1e-12)


def test_a_scripted_module_is_refused_on_several():
    with pytest.raises(TypeError, match=r"TorchScript module, which can't be hosted.*Use the module"):
        programs.scripted(devices(2))


# FSDP2: parameters that torch has divided between the processes.


def check_as_one(process_pool, program, *args, **kwargs):
    expected = program(devices(1), *args, **kwargs)
    for result in process_pool(2).run(program, None, *args, **kwargs):
        assert torch.allclose(result, expected, rtol=0, atol=1e-6 if kwargs.get("variant") == "float" else 1e-10)


def test_fsdp_trains_as_one_replica_does(process_pool):
    check_as_one(process_pool, programs.divided, variant="penalty", number=13)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["", "penalty", "accumulated", "no sync", "float"])
@pytest.mark.parametrize("kind", ["all", "mixed", "copies"])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
def test_fsdp_trains_as_one_replica_does_in_all_ways(make, kind, variant, process_pool):
    check_as_one(process_pool, programs.divided, kind, make, variant=variant)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["clipped", "scaler"])
def test_fsdp_is_clipped_and_scaled_as_one_replica_is(variant, process_pool):
    check_as_one(process_pool, programs.divided, variant=variant)


@pytest.mark.slow
def test_states_that_fsdp_has_divided_are_not_divided_again(process_pool):
    expected = programs.divided(devices(1))
    for result in process_pool(2).run(programs.divided, None, shard_optimizer_states=True):
        assert torch.allclose(result, expected, rtol=0, atol=1e-10)


@pytest.mark.slow
def test_buffers_beside_fsdp_are_averaged(process_pool):
    expected, _ = process_pool(2).run(programs.divided, None, "whole", variant="batch norm", number=24)
    for result in process_pool(2).run(programs.divided, None, "mixed", variant="batch norm", number=24):
        assert torch.allclose(result, expected, rtol=0, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["all", "mixed"])
def test_fsdp_fits_as_one_replica_does(kind, process_pool):
    check_as_one(process_pool, programs.fitted_divided, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["all", "mixed"])
def test_a_checkpoint_of_fsdp_is_that_of_one_replica(kind, process_pool, tmp_path):
    def saved(file, start, restored=None):
        return start(programs.saved_divided, kind, str(tmp_path / file), restored)

    def divided(program, *args):
        return process_pool(2).run(program, None, *args)

    def alone(program, *args):
        return program(devices(1), *args)

    (first, of_chief), (_, of_other) = saved("divided", divided)
    expected, of_one = saved("whole", alone)
    assert torch.allclose(first, expected, rtol=0, atol=1e-10)
    content = torch.load(tmp_path / "divided.pt", weights_only=True)["objects"]  # plain tensors
    assert content["model"]["state"]["first.weight"].shape == (5, 3)
    assert of_chief == of_one
    assert of_other < of_one / 2  # what it doesn't write it doesn't keep
    expected, _ = saved("whole-2", alone, str(tmp_path / "whole"))
    for restored in ("divided", "whole"):
        assert torch.allclose(saved("a", alone, str(tmp_path / restored))[0], expected, rtol=0, atol=1e-10)
        for result, _ in saved("b", divided, str(tmp_path / restored)):
            assert torch.allclose(result, expected, rtol=0, atol=1e-10)


def test_a_part_of_a_dtensor_is_not_saved(process_pool):
    for text in process_pool(2).run(programs.part_of_a_dtensor):
        assert "state['weight'] is a DTensor, of which this process has a part only" in text
        assert "torch.distributed.checkpoint" in text


def test_a_save_of_fsdp_on_one_rank_is_an_error_on_all(process_pool, tmp_path):
    for outcome in process_pool(2).outcomes(programs.save_divided_on_one_rank, str(tmp_path / "model")):
        assert isinstance(outcome.error, ts.errors.DisagreementError), outcome.error
        assert "rank 0: gathering for checkpoint model-1" in str(outcome.error)


@pytest.mark.slow
def test_means_that_fsdp_would_add_up_are_warned_of(process_pool):
    for of_sum, of_mean in process_pool(2).run(programs.warned_of_means):
        assert of_sum == []
        assert "is a mean over this replica's share" in of_mean[0]


@pytest.mark.parametrize(
    ("kind", "own", "text"),
    [
        ("tensor parallel", None, "DTensor that `fully_shard` .FSDP2. does not manage.*every replica.*has data of its"),
        ("one", None, "a data-parallel mesh of 1 processes, but the strategy has 2 replicas.*Give it all of them"),
        ("all", ["cpu:0", "cpu:1"], "`fully_shard` .FSDP2.*several replicas.*Start a process for each device"),
    ],
)
def test_dtensors_that_nobody_sums_are_refused(kind, own, text, process_pool):
    for message in process_pool(2).run(programs.refused_dtensors, kind, own):
        assert re.search(text, message), message


def test_a_number_of_devices():
    assert ts.MirroredStrategy(2).num_replicas_in_sync == 2


def test_a_fork_after_a_run():
    strategy = ts.MirroredStrategy(devices(2))
    _sum_of_ones(strategy)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        text = ""
        try:
            text = str(_sum_of_ones(strategy))
        except RuntimeError as error:
            text = str(error)
        finally:
            os.write(writing, text.encode())
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        text = file.read()
    assert os.waitpid(child, 0)[1] == 0
    assert text == "2.0" or "fork" in text


def _sum_of_ones(strategy):
    result = strategy.run(lambda: ts.get_replica_context().all_reduce("SUM", torch.ones(1)))
    return strategy.experimental_local_results(result)[0].item()


def _layers():
    return torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)
