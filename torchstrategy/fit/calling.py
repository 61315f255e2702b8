"""How a model is called with the ``x`` of a batch, and what is said if that fails the first time."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from torchstrategy import errors
from torchstrategy.base import tree

__all__ = ["call_arguments", "describe_data", "explain_failed_call"]

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
#: Parameters that are no inputs: those of Keras' layers.
_FLAGS = ("training", "mask")
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def call_arguments(forward: Callable[..., Any], x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of ``forward`` for the inputs of a model.

    Args:
        forward: the bound method.
        x: a tensor, which is the only argument; a tuple or list, whose parts are arguments if ``forward`` takes more
            than one; or a dict, whose entries are if ``forward`` has parameters of their names.

    Returns:
        Positional and keyword arguments.
    """
    if isinstance(x, Tensor) or not isinstance(x, (tuple, list, Mapping)):
        return (x,), {}
    parameters = inspect.signature(forward).parameters.values()
    if isinstance(x, Mapping):
        named = {parameter.name for parameter in parameters if parameter.kind in _NAMED}
        takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
        return ((), dict(x)) if named >= x.keys() or (takes_any and len(named) != 1) else ((x,), {})
    num_positional = sum(parameter.kind in _POSITIONAL and parameter.name not in _FLAGS for parameter in parameters)
    takes_more = any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters)
    return (tuple(x), {}) if num_positional > 1 or takes_more else ((x,), {})


def explain_failed_call(error: Exception, model: Any, method: str, args: Any, kwargs: Any) -> Exception:
    """Return the error to raise when the first call of a model fails: it names what the model was given.

    Args:
        error: what ``forward`` raised.
        model: the model.
        method: such as ``"fit"``.
        args: what ``forward`` was given.
        kwargs: its keyword arguments.
    """
    data = kwargs or (args[0] if len(args) == 1 else args)
    message = (
        f"{method}(x=...): the model {model.name!r} failed on its first batch. Its forward was given "
        f"{describe_data(data)} and raised {type(error).__name__}: {str(error).rstrip('. ')}. {_advice(model, data)} "
        "The error above shows where in the model it happened."
    )
    return errors.InvalidArgumentError(message)


def _advice(model: Any, data: Any) -> str:
    """Say what to change, if forward failed because of what it was given."""
    wanted = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    given = {leaf.dtype for leaf in tree.all_leaves(data) if isinstance(leaf, Tensor)}
    if wanted is None or wanted in given or len(given) != 1:
        return "If the shape of x is not what the first layer expects, change x (the first axis is the batch)."
    name, own = str(wanted).removeprefix("torch."), str(given.pop()).removeprefix("torch.")
    return (
        f"The model's parameters are {name}, and x is {own}: if the first layer takes no integers, convert x "
        f"(x.to(torch.{name}); images also want a scale, as in x.float() / 255), or the model (model.to(x.dtype)). "
        "(NumPy's float64 arrays are read as torch.get_default_dtype(); tensors keep their dtype.)"
    )


def describe_data(data: Any) -> str:
    """Return shapes and dtypes of a structure of tensors."""
    if isinstance(data, Tensor):
        return f"{str(data.dtype).removeprefix('torch.')}{list(data.shape)}"
    if isinstance(data, Mapping):
        return "{" + ", ".join(f"{key!r}: {describe_data(value)}" for key, value in data.items()) + "}"
    if isinstance(data, Sequence) and not isinstance(data, str):
        return "(" + ", ".join(describe_data(value) for value in data) + ")"
    return type(data).__name__ if tree.all_leaves(data) else repr(data)
