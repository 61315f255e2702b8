"""The base of the metrics under tf's names: a torchmetrics metric whose subclasses define tf's methods.

torchmetrics' names call tf's (``update`` calls ``update_state``, ``compute`` calls ``result``, ``reset`` calls
``reset_state``), so that a metric works in a ``MetricCollection`` too, whichever of them a subclass overrides.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torchmetrics
from torch import Tensor

from torchstrategy.base import tree
from torchstrategy.base.context import current_replica_context
from torchstrategy.base.devices import kind_of
from torchstrategy.base.log import warn_once
from torchstrategy.base.names import Configurable, as_dtype, snake_case
from torchstrategy.base.options import VariableAggregation
from torchstrategy.replicas.mirrored import bodies

__all__ = ["Metric", "sum_dtype"]


#: Methods of tf's variables, and what to write for them where states are tensors.
_ASSIGNMENTS = {"assign": "self.state = x", "assign_add": "self.state += x", "assign_sub": "self.state -= x"}


@dataclass(frozen=True, eq=False)
class _UnassignedWeight:
    """What ``add_weight`` returns: the attribute that it is assigned to becomes a state of the metric."""

    initial: Tensor
    reduction: Any


class Metric(Configurable, torchmetrics.Metric):
    """Base of the metrics under tf's names, and of your own: what they keep is a tensor on every replica.

    A subclass makes its states with ``add_weight`` in ``__init__`` and overrides ``update_state`` and ``result``.
    States are tensors: where tf says ``self.total.assign_add(x)``, write ``self.total += x``.

    Made in a strategy's scope, each replica has its own states. ``update_state`` inside ``run`` changes those of the
    current replica, and ``result`` inside ``run`` sees only them. In cross-replica context ``result`` sees the states
    of all replicas, aggregated, and must be called by every process; an update counts on one replica of each process.
    Without a strategy the metric is a plain object. It is a torchmetrics metric as well.

    Args:
        dtype: dtype of floating-point results, or its name; ``None`` means torch's default dtype at construction.
        name: the metric's name, for logs; ``None`` means the class's name in snake case. (Keras also numbers them.)

    Raises:
        TypeError: ``dtype`` is no dtype, such as the name, whose place was the first one before Keras 3, or ``name`` no
            string.

    Example:
        >>> class Largest(ts.metrics.Metric):
        ...     def __init__(self, name="largest", dtype=None):
        ...         super().__init__(dtype=dtype, name=name)
        ...         self.largest = self.add_weight(name="largest", initializer=-torch.inf, aggregation="max")
        ...
        ...     def update_state(self, values, sample_weight=None):
        ...         if len(values):  # a replica's share may be empty
        ...             self.largest = torch.maximum(self.largest, values.max())
        ...
        ...     def result(self):
        ...         return self.largest
        >>> strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> with strategy.scope():
        ...     metric = Largest()
        >>> for batch in strategy.experimental_distribute_dataset(torch.tensor([1.0, 5.0, 2.0]), batch_size=2):
        ...     strategy.run(metric.update_state, args=(batch,))
        >>> metric.result()
        tensor(5.)
    """

    full_state_update = False

    #: Whether it was found to be a replica's own, or to be recorded, so that updates need not look again.
    _has_its_place = False

    def __init__(self, dtype: torch.dtype | str | None = None, name: str | None = None) -> None:
        super().__init__()
        if name is not None and not isinstance(name, str):
            raise TypeError(f"A metric's name must be a string. Received: {name!r}")
        self.name = snake_case(type(self).__name__) if name is None else name
        try:
            self.result_dtype = torch.get_default_dtype() if dtype is None else as_dtype(dtype)
        except TypeError as error:
            raise TypeError(f"{error}. If that is the metric's name, write name=: the dtype comes first.") from error
        self._has_its_place = current_replica_context() is not None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # A subclass overrides these freely; what torchmetrics must know of an update is noted around them.
        if "update_state" in vars(cls):
            cls.update_state = _noting_updates(cls.update_state)  # type: ignore[method-assign]
        if "result" in vars(cls):
            cls.result = _giving_results(cls.result)  # type: ignore[method-assign]

    def add_weight(
        self,
        name: str | None = None,
        shape: Sequence[int] = (),
        *,
        initializer: Any = "zeros",
        dtype: torch.dtype | str | None = None,
        aggregation: VariableAggregation | str = VariableAggregation.SUM,
    ) -> Any:
        """Return a new state; assign it to an attribute in ``__init__``: ``self.total = self.add_weight("total")``.

        The state is known, in checkpoints too, by the attribute's name.

        Args:
            name: accepted because tf does.
            shape: the state's shape.
            initializer: the value at first and after a reset: ``"zeros"``, ``"ones"``, a number, a tensor of the shape,
                or a function of the shape and the dtype.
            dtype: the state's dtype; ``None`` means ``float64``, so that the order and number of updates don't show.
            aggregation: how the replicas' states become one: ``SUM`` (the initial value and all that replicas added to
                it), ``MEAN``, ``ONLY_FIRST_REPLICA``, or ``"max"`` or ``"min"``, which tf lacks. Replicas that were
                not updated are left out.

        Raises:
            RuntimeError: the constructor of the base class was not called before.
            TypeError: ``name`` is not a string.
            ValueError: the initializer or the aggregation is not known, or the initial value has another shape.
        """
        if "_defaults" not in vars(self):
            raise RuntimeError(f"Call super().__init__() first in {type(self).__name__}.__init__.")
        if name is not None and not isinstance(name, str):
            raise TypeError(f"add_weight's first argument is the name. Received: {name!r}. Write shape={name!r}.")
        dtype = sum_dtype() if dtype is None else as_dtype(dtype)
        initial = _initial_value(initializer, tuple(shape), dtype)
        return _UnassignedWeight(initial, _reduction(aggregation, initial))

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, _UnassignedWeight):
            self.add_state(name, value.initial, dist_reduce_fx=value.reduction)
        elif isinstance(value, (int, float)) and name in vars(self).get("_defaults", ()):
            state = torch.full_like(self._defaults[name], value, device=self.device)  # type: ignore[arg-type]
            super().__setattr__(name, state)
        else:
            super().__setattr__(name, value)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of floating-point results."""
        return self.result_dtype

    def set_dtype(self, dst_type: torch.dtype | str) -> Metric:
        """Set the results' dtype; sums keep theirs."""
        self.result_dtype = as_dtype(dst_type)
        return self

    def update_state(self, *args: Any, **kwargs: Any) -> None:
        """Add the values of one batch to the states. Subclasses override this."""
        raise NotImplementedError(f"{type(self).__name__} must define update_state, which adds a batch to its states.")

    def result(self) -> Any:
        """Return the metric since the last reset. Subclasses override this.

        In replica context this is the replica's own result, in cross-replica context the one over all replicas.
        """
        raise NotImplementedError(f"{type(self).__name__} must define result, which computes it from the states.")

    def reset_state(self) -> None:
        """Start anew: give every state its initial value."""
        super().reset()

    def reset_states(self) -> None:
        """Start anew: ``reset_state`` under its name in older releases of tf."""
        self.reset_state()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Add the values of one batch and return the result over all batches so far, as tf does.

        (torchmetrics returns the value of the one batch.)
        """
        self.update_state(*args, **kwargs)
        return self.result()

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Add the values of one batch: ``update_state`` under torchmetrics' name."""
        self.update_state(*args, **kwargs)

    def compute(self) -> Any:
        """Return the metric: ``result`` under torchmetrics' name, which warns before the first update."""
        return self.result()

    def reset(self) -> None:
        """Start anew: ``reset_state`` under torchmetrics' name."""
        self.reset_state()

    def _wrap_update(self, update: Callable[..., None]) -> Callable[..., None]:
        return update  # torchmetrics would count an update here, and update_state does


def _noting_updates(update_state: Callable[..., None]) -> Callable[..., None]:
    """Return an ``update_state`` that keeps no graph and tells torchmetrics that the states changed."""

    @functools.wraps(update_state)
    def noting(self: Metric, *args: Any, **kwargs: Any) -> None:
        if not (self._has_its_place or torch.compiler.is_compiling()):
            _warn_if_it_counts_in_one_process(self)
        count = self._update_count
        # States made in inference mode could not be changed in place outside it.
        with torch.inference_mode(False), torch.no_grad():  # noqa: FBT003 - its name is none for torch.compile
            try:
                update_state(self, *args, **kwargs)
            except AttributeError as error:
                if error.name not in _ASSIGNMENTS or not isinstance(error.obj, Tensor):
                    raise
                raise AttributeError(
                    f"{type(self).__name__}.update_state: states are tensors, which have no {error.name}(). Write "
                    f"`{_ASSIGNMENTS[error.name]}`.",
                    name=error.name,
                    obj=error.obj,
                ) from error
        self._update_count = count + 1  # once, although a subclass may call its base class's
        self._computed = None

    return noting


def _warn_if_it_counts_in_one_process(metric: Metric) -> None:
    """Warn of a metric that no scope has recorded and that a replica of one of several processes updates."""
    context = current_replica_context()
    if context is None or context.strategy.workers is None:
        return
    recorded = (body for obj in context.strategy.record for body in bodies(obj) if isinstance(body, torch.nn.Module))
    if not any(metric is module for body in recorded for module in body.modules()):
        warn_once(
            f"Metric {metric.name!r} was made outside `strategy.scope()` and is updated inside `run`: its result is "
            "that of this process only, and not over all replicas. Make it inside `with strategy.scope():`.",
            stacklevel=4,
        )
    metric._has_its_place = True


def _giving_results(result: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``result`` whose tensors are no states, which updates change in place, and have the metric's dtype."""

    @functools.wraps(result)
    def giving(self: Metric) -> Any:
        def finish(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return value.to(self.result_dtype if value.is_floating_point() else value.dtype, copy=True)

        with torch.no_grad():
            return tree.map_leaves(finish, result(self))

    return giving


def sum_dtype() -> torch.dtype:
    """Return the dtype of sums: ``float64``, which only mps lacks."""
    return torch.float64 if kind_of(torch.get_default_device()).has_float64 else torch.float32


def _initial_value(initializer: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if initializer is None or isinstance(initializer, str):
        numbers = {None: 0.0, "zeros": 0.0, "ones": 1.0}
        if initializer not in numbers:
            raise ValueError(
                f"initializer must be 'zeros', 'ones', a number, a tensor or a function. Received: {initializer!r}"
            )
        return torch.full(shape, numbers[initializer], dtype=dtype)
    value = initializer(shape, dtype) if callable(initializer) else initializer
    value = torch.as_tensor(value, dtype=dtype).detach()
    if value.ndim > 0 and value.shape != shape:
        raise ValueError(f"The initial value has shape {tuple(value.shape)}, but the weight's shape is {shape}.")
    return value.expand(shape).clone()


def _reduction(aggregation: VariableAggregation | str, initial: Tensor) -> Any:
    name = aggregation.name if isinstance(aggregation, VariableAggregation) else str(aggregation).upper()
    reductions = {"SUM": "sum", "MEAN": "mean", "MAX": "max", "MIN": "min", "ONLY_FIRST_REPLICA": _first}
    if name not in reductions:
        raise ValueError(f"aggregation must be one of {', '.join(reductions)}. Received: {aggregation!r}")
    if name == "SUM" and initial.count_nonzero() > 0:
        return _SumOfChanges(initial)
    return reductions[name]


def _first(replicas: Tensor) -> Tensor:
    return replicas[0]


class _SumOfChanges:
    """Adds what all replicas added to an initial value, which counts once."""

    def __init__(self, initial: Tensor) -> None:
        self.initial = initial.detach().cpu().clone()  # the state itself changes in place

    def __call__(self, replicas: Tensor) -> Tensor:
        return replicas.sum(0) - (len(replicas) - 1) * self.initial.to(replicas)
