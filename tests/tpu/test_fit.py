"""``Model.fit``, ``evaluate`` and ``predict`` under ``TPUStrategy`` give the numbers of one replica."""

import pytest

from tests.fit.test_fit_equivalence import assert_near
from tests.tpu import model_programs

QUICK = ["two outputs, weighted", "accumulated and regularized"]


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in model_programs.PROGRAMS]
)
def test_fit_gives_the_numbers_of_one_replica(xla_process, name):
    found, expected = xla_process(4).run(model_programs.compare_fit, name)
    assert_near(found, expected, 1e-10)


@pytest.mark.parametrize("num_devices", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_fit_on_fewer_devices(xla_process, num_devices):
    found, expected = xla_process(num_devices).run(model_programs.compare_fit, "class weights")
    assert_near(found, expected, 1e-10)


def test_fit_compiles_a_few_programs_in_its_first_epochs(xla_process):
    first, later = xla_process(2).run(model_programs.compilations_of_fit)
    assert 0 < first <= 8  # two for each of: a whole batch, the last one, evaluation and its last batch
    assert later == 0
