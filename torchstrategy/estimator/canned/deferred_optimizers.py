"""Optimizers of the canned estimators, which are made for the parameters once these are there."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from torchstrategy.optimizers.by_name import get

__all__ = ["MakeTrainOps", "as_list", "make_factory"]

#: Makes an optimizer for parameters, or a list with one, as ``EstimatorSpec(train_op=)`` takes it.
MakeTrainOps = Callable[[Iterable[Tensor]], Any]

_NAMES = ("Adagrad", "Adam", "Ftrl", "RMSProp", "SGD")
_REMEDY = (
    "Give a name, or a class or function that makes a torch optimizer for parameters, such as "
    "functools.partial(torch.optim.SGD, lr=0.1); it may return a list of the optimizer and a scheduler."
)


def make_factory(optimizer: Any, argument: str, lr: float | None = None) -> MakeTrainOps:
    """Return a function of the parameters for what the user calls the optimizer.

    Args:
        optimizer: one of tf.estimator's names, or such a function.
        argument: the argument's name, for messages.
        lr: the learning rate of a name; ``None`` means Keras' default.

    Raises:
        ValueError: it is another name, an optimizer that exists, or nothing that makes one.
    """
    if isinstance(optimizer, str):
        if optimizer not in _NAMES:
            raise ValueError(f"{argument}={optimizer!r} is not known. Known names: {', '.join(_NAMES)}. {_REMEDY}")
        return get(optimizer, **({} if lr is None else {"lr": lr}))
    if isinstance(optimizer, Optimizer):
        raise ValueError(
            f"{argument}= is a {type(optimizer).__name__} of other parameters: the estimator's are not made yet. "
            f"{_REMEDY}"
        )
    if not callable(optimizer):
        raise ValueError(f"{argument}= must make an optimizer. Received: {optimizer!r}. {_REMEDY}")
    return functools.partial(_make, optimizer, argument)


def as_list(train_ops: Any) -> list[Any]:
    """Return what a factory made as a list."""
    return list(train_ops) if isinstance(train_ops, (list, tuple)) else [train_ops]


def _make(factory: MakeTrainOps, argument: str, parameters: Iterable[Tensor]) -> Any:
    """Call a program's function and look at what it returns."""
    made = factory(parameters)
    if any(isinstance(op, Optimizer) for op in as_list(made)):
        return made
    raise ValueError(
        f"The function {argument}= must return a torch.optim.Optimizer, or a list with one. It returned {made!r}. "
        f"{_REMEDY}"
    )
