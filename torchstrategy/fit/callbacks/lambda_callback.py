"""A callback made of functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchstrategy.fit.callbacks.callback import HOOKS, Callback
from torchstrategy.fit.callbacks.callback_list import closest_hook

__all__ = ["LambdaCallback"]


class LambdaCallback(Callback):
    """A callback made of functions.

    Args:
        on_epoch_begin: called with ``(epoch, logs)``.
        on_epoch_end: called with ``(epoch, logs)``.
        on_train_begin: called with ``(logs)``.
        on_train_end: called with ``(logs)``.
        on_train_batch_begin: called with ``(batch, logs)``.
        on_train_batch_end: called with ``(batch, logs)``.
        kwargs: any other hook by its name.

    Raises:
        TypeError: there is no hook of such a name, or something is not callable.

    Example:
        >>> model = ts.Model(torch.nn.Linear(1, 1))
        >>> model.compile("sgd", "mse")
        >>> say = ts.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: print("epoch", epoch))
        >>> history = model.fit(torch.ones(4, 1), torch.ones(4, 1), epochs=2, callbacks=say, verbose=0)
        epoch 0
        epoch 1
    """

    def __init__(
        self,
        on_epoch_begin: Callable[[int, Any], object] | None = None,
        on_epoch_end: Callable[[int, Any], object] | None = None,
        on_train_begin: Callable[[Any], object] | None = None,
        on_train_end: Callable[[Any], object] | None = None,
        on_train_batch_begin: Callable[[int, Any], object] | None = None,
        on_train_batch_end: Callable[[int, Any], object] | None = None,
        **kwargs: Callable[..., object] | None,
    ) -> None:
        super().__init__()
        given = {
            "on_epoch_begin": on_epoch_begin,
            "on_epoch_end": on_epoch_end,
            "on_train_begin": on_train_begin,
            "on_train_end": on_train_end,
            "on_train_batch_begin": on_train_batch_begin,
            "on_train_batch_end": on_train_batch_end,
            **kwargs,
        }
        for name, function in given.items():
            if name not in HOOKS:
                near = closest_hook(name)
                hint = f"Did you mean {near!r}?" if near else f"The hooks are: {', '.join(HOOKS)}."
                raise TypeError(f"LambdaCallback got {name!r}, which is no hook. {hint}")
            if function is not None and not callable(function):
                raise TypeError(f"LambdaCallback({name}=...) must be a function. Received: {function!r}")
            if function is not None:
                setattr(self, name, function)
