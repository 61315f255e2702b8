"""What to say about workers that failed: which one was first, how it ended, and where."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

__all__ = ["describe", "describe_restart", "exit_status"]

_MAX_LINES = 20
_FRAME = re.compile(r'^ *File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)$', re.MULTILINE)
# A rank that learns of another's failure raises this; it is never the first cause.
_CONSEQUENCE = "ReplicaFailedError"
_NOT_OWN = ("site-packages", "<frozen", str(Path(__file__).parents[1]))  # frames that are not the program's


class _Error(NamedTuple):
    message: str
    place: str | None


def describe(failures: Mapping[int, ProcessFailure]) -> str:
    """Return a few lines about the failed workers of this host, the first cause first.

    Args:
        failures: torch's records by global rank.
    """
    (rank, failure), *others = _in_order(failures)
    error = _read(failure.error_file)
    lines = [f"rank {rank} failed on {socket.gethostname()} (process {failure.pid}): {_ending(failure.exitcode)}"]
    if error is not None:
        message = error.message.splitlines()
        lines += [f"    {line}" for line in message[:_MAX_LINES]]
        lines += [f"    ... {len(message) - _MAX_LINES} more lines"] if len(message) > _MAX_LINES else []
        lines += [f"    at {error.place}"] if error.place else []
    elif failure.exitcode == -signal.SIGKILL:
        lines.append("    SIGKILL often comes from the kernel when memory runs out: see dmesg.")
    for rank, failure in others:
        error = _read(failure.error_file)
        if error is None and failure.exitcode == -signal.SIGTERM:
            continue  # the launcher ended it
        text = error.message.splitlines()[0] if error else _ending(failure.exitcode)
        lines.append(f"  then rank {rank}: {text}")
    return "\n".join(lines)


def describe_restart(attempt: int, error_files: Mapping[int, str], last_error: Sequence[str]) -> str:
    """Return why the workers are started again.

    Args:
        attempt: which start this is; the first was 0.
        error_files: of the last attempt, by global rank.
        last_error: torch's last error message, or nothing.
    """
    errors = {rank: error for rank, path in error_files.items() if (error := _read(path)) is not None}
    causes = {rank: error for rank, error in errors.items() if not error.message.startswith(_CONSEQUENCE)}
    if errors and not causes:  # the first cause left no record, but the others know it
        reason = next(iter(errors.values())).message.splitlines()[0].removeprefix(f"{_CONSEQUENCE}: ")
    elif causes:
        rank, error = min(causes.items(), key=lambda item: os.stat(error_files[item[0]]).st_mtime_ns)
        place = f" at {error.place}" if error.place else ""
        reason = f"rank {rank} failed: {error.message.splitlines()[0]}{place}"
    elif last_error:
        reason = f"a worker {last_error[0]}"
    else:
        reason = "workers of another host failed, or the hosts have changed"
    return f"starting the workers again (restart {attempt}): {reason}"


def exit_status(failures: Mapping[int, ProcessFailure]) -> int:
    """Return the exit status of the worker that failed first, as a shell would show it.

    Args:
        failures: torch's records by global rank.
    """
    code = _in_order(failures)[0][1].exitcode
    return code if code > 0 else 128 - code


def _in_order(failures: Mapping[int, ProcessFailure]) -> list[tuple[int, ProcessFailure]]:
    return sorted(failures.items(), key=lambda item: _order(item[1]))


def _order(failure: ProcessFailure) -> tuple[bool, bool, float]:
    error = _read(failure.error_file)
    if error is None:
        return (failure.exitcode == -signal.SIGTERM, False, float(failure.timestamp))
    return (False, error.message.startswith(_CONSEQUENCE), os.stat(failure.error_file).st_mtime_ns / 1e9)


def _ending(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exit status {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"


def _read(path: str) -> _Error | None:
    """Return the error that torch's record of a worker holds, ``None`` if it left none."""
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))["message"]
    except (OSError, ValueError, KeyError):
        return None
    if not isinstance(record, dict):
        return _Error(str(record), None)
    frames = list(_FRAME.finditer(record.get("extraInfo", {}).get("py_callstack", "")))
    own = [frame for frame in frames if not any(part in frame["file"] for part in _NOT_OWN)]
    place = None
    if frames:
        frame = (own or frames)[-1]
        place = f"{frame['file']}:{frame['line']} in {frame['function']}"
    return _Error(record.get("message") or "an error without a message", place)
