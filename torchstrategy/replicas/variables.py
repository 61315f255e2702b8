"""``ts.Variable``: a tensor that the program assigns to, usable in torch's functions, optimizers and modules.

Here is the variable with one value: the one that a program without replicas has, and each replica's copy of one that
the replicas share. How copies are kept together is in ``distributed_variables``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from torchstrategy.base.context import current_frame, current_replica_context
from torchstrategy.base.log import warn_once
from torchstrategy.base.names import dtype_name
from torchstrategy.base.options import VariableAggregation, VariableSynchronization

__all__ = [
    "Variable",
    "VariableOptions",
    "fitting",
    "make_copy",
    "refuse_one_for_all",
    "to_tensor",
    "value_of_first_replica",
    "view_of",
    "write",
]

_UPDATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "assign": Tensor.copy_,
    "assign_add": Tensor.add_,
    "assign_sub": Tensor.sub_,
}


class VariableOptions(NamedTuple):
    """What a variable is made with, apart from its value; the fields are arguments of ``Variable``."""

    name: str
    trainable: bool
    synchronization: VariableSynchronization
    aggregation: VariableAggregation


class Variable(Tensor):
    """A tensor that the program assigns to, usable in torch expressions and as a parameter.

    Outside a scope, and with the default strategy and ``OneDeviceStrategy``, this is one tensor. In the scope of
    another strategy ``ts.Variable(...)`` makes a ``MirroredVariable`` or, for ``ON_READ``, a ``SyncOnReadVariable``,
    which have a copy for each replica; so it does inside ``run``, with replica 0's initial value on all replicas.

    Args:
        initial_value: a tensor, array, number or nested list of numbers, another variable, or a function without
            arguments that returns one; any shape. It is copied.
        trainable: whether it is a parameter: ``requires_grad`` is set, and a module that gets it as an attribute lists
            it among its parameters. ``None`` means yes, except for ``ON_READ``.
        name: for messages; ``None`` means "Variable".
        dtype: dtype of the variable; ``None`` means that of the initial value.
        synchronization: when copies are brought together; ``AUTO`` means ``ON_WRITE``.
        aggregation: how the values that replicas assign become one (``ON_WRITE``), or how the copies become one when
            they are read in cross-replica context (``ON_READ``). With ``ON_WRITE`` and ``NONE`` a replica assigns to
            its own copy only.

    Raises:
        ValueError: ``synchronization`` or ``aggregation`` is no member of its enum; several replicas can't have the
            variable with ``synchronization`` ``NONE``, or an integer one with ``MEAN``.
        TypeError: the initial value is no tensor and can't become one.

    Example:
        >>> strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> with strategy.scope():
        ...     v = ts.Variable(2.0, aggregation=ts.VariableAggregation.MEAN)
        >>> v
        MirroredVariable:{
          0: <ts.Variable 'Variable:0' shape=() dtype=float32, numpy=2.0>,
          1: <ts.Variable 'Variable/replica_1:0' shape=() dtype=float32, numpy=2.0>
        }
        >>> def fn():
        ...     return v.assign_add(torch.tensor(ts.get_replica_context().replica_id_in_sync_group + 1.0))
        >>> strategy.experimental_local_results(strategy.run(fn))
        (tensor(3.5000), tensor(3.5000))
        >>> v * 2
        tensor(7., grad_fn=<MulBackward0>)

    The rules for assigning and reading are those of ``tf.Variable`` under a ``tf.distribute`` strategy.
    """

    # As nn.Parameter: results of torch's functions are plain tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    options: VariableOptions
    #: Of a replica's copy: the variable that the user holds.
    user_variable: Any
    #: Whether the replicas' copies may differ: one was assigned to by its replica alone.
    diverges: bool

    def __new__(  # noqa: D102
        cls,
        initial_value: Any,
        trainable: bool | None = None,  # noqa: FBT001 - tf's
        *,
        name: str | None = None,
        dtype: torch.dtype | None = None,
        synchronization: VariableSynchronization = VariableSynchronization.AUTO,
        aggregation: VariableAggregation = VariableAggregation.NONE,
    ) -> Variable:
        if cls is not Variable:
            raise TypeError(f"Make a {cls.__name__} with `ts.Variable(...)` in a strategy's scope.")
        _check_member("synchronization", synchronization, VariableSynchronization)
        _check_member("aggregation", aggregation, VariableAggregation)
        if trainable is None:
            trainable = synchronization is not VariableSynchronization.ON_READ
        options = VariableOptions(name or "Variable", bool(trainable), synchronization, aggregation)
        value = to_tensor(initial_value, dtype)
        frame = current_frame()
        variable: Variable | None = None
        if frame is not None:
            variable = frame.strategy._make_variable(frame.replica_context, value, options)
        return make_copy(Variable, value, options) if variable is None else variable

    @property
    def name(self) -> str:
        """The name given, with TensorFlow's ``:0``; a copy's also names its replica."""
        return f"{self.options.name}:0"

    @property
    def trainable(self) -> bool:
        """Whether the variable is a parameter."""
        return self.options.trainable

    @property
    def synchronization(self) -> VariableSynchronization:
        """When the copies are brought together."""
        return self.options.synchronization

    @property
    def aggregation(self) -> VariableAggregation:
        """How values of several replicas become one."""
        return self.options.aggregation

    def assign(self, value: Any) -> Any:
        """Give the variable a value.

        In replica context values of all replicas are aggregated first, unless ``aggregation`` is ``NONE`` or the
        variable is ``ON_READ``; then every replica assigns to its own copy. In cross-replica context all copies get
        the value; for ``ON_READ`` with ``SUM`` each gets it divided by the number of replicas.

        Args:
            value: a tensor, array or number of the variable's shape. For ``SUM`` and ``MEAN`` over several replicas a
                replica must bring a tensor: what a number that all replicas share should sum up to is not clear.

        Returns:
            In replica context the replica's new value, a tensor; in cross-replica context the variable.

        Raises:
            ValueError: the shape or the dtype does not fit, or the variable can't be assigned to in this context.
            RuntimeError: some replicas assign and others don't.
        """
        return self._update("assign", value)

    def assign_add(self, delta: Any) -> Any:
        """Add to the variable; ``assign`` has the rules.

        For ``ON_READ`` with ``SUM`` this is not defined in cross-replica context.
        """
        return self._update("assign_add", delta)

    def assign_sub(self, delta: Any) -> Any:
        """Subtract from the variable; ``assign`` has the rules.

        For ``ON_READ`` with ``SUM`` this is not defined in cross-replica context.
        """
        return self._update("assign_sub", delta)

    def read_value(self) -> Tensor:
        """Return the variable's value as a tensor of its own.

        In replica context that is the replica's copy. In cross-replica context an ``ON_READ`` variable's copies are
        aggregated; with several processes all must call it then.

        Raises:
            ValueError: an ``ON_READ`` variable without aggregation is read in cross-replica context.
        """
        return self.clone()

    value = read_value

    def numpy(self, *, force: bool = False) -> Any:
        """Return ``read_value()`` as an array."""
        return self.read_value().detach().cpu().numpy(force=force)

    # torch.compile can't trace how replicas meet: it calls this between two graphs, as optimizers' methods.
    @_disable_dynamo
    def _update(self, method: str, value: Any) -> Any:
        context = current_replica_context()
        if self.user_variable is not None:  # a copy that the replica's module holds
            return self.user_variable._update(method, value)
        if context is not None and context.strategy.workers is not None:
            warn_once(
                f"Variable {self.name!r} was not made in a scope of {type(context.strategy).__name__}, so each process "
                f"has a value of its own, and {method} in `run` changes that only. Make it in `strategy.scope()`."
            )
        write(self, method, value)
        return self if context is None else self.detach().clone()

    def __repr__(self) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            array = self.detach().cpu()
        if array.dtype == torch.bfloat16:  # which numpy lacks
            array = array.float()
        shown = array.item() if array.ndim == 0 else repr(array.numpy())
        dtype = dtype_name(self.dtype)
        return f"<ts.Variable {self.name!r} shape={tuple(array.shape)} dtype={dtype}, numpy={shown}>"

    def __float__(self) -> float:
        return float(self.item())  # torch warns that a parameter is not detached; a variable is read

    def __int__(self) -> int:
        return int(self.item())

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec else str(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        if self.user_variable is not None and current_replica_context() is None:
            memo[id(self)] = copied = copy.deepcopy(self.user_variable, memo)
            return copied  # type: ignore[no-any-return]
        return self._plain_copy(memo)

    def _plain_copy(self, memo: dict[int, Any]) -> Variable:
        copied: Variable = make_copy(Variable, self.detach(), self.options)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.user_variable is not None and current_replica_context() is None:
            return self.user_variable.__reduce_ex__(protocol)
        name, trainable, synchronization, aggregation = self.options
        return _unpickle, (self.read_value().detach(), name, trainable, synchronization.name, aggregation.name)


def make_copy(cls: type[Any], value: Tensor, options: VariableOptions, *, share: bool = False) -> Any:
    """Return a variable of a class.

    Args:
        cls: ``Variable`` or a subclass.
        value: its value.
        options: what it is made with.
        share: whether it has the value's memory instead of a copy.
    """
    with torch.inference_mode(False):  # noqa: FBT003 - a variable outlives the mode that it is made in
        data = value.detach() if share else value.detach().clone()
        needs_grad = options.trainable and (data.is_floating_point() or data.is_complex())
        variable = Tensor._make_subclass(cls, data, needs_grad)
    variable.options, variable.user_variable, variable.diverges = options, None, False
    if needs_grad:
        variable._is_param = True  # what isinstance(..., nn.Parameter) asks for
    return variable


def to_tensor(initial_value: Any, dtype: torch.dtype | None) -> Tensor:
    """Return an initial value as a tensor.

    Raises:
        TypeError: it is none and can't become one.
    """
    value = initial_value() if callable(initial_value) and not isinstance(initial_value, Tensor) else initial_value
    if isinstance(value, Variable):
        value = value.read_value()
    try:
        return torch.as_tensor(value, dtype=dtype).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"The initial value of a variable must be a tensor, array, number, nested list of numbers, or a function "
            f"that returns one. Received: {initial_value!r}"
        ) from error


def write(variable: Variable, method: str, value: Any) -> None:
    """Change one copy by ``assign``, ``assign_add`` or ``assign_sub``."""
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        _UPDATES[method](variable, fitting(variable, value))


def fitting(variable: Variable, value: Any) -> Tensor:
    """Return a value as a tensor of the variable's dtype and device.

    Raises:
        ValueError: its shape or dtype does not fit.
    """
    if isinstance(value, Variable):
        value = value.read_value()
    with torch._C.DisableTorchFunctionSubclass():
        try:
            tensor = value.detach() if isinstance(value, Tensor) else torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"Variable {variable.name!r} can't be assigned {value!r}: it is no tensor.") from error
        if tensor.shape != variable.shape:
            raise ValueError(
                f"Variable {variable.name!r} has shape {tuple(variable.shape)}. Received a value of shape "
                f"{tuple(tensor.shape)}"
            )
        if not torch.can_cast(tensor.dtype, variable.dtype):
            raise ValueError(
                f"Variable {variable.name!r} has dtype {variable.dtype}. Received: {tensor.dtype}. Convert it: "
                f"`value.to({variable.dtype})`"
            )
        return tensor.to(device=variable.device, dtype=variable.dtype)


def _check_member(argument: str, value: Any, cls: type[Any]) -> None:
    if not isinstance(value, cls):
        names = ", ".join(member.name for member in cls)
        raise ValueError(f"{argument} must be a ts.{cls.__name__}: one of {names}. Received: {value!r}")


def value_of_first_replica(strategy: Any, own: Tensor, operation: str) -> Tensor:
    """Return replica 0's value on every process, given that of this process's first replica."""
    first = own.clone()
    if strategy.workers is not None:
        strategy.workers.broadcast([first], operation)
    return first


def view_of(copy: Variable) -> Variable:
    """Return a variable with a copy's memory and gradient that knows of no other copies."""
    with torch._C.DisableTorchFunctionSubclass():
        view: Variable = make_copy(Variable, copy, copy.options, share=True)
        if view.requires_grad:
            view.grad = copy.grad
    return view


def refuse_one_for_all(what: str, value: Any) -> None:
    """Refuse what several replicas shall have copies of if it is a variable that knows of no copies.

    Args:
        what: names it.
        value: anything.

    Raises:
        TypeError: it is such a variable.
    """
    if type(value) is Variable and value.user_variable is None:
        raise TypeError(
            f"{what} is a ts.Variable that was made outside `strategy.scope()`: it is one tensor, so its copies would "
            "not follow what is assigned to it. Make it in the scope, alone or with all of its model."
        )


def _unpickle(value: Tensor, name: str, trainable: bool, synchronization: str, aggregation: str) -> Variable:  # noqa: FBT001
    modes = VariableSynchronization[synchronization], VariableAggregation[aggregation]
    variable: Variable = make_copy(Variable, value, VariableOptions(name, trainable, *modes))
    return variable


torch.serialization.add_safe_globals([_unpickle])  # for torch.load, whose files name this function
