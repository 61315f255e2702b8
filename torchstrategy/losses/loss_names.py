"""Losses by the names that tf.keras gives them."""

from __future__ import annotations

import inspect
from typing import Any

from torchstrategy.base.names import find
from torchstrategy.losses import crossentropies, hinges, rare_classes, regression
from torchstrategy.losses.loss import Loss

__all__ = ["REMEDY", "get"]

_MODULES = (crossentropies, hinges, rare_classes, regression)
_ALIASES = {
    "bce": "binary_crossentropy",
    "kld": "kl_divergence",
    "kullback_leibler_divergence": "kl_divergence",
    "logcosh": "log_cosh",
    "mae": "mean_absolute_error",
    "mape": "mean_absolute_percentage_error",
    "mse": "mean_squared_error",
    "msle": "mean_squared_logarithmic_error",
}
_LOSSES = {name: getattr(module, name) for module in _MODULES for name in module.__all__}
_LOSSES.update({alias: _LOSSES[name] for alias, name in _ALIASES.items()})

REMEDY = (
    "Besides names, losses can be objects of ts.losses, losses of torch.nn and torch.nn.functional, and functions "
    "f(y_true, y_pred) that return one loss for each example."
)


def get(identifier: Any) -> Any:
    """Return the loss that a name stands for.

    Args:
        identifier: a function's name, such as ``"mean_squared_error"`` or for short ``"mse"``, or a class's, such as
            ``"MeanSquaredError"``, in any letter case. ``None`` and what can be called are returned as they are.

    Returns:
        A function of labels and predictions, or for the name of a class a loss made without arguments.

    Raises:
        ValueError: the name is not known.
        TypeError: ``identifier`` is neither a name nor callable.

    Example:
        >>> ts.losses.get("mse") is ts.losses.mean_squared_error
        True
        >>> ts.losses.get("SparseCategoricalCrossentropy").from_logits
        False
    """
    if isinstance(identifier, str):
        found = find(identifier, _LOSSES, "loss=", REMEDY)
        return found() if inspect.isclass(found) else found
    if identifier is None or callable(identifier):
        return identifier
    raise TypeError(f"loss= must be a name or callable. Received: {identifier!r} of type {type(identifier).__name__}. "
                    f"{REMEDY}")  # fmt: skip


def _class_of(function: Any) -> type[Loss] | None:
    name = getattr(function, "__name__", "").replace("_", "")
    classes: list[type[Loss]] = [x for x in _LOSSES.values() if inspect.isclass(x) and issubclass(x, Loss)]
    return next((cls for cls in classes if cls.__name__.lower() == name), None)


#: The class that does what a function does, with its options as arguments.
CLASSES: dict[Any, type[Loss]] = {
    function: cls for function in _LOSSES.values() if inspect.isfunction(function) and (cls := _class_of(function))
}
