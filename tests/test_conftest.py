"""The fixtures of the root conftest.py fail a test that leaves something behind."""

from pathlib import Path

pytest_plugins = ["pytester"]

CONFTEST = Path(__file__).parents[1] / "conftest.py"

LEAKS = """
import os
import threading
import time

import torchstrategy as ts


def test_environment():
    os.environ["LEFT_BEHIND"] = "1"


def test_thread():
    threading.Thread(target=time.sleep, args=(4,), name="left-behind").start()


def test_strategy():
    ts.experimental_set_strategy(ts.OneDeviceStrategy("cpu:0"))


def test_scope():
    ts.OneDeviceStrategy("cpu:0").scope().__enter__()


def test_what_comes_next():
    assert "LEFT_BEHIND" not in os.environ
    assert not ts.has_strategy()
"""

NEEDS_A_GPU = """
import pytest


@pytest.mark.gpu
def test_gpu():
    raise AssertionError
"""


# In processes of their own: an open scope must not stay in the one that runs the other tests.


def test_leaks_are_errors(pytester):
    pytester.makeconftest(CONFTEST.read_text(encoding="utf-8"))
    pytester.makepyfile(LEAKS)
    result = pytester.runpytest_subprocess("-p", "no:xdist")
    result.assert_outcomes(passed=5, errors=4)
    result.stdout.fnmatch_lines(
        [
            "*ERROR at teardown of test_environment*",
            "*changed environment variables*LEFT_BEHIND*",
            "*ERROR at teardown of test_thread*",
            "*threads that keep the process alive*left-behind*",
            "*ERROR at teardown of test_strategy*",
            "*left a current strategy*",
            "*ERROR at teardown of test_scope*",
            "*left a current strategy*",
        ]
    )


def test_marked_tests_are_skipped_where_the_hardware_is_missing(pytester, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    pytester.makeconftest(CONFTEST.read_text(encoding="utf-8"))
    pytester.makeini("[pytest]\nmarkers = gpu")
    pytester.makepyfile(NEEDS_A_GPU)
    pytester.runpytest_subprocess("-p", "no:xdist").assert_outcomes(skipped=1)
