"""The tests of XLA devices: on virtual ones, unless the environment says otherwise; left out without torch_xla.

This process drives 4 devices. A process has one runtime and one number of devices, so what needs another number, or a
runtime that is not started yet, runs in a process of its own: see ``xla_process`` and ``xla_program``.
"""

import importlib.util
import os

import pytest

from tests.tpu.processes import XlaProcesses, run_program
from torchstrategy.xla import system

HAS_TORCH_XLA = importlib.util.find_spec("torch_xla") is not None
NUM_DEVICES = 4

if HAS_TORCH_XLA and "CPU_NUM_DEVICES" not in os.environ:
    os.environ["PJRT_DEVICE"] = "CPU"
    os.environ["CPU_NUM_DEVICES"] = str(NUM_DEVICES)


class _LeftOut(pytest.Module):
    """A module of tests that is not imported; pytest folds these into one line, as they all have one reason."""

    def collect(self):
        pytest.skip("tests/tpu needs torch_xla: make test-tpu", allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    return None if HAS_TORCH_XLA else _LeftOut.from_parent(parent, path=module_path)


def pytest_itemcollected(item):
    item.add_marker("tpu")
    if item.get_closest_marker("timeout") is None:
        item.add_marker(pytest.mark.timeout(400))  # compilations take seconds, on a busy machine many


@pytest.fixture(scope="session")
def _xla_processes():
    with XlaProcesses() as processes:
        yield processes


@pytest.fixture
def xla_process(_xla_processes):
    """``xla_process(num_devices=4, fresh=False)``: a process that drives so many virtual devices.

    ``.run(fn, *args, **kwargs)`` calls a module's function there and returns what it returned. What it raised comes as
    a ``RemoteError`` with the traceback, a crash as one with the exit code. The process is kept for further tests, with
    the TPU system initialised; unless it is fresh: then nothing of XLA was started in it, and it ends with the test.
    """
    yield _xla_processes.get
    _xla_processes.close_fresh()


@pytest.fixture
def xla_program(tmp_path):
    """``xla_program(code, num_devices=4, **environment)``: run Python with a new interpreter.

    Returns a ``subprocess.CompletedProcess``: for what happens at import, on the terminal, or at the end of a process.
    A variable that is ``None`` is removed.
    """

    def run(code, num_devices=NUM_DEVICES, **environment):
        path = tmp_path / "program.py"
        path.write_text(code, encoding="utf-8")
        return run_program(path, num_devices, environment)

    return run


@pytest.fixture(scope="session")
def runtime():
    """The runtime of this very process, initialised for 4 virtual devices (``CPU_NUM_DEVICES``)."""
    return system.initialize(spmd=True).runtime
