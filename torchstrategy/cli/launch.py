"""``torchstrategy launch``: a thin layer over torch's elastic launcher.

It starts the workers of one host as ``torchrun`` does and sets ``torchrun``'s variables. It adds ``TF_CONFIG``, an
attempt that all hosts agree on, errors in a few lines, and the promise that no worker outlives it.

Signals are noted instead: torch's handler raises a ``SignalException`` in whatever code runs at that moment. Some of
that code catches all exceptions (``logging``), and some replaces it by one of its own (the launcher's metrics), so that
the launcher would go on, or seem to have failed.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TypeVar

from torch.distributed.elastic.multiprocessing import SignalException, api
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError, RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher import api as launcher_api
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.run import determine_local_world_size, parse_min_max_nnodes

from torchstrategy import patches
from torchstrategy.cli import elastic, worker_main
from torchstrategy.cli.elastic import BACKEND, Agreement, WorkerEnvironments, tf_config
from torchstrategy.cli.host import num_usable_cores

__all__ = ["SignalReceived", "num_hosts", "num_workers", "run", "until_signal"]

#: Those for which torch's launcher registers its handler.
_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT") if hasattr(signal, name))
_HAS_ALARM = hasattr(signal, "setitimer")  # not on Windows
_AGAIN_S = 1.0
_PATIENCE_S = 30.0  # torch's own with workers that do not end
_Result = TypeVar("_Result")


class SignalReceived(Exception):
    """A launcher has ended because of a signal.

    Args:
        number: the signal.
    """

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"{number.name} received")
        self.number = number


def until_signal(launch: Callable[[], _Result]) -> _Result:
    """Call torch's launcher; however a signal disturbs it, say so in one way, and leave no worker behind.

    Args:
        launch: calls ``elastic_launch``.

    Returns:
        What it returns.

    Raises:
        SignalReceived: the launcher received a signal that ends it.
    """
    handler, others = _Handler(), set(multiprocessing.active_children())
    error: BaseException | None = None
    with _registered(handler):
        try:
            try:
                result = launch()
            except BaseException as raised:  # noqa: BLE001 - is raised again below
                error = raised
            handler.is_over = True
        except BaseException as raised:  # noqa: BLE001 - a signal between the lines above
            error = raised
        handler.stop()
        number = handler.number or _cause(error)
        if number is not None:
            # One that was just being started is not known to torch yet.
            _end(set(multiprocessing.active_children()) - others)
    if number is not None:
        raise SignalReceived(number) from None
    if error is not None:
        raise error
    return result


class _Handler:
    """Raises what torch's handler raises, until it is heeded; further signals do not interrupt the workers' end."""

    def __init__(self) -> None:
        self.number: signal.Signals | None = None
        self.is_over = False
        self._alarm_before: tuple[Any, tuple[float, float]] | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        del frame
        if not _HAS_ALARM or number != signal.SIGALRM:
            self.number = self.number or signal.Signals(number)
        if self.is_over or self.number is None:
            return
        self._call_again()
        if _cause(sys.exc_info()[1]) is None:
            raise SignalException(f"{self.number.name} received", sigval=self.number)

    def stop(self) -> None:
        """Only note signals from now on."""
        self.is_over = True
        if self._alarm_before is not None:
            previous, timer = self._alarm_before
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL if previous is None else previous)
            signal.setitimer(signal.ITIMER_REAL, *timer)

    def _call_again(self) -> None:
        if not _HAS_ALARM:
            return
        # No thread: it might be one that is just being started which the signal has interrupted.
        timer = signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
        if self._alarm_before is None:
            self._alarm_before = signal.signal(signal.SIGALRM, self), timer


@contextlib.contextmanager
def _registered(handler: _Handler) -> Iterator[None]:
    """Put the handler in the place of torch's, which torch registers when it starts workers and leaves there."""
    if threading.current_thread() is not threading.main_thread():  # where torch registers none
        yield
        return
    before: list[tuple[int, Any]] = [(number, signal.getsignal(number)) for number in _SIGNALS]
    try:
        with elastic.replaced(api, "_terminate_process_handler", handler):
            yield
    finally:
        for number, previous in before:
            if previous is not None:  # else it was not registered by Python
                signal.signal(number, previous)


def _cause(error: BaseException | None) -> signal.Signals | None:
    """Return the signal that led to an exception, if one did."""
    while error is not None:
        if isinstance(error, SignalException):
            return signal.Signals(error.sigval)
        if isinstance(error, KeyboardInterrupt):  # before torch has registered its handler
            return signal.SIGINT
        error = error.__cause__ or error.__context__
    return None


def _end(processes: set[Any]) -> None:
    for process in processes:
        process.terminate()
    end = time.monotonic() + _PATIENCE_S
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


_PORT = 29400  # torchrun's for a rendezvous endpoint without one
#: Torch's launchers wait for each other in vain when one comes later, if they would share the first round's store.
_NO_SHARING = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
#: Options of this command that a program hardly has itself.
_BEFORE_THE_PROGRAM = ("--nproc-per-node", "--nproc", "--nnodes", "--max-restarts", "--rdzv-endpoint", "--rdzv-id")
_AT_START = "<chosen at the start>"


def run(options: argparse.Namespace) -> int:
    """Start the workers and wait for them.

    Args:
        options: as the command line declares them.

    Returns:
        0, the exit status of the worker that failed first, or 128 and a signal's number.

    Raises:
        ValueError: the program does not exist, or there are several hosts and no endpoint, or it does not resolve.
    """
    if not options.module and not os.path.exists(options.program):
        hint = "" if options.program.endswith(".py") else f" Did you mean `-m {options.program}`?"
        raise ValueError(f"There is no file {options.program!r}.{hint}")
    if options.nnodes[1] > 1 and options.rdzv_endpoint is None:
        raise ValueError(
            "Several hosts need --rdzv-endpoint=HOST:PORT: one of the hosts, and a port that is free there. Give the "
            "same to each of them."
        )
    _hint_at_order(options)
    endpoint = options.rdzv_endpoint or "localhost:0"
    host = options.local_addr or _own_host(endpoint)
    if options.dry_run:
        sys.stdout.write(describe(options, host))
        return 0
    if os.environ.get("TF_CONFIG"):
        _say("TF_CONFIG is set here; the workers get another one, of the workers that this command starts.")
    return _launch(options, endpoint, host)


def _hint_at_order(options: argparse.Namespace) -> None:
    """Say that an option of this command which stands after the program goes to the program."""
    late = [part for part in options.arguments if part.partition("=")[0].replace("_", "-") in _BEFORE_THE_PROGRAM]
    if late:
        _say(
            f"{late[0]} stands after {options.program}, which gets it. An option of this command comes before the "
            f"program: torchstrategy launch {late[0]} {options.program}"
        )


def describe(options: argparse.Namespace, host: str) -> str:
    """Return what each worker of this host would get.

    Args:
        options: as the command line declares them.
        host: this host's address.
    """
    num_local, (least, most) = options.nproc_per_node, options.nnodes
    is_alone = most == 1
    lines = [f"{num_local} worker(s) on this host, {least if least == most else f'{least} to {most}'} host(s)"]
    for local_rank in range(num_local):
        variables = {
            "RANK": local_rank if is_alone else _AT_START,
            "LOCAL_RANK": local_rank,
            "WORLD_SIZE": num_local if is_alone else _AT_START,
            "LOCAL_WORLD_SIZE": num_local,
            "MASTER_ADDR": host if is_alone else _AT_START,
            "MASTER_PORT": _AT_START,
            "OMP_NUM_THREADS": _num_threads(num_local),
            "TF_CONFIG": tf_config([f"{host}:<port>"] * num_local, local_rank) if is_alone else _AT_START,
        }
        lines += [f"worker {local_rank}:", *(f"    {name}={value}" for name, value in variables.items())]
    kind = ["-m"] if options.module else []
    lines.append(" ".join(["each runs: python -u", *kind, options.program, *options.arguments]))
    return "\n".join(lines) + "\n"


def _launch(options: argparse.Namespace, endpoint: str, host: str) -> int:
    os.environ["OMP_NUM_THREADS"] = _num_threads(options.nproc_per_node)
    patches.allow_files()  # the job's store may be here
    os.environ[_NO_SHARING] = "1"
    agreement = Agreement(options.nproc_per_node, host)
    with tempfile.TemporaryDirectory(prefix="torchstrategy_launch_") as folder, _torch_log(options) as last_error:
        config = LaunchConfig(
            min_nodes=options.nnodes[0],
            max_nodes=options.nnodes[1],
            nproc_per_node=options.nproc_per_node,
            run_id=options.rdzv_id,
            rdzv_backend=BACKEND,
            rdzv_endpoint=endpoint,
            rdzv_configs={**options.rdzv_conf, "agreement": agreement},
            max_restarts=options.max_restarts,
            local_addr=host,
            logs_specs=WorkerEnvironments(
                agreement,
                folder,
                lambda attempt, files: _say(elastic.describe_restart(attempt, files, last_error)),
            ),
        )
        kind = "-m" if options.module else "--"
        command = ["-u", worker_main.__file__, str(os.getpid()), kind, options.program, *options.arguments]
        # torch puts the local rank in the place of ${local_rank}; arguments are the program's own affair.
        command = [part.replace("$", "$$") for part in command]
        try:
            with elastic.replaced(launcher_api, "LocalElasticAgent", elastic.TellingAgent):
                until_signal(lambda: elastic_launch(config, sys.executable)(*command))
        except ChildFailedError as error:
            _say(elastic.describe(error.failures))
            return elastic.exit_status(error.failures)
        except RendezvousError as error:
            _say(f"the launchers did not meet at {endpoint}: {_why_not_met(error)}")
            return 1
        except SignalReceived as error:
            _say(f"{error.number.name} received: the workers have ended.")
            return 128 + error.number
    return 0


def _why_not_met(error: RendezvousError) -> str:
    if isinstance(error, RendezvousTimeoutError):
        return "not all hosts came in time. `--rdzv-conf=join_timeout=SECONDS` waits longer; 600 is the default."
    if isinstance(error, RendezvousClosedError):
        return "the job of this --rdzv-id has ended there."
    reason = error.__cause__ or error
    return f"{type(reason).__name__}: {reason}"


@contextlib.contextmanager
def _torch_log(options: argparse.Namespace) -> Iterator[list[str]]:
    """Keep torch's last error message instead of printing it, unless its messages are asked for."""
    kept: list[str] = []
    if options.verbose or "LOGLEVEL" in os.environ:
        yield kept
        return
    names = [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]

    def keep(record: logging.LogRecord) -> bool:
        if record.levelno >= logging.ERROR:
            kept[:] = [record.getMessage()]
        return False

    for logger in loggers:
        logger.addFilter(keep)
    try:
        yield kept
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeFilter(keep)
            logger.setLevel(level)


def _own_host(endpoint: str) -> str:
    """Return how the other hosts reach this one: the address of the interface that leads to the endpoint."""
    name, port = parse_rendezvous_endpoint(endpoint, _PORT)
    try:
        family, kind, _, _, target = socket.getaddrinfo(name, port or _PORT, type=socket.SOCK_DGRAM)[0]
    except OSError as error:
        raise ValueError(f"The host of --rdzv-endpoint={endpoint} does not resolve: {error}") from None
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # sends nothing
        address = str(probe.getsockname()[0])
    is_loopback = address.startswith("127.") or address == "::1"
    # Debian's /etc/hosts gives a host's own name a loopback address, with which the others can do nothing.
    return socket.getfqdn() if is_loopback and name not in ("localhost", "::1") and name[:4] != "127." else address


def _num_threads(num_workers: int) -> str:
    """Share the cores out: torch would start a thread for each core in every worker."""
    return os.environ.get("OMP_NUM_THREADS") or str(max(1, num_usable_cores() // num_workers))


def num_workers(text: str) -> int:
    """Read how many workers a host has; for the option ``--nproc-per-node``."""
    try:
        number = int(determine_local_world_size(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected a number, gpu, cpu or auto: {error}") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1 worker. Received: {text}")
    return number


def num_hosts(text: str) -> tuple[int, int]:
    """Read how many hosts there are at least and at most; for the option ``--nnodes``."""
    try:
        least, most = parse_min_max_nnodes(text)
    except (ValueError, RuntimeError):
        raise argparse.ArgumentTypeError(f"expected N or MIN:MAX. Received: {text}") from None
    if not 1 <= least <= most:
        raise argparse.ArgumentTypeError(f"expected 1 <= MIN <= MAX. Received: {text}")
    return least, most


def _say(text: str) -> None:
    sys.stderr.write(f"torchstrategy launch: {text}\n")
    sys.stderr.flush()
