"""The processes that train together, as one of them sees them before it has met the others; and their heartbeat.

Threads of Python can't beat while native code holds the interpreter's lock, which may take longer than anybody should
wait for a dead process. So a small process of its own beats, for as long as its parent is there and not stopped.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from torchstrategy.base.log import name_error

__all__ = ["Job", "Pulse", "heartbeat_seconds", "tell_launcher"]

_END_S = 1.0
# Imports nothing that takes time or memory. It ends with its standard input, or with its parent, however that ends.
_PULSE = """
import os, select, sys
parent, interval_s, files = int(sys.argv[1]), float(sys.argv[2]), list(map(int, sys.argv[3:]))
while files and os.getppid() == parent:
    try:
        with open(f"/proc/{parent}/stat") as file:
            state = file.read().rpartition(")")[2].split()[0]
    except OSError:
        break
    if state in "ZX":
        break
    for file in files if state not in "Tt" else []:
        try:
            os.write(file, b".")
        except BlockingIOError:
            pass
        except OSError:
            files = [other for other in files if other != file]
    if select.select([0], [], [], interval_s)[0]:
        break
"""


def heartbeat_seconds() -> float:
    """Return after how many seconds without a sign of life a process counts as gone.

    Returns:
        ``TORCHSTRATEGY_HEARTBEAT_S``, by default 10.

    Raises:
        ValueError: the variable is no positive number.
    """
    text = os.environ.get("TORCHSTRATEGY_HEARTBEAT_S", "10")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f"TORCHSTRATEGY_HEARTBEAT_S must be a positive number of seconds. Received: {text!r}")
    return seconds


class Pulse:
    """A process that sends a byte over connections again and again, unless this one is stopped or has ended.

    Args:
        process: it; it ends when its standard input is closed.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._parent = os.getpid()

    @classmethod
    def start(cls, connections: Sequence[socket.socket], interval_s: float) -> Pulse | None:
        """Start the process.

        Args:
            connections: they don't block.
            interval_s: seconds between two bytes.

        Returns:
            It; ``None`` without connections, and where there can be none.
        """
        if sys.platform != "linux" or not sys.executable or not connections:  # elsewhere nothing tells who is stopped
            return None
        files = [connection.fileno() for connection in connections]
        command = [sys.executable, "-I", "-S", "-c", _PULSE, str(os.getpid()), str(interval_s), *map(str, files)]
        try:
            # In a session of its own: Ctrl-C must not end it before this process.
            process = subprocess.Popen(
                command,
                pass_fds=files,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError:
            return None
        return cls(process)

    def end(self) -> None:
        """End the process; in a forked child, let go of it."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        if os.getpid() != self._parent:
            return
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@dataclass(frozen=True)
class Job:
    """A job of several processes.

    Args:
        source: what described it, such as ``"TF_CONFIG"``, ``"torchrun"``, ``"Ray Train"``, ``"SLURM"`` or a resolver's
            class.
        reason: one sentence that says why this source was taken, for logs.
        cluster_spec: a ``ts.cluster_resolver.ClusterSpec`` of all tasks; with torchrun only what is known, the address
            of the first one.
        task_type: this process's job, such as ``"chief"`` or ``"worker"``; ``None`` where there are no names.
        task_id: its index in that job.
        rank: its number among the processes that train together, chief first.
        size: how many these are.
        address: host of the key-value store at which they meet.
        port: the store's port.
        hosted: whether the launcher keeps the store; else rank 0 does.
        attempt: how often the launcher has restarted the job; under torchrun hosts may count differently.
        local_rank: its number on its host, ``None`` if the source does not say, or if all the GPUs that this process
            sees are its own.
        local_size: processes on its host, ``None`` if the source does not say.
        resolver: the ``ts.cluster_resolver.ClusterResolver`` that was asked, for ``Strategy.cluster_resolver``.
    """

    source: str
    reason: str
    cluster_spec: Any
    task_type: str | None
    task_id: int | None
    rank: int
    size: int
    address: str
    port: int
    hosted: bool = False
    attempt: int = 0
    local_rank: int | None = None
    local_size: int | None = None
    resolver: Any = field(default=None, compare=False, repr=False)


def tell_launcher(error: Exception, trace: TracebackType | None) -> None:
    """Write an error where torchrun looks for the cause of a job's end, as ``record`` of torch's launcher does."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    stack = "".join(traceback.format_exception(type(error), error, trace))
    details = {"py_callstack": stack, "timestamp": str(int(time.time()))}
    with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump({"message": {"message": name_error(error), "extraInfo": details}}, file)
