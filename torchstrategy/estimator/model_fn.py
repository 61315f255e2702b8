"""Calling a ``model_fn`` or an ``input_fn`` with the arguments that it names, and checking what it returns."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn

from torchstrategy.base import tree
from torchstrategy.base.log import logger
from torchstrategy.data.own_streams import InputContext
from torchstrategy.estimator.specs import EstimatorSpec, ModeKeys

__all__ = ["argument_names", "as_dataset", "call_input_fn", "call_model_fn", "parse_element", "verify_model_fn_args"]

_PAIR = "input_fn should return (features, labels) as a len 2 tuple."


def call_input_fn(
    input_fn: Callable[..., Any], mode: str, params: Any, config: Any, input_context: InputContext | None = None
) -> Any:
    """Call an ``input_fn`` with those of ``mode``, ``params``, ``config`` and ``input_context`` that it names.

    Without an input context the argument is not given: its default holds, and without one Python's TypeError comes.

    Raises:
        TypeError: it is no function, or has other arguments without defaults.
    """
    if not callable(input_fn):
        raise TypeError(f"input_fn must be a function that returns the data. Received: {input_fn!r}")
    names = argument_names(input_fn)
    known = {"mode": mode, "params": params, "config": config}
    if input_context is not None and "input_context" in names:
        logger.info("The `input_fn` accepts an `input_context` which will be given by the strategy.")
        known["input_context"] = input_context
    return input_fn(**{name: value for name, value in known.items() if name in names})


class RepeatedBatch(Iterable[Any]):
    """A batch that never ends, as tensors that tf's ``input_fn`` returns are constants of its graph."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self.batch


def as_dataset(returned: Any) -> Iterable[Any]:
    """Return an iterable of batches for what an ``input_fn`` returned: data, or one ready batch.

    A tensor, an array, a dictionary and a tuple are one batch; everything else that can be iterated gives batches.

    Raises:
        ValueError: it is a tuple of another length than 2.
        TypeError: it can be iterated only once, or not at all.
    """
    if isinstance(returned, (tuple, Tensor, np.ndarray, Mapping)):
        parse_element(returned)
        return RepeatedBatch(returned)
    if isinstance(returned, Iterator):
        raise TypeError(
            f"input_fn returned a {type(returned).__name__}, which can be iterated only once, so that training could "
            "not go on at the same place after a restart. Return a DataLoader, ts.data.Dataset.from_generator(...), a "
            "list of batches, or another object whose __iter__ starts anew."
        )
    if isinstance(returned, (str, bytes)) or not isinstance(returned, Iterable):
        raise TypeError(
            "input_fn must return an iterable of batches, such as a DataLoader or a ts.data.Dataset, or one batch as "
            f"tensors or (features, labels). Received: {returned!r}"
        )
    return returned


def parse_element(element: Any) -> tuple[Any, Any]:
    """Return the features and labels of an element; labels are ``None`` if it has none.

    A list of one is what a ``DataLoader`` gives for a ``TensorDataset`` of one tensor: features.

    Raises:
        ValueError: it is a tuple or list of another length.
    """
    if not isinstance(element, (list, tuple)):
        return element, None
    if isinstance(element, list) and len(element) == 1:
        return element[0], None
    if len(element) != 2:
        raise ValueError(f"{_PAIR} Received {len(element)} parts: put further ones into a dictionary of features.")
    return element[0], element[1]


def argument_names(fn: Callable[..., Any]) -> frozenset[str]:
    """Return the names of a callable's arguments; of a ``functools.partial``, those that it does not give itself."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    given = fn.keywords if isinstance(fn, functools.partial) else {}
    parameters = inspect.signature(fn).parameters.items()
    return frozenset(name for name, parameter in parameters if parameter.kind in named and name not in given)


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
