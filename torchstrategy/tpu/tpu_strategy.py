"""Synchronous training on TPUs, through XLA."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from torchstrategy.base.context import Frame
from torchstrategy.base.devices import Placement
from torchstrategy.base.log import info_once, logger, warn_once
from torchstrategy.base.options import CommunicationOptions, ReduceOp, RunOptions
from torchstrategy.base.values import DistributedValues, PerReplica, shares_of
from torchstrategy.cluster_resolver.detect import find_job
from torchstrategy.cluster_resolver.tpu import TPUClusterResolver
from torchstrategy.errors import InvalidArgumentError
from torchstrategy.replicas.adapters import replicas_of
from torchstrategy.replicas.distributed_variables import DistributedVariable
from torchstrategy.replicas.hosting import Hosting
from torchstrategy.replicas.metric_states import is_metric
from torchstrategy.replicas.on_read import SyncOnReadVariable
from torchstrategy.strategies.replica_values import Scope, inputs_of
from torchstrategy.strategies.strategy import Strategy
from torchstrategy.tpu.compilations import Compilations
from torchstrategy.tpu.device_values import SplitValues, as_split, gather_split, reduce_split
from torchstrategy.tpu.groups import had_examples, make_groups
from torchstrategy.tpu.process_hosting import ProcessHosting, join_processes
from torchstrategy.tpu.protocols import SpmdReplicaContext
from torchstrategy.tpu.spmd_hosting import SpmdHosting
from torchstrategy.tpu.trace import Trace
from torchstrategy.xla import runtime
from torchstrategy.xla.system import require_initialized

__all__ = ["TPUStrategy"]


class TPUStrategy(Strategy):
    """One replica on each TPU core, or on each of XLA's virtual CPU devices.

    One process drives all devices of its host. XLA compiles one program for all of them, so the replica function is
    called once (once for each size that the replicas' shares have) and sees its replica's view: its share of the batch,
    its losses, its gradients. ``replica_id_in_sync_group`` is a tensor there. What follows the replica in Python, such
    as ``.item()`` or ``if loss > 1``, is refused: use ``torch.where``, or return the value.

    Decorate the function that calls ``run`` with ``ts.function``: what it does is then one graph.

    Args:
        tpu_cluster_resolver: where the TPU is; ``None`` means this host's.
        experimental_device_assignment: how many devices make one replica: all of them (one replica whose tensors
            ``experimental_split_to_logical_devices`` spreads over them) or one.
        experimental_spmd_xla_partitioning: as in tf, needed to split tensors over a replica's devices.
        check_every: as for ``ts.MirroredStrategy``, where each process drives one chip.

    Raises:
        ImportError: torch_xla is not installed, or does not fit to torch.
        RuntimeError: the TPU system is not initialised: ``ts.tpu.experimental.initialize_tpu_system``.
        ValueError: the assignment asks for something else.

    Example:
        >>> resolver = ts.cluster_resolver.TPUClusterResolver("local")
        >>> ts.config.experimental_connect_to_cluster(resolver)
        >>> topology = ts.tpu.experimental.initialize_tpu_system(resolver)
        >>> strategy = ts.TPUStrategy(resolver)
    """

    hosting: Any

    def __init__(
        self,
        tpu_cluster_resolver: TPUClusterResolver | None = None,
        experimental_device_assignment: Any = None,
        experimental_spmd_xla_partitioning: bool = False,  # noqa: FBT001, FBT002 - tf's signature
        *,
        check_every: int = 1000,
    ) -> None:
        self._resolver = tpu_cluster_resolver
        self._allows_sizes = True
        self._partitions = experimental_spmd_xla_partitioning
        self._system = require_initialized()
        self.runtime = runtime = self._system.runtime
        self._compilations = Compilations(runtime)
        if not runtime.is_spmd:
            self._join_processes(check_every)
            return
        num_local = runtime.num_local_devices
        if _devices_per_replica(experimental_device_assignment, runtime.num_devices) > 1:
            placement = Placement(1, 0, (runtime.device,))
        else:
            first = runtime.process_index * num_local
            placement = Placement(runtime.num_devices, first, (runtime.device,), replicas_per_copy=num_local)
        super().__init__(placement, check_every=check_every)
        self._system.register(self)
        logger.info(
            "Using TPUStrategy with %d replicas on %d %s devices (%s)",
            placement.num_replicas, runtime.num_devices, runtime.hardware, runtime.name,
        )  # fmt: skip

    def _join_processes(self, check_every: int) -> None:
        """Meet the other processes, each of which drives one device."""
        job = find_job()
        if job is None:
            raise RuntimeError("The TPU system was initialised for one of several processes, but there is one only.")
        workers, placement = join_processes(job, self.runtime, CommunicationOptions(), type(self).__name__)
        super().__init__(placement, workers, check_every=check_every)
        self._system.register(self)
        logger.info(
            "Using TPUStrategy with one %s device in each of %d processes (%s)",
            self.runtime.hardware, workers.size, self.runtime.name,
        )  # fmt: skip

    @property
    @override
    def cluster_resolver(self) -> Any:
        return self._resolver

    @property
    @override
    def is_chief(self) -> bool:
        return super().is_chief if self.workers is not None else self.runtime.process_index == 0

    @property
    def num_compilations(self) -> int:
        """How many programs this process has compiled for its devices. Not in tf."""
        return self.runtime.num_compilations()

    @override
    def scope(self) -> Any:
        self._system.check()
        # Modules are made on the host, with the host's random numbers, and sent to the devices together.
        return Scope(self, Frame(self, None), None)

    @override
    def _make_hosting(self, *, concurrent: bool, check_every: int) -> Hosting:
        if self.workers is not None:
            return ProcessHosting(self, self.placement, self.workers, self.record, self.runtime)
        return SpmdHosting(self, self.placement, self.record, self.runtime)

    @override
    def _check_options(self, options: RunOptions) -> None:
        if not isinstance(options, RunOptions):
            raise TypeError(f"options must be a ts.RunOptions. Received: {options!r}")
        if options.experimental_bucketizing_dynamic_shape or options.experimental_xla_options is not None:
            info_once(
                "experimental_bucketizing_dynamic_shape and experimental_xla_options have no effect: shapes are static "
                "here, and torch_xla takes options for its compiler from the variable XLA_FLAGS only."
            )
        self._allows_sizes = options.experimental_enable_dynamic_batch_size

    @override
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        self._system.check()
        self._allows_sizes = True
        return super().run(fn, args, kwargs, options)

    @override
    def sync_buffers(self) -> None:
        if self.workers is not None:
            super().sync_buffers()
            return
        self._require_cross_replica()
        self._take_up_new()
        self.hosting.average_buffers()

    @override
    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        is_spmd = self.workers is None and self.num_replicas_in_sync > 1 and not self._in_replica_context()
        if is_spmd and is_metric(value):
            self._take_up_new()
            with replicas_of(value) as copies:  # to look at
                return tuple(copies)
        if isinstance(value, Tensor) and is_spmd and not isinstance(value, DistributedVariable):
            rows = self.hosting.state.rows(value)
            if rows is not None:
                return SplitValues(self.runtime, [rows], (0,) * self.placement.num_local).values
            if self.extended.variable_created_in_scope(value):
                return (value,) * self.placement.num_local
        return super().experimental_local_results(value)

    def experimental_assign_to_logical_device(self, tensor: Tensor, logical_device_id: int) -> Tensor:
        """Put a tensor on one of its replica's devices.

        Args:
            tensor: a tensor on the strategy's device.
            logical_device_id: the device's position among those of the replica.

        Returns:
            The tensor. XLA's partitioner decides where a tensor of a program lives; one that is not split lives on all
            devices of the replica, this one included.

        Raises:
            ValueError: there is no such device.
        """
        if not 0 <= logical_device_id < self._num_logical:
            raise ValueError(
                f"`logical_core_id` to assign must be less than the number of devices of a replica, "
                f"{self._num_logical}. Received: {logical_device_id}"
            )
        return self.experimental_replicate_to_logical_devices(tensor)

    def experimental_split_to_logical_devices(self, tensor: Tensor, partition_dimensions: Sequence[int]) -> Tensor:
        """Split a tensor over its replica's devices.

        Args:
            tensor: a tensor on the strategy's device, of ``n`` dimensions.
            partition_dimensions: into how many parts each of the ``n`` dimensions is split; their product is the number
                of the replica's devices, or 1.

        Returns:
            The same tensor.

        Raises:
            ValueError: the numbers don't fit to the tensor or to the devices.
            RuntimeError: the strategy was made without ``experimental_spmd_xla_partitioning``.
        """
        parts = list(partition_dimensions)
        if len(parts) != tensor.dim():
            raise ValueError(
                f"`partition_dimensions` must have one number for each of the tensor's {tensor.dim()} dimensions. "
                f"Received: {parts}"
            )
        product = torch.Size(parts).numel()
        if product == 1:
            return self.experimental_replicate_to_logical_devices(tensor)
        if product != self._num_logical:
            raise ValueError(
                f"The product of `partition_dimensions` must be the number of a replica's devices, "
                f"{self._num_logical}. Received: {parts}"
            )
        if not self._partitions:
            raise RuntimeError(
                "Make the strategy with TPUStrategy(..., experimental_spmd_xla_partitioning=True) to split tensors."
            )
        return self.runtime.split(tensor, parts)

    def experimental_replicate_to_logical_devices(self, tensor: Tensor) -> Tensor:
        """Let each of a replica's devices hold all of a tensor.

        Args:
            tensor: a tensor on the strategy's device.

        Returns:
            The same tensor.
        """
        return self.runtime.replicate(tensor) if self._num_logical > 1 else tensor

    @property
    def _num_logical(self) -> int:
        return self.runtime.num_devices // self.num_replicas_in_sync

    @override
    def _run_replicas(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.record.has_new:
            self._compilations.forget()
        self._compilations.note(fn, (args, kwargs))
        result = self._run_spmd(fn, args, kwargs) if self.workers is None else super()._run_replicas(fn, args, kwargs)
        if not runtime.in_function():
            warn_once(
                "`run` was called outside a `ts.function`: each call is a graph of its own, and what is done with its "
                "results another one. Decorate the function that calls `run` with `@ts.function`."
            )
        runtime.cut(self.runtime, self._after_graph)
        return result

    def _after_graph(self) -> None:
        self._compilations.look()
        if self.workers is None:
            self.hosting.comparisons.check()

    def _run_spmd(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Trace ``fn`` for all replicas of this process."""
        hosting = self.hosting
        arguments = inputs_of(self, 0, (args, kwargs)) if self.num_replicas_in_sync == 1 else (args, kwargs)
        shares = shares_of(arguments)
        groups = make_groups(self.runtime, self.placement, arguments, shares)
        if groups.count > 1 and not self._allows_sizes:
            raise InvalidArgumentError(
                "The replicas' arguments differ in shape, which experimental_enable_dynamic_batch_size=False forbids. "
                "Drop the last batch, or choose a batch size that the number of replicas divides."
            )
        contexts = [
            SpmdReplicaContext(hosting, self, group, groups.first_member(group), (args, kwargs))
            for group in range(groups.count)
        ]
        outer, self._running = self._running, tuple(contexts)
        try:
            with contextlib.ExitStack() as modes:
                if torch.is_inference_mode_enabled():  # XLA's tensors need versions, which inference tensors lack
                    modes.enter_context(torch.inference_mode(mode=False))
                    modes.enter_context(torch.no_grad())
                return hosting.call(fn, arguments, Trace(self.runtime, groups, had_examples(shares, groups)), contexts)
        except Exception as error:
            self._explain(error, contexts)
            raise
        finally:
            self._running = outer

    @override
    def _all_reduce_columns(
        self, op: ReduceOp, columns: Sequence[Sequence[Tensor]], operation: str
    ) -> list[list[Tensor]]:
        if self.workers is not None:
            return super()._all_reduce_columns(op, columns, operation)
        results: list[list[Tensor]] = self.hosting.all_reduce(op, columns, operation)
        return results

    @override
    def _reduce_leaf(self, op: ReduceOp, leaf: Any, axis: Any) -> Any:
        split = self._as_split(leaf)
        if split is not None:
            return reduce_split(op, split, axis)
        reduced = super()._reduce_leaf(op, leaf, axis)
        # A plain value counts once for each replica, of which this process has one copy.
        return reduced if axis is None or op is ReduceOp.MEAN else reduced * self.placement.replicas_per_copy

    @override
    def _gather_leaf(self, leaf: Any, axis: int) -> Any:
        split = self._as_split(leaf)
        return super()._gather_leaf(leaf, axis) if split is None else gather_split(split, axis)

    def _as_split(self, leaf: Any) -> SplitValues | None:
        if self.workers is not None:
            return None
        if isinstance(leaf, SyncOnReadVariable) and leaf.serves_all:
            leaf = PerReplica(leaf.values)
        return as_split(self.runtime, leaf) if isinstance(leaf, DistributedValues) else None


def _devices_per_replica(assignment: Any, num_devices: int) -> int:
    if assignment is None:
        return 1
    num = int(assignment.num_cores_per_replica)
    if num not in (1, num_devices):
        raise ValueError(
            f"experimental_device_assignment has {num} of {num_devices} devices for each replica. torch_xla can give "
            "each replica one device, or one replica all of them."
        )
    return num
