"""What the ranks of the tests of backends run, and ways of communication that a user might bring."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

import torchstrategy as ts
from torchstrategy.base.options import CommunicationOptions
from torchstrategy.collectives import process_group, shared_memory
from torchstrategy.collectives.backends import from_bytes, to_bytes
from torchstrategy.collectives.shared_memory import SharedMemoryBackend

LENGTHS = [0, 1, 3, 4096, 4097, 5000, 300_000, 1_000_003]  # up to 16 KiB float32 travels with the record


class PlainRing:
    """A ring over sockets in plain Python: each rank passes on what it got until it has everything."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        self.rank, self.size = rank, size
        with socket.create_server(("127.0.0.1", 0)) as listener:
            store.set(f"port/{rank}", str(listener.getsockname()[1]))
            following = int(store.get(f"port/{(rank + 1) % size}"))
            self.next = socket.create_connection(("127.0.0.1", following), timeout=timeout.total_seconds())
            self.previous = listener.accept()[0]
        self.next.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.previous.settimeout(0.2)

    def start_sum(self, tensor: Tensor) -> Callable[[Any], None]:
        def wait(check: Any) -> None:
            parts = self._pass_round(tensor.clone(), check)
            tensor.copy_(torch.stack(parts).sum(0).to(tensor.dtype))

        return wait

    def start_all_gather(self, outputs: list[Tensor], tensor: Tensor) -> Callable[[Any], None]:
        def wait(check: Any) -> None:
            for output, part in zip(outputs, self._pass_round(tensor, check), strict=True):
                output.copy_(part)

        return wait

    def start_broadcast(self, tensor: Tensor) -> Callable[[Any], None]:
        def wait(check: Any) -> None:
            tensor.copy_(self._pass_round(tensor, check)[0])

        return wait

    def _pass_round(self, own: Tensor, check: Any) -> list[Tensor]:
        parts = {self.rank: own}
        for step in range(self.size - 1):
            data = to_bytes(parts[(self.rank - step) % self.size])
            pieces = [data[i : i + 16384] for i in range(0, len(data), 16384)]  # all send before they read
            received = b"".join([self._swap(piece, check) for piece in pieces])
            parts[(self.rank - step - 1) % self.size] = from_bytes(received, own.dtype).view(own.shape)
        return [parts[rank] for rank in range(self.size)]

    def _swap(self, piece: bytes, check: Any) -> bytes:
        self.next.sendall(piece)
        data = b""
        while len(data) < len(piece):
            try:
                data += self.previous.recv(len(piece) - len(data)) or _closed()
            except TimeoutError:
                check()
        return data


def _closed() -> bytes:
    raise ConnectionError("the ring is broken")


class PythonBackend(dist.ProcessGroup):
    """A c10d backend in Python, as ``Backend.register_backend`` takes one; it counts what it is asked for."""

    calls: ClassVar[list[str]] = []

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self._done("allreduce", self._gloo.allreduce(tensors, opts), tensors)

    def allgather(self, outputs: list[list[Tensor]], tensors: list[Tensor], opts: Any = None) -> Any:
        return self._done("allgather", self._gloo.allgather(outputs, tensors, opts), tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self._done("broadcast", self._gloo.broadcast(tensors, opts), tensors)

    def _done(self, name: str, work: Any, result: list[Tensor]) -> Any:
        self.calls.append(name)
        work.wait()
        future: Future[Any] = Future()
        future.set_result(result)
        return dist._create_work_from_future(future) if hasattr(dist, "_create_work_from_future") else _Done(future)


class _Done(dist._Work):
    def __init__(self, future: Future[Any]) -> None:
        super().__init__()
        self._future = future

    def wait(self, timeout: Any = None) -> bool:
        return True

    def get_future(self) -> Future[Any]:
        return self._future


def _fails_on_one_rank(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    if rank == 1:
        raise OSError("no such network card")
    return PlainRing.__new__(PlainRing)


def _lacks_broadcast(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    ring = type("Half", (), {"start_sum": PlainRing.start_sum, "start_all_gather": PlainRing.start_all_gather})
    return ring()


class FailsLater(PlainRing):
    """Its algorithm has a mistake, on one rank."""

    def start_sum(self, tensor: Tensor) -> Callable[[Any], None]:
        def wait(check: Any) -> None:
            if self.rank == 1:
                raise ZeroDivisionError("a mistake in the algorithm")
            self._pass_round(tensor, check)

        return wait


FACTORIES = {
    "plain-ring": PlainRing,
    "python-backend": PythonBackend,
    "fails-on-one-rank": _fails_on_one_rank,
    "lacks-broadcast": _lacks_broadcast,
    "fails-later": FailsLater,
}


def options(name: str, timeout_s: float | None = None) -> CommunicationOptions:
    with contextlib.suppress(KeyError, ValueError):  # not a name of ours, or registered in this process before
        ts.experimental.register_communication(name, FACTORIES[name])
    return CommunicationOptions(implementation=name, timeout_seconds=timeout_s)


def collectives(name: str, lengths: list[int] = LENGTHS) -> dict[str, Any]:
    """Return results of everything that moves data, and how they were carried."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("torchstrategy")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    process_group.info_once = logger.info  # type: ignore[attr-defined]
    PythonBackend.calls.clear()
    strategy = ts.MirroredStrategy(["cpu:0"], communication_options=options(name))
    logger.removeHandler(handler)
    logger.setLevel(level)
    rank = strategy.workers.rank
    parts = [torch.arange(length, dtype=torch.float64).sin().float() * (rank + 1) for length in lengths]
    sums = strategy.workers.all_reduce(parts, "a sum")
    mixed = strategy.workers.all_reduce(
        [torch.tensor(rank, dtype=torch.int16), torch.ones(3, dtype=torch.bfloat16), torch.tensor(1j + rank)], "a sum"
    )
    gathered = [strategy.workers.all_gather_tensors(parts[i][rank:], "a gather") for i in range(len(parts))]
    first = [part.clone() for part in parts]
    strategy.workers.broadcast(first, "a broadcast")
    return {
        "sums": sums,
        "mixed": mixed,
        "gathered": gathered,
        "first": first,
        "trained": _train(strategy),
        "lines": [line for line in lines if line.startswith(("Communication", "The processes of a host"))],
        "calls": set(PythonBackend.calls),
    }


def _train(strategy: ts.Strategy) -> list[Tensor]:
    torch.manual_seed(0)
    with strategy.scope():
        model = nn.Sequential(nn.Linear(8, 300), nn.BatchNorm1d(300), nn.Linear(300, 300))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.double()
    (batch,) = strategy.experimental_distribute_dataset(torch.randn(12, 8, dtype=torch.float64), batch_size=12)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        ts.nn.compute_average_loss(model(x).square().mean(1), global_batch_size=12).backward()
        optimizer.step()

    for _ in range(3):
        strategy.run(step, args=(batch,))
    return [parameter.detach() for parameter in model.parameters()]


def without_shared_memory() -> dict[str, Any]:
    """Let rank 1 have no memory to share."""
    original = shared_memory._listen

    def no_memory(card: list[str]) -> socket.socket:
        if os.environ["RANK"] == "1":
            raise OSError(28, "No space left on device")
        return original(card)

    shared_memory._listen = no_memory
    try:
        return collectives("auto")
    finally:
        shared_memory._listen = original


def lost_in_the_middle(how: str) -> None:
    """Rank 1 is killed, stopped or fails while it is in a sum, after its third chunk."""
    strategy = ts.MirroredStrategy(["cpu:0"], communication_options=CommunicationOptions(timeout_seconds=3.0))
    original = SharedMemoryBackend._upload
    uploads = []

    def upload(self: SharedMemoryBackend, chunk: Tensor, check: Any) -> tuple[int, int]:
        uploads.append(1)
        if len(uploads) == 4 and strategy.workers.rank == 1:
            if how == "fails":
                raise MemoryError("no memory for the fourth chunk")
            os.kill(os.getpid(), {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}[how])
        return original(self, chunk, check)

    SharedMemoryBackend._upload = upload
    start = time.monotonic()
    tensor = torch.ones(10_000_000)
    try:
        strategy.run(lambda: ts.get_replica_context().all_reduce("sum", tensor))
    except ts.errors.ReplicaFailedError as error:
        again = ""
        try:
            strategy.reduce("sum", torch.ones(1), axis=None)
        except ts.errors.ReplicaFailedError as second:
            again = str(second)
        raise RuntimeError(f"{time.monotonic() - start:.2f}|{type(error).__name__}: {error}|{again}") from None


def differing_sizes(length: int) -> list[str]:
    """Different lengths are found before data moves, whichever way it would take."""
    strategy = ts.MirroredStrategy(["cpu:0"])
    messages = []
    for tensor in (torch.ones(length + strategy.workers.rank), torch.ones(2)):
        try:
            messages.append(str(strategy.workers.all_reduce([tensor], "a sum")[0].unique().tolist()))
        except ts.errors.InvalidArgumentError as error:
            messages.append(str(error))
    return messages


def make_strategy(name: str) -> None:
    ts.MirroredStrategy(["cpu:0"], communication_options=options(name))


def reduce_once(name: str) -> float:
    strategy = ts.MirroredStrategy(["cpu:0"], communication_options=options(name, 10.0))
    return float(strategy.run(lambda: ts.get_replica_context().all_reduce("sum", torch.ones(()))))


def factory_time_out_is_the_strategys() -> float:
    seen = []

    def factory(store: Any, rank: int, size: int, timeout: timedelta) -> PlainRing:
        seen.append(timeout.total_seconds())
        return PlainRing(store, rank, size, timeout)

    ts.experimental.register_communication("sees-timeout", factory)
    ts.MirroredStrategy(
        ["cpu:0"], communication_options=CommunicationOptions(implementation="Sees-Timeout", timeout_seconds=20.0)
    )
    return seen[0]
