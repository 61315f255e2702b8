"""Variables with a copy for each replica, and how the copies are kept equal.

Where a process hosts several replicas the variable in the user's hands stands for their copies:
``__torch_function__`` puts the current replica's copy in its place. The copies are plain variables; the replicas'
modules and optimizers hold them and never see the user's. With one replica in a process it is its own copy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from torchstrategy.base.context import current_replica_context
from torchstrategy.base.devices import tensor_device
from torchstrategy.base.log import users_frame, warn_once_at
from torchstrategy.base.options import ReduceOp, VariableAggregation
from torchstrategy.base.values import DistributedValues, PerReplica
from torchstrategy.replicas.adapters import HandleOfAll
from torchstrategy.replicas.record import Record
from torchstrategy.replicas.runner import MergeRequest
from torchstrategy.replicas.variables import (
    Variable,
    VariableOptions,
    fitting,
    make_copy,
    value_of_first_replica,
    view_of,
    write,
)

__all__ = [
    "VALUE_PROPERTIES",
    "DistributedVariable",
    "MirroredVariable",
    "distribute",
    "recorded_variables",
    "replaced",
    "single",
    "user_variable",
]

#: What is called for each copy outside run; ``__set__`` and ``__delete__`` are those of properties, such as ``grad``.
_ON_EACH_COPY = frozenset({
    "requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "copy_", "__set__",
    "__delete__",
})  # fmt: skip
#: What can be asked of a copy without reading its value: of an ON_READ variable, reading is a collective.
_ABOUT_A_COPY = frozenset({
    "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "data_ptr", "element_size",
    "get_device", "is_floating_point", "is_complex", "is_signed", "is_contiguous", "is_inference", "__len__",
    "untyped_storage",
})  # fmt: skip
_COPIES_DIFFER = (
    "Variable {!r} is read outside `run`, which gives replica 0's value, but its copies differ: without an "
    "aggregation each replica assigns to its own, as in tf. Make it with aggregation=ts.VariableAggregation.SUM, MEAN "
    "or ONLY_FIRST_REPLICA, or read all: `strategy.experimental_local_results(variable)`."
)
#: What hands out memory, to which may be written in a way that torch does not tell.
_LENDS = frozenset({"data", "__dlpack__", "untyped_storage"})
VALUE_PROPERTIES = frozenset({"T", "mT", "H", "mH", "data", "real", "imag"})


class DistributedVariable(Variable):
    """A variable with a copy for each replica of this process; ``values`` has them.

    With one replica in this process the variable is its own copy. So it is where one copy serves all replicas: what
    each of them holds is the hosting's business then.
    """

    strategy: Any
    #: Whether the processes have not yet taken the chief's initial value.
    is_new: bool
    _version_in_step: int
    _lent: Tensor | None  # replica 0's value when its memory was handed out, or since then last given to the others
    _copies: tuple[Variable, ...]  # empty with one replica in this process

    @property
    def values(self) -> tuple[Tensor, ...]:  # type: ignore[override]
        """The copies in the order of this process's replicas, plain variables, each assigned to by itself."""
        self.follow_first()
        if self.serves_all:
            rows = zip(self.strategy.hosting.values_of(self), _copy_names(self.strategy, self.options), strict=True)
            return tuple(make_copy(Variable, value, self.options._replace(name=name)) for value, name in rows)
        return tuple(view_of(copy) for copy in self.copies)

    @property
    def serves_all(self) -> bool:
        """Whether the only copy serves several replicas; ``values`` are then values to look at."""
        return bool(self.strategy.placement.replicas_per_copy > 1)

    @property
    def copies(self) -> tuple[Variable, ...]:
        """What the replicas' modules and optimizers hold for the variable."""
        return self._copies or (self,)

    @property
    def slot(self) -> tuple[tuple[dict[str, Any], ...], str]:
        """Where the copies are, as ``replicas.clone.Slot`` says it for parameters of modules."""
        return tuple({self.options.name: copy} for copy in self.copies), self.options.name

    def copy_on(self, local_id: int) -> Variable:
        """Return the copy of a replica, by its position in this process."""
        return self._copies[local_id] if self._copies else self

    @classmethod
    def __torch_function__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        target = args[0] if args else None
        if name in _ON_EACH_COPY and isinstance(target, DistributedVariable) and not target._in_replica_context():
            return target._call_for_each_copy(func, name, args, kwargs or {})
        asked = func.__self__.__name__ if name == "__get__" else name
        reads = name not in _ABOUT_A_COPY and (name != "__get__" or asked in VALUE_PROPERTIES)
        used: list[tuple[DistributedVariable, Tensor, int]] = []

        def here(variable: DistributedVariable) -> Tensor:
            tensor = variable._here(reads=reads)
            used.append((variable, tensor, tensor._version))
            if asked in _LENDS and variable._copies and variable._lent is None and not variable._in_replica_context():
                variable._lent = tensor.detach().clone()
            return tensor

        with torch._C.DisableTorchFunctionSubclass():
            result = func(*replaced(args, here), **replaced(kwargs or {}, here))
            for variable, tensor, version in used:
                if tensor._version != version and not variable._in_replica_context():
                    variable._note_change(name)
        return user_variable(result)

    @override
    def read_value(self) -> Tensor:
        return self._here(reads=True).clone()

    value = read_value

    @override
    @_disable_dynamo
    def _update(self, method: str, value: Any) -> Any:
        context = current_replica_context()
        if context is None or context.strategy is not self.strategy:
            if context is not None and context.num_replicas_in_sync > 1:
                raise RuntimeError(
                    f"Variable {self.name!r} belongs to {self.strategy!r} and can't be changed in `run` of "
                    f"{context.strategy!r}, whose replicas would each do it. Make it in that strategy's scope."
                )
            self._update_all(method, value)
            return self
        if isinstance(value, Variable):  # while it stands for this replica's copy
            value = value.read_value().detach()
        copy = self.copy_on(context.local_id)
        if self._writes_locally():
            write(copy, method, value)
            copy.diverges = True
        else:
            if self.serves_all and isinstance(value, Tensor):
                value = fitting(self, value)  # in the merge, nobody sees that the replicas' values differ
            total = context._meet(MergeRequest(f"{method} of variable {self.name!r}", self._merge(method), value))
            if self.serves_all:
                write(copy, method, total)
        with torch._C.DisableTorchFunctionSubclass():
            return copy.detach().clone()

    def _writes_locally(self) -> bool:
        return self.options.aggregation is VariableAggregation.NONE

    def _update_all(self, method: str, value: Any) -> None:
        """Change all copies in cross-replica context."""
        value = single(self, value)
        fitting(self, value)  # before the first copy changes
        self.follow_first()
        if self.serves_all and method != "assign" and self.diverges:
            rows = [make_copy(Variable, own, self.options) for own in self.strategy.hosting.values_of(self)]
            for own in rows:
                write(own, method, value)
            self.strategy.hosting.give(self, rows)
            return
        for copy in self.copies:
            write(copy, method, value)
            if method == "assign":
                copy.diverges = False
        self.note_in_step()

    def note_in_step(self) -> None:
        """Note that what was written to replica 0's copy so far is meant for it alone, or was given to the others."""
        if self._copies:
            self._version_in_step = self._copies[0]._version
            if self._lent is not None:
                with torch._C.DisableTorchFunctionSubclass():
                    self._lent = self._copies[0].detach().clone()

    def note_separate_writes(self) -> None:
        """Note that the copies were written one by one, so that they may differ."""
        for copy in self.copies:
            copy.diverges = True
        self.note_in_step()

    def follow_first(self) -> None:
        """Give the other copies what was written outside run to replica 0's, such as by way of a view of it."""
        first, *others = self.copies
        if not others or (first._version == self._version_in_step and self._lent is None):
            return
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            if self._lent is not None and first._version == self._version_in_step and torch.equal(first, self._lent):
                return
            for copy in others:
                copy.copy_(first)
        self.note_in_step()

    def _note_change(self, name: str) -> None:  # noqa: ARG002 - for subclasses
        """Follow a torch function that changed what stood for the variable."""
        self.follow_first()

    def _merge(self, method: str) -> Callable[[list[Any]], Sequence[Any]]:
        def merge(values: list[Any]) -> Sequence[Any]:
            totals = self._aggregate(method, values)
            if self.serves_all:
                return totals
            for copy, total in zip(self.copies, totals, strict=True):
                write(copy, method, total)
            return [None] * len(values)

        return merge

    def _aggregate(self, method: str, values: list[Any]) -> list[Any]:
        """Return what each local copy gets of the values that the local replicas bring."""
        strategy = self.strategy
        operation = f"{method} of variable {self.name!r}"
        if strategy.num_replicas_in_sync == 1:
            return values
        if self.options.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            if self.serves_all:
                return [strategy.hosting.first([torch.as_tensor(value) for value in values])] * len(values)
            return [value_of_first_replica(strategy, fitting(self, values[0]), operation)] * len(values)
        if not all(isinstance(value, Tensor) for value in values):
            self._check_numbers(values, operation)
            return values
        with torch.no_grad():
            own = values  # which `_update` has fitted
            if not self.serves_all:
                own = [fitting(self.copy_on(i), value) for i, value in enumerate(values)]
            rows = strategy._all_reduce_columns(ReduceOp[self.options.aggregation.name], [own], operation)
        return list(rows[0])

    def _check_numbers(self, values: list[Any], operation: str) -> None:
        """Accept Python numbers for the mean if they are equal: tf's rule."""
        equal = all(not isinstance(value, Tensor) and np.array_equal(value, values[0]) for value in values)
        if self.options.aggregation is VariableAggregation.MEAN and equal:
            if self.strategy.workers is not None:
                self.strategy.workers.agree(operation, np.asarray(values[0]).tolist(), "value")
            return
        raise ValueError(
            f"{operation}: with aggregation {self.options.aggregation.name} over {self.strategy.num_replicas_in_sync} "
            f"replicas every replica must bring a tensor. Received: {values}. Write `torch.tensor(...)`, whose "
            f"{self.options.aggregation.name} over the replicas is taken."
        )

    def _in_replica_context(self) -> bool:
        context = current_replica_context()
        return context is not None and context.strategy is self.strategy

    def _here(self, *, reads: bool) -> Tensor:
        """Return what stands for the variable in a torch function that is called here."""
        context = current_replica_context()
        if context is not None and context.strategy is self.strategy:
            return self.copy_on(context.local_id)
        if reads and self._copies and self._copies[0].diverges:
            self._warn_if_copies_differ()
        return self.copy_on(0)

    def _warn_if_copies_differ(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            first, *others = (copy.detach().cpu() for copy in self._copies)
            if not all(torch.equal(first, other) for other in others):
                warn_once_at(users_frame(), _COPIES_DIFFER.format(self.name), of=self.strategy)

    def _call_for_each_copy(self, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:  # noqa: ARG002
        """Call a torch function in cross-replica context, once for each copy."""

        def on_copy(local_id: int) -> Any:
            def own(leaf: Any) -> Any:
                if isinstance(leaf, DistributedVariable):
                    return leaf.copy_on(local_id) if leaf is self else leaf._here(reads=True)
                return leaf.to(self.copy_on(local_id).device, copy=True) if local_id else leaf

            return func(*replaced(args, own, Tensor), **replaced(kwargs, own, Tensor))

        with torch._C.DisableTorchFunctionSubclass():
            results = [on_copy(local_id) for local_id in range(len(self.copies))]
        self.note_in_step()
        if isinstance(results[0], RemovableHandle):
            return HandleOfAll(results)
        return self if isinstance(results[0], Variable) else results[0]

    @override
    def __repr__(self) -> str:  # type: ignore[override]
        copies: Sequence[Any] = self.values if self.serves_all else self.copies
        text = ",\n".join(f"  {i}: {Variable.__repr__(copy)}" for i, copy in enumerate(copies))
        return f"{type(self).__name__}:{{\n{text}\n}}"

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        context = current_replica_context()
        if context is not None:
            return self._plain_copy(memo)
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            copied = distribute(type(self), self.strategy, self.copies[0], self.options)
            for own, other in zip(copied.copies, self.copies, strict=True):
                own.copy_(other)
                own.diverges = other.diverges
        copied.note_in_step()
        if self.serves_all and self.diverges:
            self.strategy.hosting.give(copied, self.strategy.hosting.values_of(self))
        copied.is_new = self.is_new
        memo[id(self)] = copied
        return copied


class MirroredVariable(DistributedVariable):
    """A variable whose copies are equal: every assignment reaches all of them. Made by ``ts.Variable``."""


def recorded_variables(record: Record) -> list[DistributedVariable]:
    """Return the living variables that a strategy has recorded."""
    return [tensor for tensor in record.tensors() if isinstance(tensor, DistributedVariable)]


def user_variable(value: Any) -> Any:
    """Return the variable that the user holds for a replica's copy of it; anything else as it is."""
    if type(value) is Variable and value.user_variable is not None:
        return value.user_variable
    return value


def distribute(
    cls: type[DistributedVariable], strategy: Any, value: Tensor, options: VariableOptions
) -> DistributedVariable:
    """Return a variable with a copy on each of this process's replicas, recorded by the strategy."""
    devices = [tensor_device(device) for device in strategy.placement.devices]
    copies: tuple[Variable, ...] = ()
    if len(devices) > 1:
        copies = tuple(
            make_copy(Variable, value.to(device), options._replace(name=name))
            for device, name in zip(devices, _copy_names(strategy, options), strict=True)
        )
        value = copies[0]  # whose memory the user's has, for code that bypasses __torch_function__
    variable: DistributedVariable = make_copy(cls, value.to(devices[0]), options, share=bool(copies))
    variable.strategy, variable._copies, variable.is_new, variable._lent = strategy, copies, False, None
    for copy in copies:
        copy.user_variable = variable
    if copies and variable.requires_grad:
        with torch._C.DisableTorchFunctionSubclass():
            variable.register_hook(functools.partial(_refuse_gradient, variable.name))  # type: ignore[no-untyped-call]
    variable.note_in_step()
    strategy.record.add(variable)
    return variable


def _copy_names(strategy: Any, options: VariableOptions) -> list[str]:
    return [f"{options.name}/replica_{i}" if i else options.name for i in strategy.placement.local_replica_ids]


def _refuse_gradient(name: str, _: Tensor) -> NoReturn:
    raise RuntimeError(
        f"A function that torch does not see into, such as `torch.autograd.Function.apply`, got variable {name!r} "
        "itself and not this replica's copy of it. Give it `variable.view_as(variable)`."
    )


def single(variable: Variable, value: Any) -> Any:
    """Return the one value that a distributed value stands for.

    Raises:
        ValueError: its values may differ.
    """
    if isinstance(value, PerReplica):
        raise ValueError(
            f"Variable {variable.name!r} can't be assigned a PerReplica in cross-replica context. Reduce it first: "
            "`variable.assign(strategy.reduce(...))`, or assign in `run`."
        )
    return value.values[0] if isinstance(value, DistributedValues) else value


def replaced(value: Any, fn: Callable[[Any], Any], cls: type[Any] = DistributedVariable) -> Any:
    """Return a function's arguments with ``fn(x)`` in place of each ``x`` of a class."""
    if isinstance(value, cls):
        return fn(value)
    if type(value) in (tuple, list):
        return type(value)([replaced(item, fn, cls) for item in value])
    if type(value) is dict:
        return {key: replaced(item, fn, cls) for key, item in value.items()}
    return value
