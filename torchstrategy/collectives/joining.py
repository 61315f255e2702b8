"""How a strategy's processes come together: which devices each one brings, and that all are set up alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.distributed import DistError

from torchstrategy.base.devices import local_devices, visible_devices
from torchstrategy.base.job import Job
from torchstrategy.base.options import CommunicationOptions
from torchstrategy.base.version import __version__
from torchstrategy.collectives.cross_device_ops import CrossDeviceOps, HierarchicalCopyAllReduce
from torchstrategy.collectives.process_group import WorkerGroup
from torchstrategy.collectives.rendezvous import meet, raise_lost_store

if TYPE_CHECKING:
    from torchstrategy.xla.runtime import TpuRuntime

__all__ = ["devices_of_process", "join"]


def devices_of_process(devices: Sequence[str | torch.device] | int | None, job: Job | None) -> tuple[torch.device, ...]:
    """Return the devices of this process's replicas.

    Args:
        devices: the user's choice; ``None`` means the accelerator of the process's number on its host where the
            launcher gives one, else all visible accelerators, else one CPU replica.
        job: the processes, ``None`` if there is one.

    Raises:
        ValueError: a device is not there, or named twice.
        RuntimeError: the launcher started more processes on this host than there are accelerators.
    """
    if devices is not None or job is None or job.local_rank is None:
        return local_devices(devices)
    accelerators = [name for name in visible_devices() if not name.startswith("cpu")]
    if not accelerators:
        return (torch.device("cpu", 0),)
    if job.source != "torchrun" and job.local_size == 1:
        return local_devices(None)
    if job.local_rank >= len(accelerators):
        raise RuntimeError(
            f"{job.source} started {job.local_size} processes on this host, but only {len(accelerators)} accelerators "
            f"are visible: {', '.join(accelerators)}. Start at most that many, or pass devices=['cpu:0']."
        )
    return (torch.device(accelerators[job.local_rank]),)


def join(
    job: Job,
    own: tuple[torch.device, ...],
    options: CommunicationOptions,
    strategy: str,
    ops: CrossDeviceOps | None,
    runtime: TpuRuntime | None = None,
) -> WorkerGroup:
    """Meet the other processes of a job.

    Args:
        job: the processes.
        own: this process's devices.
        options: how they communicate.
        strategy: the strategy's class, which must be the same everywhere.
        ops: the user's choice of cross-device operations; ``HierarchicalCopyAllReduce`` means that the processes of a
            host share memory also where gloo is asked for.
        runtime: the device of a process that drives one XLA device; it has been started.

    Returns:
        The processes of the strategy.

    Raises:
        DisagreementError: the processes are not set up alike.
        RuntimeError: they bring different numbers or kinds of devices, or can't meet.
        DeadlineExceededError: one did not come.
        ReplicaFailedError: one failed.
    """
    description = {
        "cluster": str(job.cluster_spec.as_dict()),
        "torchstrategy": __version__,
        "torch": torch.__version__,
        "strategy": strategy,
        "communication options": str(options),
        "cross_device_ops": type(ops).__name__,
    }
    if runtime is not None:
        description["XLA"] = runtime.name
    rendezvous = meet(job, description, options.deadline_seconds)
    if own[0].type == "cuda":
        torch.cuda.set_device(own[0])
    hierarchical = True if isinstance(ops, HierarchicalCopyAllReduce) else None
    try:
        workers = WorkerGroup(
            rendezvous, own[0].type, options, hierarchical=hierarchical, runtime=runtime, num_local=len(own)
        )
    except DistError as error:
        raise_lost_store(job, rendezvous.watch, error)
    brought = workers.exchange(f"joining the {strategy}", [str(device) for device in own])
    kinds = [[device.split(":")[0] for device in row] for row in brought]
    if any(row != kinds[0] for row in kinds):
        raise RuntimeError(
            "Every process must bring as many devices, of the same kinds:\n"
            + "\n".join(f"  rank {rank}: {row}" for rank, row in enumerate(brought))
        )
    return workers
