"""What a step costs in the library, as ``python -m tests.step_calls`` prints it, does not grow."""

import sys

import pytest

from tests import step_calls


@pytest.mark.end_to_end
@pytest.mark.skipif(sys.version_info < (3, 11), reason="what counts makes a dict of all locals, and holds gradients so")
@pytest.mark.parametrize(
    ("count", "num_calls", "num_files"), [(step_calls.in_process, 7.5, 33), (step_calls.in_processes, 1, 31)]
)
def test_calls_for_each_parameter_and_files(count, num_calls, num_files):
    calls = count(600)
    dearest = {file: round(number / 600, 2) for file, number in calls.most_common(12)}
    assert 0 < step_calls.of_parameters(calls, 600) <= num_calls, dearest
    assert len(calls) <= num_files, sorted(calls)
