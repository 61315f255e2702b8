"""One process for each XLA device: the caller's thread is the replica, as with one process for each GPU.

Nothing here is traced for several replicas. What differs from other devices: objects are made on the host and sent, a
region watches the function, which seeds the device's random numbers from the replica's own stream and corrects what
torch_xla computes otherwise, and the strategy cuts what was traced into graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel
from typing_extensions import override

from torchstrategy.base.context import Frame
from torchstrategy.base.devices import Placement
from torchstrategy.base.job import Job
from torchstrategy.base.options import CommunicationOptions
from torchstrategy.base.values import shares_of
from torchstrategy.collectives.process_group import WorkerGroup, join
from torchstrategy.replicas.hosting import DirectHosting
from torchstrategy.replicas.metric_states import is_metric
from torchstrategy.replicas.record import Record
from torchstrategy.replicas.runner import MergeRequest
from torchstrategy.tpu.optimizer_steps import prepare_step, send_state
from torchstrategy.tpu.region import Region
from torchstrategy.tpu.trace import make_region
from torchstrategy.xla.runtime import TpuRuntime

__all__ = ["ProcessHosting", "join_processes", "send_to_device"]


def join_processes(
    job: Job, runtime: TpuRuntime, options: CommunicationOptions, strategy: str
) -> tuple[WorkerGroup, Placement]:
    """Meet the other processes of a job in which each drives one XLA device.

    Args:
        job: the processes.
        runtime: this process's device; it has been started.
        options: how long to wait for the others, and the size of gradient buckets.
        strategy: the strategy's class, which must be the same everywhere.

    Returns:
        The processes, and where the replicas are: replica ``i`` on the device of rank ``i``.

    Raises:
        DisagreementError: the processes are not set up alike.
        RuntimeError: the processes can't meet, or don't drive one device each.
        DeadlineExceededError: one did not come.
        ReplicaFailedError: one failed.
    """
    workers = join(job, (runtime.device,), options, strategy, None, runtime)
    return workers, Placement(workers.size, workers.rank, (runtime.device,))


class ProcessHosting(DirectHosting):
    """One replica in this process, on an XLA device.

    Args:
        strategy: the strategy.
        placement: where its replicas are.
        workers: the processes.
        record: what the strategy's scopes recorded.
        runtime: the device.
    """

    def __init__(
        self, strategy: Any, placement: Placement, workers: WorkerGroup, record: Record, runtime: TpuRuntime
    ) -> None:
        super().__init__(strategy, placement, workers, record)
        self._runtime = runtime
        self._replica_id = placement.local_replica_ids[0]
        self._region: Region | None = None
        record.prepare = prepare_step

    @override
    def run(self, frames: Sequence[Frame], fn: Callable[..., Any], calls: Sequence[tuple[Any, Any]]) -> list[Any]:
        shares = shares_of(calls[0])
        is_empty = len(shares) == 1 and not shares[0].shares[self._replica_id]
        region = make_region(self._runtime, 1, is_empty=is_empty)
        outer, self._region = self._region, region
        try:
            # Without autograd's threads, so that the region sees the backward pass, too.
            with torch.autograd.set_multithreading_enabled(False):
                return super().run(frames, _inside(region, fn), calls)
        finally:
            self._region = outer

    @override
    def meet(self, local_id: int, request: MergeRequest) -> Any:
        if self._region is None:
            return super().meet(local_id, request)
        with self._region.paused():
            return super().meet(local_id, request)

    @override
    def adopt_new(self) -> None:
        for obj in self._record.peek_new():
            send_to_device(obj, self._runtime.device)
        super().adopt_new()


def _inside(region: Region, fn: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with region:
            return fn(*args, **kwargs)

    return call


def send_to_device(obj: Any, device: torch.device) -> None:
    """Move what was made on the host to a device; parameters and buffers stay the objects that they are.

    Args:
        obj: a recorded object: of modules and optimizers the tensors are moved.
        device: where to.
    """
    if isinstance(obj, nn.Module):
        for module in obj.modules():
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                is_read_on_host = name == "n_averaged" and isinstance(module, AveragedModel)
                if tensor is not None and tensor.device != device and not is_read_on_host:
                    _move(tensor, device)
            if is_metric(module):
                module.to(device)  # its states are plain attributes
    elif isinstance(obj, Optimizer):
        send_state(obj, device)


def _move(tensor: Tensor, device: torch.device) -> None:
    moved = tensor.detach().to(device)
    moved = nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved
    if tensor.grad is not None:
        moved.grad = tensor.grad.to(device)
    # Not torch.utils.swap_tensors, which refuses a tensor that has weak references, such as an LSTM's weights.
    hooks = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    torch._C._swap_tensor_impl(tensor, moved)
    tensor._backward_hooks, tensor._post_accumulate_grad_hooks = hooks
