"""What a strategy's training takes of the memory of each compute device and of the host, as the kernel counts it."""

from __future__ import annotations

import gc
import mmap
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import profiles
import torch
from torch import Tensor, nn

import torchstrategy as ts

# Bits in /proc/self/pagemap; a page of a file belongs to memory that others may map, too.
_PRESENT, _SWAPPED, _OF_FILE = 63, 62, 61


class Held(NamedTuple):
    """Bytes of one kind of tensors: a replica's own, and those of memory that it shares."""

    own: int
    shared: int


def measure(kind: str, devices: list[str] | None, options: dict[str, Any], run_path: Path) -> dict[str, Any]:
    """Train for some steps and return what this process's replicas hold, and by how much the process has grown.

    Args:
        kind: ``"mirrored"`` or ``"central"``.
        devices: of this process.
        options: as in conf/benchmarks/central_storage.yaml.
        run_path: a folder for the trace that they may ask for; a profiler takes memory as well.
    """
    width = options["width"]
    before = resident_bytes()
    strategy = ts.MirroredStrategy(devices) if kind == "mirrored" else ts.experimental.CentralStorageStrategy(devices)
    with strategy.scope():
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(options["layers"])))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    batches = strategy.experimental_distribute_dataset(torch.ones(16 * options["steps"], width), batch_size=16)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        ts.nn.compute_average_loss(model(x).square().mean(1), global_batch_size="actual").backward()
        optimizer.step()

    def held() -> dict[str, Held]:
        parameters = list(model.parameters())
        state = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]
        return {
            "parameters": count(parameters),
            "gradients": count(p.grad for p in parameters if p.grad is not None),
            "state": count(state),
        }

    with profiles.make(options, run_path, strategy) as profile:
        for batch in profile.steps(batches):
            strategy.run(step, args=(batch,))
    gc.collect()
    replicas = strategy.experimental_local_results(strategy.run(held))
    return {
        "devices": [str(device) for device in strategy.placement.devices],
        "replicas": [{part: list(numbers) for part, numbers in replica.items()} for replica in replicas],
        "growth": resident_bytes() - before,
    }


def count(tensors: Iterable[Tensor]) -> Held:
    """Return how many bytes of some tensors are in pages of this process's own (or on an accelerator), how many not."""
    own = shared = 0
    for tensor in tensors:
        if tensor.device.type != "cpu":
            own += tensor.nbytes
            continue
        first, last = tensor.data_ptr() // mmap.PAGESIZE, (tensor.data_ptr() + tensor.nbytes - 1) // mmap.PAGESIZE
        with open("/proc/self/pagemap", "rb", buffering=0) as pages:
            pages.seek(8 * first)
            flags = torch.frombuffer(bytearray(pages.read(8 * (last - first + 1))), dtype=torch.int64)
        is_own = ((flags >> _PRESENT | flags >> _SWAPPED) & 1 == 1) & (flags >> _OF_FILE & 1 == 0)
        num_own = round(float(is_own.double().mean()) * tensor.nbytes)
        own, shared = own + num_own, shared + tensor.nbytes - num_own
    return Held(own, shared)


def resident_bytes() -> int:
    """Return what this process takes of the host's memory; pages that several processes map are shared out."""
    rollup = Path("/proc/self/smaps_rollup").read_text()
    found = re.search(r"^Pss:\s+(\d+) kB", rollup, re.MULTILINE)
    return 1024 * int(found[1]) if found else 0
