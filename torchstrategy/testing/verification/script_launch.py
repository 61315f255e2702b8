"""Starts the processes of a verified script: new interpreters, as ``python`` and ``torchrun`` start them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from torchstrategy.base.addresses import ReservedPorts
from torchstrategy.testing.verification.script_process import Setup, record_path

__all__ = ["log_path", "start"]

_AFTER_ERROR_S = 15.0
_NUM_LINES = 8
#: What a launcher around this command, or an earlier one, has set.
_OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TF_CONFIG")
_PREFIXES = ("SLURM_", "TORCHELASTIC_", "OMPI_", "PMI_")
#: The library may lie beside the program or in a folder that only this process knows of.
_MAIN = (
    "import sys; sys.path[0] = sys.argv[1]; from torchstrategy.testing.verification.script_process import main; "
    "del sys.path[0]; main(sys.argv[2])"
)


def start(setups: Sequence[Setup], timeout_s: float) -> list[str | None]:
    """Run a script in one new interpreter for each setup, and wait until they have ended.

    Args:
        setups: what each process is told.
        timeout_s: seconds that they may take together.

    Returns:
        For each process why it has left no record, or ``None`` if it has.
    """
    ports = ReservedPorts(1)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for setup in setups:
            processes.append(_start(setup, ports.numbers[0]))
        is_late = _wait(processes, time.monotonic() + timeout_s)
    finally:
        for process in processes:
            _end(process)
        ports.close()
    return [_why(setup, process, timeout_s, is_late) for setup, process in zip(setups, processes, strict=True)]


def _start(setup: Setup, port: int) -> subprocess.Popen[bytes]:
    folder = Path(setup.folder)
    settings = folder / f"rank{setup.rank}.json"
    settings.write_text(json.dumps(dataclasses.asdict(setup)), encoding="utf-8")
    home = str(Path(__file__).parents[3])
    command = [sys.executable, "-c", _MAIN, home, str(settings)]
    with log_path(setup).open("wb") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=_environment(setup, port),
            start_new_session=True,  # its own processes, such as a loader's, are ended with it
        )


def _environment(setup: Setup, port: int) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _OF_LAUNCHERS and not name.startswith(_PREFIXES)
    }
    fixed = {
        "CUDA_VISIBLE_DEVICES": "",
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
        "TORCHDYNAMO_DISABLE": "1",  # compiled code has no calls of modules to watch
    }
    job = {
        "RANK": setup.rank,
        "WORLD_SIZE": setup.size,
        "LOCAL_RANK": setup.rank,
        "LOCAL_WORLD_SIZE": setup.size,
        "GROUP_RANK": 0,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": "verify",
    }
    return {**kept, **fixed, **({name: str(value) for name, value in job.items()} if setup.is_job else {})}


def _wait(processes: Sequence[subprocess.Popen[bytes]], deadline: float) -> bool:
    """Wait until all have ended; say whether time was up. After one's failure the others get some seconds."""
    limit = deadline
    while any(process.poll() is None for process in processes):
        if any(process.returncode for process in processes):
            limit = min(limit, time.monotonic() + _AFTER_ERROR_S)
        if time.monotonic() > limit:
            return limit == deadline
        time.sleep(0.02)
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    if not hasattr(os, "killpg"):  # on Windows, where it has no group
        process.kill()
    else:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _why(setup: Setup, process: subprocess.Popen[bytes], timeout_s: float, is_late: bool) -> str | None:  # noqa: FBT001
    if record_path(setup.folder, setup.rank).exists():
        return None
    if is_late:
        return f"process {setup.rank} did not end within {timeout_s:g} s: raise --timeout, or record fewer --steps"
    lines = log_path(setup).read_text(encoding="utf-8", errors="replace").strip().splitlines()
    status = process.returncode
    was_killed = status == -getattr(signal, "SIGKILL", 0)
    how = "was ended after another one's failure" if was_killed else f"ended with exit status {status}"
    return "\n".join([f"process {setup.rank} {how}", *lines[-_NUM_LINES:]])


def log_path(setup: Setup) -> Path:
    """Return the file that gets what a process writes to stderr, and to stdout below Python."""
    return Path(setup.folder) / f"rank{setup.rank}.log"
