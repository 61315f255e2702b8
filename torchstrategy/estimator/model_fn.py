"""Calling a ``model_fn`` with the arguments that it names, and checking what it returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from torchstrategy.base import tree
from torchstrategy.base.log import logger
from torchstrategy.estimator.arguments import argument_names
from torchstrategy.estimator.specs import EstimatorSpec, ModeKeys

__all__ = ["call_model_fn", "check_spec", "verify_model_fn_args"]

_ARGUMENTS = frozenset(("features", "labels", "mode", "params", "self", "config"))
_FUNCTIONS = {
    "loss": "loss=lambda outputs, labels: ...",
    "predictions": "predictions=lambda outputs: {...}",
    "train_op": "train_op=optimizer",
}


def verify_model_fn_args(model_fn: Callable[..., Any], params: Any) -> None:
    """Check that a ``model_fn`` takes what an Estimator gives it, and nothing else.

    Raises:
        ValueError: it has no argument ``features``, no ``params`` though there are some, or other arguments.
    """
    if not callable(model_fn):
        raise ValueError(
            f"model_fn must be a function (features, labels, mode, params, config). Received: {model_fn!r}"
        )
    names = argument_names(model_fn)
    if "features" not in names:
        raise ValueError(f"model_fn ({model_fn}) must include features argument.")
    if params is not None and "params" not in names:
        raise ValueError(
            f"model_fn ({model_fn}) does not include params argument, but params ({params}) is passed to Estimator. "
            "Give model_fn an argument called params."
        )
    if params is None and "params" in names:
        logger.warning(
            "Estimator's model_fn (%s) includes params argument, but params are not passed to Estimator.", model_fn
        )
    if unknown := names - _ARGUMENTS:
        raise ValueError(
            f"model_fn ({model_fn}) has following not expected args: {sorted(unknown)}. It may have features, labels, "
            "mode, params and config."
        )


def call_model_fn(
    model_fn: Callable[..., Any], features: Any, labels: Any, mode: str, params: Any, config: Any
) -> EstimatorSpec:
    """Call a ``model_fn`` with the arguments that it names, and return its spec.

    Raises:
        ValueError: there are labels that it does not take, or it returns no spec that this mode can run.
    """
    names = argument_names(model_fn)
    if "labels" not in names and labels is not None:
        raise ValueError("model_fn does not take labels, but input_fn returns labels. Give it an argument labels.")
    known = {"labels": labels, "mode": mode, "params": params, "config": config}
    logger.info("Calling model_fn.")
    spec = model_fn(features=features, **{name: value for name, value in known.items() if name in names})
    logger.info("Done calling model_fn.")
    check_spec(spec, mode)
    checked: EstimatorSpec = spec
    return checked


def check_spec(spec: Any, mode: str) -> None:
    """Check that a spec holds functions that can be called in every step.

    Raises:
        ValueError: it is no spec, is one for another mode, has no module, or has tensors in place of functions.
    """
    if not isinstance(spec, EstimatorSpec):
        raise ValueError(f"model_fn should return an EstimatorSpec. Received: {spec!r}")
    if spec.mode != mode:
        raise ValueError(
            f"model_fn was called for mode {mode!r} and returned an EstimatorSpec of mode {spec.mode!r}. Return "
            "EstimatorSpec(mode, ...)."
        )
    for name, advice in _FUNCTIONS.items():
        if any(isinstance(leaf, Tensor) for leaf in tree.flatten(getattr(spec, name))[0]):
            raise ValueError(
                f"EstimatorSpec({name}=) holds a tensor. model_fn is called once, not in every step, so it says how "
                f"things are computed: write EstimatorSpec({advice}), and module= for what outputs come from."
            )
    if not isinstance(spec.module, nn.Module):
        raise ValueError(
            "model_fn returned an EstimatorSpec without a module. Write EstimatorSpec(mode, module=..., ...) with the "
            "torch.nn.Module that is called with the features in each step."
        )
    if mode == ModeKeys.TRAIN and not any(hasattr(op, "step") for op in spec.train_ops):
        raise ValueError(
            "EstimatorSpec(train_op=) holds no optimizer. Write train_op=torch.optim.SGD(module.parameters(), lr=...), "
            "or a list with an optimizer in it."
        )
