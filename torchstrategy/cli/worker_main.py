"""Runs the user's program in one process of ``torchstrategy launch``.

It is started as a file and imports nothing of the library, nor torch: the program may still set environment variables
that torch reads when it is imported. Only an error brings torch in, to write it where the launcher looks.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import runpy
import signal
import sys
from types import TracebackType

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run ``sys.argv[3]``, a module if ``sys.argv[2]`` is ``-m`` and else a file, for the launcher ``sys.argv[1]``."""
    launcher_pid, kind, program, *arguments = sys.argv[1:]
    _end_with(int(launcher_pid))
    sys.argv = [program, *arguments]
    is_module = kind == "-m"
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # whole lines: with python -u, print writes each of its arguments by itself
            stream.reconfigure(line_buffering=True, write_through=False)
    if not getattr(sys.flags, "safe_path", False):  # as python would set it
        sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.realpath(program))
    try:
        if is_module:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(program, run_name="__main__")
    except SystemExit as error:
        sys.last_value = error  # Python notes other errors there: the library tells the other ranks what ends this one
        raise
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - whatever the program raises
        error.__traceback__ = _of_program(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        sys.stderr.flush()
        if isinstance(error, KeyboardInterrupt):
            sys.exit(128 + signal.SIGINT)
        _record(error)
        sys.exit(1)


def _end_with(launcher_pid: int) -> None:
    """Be killed when the launcher is, so that nothing is left running."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher_pid:  # it ended before the call
        sys.exit("torchstrategy launch has ended: this worker does not start.")


def _of_program(trace: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback that python would show had it run the program itself."""
    around = {__file__, runpy.__file__, "<frozen runpy>"}
    while trace is not None and trace.tb_frame.f_code.co_filename in around:
        trace = trace.tb_next
    return trace


def _record(error: Exception) -> None:
    with contextlib.suppress(Exception):  # the program's error has been shown; a broken torch must not hide it
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler  # noqa: PLC0415 - see the top

        get_error_handler().record_exception(error)


if __name__ == "__main__":
    main()
