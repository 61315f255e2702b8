"""Synchronous training on the devices of one host."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from torchstrategy.base.devices import Placement, devices_of_process, names_for_log
from torchstrategy.base.job import Job
from torchstrategy.base.log import logger
from torchstrategy.base.options import CommunicationOptions
from torchstrategy.cluster_resolver.detect import find_job, warn_of_independent_copies
from torchstrategy.cluster_resolver.torchrun import TorchrunClusterResolver
from torchstrategy.collectives.cross_device_ops import CrossDeviceOps
from torchstrategy.collectives.process_group import join
from torchstrategy.gradients.sharded_states import classes_to_shard, describe
from torchstrategy.strategies.strategy import Strategy

__all__ = ["MirroredStrategy"]


class MirroredStrategy(Strategy):
    """One replica on each device of one host, with mirrored variables and summed gradients.

    In a plain Python process the replicas live in this process. Under ``torchrun`` on one host the processes join: each
    brings its ``devices``, by default the GPU of its local rank, or one CPU replica.

    Args:
        devices: this process's devices, such as ``["/gpu:0", "/gpu:1"]`` or ``["cpu:0", "cpu:1"]``; a number means so
            many GPUs, or CPU replicas where there are no GPUs; ``None`` means all visible GPUs, or one CPU replica.
        cross_device_ops: how the replicas of one process combine tensors; ``None`` means NCCL for GPUs and
            ``ReductionToOneDevice`` otherwise.
        communication_options: how gradients travel between processes.
        concurrent: run this process's replicas at the same time instead of in turns, each with its share of torch's
            threads. Results are the same. On the CPU, memory that is freed is then kept, see
            `ts.utils.keep_freed_memory`.
        check_every: number of runs between two searches for diverging replicas in one process.
        shard_optimizer_states: split optimizer states over the processes, each with one replica: a process has those of
            some parameters, steps these, and gets the other weights (ZeRO stage 1). Numbers and checkpoints stay as
            they are. It is done for the optimizers of ``torch.optim`` that update each parameter by itself; a list
            names further classes that do. ``optimizer.state_dict()`` must then be called on every process.

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
        devices: Sequence[str | torch.device] | int | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        communication_options: CommunicationOptions | None = None,
        concurrent: bool = False,
        check_every: int = 1000,
        shard_optimizer_states: bool | Sequence[type[Optimizer]] = False,
    ) -> None:
        job = find_job(TorchrunClusterResolver())
        if job is None:
            warn_of_independent_copies(type(self).__name__, os.environ)
        options = communication_options or CommunicationOptions()
        own = devices_of_process(devices, None if job is None else _one_host(job))
        classes = classes_to_shard(shard_optimizer_states, own)
        name = type(self).__name__ + describe(classes)
        workers = None if job is None else join(job, own, options, name, cross_device_ops)
        rank, size = (0, 1) if workers is None else (workers.rank, workers.size)
        placement = Placement(len(own) * size, len(own) * rank, own)
        super().__init__(
            placement,
            workers,
            cross_device_ops=cross_device_ops,
            communication_options=options,
            concurrent=concurrent,
            check_every=check_every,
            sharded_classes=classes,
        )
        where = "" if workers is None else f" in each of {workers.size} processes ({workers.communication})"
        logger.info("Using MirroredStrategy with devices %s%s", names_for_log(own), where)


def _one_host(job: Job) -> Job:
    if job.local_size != job.size:
        raise RuntimeError(
            f"MirroredStrategy is for one host, but torchrun started {job.size} processes, {job.local_size} of them "
            "here. Use MultiWorkerMirroredStrategy."
        )
    return job
