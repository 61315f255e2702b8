"""Runs each test file in a process that has only imported ``torchstrategy``: ``python -m tests.isolated [-j 2] ...``.

What one test imports can't help another file's: a number that depends on what the program has imported shows. The
processes are forked from one that has imported torch and pytest, ``torchstrategy`` as ``conftest.py`` does before any
test, and matplotlib, which the library never looks for, several at a time, so each is there in milliseconds; collecting
stays as cheap as with one process. Files that speak of metrics come last, when it has imported torchmetrics for them.
Pools of processes, and programs that tests start warm, come from one server, which all files share. The library's own
examples run with those of their folder, in one process.

All further arguments are pytest's, such as paths, ``-m slow`` or ``-k name``. A plain ``pytest`` runs the same tests.
"""

from __future__ import annotations

import argparse
import atexit
import collections
import contextlib
import faulthandler
import functools
import gc
import importlib
import io
import json
import logging
import multiprocessing
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import unicodedata
from collections.abc import Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch._dynamo  # every optimizer's first step would import it

from tests import budget

ROOT = Path(__file__).parents[1]
FOLDERS = ("tests", "torchstrategy")
LIBRARY = "torchstrategy"
#: What every program that starts processes imports (torch's at an optimizer's first step), or ``compile``, or a test.
PRELOADED = ["torch._dynamo", "tests.quick_exit", LIBRARY, "torchmetrics", "hydra", "pytest"]
#: A package whose import costs more than most files, and what is in the files whose tests import it anyway.
LATE, NEEDS_LATE = "torchmetrics", re.compile(r"metrics\b|\.fit\(|[Ee]stimator")
#: The only one of the installed plugins of pytest, for which no process has to look, and those of its own left out.
PLUGINS = ["pytest_timeout"]
LEFT_OUT = [
    "--disable-plugin-autoload",
    *(f"-pno:{name}" for name in ("cacheprovider", "junitxml", "legacypath", "pastebin")),
    *(f"-pno:{name}" for name in ("setuponly", "setupplan", "stepwise", "subtests")),
]
NOTHING_COLLECTED = 5
#: How many of the tests that are over their budget are shown.
NUM_DEAREST = 10


class Running(NamedTuple):
    """The process of a file, or of some, what it prints, when it began, and where its tests write."""

    file: str
    pid: int
    output: object
    start: float
    folder: Path


class Outcomes:
    """A pytest plugin that counts what became of some files' tests, and looks for tests in no other file.

    Args:
        connection: a file descriptor that gets the counts, the ids of the failed, and the CPU seconds of those over
            their budget, as one JSON line.
        has_doctests: whether the files may have doctests.
    """

    def __init__(self, connection, has_doctests):
        self._connection = connection
        self._has_doctests = has_doctests
        self._counts = collections.Counter()
        self._failed = []
        self._dear = {}

    def pytest_configure(self, config):
        config.option.doctestmodules = self._has_doctests

    @pytest.hookimpl(tryfirst=True)
    def pytest_ignore_collect(self, collection_path):
        return True  # which pytest asks of what lies beside the files, not of those that it was given

    def pytest_runtest_logreport(self, report):
        seconds = dict(report.user_properties).get("cpu_seconds", 0)
        if report.when == "teardown" and seconds > budget.BUDGET_S:
            self._dear[report.nodeid] = seconds
        if hasattr(report, "wasxfail"):
            self._note("xfailed", report)
        elif report.failed:
            self._note("failed" if report.when == "call" else "errors", report)
        elif report.skipped or report.when == "call":
            self._note(report.outcome, report)

    def pytest_collectreport(self, report):
        if report.failed:
            self._note("errors", report)
        elif report.skipped:
            self._note("skipped", report)

    def pytest_sessionfinish(self):
        os.write(self._connection, json.dumps([self._counts, self._failed, self._dear]).encode())

    def _note(self, outcome, report):
        self._counts[outcome] += 1
        if outcome in ("failed", "errors"):
            self._failed.append(report.nodeid)


def main(arguments: list[str]) -> int:
    """Run the files, print what fails as it comes, and return an exit status as pytest does."""
    parser = argparse.ArgumentParser(description=__doc__, add_help=False, allow_abbrev=False)
    parser.add_argument("-j", type=int, default=2, dest="num_jobs")
    parser.add_argument("-m", default="", dest="markers")
    parser.add_argument("--durations-of-files", type=int, default=0)
    options, rest = parser.parse_known_args(arguments)
    paths = [argument for argument in rest if Path(argument.partition("::")[0]).exists()]
    to_pytest = [*LEFT_OUT, "-q", *(["-m", options.markers] if options.markers else [])]
    to_pytest += [argument for argument in rest if argument not in paths]
    groups = sorted(groups_of(files_of(paths or FOLDERS, options.markers)), key=_order)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell has taken from what runs beside it
    _start_server()
    budget.is_enforced = True
    torch.set_num_threads(1)
    _fill_caches()
    _lighten()
    start = time.monotonic()
    # Not pytest's own folders for temporary files, whose oldest each process would remove beside the others.
    files_of_tests = Path(tempfile.mkdtemp(prefix="ts-tests-"))
    totals, failed, seconds, dear = _run_all(groups, to_pytest, options.num_jobs, files_of_tests)
    for file, took in sorted(seconds.items(), key=lambda item: -item[1])[: options.durations_of_files]:
        print(f"{took:7.1f} s  {file}")
    if dear:
        print(f"{len(dear)} tests took more than their budget of {budget.BUDGET_S} s of CPU time. The dearest:")
    for name, took in sorted(dear.items(), key=lambda item: -item[1])[:NUM_DEAREST]:
        print(f"{took:7.1f} s  {name}")
    for name in failed:
        print(f"FAILED {name}")
    if failed:
        print(f"What the files with failures have written is in {files_of_tests}")
    else:
        shutil.rmtree(files_of_tests, ignore_errors=True)
    counts = ", ".join(
        f"{totals[name]} {name}" for name in ("failed", "errors", "passed", "skipped", "xfailed") if totals[name]
    )
    print(
        f"=== {counts or 'no tests ran'} in {sum(map(len, groups))} files in {time.monotonic() - start:.0f} s ===",
        flush=True,
    )
    return 1 if failed else 0 if totals else NOTHING_COLLECTED


def files_of(paths, markers: str = "") -> list[str]:
    """Return the files below some paths that have tests; an ``a.py::test`` stays as it is.

    Args:
        paths: files, folders or ids of tests.
        markers: pytest's ``-m``; if it is the name of a marker, only files that contain the word.
    """
    found = []
    for path in map(str, paths):
        if not Path(path).is_dir():
            found.append(path)
            continue
        for file in sorted(Path(path).rglob("*.py")):
            text = file.read_text(encoding="utf-8")
            has_tests = file.name.startswith("test_") or (">>>" in text and file.name != "conftest.py")
            if has_tests and (not markers.isidentifier() or markers in text):
                found.append(str(file))
    return found


def groups_of(files: Sequence[str]) -> list[tuple[str, ...]]:
    """Put the library's files together by folder; tests stand alone."""
    groups = collections.defaultdict(list)
    for file in files:
        groups[str(Path(file).parent) if file.startswith(LIBRARY) and "::" not in file else file].append(file)
    return [tuple(group) for group in groups.values()]


def _order(files: tuple[str, ...]) -> tuple[bool, int]:
    text = _text(files)
    return NEEDS_LATE.search(text) is not None, -len(text)  # the last ones should be short


@functools.cache  # read for the order, when the files' turn comes and in their own process
def _text(files: tuple[str, ...]) -> str:
    return "".join(Path(file.partition("::")[0]).read_text(encoding="utf-8") for file in files)


def _start_server() -> None:
    """Start what forks pools of processes, to be shared by all files; their lines belong to no file's output."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    kept = [os.dup(1), os.dup(2)]
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        for standard in (1, 2):
            os.dup2(nowhere.fileno(), standard)
        forkserver.ensure_running()
    for standard, descriptor in zip((1, 2), kept, strict=True):
        os.dup2(descriptor, standard)
        os.close(descriptor)


def _fill_caches() -> None:
    """Have hypothesis make its tables of characters in a clean checkout: seconds that are in no test's budget."""
    tables = ROOT / ".hypothesis" / "unicode_data" / unicodedata.unidata_version  # of this Python
    if not tables.exists():  # in another process: pytest must see its plugin first
        program = "import hypothesis; hypothesis.find(hypothesis.strategies.text(), lambda _: True)"
        subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def _lighten() -> None:
    """Import what costs many files a part of a second, and let no file's garbage collector look through it all.

    Loggers that don't propagate, of which torch has fifty, would each be given pytest's handlers anew by every test.
    """
    with contextlib.suppress(ImportError):
        importlib.import_module("matplotlib.pyplot")  # torchmetrics does, where it is installed
    with contextlib.redirect_stdout(io.StringIO()):  # pytest's own plugins
        pytest.main([*LEFT_OUT, "--noconftest", "-c", os.devnull, "--collect-only", "conf"])
    reader = "tomllib" if sys.version_info >= (3, 11) else "tomli"  # of pytest's settings
    for name in (*PLUGINS, reader, "tests.quick_exit", LIBRARY):
        importlib.import_module(name)
    for logger in logging.root.manager.loggerDict.values():
        logger.propagate = True
    gc.collect()
    gc.freeze()


def _run_all(groups, to_pytest, num_jobs, folder):
    totals, failed, seconds, dear = collections.Counter(), [], {}, {}
    selector = selectors.DefaultSelector()
    waiting = collections.deque(groups)
    num_done = 0
    try:
        while waiting or selector.get_map():
            while waiting and len(selector.get_map()) < num_jobs:
                own = folder / str(len(groups) - len(waiting))
                own.mkdir()
                _start(waiting.popleft(), [*to_pytest, f"--basetemp={own / 'pytest'}"], selector, own)
            for key, _ in selector.select():
                running, num_done = key.data, num_done + 1
                counts, names, over_budget = _end(running, selector, key.fd)
                totals.update(counts)
                dear |= over_budget
                failed += names
                if not names:
                    shutil.rmtree(running.folder, ignore_errors=True)
                seconds[running.file] = time.monotonic() - running.start
                print(
                    "F" if names else ".",
                    end=f" {100 * num_done // len(groups)} %\n" if num_done % 60 == 0 else "",
                    flush=True,
                )
    finally:
        for key in list(selector.get_map().values()):
            os.kill(key.data.pid, signal.SIGKILL)
            os.waitpid(key.data.pid, 0)
    print()
    return totals, failed, seconds, dear


def _start(files, to_pytest, selector, folder):
    if LATE not in sys.modules and NEEDS_LATE.search(_text(files)):
        importlib.import_module(LATE)
        gc.collect()
        gc.freeze()
    read, write = os.pipe()
    output = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the process has ended
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        _be_a_group(files, to_pytest, write, output, folder)
    os.close(write)
    selector.register(read, selectors.EVENT_READ, Running(" ".join(files), pid, output, time.monotonic(), folder))


def _be_a_group(files, to_pytest, connection, output, folder):
    """Run the tests of some files in this process, whose temporary files are in a folder, and end it."""
    status = 3
    try:
        os.environ["TMPDIR"], tempfile.tempdir = str(folder), None
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        # The server is another process's child, which `ensure_running` can't wait for.
        forkserver._forkserver.ensure_running = lambda: None
        text = _text(files)
        names = [*PLUGINS, "_hypothesis_pytestplugin"] if "hypothesis" in text else PLUGINS  # a dear import
        plugins = [Outcomes(connection, ">>>" in text), *map(importlib.import_module, names)]
        status = pytest.main([*to_pytest, *files], plugins=plugins)
        threading._shutdown()
        atexit._run_exitfuncs()
    except BaseException:  # noqa: BLE001 - a fork must not go on with its parent's program
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(status))


def _end(running, selector, connection):
    """Return what was counted, which tests failed and which were dear; show what the process printed if some failed."""
    answer = b""
    while part := os.read(connection, 1 << 16):
        answer += part
    selector.unregister(connection)
    os.close(connection)
    status = os.waitstatus_to_exitcode(os.waitpid(running.pid, 0)[1])
    counts, names, dear = json.loads(answer) if answer else ({}, [], {})
    if not names and status not in (0, NOTHING_COLLECTED):
        names, counts = [f"{running.file} (the process ended with status {status})"], {**counts, "errors": 1}
    if names:
        running.output.seek(0)
        print(f"\n=== {running.file}\n{running.output.read().decode(errors='replace')}", flush=True)
    running.output.close()
    return counts, names, dear


if __name__ == "__main__":
    faulthandler.enable()
    os.chdir(ROOT)
    sys.exit(main(sys.argv[1:]))
