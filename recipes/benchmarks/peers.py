"""Programs that work when they are asked to, so that several can take turns on one machine."""

from __future__ import annotations

import json
import os
import subprocess
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from torchstrategy.base.addresses import ReservedPorts


class Peer:
    """A program that answers each line of JSON on its standard input with one on its standard output.

    Args:
        python: of the environment that has its framework.
        program: its file; a relative path means this folder.
        options: what it is started with; ``threads`` is how many its framework may use.
        log_path: the file for what it says on stderr; several may share one.
        environ: more environment variables.
        prefix: a command that starts the one that follows it, such as ``nsenter`` with its options.
    """

    def __init__(
        self,
        python: str,
        program: str,
        options: dict[str, Any],
        log_path: Path,
        environ: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        self.name = program
        self._python = python
        self._log_path = log_path
        threads = str(options["threads"])
        command = [*prefix, python, str(Path(__file__).parent / program), json.dumps(options)]
        environ = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, **(environ or {})}
        # Packages are compiled when they are installed, but not one that is installed in place, such as this library.
        environ.pop("PYTHONDONTWRITEBYTECODE", None)
        try:
            with log_path.open("a") as log:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environ, text=True
                )
        except OSError as error:
            raise RuntimeError(f"{python} can't be started: {error}") from error

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def read(self) -> Any:
        """Return the next line of JSON that it prints.

        Raises:
            RuntimeError: it ended.
        """
        for line in self._process.stdout:
            if line.startswith(("{", '"')):
                return json.loads(line)
        status = self._process.wait()
        log = self._log_path.read_text()[-3000:]
        raise RuntimeError(f"{self.name} failed with {self._python}, exit status {status}:\n{log}")

    def send(self, request: Any = None) -> None:
        """Ask for something; ``read`` returns the answer."""
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # `read` says why

    def ask(self, request: Any = None) -> Any:
        """Ask for something and return the answer."""
        self.send(request)
        return self.read()


class Group:
    """Processes of one program that work together, with the environment variables of torchrun.

    Args:
        python: as for ``Peer``.
        program: as for ``Peer``.
        options: as for ``Peer``.
        log_path: of all of them.
        num_processes: how many.
        environ: more environment variables.
    """

    def __init__(
        self,
        python: str,
        program: str,
        options: dict[str, Any],
        log_path: Path,
        num_processes: int,
        environ: Mapping[str, Any] | None = None,
    ) -> None:
        ports = ReservedPorts(1)
        job = {
            **(environ or {}),
            "WORLD_SIZE": num_processes,
            "LOCAL_WORLD_SIZE": num_processes,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": ports.numbers[0],
            "TORCHELASTIC_RUN_ID": "benchmark",
        }
        self._peers = []
        with ExitStack() as stack:
            stack.enter_context(ports)
            for rank in range(num_processes):
                task = {name: str(value) for name, value in {**job, "RANK": rank, "LOCAL_RANK": rank}.items()}
                self._peers.append(stack.enter_context(Peer(python, program, options, log_path, task)))
            self._stack = stack.pop_all()

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self) -> list[Any]:
        """Return what each process prints next."""
        return [peer.read() for peer in self._peers]

    def ask(self, request: Any) -> list[Any]:
        """Ask all of them for something and return their answers."""
        for peer in self._peers:
            peer.send(request)
        return self.read()


def launch(num_processes: int, fn: Callable[[Any], Any], options: Any) -> Any:
    """Call a function in processes that torch's launcher starts; return rank 0's result."""
    address = {"rdzv_backend": "c10d", "rdzv_endpoint": "127.0.0.1:0", "local_addr": "127.0.0.1"}
    how = LaunchConfig(1, 1, num_processes, run_id=uuid.uuid4().hex, max_restarts=0, **address)
    return elastic_launch(how, fn)(options)[0]
