"""Metrics under ``TPUStrategy`` give what they give under ``MirroredStrategy``, and cost no compilation each time."""

import math

import pytest

from tests.fit.test_fit_equivalence import flat
from tests.tpu import metric_programs


@pytest.mark.parametrize("name", metric_programs.METRICS)
def test_results_are_those_of_mirrored_replicas(xla_process, name):
    found, expected = xla_process(4).run(metric_programs.compare_metric, name)
    assert flat(found) == pytest.approx(flat(expected), abs=1e-6)


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("name", ["auc", "items"])
def test_results_for_fewer_replicas(xla_process, num_devices, name):
    found, expected = xla_process(num_devices).run(metric_programs.compare_metric, name)
    assert found == expected


def test_reading_and_resetting_compile_nothing(xla_process):
    counts = xla_process(4).run(metric_programs.count_compilations)
    assert counts[-1] - counts[0] <= 1, counts  # a step after a reset


def test_invalid_predictions_make_the_result_nan(xla_process):
    assert all(map(math.isnan, xla_process(4).run(metric_programs.invalid_predictions)))


@pytest.mark.parametrize("num_devices", [1, 4])
def test_values_that_replicas_share(xla_process, num_devices):
    area, counts = xla_process(num_devices).run(metric_programs.same_values_for_all)
    assert (area, counts) == (0.5, [num_devices, 0])


def test_a_replica_reads_its_own(xla_process):
    found, expected = xla_process(2).run(metric_programs.read_inside)
    assert found == expected


def test_copies_and_moves_are_of_all_replicas_parts(xla_process):
    found, expected = xla_process(4).run(metric_programs.copied_and_moved)
    assert found == expected == [28.0] * 3 + [True, 28.0] + [56.0] * 3 + [True, 56.0]


def test_metrics_of_replicas_on_other_hosts_are_refused(xla_process):
    assert "add them up with `strategy.reduce`" in xla_process(4).run(metric_programs.read_over_hosts)
