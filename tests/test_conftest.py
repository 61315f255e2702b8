"""The fixtures of the root conftest.py fail a test that leaves something behind."""

import os
from pathlib import Path

import pytest

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

DEAR = """
import subprocess
import sys
import time

import pytest
import torchstrategy as ts
from tests import budget

budget.is_enforced = True
budget.LIMIT_S = 0.2
BURN = "import time\\nwhile time.process_time() < 0.4: pass"


def burn(seconds):
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


def test_cheap():
    time.sleep(0.4)


def test_dear():
    burn(0.3)


def test_a_child_is_dear():
    subprocess.run([sys.executable, "-c", BURN], check=True)


def test_a_living_process_is_dear(process_pool):
    process_pool(1).run(burn, 0.3)


def test_starts_are_dear():
    for _ in range(3):
        with ts.testing.ProcessPool(1) as pool:
            pool.run(abs, -1)


@pytest.mark.slow
def test_slow():
    burn(0.3)


@pytest.mark.end_to_end
def test_end_to_end():
    burn(0.3)
"""

NEEDS_A_GPU = """
import pytest


@pytest.mark.gpu
def test_gpu():
    raise AssertionError
"""


# In processes of their own: an open scope must not stay in the one that runs the other tests.


@pytest.fixture(autouse=True)
def _with_the_tests_helpers(monkeypatch):
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(filter(None, [str(CONFTEST.parent), os.environ.get("PYTHONPATH")]))
    )


@pytest.mark.slow
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


@pytest.mark.slow
def test_tests_above_their_budget_are_errors(pytester):
    pytester.makeconftest(CONFTEST.read_text(encoding="utf-8"))
    pytester.makeini("[pytest]\nmarkers =\n  slow\n  end_to_end")
    pytester.makepyfile(DEAR)
    result = pytester.runpytest_subprocess("-p", "no:xdist")
    result.assert_outcomes(passed=7, errors=4)
    result.stdout.fnmatch_lines(
        [
            "*ERROR at teardown of test_dear*",
            "*s of CPU time, more than*",
            "*ERROR at teardown of test_a_child_is_dear*",
            "*ERROR at teardown of test_a_living_process_is_dear*",
            "*ERROR at teardown of test_starts_are_dear*",
        ]
    )


@pytest.mark.slow
def test_marked_tests_are_skipped_where_the_hardware_is_missing(pytester, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    pytester.makeconftest(CONFTEST.read_text(encoding="utf-8"))
    pytester.makeini("[pytest]\nmarkers = gpu")
    pytester.makepyfile(NEEDS_A_GPU)
    pytester.runpytest_subprocess("-p", "no:xdist").assert_outcomes(skipped=1)
