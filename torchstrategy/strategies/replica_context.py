"""``ReplicaContext``: what the replica function can ask and do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchstrategy.base import tree
from torchstrategy.base.context import Frame, current_frame, pop_frame, push_frame
from torchstrategy.base.devices import Placement, tensor_device
from torchstrategy.base.later import explains_absent
from torchstrategy.base.log import call_site
from torchstrategy.base.options import ReduceOp
from torchstrategy.base.values import BatchShares, num_rows_of, regroup, select_replica, shares_of
from torchstrategy.collectives.reductions import check_gather_axis, differentiable_all_gather, differentiable_all_reduce
from torchstrategy.gradients.replica_gradients import ReplicaGradients
from torchstrategy.replicas.hosting import Hosting
from torchstrategy.replicas.mirrored import resolve
from torchstrategy.replicas.record import optimizer_parameters
from torchstrategy.replicas.runner import MergeRequest
from torchstrategy.replicas.variables import Variable

__all__ = ["ReplicaContext", "RunningStrategy"]


class RunningStrategy(Protocol):
    """What a replica context needs of the strategy that runs it."""

    placement: Placement
    hosting: Hosting
    gradients: ReplicaGradients

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas in all processes."""

    def _all_reduce_columns(
        self, op: ReduceOp, columns: Sequence[Sequence[Tensor]], operation: str
    ) -> list[list[Tensor]]:
        """Combine several values, given as one tensor for each local replica."""

    def _gather_columns(
        self, columns: Sequence[Sequence[Tensor]], axis: int, operation: str
    ) -> tuple[list[Tensor], list[list[int]]]:
        """Concatenate several values of all replicas; return them and each one's sizes along the axis."""

    def _gather_rows(self, rows: Sequence[Tensor], operation: str) -> Tensor:
        """Return all replicas' rows, given those of the local ones."""

    def _is_running(self, context: ReplicaContext) -> bool:
        """Say whether the replica function of a context is in progress."""


@explains_absent("ReplicaContext")
class ReplicaContext:
    """One replica's view of a call of ``Strategy.run``; get it with ``ts.get_replica_context()``.

    Args:
        strategy: the strategy that runs the replica.
        replica_id: the replica's id among all replicas in sync.
        local_id: its position among this process's replicas.
        inputs: what the replica function was called with; its batches carry how they were split.

    Example:
        >>> strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> def fn():
        ...     context = ts.get_replica_context()
        ...     return context.all_reduce("sum", torch.tensor(context.replica_id_in_sync_group + 1.0))
        >>> strategy.experimental_local_results(strategy.run(fn))
        (tensor(3.), tensor(3.))
    """

    def __init__(self, strategy: RunningStrategy, replica_id: int, local_id: int, inputs: Any = ()) -> None:
        self._strategy = strategy
        self._replica_id = replica_id
        self.local_id = local_id
        self._inputs = inputs
        self._found: list[BatchShares] | None = None
        #: How many optimizer steps are in progress, one inside the other.
        self.step_depth = 0
        #: Whether the library has divided a loss of this replica by the numbers of the global batch.
        self.has_scaled_losses = False
        #: The latest losses that it has divided so, and the numbers of the operations that have made them.
        self._scaled_losses: list[Any] = []
        #: Whether the replica function has called ``all_reduce``: what it assigns may be a sum already.
        self._has_all_reduced = False
        #: The latest numbers that it got from there, by which it may divide a loss.
        self._totals: list[Tensor] = []
        #: Whether the replica has computed gradients; and whether it has met others, as every collective makes it.
        self._has_computed = self._has_met = False
        #: By their ids, for what `torch.autograd.grad` was asked for gradients.
        self._differentiated: set[int] = set()

    def __repr__(self) -> str:
        where = f"{self._replica_id} of {self.num_replicas_in_sync} on {self.devices[0]}"
        return f"{super().__repr__()[:-1]}: replica {where}>"

    @property
    def strategy(self) -> Any:
        """The ``ts.Strategy`` that runs this replica."""
        return self._strategy

    @property
    def replica_id_in_sync_group(self) -> int:
        """This replica's id, from 0 to ``num_replicas_in_sync - 1``; a Python int (in tf a tensor)."""
        return self._replica_id

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas whose gradients are summed."""
        return self._strategy.num_replicas_in_sync

    @property
    def devices(self) -> tuple[str, ...]:
        """This replica's device, as a tuple of one name."""
        return (str(self._strategy.placement.devices[self.local_id]),)

    @property
    def _num_own_examples(self) -> int | None:
        """How many examples of the batch this replica has; ``None`` where ``batch_shares`` is not known."""
        shares = self.batch_shares
        return None if shares is None else shares.shares[self._replica_id]

    @property
    def batch_shares(self) -> BatchShares | None:
        """How the batch that this replica function was called with was split, if all its batches agree."""
        found = self._own_shares()
        return found[0] if len(found) == 1 else None

    def all_reduce(self, reduce_op: ReduceOp | str, value: Any, options: Any = None) -> Any:  # noqa: ARG002 - as in tf
        """Combine a value over all replicas; every replica gets the result. Replica context only.

        Differentiable: the gradient is that of the sum of all replicas' losses, so all replicas must run the backward.

        Args:
            reduce_op: SUM or MEAN, or a string in any letter case; the mean of integers is float64.
            value: a tensor or nested structure of tensors with equal shapes on all replicas.
            options: accepted as in tf; has no effect.

        Returns:
            The same structure.

        Raises:
            ValueError: ``reduce_op`` is unknown, or a leaf is not a tensor.
            InvalidArgumentError: shapes or dtypes differ between replicas, or the dtype is bool.
            RuntimeError: called outside this replica's function.

        Example:
            >>> ts.MirroredStrategy(["cpu:0"]).run(lambda: ts.get_replica_context().all_reduce("mean", torch.ones(2)))
            tensor([1., 1.])
        """
        op = ReduceOp.parse(reduce_op)
        self._check_active("all_reduce")
        tensors, spec = self._tensors(value, "all_reduce")
        if self.num_replicas_in_sync == 1:
            return spec.unflatten(tensors)
        operation, self._has_all_reduced = f"all_reduce({op.name}){tree.describe(spec)}", True
        # Autograd calls this again, later and maybe on another thread.
        results = differentiable_all_reduce(lambda values: self._all_reduce(op, values, operation), tensors)
        self._totals = [*self._totals[-7:], *(result.detach() for result in results if result.numel() == 1)]
        return spec.unflatten(list(results))

    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:  # noqa: ARG002 - as in tf
        """Concatenate a value of all replicas in the order of replicas. Replica context only; differentiable.

        Args:
            value: a tensor or nested structure of tensors; sizes along ``axis`` may differ between replicas.
            axis: the axis to concatenate on, from 0.
            options: accepted as in tf; has no effect.

        Returns:
            The same structure; each leaf has the sum of the replicas' sizes along ``axis``.

        Raises:
            TypeError: a leaf is not a tensor; with one replica, nothing is checked and the value returned.
            ValueError: a leaf is a scalar, or ``axis`` is negative or out of range.
            InvalidArgumentError: shapes differ in another dimension, or dtypes differ.
            RuntimeError: called outside this replica's function.

        Example:
            >>> ts.MirroredStrategy(["cpu:0"]).run(lambda: ts.get_replica_context().all_gather(torch.ones(2), axis=0))
            tensor([1., 1.])
        """
        self._check_active("all_gather")
        value = tree.map_leaves(_without_variable, value)
        if self.num_replicas_in_sync == 1:
            return value
        leaves, spec = tree.flatten(value)
        for leaf in leaves:
            axis = check_gather_axis(axis, leaf)
        operation = f"all_gather(axis={axis}){tree.describe(spec)}"
        results = differentiable_all_gather(
            lambda values: self._all_gather(values, axis, operation),
            lambda values: self._all_reduce(ReduceOp.SUM, values, "the gradient of all_gather"),
            axis,
            leaves,
        )
        return spec.unflatten(list(results))

    def merge_call(
        self, merge_fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Stop all replicas and call a function once, in cross-replica context.

        Args:
            merge_fn: called as ``merge_fn(strategy, *args, **kwargs)``; values that differ between this process's
                replicas arrive as ``PerReplica``. With one replica a process each process calls it with its own.
            args: positional arguments after the strategy.
            kwargs: keyword arguments.

        Returns:
            What ``merge_fn`` returns; of a ``PerReplica`` each replica gets its own value.

        Raises:
            RuntimeError: called outside this replica's function.

        Example:
            >>> strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> def fn():
            ...     context = ts.get_replica_context()
            ...     return context.merge_call(lambda s, x: s.reduce("sum", x), args=(torch.tensor(1.0),))
            >>> strategy.run(fn)  # one tensor, the same on every replica
            tensor(2.)
        """
        self._check_active("merge_call")

        def merge(payloads: list[Any]) -> list[Any]:
            fn = payloads[0][0]
            all_args, all_kwargs = regroup([(tuple(p[1]), dict(p[2])) for p in payloads])
            result = fn(self._strategy, *all_args, **all_kwargs)
            return [select_replica(i, result) for i in range(len(payloads))]

        return self._meet(MergeRequest("merge_call", merge, (merge_fn, tuple(args), dict(kwargs or {}))))

    def sum_gradients(self, optimizer: Optimizer, *, fresh: bool = False) -> None:
        """Sum the gradients of an optimizer's parameters over replicas now, instead of at ``optimizer.step()``.

        Call it before clipping by global norm or logging gradient norms. ``optimizer.step()`` then does not sum again.
        Until then, changes of the summed gradients in place are changes of the sum. Replica context only; every
        replica must call it.

        Args:
            optimizer: an optimizer made in the strategy's scope.
            fresh: whether all gradients are new ones of this replica, although nothing shows that: they were written
                past autograd and torch's version counter (by ``.data``, a kernel, or a replayed graph) into tensors
                that held a sum before.

        Raises:
            RuntimeError: the optimizer's parameters were not made in the scope, replicas disagree, or a gradient may be
                a sum already and nothing tells.

        Example:
            >>> strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> with strategy.scope():
            ...     model = torch.nn.Linear(1, 1)
            ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> def fn():
            ...     model(torch.ones(1, 1)).sum().backward()
            ...     ts.get_replica_context().sum_gradients(optimizer)
            ...     return model.bias.grad
            >>> strategy.experimental_local_results(strategy.run(fn))
            (tensor([2.]), tensor([2.]))
        """
        self._check_active("sum_gradients")
        plain = resolve(optimizer)
        if self.num_replicas_in_sync == 1:
            return
        self._strategy.gradients.check(plain, self.local_id)
        self._sum(plain, is_fresh=fresh)

    def mark_summed(self, optimizer: Optimizer) -> None:
        """Say that the present gradients are already the sum over replicas, so that ``step()`` does not sum them.

        This is tf's ``skip_gradients_aggregation=True``, for programs that all-reduce gradients by hand.

        Args:
            optimizer: the optimizer whose gradients are meant.

        Raises:
            RuntimeError: called outside this replica's function.

        Example:
            >>> def step(context, optimizer):
            ...     for parameter in optimizer.param_groups[0]["params"]:
            ...         parameter.grad = context.all_reduce("sum", parameter.grad)
            ...     context.mark_summed(optimizer)
            ...     optimizer.step()
        """
        self._check_active("mark_summed")
        if self.num_replicas_in_sync > 1:
            self._strategy.gradients.ledger.note_sum(optimizer_parameters(resolve(optimizer)), self)

    def actual_batch_size(self, x: Any = None) -> Tensor:
        """Return how many examples the global batch has over all replicas; never communicates.

        Of a batch that is one of several in an optimizer step of ``Model.fit``, it is the number in all of them.

        Args:
            x: the batch (a tensor or nested structure) that is meant; ``None`` means what the replica function was
                called with.

        Returns:
            A 0-d int64 tensor on the replica's device.

        Raises:
            RuntimeError: there is more than one replica, and no argument is a batch of a distributed dataset, or the
                arguments are batches that were split differently.

        Example:
            >>> strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> dataset = strategy.experimental_distribute_dataset(torch.arange(5.0), batch_size=3)
            >>> def fn(x):
            ...     return ts.get_replica_context().actual_batch_size()
            >>> [int(strategy.experimental_local_results(strategy.run(fn, args=(x,)))[0]) for x in dataset]
            [3, 2]
        """
        found = self._own_shares() if x is None else shares_of(x)
        device = tensor_device(self._strategy.placement.devices[self.local_id])
        if len(found) == 1:
            return torch.tensor(found[0].divisor, device=device)
        remedy = (
            'Or count yourself: `global_batch_size=ts.get_replica_context().all_reduce("sum", torch.tensor(my_count))`.'
        )
        if found:
            raise RuntimeError(
                f"The arguments of the replica function are batches that were split differently: "
                f"{[s.shares for s in found]}. Say which one is meant: "
                f"`ts.get_replica_context().actual_batch_size(x)`. {remedy}"
            )
        size = num_rows_of(self._inputs if x is None else x) if self.num_replicas_in_sync == 1 else None
        if size is not None:
            return torch.tensor(size, device=device)
        raise RuntimeError(
            "The actual batch size is not known: no argument of the replica function is a batch of a distributed "
            "dataset. Iterate over `strategy.experimental_distribute_dataset(loader)`, not over the loader itself, and "
            "give `strategy.run` the batch, not a tensor computed from it; or say which one is meant: "
            f"`ts.get_replica_context().actual_batch_size(x)`. {remedy}"
        )

    def _sum(self, optimizer: Optimizer, *, is_fresh: bool = False, uses_applied: bool = False) -> None:
        """Sum a plain optimizer's gradients over replicas, if they are not; ``part_of`` has the arguments."""
        gradients = self._strategy.gradients
        part = gradients.part_of(self, optimizer, is_fresh=is_fresh, uses_applied=uses_applied)
        self._meet(MergeRequest("the sum of gradients", gradients.summer, part))

    def _work_on(self, inputs: Any) -> None:
        """Let a batch take the place of what the replica function was called with, which holds several."""
        self._inputs = inputs
        self._found = None

    def __enter__(self) -> ReplicaContext:
        push_frame(Frame(self._strategy, self))
        return self

    def __exit__(self, *_: object) -> None:
        pop_frame(Frame(self._strategy, self))

    def _meet(self, request: MergeRequest) -> Any:
        if torch.compiler.is_dynamo_compiling():
            _refuse_to_be_compiled()
        self._strategy.gradients.ledger.hear()  # another replica may come next
        self._has_met = True
        return self._strategy.hosting.meet(self.local_id, request)

    def _all_reduce(self, op: ReduceOp, tensors: Sequence[Tensor], operation: str) -> list[Tensor]:
        self._check_active(operation)
        strategy = self._strategy

        def merge(payloads: list[Sequence[Tensor]]) -> list[list[Tensor]]:
            with torch.no_grad():
                _check_counts(payloads, operation)
                columns = [list(column) for column in zip(*payloads, strict=True)]
                rows = strategy._all_reduce_columns(op, columns, operation)
            return [[row[i] for row in rows] for i in range(len(payloads))]

        return self._meet(MergeRequest(operation, merge, [tensor.detach() for tensor in tensors]))  # type: ignore[no-any-return]

    def _all_gather(self, tensors: Sequence[Tensor], axis: int, operation: str) -> tuple[list[Tensor], list[int]]:
        strategy = self._strategy
        replica_id = self._replica_id

        def merge(payloads: list[Sequence[Tensor]]) -> list[Any]:
            _check_counts(payloads, operation)
            with torch.no_grad():
                gathered, sizes = strategy._gather_columns(list(zip(*payloads, strict=True)), axis, operation)
            devices = strategy.placement.devices
            return [
                ([value.to(tensor_device(device), copy=len(devices) > 1) for value in gathered], sizes)
                for device in devices
            ]

        own, sizes = self._meet(MergeRequest(operation, merge, [tensor.detach() for tensor in tensors]))
        return own, [sum(row[:replica_id]) for row in sizes]

    def _gather_rows(self, row: Tensor, operation: str) -> Tensor:
        """Return all replicas' rows ``[replicas, length]``, to be read only; see ``reductions.gather_rows``."""
        self._check_active(operation)
        strategy = self._strategy

        def merge(payloads: list[Tensor]) -> list[Tensor]:
            with torch.no_grad():
                rows = strategy._gather_rows(payloads, operation)
            return [rows.to(tensor_device(device)) for device in strategy.placement.devices]

        return self._meet(MergeRequest(operation, merge, row.detach()))  # type: ignore[no-any-return]

    def _tensors(self, value: Any, operation: str) -> tuple[list[Tensor], Any]:
        leaves, spec = tree.flatten(tree.map_leaves(_without_variable, value))
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                raise ValueError(f"{operation} takes tensors, or nested structures of tensors. Received: {leaf!r}. "
                                 "Convert numbers with `torch.tensor(...)`.")  # fmt: skip
        return leaves, spec

    def _own_shares(self) -> list[BatchShares]:
        if self._found is None:
            self._found = shares_of(self._inputs)
        return self._found

    def _check_active(self, operation: str) -> None:
        frame = current_frame()
        # In the backward pass on an accelerator, autograd's thread has no context of its own.
        active = self._strategy._is_running(self) if frame is None else frame.replica_context is self
        if not active:
            raise RuntimeError(
                f"{operation} was called through the context of replica {self._replica_id} of "
                f"{type(self._strategy).__name__}, but that replica's function is not running here. Get the context "
                f"with `ts.get_replica_context()` inside the function that calls it (at {call_site()})."
            )


def _without_variable(leaf: Any) -> Any:
    """Return a variable's value as a plain tensor whose gradient reaches the replica's copy."""
    return leaf.clone() if isinstance(leaf, Variable) else leaf


def _check_counts(payloads: Sequence[Sequence[Tensor]], operation: str) -> None:
    counts = [len(payload) for payload in payloads]
    if len(set(counts)) > 1:
        raise ValueError(f"{operation}: the replicas bring different numbers of tensors: {counts}")


def _refuse_to_be_compiled() -> None:
    raise RuntimeError(
        "torch.compile met a collective operation of replicas, which it can't trace. Call it in a function that is not "
        "compiled."
    )


#: What torch.compiler.assume_constant_result sets: the function runs when it is traced.
_refuse_to_be_compiled._dynamo_marked_constant = True  # type: ignore[attr-defined]
