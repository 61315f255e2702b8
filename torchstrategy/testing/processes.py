"""Worker processes that look as if a launcher had started them, kept for many calls."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import json
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple

import torch

from torchstrategy.base.addresses import ReservedPorts
from torchstrategy.collectives.connections import is_stopped
from torchstrategy.testing.network import Host, Network

__all__ = ["Outcome", "ProcessPool", "RemoteError", "process_context", "run_in_processes", "signal_process"]

_START_TIMEOUT_S = 120.0
_AFTER_ERROR_S = 6.0
_END_S = 2.0


class RemoteError(RuntimeError):
    """A function failed in at least one process.

    Args:
        errors: the errors by rank; a rank that did not answer in time, or within seconds after another rank's error,
            has a ``TimeoutError``. Of a process that crashed it says where its threads were.
        tracebacks: their tracebacks as text, by rank.
    """

    def __init__(self, errors: dict[int, BaseException], tracebacks: dict[int, str]) -> None:
        self.errors = errors
        self.tracebacks = tracebacks
        rows = "\n".join(f"--- rank {rank} ---\n{text}" for rank, text in sorted(tracebacks.items()))
        super().__init__(f"The function failed on rank {', '.join(map(str, sorted(errors)))}:\n{rows}")


class Outcome(NamedTuple):
    """How a call ended on one rank.

    Args:
        value: what the function returned.
        error: what it raised, or why there is no answer; ``None`` if it returned.
        traceback: the error's traceback as text.
        at: when the answer came, in this process's ``time.monotonic()``.
    """

    value: Any
    error: BaseException | None
    traceback: str
    at: float


class ProcessPool:
    """``size`` processes in which functions are called together, each as one rank of a job.

    A process sees the environment variables of a launcher, so that ``ts.MirroredStrategy()`` or
    ``ts.MultiWorkerMirroredStrategy()`` joins the others. It computes with one thread. After an error the next call
    gets new processes. They are forked from a server that has imported the library, where the system has that: a new
    pool is there in a fraction of a second.

    Args:
        size: number of processes.
        timeout_s: seconds after which a call fails and the processes are ended.
        launcher: ``"torchrun"``, or ``"TF_CONFIG"`` for a cluster of ``size`` workers.
        network: where the processes run, equal numbers of them on each host, in the order of ranks; ``None`` means
            this host, over its loopback interface.

    Raises:
        ValueError: ``size`` is not positive, or there is no such launcher.

    Example:
        >>> with ts.testing.ProcessPool(1) as pool:
        ...     pool.run(pow, 2, 5)
        [32]
    """

    def __init__(
        self,
        size: int,
        timeout_s: float = 60.0,
        *,
        launcher: Literal["torchrun", "TF_CONFIG"] = "torchrun",
        network: Network | None = None,
    ) -> None:
        if size < 1:
            raise ValueError(f"size must be at least 1. Received: {size}")
        if launcher not in ("torchrun", "TF_CONFIG"):
            raise ValueError(f"launcher must be 'torchrun' or 'TF_CONFIG'. Received: {launcher!r}")
        self.size = size
        self._timeout_s = timeout_s
        self._launcher = launcher
        self._network = network
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._crashes: list[Connection] = []
        self._silent: set[int] = set()
        self._ports: ReservedPorts | None = None

    def run(self, fn: Callable[..., Any], *args: Any, timeout_s: float | None = None, **kwargs: Any) -> list[Any]:
        """Call a function in every process.

        Args:
            fn: a function that can be pickled, such as one of a module's top level.
            *args: its positional arguments, the same for all ranks.
            timeout_s: seconds for this call; ``None`` means the pool's.
            **kwargs: its keyword arguments.

        Returns:
            What it returned, in the order of ranks.

        Raises:
            RemoteError: it failed on a rank, or did not return in time.
        """
        self._call(fn, args, kwargs)
        outcomes = self._collect(timeout_s or self._timeout_s, _AFTER_ERROR_S)
        errors = {rank: outcome.error for rank, outcome in enumerate(outcomes) if outcome.error is not None}
        if errors:
            raise RemoteError(errors, {rank: outcomes[rank].traceback for rank in errors})
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self,
        fn: Callable[..., Any],
        *args: Any,
        timeout_s: float | None = None,
        silent: Collection[int] = (),
        **kwargs: Any,
    ) -> list[Outcome]:
        """Call a function in every process and take what comes: for tests of what goes wrong.

        Args:
            fn: a function that can be pickled, such as one of a module's top level.
            *args: its positional arguments, the same for all ranks.
            timeout_s: seconds for this call; ``None`` means the pool's. All ranks have as long, also after an error.
            silent: ranks whose answers are not waited for, such as one that stops itself.
            **kwargs: its keyword arguments.

        Returns:
            How it ended, in the order of ranks. A rank that did not answer has a ``TimeoutError``.
        """
        self._call(fn, args, kwargs)
        return self._collect(timeout_s or self._timeout_s, None, silent)

    def send_signal(self, rank: int, number: int) -> None:
        """Send a signal, such as ``signal.SIGSTOP``, to the process of a rank while another thread waits for a call.

        Args:
            rank: the rank.
            number: the signal.

        Raises:
            RuntimeError: there are no processes; the first call starts them, and the first one after an error.
        """
        if not self._processes:
            raise RuntimeError("The pool has no processes yet. Call a function first.")
        signal_process(self._processes[rank], number)

    def close(self) -> None:
        """End the processes."""
        for rank, connection in enumerate(self._connections):
            try:
                if rank in self._silent:
                    self._processes[rank].kill()
                else:
                    connection.send(None)
            except OSError:
                continue
        deadline = time.monotonic() + _END_S
        for process in self._processes:
            process.join(timeout=max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        for connection in (*self._connections, *self._crashes):
            connection.close()
        self._processes, self._connections, self._crashes, self._silent = [], [], [], set()
        if self._ports is not None:
            self._ports.close()

    def __enter__(self) -> ProcessPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._start()
        for connection in self._connections:
            connection.send((fn, args, kwargs))

    def _collect(self, timeout_s: float, after_error_s: float | None, silent: Collection[int] = ()) -> list[Outcome]:
        """Return every rank's answer; once one rank has failed, the others may get only a few seconds to follow."""
        waiting = dict(enumerate(self._connections))
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + timeout_s
        while waiting.keys() - silent:
            ready = wait(list(waiting.values()), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in [rank for rank, connection in waiting.items() if connection in ready]:
                outcomes[rank] = self._answer(rank, waiting.pop(rank))
                if outcomes[rank].error is not None and after_error_s is not None:
                    deadline = min(deadline, time.monotonic() + after_error_s)
        for rank in waiting:
            after = ", or soon after another rank's error" if outcomes and after_error_s is not None else ""
            text = f"no answer within {timeout_s:g} s{after}"
            outcomes[rank] = Outcome(None, TimeoutError(text), text, time.monotonic())
        self._silent = set(waiting)
        if any(outcome.error is not None for outcome in outcomes.values()):
            self.close()
        return [outcomes[rank] for rank in range(self.size)]

    def _answer(self, rank: int, connection: Connection) -> Outcome:
        at = time.monotonic()
        try:
            value, error, trace = connection.recv()
            return Outcome(value, error, trace, at)
        except (EOFError, OSError):
            self._processes[rank].join(timeout=5)  # the connection closes before the exit code is there
            text = f"the process ended with exit code {self._processes[rank].exitcode}{self._last_words(rank)}"
        except Exception as wrong:  # noqa: BLE001 - unpickling raises many kinds
            text = f"the answer can't be unpickled: {wrong}"
        return Outcome(None, RuntimeError(text), text, at)

    def _last_words(self, rank: int) -> str:
        """Return where all threads of a process were when it crashed; nothing if it did not."""
        if sys.platform == "win32" or not self._crashes[rank].poll():
            return ""
        words = os.read(self._crashes[rank].fileno(), 1 << 16).decode(errors="replace")
        return f"\n{words}" if words else ""

    def _start(self) -> None:
        if self._processes:
            return
        context = process_context()
        hosts = [0 if self._network is None else rank * self._network.num_hosts // self.size for rank in self._ranks]
        environments = self._environments(hosts)
        for rank in self._ranks:
            here, there = context.Pipe()
            crash, crashing = context.Pipe(duplex=False)
            host = None if self._network is None else self._network.host(hosts[rank])
            environment = {**os.environ, **environments[rank]}
            arguments = (there, crashing, environment, host)
            process = context.Process(target=_serve, args=arguments, daemon=True, name=f"rank-{rank}")
            process.start()
            there.close()
            crashing.close()
            self._processes.append(process)
            self._connections.append(here)
            self._crashes.append(crash)
        deadline = time.monotonic() + _START_TIMEOUT_S
        for connection in self._connections:
            if _receive(connection, deadline) is None:
                self.close()
                raise TimeoutError(f"The worker processes did not start within {_START_TIMEOUT_S:g} s.")

    @property
    def _ranks(self) -> range:
        return range(self.size)

    def _environments(self, hosts: list[int]) -> list[dict[str, str]]:
        addresses = ["127.0.0.1" if self._network is None else self._network.address(host) for host in hosts]
        self._ports = ReservedPorts(self.size)
        ports = self._ports.numbers
        if self._launcher == "TF_CONFIG":
            cluster = {"worker": [f"{address}:{port}" for address, port in zip(addresses, ports, strict=True)]}
            tasks = [{"type": "worker", "index": rank} for rank in self._ranks]
            return [{"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})} for task in tasks]
        return [
            {
                "RANK": str(rank),
                "WORLD_SIZE": str(self.size),
                "LOCAL_RANK": str(hosts[:rank].count(hosts[rank])),
                "LOCAL_WORLD_SIZE": str(hosts.count(hosts[rank])),
                "MASTER_ADDR": addresses[0],
                "MASTER_PORT": str(ports[0]),
            }
            for rank in self._ranks
        ]


def run_in_processes(
    fn: Callable[..., Any], size: int, *args: Any, timeout_s: float = 60.0, **kwargs: Any
) -> list[Any]:
    """Call a function once in each of ``size`` new processes.

    Args:
        fn: a function that can be pickled, such as one of a module's top level.
        size: number of processes.
        *args: its positional arguments.
        timeout_s: seconds after which the call fails.
        **kwargs: its keyword arguments.

    Returns:
        What it returned, in the order of ranks.

    Raises:
        RemoteError: it failed on a rank, or did not return in time.

    Example:
        >>> ts.testing.run_in_processes(max, 1, 3, 4)
        [4]
    """
    with ProcessPool(size, timeout_s) as pool:
        return pool.run(fn, *args, **kwargs)


def signal_process(process: Any, number: int) -> None:
    """Send a signal to a process; wait until all its threads have stopped if it is to stop.

    A thread may compute, and answer, until the kernel gets round to it.

    Args:
        process: of ``multiprocessing``.
        number: the signal.
    """
    os.kill(process.pid, number)
    while sys.platform == "linux" and number == signal.SIGSTOP and process.is_alive():
        with contextlib.suppress(OSError):  # a thread has ended meanwhile
            if all(map(is_stopped, Path(f"/proc/{process.pid}/task").glob("*/stat"))):
                return
        time.sleep(0.001)


def process_context() -> Any:
    """Return the way to start processes: forks of a server that has imported the library, or new interpreters."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # Optimizers import the second at their first step, which takes a second.
    context.set_forkserver_preload(["torchstrategy", "torch._dynamo"])
    return context


def _serve(connection: Connection, crashing: Connection, environment: dict[str, str], host: Host | None) -> None:
    if sys.platform != "win32":  # where connections are no file descriptors
        faulthandler.enable(crashing.fileno())
    if host is not None:
        host.enter()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the one that has the pool ends us
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    gc.freeze()  # the first run of each strategy collects garbage, and what was imported is none
    try:
        connection.send("ready")
        while (call := _next_call(connection)) is not None:
            fn, args, kwargs = call
            try:
                answer: tuple[Any, BaseException | None, str] = (fn(*args, **kwargs), None, "")
            except Exception as error:  # noqa: BLE001 - every error goes to the caller
                sys.excepthook(type(error), error, error.__traceback__)  # as at the end of a program: tells the others
                answer = (None, error, traceback.format_exc())
            _send(connection, answer)
    finally:
        atexit._run_exitfuncs()  # a forked process leaves them out


def _next_call(connection: Connection) -> Any:
    try:
        return connection.recv()
    except EOFError:
        return None


def _send(connection: Connection, answer: tuple[Any, BaseException | None, str]) -> None:
    try:
        if answer[1] is not None:
            pickle.loads(pickle.dumps(answer))  # an exception class may take arguments that pickle does not know of
        connection.send(answer)
    except Exception as error:  # noqa: BLE001 - pickle raises many kinds
        text = answer[2] or f"the result can't be pickled: {error}"
        connection.send((None, RuntimeError(text), text))


def _receive(connection: Connection, deadline: float) -> Any:
    if connection.poll(max(0.0, deadline - time.monotonic())):
        return connection.recv()
    return None
