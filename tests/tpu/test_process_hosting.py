"""One process for each virtual device: real XLA tensors, summed on the hosts, as XLA connects no CPU processes."""

import functools

import pytest
import torch

from tests import programs
from tests.programs import largest_difference
from tests.tpu import chip_programs as chips
from tests.tpu.processes import XlaProcesses
from torchstrategy.testing import run_in_processes

PROGRAMS = {
    "sgd, accumulated": ({"num_examples": 13, "accumulation": 2, "dtype": torch.float64}, 1e-10),
    "fewer examples than replicas": ({"num_examples": 7, "batch_size": 3}, 1e-6),
}


@pytest.fixture
def run():
    """``run(fn, size, *args)``: call a function in new processes, forked from one that has imported torch_xla."""
    XlaProcesses()
    return functools.partial(run_in_processes, timeout_s=150)


@pytest.mark.parametrize("name", PROGRAMS)
def test_processes_train_like_one(name, run):
    program, tolerance = PROGRAMS[name]
    expected = programs.train([], **program)
    for numbers, device_type in run(chips.train, 2, **program):
        assert device_type == "xla"
        assert largest_difference(expected, numbers) <= tolerance


def test_buffers_metrics_collectives_and_checkpoints(tmp_path, run):
    for on_chips, on_cpus in run(chips.everything, 2, str(tmp_path)):
        assert on_chips["restored"]
        for key in ("rows", "weights", "buffers"):
            assert largest_difference(on_chips[key], on_cpus[key]) <= 1e-6
        for key in ("accuracy", "mean"):
            assert on_chips[key] == pytest.approx(on_cpus[key], abs=1e-6)


def test_a_loop_compiles_in_its_first_steps_only(run):
    for found in run(chips.compilations, 2):
        compiled, reads = found["compiled"], found["reads"]
        assert compiled[2:] == [compiled[2]] * 6, compiled
        # Where XLA connects the processes, the sum of gradients is not read, either: see test_xla_backend.
        assert reads[2:] == [1] * 6, reads


def test_dropout_differs_between_replicas_and_repeats_from_a_seed(run):
    first, second = run(chips.masks, 2)
    for masks in (first, second):
        assert masks[:2] == masks[2:4]
        assert len({str(mask) for mask in masks}) == 4
        assert all(set(mask) == {0.0, 2.0} for mask in masks)
    assert not {str(mask) for mask in first} & {str(mask) for mask in second}
