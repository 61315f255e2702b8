"""What ``torchstrategy launch`` adds to torch's elastic launcher.

After each rendezvous the launchers of all hosts agree on their workers' addresses, on the number of the attempt and on
a store for the workers. The first become ``TF_CONFIG``. The second replaces each launcher's own count of restarts: a
launcher whose workers were healthy counts none. The store is a new one for each round: torch's launchers keep that
of the first, also when the host that has it is gone.

A worker that ends before the job has started is told to the ranks of other hosts, which wait for it, over their store.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed import DistError, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, LogsDest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from torchstrategy.base.addresses import ReservedPorts, join_address, listen_at
from torchstrategy.collectives.joining import report_end, store_of_job
from torchstrategy.collectives.rounds import mark_as_of_one_round

__all__ = [
    "BACKEND",
    "Agreement",
    "TellingAgent",
    "WorkerEnvironments",
    "describe",
    "describe_restart",
    "exit_status",
    "replaced",
    "tf_config",
]

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
    elif failure.exitcode == -getattr(signal, "SIGKILL", 0):
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


BACKEND = "torchstrategy"
_PATIENCE_S = 20.0  # longer than torch takes to miss a launcher
_LOOK_S = 0.05


class Agreement:
    """What the launchers of all hosts agree on in each round.

    Args:
        num_workers: processes that this launcher starts.
        host: this host's name or address, as the others reach it.
    """

    def __init__(self, num_workers: int, host: str) -> None:
        self.attempt = -1
        self.addresses: list[str] = []
        self._num_workers = num_workers
        self._host = host
        #: Where the workers of this round meet.
        self.store_address = RendezvousStoreInfo("", 0)
        # Until the next round.
        self._ports: ReservedPorts | None = None
        self._store: TCPStore | None = None

    def reach(self, info: RendezvousInfo, patience_s: float = _PATIENCE_S) -> bool:
        """Exchange this round's addresses with the launchers of the other hosts.

        Args:
            info: the round; its store is the round's own.
            patience_s: seconds to wait for the others; one that has just been lost may be in the round still.

        Returns:
            Whether all have come.
        """
        if self._ports is not None:
            self._ports.close()
        self._ports = ReservedPorts(self._num_workers, host="")
        own = [join_address(self._host, port) for port in self._ports.numbers]
        info.store.set(f"launch/{info.rank}", json.dumps([self.attempt, own]))
        deadline = time.monotonic() + patience_s
        if not _are_there(info.store, [f"launch/{rank}" for rank in range(info.world_size)], deadline):
            return False
        rounds = [json.loads(info.store.get(f"launch/{rank}")) for rank in range(info.world_size)]
        self.attempt = 1 + max(attempt for attempt, _ in rounds)
        self.addresses = [address for _, addresses in rounds for address in addresses]
        self._store = None
        if info.rank == 0:
            listener = listen_at(self._host, 0)
            self._store = TCPStore(self._host, 0, is_master=True, wait_for_workers=False, master_listen_fd=listener)
            mark_as_of_one_round(self._store)
            info.store.set("launch/store", json.dumps([self._host, self._store.port]))
        if not _are_there(info.store, ["launch/store"], deadline + patience_s):
            return False
        self.store_address = RendezvousStoreInfo(*json.loads(info.store.get("launch/store")))
        return True


def _are_there(store: Store, keys: list[str], deadline: float) -> bool:
    """Wait for keys, in short looks: the store's own wait would not let signals through."""
    while not store.check(keys):
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_S)
    return True


class AgreeingRendezvous(RendezvousHandler):
    """torch's rendezvous over a ``TCPStore``, each round followed by an agreement.

    Args:
        handler: torch's.
        agreement: is reached at the end of each round.
    """

    def __init__(self, handler: RendezvousHandler, agreement: Agreement) -> None:
        self._handler = handler
        self._agreement = agreement

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other launchers and agree with them."""
        info = self._handler.next_rendezvous()
        try:
            while not self._agreement.reach(info):  # a launcher that was lost meanwhile is missed in the next round
                info = self._handler.next_rendezvous()
        except DistError as error:
            raise RendezvousConnectionError("the launchers' store was lost") from error
        return RendezvousInfo(info.store, info.rank, info.world_size, self._agreement.store_address)

    def get_backend(self) -> str:
        """Return the name under which this rendezvous is registered."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Whether the workers use a store of the launchers."""
        return True

    def is_closed(self) -> bool:
        """Whether the job is over."""
        return self._handler.is_closed()

    def set_closed(self) -> None:
        """End the job for all launchers."""
        self._handler.set_closed()  # type: ignore[no-untyped-call]

    def num_nodes_waiting(self) -> int:
        """Return how many launchers wait for the next round."""
        return self._handler.num_nodes_waiting()

    def get_run_id(self) -> str:
        """Return the job's id."""
        return self._handler.get_run_id()

    def shutdown(self) -> bool:
        """Leave."""
        return self._handler.shutdown()


class WorkerEnvironments(DefaultLogsSpecs):
    """Completes the environment variables of the workers just before they start.

    torch asks this object for the places of the workers' logs, and hands it the variables to read and to extend.

    Args:
        agreement: of the launchers, reached in the round that starts the workers.
        log_dir: folder for the error files of the workers.
        before_restart: called before each start but the first, with the number of the attempt and the error files of
            the last one by global rank.
    """

    def __init__(
        self, agreement: Agreement, log_dir: str, before_restart: Callable[[int, dict[int, str]], Any]
    ) -> None:
        super().__init__(log_dir=log_dir)
        self.agreement = agreement
        self._before_restart = before_restart
        self._error_files: dict[int, str] = {}

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Write ``TF_CONFIG`` and the agreed attempt into each worker's variables, and return where its logs go."""
        if self._error_files:
            self._before_restart(self.agreement.attempt, self._error_files)
        for environment in envs.values():
            environment["TORCHELASTIC_RESTART_COUNT"] = str(self.agreement.attempt)
            environment["TF_CONFIG"] = tf_config(self.agreement.addresses, int(environment["RANK"]))
        places = super().reify(envs)
        self._error_files = {int(envs[local_rank]["RANK"]): path for local_rank, path in places.error_files.items()}
        return places


_STORE_S = 5.0
_READ_S = 1.0


class TellingAgent(LocalElasticAgent):
    """torch's, and the ranks of other hosts hear at once of a worker that ends before they have all met.

    The other workers of this host are ended by torch, which may take half a minute; so this looks first.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._agreement: Agreement = kwargs["logs_specs"].agreement
        self._attempt = -1
        self._address = "", 0
        self._job_store: Store | None = None
        self._ended: set[int] = set()  # local ranks of this attempt
        self._is_told = False

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._look(worker_group)
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state == WorkerState.FAILED:
            self._look(worker_group)
            if self._is_told:  # this launcher may keep the store, and is about to end
                time.sleep(_READ_S)
        return result

    def _look(self, group: WorkerGroup) -> None:
        if (group.group_world_size or 1) == 1 or not group.spec.rdzv_handler.use_agent_store:
            return
        with contextlib.suppress(DistError, OSError):  # the store is gone, and the job with it
            if self._attempt != self._agreement.attempt:
                self._attempt, self._job_store, self._is_told = self._agreement.attempt, None, False
                self._ended.clear()
                self._address = str(group.master_addr), int(group.master_port or 0)
                time_limit = timedelta(seconds=_STORE_S)
                store = TCPStore(*self._address, is_master=False, wait_for_workers=False, timeout=time_limit)
                self._job_store = store_of_job(store, 0)
            for local_rank, handler in getattr(self._pcontext, "subprocess_handlers", {}).items():
                code = handler.proc.poll()
                if self._job_store is not None and code is not None and local_rank not in self._ended:
                    self._ended.add(local_rank)
                    # torch's client would print a page if the store has ended.
                    socket.create_connection(self._address, timeout=_STORE_S).close()
                    self._tell(
                        self._job_store, group.workers[local_rank].global_rank, local_rank, code, handler.proc.pid
                    )

    def _tell(self, store: Store, rank: int, local_rank: int, code: int, pid: int) -> None:
        error = _read(getattr(self._pcontext, "error_files", {}).get(local_rank, os.devnull))
        is_consequence = error is not None and error.message.startswith(_CONSEQUENCE)
        if is_consequence or (code == 0 and store.check([f"joined/{rank}"])):
            return
        why = f", {error.message.splitlines()[0]}" if error else ""
        where = f"process {pid} on {socket.gethostname()}, as its launcher says"
        report_end(store, rank, f"has ended before the job had started: {_ending(code)}{why} ({where})")
        self._is_told = True


@contextlib.contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """Put something in the place of what torch's launcher has there, within a ``with`` block."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def tf_config(addresses: list[str], rank: int) -> str:
    """Return the ``TF_CONFIG`` of one worker.

    Args:
        addresses: ``host:port`` of each worker, in the order of ranks.
        rank: which of them it is.
    """
    return json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}})


def _create(parameters: RendezvousParameters) -> AgreeingRendezvous:
    backend, store = create_backend(parameters)
    return AgreeingRendezvous(create_handler(store, backend, parameters), parameters.config["agreement"])


rendezvous_handler_registry.register(BACKEND, _create)
