"""Processes whose accelerators have a process group of their own, as GPUs have NCCL's."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchstrategy as ts
from tests.accelerator import loading
from tests.gradients.early_job import NUM_STEPS, Job, net
from torchstrategy.collectives import native_groups

DEVICE = loading.DEVICES[0]
_BACKEND = "standin_net"
groups: list[StandInGroup] = []


class StandInGroup:
    """A group for the accelerator for tests, over gloo; it never hears that a rank is gone, and goes on when aborted.

    Collectives are done by a thread, in the order in which they were started: ranks with another order would get other
    numbers, or hang.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._gloo))  # it would wait for its collectives at its end
        self._jobs: SimpleQueue[tuple[Any, Work]] = SimpleQueue()
        self.log: list[Any] = []
        self.num_aborts = 0
        #: Seconds after which the program goes on, though the accelerator does not; ``None`` means that it waits.
        self.patience_s: float | None = None
        #: What happens before a collective, given how many there have been.
        self.before: Any = lambda number: None
        self.latest = Work(self)
        self.latest.is_over.set()
        threading.Thread(target=self._work, daemon=True).start()
        groups.append(self)

    def allreduce(self, tensors: list[Tensor], options: Any) -> Work:
        return self._start("allreduce", tensors, lambda host: self._gloo.allreduce([host], options))

    def broadcast(self, tensors: list[Tensor], options: Any) -> Work:
        return self._start("broadcast", tensors, lambda host: self._gloo.broadcast([host], options))

    def allgather(self, outputs: list[list[Tensor]], tensors: list[Tensor], options: Any) -> Work:
        rows = [torch.empty_like(row, device="cpu") for row in outputs[0]]
        own = tensors[0].cpu()
        return self._put("allgather", own, lambda: self._gloo.allgather([rows], [own]), outputs[0], rows)

    def abort(self) -> None:
        self.num_aborts += 1
        self.latest.is_over.set()

    def synchronize(self) -> None:
        """Wait for the accelerator, as ``item()`` does."""
        self.latest.is_over.wait()

    def _start(self, name: str, tensors: list[Tensor], act: Any) -> Work:
        host = tensors[0].cpu()
        return self._put(name, host, lambda: act(host), tensors, [host])

    def _put(self, name: str, own: Tensor, act: Any, targets: list[Tensor], sources: list[Tensor]) -> Work:
        self.before(len(self.log))
        if self.num_aborts:
            raise RuntimeError("the communicator was aborted")
        self.log.append((name, own.numel()))
        self.latest = Work(self, list(zip(targets, sources, strict=True)))
        self._jobs.put((act, self.latest))
        return self.latest

    def _work(self) -> None:
        while True:
            act, work = self._jobs.get()
            try:
                started = act()
                while not started.is_completed():  # native code that waits does not bear the interpreter's end
                    time.sleep(0.0005)
                started.wait()
            except RuntimeError:
                return  # a link between GPUs does not tell that the other end is gone
            work.is_done = True
            work.is_over.set()


class Work:
    def __init__(self, group: StandInGroup, copies: Any = ()) -> None:
        self._group, self._copies = group, copies
        self.is_over, self.is_done = threading.Event(), False

    def wait(self) -> None:
        self.is_over.wait(self._group.patience_s)
        if self.is_done:
            for target, source in self._copies:
                target.copy_(source)
        elif self.is_over.is_set():
            raise RuntimeError("the communicator was aborted")


def strategy_on_accelerator(overlap: bool | None = False, **options: Any) -> ts.Strategy:
    """Return a strategy with one replica on the accelerator in each process, and a group of its own for these."""
    loading.load()
    if _BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(_BACKEND, StandInGroup, devices=[loading.NAME])
    communication = ts.experimental.CommunicationOptions(overlap=overlap, **options)
    return ts.MultiWorkerMirroredStrategy(devices=[DEVICE], communication_options=communication)


def lose_a_rank(how: str, reads: str, path: str) -> Any:
    """Train until rank 1 is lost in a sum for which rank 0 waits, in it or where the program reads a number."""
    job = Job(strategy_on_accelerator())
    model, optimizer = job.make(net)
    group = groups[-1]
    native_groups._ON_ITS_WAY_S = 0.5
    # The stand-in's events know nothing of the group.
    native_groups.NativeBackend.is_blocked = lambda _: not group.latest.is_over.is_set()  # type: ignore[method-assign]
    if job.rank == 1:
        group.before = _killed if how == "kill" else _failing
    elif reads != "in the sum":
        group.patience_s = 0.2

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        model(x.to(DEVICE)).square().sum().backward()
        optimizer.step()
        if reads != "in the sum":
            group.synchronize()
        if reads == "an error" and group.num_aborts:
            raise RuntimeError("the accelerator does not answer")

    errors = [_error_of(lambda x=x: job.run(step, x)) for _, x in job.batches(6)]
    if job.rank == 1:
        time.sleep(10)  # it lives on
    errors.append(_error_of(lambda: ts.train.Checkpoint(model=model).save(path)))
    return errors, [file.name for file in Path(path).parent.iterdir()], group.num_aborts


def _killed(number: int) -> None:
    if number == 4:
        time.sleep(1.0)  # the other one waits by now
        os.kill(os.getpid(), signal.SIGKILL)


def _failing(number: int) -> None:
    if number == 4:
        raise ValueError("boom")


def _error_of(act: Any) -> str:
    try:
        act()
    except (ts.errors.ReplicaFailedError, ValueError) as error:
        return str(error)
    return ""


def train_out_of_step(overlap: bool, in_a_thread: bool, **options: Any) -> tuple[list[float], list[Any], list[int]]:
    """Train with other collectives amid backward passes, which come sooner on some ranks; return weights and orders."""
    job = Job(strategy_on_accelerator(overlap, **options))
    model, optimizer = job.make(net)
    draw = random.Random(job.rank)
    for layer in model:
        layer.register_full_backward_hook(lambda *_: time.sleep(draw.random() / 100))

    def collectives() -> None:
        for _ in range(3):
            time.sleep(draw.random() / 100)
            ts.get_replica_context().all_reduce("SUM", torch.ones(5, device=DEVICE))

    def step(i: int, x: Tensor) -> None:
        optimizer.zero_grad()
        loss = model(x.to(DEVICE)).square().sum()
        if in_a_thread:
            thread = threading.Thread(target=loss.backward)
            thread.start()
            collectives()
            thread.join()
        elif i % 3 or job.rank == 1:  # now and then some ranks have sums under way in the other collectives
            loss.backward()
            collectives()
        else:
            collectives()
            loss.backward()
        optimizer.step()

    job.run_batches(step)
    values = torch.cat([parameter.detach().cpu().flatten() for parameter in model.parameters()])
    return values.tolist(), groups[-1].log, job.taken


def train_with_buckets(sizes: list[int]) -> list[tuple[list[float], list[int]]]:
    """Train with several sizes of buckets; return for each the weights, and how many sums each step has started."""
    found = []
    for size in sizes:
        job = Job(strategy_on_accelerator(overlap=True, bytes_per_pack=size))

        def wide() -> nn.Module:
            return nn.Sequential(nn.Linear(5, 700), nn.Tanh(), nn.Linear(700, 700), nn.Linear(700, 3)).double()

        model, optimizer = job.make(wide, lr=1e-4)

        def step(x: Tensor, model: Any = model, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            model(x.to(DEVICE)).square().sum().backward()
            optimizer.step()

        for _, x in job.batches(NUM_STEPS):
            job.run(step, x)
        values = torch.cat([parameter.detach().cpu().flatten()[:50] for parameter in model.parameters()])
        starts = "".join("s" if event == "start" else "|" for event in job.events if event != "step").split("|")
        found.append((values.tolist(), [len(part) for part in starts]))
    return found


def bring_another_kind() -> str:
    """Rank 1 brings a CPU where the others bring accelerators; return the error."""
    loading.load()
    if _BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(_BACKEND, StandInGroup, devices=[loading.NAME])
    devices = [DEVICE if int(os.environ["RANK"]) == 0 else "cpu:0"]
    try:
        ts.MultiWorkerMirroredStrategy(devices=devices)
    except RuntimeError as error:
        return f"{len(groups)} groups: {error}"
    return "no error"


def main(rank_that_dies: str) -> None:
    """Rank 0 ends its program with sums under way, alone or after the other one has died."""
    job = Job(strategy_on_accelerator(overlap=True, bytes_per_pack=400))
    model, optimizer = job.make(net)

    def step(i: int, x: Tensor) -> None:
        optimizer.zero_grad()
        if i < 7 or job.rank == 0:
            model(x.to(DEVICE)).square().sum().backward()
        if i < 7:
            optimizer.step()

    job.run_batches(step)
    if job.early._opened.num_started != (0 if job.rank else 3):
        raise SystemExit("no sum was under way")
    if rank_that_dies == "1" and job.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1.0)


if __name__ == "__main__":
    import sys

    from tests.collectives import native_programs  # what the backend is registered with, by its name

    native_programs.main(*sys.argv[1:])
