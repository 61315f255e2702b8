"""``ts.Variable`` under ``TPUStrategy`` does what it does under ``MirroredStrategy``."""

import pytest

from tests.tpu import metric_programs


@pytest.mark.parametrize("aggregation", ["NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA"])
@pytest.mark.parametrize("synchronization", ["ON_WRITE", "ON_READ"])
def test_assignments_are_those_of_mirrored_replicas(xla_process, synchronization, aggregation):
    found, expected = xla_process(4).run(metric_programs.compare_variable, synchronization, aggregation)
    assert found == expected


@pytest.mark.parametrize("num_devices", [1, 2])
def test_assignments_for_fewer_replicas(xla_process, num_devices):
    found, expected = xla_process(num_devices).run(metric_programs.compare_variable, "ON_READ", "SUM")
    assert found == expected


def test_an_optimizer_trains_variables(xla_process):
    (losses, scale, steps), expected = xla_process(4).run(metric_programs.train_variables)
    assert steps == expected[2] == 3
    assert losses == pytest.approx(expected[0], rel=1e-6)
    assert scale == pytest.approx(expected[1], rel=1e-6)


def test_a_step_of_what_replicas_have_assigned_needs_equal_shares(xla_process):
    process = xla_process(4)
    assert process.run(metric_programs.step_what_replicas_have_assigned, 8) is None
    message = process.run(metric_programs.step_what_replicas_have_assigned, 5)
    assert "replicas have assigned values of their own" in message
    assert "drop_remainder=True" in message
