"""Synchronous training on the devices of one host, whose parameters are kept once, on the host.

Every replica calls ``optimizer.step()``, as under any strategy. The replicas meet there: their gradients are summed,
the host's optimizer steps once on the host's memory, and all replicas see the result. A closure is called by all
replicas as often as the host's optimizer calls it.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from torchstrategy.base.context import current_replica_context, is_updating
from torchstrategy.base.devices import Placement, canonical_device, devices_of_process, full_device_name, names_for_log
from torchstrategy.base.job import Job
from torchstrategy.base.log import logger
from torchstrategy.base.options import CommunicationOptions, ReduceOp
from torchstrategy.cluster_resolver.detect import find_job, warn_of_independent_copies
from torchstrategy.cluster_resolver.torchrun import TorchrunClusterResolver
from torchstrategy.collectives.cross_device_ops import ReductionToOneDevice
from torchstrategy.collectives.process_group import join
from torchstrategy.gradients.summer import GradientSum, GradientSummer
from torchstrategy.replicas.copies import bind_step
from torchstrategy.replicas.host_memory import HostMemory
from torchstrategy.replicas.mirrored import bodies, resolve
from torchstrategy.replicas.on_read import AggregatingVariable, make_variable
from torchstrategy.replicas.record import optimizer_parameters, owner
from torchstrategy.replicas.runner import MergeRequest
from torchstrategy.replicas.variables import Variable, VariableOptions, make_copy
from torchstrategy.strategies.extended import StrategyExtended
from torchstrategy.strategies.strategy import Strategy

__all__ = ["CentralStorageStrategy"]

_OPERATION = "the update on the host"
_EVALUATE, _DONE = "evaluate", "done"
_NOTHING_CLEARED = "0,0"


class _Step(NamedTuple):
    """What one replica brings to an update."""

    gradients: GradientSum
    optimizer: Optimizer
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class HostUpdater:
    """Makes the updates of one strategy.

    Args:
        summer: sums gradients.
        memory: the host's.
        num_replicas: of the strategy, in all processes.
    """

    def __init__(self, summer: GradientSummer, memory: HostMemory, num_replicas: int) -> None:
        self._summer = summer
        self._memory = memory
        self._num_replicas = num_replicas

    def step(self, context: Any, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Step as one replica; every replica calls this."""
        closure = kwargs.get("closure", args[0] if args else None)
        if not callable(closure):
            payload = _Step(context.strategy.gradients.part_of(context, optimizer), optimizer, args, kwargs)
            return context._meet(MergeRequest(_OPERATION, self._step, payload))
        if context.num_replicas_in_sync > 1:
            context._sum(optimizer, uses_applied=True)  # those from before, as under any strategy
        parameters = optimizer_parameters(optimizer)
        evaluate = functools.partial(self._evaluate, context, optimizer, closure)
        if context.replica_id_in_sync_group == 0:
            if "closure" in kwargs:
                kwargs = {key: value for key, value in kwargs.items() if key != "closure"}
            else:
                args = args[1:]
            result = self._lead(context, optimizer, evaluate, args, kwargs)
        else:
            result = None
            while True:
                what, _, cleared = self._meet(context, optimizer, "").partition(" ")
                _clear(parameters, cleared)
                if what == _DONE:
                    break
                loss = evaluate()
                result = loss if result is None else result
        self._summer.ledger.note_step(parameters)
        return result

    def _step(self, parts: Sequence[_Step]) -> list[Any]:
        """Sum the gradients and update once, while all replicas wait."""
        if self._num_replicas > 1:
            self._summer([part.gradients for part in parts])
        first = parts[0]
        result, cleared = None, _NOTHING_CLEARED
        if self._memory.is_host:
            before = [_grad_stamp(parameter) for parameter in first.gradients.parameters]
            with self._memory.on_host(first.optimizer):
                result = _plain_step(first.optimizer)(*first.args, **first.kwargs)
            if before != [_grad_stamp(parameter) for parameter in first.gradients.parameters]:
                cleared = _cleared(first.optimizer)
        command = self._memory.finish(first.optimizer, cleared)
        for part in parts:
            _clear(part.gradients.parameters, command)
            self._summer.ledger.note_step(part.gradients.parameters)
        return [result] * len(parts)

    def _lead(
        self,
        context: Any,
        optimizer: Optimizer,
        evaluate: Callable[[], Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Step with a closure on replica 0; between its calls the optimizer is on the host."""
        on_host = [self._memory.on_host(optimizer)]

        def closure() -> Any:
            on_host.pop().__exit__(None, None, None)
            self._meet(context, optimizer, f"{_EVALUATE} {_cleared(optimizer)}")
            loss = evaluate()
            on_host.append(self._memory.on_host(optimizer))
            on_host[0].__enter__()
            return loss

        on_host[0].__enter__()
        try:
            result = _plain_step(optimizer)(closure, *args, **kwargs)
        finally:
            if on_host:
                on_host.pop().__exit__(None, None, None)
        self._meet(context, optimizer, f"{_DONE} {_cleared(optimizer)}")
        return result

    def _meet(self, context: Any, optimizer: Optimizer, command: str) -> str:
        """Let all replicas see what the host has; return what replica 0 wants them to do."""

        def merge(payloads: Sequence[tuple[Optimizer, str]]) -> list[str]:
            wanted = self._memory.finish(*payloads[0])
            return [wanted] * len(payloads)

        return str(context._meet(MergeRequest(_OPERATION, merge, (optimizer, command))))

    def _evaluate(self, context: Any, optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
        """Call one replica's closure and sum gradients and losses."""
        loss = closure()
        context.sum_gradients(optimizer)
        return context.all_reduce(ReduceOp.SUM, torch.as_tensor(loss).detach())


def step_on_host(obj: Any) -> None:
    """Let an optimizer that a strategy has taken up (the user's object) step on the host.

    Its class is changed, not its ``step``: schedulers wrap the class's.
    """
    if isinstance(obj, Optimizer) and not isinstance(obj, HostedOptimizer):
        cls: Any = type(obj)
        obj.__class__ = _hosted_class(cls)
        bind_step(obj, obj)


class HostedOptimizer:
    """Mixed in before an optimizer's class."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Step on the host, in ``run`` together with the other replicas."""
        optimizer = resolve(self)
        context = current_replica_context()
        updater = getattr(getattr(context, "strategy", None), "host_updater", None)
        if is_updating() or updater is None or owner(optimizer) is not context.strategy:
            return _plain_step(optimizer)(*args, **kwargs)
        if context.num_replicas_in_sync > 1:
            context.strategy.gradients.check(optimizer, context.local_id)
        return updater.step(context, optimizer, args, kwargs)

    step.hooked = True  # type: ignore[attr-defined]  # torch's hooks are called by the step that this one makes

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain: Any = type(self).__bases__[1]  # whose name this class has
        return object.__new__, (plain,), plain.__getstate__(self)


def _cleared(optimizer: Optimizer) -> str:
    """Return which parameters have no gradient, and which zeros, as bit masks: the optimizer may have cleared them."""
    grads = [parameter.grad for parameter in optimizer_parameters(optimizer)]
    values = [grad._values() if grad is not None and grad.is_sparse else grad for grad in grads]
    gone = sum((value is None) << k for k, value in enumerate(values))
    zeros = sum((value is not None and not bool(value.count_nonzero())) << k for k, value in enumerate(values))
    return f"{gone:x},{zeros:x}"


def _clear(parameters: Sequence[Tensor], masks: str) -> None:
    """Clear the gradients that replica 0's optimizer has cleared, in the same way."""
    gone, zeros = [int(mask, 16) for mask in masks.split(",")]
    for k, parameter in enumerate(parameters if gone | zeros else ()):
        if gone >> k & 1:
            parameter.grad = None
        elif zeros >> k & 1 and parameter.grad is not None:
            parameter.grad.detach().zero_()


def _grad_stamp(parameter: Tensor) -> tuple[int, int]:
    grad = parameter.grad
    return (0, 0) if grad is None else (id(grad), grad._version)


def _plain_step(optimizer: Any) -> Callable[..., Any]:
    plain: Any = type(optimizer).__bases__[1]
    return functools.partial(plain.step, optimizer)


@functools.cache
def _hosted_class(cls: Any) -> type:
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (HostedOptimizer, cls), names)


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
            self.record.prepare = step_on_host
        where = "" if workers is None else f" in each of {workers.size} processes ({workers.communication})"
        logger.info(
            "Using CentralStorageStrategy with compute_devices = %s%s, variable_device = %s",
            names_for_log(own),
            where,
            self.parameter_device,
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
                for body in bodies(obj)[1:]:
                    body.state.clear()  # the host has it
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
