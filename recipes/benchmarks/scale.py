"""What ranks tell each other at the start, before a sum of gradients and of a failure, from two ranks to thousands.

The records of a real step are counted between processes of this host, and sent again, by the library's own code,
between ranks that are threads, over links that exist in memory. Each rank has a clock of its own that only messages
move: sending or receiving one takes some time of a rank, its bytes pass a link one after the other, and arrive after a
delay. What the simulation counts must be what the processes have counted. So is the news of failures that one rank and
all ranks have; of the start, what is asked of the job's store is counted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import heapq
import itertools
import json
import logging
import queue
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import checks
import hydra  # pip install hydra-core
import profiles
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.distributed import HashStore

import torchstrategy as ts
from torchstrategy.base.job import Job
from torchstrategy.cluster_resolver.cluster_spec import ClusterSpec
from torchstrategy.collectives import control, failures, notices, record_group, records, rendezvous, rounds
from torchstrategy.collectives.connections import frame

CASES = ("equal", "different")  # whether all ranks have gradients of the same parameters
WHO = ("one", "all")  # who fails
_STACK_BYTES = 256 << 10


class Rank:
    """A simulated rank: its clock in seconds, and what it has sent."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.message_s = options["message_us"] * 1e-6
        self.now = self.line_free_at = 0.0
        self.messages = self.bytes = self.hops = 0


class Channel:
    """One end of a connection in memory.

    Args:
        rank: whose end it is.
        inbox: what comes.
        outbox: what goes.
        link: delay in microseconds and rate in Gbit/s.
    """

    def __init__(self, rank: Rank, inbox: Any, outbox: Any, link: dict[str, float]) -> None:
        self._rank, self._inbox, self._outbox = rank, inbox, outbox
        self._delay_s, self._byte_s = link["delay_us"] * 1e-6, 8e-9 / link["gbit_s"]
        self._pending = b""

    def send(self, message: bytes | memoryview, check: Any) -> None:  # noqa: ARG002
        """Do as the library's channel."""
        rank = self._rank
        rank.now += rank.message_s
        rank.line_free_at = max(rank.now, rank.line_free_at) + len(message) * self._byte_s
        rank.messages, rank.bytes = rank.messages + 1, rank.bytes + len(message)
        self._outbox.put((bytes(message), rank.line_free_at + self._delay_s, rank.hops + 1))

    def receive(self, size: int, check: Any) -> bytes:  # noqa: ARG002
        """Do as the library's channel."""
        while len(self._pending) < size:
            part, arrives_at, hops = self._inbox.get(timeout=60)
            self._pending += part
            self._rank.now = max(self._rank.now, arrives_at) + self._rank.message_s
            self._rank.hops = max(self._rank.hops, hops)
        part, self._pending = self._pending[:size], self._pending[size:]
        return part

    def close(self) -> None:
        """Do as the library's channel."""


def simulate(bodies: Sequence[bytes], per_host: int, options: dict[str, Any]) -> list[Rank]:
    """Let simulated ranks exchange their bodies; return them afterwards."""
    size = len(bodies)
    is_mesh = size <= records.MAX_MESH_SIZE
    tree = records.Tree([rank // per_host for rank in range(size)])
    ranks = [Rank(options) for _ in bodies]
    channels: list[dict[int, Any]] = [{} for _ in bodies]
    if is_mesh:
        pairs = [(one, other) for other in range(size) for one in range(other)]
    else:
        pairs = [(parent, rank) for rank, parent in enumerate(tree.parents) if parent is not None]
    for one, other in pairs:
        link = options["host" if one // per_host == other // per_host else "network"]
        to_one, to_other = queue.SimpleQueue[Any](), queue.SimpleQueue[Any]()
        channels[one][other] = Channel(ranks[one], to_one, to_other, link)
        channels[other][one] = Channel(ranks[other], to_other, to_one, link)

    def run(rank: int) -> None:
        own: Any = channels[rank]
        connected = records.RecordMesh(own, rank) if is_mesh else records.RecordTree(own, rank, tree)
        connected.start(bodies[rank], _no_check, record_group._unite)(_no_check)

    before = threading.stack_size(_STACK_BYTES)
    try:
        with ThreadPoolExecutor(size) as threads:
            list(threads.map(run, range(size)))
    finally:
        threading.stack_size(before)
    return ranks


def measure(options: dict[str, Any], case: str, run_path: Path) -> dict[str, Any]:
    """Return what a process sends in a real step beside its gradients, the record, and milliseconds of a step."""
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    strategy = ts.MultiWorkerMirroredStrategy(
        communication_options=ts.experimental.CommunicationOptions(implementation="RING")
    )
    workers: Any = strategy.workers
    with strategy.scope():
        weights = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(options["parameters"])])
        optimizer = torch.optim.SGD(weights.parameters(), lr=1e-3)
    used = [w for k, w in enumerate(weights) if case == "equal" or k % workers.size != workers.rank]

    def step() -> None:
        optimizer.zero_grad()
        torch.cat(list(used)).sum().backward()
        optimizer.step()

    sent: list[int] = []
    bodies: list[bytes] = []
    times = []
    for number in range(options["steps"] + 3):
        if number == 3:  # the first ones compare parameters as well
            _count(workers._records, sent, bodies)
        start = time.perf_counter()
        strategy.run(step)
        times.append(time.perf_counter() - start)
    messages = len(sent) // options["steps"]  # of each step; bytes are the last one's, as numbers in records grow
    found = {
        "messages": messages,
        "bytes": sum(sent[-messages:]),
        "body": bodies[-1],
        "ms": statistics.median(times[3:]) * 1000,
    }
    if options["profile"]:  # apart from what is measured
        profiles.record_calls(lambda: strategy.run(step), options["profile_steps"], run_path, strategy)
    return found


def _count(connected: Any, sent: list[int], bodies: list[bytes]) -> None:
    """Note the bytes of all messages, and the bodies, that a rank sends from now on."""
    begin = connected.start

    def start(body: bytes, *rest: Any) -> Any:
        bodies.append(body)
        return begin(body, *rest)

    connected.start = start
    for channel in connected._channels.values():
        send = channel.send

        def counted(message: bytes, check: Any, send: Any = send) -> None:
            sent.append(len(message))
            send(message, check)

        channel.send = counted


class Counting:
    """A job's store as one rank sees it, which counts its requests and their bytes, but for questions while it waits.

    Args:
        store: the store.
        counts: requests and bytes of all that share it.
        size: number of ranks where each is to find all others there; 0 where it waits for them.
    """

    def __init__(self, store: Any, counts: list[int], size: int = 0) -> None:
        self._store, self._counts, self._size = store, counts, size

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            found = getattr(self._store, name)(*args)
            if name != "add" or (args[0] != "waits" and args[1] != 0):
                self._counts[0] += 1
                self._counts[1] += sum(len(str(arg)) for arg in args) + (len(found) if isinstance(found, bytes) else 8)
            return self._size if self._size and name == "add" and args[1] == 0 else found

        return call


def simulate_start(size: int, per_host: int) -> list[int]:
    """Let ranks meet as a job and as a strategy, one after the other; return the store's requests and bytes."""
    store, counts = HashStore(), [0, 0]
    rounds._REQUEST_S = rounds._POLL_S = 0.0  # this process has nobody to wait for
    for rank in range(size):  # the last one reads the cards before the others have their hosts
        job = Job("simulated", "", ClusterSpec({}), None, None, rank, size, "127.0.0.1", 1)
        own: Any = Counting(store, counts, size)
        host = rank // per_host
        own.append("cards", json.dumps([rank, f"host-{host}" + "x" * 100, f"10.0.{host >> 8}.{host & 255}"]) + "\n")
        is_last = rounds.wait_for_all(own, job, {"torch": torch.__version__}, 60.0)
        if is_last:
            rendezvous._hosts_of_all(own, job, is_last=True)
    strategy = Counting(HashStore(), counts, size)  # whose ranks meet in the same way
    for rank in range(size):
        if rank < size - 1:
            rendezvous._hosts_of_all(Counting(store, counts), job, is_last=False)
        rounds.wait_for_all(strategy, dataclasses.replace(job, rank=rank), {"torch": torch.__version__}, 60.0)
    return counts


class Plane:
    """A simulated rank's control plane: the library's notices, sent over links in memory at simulated times."""

    is_connected = False  # nobody waits

    def __init__(self, network: Network, rank: int, hosts: Sequence[int]) -> None:
        self.rank, self.hosts, self.network = rank, hosts, network
        ways = notices.Ways(rank, hosts)
        self.notices = notices.Notices(ways, self._note_told)
        self.neighbours = [*ways.calls, *ways.answers]
        self.gathers_until: defaultdict[int, float] = defaultdict(float)
        self.sent = Rank(network.options)
        self.watch: Any = None
        self.told_at = self.knows_at = 0.0
        self.news = 0
        self._flushes: set[float] = set()

    def _note_told(self, number: int) -> None:
        self.told_at = self.told_at or self.sent.now
        self.watch._receive(1 << self.rank, {"kind": "told", "body": number})

    def post(self, kind: str, body: Any = None, own: Any = None) -> int:
        """Do as the library's plane."""
        self.notices.post({"by": 1 << self.rank, "kind": kind, "body": body, "own": own})
        return 1

    def hear(self, source: int, frames: Sequence[bytes]) -> None:
        """Read what a neighbour has sent."""
        self.sent.now = max(self.sent.now, self.network.now) + self.sent.message_s
        for one in frames:
            message = json.loads(one[4:])
            if self.notices.take(message, source):
                self.watch._receive(message["by"], message)
        if not self.knows_at and self.watch.failure is not None:
            self.knows_at = self.sent.now
        self.flush()

    def flush(self) -> None:
        """Send what is to be sent, or look again when it is no longer gathered."""
        self.sent.now = max(self.sent.now, self.network.now)
        for other in self.neighbours:
            if not self.notices.has_for(other):
                continue
            due = self.gathers_until[other]
            if self.sent.now < due:
                if due not in self._flushes:
                    self._flushes.add(due)
                    self.network.at(due, self.flush)
                continue
            self.gathers_until[other] = self.sent.now + control._TOGETHER_S
            frames = list(map(frame, messages := self.notices.messages_for(other)))
            self.news += sum(message["kind"] == "failed" for message in messages)
            self.network.send(self, other, frames)

    def close(self, how: str | None = None) -> None:
        """Do as the library's plane."""


class Network:
    """Simulated ranks with a control plane, and what happens when."""

    def __init__(self, size: int, per_host: int, options: dict[str, Any]) -> None:
        self.options, self.now = options, 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        hosts = tuple(rank // per_host for rank in range(size))
        tree, plane, note = notices.Tree, failures.ControlPlane, failures.patches.note
        hook = sys.excepthook
        self.planes: list[Plane] = []

        def connect(_: Any, rank: int, *__: Any, **___: Any) -> Plane:
            self.planes.append(Plane(self, rank, hosts))
            return self.planes[-1]

        patched: Any = failures
        try:
            notices.Tree = functools.cache(tree)  # type: ignore[misc,assignment]
            patched.ControlPlane, patched.patches.note = connect, lambda *_: lambda: None
            for rank in range(size):
                watch = failures.FailureWatch(HashStore(), rank, hosts, "", 0.0)
                self.planes[rank].watch = watch
                watch.close()
                sys.excepthook = hook
        finally:
            notices.Tree, patched.ControlPlane, patched.patches.note = tree, plane, note  # type: ignore[misc]

    def at(self, when: float, do: Callable[[], None]) -> None:
        """Let something happen at a time."""
        heapq.heappush(self._events, (when, next(self._numbers), do))

    def send(self, source: Plane, other: int, frames: Sequence[bytes]) -> None:
        """Send a rank's frames to another rank."""
        link = self.options["host" if source.hosts[source.rank] == source.hosts[other] else "network"]
        rank, size = source.sent, sum(map(len, frames))
        rank.now += rank.message_s
        rank.line_free_at = max(rank.now, rank.line_free_at) + size * 8e-9 / link["gbit_s"]
        rank.messages, rank.bytes = rank.messages + 1, rank.bytes + size
        hear = functools.partial(self.planes[other].hear, source.rank, frames)
        self.at(rank.line_free_at + link["delay_us"] * 1e-6, hear)

    def run(self) -> None:
        """Let everything happen."""
        while self._events:
            self.now, _, do = heapq.heappop(self._events)
            do()


def simulate_failure(size: int, per_host: int, who: str, options: dict[str, Any]) -> dict[str, float]:
    """Let one rank, or all within a tenth of a second, fail; return messages, and seconds until all know.

    Raises:
        RuntimeError: a rank does not know, or a failure of all is not outlived.
    """
    network = Network(size, per_host, options)
    for plane in network.planes[:1] if who == "one" else network.planes:

        def fail(plane: Plane = plane) -> None:
            plane.watch.report("Strategy.run", ValueError(f"of rank {plane.rank}"), plane.rank)
            plane.knows_at = plane.knows_at or network.now
            plane.flush()

        network.at(plane.rank * 37 % 101 / 1010, fail)
    network.run()
    if any(plane.watch.failure is None or (who == "all" and not plane.watch.recover()) for plane in network.planes):
        raise RuntimeError(f"Not all of {size} simulated ranks know of the failure.")
    sent = [plane.sent for plane in network.planes]
    return {
        "news": sum(plane.news for plane in network.planes),
        "messages": sum(rank.messages for rank in sent),
        "most": max(rank.messages for rank in sent),
        "most_bytes": max(rank.bytes for rank in sent),
        "knows_s": max(plane.knows_at for plane in network.planes),
        "told_s": max(plane.told_at for plane in network.planes[: 1 if who == "one" else size]),
    }


def measure_failures() -> dict[str, Any]:
    """Return what this rank asks of the store at the start, and sends when all fail and then one does."""
    logging.disable(logging.CRITICAL)
    counts = [0, 0]
    with _counted_start(counts):
        strategy: Any = ts.MultiWorkerMirroredStrategy()
    workers, found = strategy.workers, {"requests": counts[0], "bytes": counts[1]}
    watch = workers.watch
    own, totals = watch._plane._notices, {"news": 0, "messages": 0}
    take_messages = own.messages_for

    def messages_for(neighbour: int) -> list[Any]:
        messages: list[Any] = take_messages(neighbour)
        totals["messages"] += 1
        totals["news"] += sum(message["kind"] == "failed" for message in messages)
        return messages

    own.messages_for = messages_for
    for who in reversed(WHO):
        workers.exchange("a barrier", None)
        start = time.perf_counter()
        if who == "all" or workers.rank == 0:
            watch.report("Strategy.run", ValueError(f"of rank {workers.rank}"), workers.rank)
        seconds = time.perf_counter() - start
        if who == "all" and not watch.recover():
            raise RuntimeError("A failure of all ranks was not outlived.")
        time.sleep(1.0)
        found[who] = {**totals, "told_s": seconds}
        totals.update(news=0, messages=0)
    return found


@contextlib.contextmanager
def _counted_start(counts: list[int]) -> Iterator[None]:
    """Count what a strategy that is made asks the store until all have met."""
    own: Any = rendezvous
    wait, hosts = own.wait_for_all, own._hosts_of_all
    counts[0] += 1  # the card
    own.wait_for_all = lambda store, *rest, **options: wait(Counting(store, counts), *rest, **options)
    own._hosts_of_all = lambda store, *rest, **options: hosts(Counting(store, counts), *rest, **options)
    try:
        yield
    finally:
        own.wait_for_all, own._hosts_of_all = wait, hosts


def compare_control(options: dict[str, Any]) -> list[dict[str, Any]]:
    """Measure and simulate the start and the news of failures; print them.

    Raises:
        RuntimeError: processes and simulation differ.
    """
    rows: list[dict[str, Any]] = []
    print(
        f"{'ranks':>6}  {'who fails':10}{'all know after':>18}{'any sends at most':>20}{'in all':>9}{'of it news':>12}"
    )
    for size in sorted({*options["processes"], *options["ranks"]}):
        per_host = size if size in options["processes"] else options["per_host"]
        requests, num_bytes = simulate_start(size, per_host)
        rows.append({"how": "simulated", "case": "start", "ranks": size, "requests": requests, "bytes": num_bytes})
        for who in WHO:
            found = simulate_failure(size, per_host, who, options)
            rows.append({"how": "simulated", "case": f"{who} fails", "ranks": size, **found})
            most = f"{found['most']:g} x, {found['most_bytes'] / 1000:.1f} kB"
            news = f"{found['messages']:9g}{found['news']:12g}"
            print(f"{size:6}  {who:10}{found['knows_s'] * 1000:15.2f} ms{most:>20}{news}  simulated", flush=True)
        print(f"{size:6}  starts: {requests} requests, {num_bytes / 1000:.1f} kB at the store  simulated", flush=True)
        if size not in options["processes"]:
            continue
        with ts.testing.ProcessPool(size, 600) as pool:
            measured = pool.run(measure_failures)
        for who in WHO:
            totals = {key: sum(one[who][key] for one in measured) for key in ("news", "messages")}
            seconds = max(one[who]["told_s"] for one in measured)
            rows.append({"how": "processes", "case": f"{who} fails", "ranks": size, **totals, "told_s": seconds})
            news = f"{totals['messages']:9}{totals['news']:12}"
            print(f"{size:6}  {who:10}{seconds * 1000:15.2f} ms{'':>20}{news}  processes")
            if who == "one" and totals["news"] != size - 1:
                raise RuntimeError(f"One failure is told {totals['news']} times to {size - 1} ranks.")
        asked = sum(one["requests"] for one in measured)
        print(f"{size:6}  starts: {asked} requests at the store  processes", flush=True)
        if asked != requests:
            raise RuntimeError(f"Processes ask the store {asked} times, and simulated ones {requests} times.")
    return rows


@hydra.main(config_path="../../conf/benchmarks", config_name="scale", version_base="1.3")
def main(config: DictConfig) -> None:
    """Count between processes, simulate, compare; print a table and write it to results.json."""
    options: Any = OmegaConf.to_container(config)
    checks.integers(options, "parameters", "steps", "per_host")
    checks.lists_of_integers(options, "processes", "ranks", least=2)
    checks.positive_numbers(options, "message_us", "host.delay_us", "host.gbit_s", "network.delay_us", "network.gbit_s")
    checks.profile(options)
    run_path = Path(HydraConfig.get().runtime.output_dir).absolute()
    print(f"The record of {options['parameters']:,} parameters; of a rank and step, without the gradients themselves")
    print(f"{'ranks':>6}  {'gradients':11}{'rank 0 sends':>22}{'any at most':>14}{'hops':>6}{'ms':>9}  how")
    rows: list[dict[str, Any]] = []

    def show(how: str, size: int, case: str, sent: Sequence[tuple[int, int]], hops: int | None, ms: float) -> None:
        most = max(number for _, number in sent)
        row = {"how": how, "ranks": size, "case": case, "messages": sent[0][0], "bytes": sent[0][1], "most": most}
        rows.append({**row, "hops": hops, "ms": ms})
        first = f"{sent[0][0]:g} x, {sent[0][1] / 1000:.1f} kB"
        print(f"{size:6}  {case:11}{first:>22}{most / 1000:11.1f} kB{hops or '':>6}{ms:9.3f}  {how}", flush=True)

    for case in CASES:
        for size in options["processes"]:
            with ts.testing.ProcessPool(size, 600) as pool:
                found = pool.run(measure, options, case, run_path / f"{size}_{case}")
            sent = [(one["messages"], one["bytes"]) for one in found]
            show("a step of processes", size, case, sent, None, found[0]["ms"])
            bodies = [one["body"] for one in found]
            ranks = simulate(bodies, size, options)
            simulated = [(rank.messages, rank.bytes) for rank in ranks]
            show("simulated", size, case, simulated, max(rank.hops for rank in ranks), _ms(ranks))
            if simulated != sent:
                raise RuntimeError(f"Processes and simulation differ. Sent: {sent}. Simulated: {simulated}.")
        for size in options["ranks"]:
            ranks = simulate([bodies[rank % len(bodies)] for rank in range(size)], options["per_host"], options)
            simulated = [(rank.messages, rank.bytes) for rank in ranks]
            show("simulated", size, case, simulated, max(rank.hops for rank in ranks), _ms(ranks))
    rows += compare_control(options)
    path = run_path / "results.json"
    path.write_text(json.dumps(rows, indent=1))
    print(f"File: {path}")


def _ms(ranks: Sequence[Rank]) -> float:
    return max(rank.now for rank in ranks) * 1000


def _no_check() -> None:
    pass


if __name__ == "__main__":
    main()
