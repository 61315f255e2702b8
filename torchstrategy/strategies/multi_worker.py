"""Synchronous training on several workers, each with one or several devices."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from typing_extensions import override

from torchstrategy.base.devices import Placement, devices_of_process, names_for_log
from torchstrategy.base.job import Job
from torchstrategy.base.later import explains_arguments
from torchstrategy.base.log import logger, warn_once
from torchstrategy.base.options import CommunicationImplementation, CommunicationOptions
from torchstrategy.cluster_resolver.detect import find_job
from torchstrategy.cluster_resolver.resolver import ClusterResolver
from torchstrategy.cluster_resolver.tf_config import TFConfigClusterResolver
from torchstrategy.collectives.cross_device_ops import CrossDeviceOps
from torchstrategy.collectives.process_group import join
from torchstrategy.collectives.routes import choose_implementation
from torchstrategy.gradients.sharded_states import classes_to_shard, describe
from torchstrategy.strategies.extended import StrategyExtended
from torchstrategy.strategies.strategy import Strategy

__all__ = ["ExperimentalMultiWorkerMirroredStrategy", "MultiWorkerMirroredStrategy"]


class MultiWorkerMirroredStrategy(Strategy):
    """One replica on each device of several workers, with mirrored variables and summed gradients.

    Every worker runs the same program. The processes are known from the given resolver, else from ``torchrun``, else
    from ``TF_CONFIG``, else from SLURM; without any of them this process trains alone. The first worker is the chief,
    unless the cluster has a task of that name; an evaluator stands alone, outside the group. ``bytes_per_pack``,
    ``timeout_seconds`` and the backend are set by ``communication_options``.

    Args:
        cluster_resolver: describes the cluster; ``None`` looks at the environment.
        communication_options: how gradients and values travel between workers.
        devices: this worker's devices, such as ``["cpu:0", "cpu:1"]``; ``None`` means the GPU of the process's number
            on its host where the launcher gives one, else all visible GPUs, else one CPU replica.
        cross_device_ops: how the replicas of one worker combine tensors; ``None`` means NCCL for GPUs and
            ``ReductionToOneDevice`` otherwise.
        concurrent: run this worker's replicas at the same time instead of in turns, each with its share
            of torch's threads. Results are the same. On the CPU, memory that is freed is then kept, see
            `ts.utils.keep_freed_memory`.
        check_every: number of runs between two searches for diverging replicas.
        shard_optimizer_states: split optimizer states over the processes, each with one replica: a process has those of
            some parameters, steps these, and gets the other weights (ZeRO stage 1). Numbers and checkpoints stay as
            they are. It is done for the optimizers of ``torch.optim`` that update each parameter by itself; a list
            names further classes that do. ``optimizer.state_dict()`` must then be called on every process.

    Raises:
        ValueError: the cluster is wrong, this task is a parameter server, or a device is not there.
        TypeError: an argument is of a wrong type.
        DisagreementError: the workers have different clusters, library versions, strategies or options.
        DeadlineExceededError: a worker did not come.
        RuntimeError: the workers can't meet, or bring different devices.

    Example:
        >>> strategy = ts.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"])  # one worker of two replicas
        >>> strategy.num_replicas_in_sync
        2
    """

    @explains_arguments(
        "How workers communicate is `communication_options=ts.experimental.CommunicationOptions(implementation=...)`; "
        "`communication=` is an argument of `ts.experimental.MultiWorkerMirroredStrategy`."
    )
    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        *,
        devices: Sequence[str | torch.device] | int | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        concurrent: bool = False,
        check_every: int = 1000,
        shard_optimizer_states: bool | Sequence[type[Optimizer]] = False,
    ) -> None:
        if communication_options is not None and not isinstance(communication_options, CommunicationOptions):
            raise ValueError(
                "communication_options must be ts.experimental.CommunicationOptions(...), for example with "
                "implementation='RING'. "
                f"Received: {communication_options!r}"
            )
        options = communication_options or CommunicationOptions()
        job = find_job(cluster_resolver, os.environ)
        own = devices_of_process(devices, job)
        classes = classes_to_shard(shard_optimizer_states, own)
        choose_implementation(options.implementation, own[0].type)  # what is wrong here needs no other worker
        if job is not None and job.task_type is not None:
            self._task = (job.task_type, job.task_id or 0)
        if job is not None and "ps" in job.cluster_spec.jobs:
            warn_once(
                f"The cluster has {job.cluster_spec.num_tasks('ps')} parameter server(s), which take no part: the "
                "workers train in step without them. They are for ParameterServerStrategy."
            )
        workers = None
        if job is not None and job.size > 1:
            workers = join(job, own, options, f"MultiWorkerMirroredStrategy{describe(classes)}", cross_device_ops)
        rank, size = (0, 1) if workers is None else (workers.rank, workers.size)
        super().__init__(
            Placement(len(own) * size, len(own) * rank, own),
            workers,
            cross_device_ops=cross_device_ops,
            communication_options=options,
            concurrent=concurrent,
            check_every=check_every,
            sharded_classes=classes,
        )
        known = None if job is None else job.resolver
        self._cluster_resolver = cluster_resolver or known or TFConfigClusterResolver()
        self._log(job, options)

    @property
    @override
    def cluster_resolver(self) -> Any:
        """The resolver that described the cluster."""
        return self._cluster_resolver

    @property
    @override
    def extended(self) -> StrategyExtended:
        """What tf keeps in ``StrategyExtended``; here ``experimental_between_graph`` is true."""
        return _WorkerExtended(self)

    def _log(self, job: Job | None, options: CommunicationOptions) -> None:
        """Say in one line what this worker found, as tf does."""
        implementation = options.implementation
        names = names_for_log(self.placement.devices, *self._task)
        if job is None or job.size == 1:
            logger.info(
                "Single-worker MultiWorkerMirroredStrategy with local_devices = %s, communication = %s",
                names,
                implementation,
            )
            if job is not None and job.task_type == "evaluator":
                logger.info("This process is the evaluator: it takes no part when the others train (%s)", job.reason)
            return
        logger.info(
            "MultiWorkerMirroredStrategy with cluster_spec = %s, task_type = %r, task_id = %r, num_workers = %d, "
            "local_devices = %s, communication = %s (%s)",
            job.cluster_spec.as_dict(),
            job.task_type,
            job.task_id,
            job.size,
            names,
            implementation,
            job.reason,
        )


class _AnyMultiWorker(type(MultiWorkerMirroredStrategy)):  # type: ignore[misc]
    """Makes every ``MultiWorkerMirroredStrategy`` an instance of the older class, as in tf."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, MultiWorkerMirroredStrategy)


class ExperimentalMultiWorkerMirroredStrategy(MultiWorkerMirroredStrategy, metaclass=_AnyMultiWorker):
    """tf's older form of ``MultiWorkerMirroredStrategy``, with the backend as first argument.

    Args:
        communication: the backend, or its name.
        cluster_resolver: describes the cluster; ``None`` looks at the environment.

    Raises:
        ValueError: there is no such backend; else as ``MultiWorkerMirroredStrategy``.

    Example:
        >>> strategy = ts.experimental.MultiWorkerMirroredStrategy(ts.experimental.CollectiveCommunication.RING)
        >>> isinstance(strategy, ts.MultiWorkerMirroredStrategy)
        True
    """

    @explains_arguments(
        "This older form takes `communication`, such as `ts.experimental.CommunicationImplementation.RING`, and "
        "`cluster_resolver`; `ts.MultiWorkerMirroredStrategy` takes `communication_options` and others."
    )
    def __init__(
        self,
        communication: CommunicationImplementation | str = CommunicationImplementation.AUTO,
        cluster_resolver: ClusterResolver | None = None,
    ) -> None:
        super().__init__(cluster_resolver, CommunicationOptions(implementation=communication))


ExperimentalMultiWorkerMirroredStrategy.__name__ = "MultiWorkerMirroredStrategy"


class _WorkerExtended(StrategyExtended):
    """Each worker runs the program by itself."""

    @property
    @override
    def experimental_between_graph(self) -> bool:
        return True
