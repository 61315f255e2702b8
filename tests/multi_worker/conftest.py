import contextlib

import pytest

from tests.testing.networks import network_or_skip


@pytest.fixture
def network():
    """A function that makes a network of as many hosts, closed at the end of the test."""
    with contextlib.ExitStack() as stack:
        yield lambda num_hosts: stack.enter_context(network_or_skip(num_hosts))
