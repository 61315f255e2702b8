"""What replica functions get of their arguments, and what becomes of the values that they return.

The functions here are the leaves of ``Strategy.run``, ``reduce`` and ``gather``; strategy.py walks the structures.
"""

from __future__ import annotations

import functools
import gc
import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import CodeType, FunctionType, MethodType, TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchstrategy.base import tree
from torchstrategy.base.context import Frame, pop_frame, push_frame
from torchstrategy.base.devices import Placement, kind_of, tensor_device
from torchstrategy.base.log import add_note, shows_all_frames
from torchstrategy.base.options import ReduceOp
from torchstrategy.base.values import DistributedValues, PerReplica, regroup
from torchstrategy.collectives.cross_device_ops import CrossDeviceOps
from torchstrategy.collectives.process_group import WorkerGroup
from torchstrategy.collectives.reductions import check_gather_axis, gather, reduce
from torchstrategy.replicas.distributed_variables import DistributedVariable, MirroredVariable
from torchstrategy.replicas.hosting import Hosting, on_device
from torchstrategy.replicas.record import owner, start_recording, stop_recording
from torchstrategy.replicas.shared_state import watching_shared_state
from torchstrategy.replicas.variables import Variable

__all__ = [
    "Scope",
    "explain_misfit",
    "gather_leaf",
    "inputs_of",
    "reduce_leaf",
    "regroup_results",
    "take_in",
    "watched",
    "without_graph",
]


#: Runs of a function in which it is looked at what it changes.
_NUM_LOOKED_AT = 3


def watched(
    looked_at: Counter[CodeType], given: Any, contexts: Sequence[Any], parameters: Callable[[], Sequence[Tensor]]
) -> AbstractContextManager[Any]:
    """Return a context manager that gives what is to be called for a replica function, which is watched at first.

    Args:
        looked_at: how many runs of which function's code were.
        given: the function.
        contexts: of this process's replicas.
        parameters: returns those of the first.
    """
    fn = given
    while isinstance(fn, functools.partial) or (isinstance(fn, FunctionType) and "__wrapped__" in fn.__dict__):
        fn = fn.func if isinstance(fn, functools.partial) else fn.__dict__["__wrapped__"]
    code = fn.__code__ if isinstance(fn, (FunctionType, MethodType)) else None  # a method has its function's
    if code is None or looked_at[code] >= _NUM_LOOKED_AT:
        return nullcontext(given)
    looked_at[code] += 1
    return watching_shared_state(given, fn, contexts, parameters)


def take_in(strategy: Any, objects: Sequence[Any]) -> None:
    """Record objects as the scope would have, on the device on which it would have made them.

    Args:
        strategy: whose they become.
        objects: ``Strategy.replicate`` says which.
    """
    if not objects:
        raise ValueError("replicate takes the objects to replicate: strategy.replicate(model, optimizer).")
    for obj in objects:
        _check(strategy, obj)
    device = tensor_device(strategy.placement.devices[0])
    if device.type != "cpu" and not kind_of(device).is_traced:  # else at the first run, with what XLA traces
        for obj in objects:
            if isinstance(obj, nn.Module):
                obj.to(device)
        for obj in objects:
            if isinstance(obj, Optimizer) and obj.state:
                obj.load_state_dict(obj.state_dict())  # which takes what it remembers to the parameters' device
    for obj in (*objects, *_schedulers_of(objects)):
        strategy.record.add(obj)
    strategy.gradients.take_up(objects)


def _schedulers_of(objects: Sequence[Any]) -> list[Any]:
    """Return the schedulers of optimizers, which would take a step for each replica if they were left out."""
    optimizers = {id(obj) for obj in objects if isinstance(obj, Optimizer)}
    if not optimizers:
        return []
    schedulers = [obj for obj in gc.get_objects() if issubclass(type(obj), LRScheduler)]
    return [obj for obj in schedulers if id(getattr(obj, "optimizer", None)) in optimizers]


def _check(strategy: Any, obj: Any) -> None:
    if isinstance(obj, Tensor):
        raise TypeError("A tensor can't be replicated. Make it with `ts.Variable(tensor)` in `strategy.scope()`.")
    other = owner(obj)
    if other is not None and other is not strategy:
        raise ValueError(
            f"The {type(obj).__name__} belongs to a {type(other).__name__} already, so it can't be replicated by this "
            f"{type(strategy).__name__}. Make another one, and load its state_dict."
        )


class Scope:
    """Makes a strategy current and records what is made inside; usable once.

    Args:
        strategy: what ``with strategy.scope() as s`` gives.
        frame: pushed on entry; ``None`` for the default strategy, whose scope changes nothing.
        device: the default device inside, as tensors report it; ``None`` leaves it.
    """

    def __init__(self, strategy: Any, frame: Frame | None, device: Any) -> None:
        self._strategy = strategy
        self._frame = frame
        self._device = device
        self._stack: ExitStack | None = None
        self._used = False

    def __enter__(self) -> Any:
        if self._used:
            raise RuntimeError(
                "This scope was entered before. Call `strategy.scope()` anew: `with strategy.scope(): ...`."
            )
        self._strategy._check_can_enter()
        self._used = True
        stack = ExitStack()
        stack.enter_context(on_device(self._device))
        if self._frame is not None:
            push_frame(self._frame)
            start_recording(self._strategy)
        self._stack = stack
        return self._strategy

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stack is None:
            raise RuntimeError("Strategy scope nesting error: this scope is not open. Use `with strategy.scope():`.")
        if self._frame is not None:
            pop_frame(self._frame)
            stop_recording()
            self._strategy.hosting.leave_scope()
            self._strategy.gradients.take_up(self._strategy.record.peek_new())
        stack, self._stack = self._stack, None
        stack.close()


class ReplicatedStrategy(Protocol):
    """What is asked here of the strategy whose replicas have the values."""

    placement: Placement
    hosting: Hosting
    workers: WorkerGroup | None
    cross_device_ops: CrossDeviceOps

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas in all processes."""


def inputs_of(strategy: ReplicatedStrategy, local_id: int, structure: Any) -> Any:
    """Return what a replica, by its position in the process, sees of a structure of arguments.

    Raises:
        IndexError: a distributed value has no value for the replica.
    """
    if not _needs_selection(structure):
        return structure
    return tree.map_leaves(lambda leaf: _input_leaf(strategy, local_id, leaf), structure)


def explain_misfit(
    error: BaseException, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Say what ``args`` is, in an error of a function that could only be called with all of it as one argument."""
    if not isinstance(error, TypeError):
        return
    try:
        signature = inspect.signature(fn, follow_wrapped=False)
    except (TypeError, ValueError):
        return
    if _fits(signature, args, kwargs) or not _fits(signature, (args,), kwargs):
        return
    if error.__traceback__ is not None and not shows_all_frames():
        error.__traceback__.tb_next = None  # no line of the program's follows
    name = getattr(fn, "__name__", "the function")
    add_note(
        error, f"`args` is spread over the parameters of {name}, as in tf. To give it one batch, write args=(batch,)."
    )


def _fits(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def regroup_results(hosting: Hosting, results: Sequence[Any]) -> Any:
    """Return the results of this process's replicas as one structure with ``PerReplica`` leaves.

    Where each replica returned its own counterpart of one of the user's tensors, that tensor stands in the result.
    """
    return tree.map_leaves(lambda leaf: _original(hosting, leaf), regroup(results))


def reduce_leaf(strategy: ReplicatedStrategy, op: ReduceOp, leaf: Any, axis: Any) -> Any:
    """Combine one value over all replicas; ``Strategy.reduce`` has the rules."""
    if leaf is None:
        raise ValueError("Can't reduce None: the replica function returned nothing.")
    if isinstance(leaf, MirroredVariable):
        return _reduce_mirrored(op, leaf, axis)
    num_values = strategy.num_replicas_in_sync
    if isinstance(leaf, DistributedValues):
        _check_length(strategy, leaf, allows_fewer=True)  # as tf: all that is there counts
    if isinstance(leaf, (DistributedValues, DistributedVariable)):
        values = leaf.values
    elif axis is None and strategy.workers is not None:  # tf's rule: it counts once for each process
        values, num_values = (_tensor_of(leaf),), strategy.workers.size
    elif axis is None:
        if op is ReduceOp.SUM and num_values > 1:
            raise ValueError(f"A non-DistributedValues value {leaf} cannot be reduced with the given reduce op {op}.")
        return without_graph(leaf)
    else:  # every local replica has it
        values = (_tensor_of(leaf),) * len(strategy.placement.devices)
    for value in values:
        if not isinstance(value, Tensor):
            raise ValueError(
                f"Only tensors can be reduced; the replicas hold {value!r}. Return a tensor from the replica function, "
                "such as `loss.detach()` in place of `loss.item()`, or `torch.tensor(...)`."
            )
    with torch.no_grad():
        return reduce(
            op,
            [value.detach() for value in values],
            axis,
            strategy.placement.devices,
            strategy.cross_device_ops,
            strategy.workers,
            num_values,
        )


def without_graph(leaf: Any) -> Any:
    """Return a value that is passed on as it is: detached, as what several replicas' values become."""
    is_computed = isinstance(leaf, Tensor) and leaf.requires_grad and not isinstance(leaf, Variable)
    return leaf.detach() if is_computed else leaf


def _tensor_of(leaf: Any) -> Tensor:
    try:
        return torch.as_tensor(leaf)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"Only tensors and numbers can be reduced. Received: {leaf!r}") from None


def gather_leaf(strategy: ReplicatedStrategy, leaf: Any, axis: int) -> Any:
    """Concatenate one value of all replicas; ``Strategy.gather`` has the rules."""
    if isinstance(leaf, DistributedValues):
        _check_length(strategy, leaf, allows_fewer=True)  # as tf: all that is there counts
    if isinstance(leaf, (DistributedValues, DistributedVariable)):
        values = leaf.values
    elif strategy.workers is not None:
        values = (leaf,)
    else:
        return without_graph(leaf)
    for value in values:
        axis = check_gather_axis(axis, value)
    with torch.no_grad():
        return gather([value.detach() for value in values], axis, strategy.workers, f"Strategy.gather(axis={axis})")


def _input_leaf(strategy: ReplicatedStrategy, local_id: int, leaf: Any) -> Any:
    if isinstance(leaf, DistributedValues):
        _check_length(strategy, leaf, allows_fewer=False)
        return leaf.values[local_id]
    if isinstance(leaf, torch.nn.Parameter) and not isinstance(leaf, Variable):  # which knows the replica itself
        return strategy.hosting.counterpart(local_id, leaf)
    return leaf


def _check_length(strategy: ReplicatedStrategy, leaf: DistributedValues, *, allows_fewer: bool) -> None:
    """Check that there is one value for each replica of this process: some of another strategy's would be dropped.

    Raises:
        IndexError: it has too few values.
        ValueError: it has too many.
    """
    count, num_local = len(leaf.values), strategy.placement.num_local
    if count > num_local or (count < num_local and not allows_fewer):
        raise (IndexError if count < num_local else ValueError)(
            f"A {type(leaf).__name__} holds {count} values, but {type(strategy).__name__} has {num_local} replicas in "
            "this process. Make it with this strategy, or take the values of another one by its "
            "`experimental_local_results` and give them as they are meant, such as torch.cat(values)."
        )


def _needs_selection(structure: Any) -> bool:
    if isinstance(structure, (tuple, list)):
        return any(map(_needs_selection, structure))
    if isinstance(structure, dict):
        return any(map(_needs_selection, structure.values()))
    return isinstance(structure, (DistributedValues, torch.nn.Parameter)) or hasattr(structure, "__dataclass_fields__")


def _original(hosting: Hosting, leaf: Any) -> Any:
    if isinstance(leaf, PerReplica) and isinstance(leaf.values[0], (torch.nn.Parameter, Variable)):
        original = hosting.original(leaf.values[0])
        if original is not None and all(
            hosting.counterpart(i, original) is value for i, value in enumerate(leaf.values)
        ):
            return original
    return leaf


def _reduce_mirrored(op: ReduceOp, variable: MirroredVariable, axis: Any) -> Tensor:
    if op is ReduceOp.MEAN and axis is None:
        return variable.values[0]
    raise ValueError(
        f"Mirrored variable {variable.name!r} has one value on all replicas. Take `v.read_value()`, or reduce what the "
        "replica function computes with it."
    )
