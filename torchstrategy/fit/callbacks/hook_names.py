"""Names that look like a hook but are none, such as those of other libraries."""

from __future__ import annotations

import difflib
import functools
import inspect
from typing import Any

from torchstrategy.base.log import warn_once
from torchstrategy.fit.callbacks.base import HOOKS, Callback

__all__ = ["closest_hook", "describe_non_callback", "warn_of_unknown_hooks"]

_SYNONYMS = {
    "start": "begin",
    "finish": "end",
    "finished": "end",
    "before": "begin",
    "after": "end",
    "fit": "train",
    "training": "train",
    "validation": "test",
    "val": "test",
    "valid": "test",
    "eval": "test",
    "evaluate": "test",
    "prediction": "predict",
    "step": "batch",
}


def closest_hook(name: str) -> str | None:
    """Return the hook that a name may be meant for, or ``None``."""
    words = [_SYNONYMS.get(word, word) for word in name.lower().split("_")]
    if "epoch" in words and "train" in words:
        words.remove("train")
    near = difflib.get_close_matches("_".join(words), HOOKS, n=1, cutoff=0.75)
    return near[0] if near else None


def warn_of_unknown_hooks(callback: Callback) -> None:
    """Warn of methods that will never be called although their names look like hooks."""
    for name in dir(type(callback)):
        if not name.startswith("on_") or hasattr(Callback, name) or not callable(getattr(type(callback), name, None)):
            continue
        near = closest_hook(name)
        if near is not None:
            warn_once(
                f"{type(callback).__name__}.{name} is never called, because there is no such hook. Did you mean "
                f"{near}?",
                stacklevel=4,
            )


def describe_non_callback(value: Any) -> str:
    """Return what is wrong with a value among the callbacks, and what to do."""
    start = "callbacks must be instances of ts.callbacks.Callback or torch learning-rate schedulers."
    if isinstance(value, type):
        return f"{start} Received the class {value.__name__} itself: call it, as in callbacks=[{value.__name__}(...)]."
    if inspect.isroutine(value) or isinstance(value, functools.partial):
        return (
            f"{start} Received the function {getattr(value, '__name__', value)!r}: say when it is to be called, as in "
            "callbacks=[ts.callbacks.LambdaCallback(on_epoch_end=function)]. If it makes a learning-rate scheduler, "
            "pass ts.callbacks.TorchLRScheduler(function)."
        )
    return (
        f"{start} Received {value!r} of {type(value).__module__}.{type(value).__qualname__}. Derive its class from it."
    )
