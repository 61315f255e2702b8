"""A look at whether all processes train alike, before they wait for one another in different places."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from torchstrategy.errors import DisagreementError
from torchstrategy.fit.arguments import FitArguments
from torchstrategy.fit.callbacks.backup import BackupAndRestore
from torchstrategy.fit.callbacks.model_checkpoint import ModelCheckpoint
from torchstrategy.fit.callbacks.rates import LearningRateScheduler, ReduceLROnPlateau, TorchLRScheduler
from torchstrategy.fit.callbacks.stopping import EarlyStopping
from torchstrategy.fit.trainer import Trainer, is_metric
from torchstrategy.replicas.mirrored import resolve

__all__ = ["check_alike", "describe_argument"]

#: Callbacks that change the training, or in which processes meet. Those that only read and write may be on the chief.
_ON_EVERY_RANK = (
    BackupAndRestore,
    EarlyStopping,
    LearningRateScheduler,
    ModelCheckpoint,
    ReduceLROnPlateau,
    TorchLRScheduler,
    torch.optim.lr_scheduler.LRScheduler,
)
_OWN_DATA = ("x", "y", "sample_weight", "verbose", "callbacks", "validation_data")


def check_alike(workers: Any, trainer: Trainer, given: FitArguments) -> None:
    """Compare what all processes gave to ``compile`` and ``fit``; the data is compared where it is read.

    Args:
        workers: the strategy's; ``None`` means one process, which agrees with itself.
        trainer: the model's.
        given: the arguments of ``fit``.

    Raises:
        DisagreementError: they differ; the message names the arguments.
    """
    if workers is None:
        return
    record = {f"compile({name}=...)": describe_argument(value) for name, value in trainer.arguments.items()}
    for field in fields(given):
        if field.name not in _OWN_DATA:
            record[f"fit({field.name}=...)"] = describe_argument(getattr(given, field.name))
    record["fit(validation_data=...)"] = "nothing" if given.validation_data is None else "data"
    callbacks = given.callbacks if isinstance(given.callbacks, (list, tuple)) else [given.callbacks]
    record["fit(callbacks=...)"] = describe_argument(
        [type(callback) for callback in callbacks if isinstance(callback, _ON_EVERY_RANK)]
    )
    records = workers.exchange("arguments of compile and fit", record)
    rows = []
    for name in record:
        different = [rank for rank, other in enumerate(records) if other.get(name) != records[0].get(name)]
        if different:
            own = [f"rank {rank}: {records[rank].get(name)}" for rank in (0, different[0])]
            rows.append(f"{name}: {'; '.join(own)}")
    if rows:
        raise DisagreementError(
            "The ranks must call compile and fit alike, and they don't:\n  "
            + "\n  ".join(rows)
            + "\nPass the same on every rank. Callbacks that write or print do so on the chief only, by themselves."
        )


def describe_argument(value: Any, depth: int = 3) -> str:
    """Return a text that is equal for equal arguments, in any process.

    Args:
        value: of an argument.
        depth: how deep to look into objects.
    """
    value = resolve(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return f"tensor of shape {tuple(value.shape)} with the sum {value.detach().double().sum().item()!r}"
    if isinstance(value, functools.partial):
        return f"{describe_argument(value.func)}({describe_argument(value.args)}, {describe_argument(value.keywords)})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {describe_argument(entry, depth)}" for key, entry in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(describe_argument(entry, depth) for entry in value) + "]"
    if hasattr(value, "__qualname__"):
        return str(value.__qualname__)
    return f"{type(value).__name__}({_describe_parts(value, depth)})"


def _describe_parts(value: Any, depth: int) -> str:
    if is_metric(value):
        return str(getattr(value, "name", ""))
    if depth == 0:
        return "..."
    parts: dict[str, Any] = {}
    if isinstance(value, torch.optim.Optimizer):
        for i, group in enumerate(value.param_groups):
            parts[f"group {i}"] = {key: entry for key, entry in group.items() if key != "params"}
    else:
        parts = {key: entry for key, entry in getattr(value, "__dict__", {}).items() if not key.startswith("_")}
        if isinstance(value, nn.Module):
            parts |= dict(value.named_buffers())
    return ", ".join(f"{key}={describe_argument(entry, depth - 1)}" for key, entry in parts.items())
