"""Python programs that start as forks of a process which has imported torch, in a tenth of a new interpreter's time.

What only a new interpreter shows, such as an effect of the order of imports, they don't: tests of that start their own.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from torchstrategy.testing.local_cluster import _without_program
from torchstrategy.testing.processes import process_context


def run(
    command: Sequence[object], folder: Path, timeout_s: float = 100.0, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, and return its exit status and what it has printed.

    Args:
        command: as for ``start``.
        folder: where it runs.
        timeout_s: how long it may take.
        environment: all its environment variables; ``None`` for this process's.
    """
    with tempfile.TemporaryDirectory() as place:
        output, errors = Path(place) / "output", Path(place) / "errors"
        process = start(command, folder, os.environ if environment is None else environment, output, errors)
        try:
            status = process.wait(timeout_s)
        finally:
            process.kill()
        texts = [path.read_text(encoding="utf-8") for path in (output, errors)]
    return subprocess.CompletedProcess(command, status, *texts)


def start(
    command: Sequence[object], folder: Path, environment: Mapping[str, str], output: Path, errors: Path
) -> Program | subprocess.Popen[bytes]:
    """Start a command: warm if it is this Python with a script, as an ordinary process if it is another.

    Args:
        command: a program and its arguments.
        folder: where it runs.
        environment: all its environment variables.
        output: the file that gets what it prints.
        errors: the file that gets its error output, which may be the same.
    """
    program, *arguments = map(str, command)
    if program == sys.executable and arguments[0].endswith(".py"):
        return Program(arguments, folder, environment, output, errors)
    with open(output, "a", encoding="utf-8") as out, open(errors, "a", encoding="utf-8") as err:
        return subprocess.Popen([program, *arguments], cwd=folder, env=dict(environment), stdout=out, stderr=err)


class Program:
    """A program that runs, with the methods of ``subprocess.Popen`` that tests need.

    Args:
        arguments: a script's path and its arguments.
        folder: where it runs.
        environment: all its environment variables.
        output: the file that gets what it prints.
        errors: the file that gets its error output; both are appended to.
    """

    def __init__(
        self, arguments: Sequence[object], folder: Path, environment: Mapping[str, str], output: Path, errors: Path
    ):
        self._arguments = [str(argument) for argument in arguments]
        what = (self._arguments, str(folder), dict(environment), str(output), str(errors))
        self._process = process_context().Process(target=_be_a_program, args=what)
        with _without_program():
            self._process.start()

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._arguments, timeout)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self._process.exitcode is None:
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()


def _be_a_program(arguments: list[str], folder: str, environment: dict[str, str], output: str, errors: str) -> None:
    """Be a program, in a process that was forked for it, to the end."""
    for standard, path in ((1, output), (2, errors)):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, standard)
        os.close(descriptor)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    multiprocessing.set_start_method(None, force=True)
    sys.stdout.reconfigure(write_through="PYTHONUNBUFFERED" in environment)
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", "1")))  # more would wait for each other in a busy loop
    torch.seed()  # the forked generators are all the same
    np.random.seed()
    sys.argv = arguments
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [str(Path(arguments[0]).parent), *filter(None, paths)]
    status: object = 0
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as error:
        status = error.code
        if isinstance(status, str):
            print(status, file=sys.stderr)
            status = 1
    except BaseException as error:  # noqa: BLE001 - as an interpreter does
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status if isinstance(status, int) else 0)
