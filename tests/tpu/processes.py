"""Processes with virtual devices; forked from one that has imported torch_xla, which takes five seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from tests.clusters import LAUNCHER_VARIABLES
from torchstrategy.base import context
from torchstrategy.testing import ProcessPool
from torchstrategy.testing.processes import process_context
from torchstrategy.xla import system

ROOT = Path(__file__).parents[2]
_is_prepared: list[bool] = []


class XlaProcess:
    """A process with its own runtime; it looks like a program that no launcher has started.

    Args:
        num_devices: virtual devices that it drives.
        timeout_s: seconds that a call may take.
        is_initialized: whether the TPU system is, before the first call.
    """

    def __init__(self, num_devices: int, timeout_s: float = 300.0, *, is_initialized: bool = True) -> None:
        self.num_devices = num_devices
        self._is_initialized = is_initialized
        self._pool = ProcessPool(1, timeout_s)

    def run(self, fn: Callable[..., Any], *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """Call a module's function there, return what it returned; ``RemoteError`` if it failed or the process died."""
        return self._pool.run(_call, self.num_devices, self._is_initialized, fn, args, kwargs, timeout_s=timeout_s)[0]

    def close(self) -> None:
        self._pool.close()


class XlaProcesses:
    """One process for each number of devices, and fresh ones."""

    def __init__(self) -> None:
        self._kept: dict[int, XlaProcess] = {}
        self._fresh: list[XlaProcess] = []
        process_context().set_forkserver_preload(["torchstrategy", "torch._dynamo", "torchmetrics", "torch_xla"])
        forkserver.ensure_running()

    def get(self, num_devices: int = 4, *, fresh: bool = False) -> XlaProcess:
        if fresh:
            self._fresh.append(XlaProcess(num_devices, is_initialized=False))
            return self._fresh[-1]
        if num_devices not in self._kept:
            self._kept[num_devices] = XlaProcess(num_devices)
        return self._kept[num_devices]

    def close_fresh(self) -> None:
        for process in self._fresh:
            process.close()
        self._fresh.clear()

    def __enter__(self) -> XlaProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self.close_fresh()
        for process in self._kept.values():
            process.close()


def run_program(
    path: Path, num_devices: int, environment: Mapping[str, str | None], timeout_s: float = 100.0
) -> subprocess.CompletedProcess[str]:
    """Run a file with a new interpreter and so many virtual devices."""
    variables = _environment(num_devices) | {name: value for name, value in environment.items() if value is not None}
    for name in [name for name, value in environment.items() if value is None]:
        variables.pop(name, None)
    return subprocess.run(
        [sys.executable, str(path)],
        env=variables,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def _environment(num_devices: int) -> dict[str, str]:
    set_here = (*LAUNCHER_VARIABLES, "XLA_USE_SPMD")  # by the pool, and by a runtime that was started in this process
    kept = {name: value for name, value in os.environ.items() if name not in set_here}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return kept | {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(num_devices), "PYTHONPATH": path}


def _call(
    num_devices: int, is_initialized: bool, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if not _is_prepared:
        # A fork that has started nothing yet; the runtime reads the variables when it is started.
        os.environ.clear()
        os.environ.update(_environment(num_devices))
        _is_prepared.append(True)
        if is_initialized:
            system.initialize(spmd=True)
    result = fn(*args, **kwargs)
    if context.current_frame() is not None:
        raise RuntimeError("The function left a current strategy: use `with strategy.scope():`.")
    return result
