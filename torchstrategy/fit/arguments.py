"""The arguments of a model's methods: checks that they share, and how messages name those that hold data."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from torchstrategy import errors
from torchstrategy.base.context import current_frame
from torchstrategy.base.log import hides_own_frames, logger

__all__ = [
    "COUNTS",
    "LOADING",
    "DataArguments",
    "FitArguments",
    "check_context",
    "check_counts",
    "check_flag",
    "entry_point",
    "named_arguments",
    "parse_amp",
    "parse_count",
    "parse_jit",
    "shown_type",
    "validation_arguments",
    "warn_of_nan",
]

_Method = TypeVar("_Method", bound=Callable[..., Any])


def entry_point(method: str, **remarks: str) -> Callable[[_Method], _Method]:
    """Return a decorator of a method that programs call.

    It says what to do instead of arguments that only Keras has, and leaves the library's calls out of tracebacks.

    Args:
        method: what the message calls it.
        remarks: what to do, by the argument's name.
    """

    def decorate(function: _Method) -> _Method:
        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            for name in kwargs.keys() & remarks.keys():
                raise TypeError(f"{method}({name}=...): {remarks[name]}")
            return function(*args, **kwargs)

        return hides_own_frames(checked)  # type: ignore[return-value]

    return decorate


#: Keras' arguments of methods that read data.
_LOADING = (
    "leave it out. A `DataLoader(..., num_workers=...)` or `Dataset.map(..., num_parallel_calls=...)` loads ahead."
)
LOADING = {"workers": _LOADING, "use_multiprocessing": _LOADING, "max_queue_size": _LOADING}


def check_context(strategy: Any, methods: str) -> None:
    """Refuse calls in replica context or in another strategy's scope.

    Args:
        strategy: the model's.
        methods: what is called, for the message.

    Raises:
        RuntimeError: it is such a call.
    """
    frame = current_frame()
    if frame is None:
        return
    if frame.replica_context is not None:
        raise RuntimeError(
            f"A model's {methods} must be called outside of strategy.run: they run steps on all replicas themselves. "
            "Here they were called by a function that run calls."
        )
    if frame.strategy is not strategy:
        raise RuntimeError(
            f"A model's {methods} were called in the scope of a {type(frame.strategy).__name__}, but the model was "
            f"made under another strategy, a {type(strategy).__name__}. Make the model inside "
            "`with strategy.scope():`, or leave the scope."
        )


def check_counts(method: str, **counts: Any) -> None:
    """Check numbers of epochs and batches; ``None`` is one too.

    Raises:
        InvalidArgumentError: one is no positive integer.
    """
    for name, value in counts.items():
        if value is not None and (not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1):
            raise errors.InvalidArgumentError(f"{method}({name}=...) must be a positive integer. Received: {value!r}")


def warn_of_nan(logs: Mapping[str, Any], epoch: int, before: Mapping[str, Any] | None) -> None:
    """Say that a loss is not finite any more, once.

    Args:
        logs: of an epoch.
        epoch: its number.
        before: the logs of the epoch before.
    """
    loss = logs.get("loss")
    if isinstance(loss, float) and not math.isfinite(loss) and math.isfinite((before or {}).get("loss", 0.0)):
        logger.warning(
            f"fit: the loss of epoch {epoch + 1} is {loss}. Try a smaller learning rate, look for nan or inf in x and "
            "y, or clip gradients (Model.clip_gradients). ts.callbacks.TerminateOnNaN() ends the training at once."
        )


#: Arguments that are numbers of batches.
COUNTS = ("steps_per_execution", "gradient_accumulation_steps")

#: Names of torch's and of Keras' mixed precision -> dtype of the forward pass.
_AMP = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "mixed_bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "mixed_float16": torch.float16,
}


def parse_count(name: str, value: Any) -> int:
    """Return a number of batches; Keras' default for gradient accumulation is ``None``."""
    if value is None and name == "gradient_accumulation_steps":
        return 1
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1:
        raise ValueError(f"compile({name}=...) must be a positive integer. Received: {value!r}")
    return int(value)


def check_flag(name: str, value: Any) -> None:
    """Refuse what is neither True nor False."""
    if not isinstance(value, bool):
        raise TypeError(f"compile({name}=...) must be True or False. Received: {value!r}")


def parse_amp(amp: Any) -> torch.dtype | None:
    """Return what forward passes compute in; ``None`` is the parameters' dtype."""
    if amp is None or amp is False:
        return None
    dtype = _AMP.get(amp) if isinstance(amp, str) else amp
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"compile(amp=...) must be 'bf16', 'fp16' or None. Received: {amp!r}")
    return dtype


def parse_jit(jit_compile: Any) -> bool:
    """Return whether the model is compiled by ``torch.compile``."""
    if jit_compile == "auto" or jit_compile is None:
        return False
    if not isinstance(jit_compile, bool):
        raise TypeError(f"compile(jit_compile=...) must be True, False or 'auto'. Received: {jit_compile!r}")
    if jit_compile:
        logger.info("compile(jit_compile=True): the model is compiled by torch.compile in the second step.")
    return jit_compile


@dataclass(frozen=True)
class DataArguments:
    """What the user wrote for each part of the data.

    Args:
        method: the model's method.
        x: the inputs, or whatever gives batches.
        y: the targets.
        sample_weight: the weights of the examples.
        batch_size: how many examples a batch has.
    """

    method: str
    x: str
    y: str
    sample_weight: str
    batch_size: str


def named_arguments(method: str) -> DataArguments:
    """Return the names of the arguments of a method such as ``"fit"``."""
    x, y, sample_weight, batch_size = (f"{method}({name}=...)" for name in ("x", "y", "sample_weight", "batch_size"))
    return DataArguments(method, x, y, sample_weight, batch_size)


def validation_arguments(method: str = "fit") -> DataArguments:
    """Return the names of the parts of ``validation_data``."""
    x, y, sample_weight = (f"{method}(validation_data=...)[{i}]" for i in range(3))
    return DataArguments(method, x, y, sample_weight, f"{method}(validation_batch_size=...)")


def shown_type(value: Any) -> str:
    """Return an article and the name of a value's type."""
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def check_frequency(frequency: Any) -> None:
    """Check ``validation_freq``.

    Raises:
        ValueError: it is neither a positive integer nor a list of epochs.
    """
    is_count = isinstance(frequency, int) and not isinstance(frequency, bool) and frequency >= 1
    if not is_count and not isinstance(frequency, (list, tuple, set, range)):
        raise ValueError(
            "fit(validation_freq=...) must be a positive integer or a list of epochs, counted from 1. Received: "
            f"{frequency!r}"
        )


@dataclass(frozen=True, kw_only=True)
class FitArguments:
    """What ``Model.fit`` was called with; see there."""

    x: Any
    y: Any
    batch_size: int | None
    epochs: int
    verbose: int | str
    callbacks: Sequence[Any] | None
    validation_split: float
    validation_data: Any
    shuffle: bool
    class_weight: Mapping[int, float] | None
    sample_weight: Any
    initial_epoch: int
    steps_per_epoch: int | None
    validation_steps: int | None
    validation_batch_size: int | None
    validation_freq: int | Sequence[int]

    def __post_init__(self) -> None:
        check_counts(
            "fit",
            epochs=self.epochs,
            steps_per_epoch=self.steps_per_epoch,
            validation_steps=self.validation_steps,
        )
        if not isinstance(self.initial_epoch, int) or isinstance(self.initial_epoch, bool) or self.initial_epoch < 0:
            raise ValueError(
                f"fit(initial_epoch=...) must be 0 or a positive integer. Received: {self.initial_epoch!r}"
            )
        check_frequency(self.validation_freq)
        if self.class_weight is not None and self.sample_weight is not None:
            raise ValueError(
                "fit(class_weight=..., sample_weight=...): pass one of them. Multiply the weights of the classes into "
                "sample_weight if you need both."
            )
