"""XLA's collectives between devices of one process, each driven by a thread as a process would drive it.

XLA connects virtual devices of one process only, so this is as near as it gets without TPUs.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tests.collectives.groups import no_check
from torchstrategy.collectives.summing import pack, unpack
from torchstrategy.collectives.xla_backend import XlaBackend


class Devices:
    """The devices of this process, each with a runtime for the thread that drives it."""

    def __init__(self, size: int) -> None:
        # A collective of XLA's on CPUs holds a thread for each device; by default there is one for each core.
        os.environ["XLA_THREAD_POOL_SIZE"] = os.environ["NPROC"] = str(2 * size)
        import torch_xla
        import torch_xla.core.xla_model as xm

        self.size = size
        self.barrier = threading.Barrier(size, timeout=60)
        self.native = torch_xla._XLAC
        self.names = xm.get_xla_supported_devices()
        xm.set_replication(self.names[0], self.names)
        # Autograd counts devices once.
        (torch.ones((), device=self.names[0], requires_grad=True) * 1).backward()

    def run(self, fn: Callable[[Any, XlaBackend], Any]) -> list[Any]:
        """Call ``fn(runtime, backend)`` in a thread for each device; ranks count backwards, as they may."""
        with ThreadPoolExecutor(self.size) as threads:
            futures = [threads.submit(self._drive, fn, ordinal) for ordinal in range(self.size)]
            return [future.result(timeout=120) for future in reversed(futures)]

    def _drive(self, fn: Callable[[Any, XlaBackend], Any], ordinal: int) -> Any:
        self.native._xla_set_default_device(self.names[ordinal])
        runtime = self._make_runtime()
        ordinals = list(reversed(range(self.size)))
        backend = XlaBackend(runtime, ordinals, self.barrier.wait, lambda _: SimpleNamespace())
        with torch.autograd.set_multithreading_enabled(False):
            return fn(runtime, backend)

    def _make_runtime(self) -> Any:
        from torchstrategy.xla.torch_xla_runtime import TorchXlaRuntime

        barrier = self.barrier

        class OneOfSeveral(TorchXlaRuntime):
            is_spmd = False
            num_syncs = 0

            def sync(self, *, wait: bool = False) -> None:
                """All threads must run one executable: the first compiles it, the others find it in the cache."""
                self.num_syncs += 1
                if self.ordinal == 0:
                    super().sync(wait=wait)
                barrier.wait()
                if self.ordinal:
                    super().sync(wait=wait)

        return OneOfSeveral()


def rank_of(runtime: Any, size: int) -> int:
    return size - 1 - int(runtime.ordinal)


def collectives(size: int) -> list[dict[str, Any]]:
    """Sums of several buckets and gathers of every dtype."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int16, torch.uint8)

    def fn(runtime: Any, backend: XlaBackend) -> dict[str, Any]:
        rank = rank_of(runtime, size)
        found: dict[str, Any] = {"rank": rank}
        buckets = [(torch.arange(6) + 10 * rank).to(dtype).to(runtime.device) * 1 for dtype in dtypes]
        waits = [backend.start_sum(bucket) for bucket in buckets]
        for wait in waits:
            wait(no_check)
        for dtype, bucket in zip(dtypes, buckets, strict=True):
            assert bucket.dtype is dtype
            found[f"sum {dtype}"] = bucket.cpu().double().tolist()
        for dtype in (*dtypes, torch.bool):
            own = (torch.arange(3) + rank - 1).to(dtype).to(runtime.device)
            outputs = [torch.empty_like(own) for _ in range(size)]
            backend.start_all_gather(outputs, own)(no_check)
            found[f"gather {dtype}"] = [output.cpu().double().tolist() for output in outputs]
        return found

    return Devices(size).run(fn)


def train(size: int, num_steps: int) -> list[dict[str, Any]]:
    """A loop whose gradients travel in two buckets."""

    def fn(runtime: Any, backend: XlaBackend) -> dict[str, Any]:
        rank, device = rank_of(runtime, size), runtime.device
        model, x, y = model_and_data(size)
        model = model.to(device)
        parameters = list(model.parameters())
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        x, y = x.chunk(size)[rank].to(device), y.chunk(size)[rank].to(device)
        runtime.sync()
        start = counted("TransferFromDeviceTime")
        compilations = []
        for _ in range(num_steps):
            loss = step(model, optimizer, x, y, lambda g: sum_gradients(backend, g))
            runtime.sync()
            compilations.append(runtime.num_compilations())
        backend_reads = counted("TransferFromDeviceTime") - start
        runtime.sync()  # all threads have looked
        weights = [p.detach().cpu().flatten().tolist() for p in parameters]
        return {
            "weights": weights,
            "loss": float(loss),
            "reads": backend_reads,
            "later reads": counted("TransferFromDeviceTime") - start,
            "compilations": compilations,
        }

    return Devices(size).run(fn)


def counted(metric: str) -> int:
    import torch_xla.debug.metrics as metrics

    data = metrics.metric_data(metric)
    return int(data[0]) if data else 0


def sum_gradients(backend: XlaBackend, gradients: list[Tensor]) -> list[Tensor]:
    results = []
    for bucket in (gradients[:2], gradients[2:]):
        flat = pack(bucket)
        backend.start_sum(flat)(no_check)
        results += [part.clone() for part in unpack(flat, bucket)]
    return results


def model_and_data(size: int) -> tuple[nn.Module, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    x = torch.randn(2 * size, 5, generator=generator)
    return model, x, torch.randint(3, (2 * size,), generator=generator)


def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, combine: Any) -> Tensor:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y, reduction="sum") / 8
    loss.backward()
    parameters = list(model.parameters())
    for parameter, total in zip(parameters, combine([p.grad for p in parameters]), strict=True):
        parameter.grad = total
    optimizer.step()
    return loss.detach()


def train_alone(size: int, num_steps: int) -> tuple[list[list[float]], float]:
    model, x, y = model_and_data(size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(num_steps):
        loss = step(model, optimizer, x, y, list)
    return [p.detach().flatten().tolist() for p in model.parameters()], float(loss)
