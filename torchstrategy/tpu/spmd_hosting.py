"""Traces a replica function once for all replicas of a program that XLA compiles for several devices."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from torchstrategy.base import tree
from torchstrategy.base.context import Frame, pop_frame, push_frame
from torchstrategy.base.devices import Placement
from torchstrategy.base.labels import label
from torchstrategy.base.options import ReduceOp
from torchstrategy.base.values import DistributedValues
from torchstrategy.collectives.reductions import check_addable, check_joinable, dtype_of_sum, mean_of_total
from torchstrategy.errors import InvalidArgumentError, UnimplementedError
from torchstrategy.replicas.adapters import trace_ends
from torchstrategy.replicas.distributed_variables import DistributedVariable
from torchstrategy.replicas.hosting import CallerModes, DirectHosting
from torchstrategy.replicas.record import Record
from torchstrategy.replicas.runner import MergeRequest, Runner
from torchstrategy.tpu.groups import compare_programs, describe_program, values_of_group
from torchstrategy.tpu.metrics import SpmdMetrics
from torchstrategy.tpu.optimizer_steps import SpmdGradients, prepare_step
from torchstrategy.tpu.process_hosting import send_to_device
from torchstrategy.tpu.protocols import SpmdReplicaContext
from torchstrategy.tpu.state import Comparisons, ReplicaState, refuse_different
from torchstrategy.tpu.trace import Trace, join_results
from torchstrategy.tpu.turns import GroupTurns
from torchstrategy.xla import runtime
from torchstrategy.xla.runtime import TpuRuntime

__all__ = ["SpmdHosting"]


class _Entered(NamedTuple):
    """A tensor that replicas hold from before: its mark in this run, its value outside, and the replicas' values."""

    tensor: Tensor
    mark: object
    outside: Tensor
    rows: Tensor


class SpmdHosting(DirectHosting):
    """One copy of the model, held by all devices, and one trace of the replica function for all of them.

    Inside, a tensor is *local* (each replica's own: its batch, activations, gradients) or *shared* (parameters, summed
    gradients, the optimizer's state). Replicas whose shares have different shapes are traced in groups, in turn.

    Args:
        strategy: the strategy.
        placement: where its replicas are.
        record: what the strategy's scopes recorded.
        runtime: the devices.
    """

    def __init__(self, strategy: Any, placement: Placement, record: Record, runtime: TpuRuntime) -> None:
        super().__init__(strategy, placement, None, record)
        self._placement = placement
        self._runtime = runtime
        self.num_replicas = placement.num_replicas
        self.state = ReplicaState(record, self.slots)
        self.gradients = SpmdGradients(self)
        self.metrics = SpmdMetrics(self.state, runtime, placement)
        self._runner: Runner | None = None
        self._turns: GroupTurns | None = None
        self._ids: Tensor | None = None
        self._trace: Trace | None = None
        self._entered: dict[int, _Entered] = {}
        self._is_new = True
        self.comparisons = Comparisons()
        record.prepare = prepare_step

    @property
    def num_groups(self) -> int:
        """How many groups of replicas the function that runs is traced for."""
        return self._current.groups.count

    @property
    def _current(self) -> Trace:
        if self._trace is None:
            raise RuntimeError("No replica function is running.")
        return self._trace

    def call(
        self, fn: Callable[..., Any], arguments: tuple[Any, Any], trace: Trace, contexts: Sequence[SpmdReplicaContext]
    ) -> Any:
        """Trace ``fn`` for each group and return its results with ``SplitValues`` leaves.

        Args:
            fn: the replica function.
            arguments: its positional and keyword arguments, with ``PerReplica`` leaves.
            trace: this call.
            contexts: one for each group.
        """
        if self._is_new and self._placement.num_local < self.num_replicas:
            tensors = [tensor for dicts, name in self.slots() if isinstance(tensor := dicts[0].get(name), Tensor)]
            compare_programs(self._runtime, [describe_program(fn, arguments, tensors)] * self._placement.num_local)
        self._is_new = False
        if self._trace is not None:
            raise RuntimeError("`run` was called while another call of it is being traced.")
        self._trace = trace
        self.state.enter(trace.is_local, trace.region.mark_shared)
        self.metrics.begin()
        try:
            self._enter_state(trace)
            with label("replica", "trace of", self.num_replicas):
                results = self._call_groups(trace, fn, arguments, contexts)
            self.metrics.end(trace, failed=False)
            if self.num_replicas == 1:
                return results[0]
            joined = join_results(self._runtime, trace, results)
            del results
        except BaseException:
            self.metrics.end(trace, failed=True)
            self._keep_state(trace)
            raise
        else:
            different, left = self._keep_state(trace)
            if different:
                refuse_different(different)
            if left:
                raise RuntimeError(
                    f"{len(left)} of the replicas' tensors outlive `run`, such as a {left[0]}. The function is traced "
                    "once for all replicas, so outside it such a tensor has no single value. Return it from the "
                    "function, combine it with all_reduce, or register it as a buffer of a module."
                )
            return joined
        finally:
            self._trace = None
            self.state.leave()
            trace.forget()

    def _call_groups(
        self, trace: Trace, fn: Callable[..., Any], arguments: tuple[Any, Any], contexts: Sequence[SpmdReplicaContext]
    ) -> list[Any]:
        carry = CallerModes()  # groups after the first may run on threads of their own
        tasks = [functools.partial(self._call, trace, context, carry, fn, arguments) for context in contexts]
        if len(tasks) == 1:
            results = [tasks[0]()]
            self.metrics.note(0)
            return results
        turns = self._turns = GroupTurns(self._record, trace, self.metrics, self._strategy.gradients.ledger)
        runner = self._runner = Runner(len(tasks), turns, self._call_merge, concurrent=False)
        try:
            results = runner.run(tasks, self._name)
            names = self.state.names()
            for tensor, differs in turns.join():
                self.comparisons.add(names.get(id(tensor), ("a tensor",))[0], differs)
        except BaseException:
            turns.undo()
            raise
        finally:
            self._runner = self._turns = None
            runner.close()
        return results

    def _call(
        self, trace: Trace, context: SpmdReplicaContext, carry: CallerModes, fn: Callable[..., Any], arguments: Any
    ) -> Any:
        num_local = self._placement.num_local

        def own(leaf: Any) -> Any:
            if isinstance(leaf, DistributedValues):
                return values_of_group(self._runtime, leaf, trace.groups, context.group, trace.enter, num_local)
            if isinstance(leaf, Tensor) and leaf.device.type == "cpu" and not isinstance(leaf, nn.Parameter):
                return leaf.to(self._runtime.device)
            return leaf

        args, kwargs = tree.map_leaves(own, arguments)
        frame = Frame(self._strategy, context)
        push_frame(frame)
        try:
            with (
                carry.entered() if context.group > 0 else contextlib.nullcontext(),
                torch.device(self._runtime.device),
                torch.autograd.set_multithreading_enabled(False),  # so that the region sees the backward pass, too
                trace.regions[context.group],
            ):
                return fn(*args, **kwargs)
        finally:
            pop_frame(frame)

    def _enter_state(self, trace: Trace) -> None:
        """Let every replica find what the recorded objects hold for it."""
        self._entered = {}
        with torch._C.DisableTorchFunctionSubclass():  # variables stand for themselves here
            for tensor, rows in self.state.take():
                outside = tensor.data
                tensor.data = trace.enter(rows)
                trace.region.mark_local(tensor)
                self._entered[id(tensor)] = _Entered(tensor, trace.region.mark_of(tensor), outside, rows)

    def _keep_state(self, trace: Trace) -> tuple[list[str], list[str]]:
        """Keep what recorded objects hold from this run to the next.

        Returns:
            Descriptions of parameters in which replicas differ, and of other tensors that outlive the run. These get
            replica 0's value: a value inside a replica ends the process where it is read outside.
        """
        with trace.region.paused(), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            left: list[str] = []
            different = self._keep_recorded(trace)
            if not trace.has_local_values():
                return different, left
            for tensor in trace.local_values():
                left.append(trace.region.describe(tensor))
                tensor.data = trace.stack([tensor] * trace.groups.count)[0].clone()
        return different, left

    def _keep_recorded(self, trace: Trace) -> list[str]:
        trace_ends(self._runtime.device.type)
        mark_of = trace.region.mark_of
        read = [(tensor, old, rows) for tensor, mark, old, rows in self._entered.values() if mark_of(tensor) is mark]
        self._entered.clear()  # a mark that is kept looks like a tensor that is alive
        for tensor, outside, rows in read:
            tensor.data = outside
            self.state.hold(tensor, rows)
        different: list[str] = []
        for name, tensor in self.state.names().values() if trace.has_local_values() else ():
            if tensor.device != self._runtime.device or not trace.is_local(tensor):
                continue
            rows = trace.stack([tensor] * trace.groups.count)
            if isinstance(tensor, nn.Parameter) and not isinstance(tensor, DistributedVariable):
                different.append(f"{name}, a {trace.region.describe(tensor)}")
                tensor.data = rows[0].clone()
            else:
                self.state.keep(tensor, rows)
        return different

    @override
    def takes_turns(self) -> bool:
        return False  # replicas share parameters, whose gradients change hands

    @override
    def meet(self, local_id: int, request: MergeRequest) -> Any:
        if self._runner is not None:
            return self._runner.merge(local_id, request)
        return self._call_merge(request.fn, [request.payload])[0]

    def _call_merge(self, fn: Callable[[list[Any]], Sequence[Any]], payloads: list[Any]) -> Sequence[Any]:
        frame = Frame(self._strategy, None)
        push_frame(frame)
        try:
            shown = contextlib.nullcontext() if self._turns is None else self._turns.merging()
            with shown, self._current.region.paused():
                return fn(payloads)
        finally:
            pop_frame(frame)

    @override
    def adopt_new(self) -> None:
        new = self._record.peek_new()
        for obj in new:
            send_to_device(obj, self._runtime.device)
        super().adopt_new()
        for obj in new:
            if not isinstance(obj, Tensor):
                self._set_outside_methods(obj)
                self.metrics.adopt(obj)

    @override
    def leave_scope(self) -> None:
        for obj in self._record.peek_new():
            if not isinstance(obj, Tensor):
                self._set_outside_methods(obj)

    def values_of(self, tensor: Tensor) -> list[Tensor]:
        """Return each local replica's value of a recorded tensor, on the host.

        Raises:
            UnimplementedError: the replicas of other processes have values that this one can't read.
        """
        if self._placement.num_local < self.num_replicas:
            raise UnimplementedError(
                "A variable that each replica writes for itself can't be read over several hosts that drive their "
                "devices together. Start one process for each chip, or return its value from the replica function."
            )
        if runtime.in_function():
            self._runtime.sync()
        with torch._C.DisableTorchFunctionSubclass():
            rows = self.state.rows(tensor)
            if rows is None:
                return [tensor.detach().cpu()] * self._placement.num_local
        return [row[0] for row in self._runtime.rows(rows)]

    def give(self, tensor: Tensor, values: Sequence[Tensor]) -> None:
        """Give each local replica its own value of a recorded tensor."""
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            own = [value.detach().cpu() for value in values]
            tensor.copy_(own[0])
            self.state.hold(tensor, self._runtime.upload([value.unsqueeze(0) for value in own]))

    def first(self, values: Sequence[Tensor]) -> Tensor:
        """Return replica 0's value, given what each group has."""
        if self._trace is None or not self._trace.is_local(values[0]):
            return values[0].detach()
        return self.stack([values[0]] * len(values))[0]

    def replica_id(self) -> Tensor:
        """Return each replica's id, a 0-d int64 tensor."""
        if self._ids is None:
            self._ids = self._upload(range(self.num_replicas))
        return self._current.enter(self._ids)

    def _upload(self, numbers: Sequence[int]) -> Tensor:
        """Send one number for each replica, of all processes."""
        with self._current.region.paused():
            return self._runtime.upload([torch.tensor([numbers[i]]) for i in self._placement.local_replica_ids])

    def sum(self, values: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
        """Return the sum over replicas of what each group has; a value that all replicas have counts once for each.

        It is made in ``dtype``: XLA's partitioner ends the process if a replica's own value is converted here.
        """
        trace, dtype = self._current, dtype or values[0].dtype
        if len(values) == 1 and not trace.is_local(values[0]):
            return values[0].detach().to(dtype) * self.num_replicas
        return self.stack(values).sum(0, dtype=dtype)

    def stack(self, values: Sequence[Tensor]) -> Tensor:
        """Return the replicas' values ``[num_replicas, ...]``, given what each group has."""
        return self._current.stack(values)

    def gather(self, values: Sequence[Tensor], axis: int) -> tuple[Tensor, list[int]]:
        """Concatenate the replicas' values along an axis; return also each replica's size along it."""
        trace = self._current
        of = trace.groups.group_of
        first = values[0]
        for value in values[1:]:
            check_joinable(first, value, axis)
        rows = [trace.rows(value) for value in values]
        return torch.cat([rows[group][i] for i, group in enumerate(of)], axis), [values[g].shape[axis] for g in of]

    def offset(self, sizes: Sequence[int]) -> Tensor:
        """Return where each replica's own part begins in what was gathered, a 0-d int64 tensor."""
        return self._current.enter(self._upload([sum(sizes[:i]) for i in range(len(sizes))]))

    def all_reduce(self, op: ReduceOp, columns: Sequence[Sequence[Tensor]], operation: str) -> list[list[Tensor]]:
        """Combine several values, each given by what every group has; every group gets the result."""
        results = []
        for column in columns:
            if len({(tuple(value.shape), value.dtype) for value in column}) > 1:
                kinds = [f"{tuple(value.shape)} {value.dtype}" for value in column]
                raise InvalidArgumentError(
                    f"{operation}: the replicas' values must have one shape and dtype. Received: {', '.join(kinds)}"
                )
            check_addable(column[0])
            total = self.sum(column, dtype_of_sum(op, column[0]))
            if op is ReduceOp.MEAN:
                total = mean_of_total(total, self.num_replicas)
            results.append([total] * len(column))
        return results

    def merge(self, fn: Callable[..., Any], arguments: Sequence[tuple[Any, Any]]) -> list[Any]:
        """Call the program's function with what the groups bring to a ``merge_call``; return what each group gets."""
        trace = self._current
        args, kwargs = join_results(self._runtime, trace, arguments, is_traced=True)
        with trace.region.resumed():
            result = fn(self._strategy, *args, **kwargs)
        groups, num_local = trace.groups, self._placement.num_local

        def own(group: int, leaf: Any) -> Any:
            if not isinstance(leaf, DistributedValues):
                return leaf
            return values_of_group(self._runtime, leaf, groups, group, trace.enter, num_local)

        return [tree.map_leaves(functools.partial(own, group), result) for group in range(groups.count)]

    def average_buffers(self) -> None:
        """Give all replicas the mean of their buffers; integers take replica 0's value."""
        for dicts, name in self.slots():
            tensor = dicts[0].get(name)
            rows = None if tensor is None or isinstance(tensor, nn.Parameter) else self.state.rows(tensor)
            if rows is not None and tensor is not None:
                floating = rows.is_floating_point() or rows.is_complex()
                self.state.write_shared(tensor, rows.mean(0) if floating else rows[0])

    def had_examples(self) -> list[bool]:
        """Say for each replica whether its share of the batch was not empty."""
        return self._current.had_examples

    def write_shared(self, buffer: Tensor, value: Tensor) -> None:
        """Give a buffer a value that all replicas have."""
        self.state.write_shared(buffer, value)
        if self._turns is not None:
            self._turns.note_shared(buffer)

    @contextlib.contextmanager
    def one_step(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        """Let the first group's step of an optimizer be that of all groups."""
        with contextlib.nullcontext() if self._turns is None else self._turns.step(parameters):
            yield

    def local_of(self, buffers: dict[int, Tensor]) -> set[int]:
        """Return the keys of the tensors that differ, or may differ, between replicas."""
        changed = self._turns.has_changed if self._turns is not None else self._current.is_local
        return {key for key, tensor in buffers.items() if changed(tensor)}

    def _name(self, group: int) -> str:
        members = [i for i, own in enumerate(self._current.groups.group_of) if own == group]
        named = f"replica {members[0]}" if len(members) == 1 else f"replicas {members[0]} to {members[-1]}"
        return f"{named} on {self._runtime.hardware}"
