"""``Strategy``: the public methods, checked here, over a place to host replicas and the collectives between them."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from types import CodeType
from typing import Any, NoReturn, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchstrategy.base import tree
from torchstrategy.base.context import Frame, current_frame, current_replica_context, raise_failures
from torchstrategy.base.devices import Placement, kind_of, tensor_device
from torchstrategy.base.later import explains_absent
from torchstrategy.base.log import (
    add_note,
    hide_own_frames,
    info_once,
    set_rank,
    show_info,
    warn_once,
    without_compiler,
)
from torchstrategy.base.options import AutoShardPolicy, CommunicationOptions, InputOptions, ReduceOp, RunOptions
from torchstrategy.base.values import LeafT, PerReplica, ValueContext, ValueT, local_results
from torchstrategy.collectives.cross_device_ops import CrossDeviceOps, NcclAllReduce, ReductionToOneDevice
from torchstrategy.collectives.process_group import WorkerGroup
from torchstrategy.collectives.reductions import all_reduce, gather, gather_rows, gather_sizes
from torchstrategy.data.distribute import distribute_dataset, distribute_from_function
from torchstrategy.data.distributed_dataset import DistributedDataset
from torchstrategy.data.numpy import make_numpy_dataset
from torchstrategy.data.own_streams import InputContext
from torchstrategy.errors import DeadlineExceededError, DisagreementError, UnavailableError
from torchstrategy.gradients.hooks import install, watch
from torchstrategy.gradients.ledger import GradientLedger
from torchstrategy.gradients.lone_values import serve_lone_values
from torchstrategy.gradients.replica_gradients import ReplicaGradients
from torchstrategy.gradients.sharded_states import ShardedStates
from torchstrategy.gradients.summer import GradientSummer
from torchstrategy.gradients.sync_batch_norm import serve_layers_of_torch
from torchstrategy.gradients.sync_check import check_sync
from torchstrategy.replicas.buffers import BufferSync
from torchstrategy.replicas.distributed_variables import DistributedVariable
from torchstrategy.replicas.divergence import LoneUpdates
from torchstrategy.replicas.hosting import DirectHosting, Hosting
from torchstrategy.replicas.mirrored import bodies, mirror_of
from torchstrategy.replicas.on_read import make_variable
from torchstrategy.replicas.record import Record, owner
from torchstrategy.replicas.threaded_hosting import ThreadedHosting
from torchstrategy.replicas.variables import Variable, VariableOptions
from torchstrategy.strategies.extended import StrategyExtended
from torchstrategy.strategies.replica_context import ReplicaContext
from torchstrategy.strategies.replica_values import (
    Scope,
    explain_misfit,
    gather_leaf,
    inputs_of,
    reduce_leaf,
    regroup_results,
    take_in,
    watched,
    without_graph,
)

__all__ = ["Strategy"]

_CROSS_REPLICA = (
    "Method requires being in cross-replica context, use get_replica_context().merge_call(). Inside `run`, "
    "call a function directly instead of with `run`, make no scope, and combine values with all_reduce and all_gather "
    "of `ts.get_replica_context()`."
)


@explains_absent("Strategy")
class Strategy:
    """How a program's state and computation are distributed; users make one of the subclasses.

    Args:
        placement: the replicas and their devices.
        workers: the processes of the job; ``None`` if there is only this one.
        cross_device_ops: how this process's replicas combine tensors; ``None`` chooses by device.
        communication_options: how gradients travel between processes; ``None`` means the defaults.
        concurrent: run this process's replicas at the same time instead of in turns.
        check_every: number of runs between two searches for diverging replicas.
        sharded_classes: split optimizer states over processes, of these classes as well as of torch's; ``None`` leaves
            all of them in each process.
    """

    #: Job and index of this process in the cluster, as its devices' names have them.
    _task: tuple[str, int] = ("localhost", 0)

    def __init__(
        self,
        placement: Placement,
        workers: WorkerGroup | None = None,
        *,
        cross_device_ops: CrossDeviceOps | None = None,
        communication_options: CommunicationOptions | None = None,
        concurrent: bool = False,
        check_every: int = 1000,
        sharded_classes: Sequence[type] | None = None,
    ) -> None:
        if cross_device_ops is not None and not isinstance(cross_device_ops, CrossDeviceOps):
            raise TypeError(
                "cross_device_ops must be an instance of a ts.CrossDeviceOps subclass, such as "
                f"ts.ReductionToOneDevice(). Received: {cross_device_ops!r}"
            )
        if check_every < 1:
            raise ValueError(f"check_every must be at least 1. Received: {check_every}")
        show_info()
        if workers is not None:
            set_rank(workers.rank)
            _warn_of_one_way_out(placement, workers.size)
        self.placement = placement
        self.workers = workers
        self.record = Record(self)
        self.cross_device_ops = cross_device_ops or _default_ops(placement)
        self.hosting: Hosting = self._make_hosting(concurrent=concurrent, check_every=check_every)
        self._buffers = BufferSync(self.record, self.hosting.slots)
        self._running: tuple[ReplicaContext, ...] = ()
        #: How many runs of which replica function were looked at for what they count.
        self._looked_at: Counter[CodeType] = Counter()
        sharded = None if sharded_classes is None or workers is None else ShardedStates(workers, sharded_classes)
        self.gradients = self._make_gradients(communication_options or CommunicationOptions(), check_every, sharded)
        self._lone_updates: LoneUpdates | None = None
        if workers is not None:
            self._lone_updates = LoneUpdates(self.gradients.local_parameters, self.gradients.ledger.was_reached)
        if placement.num_replicas > 1:
            for serve in (install, serve_layers_of_torch, serve_lone_values):
                serve(self)

    def __repr__(self) -> str:
        rank = "" if self.workers is None else f" (rank {self.workers.rank} of {self.workers.size})"
        return f"{super().__repr__()[:-1]}: {self.placement}{rank}>"

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas, over all processes, whose gradients are summed."""
        return self.placement.num_replicas

    @property
    def is_chief(self) -> bool:
        """Whether this process writes checkpoints and prints for the job."""
        return self.workers is None or self.workers.rank == 0

    @property
    def cluster_resolver(self) -> Any:
        """The resolver of a strategy that has one; ``None`` otherwise."""
        return None

    @property
    def extended(self) -> StrategyExtended:
        """What tf keeps in ``StrategyExtended``, such as ``update``, ``reduce_to`` and the names of devices."""
        return StrategyExtended(self)

    def scope(self) -> Any:
        """Return a context manager that makes this strategy current.

        Modules, optimizers, learning-rate schedulers and gradient scalers made inside belong to the strategy: each
        replica gets a copy with equal initial values (the chief's), at the first ``run``.

        Returns:
            A context manager; ``with strategy.scope() as s`` gives the strategy.

        Raises:
            RuntimeError: entered inside ``run``, or inside another strategy's scope, or a second time.

        Example:
            >>> strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> with strategy.scope():
            ...     model = torch.nn.Linear(2, 1)
            >>> ts.has_strategy()
            False
        """
        return Scope(self, Frame(self, None), tensor_device(self.placement.devices[0]))

    @overload
    def run(
        self,
        fn: Callable[..., None],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> None: ...

    @overload
    def run(
        self,
        fn: Callable[..., LeafT],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> LeafT | PerReplica[LeafT]: ...

    @overload
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any: ...

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Call ``fn`` once for each replica of this process, each with its own values. Cross-replica context only.

        ``PerReplica`` values anywhere in the arguments are replaced by the replica's own; other values go to all
        replicas. The objects made in the scope act as the replica's own.

        Args:
            fn: the replica function.
            args: its positional arguments, a tuple or list.
            kwargs: its keyword arguments.
            options: have a meaning on TPUs only; elsewhere a line in the log says that they are ignored.

        Returns:
            The return value with ``PerReplica`` leaves; a leaf that is the same object on all replicas stays plain.
            With one replica in this process, the plain return value.

        Raises:
            ValueError: ``args`` is no tuple or list, or the replicas return different structures.
            IndexError: a ``PerReplica`` has too few values.
            RuntimeError: called inside ``run``, or inside another strategy's scope; the replicas make different
                collective calls.

        Example:
            >>> strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> strategy.run(lambda x: x + ts.get_replica_context().replica_id_in_sync_group, args=(10,))
            PerReplica:{
              0: 10,
              1: 11
            }
        """
        if torch.compiler.is_dynamo_compiling():
            return without_compiler(self.run, fn, args, kwargs, options)
        self._require_cross_replica()
        if not callable(fn):
            raise TypeError(f"fn must be callable. Received: {fn!r}")
        if not isinstance(args, (tuple, list)):
            raise ValueError(
                "positional args must be a list or tuple: `strategy.run(fn, args=(x, y))`. Received a "
                f"{type(args).__name__}."
            )
        if options is not None:
            self._check_options(options)
        raise_failures()
        self._take_up_new()
        try:
            return self._run_replicas(fn, tuple(args), {} if kwargs is None else dict(kwargs))
        except (Exception, KeyboardInterrupt) as error:
            explain_misfit(error, fn, args, kwargs or {})
            hide_own_frames(error)
            raise

    @overload
    def reduce(self, reduce_op: ReduceOp | str, value: Tensor | PerReplica[Tensor], axis: Any = None) -> Tensor: ...

    @overload
    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: Any = None) -> Any: ...

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: Any = None) -> Any:
        """Combine a value over all replicas. Cross-replica context only; with several processes, all must call it.

        Args:
            reduce_op: SUM or MEAN, or a string in any letter case.
            value: a ``PerReplica`` of tensors, or a nested structure of them. A plain value counts once for each
                process where there are several, however many replicas they have, as in tf. In one process with several
                replicas it is what every replica has: MEAN returns it, SUM refuses it unless ``axis`` is given.
            axis: ``None`` combines whole values of equal shape; an axis, or a tuple of them, combines over these as
                well, right also where the replicas' sizes differ.

        Returns:
            The same structure with a tensor for each ``PerReplica``; the mean of integers is float64. No result has a
            graph, with one replica as with several: ``backward`` belongs into the replica function. The same holds for
            ``gather``; ``all_reduce`` and ``all_gather`` of the replica context are differentiable.

        Raises:
            ValueError: ``reduce_op`` is unknown, ``value`` can't be reduced, or ``axis`` is out of range.
            TypeError: ``reduce_op`` is neither a ``ReduceOp`` nor a string, or ``axis`` is no integer or tuple.
            InvalidArgumentError: shapes or dtypes don't fit together.
            RuntimeError: called inside ``run``.

        Example:
            >>> strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> value = strategy.experimental_distribute_values_from_function(
            ...     lambda context: torch.tensor([context.replica_id_in_sync_group + 1.0]))
            >>> strategy.reduce("sum", value)
            tensor([3.])
            >>> strategy.reduce("mean", value, axis=0)
            tensor(1.5000)
        """
        if torch.compiler.is_dynamo_compiling():
            return without_compiler(self.reduce, reduce_op, value, axis)
        op = ReduceOp.parse(reduce_op)
        self._require_cross_replica()
        self._agree_on_structure(f"Strategy.reduce({op.name})", value)
        return tree.map_leaves(lambda leaf: self._reduce_leaf(op, leaf, axis), value)

    @overload
    def gather(self, value: Tensor | PerReplica[Tensor], axis: int) -> Tensor: ...

    @overload
    def gather(self, value: Any, axis: int) -> Any: ...

    def gather(self, value: Any, axis: int) -> Any:
        """Concatenate a value of all replicas in the order of replicas. Cross-replica context only.

        Args:
            value: a ``PerReplica`` of tensors, or a nested structure; sizes along ``axis`` may differ. A plain value
                counts once for each process where there are several; in one process it is returned as it is, as is any
                value of the only replica.
            axis: the axis to concatenate on, from 0.

        Returns:
            The same structure with a tensor for each ``PerReplica``.

        Raises:
            TypeError: a leaf is not a tensor.
            ValueError: a leaf is a scalar, or ``axis`` is negative or out of range.
            InvalidArgumentError: shapes differ in another dimension, or dtypes differ.
            RuntimeError: called inside ``run``.

        Example:
            >>> strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> value = strategy.run(lambda: torch.full((ts.get_replica_context().replica_id_in_sync_group + 1,), 7.0))
            >>> strategy.gather(value, axis=0)
            tensor([7., 7., 7.])
        """
        if torch.compiler.is_dynamo_compiling():
            return without_compiler(self.gather, value, axis)
        if current_replica_context() is not None:
            raise RuntimeError(
                "Strategy.gather requires being in cross-replica context, use get_replica_context().all_gather() "
                "instead."
            )
        self._require_cross_replica()
        if self.num_replicas_in_sync == 1:
            return tree.map_leaves(lambda leaf: without_graph(inputs_of(self, 0, leaf)), value)
        self._agree_on_structure("Strategy.gather", value)
        return tree.map_leaves(lambda leaf: self._gather_leaf(leaf, axis), value)

    def experimental_local_results(self, value: ValueT | PerReplica[ValueT]) -> tuple[ValueT, ...]:
        """Return the values of this process's replicas.

        Args:
            value: what ``run`` returned, a structure of such values, or an object or parameter made in the scope.

        Returns:
            A tuple with one entry for each replica of this process; ``(value,)`` for a plain value.

        Example:
            >>> ts.MirroredStrategy(["cpu:0"]).experimental_local_results(3)
            (3,)
        """
        if torch.compiler.is_dynamo_compiling():
            return without_compiler(self.experimental_local_results, value)  # type: ignore[no-any-return]
        if owner(value) is self and not self._in_replica_context():
            self._take_up_new()
        if mirror_of(value) is not None:
            return bodies(value)
        if isinstance(value, DistributedVariable):
            return value.values  # type: ignore[return-value] # a variable's copies, tensors as it is
        if isinstance(value, Tensor):
            own = tuple(self.hosting.counterpart(i, value) for i in range(len(self.placement.devices)))
            if own[-1] is not value:
                return own
        return local_results(value, self.placement.num_local)

    def experimental_distribute_dataset(
        self,
        dataset: Any,
        options: InputOptions | None = None,
        *,
        batch_size: int | None = None,
        auto_shard_policy: AutoShardPolicy | None = None,
    ) -> Any:
        """Split the global batches of a dataset between the replicas.

        Each batch of m examples is cut into consecutive chunks of ``ceil(m / num_replicas_in_sync)``; later replicas
        may get fewer examples or none. Every example is used exactly once, in the same order on all processes. Several
        processes may also read files of their own, see ``auto_shard_policy``.

        Args:
            dataset: a ``DataLoader`` of global batches, a ``ts.data.Dataset``, a map-style or iterable dataset or
                (nested) arrays or tensors together with ``batch_size``, or any re-iterable of global batches.
            options: how elements reach the devices.
            batch_size: global batch size; only for datasets without one.
            auto_shard_policy: how several processes divide the data; ``None`` means what the options of a
                ``ts.data.Dataset`` say, else ``AUTO``.

        Returns:
            A re-iterable; its elements go to ``run`` as arguments.

        Raises:
            TypeError: ``dataset`` is none of these.
            ValueError: ``batch_size`` is missing or superfluous, or the loader already shards.
            InvalidArgumentError: ``AutoShardPolicy.FILE`` with fewer files than processes.
            NotFoundError: ``AutoShardPolicy.FILE`` with several processes and no list of files.

        Example:
            >>> strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> dataset = strategy.experimental_distribute_dataset(torch.arange(3), batch_size=3)
            >>> strategy.experimental_local_results(next(iter(dataset)))
            (tensor([0, 1]), tensor([2]))
        """
        return self._owning(
            distribute_dataset(dataset, self.placement, self.workers, options, batch_size, auto_shard_policy)
        )

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> Any:
        """Feed the replicas from the dataset of **per-replica** batches that a function returns.

        Args:
            dataset_fn: called at once, once in each process (or for each replica, see ``options``), with an
                ``InputContext``; returns a re-iterable. Consecutive elements go to the process's replicas in turn.
            options: how often the function is called and how elements reach the devices.

        Returns:
            A re-iterable; it ends when the datasets of all processes have ended.

        Raises:
            TypeError: the function returns no re-iterable.

        Example:
            >>> strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> def dataset_fn(context):
            ...     return torch.arange(4).split(context.get_per_replica_batch_size(4))
            >>> dataset = strategy.distribute_datasets_from_function(dataset_fn)
            >>> strategy.experimental_local_results(next(iter(dataset)))
            (tensor([0, 1]), tensor([2, 3]))
        """
        return self._owning(distribute_from_function(dataset_fn, self.placement, self.workers, options))

    experimental_distribute_datasets_from_function = distribute_datasets_from_function

    def _owning(self, dataset: DistributedDataset) -> DistributedDataset:
        """Note whose a dataset is: a checkpoint with nothing else in it is saved by the strategy's chief."""
        self.record.own(dataset)
        return dataset

    def experimental_distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Make a distributed value from one call of a function for each replica of this process.

        Args:
            value_fn: called with a ``ValueContext`` for each replica in the order of ids.

        Returns:
            A structure with ``PerReplica`` leaves; of ``OneDeviceStrategy`` and the default strategy plain ones.

        Raises:
            ValueError: the function returns different structures for different replicas.

        Example:
            >>> strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> strategy.experimental_distribute_values_from_function(lambda c: c.replica_id_in_sync_group * 10)
            PerReplica:{
              0: 0,
              1: 10
            }
        """
        self._require_cross_replica()
        values = [value_fn(ValueContext(i, self.num_replicas_in_sync)) for i in self.placement.local_replica_ids]
        return tree.map_structure(lambda *leaves: PerReplica(leaves), values)

    def make_experimental_numpy_dataset(self, numpy_input: Any) -> Any:
        """Make a dataset of the slices of arrays along their first axis.

        Args:
            numpy_input: an array or nested structure of arrays of equal length.

        Returns:
            A map-style dataset, for a ``DataLoader`` or ``experimental_distribute_dataset(..., batch_size=)``.

        Raises:
            ValueError: the arrays have different lengths.

        Example:
            >>> len(ts.get_strategy().make_experimental_numpy_dataset(torch.ones(4, 2).numpy()))
            4
        """
        return make_numpy_dataset(numpy_input)

    #: The same, as ``tf.compat.v1`` spells it.
    experimental_make_numpy_dataset = make_experimental_numpy_dataset

    def replicate(self, *objects: Any) -> Any:
        """Give each replica a copy of objects that were made outside the scope, as if the scope had recorded them.

        That is a model and all that trains it, which go together and then need no scope, in which constructors are
        patched. Schedulers that are there go with their optimizer by themselves; what is made later for the model is to
        be given as well. Other objects that the replica function changes may be given, too. On an accelerator modules
        move to this process's first device.

        Args:
            objects: modules, optimizers, learning-rate schedulers, gradient scalers, or objects of a Python class, made
                of what can be deep-copied.

        Returns:
            The object, or a tuple of the objects if there are several.

        Raises:
            TypeError: an object is a tensor; or at the first ``run``, if it can't be copied.
            ValueError: there are no objects, or one belongs to another strategy.

        Example:
            >>> model = torch.nn.Linear(2, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> model, optimizer = strategy.replicate(model, optimizer)
            >>> def step():
            ...     optimizer.zero_grad()
            ...     model(torch.ones(1, 2)).sum().backward()
            ...     optimizer.step()
            >>> strategy.run(step)
        """
        take_in(self, objects)
        return objects[0] if len(objects) == 1 else objects

    def sync_buffers(self) -> None:
        """Synchronise module buffers now, as ``optimizer.step()`` does. Cross-replica context only.

        Changed floating-point buffers become their mean over the replicas that had examples; others take replica 0's
        value.

        Raises:
            RuntimeError: called inside ``run``.

        Example:
            >>> ts.MirroredStrategy(["cpu:0", "cpu:1"]).sync_buffers()
        """
        self._require_cross_replica()
        self._take_up_new()
        if self.num_replicas_in_sync > 1:
            self.hosting.catch_up()  # what the program has written since the last run is no replica's own
            self.gradients.summer.sync_buffers()

    def check_sync(self) -> None:
        """Compare all that replicas hold alike, on every process. Cross-replica context only; every process calls it.

        That is the parameters, the buffers that nothing has changed since they were synchronised, and the optimizers'
        state and hyper-parameters. Bits are compared first; where they differ by no more than rounding, that is logged.

        Raises:
            DivergenceError: something differs; the message names all of it, between which replicas and by how much.
            DisagreementError: the processes have made different modules or optimizers.
            RuntimeError: called inside ``run``.

        Example:
            >>> strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> with strategy.scope():
            ...     model = torch.nn.Linear(2, 1)
            >>> strategy.check_sync()
        """
        self._require_cross_replica()
        self._take_up_new()
        if self.num_replicas_in_sync > 1:
            self.hosting.catch_up()
            check_sync(self.record, self.hosting, self._buffers, self.workers, self.placement.name_of)

    def _check_options(self, options: RunOptions) -> None:
        """Check the options of a call of ``run``."""
        if not isinstance(options, RunOptions):
            raise TypeError(f"options must be a ts.RunOptions. Received: {options!r}")
        if options != RunOptions():
            info_once(f"RunOptions have a meaning on TPUs only: {type(self).__name__} ignores {options}.")

    def _make_hosting(self, *, concurrent: bool, check_every: int) -> Hosting:
        """Make the place where replica functions run."""
        if len(self.placement.devices) == 1:
            return DirectHosting(self, self.placement, self.workers, self.record)
        return ThreadedHosting(
            self, self.placement, self.workers, self.record, concurrent=concurrent, check_every=check_every
        )

    def _make_gradients(
        self, options: CommunicationOptions, check_every: int, sharded: ShardedStates | None
    ) -> ReplicaGradients:
        """Make what knows the replicas' parameters and sums their gradients."""
        num_local = len(self.placement.devices)
        running = getattr(self.hosting, "running", None) or _only_replica_running(weakref.ref(self))
        ledger = GradientLedger(num_local, running, at_once=not self.hosting.takes_turns())
        summer = GradientSummer(
            self.placement, self.cross_device_ops, self.workers, options, self._buffers, ledger, check_every
        )
        name, num_replicas = type(self).__name__, self.num_replicas_in_sync
        return ReplicaGradients(name, self.record, self.hosting, num_local, num_replicas, ledger, summer, sharded)

    def _run_replicas(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``fn`` for each replica of this process; ``run`` has checked the arguments."""
        contexts = []
        calls = []
        for local_id, replica_id in enumerate(self.placement.local_replica_ids):
            calls.append(inputs_of(self, local_id, (args, kwargs)))
            contexts.append(ReplicaContext(self, replica_id, local_id, (args, kwargs)))
        watching: Any = nullcontext(fn)
        if isinstance(self.hosting, ThreadedHosting):  # elsewhere one call stands for all replicas
            watching = watched(self._looked_at, fn, contexts, self.gradients.local_parameters)
        with watching as called:
            results = self._call_hosting(called, contexts, calls)
        return results[0] if len(results) == 1 else regroup_results(self.hosting, results)

    def _call_hosting(
        self, fn: Callable[..., Any], contexts: Sequence[ReplicaContext], calls: Sequence[tuple[Any, Any]]
    ) -> list[Any]:
        """Call ``fn`` once for each context and return the results."""
        outer, has_failed = self._running, True
        lone = None if self.hosting.run_hooks is not None or outer else self._lone_updates  # one copy steps for all
        try:
            if lone is not None:
                lone.before_run()
            self.gradients.ledger.begin_run()
            if self.num_replicas_in_sync > 1:
                watch(self)
                self.gradients.summer.note_examples(contexts)
            self._running = tuple(contexts)
            results = self.hosting.run([Frame(self, context) for context in contexts], fn, calls)
            if self.workers is not None:
                self.workers.refuse_spoiled("Strategy.run")
            has_failed = False
            return results
        except Exception as error:
            self._explain(error, contexts)
            raise
        finally:
            self._running = outer
            self.gradients.end_run(has_failed=has_failed)
            if lone is not None:
                lone.after_run(contexts, has_failed=has_failed)

    def _reduce_leaf(self, op: ReduceOp, leaf: Any, axis: Any) -> Any:
        """Combine one value over all replicas."""
        return reduce_leaf(self, op, leaf, axis)

    def _gather_leaf(self, leaf: Any, axis: int) -> Any:
        """Concatenate one value of all replicas."""
        return gather_leaf(self, leaf, axis)

    def _make_variable(self, context: Any, value: Tensor, options: VariableOptions) -> Variable | None:
        """Make a variable with a copy for each replica; ``None`` where one value is enough."""
        return make_variable(self, context, value, options)

    def _check_can_enter(self) -> None:
        """Raise unless a scope of this strategy may open here."""
        self._require_cross_replica()

    def _in_replica_context(self) -> bool:
        """Say whether one of this strategy's replica functions is running on this thread."""
        context = current_replica_context()
        return context is not None and context.strategy is self

    def _is_running(self, context: ReplicaContext) -> bool:
        """Say whether the replica function of a context is in progress."""
        return any(context is running for running in self._running)

    def _all_reduce_columns(
        self, op: ReduceOp, columns: Sequence[Sequence[Tensor]], operation: str
    ) -> list[list[Tensor]]:
        """Combine several values, given as one tensor for each local replica."""
        return all_reduce(
            op,
            columns,
            self.placement.devices,
            self.cross_device_ops,
            self.workers,
            self.num_replicas_in_sync,
            operation,
        )

    def _gather_columns(
        self, columns: Sequence[Sequence[Tensor]], axis: int, operation: str
    ) -> tuple[list[Tensor], list[list[int]]]:
        """Concatenate several values of all replicas; return them and each one's sizes along the axis."""
        gathered = [gather(column, axis, self.workers, operation) for column in columns]
        lengths = [[tensor.shape[axis] for tensor in column] for column in columns]
        return gathered, [gather_sizes(own, self.workers, operation) for own in lengths]

    def _gather_rows(self, rows: Sequence[Tensor], operation: str) -> Tensor:
        """Return all replicas' rows, given those of the local ones."""
        return gather_rows(rows, self.workers, operation)

    def __copy__(self) -> NoReturn:
        raise RuntimeError(f"A {type(self).__name__} can't be copied. Use the same object everywhere.")

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"A {type(self).__name__} can't be pickled or copied: it holds devices, threads and connections."
        )

    def _require_cross_replica(self) -> None:
        frame = current_frame()
        if frame is None:
            return
        if frame.replica_context is not None:
            raise RuntimeError(_CROSS_REPLICA)
        if frame.strategy is not self:
            _mixing(frame.strategy, self)

    def _take_up_new(self) -> None:
        if self.num_replicas_in_sync > 1:
            self.record.claim()
        if not self.record.has_new:
            return
        new = self.record.peek_new()
        with torch.inference_mode(False):  # noqa: FBT003 - copies outlive the mode
            self.hosting.adopt_new()
        self.gradients.refresh()
        if self.num_replicas_in_sync > 1:
            self._buffers.note_new(new)
        self._after_adoption()

    def _check_lone_step(self, optimizer: Optimizer) -> None:
        """Raise where the only replica's optimizer must not step by itself; for subclasses."""

    def _after_adoption(self) -> None:
        """Do what a strategy does with objects that were taken up; for subclasses."""

    def _coordinator_class(self) -> Any:
        """Return the class of what schedules functions on workers; ``None`` where ``run`` calls them here."""
        return None

    def _before_capture(self) -> None:
        """Bring what this process holds up to date before a checkpoint captures it; subclasses have more to do."""
        if self.workers is not None:
            self.workers.refuse_spoiled("a checkpoint")

    def _agree_on_structure(self, operation: str, value: Any) -> None:
        if self.workers is not None and (structure := tree.describe(tree.flatten(value)[1])):
            self.workers.agree(f"{operation}{structure}", None, "structure")

    def _explain(self, error: Exception, contexts: Sequence[ReplicaContext]) -> None:
        """Say what the error can't: the shares of a small batch, and to the other ranks, that this one failed."""
        if self.workers is not None:
            self.workers.refuse_spoiled("Strategy.run", error)
            self.workers.watch.report("Strategy.run", error, contexts[0]._replica_id)
        shares = contexts[0].batch_shares
        if shares is None or self.num_replicas_in_sync == 1:
            return
        if isinstance(error, (DeadlineExceededError, DisagreementError, UnavailableError)):
            return  # it is about other ranks, not about the share
        own = [shares.shares[context._replica_id] for context in contexts]
        if min(own) <= 1:
            add_note(
                error,
                f"The batch of {shares.total} examples was split into shares of {list(shares.shares)}. If the function "
                "can't handle an empty or one-example share: choose another batch size or drop the last batch, use "
                "`flatten(1)` instead of `view`, or ts.nn.SyncBatchNorm instead of a plain batch norm.",
            )


def _only_replica_running(reference: weakref.ref[Strategy]) -> Callable[[], int | None]:
    """Return what says whether a process's only replica is running, also to the threads of autograd."""

    def running() -> int | None:
        strategy = reference()
        return 0 if strategy is not None and strategy._running else None

    return running


def _warn_of_one_way_out(placement: Placement, num_processes: int) -> None:
    first, num_local = placement.devices[0], len(placement.devices)
    if num_local == 1 or num_processes == 1 or first.type == "cpu" or kind_of(first).is_traced:
        return
    warn_once(
        f"Each of {num_processes} processes has {num_local} devices of the type {first.type!r}. All that travels "
        f"between the processes goes through the first one, {first}, and its link, while the others wait. Start a "
        "process for each device: torchrun --nproc-per-node with the number of devices of a host.",
        stacklevel=4,
    )


def _default_ops(placement: Placement) -> CrossDeviceOps:
    have_own_memory = all(device.type != "cpu" and not kind_of(device).is_traced for device in placement.devices)
    return NcclAllReduce() if len(placement.devices) > 1 and have_own_memory else ReductionToOneDevice()


def _mixing(current: Any, other: Any) -> NoReturn:
    raise RuntimeError(
        f"Mixing different Strategy objects: {current!r} is not {other!r}. Leave the first strategy's "
        "scope before you use another one."
    )
