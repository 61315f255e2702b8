"""Fixtures of the tests of replicas."""

import pytest

import torchstrategy as ts
from tests.programs import cpu_devices


@pytest.fixture(params=[(2, False), (3, False), (2, True)], ids=["2", "3", "2-concurrent"])
def strategy(request):
    """Several replicas in this process, in turns and at once; modules that need others have a fixture of their own."""
    count, concurrent = request.param
    return ts.MirroredStrategy(cpu_devices(count), concurrent=concurrent)
