"""``reduce`` and ``gather`` over the replicas of this process and, if there are several, over the processes.

The functions take one tensor for each local replica, without autograd; the semantics are ``tf.distribute``'s. Where
autograd is to differentiate them, the gradient is that of the sum of all replicas' losses, as there: the backward of an
all-reduce is an all-reduce of the upstream gradients, so every replica must run the same backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchstrategy.base.devices import kind_of
from torchstrategy.base.names import dtype_name
from torchstrategy.base.options import ReduceOp
from torchstrategy.base.values import PerReplica
from torchstrategy.collectives.cross_device_ops import CrossDeviceOps
from torchstrategy.collectives.process_group import WorkerGroup
from torchstrategy.collectives.summing import as_bytes
from torchstrategy.errors import InvalidArgumentError

__all__ = [
    "all_reduce",
    "check_addable",
    "check_gather_axis",
    "check_joinable",
    "differentiable_all_gather",
    "differentiable_all_reduce",
    "dtype_of_sum",
    "gather",
    "gather_rows",
    "gather_sizes",
    "mean_of_total",
    "reduce",
    "reduction_axes",
]

Devices = Sequence[torch.device]
Reduce = Callable[[Sequence[Tensor]], Sequence[Tensor]]


def all_reduce(
    op: ReduceOp,
    columns: Sequence[Sequence[Tensor]],
    devices: Devices,
    ops: CrossDeviceOps,
    workers: WorkerGroup | None,
    num_replicas: int,
    operation: str,
) -> list[list[Tensor]]:
    """Combine several values over all replicas.

    Args:
        op: SUM or MEAN; the mean of integers is float64.
        columns: for each value, one tensor for each local replica; equal shapes.
        devices: the local replicas' devices.
        ops: combines the local tensors.
        workers: the processes; ``None`` if there is only this one.
        num_replicas: replicas over all processes.
        operation: what to call this in error messages.

    Returns:
        For each value, one result for each local replica, each a tensor of its own.

    Raises:
        InvalidArgumentError: shapes or dtypes differ, or a dtype can't be added.
    """
    if op is ReduceOp.MEAN and num_replicas > 1:
        columns = [_to_add(column) for column in columns]
    if len(devices) == 1:
        for column in columns:
            check_addable(column[0])
        rows = [[column[0]] for column in columns]
        if workers is None:
            return [[tensor.clone() if op is ReduceOp.SUM else mean_of_total(tensor, 1)] for (tensor,) in rows]
    else:
        # With several processes the division comes last, so that the sum is divided once.
        local_op = op if workers is None else ReduceOp.SUM
        reduced = ops.batch_reduce(local_op, [(PerReplica(column), devices) for column in columns])
        rows = [list(value.values) for value in reduced]
    if workers is None:
        return rows
    totals = workers.all_reduce([row[0] for row in rows], operation)
    if op is ReduceOp.MEAN:
        totals = [mean_of_total(total, num_replicas) for total in totals]
    if len(devices) == 1:
        return [[total] for total in totals]
    return [list(ops.broadcast(total, devices).values) for total in totals]


def reduce(
    op: ReduceOp,
    tensors: Sequence[Tensor],
    axis: Any,
    devices: Devices,
    ops: CrossDeviceOps,
    workers: WorkerGroup | None,
    num_replicas: int,
    operation: str | None = None,
) -> Tensor:
    """Combine one tensor for each replica into one tensor; with ``axis``, over that axis as well.

    With ``axis``, SUM adds each replica's sum and MEAN divides the total by the number of elements over all replicas,
    so uneven and empty replicas count right.

    Raises:
        ValueError: ``axis`` is not an axis of every tensor.
        InvalidArgumentError: the shapes left after the reduction differ.
    """
    if operation is None:
        operation = f"Strategy.reduce({op.name})" if axis is None else f"Strategy.reduce({op.name}, axis={axis})"
    if axis is None:
        return all_reduce(op, [tensors], devices[: len(tensors)], ops, workers, num_replicas, operation)[0][0]
    sums = []
    count = 0
    for tensor in tensors:
        axes = reduction_axes(axis, tensor.dim())
        check_addable(tensor)
        sums.append(tensor.sum(dim=axes, dtype=dtype_of_sum(op, tensor)) if axes else tensor)
        elements = 1
        for a in axes:
            elements *= tensor.shape[a]
        count += elements
    counts = [torch.tensor(count)] + [torch.tensor(0)] * (len(tensors) - 1)
    total, total_count = (
        row[0]
        for row in all_reduce(
            ReduceOp.SUM, [sums, counts], devices[: len(tensors)], ops, workers, num_replicas, operation
        )
    )
    return total if op is ReduceOp.SUM else mean_of_total(total, total_count.to(total.device))


def reduction_axes(axis: Any, rank: int) -> tuple[int, ...]:
    """Return the non-negative axes that ``axis`` names.

    Raises:
        TypeError: ``axis`` is no integer or tuple of integers.
        ValueError: it is out of range.
    """
    given = axis if isinstance(axis, tuple) else (axis,)
    axes = []
    for a in given:
        if isinstance(a, bool) or not hasattr(a, "__index__"):
            raise TypeError(f"axis must be an integer, a tuple of integers, or None. Received: {axis!r}")
        index = a.__index__()
        if not -rank <= index < rank:
            raise ValueError(
                f"axis {index} is out of range: a replica's value has {rank} dimensions. "
                "Pass axis=None to combine whole values."
            )
        axes.append(index % rank)
    return tuple(dict.fromkeys(axes))


def check_gather_axis(axis: Any, tensor: Any) -> int:
    """Return the axis to concatenate on.

    Raises:
        TypeError: the value is not a dense tensor.
        ValueError: the value is a scalar, or ``axis`` is not one of its non-negative axes.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"Only tensors can be gathered. Received: {tensor!r}")
    if isinstance(axis, bool) or not hasattr(axis, "__index__"):
        raise ValueError(f"axis must be an integer. Received: {axis!r}")
    index: int = axis.__index__()
    if tensor.is_sparse:
        raise TypeError("Sparse tensors can't be gathered. Use `value.to_dense()`.")
    if tensor.dim() == 0:
        raise ValueError("Can't gather scalars: there is no axis to concatenate on. Use `value.reshape(1)`.")
    if not 0 <= index < tensor.dim():
        raise ValueError(f"axis must be from 0 to {tensor.dim() - 1} for a value of {tensor.dim()} dimensions. "
                         f"Received: {index}")  # fmt: skip
    return index


def gather(tensors: Sequence[Tensor], axis: int, workers: WorkerGroup | None, operation: str) -> Tensor:
    """Concatenate all replicas' tensors in the order of replicas.

    Raises:
        InvalidArgumentError: the tensors differ in another dimension or in dtype.
    """
    first = tensors[0]
    for tensor in tensors[1:]:
        check_joinable(first, tensor, axis)
    local = torch.cat([tensor.to(first.device) for tensor in tensors], axis)
    if workers is None:
        return local
    parts = workers.all_gather_tensors(local, operation)
    for rank, part in enumerate(parts):
        check_joinable(local, part, axis, f"{operation}, ranks {workers.rank} and {rank}: ")
    return torch.cat(parts, axis)


def gather_rows(rows: Sequence[Tensor], workers: WorkerGroup | None, operation: str) -> Tensor:
    """Return all replicas' rows in the order of replicas, for layers, which ask for that many times in a step.

    Where a native backend such as NCCL carries them, no message comes before them: a rank would wait for all others in
    each layer before it gives its device more to do. The next record compares what the ranks have made since the last.
    Not so where sums begin during ``backward`` on the same devices: only records could tell their order against these.

    Args:
        rows: one for each local replica, of one length and dtype on all replicas.
        workers: the processes; ``None`` if there is only this one.
        operation: what to call this in error messages.

    Returns:
        Shape ``[replicas, length]``; the same bits on all ranks.

    Raises:
        InvalidArgumentError: the lengths or dtypes differ.
    """
    own = [row.unsqueeze(0) for row in rows]
    device = rows[0].device
    backend = None if workers is None else workers.routes.accelerators.get(device.type)
    is_free = workers is None or not (kind_of(device).is_traced or device.type in workers.early_device_types)
    if workers is None or backend is None or not is_free:
        return gather(own, 0, workers, operation)
    local = gather(own, 0, None, operation)
    workers.note(operation, f"{dtype_name(local.dtype)}{list(local.shape)}")
    everything = local.new_empty((workers.size, local.numel()))
    wait = backend.start_all_gather([as_bytes(part) for part in everything], as_bytes(local.view(-1)))
    workers._finish(wait, operation, backend, local.nbytes)
    return everything.view(-1, local.shape[1])


def gather_sizes(sizes: Sequence[int], workers: WorkerGroup | None, operation: str) -> list[int]:
    """Return the sizes of all replicas in the order of replicas."""
    if workers is None:
        return list(sizes)
    return [size for part in workers.exchange(f"{operation} (sizes)", list(sizes)) for size in part]


def check_joinable(first: Tensor, other: Tensor, axis: int, where: str = "") -> None:
    """Raise ``InvalidArgumentError`` unless two tensors can be concatenated on an axis."""
    same = first.dim() == other.dim() and all(
        a == b for i, (a, b) in enumerate(zip(first.shape, other.shape, strict=True)) if i != axis
    )
    if not same or first.dtype != other.dtype:
        raise InvalidArgumentError(
            f"{where}Gathered values must have one dtype and may differ in size along axis {axis} only. Received: "
            f"{tuple(first.shape)} {first.dtype} and {tuple(other.shape)} {other.dtype}"
        )


def check_addable(tensor: Tensor) -> None:
    """Raise ``InvalidArgumentError`` if a tensor's dtype has no sum."""
    if tensor.dtype is torch.bool:
        raise InvalidArgumentError("Can't reduce values of dtype bool. Convert them, for example with `.int()`.")


def _to_add(column: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the replicas' values in the dtype to add them in for a mean; those that differ stay, and are refused."""
    dtypes = {tensor.dtype for tensor in column}
    return [tensor.to(dtype_of_sum(ReduceOp.MEAN, tensor)) for tensor in column] if len(dtypes) == 1 else column


def dtype_of_sum(op: ReduceOp, tensor: Tensor) -> torch.dtype:
    """Return the dtype to add in: of integers whose mean is wanted, one in which the sum does not overflow."""
    is_whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)
    return torch.int64 if op is ReduceOp.MEAN and is_whole else tensor.dtype


def mean_of_total(total: Tensor, count: int | Tensor) -> Tensor:
    """Return the mean of so many values with this sum; that of integers is float64."""
    if isinstance(count, int) and count == 1:
        return total.clone()
    if not (total.is_floating_point() or total.is_complex()):
        total = total.double()
    return total / count


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, reduce: Reduce, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.reduce = reduce
        return tuple(reduce(tensors))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, *_AllReduce.apply(ctx.reduce, *grads)  # type: ignore[no-untyped-call]


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gather: Any, reduce: Reduce, axis: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        gathered, offsets = gather(tensors)
        ctx.reduce, ctx.axis, ctx.offsets = reduce, axis, offsets
        ctx.sizes = [tensor.shape[axis] for tensor in tensors]
        return tuple(gathered)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        totals = _AllReduce.apply(ctx.reduce, *grads)  # type: ignore[no-untyped-call]
        own = [
            _own_part(total, ctx.axis, offset, size)
            for total, offset, size in zip(totals, ctx.offsets, ctx.sizes, strict=True)
        ]
        return None, None, None, *own


def _own_part(total: Tensor, axis: int, offset: int | Tensor, size: int) -> Tensor:
    """Return a replica's part of what was gathered; its offset is a tensor where one program computes all replicas."""
    if isinstance(offset, Tensor):
        return total.index_select(axis, offset + torch.arange(size, device=total.device))
    return total.narrow(axis, offset, size)


def differentiable_all_reduce(reduce: Reduce, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return ``reduce(tensors)``; gradients go through the same ``reduce``."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return _AllReduce.apply(reduce, *tensors)  # type: ignore[no-any-return,no-untyped-call]
    return reduce(tensors)


def differentiable_all_gather(
    gather: Callable[[Sequence[Tensor]], tuple[Sequence[Tensor], Sequence[int | Tensor]]],
    reduce: Reduce,
    axis: int,
    tensors: Sequence[Tensor],
) -> Sequence[Tensor]:
    """Return ``gather(tensors)[0]``; a gradient is summed over replicas, and each takes its own part of it."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return _AllGather.apply(gather, reduce, axis, *tensors)  # type: ignore[no-any-return,no-untyped-call]
    return gather(tensors)[0]
