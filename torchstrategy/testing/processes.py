"""Worker processes that look as if ``torchrun`` had started them, kept for many calls."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

import torch

__all__ = ["ProcessPool", "RemoteError", "run_in_processes"]

_START_TIMEOUT_S = 120.0
_AFTER_ERROR_S = 6.0


class RemoteError(RuntimeError):
    """A function failed in at least one process.

    Args:
        errors: the errors by rank; a rank that did not answer in time, or within seconds after another rank's error,
            has a ``TimeoutError``.
        tracebacks: their tracebacks as text, by rank.
    """

    def __init__(self, errors: dict[int, BaseException], tracebacks: dict[int, str]) -> None:
        self.errors = errors
        self.tracebacks = tracebacks
        rows = "\n".join(f"--- rank {rank} ---\n{text}" for rank, text in sorted(tracebacks.items()))
        super().__init__(f"The function failed on rank {', '.join(map(str, sorted(errors)))}:\n{rows}")


class ProcessPool:
    """``size`` processes in which functions are called together, each as one rank of a job on this host.

    A process sees the environment variables of ``torchrun``, so that ``ts.MirroredStrategy()`` joins the others. It
    computes with one thread. After an error the next call gets new processes.

    Args:
        size: number of processes.
        timeout_s: seconds after which a call fails and the processes are ended.

    Raises:
        ValueError: ``size`` is not positive.

    Example:
        >>> with ts.testing.ProcessPool(1) as pool:
        ...     pool.run(pow, 2, 5)
        [32]
    """

    def __init__(self, size: int, timeout_s: float = 60.0) -> None:
        if size < 1:
            raise ValueError(f"size must be at least 1. Received: {size}")
        self.size = size
        self._timeout_s = timeout_s
        self._processes: list[Any] = []
        self._connections: list[Connection] = []

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
        if not self._processes:
            self._start()
        for connection in self._connections:
            connection.send((fn, args, kwargs))
        answers = self._collect(timeout_s or self._timeout_s)
        results: list[Any] = [None] * self.size
        errors: dict[int, BaseException] = {}
        tracebacks: dict[int, str] = {}
        for rank, answer in enumerate(answers):
            if answer[0] == "error":
                errors[rank], tracebacks[rank] = answer[1:]
            else:
                results[rank] = answer[1]
        if errors:
            self.close()
            raise RemoteError(errors, tracebacks)
        return results

    def close(self) -> None:
        """End the processes."""
        for connection in self._connections:
            try:
                connection.send(None)
            except OSError:
                continue
        for process in self._processes:
            process.join(timeout=2)
            if process.is_alive():
                process.kill()
                process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []

    def __enter__(self) -> ProcessPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _collect(self, timeout_s: float) -> list[tuple[Any, ...]]:
        """Return every rank's answer; once one rank has failed, the others get a few seconds to follow."""
        waiting = dict(enumerate(self._connections))
        answers: dict[int, tuple[Any, ...]] = {}
        deadline = time.monotonic() + timeout_s
        while waiting and (ready := wait(list(waiting.values()), max(0.0, deadline - time.monotonic()))):
            for rank in [rank for rank, connection in waiting.items() if connection in ready]:
                answers[rank] = self._answer(rank, waiting.pop(rank))
                if answers[rank][0] == "error":
                    deadline = min(deadline, time.monotonic() + _AFTER_ERROR_S)
        for rank in waiting:
            after = "" if len(waiting) == self.size else ", or soon after another rank's error"
            text = f"no answer within {timeout_s:g} s{after}"
            answers[rank] = ("error", TimeoutError(text), text)
        return [answers[rank] for rank in range(self.size)]

    def _answer(self, rank: int, connection: Connection) -> tuple[Any, ...]:
        try:
            return connection.recv()  # type: ignore[no-any-return]
        except (EOFError, OSError):
            self._processes[rank].join(timeout=5)  # the connection closes before the exit code is there
            text = f"the process ended with exit code {self._processes[rank].exitcode}"
        except Exception as error:  # noqa: BLE001 - unpickling raises many kinds
            text = f"the answer can't be unpickled: {error}"
        return ("error", RuntimeError(text), text)

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        port = _free_port()
        for rank in range(self.size):
            here, there = context.Pipe()
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(self.size),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(self.size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            process = context.Process(target=_serve, args=(there, environment), daemon=True, name=f"rank-{rank}")
            process.start()
            there.close()
            self._processes.append(process)
            self._connections.append(here)
        deadline = time.monotonic() + _START_TIMEOUT_S
        for connection in self._connections:
            if _receive(connection, deadline) is None:
                self.close()
                raise TimeoutError(f"The worker processes did not start within {_START_TIMEOUT_S:g} s.")


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


def _serve(connection: Connection, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    connection.send(("ready",))
    while True:
        try:
            call = connection.recv()
        except EOFError:
            return
        if call is None:
            return
        fn, args, kwargs = call
        try:
            answer: tuple[Any, ...] = ("result", fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - every error goes to the caller
            answer = ("error", error, traceback.format_exc())
        _send(connection, answer)


def _send(connection: Connection, answer: tuple[Any, ...]) -> None:
    try:
        if answer[0] == "error":
            pickle.loads(pickle.dumps(answer))  # an exception class may take arguments that pickle does not know of
        connection.send(answer)
    except Exception as error:  # noqa: BLE001 - pickle raises many kinds
        text = answer[2] if answer[0] == "error" else f"the result can't be pickled: {error}"
        connection.send(("error", RuntimeError(text), text))


def _receive(connection: Connection, deadline: float) -> Any:
    if connection.poll(max(0.0, deadline - time.monotonic())):
        return connection.recv()
    return None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
