"""All callbacks of one training, called in order, each for the hooks that it overrides; and ``LambdaCallback``."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from torchstrategy.base.log import logger, warn_once
from torchstrategy.fit.callbacks.callback import HOOKS, Callback, History, Logs
from torchstrategy.fit.callbacks.progress import ProgbarLogger, check_verbose
from torchstrategy.fit.callbacks.rates import TorchLRScheduler

__all__ = ["CallbackList", "LambdaCallback", "closest_hook"]

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


class CallbackList:
    """All callbacks of one training, evaluation or prediction.

    Args:
        callbacks: callbacks and torch learning-rate schedulers, alone or in lists; ``None`` means none.
        model: the model.
        params: what ``Callback.set_params`` is given.
        verbose: of ``fit``; unless it is 0, a ``ProgbarLogger`` is added if there is none.
        add_history: whether a ``History`` is added if there is none.

    Attributes:
        callbacks: the callbacks in the order in which they are called: those given, the ones added, and last those that
            save the others' states.
        history: the ``History``, or ``None``.
        log_interval: the least of the callbacks' ``log_interval``, or ``None``.

    Raises:
        TypeError: something is no callback; the message says what to do.
        ValueError: ``verbose`` is none.

    Example:
        >>> hello = ts.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: print("epoch", epoch))
        >>> callbacks = ts.callbacks.CallbackList([hello])
        >>> callbacks.on_epoch_begin(0)
        epoch 0
        >>> callbacks.wants("on_train_batch_end")
        False
    """

    def __init__(
        self,
        callbacks: Any = None,
        model: Any = None,
        params: Mapping[str, Any] | None = None,
        verbose: int | str = 0,
        add_history: bool = True,  # noqa: FBT001, FBT002 - Keras' signature
    ) -> None:
        check_verbose(verbose)
        given = list(_flat(callbacks))
        if add_history and not any(isinstance(callback, History) for callback in given):
            given.append(History())
        if verbose and not any(isinstance(callback, ProgbarLogger) for callback in given):
            given.append(ProgbarLogger())
        self.callbacks = sorted(given, key=lambda callback: callback.runs_last)
        self.history = next((callback for callback in given if isinstance(callback, History)), None)
        intervals = [callback.log_interval for callback in given if callback.log_interval is not None]
        self.log_interval = min(intervals, default=None)
        self._hooks = {hook: self._find(hook) for hook in HOOKS}
        self.set_params({"verbose": verbose, **(params or {})})
        if model is not None:
            self.set_model(model)

    def set_model(self, model: Any) -> None:
        """Give every callback the model.

        Args:
            model: the model.
        """
        self.model = model
        for callback in self.callbacks:
            callback.set_model(model)

    def set_params(self, params: Mapping[str, Any]) -> None:
        """Give every callback what is known of the training.

        Args:
            params: ``verbose``, ``epochs`` and ``steps``.
        """
        self.params = dict(params)
        for callback in self.callbacks:
            callback.set_params(self.params)

    def wants(self, hook: str) -> bool:
        """Say whether any callback overrides a hook.

        Args:
            hook: its name, such as ``"on_train_batch_end"``.

        Returns:
            Whether calling it does anything.
        """
        return bool(self._hooks[hook])

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the callbacks that have one.

        Returns:
            The states by the callbacks' class names, numbered where there are several of a class.
        """
        states = {key: callback.state_dict() for key, callback in self._keyed()}
        return {key: state for key, state in states.items() if state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give the callbacks the states that ``state_dict`` returned, after ``on_train_begin``.

        A callback that is new starts afresh.

        Args:
            state: what ``state_dict`` returned.
        """
        callbacks = dict(self._keyed())
        for key, own in state.items():
            if key in callbacks:
                callbacks[key].load_state_dict(own)
            else:
                logger.warning("The saved state of the callback %s is not used: there is no such callback now.", key)

    def close(self) -> None:
        """Let the callbacks close bars and files, at the end of a training that may have failed."""
        for callback in self.callbacks:
            callback._release()

    def on_train_begin(self, logs: Logs = None) -> None:
        """Call the hook of every callback."""
        self._call("on_train_begin", logs)

    def on_train_end(self, logs: Logs = None) -> None:
        """Call the hook of every callback."""
        self._call("on_train_end", logs)

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Call the hook of every callback."""
        self._call_at("on_epoch_begin", epoch, logs)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Call the hook of every callback."""
        self._call_at("on_epoch_end", epoch, logs)

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Call the hook of every callback."""
        self._call_at("on_train_batch_begin", batch, logs)

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Call the hook of every callback."""
        self._call_at("on_train_batch_end", batch, logs)

    def on_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Call ``on_train_batch_begin``."""
        self.on_train_batch_begin(batch, logs)

    def on_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Call ``on_train_batch_end``."""
        self.on_train_batch_end(batch, logs)

    def on_test_begin(self, logs: Logs = None) -> None:
        """Call the hook of every callback."""
        self._call("on_test_begin", logs)

    def on_test_end(self, logs: Logs = None) -> None:
        """Call the hook of every callback."""
        self._call("on_test_end", logs)

    def on_test_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Call the hook of every callback."""
        self._call_at("on_test_batch_begin", batch, logs)

    def on_test_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Call the hook of every callback."""
        self._call_at("on_test_batch_end", batch, logs)

    def on_predict_begin(self, logs: Logs = None) -> None:
        """Call the hook of every callback."""
        self._call("on_predict_begin", logs)

    def on_predict_end(self, logs: Logs = None) -> None:
        """Call the hook of every callback."""
        self._call("on_predict_end", logs)

    def on_predict_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Call the hook of every callback."""
        self._call_at("on_predict_batch_begin", batch, logs)

    def on_predict_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Call the hook of every callback."""
        self._call_at("on_predict_batch_end", batch, logs)

    def _call(self, hook: str, logs: Logs) -> None:
        logs = {} if logs is None else logs  # Keras' callbacks may count on it
        for call in self._hooks[hook]:
            call(logs)

    def _call_at(self, hook: str, number: int, logs: Logs) -> None:
        logs = {} if logs is None else logs
        for call in self._hooks[hook]:
            call(number, logs)

    def _find(self, hook: str) -> list[Callable[..., object]]:
        """Return the methods that override a hook."""
        found = []
        for callback in self.callbacks:
            method = _override(callback, hook)
            if method is None and hook.startswith("on_train_batch"):
                method = _override(callback, hook.replace("train_batch", "batch"))
            if method is not None:
                found.append(method)
        return found

    def _keyed(self) -> Iterator[tuple[str, Callback]]:
        counts: dict[str, int] = {}
        for callback in self.callbacks:
            name = type(callback).__name__
            count = counts[name] = counts.get(name, 0) + 1
            yield (name if count == 1 else f"{name}_{count}"), callback


def _override(callback: Callback, hook: str) -> Callable[..., object] | None:
    method: Callable[..., object] = getattr(callback, hook)
    return None if getattr(method, "__func__", None) is getattr(Callback, hook) else method


def _flat(callbacks: Any) -> Iterator[Callback]:
    """Yield the callbacks of a structure of lists."""
    if callbacks is None:
        return
    if isinstance(callbacks, CallbackList):
        yield from callbacks.callbacks
    elif isinstance(callbacks, Callback):
        warn_of_unknown_hooks(callbacks)
        yield callbacks
    elif isinstance(callbacks, LRScheduler):
        yield TorchLRScheduler(callbacks)
    elif isinstance(callbacks, Iterable) and not isinstance(callbacks, (str, Mapping)):
        for callback in callbacks:
            yield from _flat(callback)
    else:
        raise TypeError(describe_non_callback(callbacks))


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
