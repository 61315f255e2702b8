"""Synchronous training on the devices of one host."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from torchstrategy.cluster_resolver.torchrun import TorchrunEnvironment
from torchstrategy.collectives.cross_device_ops import CrossDeviceOps
from torchstrategy.collectives.process_group import WorkerGroup
from torchstrategy.collectives.rendezvous import meet
from torchstrategy.devices import Placement, full_device_name, local_devices, visible_devices
from torchstrategy.log import logger
from torchstrategy.options import CommunicationOptions
from torchstrategy.strategy import Strategy

__all__ = ["MirroredStrategy"]


class MirroredStrategy(Strategy):
    """One replica on each device of one host, with mirrored variables and summed gradients.

    In a plain Python process the replicas live in this process. Under ``torchrun`` on one host the processes join: each
    brings its ``devices``, by default the GPU of its local rank, or one CPU replica.

    Args:
        devices: this process's devices, such as ``["/gpu:0", "/gpu:1"]`` or ``["cpu:0", "cpu:1"]``; ``None`` means all
            visible GPUs, or one CPU replica if there are none.
        cross_device_ops: how the replicas of one process combine tensors; ``None`` means NCCL for GPUs and
            ``ReductionToOneDevice`` otherwise.
        communication_options: how gradients travel between processes.
        concurrent: run this process's replicas at the same time instead of in turns. Random numbers are then not
            reproducible on CPU.
        check_every: number of runs between two searches for diverging replicas in one process.

    Raises:
        ValueError: a device is not there (the message lists those that are), or named twice.
        RuntimeError: the job spans several hosts, or its processes bring different numbers of devices.

    Example:
        >>> strategy = ts.MirroredStrategy(devices=["cpu:0", "cpu:1"])
        >>> strategy.num_replicas_in_sync
        2
    """

    def __init__(
        self,
        devices: Sequence[str | torch.device] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        communication_options: CommunicationOptions | None = None,
        concurrent: bool = False,
        check_every: int = 1000,
    ) -> None:
        environment = TorchrunEnvironment.detect(os.environ)
        options = communication_options or CommunicationOptions()
        workers = None
        if environment is None:
            own = local_devices(devices)
            placement = Placement(len(own), 0, own)
        else:
            own = _devices_of_rank(devices, environment)
            workers = _join(environment, own, options)
            placement = Placement(len(own) * workers.size, len(own) * workers.rank, own)
        super().__init__(
            placement,
            workers,
            cross_device_ops=cross_device_ops,
            communication_options=options,
            concurrent=concurrent,
            check_every=check_every,
        )
        names = tuple(full_device_name(device) for device in own)
        where = "" if workers is None else f" in each of {workers.size} processes ({workers.implementation.name})"
        logger.info("Using MirroredStrategy with devices %s%s", names, where)


def _devices_of_rank(
    devices: Sequence[str | torch.device] | None, environment: TorchrunEnvironment
) -> tuple[torch.device, ...]:
    if environment.local_world_size != environment.world_size:
        raise RuntimeError(
            f"MirroredStrategy is for one host, but torchrun started {environment.world_size} processes, "
            f"{environment.local_world_size} of them here. Several hosts need MultiWorkerMirroredStrategy, which this "
            "version does not have yet."
        )
    if devices is not None:
        return local_devices(devices)
    accelerators = [name for name in visible_devices() if not name.startswith("cpu")]
    if not accelerators:
        return (torch.device("cpu", 0),)
    if environment.local_rank >= len(accelerators):
        raise RuntimeError(
            f"torchrun started {environment.local_world_size} processes, but only {len(accelerators)} accelerators are "
            f"visible: {', '.join(accelerators)}. Start at most that many, or pass devices=['cpu:0']."
        )
    return (torch.device(accelerators[environment.local_rank]),)


def _join(
    environment: TorchrunEnvironment, own: tuple[torch.device, ...], options: CommunicationOptions
) -> WorkerGroup:
    meeting = meet(
        environment.master_addr,
        environment.master_port,
        environment.rank,
        environment.world_size,
        hosted=environment.agent_store,
        attempt=environment.restart_count,
        timeout_s=options.timeout_seconds,
    )
    if own[0].type == "cuda":
        torch.cuda.set_device(own[0])
    workers = WorkerGroup(meeting, own[0].type, options)
    brought = workers.exchange("joining the MirroredStrategy", [str(device) for device in own])
    kinds = [[device.split(":")[0] for device in row] for row in brought]
    if any(row != kinds[0] for row in kinds):
        raise RuntimeError(
            "Every process must bring as many devices, of the same kinds:\n"
            + "\n".join(f"  rank {rank}: {row}" for rank, row in enumerate(brought))
        )
    return workers
