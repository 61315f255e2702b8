"""Synchronous training on the devices of one host, whose parameters are kept once, on the host."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from torchstrategy.base.devices import Placement, canonical_device, full_device_name
from torchstrategy.base.job import Job
from torchstrategy.base.log import logger
from torchstrategy.base.options import CommunicationOptions
from torchstrategy.cluster_resolver.detect import find_job, warn_of_independent_copies
from torchstrategy.cluster_resolver.torchrun import TorchrunClusterResolver
from torchstrategy.collectives.cross_device_ops import ReductionToOneDevice
from torchstrategy.collectives.joining import devices_of_process, join
from torchstrategy.gradients.host_updates import HostUpdater, step_on_host
from torchstrategy.replicas.host_memory import HostMemory
from torchstrategy.replicas.on_read import AggregatingVariable, make_variable
from torchstrategy.replicas.variables import Variable, VariableOptions, make_copy
from torchstrategy.strategies.extended import StrategyExtended
from torchstrategy.strategies.strategy import Strategy

__all__ = ["CentralStorageStrategy"]

#: A device of another host: a job or a task is named, and it is not this process's.
_ELSEWHERE = re.compile(r"/job:(?!localhost\b)|/task:(?!0\b)|/replica:(?!0\b)")


class CentralStorageStrategy(Strategy):
    """One replica on each compute device of one host; parameters and optimizer state are kept once, on the host.

    Forward and backward passes run on all compute devices. Their gradients are summed on the parameter device, where
    the optimizer updates the one set of parameters and keeps its state; the replicas see the result. So a compute
    device needs memory for a copy of the parameters and for activations, but none for the state of optimizers; a
    replica on the CPU reads the host's parameters in place. The numbers are those of ``MirroredStrategy``.

    Under ``torchrun`` on one host the processes join: the chief is the host, whose memory the others see.

    Args:
        compute_devices: this process's devices, such as ``["/gpu:0", "/gpu:1"]`` or ``["cpu:0", "cpu:1"]``; ``None``
            means all visible GPUs (under ``torchrun`` the GPU of the process's number), or one CPU replica if there are
            none.
        parameter_device: where parameters, buffers and the state of optimizers are; ``None`` means the compute device
            if there is only one replica in all, and the CPU otherwise.
        communication_options: how gradients travel between processes.
        concurrent: run this process's replicas at the same time instead of in turns, each with its share
            of torch's threads. Results are the same. On the CPU, memory that is freed is then kept, see
            `ts.utils.keep_freed_memory`.
        check_every: number of runs between two searches for diverging replicas.

    Raises:
        ValueError: a device is not there, on another host, or named twice, or processes can't share it.
        RuntimeError: the job spans several hosts, or its processes bring different numbers of devices.

    Example:
        >>> strategy = ts.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"])
        >>> strategy.num_replicas_in_sync
        2
        >>> with strategy.scope():
        ...     v = ts.Variable(1.0, aggregation=ts.VariableAggregation.SUM)
        >>> strategy.reduce("mean", strategy.run(lambda: v.assign_add(torch.tensor(1.0))))  # the same everywhere
        tensor(3.)
    """

    def __init__(
        self,
        compute_devices: Sequence[str | torch.device] | int | None = None,
        parameter_device: str | torch.device | None = None,
        *,
        communication_options: CommunicationOptions | None = None,
        concurrent: bool = False,
        check_every: int = 1000,
    ) -> None:
        named = () if compute_devices is None or isinstance(compute_devices, int) else compute_devices
        for name in (*named, parameter_device):
            _check_local(name)
        job = find_job(TorchrunClusterResolver())
        if job is None:
            warn_of_independent_copies(type(self).__name__, os.environ)
        options = communication_options or CommunicationOptions()
        own = devices_of_process(compute_devices, None if job is None else _one_host(job))
        is_alone = len(own) == 1 and (job is None or job.size == 1)
        if parameter_device is None:
            parameter_device = own[0] if is_alone else "cpu:0"
        #: Where parameters, buffers and the state of optimizers are.
        self.parameter_device = canonical_device(parameter_device)
        if job is not None and job.size > 1 and self.parameter_device.type != "cpu":
            raise ValueError(
                f"parameter_device must be the CPU, whose memory the {job.size} processes share. Received: "
                f"{parameter_device!r}"
            )
        workers = None if job is None else join(job, own, options, type(self).__name__, None)
        rank, size = (0, 1) if workers is None else (workers.rank, workers.size)
        super().__init__(
            Placement(len(own) * size, len(own) * rank, own),
            workers,
            cross_device_ops=ReductionToOneDevice(self.parameter_device),
            communication_options=options,
            concurrent=concurrent,
            check_every=check_every,
        )
        #: ``None`` where the only replica is on the parameter device, so that there is nothing to keep elsewhere.
        self.host_updater: HostUpdater | None = None
        self._memory: HostMemory | None = None
        if not is_alone or own[0] != self.parameter_device:
            self._memory = self.hosting.run_hooks = HostMemory(self, self.parameter_device, check_every)
            self.host_updater = HostUpdater(self.gradients.summer, self._memory, self.num_replicas_in_sync)
        where = "" if workers is None else f" in each of {workers.size} processes ({workers.communication})"
        logger.info(
            "Using CentralStorageStrategy with compute_devices = %s%s, variable_device = %r",
            tuple(full_device_name(device) for device in own),
            where,
            full_device_name(self.parameter_device),
        )

    @property
    @override
    def extended(self) -> StrategyExtended:
        return _CentralExtended(self)

    @override
    def _make_variable(self, context: Any, value: Tensor, options: VariableOptions) -> Variable | None:
        if self.num_replicas_in_sync > 1:
            return make_variable(self, context, value, options, AggregatingVariable)
        variable: Variable = make_copy(Variable, value.to(self.placement.devices[0]), options)
        if context is None:
            self.record.add(variable)
        return variable

    @override
    def _after_adoption(self) -> None:
        if self._memory is None:
            return
        for obj in self.record:
            if isinstance(obj, Optimizer):
                step_on_host(obj)
        self._memory.take_up(self.hosting.slots())


class _CentralExtended(StrategyExtended):
    """Variables are single ones."""

    _strategy: CentralStorageStrategy

    @property
    @override
    def parameter_devices(self) -> tuple[str, ...]:
        """Full name of the device that holds variables."""
        return (full_device_name(self._strategy.parameter_device),)

    @override
    def _copies_of(self, v: Any) -> tuple[Any, ...]:
        return super()._copies_of(v)[:1]


def _check_local(name: Any) -> None:
    if isinstance(name, str) and _ELSEWHERE.search(name):
        raise ValueError(
            f"CentralStorageStrategy is for the devices of one host, but {name!r} is a device of another task. Use "
            "ts.ParameterServerStrategy, which keeps parameters on other hosts, or MultiWorkerMirroredStrategy."
        )


def _one_host(job: Job) -> Job:
    if job.local_size != job.size:
        raise RuntimeError(
            f"CentralStorageStrategy is for one host, but torchrun started {job.size} processes, {job.local_size} of "
            "them here. Use MultiWorkerMirroredStrategy or ts.ParameterServerStrategy."
        )
    return job
