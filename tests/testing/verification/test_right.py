"""Right programs are called right."""

import functools

import pytest

import torchstrategy as ts
from tests.testing.verification import right


@pytest.mark.parametrize("name", right.NAMES)
def test_right_in_one_process(name):
    build = functools.partial(right.build, name=name)
    report = ts.testing.verify_replication(build, right.batches(), replicas=(2, 3), processes=())
    assert report.ok, str(report)
    assert str(report).count("right in all 4 steps") == 2


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == "gan" else pytest.mark.slow) for n in right.NAMES])
def test_right_in_processes(name):
    build = functools.partial(right.build, name=name)
    report = ts.testing.verify_replication(build, right.batches(), replicas=(), processes=(2,))
    assert report.ok, str(report)
