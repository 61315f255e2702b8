"""How the replicas of one process combine their tensors: ``tf.distribute.CrossDeviceOps`` and its implementations.

An implementation sees one tensor for each local replica and returns one for each destination. It runs while all
replicas wait, without autograd.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from torchstrategy.base.devices import canonical_device, tensor_device
from torchstrategy.base.log import warn_once
from torchstrategy.base.options import CommunicationOptions, ReduceOp
from torchstrategy.base.values import DistributedValues, Mirrored, PerReplica
from torchstrategy.collectives.summing import pack, plan_buckets, plan_packs, unpack
from torchstrategy.errors import InvalidArgumentError

__all__ = ["CrossDeviceOps", "HierarchicalCopyAllReduce", "NcclAllReduce", "ReductionToOneDevice", "sum_gradients"]

Devices = Sequence[torch.device]


class CrossDeviceOps(ABC):
    """Base class of cross-device reductions; subclass it to bring your own.

    A subclass overrides ``reduce_implementation`` and ``broadcast_implementation``, and ``batch_reduce_implementation``
    if it can reduce many tensors faster than one by one.

    Example:
        >>> class Verbose(ts.CrossDeviceOps):
        ...     def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
        ...         total = sum(per_replica_value.values)
        ...         if reduce_op is ts.ReduceOp.MEAN:
        ...             total = total / len(per_replica_value.values)
        ...         return self.broadcast_implementation(total, destinations)
        ...     def broadcast_implementation(self, tensor, destinations):
        ...         return ts.Mirrored(tensor.to(device="cpu", copy=True) for _ in destinations)
        >>> strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=Verbose())
    """

    #: Number of buffers that gradients are packed into, for the log line; 0 means that nothing is packed.
    num_packs = 0

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        per_replica_value: DistributedValues,
        destinations: Devices,
        options: CommunicationOptions | None = None,
    ) -> Mirrored:
        """Combine one tensor for each replica and put the result on every destination.

        Args:
            reduce_op: SUM or MEAN.
            per_replica_value: one tensor for each replica; equal shapes.
            destinations: where the result goes; one tensor for each.
            options: hints; ``None`` means the defaults.

        Returns:
            The results, in the order of ``destinations``.

        Raises:
            ValueError: ``per_replica_value`` is not a distributed value of tensors.
            InvalidArgumentError: the shapes differ, or the dtype can't be added.
        """
        op = ReduceOp.parse(reduce_op)
        _check_tensors(per_replica_value)
        return self.reduce_implementation(op, per_replica_value, destinations, options or CommunicationOptions())

    def batch_reduce(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[DistributedValues, Devices]],
        options: CommunicationOptions | None = None,
    ) -> list[Mirrored]:
        """Combine several values, like ``reduce`` on each.

        Args:
            reduce_op: SUM or MEAN.
            value_destination_pairs: values and their destinations.
            options: hints; ``None`` means the defaults.

        Returns:
            One result for each pair.

        Raises:
            ValueError: a value is not a distributed value of tensors.
            InvalidArgumentError: the shapes of a value differ.
        """
        op = ReduceOp.parse(reduce_op)
        for value, _ in value_destination_pairs:
            _check_tensors(value)
        return self.batch_reduce_implementation(op, value_destination_pairs, options or CommunicationOptions())

    def broadcast(self, tensor: Tensor, destinations: Devices) -> Mirrored:
        """Copy a tensor to every destination.

        Args:
            tensor: any tensor.
            destinations: where the copies go.

        Returns:
            The copies, in the order of ``destinations``.
        """
        return self.broadcast_implementation(tensor, destinations)

    @abstractmethod
    def reduce_implementation(
        self, reduce_op: ReduceOp, per_replica_value: DistributedValues, destinations: Devices,
        options: CommunicationOptions,
    ) -> Mirrored:  # fmt: skip
        """Carry out ``reduce``; the arguments have been checked."""

    def batch_reduce_implementation(
        self, reduce_op: ReduceOp, value_destination_pairs: Sequence[tuple[DistributedValues, Devices]],
        options: CommunicationOptions,
    ) -> list[Mirrored]:  # fmt: skip
        """Carry out ``batch_reduce``; by default value by value."""
        return [self.reduce_implementation(reduce_op, value, to, options) for value, to in value_destination_pairs]

    @abstractmethod
    def broadcast_implementation(self, tensor: Tensor, destinations: Devices) -> Mirrored:
        """Carry out ``broadcast``."""


class ReductionToOneDevice(CrossDeviceOps):
    """Copy all tensors to one device, combine them there, and copy the result to all devices.

    Args:
        reduce_to_device: where to combine; ``None`` means the first destination.
        accumulation_fn: combines a list of tensors into their sum; ``None`` adds them in the order of replicas.

    Example:
        >>> strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=ts.ReductionToOneDevice("cpu:0"))
    """

    def __init__(
        self,
        reduce_to_device: str | torch.device | None = None,
        accumulation_fn: Callable[[list[Tensor]], Tensor] | None = None,
    ) -> None:
        self.reduce_to_device = None if reduce_to_device is None else canonical_device(reduce_to_device)
        self.accumulation_fn = accumulation_fn or _add_in_order

    @override
    def reduce_implementation(
        self, reduce_op: ReduceOp, per_replica_value: DistributedValues, destinations: Devices,
        options: CommunicationOptions,
    ) -> Mirrored:  # fmt: skip
        device = tensor_device(self.reduce_to_device or destinations[0])
        total = self.accumulation_fn(_on_device(per_replica_value.values, device))
        return self.broadcast_implementation(_finish(reduce_op, total, len(per_replica_value.values)), destinations)

    @override
    def broadcast_implementation(self, tensor: Tensor, destinations: Devices) -> Mirrored:
        return _copies(tensor, destinations)


class _PackedAllReduce(CrossDeviceOps):
    """All-reduces tensors packed into ``num_packs`` buffers of each dtype; into more than would be too large else."""

    def __init__(self, num_packs: int = 1) -> None:
        if not isinstance(num_packs, int) or num_packs < 0:
            raise ValueError(f"num_packs must be an integer of at least 0. Received: {num_packs!r}")
        self.num_packs = num_packs

    @override
    def reduce_implementation(
        self, reduce_op: ReduceOp, per_replica_value: DistributedValues, destinations: Devices,
        options: CommunicationOptions,
    ) -> Mirrored:  # fmt: skip
        return self.batch_reduce_implementation(reduce_op, [(per_replica_value, destinations)], options)[0]

    @override
    def batch_reduce_implementation(
        self, reduce_op: ReduceOp, value_destination_pairs: Sequence[tuple[DistributedValues, Devices]],
        options: CommunicationOptions,
    ) -> list[Mirrored]:  # fmt: skip
        results: list[Mirrored | None] = [None] * len(value_destination_pairs)
        groups: dict[object, list[int]] = {}
        for index, (value, to) in enumerate(value_destination_pairs):
            first = value.values[0]
            if first.is_sparse:
                total = _finish(reduce_op, _add_in_order(_on_device(value.values, first.device)), len(value.values))
                results[index] = _copies(total, to)
            else:
                groups.setdefault((first.dtype, tuple(to)), []).append(index)
        for indices in groups.values():
            firsts = [value_destination_pairs[i][0].values[0] for i in indices]
            for bucket in plan_packs(firsts, self.num_packs, options.bucket_bytes):
                chosen = [indices[i] for i in bucket]
                pairs = [value_destination_pairs[i] for i in chosen]
                for i, result in zip(chosen, self._reduce_packed(reduce_op, pairs), strict=True):
                    results[i] = result
        return [result for result in results if result is not None]

    @override
    def broadcast_implementation(self, tensor: Tensor, destinations: Devices) -> Mirrored:
        return _copies(tensor, destinations)

    def _sum_in_place(self, rows: Sequence[list[Tensor]], bucket_bytes: int) -> None:
        """Write the sums of the replicas' tensors, of one dtype, to these; packs one bucket at a time."""
        for bucket in plan_packs(rows[0], self.num_packs, bucket_bytes):
            columns = [[row[k] for k in bucket] for row in rows]
            is_flat = len(bucket) == 1 and all(column[0].is_contiguous() for column in columns)
            buffers = [column[0].view(-1) if is_flat else pack(column) for column in columns]
            for own, total, column in zip(buffers, self._all_reduce(buffers), columns, strict=True):
                if total is not own or not is_flat:
                    torch._foreach_copy_(column, unpack(total, column))

    def _reduce_packed(self, reduce_op: ReduceOp, pairs: Sequence[tuple[DistributedValues, Devices]]) -> list[Mirrored]:
        destinations = pairs[0][1]
        num_replicas = len(pairs[0][0].values)
        columns = [[value.values[i] for value, _ in pairs] for i in range(num_replicas)]
        sums = self._all_reduce([pack(column) for column in columns])
        totals = [_finish(reduce_op, total, num_replicas) for total in sums]
        if len(destinations) != num_replicas:
            totals = list(_copies(totals[0], destinations).values)
        placed = [total.to(tensor_device(to)) for total, to in zip(totals, destinations, strict=True)]
        unpacked = [unpack(total, columns[0]) for total in placed]
        return [Mirrored(row) for row in zip(*unpacked, strict=True)]

    def _all_reduce(self, buffers: list[Tensor]) -> list[Tensor]:
        """Return, for each replica, a buffer of its own with the sum."""
        raise NotImplementedError


class NcclAllReduce(_PackedAllReduce):
    """All-reduce between the GPUs of one process: each adds up a part of every buffer, and gives the sum to the others.

    The name is tf's; torch's NCCL has one GPU in each process. Sums are in the order of replicas. Replicas that share a
    device add on one. No buffer is larger than ``bytes_per_pack`` of the communication options.

    Args:
        num_packs: buffers that the tensors of one dtype are packed into, at least; 0 packs nothing.

    Raises:
        ValueError: ``num_packs`` is negative.

    Example:
        >>> ts.NcclAllReduce(num_packs=2).num_packs
        2
    """

    @override
    def _all_reduce(self, buffers: list[Tensor]) -> list[Tensor]:
        if len({buffer.device for buffer in buffers}) < len(buffers):
            warn_once("NcclAllReduce needs one GPU for each replica; these replicas are added on one device instead.")
            total = _add_in_order(_on_device(buffers, buffers[0].device))
            return [total.to(buffer.device, copy=True) for buffer in buffers]
        for k, parts in enumerate(zip(*(buffer.tensor_split(len(buffers)) for buffer in buffers), strict=True)):
            total = _add_in_order(_on_device(parts, parts[k].device))
            for part in parts:
                part.copy_(total, non_blocking=True)
        return buffers


class HierarchicalCopyAllReduce(_PackedAllReduce):
    """All-reduce in two levels: within each half of the replicas, then between the halves, then back.

    Args:
        num_packs: buffers that the tensors of one dtype are packed into, at least; 0 packs nothing.

    Raises:
        ValueError: ``num_packs`` is negative.

    Example:
        >>> strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=ts.HierarchicalCopyAllReduce())
    """

    @override
    def _all_reduce(self, buffers: list[Tensor]) -> list[Tensor]:
        if len(buffers) < 2:
            return buffers
        middle = (len(buffers) + 1) // 2
        leaders = [_add_in_order(_on_device(half, half[0].device)) for half in (buffers[:middle], buffers[middle:])]
        total = leaders[0] + leaders[1].to(leaders[0].device)
        second = total.to(leaders[1].device)
        return [(total if i < middle else second).to(buffer.device, copy=True) for i, buffer in enumerate(buffers)]


#: Those whose ways with many tensors are known; a subclass may have its own.
_PACKED = (NcclAllReduce, HierarchicalCopyAllReduce)


def sum_gradients(
    ops: CrossDeviceOps,
    rows: Sequence[Sequence[Tensor]],
    may_overwrite: Sequence[bool],
    destinations: Devices,
    options: CommunicationOptions,
) -> list[list[Tensor]]:
    """Sum gradients over the replicas of this process, with few calls for many tensors.

    Args:
        ops: how they are combined.
        rows: for each replica its gradients, in one order.
        may_overwrite: for each parameter, whether the sum may be written to the gradients' memory, which no other
            tensor uses.
        destinations: the replicas' devices.
        options: hints.

    Returns:
        For each replica the sums.
    """
    sums = [list(row) for row in rows]
    in_place: list[int] = []
    if True in may_overwrite and (type(ops) in _PACKED or _adds_in_order(ops, destinations)):
        in_place = [k for k, may in enumerate(may_overwrite) if may]
    if in_place:
        _sum_in_place(ops, [[row[k] for k in in_place] for row in rows], options)
    if len(in_place) < len(may_overwrite):
        rest = sorted(set(range(len(may_overwrite))) - set(in_place))
        pairs = [(PerReplica([row[k] for row in rows]), destinations) for k in rest]
        for k, value in zip(rest, ops.batch_reduce(ReduceOp.SUM, pairs, options), strict=True):
            for row, total in zip(sums, value.values, strict=True):
                row[k] = total
    return sums


def _sum_in_place(ops: CrossDeviceOps, rows: Sequence[list[Tensor]], options: CommunicationOptions) -> None:
    total, *others = rows
    shapes, dtypes = [part.shape for part in total], [part.dtype for part in total]
    are_alike = torch.bool not in dtypes
    for row in others:
        are_alike = are_alike and [part.shape for part in row] == shapes and [part.dtype for part in row] == dtypes
    if not are_alike:
        for parts in zip(*rows, strict=True):
            _check_tensors(PerReplica(list(parts)))
    if isinstance(ops, _PackedAllReduce):
        for dtype in dict.fromkeys(dtypes):
            ops._sum_in_place([[part for part in row if part.dtype is dtype] for row in rows], options.bucket_bytes)
        return
    is_copied = len({row[0].device for row in rows}) > 1  # before it is added
    buckets = plan_buckets(total, options.bucket_bytes) if is_copied else [range(len(total))]
    for bucket in buckets:
        sums = [total[k] for k in bucket]
        for row in others:
            torch._foreach_add_(sums, _on_device([row[k] for k in bucket], sums[0].device))
        for row in others:
            torch._foreach_copy_([row[k] for k in bucket], sums)


def _adds_in_order(ops: CrossDeviceOps, destinations: Devices) -> bool:
    """Say whether ops do nothing but add tensors to the first replica's, in the order of replicas."""
    if type(ops) is not ReductionToOneDevice or ops.accumulation_fn is not _add_in_order:
        return False
    return tensor_device(ops.reduce_to_device or destinations[0]) == tensor_device(destinations[0])


def _check_tensors(value: DistributedValues) -> None:
    if not isinstance(value, DistributedValues) or not all(isinstance(v, Tensor) for v in value.values):
        raise ValueError(f"Expected a PerReplica of tensors. Received: {value!r}")
    first = value.values[0]
    if any(v.shape != first.shape for v in value.values):
        shapes = [tuple(v.shape) for v in value.values]
        raise InvalidArgumentError(f"The replicas' values must have equal shapes to be reduced. Received: {shapes}")
    if first.dtype is torch.bool:
        raise InvalidArgumentError("Can't reduce values of dtype bool. Convert them, for example with `.int()`.")
    if any(v.dtype != first.dtype for v in value.values):
        dtypes = [v.dtype for v in value.values]
        raise InvalidArgumentError(f"The replicas' values must have equal dtypes to be reduced. Received: {dtypes}")


def _finish(reduce_op: ReduceOp, total: Tensor, num_replicas: int) -> Tensor:
    if reduce_op is ReduceOp.SUM or num_replicas == 1:
        return total
    if not (total.is_floating_point() or total.is_complex()):
        total = total.double()  # as tf: the mean of integers is float64
    return total / num_replicas


def _add_in_order(tensors: list[Tensor]) -> Tensor:
    if tensors[0].is_sparse:  # concatenate, as tf does with IndexedSlices; duplicates are summed when coalesced
        return torch.sparse_coo_tensor(
            torch.cat([t._indices() for t in tensors], 1),
            torch.cat([t._values() for t in tensors]),
            tensors[0].shape,
            check_invariants=False,
        )
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


def _on_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    # A copy to the host that does not block is read before it is there.
    return [tensor.to(device, non_blocking=device.type != "cpu") for tensor in tensors]


def _copies(tensor: Tensor, destinations: Devices) -> Mirrored:
    """One tensor of its own for each destination; the first takes the given one."""
    first, *others = [tensor_device(device) for device in destinations]
    return Mirrored([tensor.to(first), *(tensor.to(device, copy=True) for device in others)])
