"""The fixtures of the root conftest.py fail a test that leaves something behind."""

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

CONFTEST = Path(__file__).parents[1] / "conftest.py"


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("os.environ['LEFT_BEHIND'] = '1'", "*changed environment variables*LEFT_BEHIND*"),
        ("threading.Thread(target=time.sleep, args=(4,), name='left-behind').start()", "*threads*left-behind*"),
        ("ts.experimental_set_strategy(ts.OneDeviceStrategy('cpu:0'))", "*left a current strategy*"),
        ("ts.OneDeviceStrategy('cpu:0').scope().__enter__()", "*left a current strategy*"),
    ],
)
def test_leak_is_an_error(pytester, statement, message):
    pytester.makeconftest(CONFTEST.read_text(encoding="utf-8"))
    pytester.makepyfile(
        f"import os, threading, time\nimport torchstrategy as ts\n\n\ndef test_leak():\n    {statement}\n\n\n"
        "def test_next():\n    assert 'LEFT_BEHIND' not in os.environ and not ts.has_strategy()\n"
    )
    result = pytester.runpytest("-p", "no:xdist")
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines([message])


def test_marked_tests_are_skipped_where_the_hardware_is_missing(pytester, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    pytester.makeconftest(CONFTEST.read_text(encoding="utf-8"))
    pytester.makeini("[pytest]\nmarkers = gpu")
    pytester.makepyfile("import pytest\n\n\n@pytest.mark.gpu\ndef test_gpu():\n    raise AssertionError\n")
    pytester.runpytest("-p", "no:xdist").assert_outcomes(skipped=1)
