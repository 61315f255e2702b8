"""The variables in an estimator's checkpoints, by their names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchstrategy.base.context import set_within
from torchstrategy.base.options import VariableAggregation
from torchstrategy.checkpoint.atomic import checkpoint_file, read_checkpoint
from torchstrategy.replicas.mirrored import bodies
from torchstrategy.replicas.variables import Variable

__all__ = [
    "GLOBAL_STEP",
    "MODEL",
    "OPTIMIZER",
    "VARIABLE_NAMES",
    "OptimizerNames",
    "as_array",
    "as_current",
    "current_global_step",
    "load_global_step",
    "load_variables",
    "make_global_step",
    "named_buffers",
    "named_parameters",
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
    return {_uncompiled(name): value for name, value in bodies(module)[0].named_parameters()}


def named_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's buffers likewise."""
    return {_uncompiled(name): value for name, value in bodies(module)[0].named_buffers()}


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


def _uncompiled(name: str) -> str:
    return name.replace("_orig_mod.", "")


def _slots(key: str, names: Sequence[str], state: dict[Any, Any]) -> Iterator[tuple[str, Tensor]]:
    for i, name in enumerate(names):
        for slot, value in state.get(i, {}).items():
            if isinstance(value, Tensor):
                yield f"{key}/{name}/{slot}", value
