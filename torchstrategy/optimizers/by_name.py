"""Optimizers by the names of tf.keras, with its hyper-parameters, as torch's classes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchstrategy.base.names import find
from torchstrategy.optimizers.ftrl import Ftrl
from torchstrategy.replicas.mirrored import resolve

__all__ = ["check_takes_no_closure", "get", "make_optimizer", "plain_class"]

#: Keras' names: torch's class and Keras' defaults where torch's differ. Keras' ``epsilon`` is 1e-7.
_OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "adadelta": (torch.optim.Adadelta, {"lr": 0.001, "rho": 0.95, "eps": 1e-7}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.001}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.001, "initial_accumulator_value": 0.1, "eps": 1e-7}),
    "adam": (torch.optim.Adam, {"lr": 0.001, "eps": 1e-7}),
    "adamax": (torch.optim.Adamax, {"lr": 0.001, "eps": 1e-7}),
    "adamw": (torch.optim.AdamW, {"lr": 0.001, "weight_decay": 0.004, "eps": 1e-7}),
    "ftrl": (Ftrl, {}),
    # Keras' momentum is 0.96 ** step, torch's 0.96 ** (step * momentum_decay).
    "nadam": (torch.optim.NAdam, {"lr": 0.001, "eps": 1e-7, "momentum_decay": 1.0}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.001, "alpha": 0.9, "eps": 1e-7}),
    "sgd": (torch.optim.SGD, {"lr": 0.01}),
}
_REMEDY = (
    "Any torch optimizer can be given as an instance, a class or a function of the parameters: "
    "optimizer=functools.partial(torch.optim.SGD, lr=0.1)."
)
_CLIP = "To clip, override `clip_gradients` of the model, or clip between `sum_gradients` and `step()`."
#: What is said of Keras' arguments.
_KERAS_ARGUMENTS = {
    "learning_rate": "It is `lr`.", "epsilon": "It is `eps`.", "rho": "It is `alpha`.",
    "beta_1": "It is in `betas=(beta_1, beta_2)`.", "beta_2": "It is in `betas=(beta_1, beta_2)`.",
    "clipnorm": _CLIP, "global_clipnorm": _CLIP, "clipvalue": _CLIP,
    "use_ema": "Use `torch.optim.swa_utils.AveragedModel`.",
    "gradient_accumulation_steps": "It is an argument of `compile`.",
}  # fmt: skip


def get(identifier: Any, **hyper_parameters: Any) -> Callable[[Iterable[Tensor]], Optimizer]:
    """Return a function that makes an optimizer for parameters.

    Args:
        identifier: one of tf.keras' names in any letter case: ``"adadelta"``, ``"adafactor"``, ``"adagrad"``,
            ``"adam"``, ``"adamax"``, ``"adamw"``, ``"ftrl"``, ``"nadam"``, ``"rmsprop"`` or ``"sgd"``. It is torch's
            optimizer of that name with tf.keras' defaults, or ``Ftrl``. Or a class or a function that makes an
            optimizer for parameters.
        hyper_parameters: torch's keyword arguments, such as ``lr``.

    Returns:
        The function. Its argument is what torch's optimizers take first.

    Raises:
        ValueError: the name is not known.
        TypeError: ``identifier`` is neither a name nor such a function, or torch's optimizer has no such argument.

    Example:
        >>> ts.optimizers.get("sgd")([torch.zeros(1)]).defaults["lr"]
        0.01
        >>> ts.optimizers.get("adam", lr=0.1)([torch.zeros(1)]).defaults["lr"]
        0.1
    """
    if isinstance(identifier, str):
        cls, defaults = find(identifier, _OPTIMIZERS, "optimizer=", _REMEDY)
        known = list(inspect.signature(cls).parameters)[1:]
        for name in hyper_parameters.keys() - {*known}:
            hint = _KERAS_ARGUMENTS.get(name, f"It has {', '.join(known)}.")
            raise TypeError(f"torch's {cls.__name__} ({identifier!r}) has no argument {name!r}. {hint}")
        return functools.partial(cls, **(defaults | hyper_parameters))
    if isinstance(identifier, Optimizer) or not callable(identifier):
        raise TypeError(
            f"get takes the name of an optimizer, or a function that makes one. Received: {identifier!r} of type "
            f"{type(identifier).__name__}. {_REMEDY}"
        )
    return functools.partial(identifier, **hyper_parameters) if hyper_parameters else identifier


def make_optimizer(spec: Any, parameters: Iterable[Tensor]) -> Optimizer:
    """Return the optimizer that ``compile(optimizer=...)`` means.

    Args:
        spec: a name, a class, a function of the parameters, or an optimizer.
        parameters: those of the model. An optimizer that exists must train at least one of them.

    Returns:
        The optimizer: a new one, or ``spec`` itself.

    Raises:
        ValueError: the name is not known, there are no parameters, or the optimizer trains other ones.
        TypeError: ``spec`` is none of these, or the function returned something else.
    """
    parameters = list(parameters)
    if isinstance(spec, Optimizer):
        return _checked(spec, parameters)
    if spec is None or not (isinstance(spec, str) or callable(spec)):
        raise TypeError(
            "optimizer= must be a name, a torch optimizer, or a class or function that makes one for parameters. "
            f"Received: {spec!r} of type {type(spec).__name__}. {_REMEDY}"
        )
    make = get(spec)
    if not parameters:
        raise ValueError(
            f"optimizer={_describe(spec)} has nothing to train: the model has no parameters. Make its layers attributes"
            " of the model in its constructor, and call compile afterwards."
        )
    optimizer = make(parameters)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer={_describe(spec)} must return a torch.optim.Optimizer when it is called with the model's "
            f"parameters. It returned {optimizer!r} of type {type(optimizer).__name__}."
        )
    return optimizer


def check_takes_no_closure(optimizer: Any) -> None:
    """Refuse an optimizer whose ``step`` computes losses itself, such as LBFGS.

    Args:
        optimizer: that of a model.

    Raises:
        TypeError: it is such an optimizer.
    """
    cls = type(resolve(optimizer))
    closure = inspect.signature(cls.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"The optimizer is {_article(cls.__name__)} {cls.__name__}, whose step(closure) computes the loss several "
            "times, and fit and an Estimator compute it once for a batch. Use another optimizer, or, for fit, override "
            "train_step and call self.optimizer.step(closure) there, in place of self.minimize(loss)."
        )


def plain_class(cls: type) -> type:
    """Return an optimizer's class without what strategies have mixed in."""
    return next(c for c in cls.__mro__ if not any(map(_is_mixed_in, c.__mro__)))


def _is_mixed_in(cls: type) -> bool:
    """Say whether a class is this library's, and not one of its optimizers."""
    return cls.__module__.startswith("torchstrategy.") and not cls.__module__.startswith("torchstrategy.optimizers.")


def _checked(optimizer: Optimizer, parameters: list[Tensor]) -> Optimizer:
    own = {id(parameter) for parameter in parameters}
    if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
        name = type(optimizer).__name__
        raise ValueError(
            f"optimizer= is {_article(name)} {name} that trains none of the model's parameters: it was made for another"
            " model, or before the parameters were replaced. Make it with model.parameters(), or give its class or "
            f"name and let compile make it: optimizer=functools.partial(torch.optim.{name}, lr=...)."
        )
    return optimizer


def _article(name: str) -> str:
    return "an" if name[0] in "AEIOU" else "a"


def _describe(spec: Any) -> str:
    if isinstance(spec, str):
        return repr(spec)
    return (
        getattr(spec, "__qualname__", None) or repr(spec)
        if inspect.isroutine(spec) or inspect.isclass(spec)
        else (f"{type(spec).__name__} object")
    )
