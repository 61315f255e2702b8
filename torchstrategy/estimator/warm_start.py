"""Variables of a checkpoint under tf's names, and initial values from another model's."""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchstrategy.base.context import set_within
from torchstrategy.base.log import logger
from torchstrategy.base.names import uncompiled_name
from torchstrategy.base.options import VariableAggregation
from torchstrategy.checkpoint.archive import checkpoint_file, read_checkpoint
from torchstrategy.checkpoint.objects import track_object
from torchstrategy.checkpoint.reader import latest_checkpoint
from torchstrategy.checkpoint.storage import is_directory
from torchstrategy.replicas.mirrored import bodies
from torchstrategy.replicas.variables import Variable
from torchstrategy.strategies.strategy import Strategy

__all__ = [
    "GLOBAL_STEP",
    "MODEL",
    "OPTIMIZER",
    "VARIABLE_NAMES",
    "OptimizerNames",
    "VocabInfo",
    "WarmStartSettings",
    "as_array",
    "as_current",
    "as_settings",
    "current_global_step",
    "load_global_step",
    "load_variables",
    "make_global_step",
    "named_buffers",
    "named_parameters",
    "warm_start",
]

GLOBAL_STEP = "global_step"

_current: ContextVar[Variable | None] = ContextVar("torchstrategy_global_step", default=None)


def make_global_step() -> Variable:
    """Return a new global step, which is 0. It belongs in the scope of the training's strategy."""
    first = VariableAggregation.ONLY_FIRST_REPLICA
    return Variable(0, trainable=False, name=GLOBAL_STEP, dtype=torch.int64, aggregation=first)


def current_global_step() -> Variable | None:
    """Return the global step of the train, evaluate or predict that is running here, or ``None``."""
    return _current.get()


def as_current(global_step: Variable) -> AbstractContextManager[None]:
    """Make a global step the current one."""
    return set_within(_current, global_step)


#: Names of the objects in a checkpoint.
MODEL = "model"
OPTIMIZER = "optimizer"
VARIABLE_NAMES = "variable_names"


class OptimizerNames:
    """The names of the variables that optimizers update, in the order in which their states have them.

    It is saved beside the optimizers, whose own states know their parameters by numbers only.

    Args:
        module: the model.
        optimizers: its optimizers.
    """

    def __init__(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._module = module
        self._optimizers = optimizers

    def state_dict(self) -> dict[str, Any]:
        """Return a list of names for each optimizer."""
        names = {id(value): name for name, value in named_parameters(self._module).items()}
        parameters = [[p for group in one.param_groups for p in group["params"]] for one in self._optimizers]
        return {OPTIMIZER: [[names.get(id(p), str(i)) for i, p in enumerate(column)] for column in parameters]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: the names are those of the present model."""


def named_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's parameters, of the first replica, by their names in checkpoints: before ``torch.compile``."""
    return {uncompiled_name(name): value for name, value in bodies(module)[0].named_parameters()}


def named_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's buffers likewise."""
    return {uncompiled_name(name): value for name, value in bodies(module)[0].named_buffers()}


def load_variables(path: str) -> dict[str, Tensor]:
    """Return the variables of a checkpoint by name: the module's, the global step, and what optimizers keep.

    Args:
        path: the checkpoint, as ``latest_checkpoint`` says it.

    Raises:
        NotFoundError: there is no such file.
        DataLossError: the file is damaged or no checkpoint of this library.
    """
    objects = {name: entry["state"] for name, entry in read_checkpoint(checkpoint_file(path))["objects"].items()}
    variables = {name: value for name, value in objects.get(MODEL, {}).items() if isinstance(value, Tensor)}
    if GLOBAL_STEP in objects:
        variables[GLOBAL_STEP] = objects[GLOBAL_STEP]
    for i, names in enumerate(objects.get(VARIABLE_NAMES, {}).get(OPTIMIZER, [])):
        key = f"{OPTIMIZER}_{i}" if i else OPTIMIZER
        variables.update(_slots(key, names, objects[key]["state"]["state"]))
    return dict(sorted(variables.items()))


def load_global_step(path: str) -> int:
    """Return the global step of a checkpoint."""
    return int(load_variables(path)[GLOBAL_STEP])


def as_array(value: Tensor) -> Any:
    """Return a tensor's values as a NumPy array, and those of a scalar as a NumPy number."""
    array = value.detach().cpu()
    return (array.float() if array.dtype == torch.bfloat16 else array).numpy()[()]  # NumPy lacks bfloat16


def _slots(key: str, names: Sequence[str], state: dict[Any, Any]) -> Iterator[tuple[str, Tensor]]:
    for i, name in enumerate(names):
        for slot, value in state.get(i, {}).items():
            if isinstance(value, Tensor):
                yield f"{key}/{name}/{slot}", value


class VocabInfo(NamedTuple):
    """Which row of a variable belongs to which word, now and in the checkpoint that values are taken from.

    Args:
        new_vocab: path of the model's vocabulary, a text file with one word in each line.
        new_vocab_size: how many of its words are used.
        num_oov_buckets: rows after these, for words that are not in it. They keep the model's initial values.
        old_vocab: path of the checkpoint's vocabulary.
        old_vocab_size: how many of its words are used; -1 means all.
        backup_initializer: given a shape, returns the values for words that the old vocabulary lacks; ``None`` means
            zeros.
        axis: 0 if the words are the variable's rows, 1 if they are its columns.

    Example:
        >>> ts.estimator.VocabInfo("new.txt", 100, 0, "old.txt").old_vocab_size
        -1
    """

    new_vocab: str
    new_vocab_size: int
    num_oov_buckets: int
    old_vocab: str
    old_vocab_size: int = -1
    backup_initializer: Callable[[tuple[int, ...]], Tensor] | None = None
    axis: int = 0


class _Settings(NamedTuple):
    ckpt_to_initialize_from: str
    vars_to_warm_start: str | Sequence[str] | None = ".*"
    var_name_to_vocab_info: Mapping[str, VocabInfo] | None = None
    var_name_to_prev_var_name: Mapping[str, str] | None = None


class WarmStartSettings(_Settings):
    """Which variables begin with values of a checkpoint, when a training begins without one of its own.

    Args:
        ckpt_to_initialize_from: the checkpoint, or a directory, whose latest is taken.
        vars_to_warm_start: a regular expression that the names of parameters match from their beginning; a list of
            such expressions is for buffers too. ``None`` takes only what ``var_name_to_vocab_info`` names.
        var_name_to_vocab_info: a ``VocabInfo`` for each variable that has a row, or column, for each word of a
            vocabulary that is another one now.
        var_name_to_prev_var_name: the checkpoint's names of variables, where they differ.

    Raises:
        ValueError: there is no ``ckpt_to_initialize_from``.

    Example:
        >>> ts.estimator.WarmStartSettings("/models/first", vars_to_warm_start="encoder").vars_to_warm_start
        'encoder'
    """

    __slots__ = ()

    def __new__(  # noqa: D102
        cls,
        ckpt_to_initialize_from: str | os.PathLike[str],
        vars_to_warm_start: str | Sequence[str] | None = ".*",
        var_name_to_vocab_info: Mapping[str, VocabInfo] | None = None,
        var_name_to_prev_var_name: Mapping[str, str] | None = None,
    ) -> WarmStartSettings:
        if not ckpt_to_initialize_from:
            raise ValueError("`ckpt_to_initialize_from` MUST be set in WarmStartSettings")
        return super().__new__(
            cls,
            os.fspath(ckpt_to_initialize_from),
            vars_to_warm_start,
            dict(var_name_to_vocab_info or {}),
            dict(var_name_to_prev_var_name or {}),
        )


def as_settings(warm_start_from: Any) -> WarmStartSettings | None:
    """Return what an estimator's ``warm_start_from`` means.

    Raises:
        ValueError: it is neither a path nor ``WarmStartSettings``.
    """
    if warm_start_from is None or isinstance(warm_start_from, WarmStartSettings):
        return warm_start_from
    if isinstance(warm_start_from, (str, os.PathLike)):
        return WarmStartSettings(warm_start_from)
    raise ValueError(
        "warm_start_from can only be a path of a checkpoint or of a directory of checkpoints, or a "
        f"ts.estimator.WarmStartSettings. Received: {warm_start_from!r}"
    )


def warm_start(module: nn.Module, strategy: Strategy, settings: WarmStartSettings) -> None:
    """Give a model's variables values of a checkpoint.

    Raises:
        NotFoundError: there is no such checkpoint.
        ValueError: it lacks a variable, or has it in another shape, or a name in the settings is of no variable.
    """
    logger.info("Warm-starting with WarmStartSettings: %s", settings)
    path = _checkpoint_of(settings.ckpt_to_initialize_from)
    saved = load_variables(path)
    parameters, buffers = named_parameters(module), named_buffers(module)
    vocabularies = dict(settings.var_name_to_vocab_info or {})
    names = _chosen(settings.vars_to_warm_start, list(parameters), list(buffers))
    if settings.vars_to_warm_start and not names:
        logger.warning(
            "WarmStartSettings(vars_to_warm_start=%r) matches no variable of the model, so training begins with its "
            "initial values. Expressions must match names from their beginning. The model has: %s",
            settings.vars_to_warm_start,
            ", ".join((*parameters, *buffers)),
        )
    names += [name for name in vocabularies if name not in names]
    previous = dict(settings.var_name_to_prev_var_name or {})
    if unknown := [name for name in (*previous, *vocabularies) if name not in (*parameters, *buffers)]:
        raise ValueError(
            f"WarmStartSettings name variables that the model does not have: {unknown}. It has: "
            f"{sorted((*parameters, *buffers))}"
        )
    values: OrderedDict[str, Tensor] = OrderedDict()
    for name in names:
        own = parameters[name] if name in parameters else buffers[name]
        found = saved.get(previous.get(name, name))
        if found is None:
            raise ValueError(
                f"Tensor {previous.get(name, name)!r} is not found in {path} checkpoint, which holds {sorted(saved)}. "
                "Choose variables by vars_to_warm_start=, or name it by var_name_to_prev_var_name=."
            )
        values[name] = _remapped(name, found, own, vocabularies[name]) if name in vocabularies else found
        if values[name].shape != own.shape:
            raise ValueError(
                f"Shape of variable {name} ({tuple(own.shape)}) doesn't match with shape of tensor "
                f"{previous.get(name, name)} ({tuple(found.shape)}) from checkpoint reader."
            )
    track_object(MODEL, module).plan(values, strategy).apply()
    logger.info("Warm-started %d variables.", len(values))


def _checkpoint_of(path: str) -> str:
    if not is_directory(path):
        return path
    latest = latest_checkpoint(path)
    if latest is None:
        raise ValueError(f"warm_start_from: the directory {path} has no checkpoint.")
    return latest


def _chosen(patterns: str | Sequence[str] | None, parameters: list[str], buffers: list[str]) -> list[str]:
    """Return the names of the variables that settings choose."""
    if patterns is None:
        return []
    if isinstance(patterns, str):
        return [name for name in parameters if re.match(patterns, name)]
    return [name for name in (*parameters, *buffers) if any(re.match(pattern, name) for pattern in patterns)]


def _remapped(name: str, old: Tensor, own: Tensor, info: VocabInfo) -> Tensor:
    """Return the values of a variable whose words have other places than in the checkpoint.

    Raises:
        ValueError: a vocabulary has more words than there are rows, or the rows are of different shapes.
    """
    old_words = _words(info.old_vocab)[: None if info.old_vocab_size < 0 else info.old_vocab_size]
    new_words = _words(info.new_vocab)[: info.new_vocab_size]
    places = {word: i for i, word in enumerate(old_words)}
    values = own.detach().cpu().transpose(0, info.axis).clone()
    source = old.transpose(0, info.axis)
    if values.shape[1:] != source.shape[1:]:
        raise ValueError(
            f"Shape of variable {name} ({tuple(own.shape)}) doesn't match with shape of the tensor "
            f"({tuple(old.shape)}) from checkpoint reader, other than in axis {info.axis} of its VocabInfo."
        )
    for words, path, rows in ((new_words, info.new_vocab, values), (old_words, info.old_vocab, source)):
        if len(words) > len(rows):
            raise ValueError(
                f"The VocabInfo of variable {name} uses {len(words)} words of {path}, but axis {info.axis} of the "
                f"variable has {len(rows)}."
            )
    for i, word in enumerate(new_words):
        if word in places:
            values[i] = source[places[word]]
        else:
            values[i] = 0.0 if info.backup_initializer is None else info.backup_initializer(tuple(values[i].shape))
    return values.transpose(0, info.axis).contiguous()


def _words(path: str) -> list[str]:
    with open(path, encoding="utf-8") as file:
        return file.read().splitlines()
