"""What ranks tell each other before a sum of gradients, from two ranks to thousands.

The records of a real step are counted between processes of this host, and sent again, by the library's own code,
between ranks that are threads, over links that exist in memory. Each rank has a clock of its own that only messages
move: sending or receiving one takes some time of a rank, its bytes pass a link one after the other, and arrive after a
delay. What the simulation counts must be what the processes have counted.
"""

from __future__ import annotations

import json
import logging
import queue
import statistics
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import checks
import hydra
import profiles
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from torch import nn

import torchstrategy as ts
from torchstrategy.collectives import record_group, records

CASES = ("equal", "different")  # whether all ranks have gradients of the same parameters
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
    path = run_path / "results.json"
    path.write_text(json.dumps(rows, indent=1))
    print(f"File: {path}")


def _ms(ranks: Sequence[Rank]) -> float:
    return max(rank.now for rank in ranks) * 1000


def _no_check() -> None:
    pass


if __name__ == "__main__":
    main()
