"""Hyper-parameters are equal on all replicas: a rate set by a replica's own loss would train another model on each."""

from __future__ import annotations

import marshal
import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.optim import Optimizer

from torchstrategy.errors import DivergenceError

__all__ = ["check_copies", "check_rows", "digest", "hyper_parameters"]

#: What an optimizer computes from gradients, such as a step size of its own, is rounded differently by unlike hardware.
_RELATIVE_TOLERANCE = 1e-4
#: How a step is computed, not what; and how parameters are called.
_MEANS = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}
_BUILT_IN = {bool, int, float}
#: What else there may be counts as one and the same, so that notes may differ, but not a number and none.
_NO_NUMBER = "no number"
#: In ``marshal``, so that equal values give equal bytes.
_VERSION_WITHOUT_REFERENCES = 2
_REMEDY = (
    "All replicas step with the same hyper-parameters: set them outside `run`, or by what is equal on all replicas and "
    "ranks, such as the loss of the global batch from `all_reduce` or `strategy.reduce`."
)


def hyper_parameters(optimizer: Optimizer) -> list[Any]:
    """Return an optimizer's class, and each group's size and numbers; tensors on accelerators are not read."""
    return [
        type(optimizer).__name__,
        *(
            {
                "number of parameters": len(group["params"]),
                **{key: _built_in(group[key]) for key in sorted(group) if _is_compared(key, group[key])},
            }
            for group in optimizer.param_groups
        ),
    ]


def digest(optimizer: Optimizer) -> int:
    """Return a number that is the same on all ranks for equal hyper-parameters."""
    return zlib.crc32(marshal.dumps(hyper_parameters(optimizer), _VERSION_WITHOUT_REFERENCES))


def check_copies(optimizers: Iterable[Sequence[Optimizer]], name_of: Callable[[int], str]) -> None:
    """Check that the replicas of this process have equal hyper-parameters after a run; the next goes by replica 0's.

    Args:
        optimizers: the replicas' copies of each optimizer.
        name_of: says which replica a local id is.

    Raises:
        DivergenceError: they have not; the message names the first one and its values.
    """
    for copies in optimizers:
        for other, optimizer in enumerate(copies[1:], 1):
            found = _difference(copies[0].param_groups, optimizer.param_groups)
            if found is not None:
                text = found.between(name_of(0), name_of(other))
                raise DivergenceError(f"After the run, {text} of {type(optimizer).__name__}. {_REMEDY}")


def check_rows(rows: Sequence[list[Any]], where: str) -> None:
    """Check what ``hyper_parameters`` returned on all ranks, where its digests differ.

    Args:
        rows: by rank.
        where: the line that sums the optimizer's gradients.

    Raises:
        DivergenceError: something differs by more than rounding; the message names the first one and its values.
    """
    name = rows[0][0]
    for rank, row in enumerate(rows):
        if row[0] != name:
            raise DivergenceError(
                f"Gradients are summed at {where} for parameters of equal shapes, but rank 0 steps {name} and rank "
                f"{rank} {row[0]}. Every rank must step the same optimizers in the same order."
            )
        found = _difference(rows[0][1:], row[1:])
        if found is not None:
            text = found.between("rank 0", f"rank {rank}")
            raise DivergenceError(f"Before the sum of gradients at {where}, {text} of {name}. {_REMEDY}")


class _Difference(NamedTuple):
    """The first hyper-parameter that two optimizers have with different values."""

    group: int
    key: str
    value: Any
    other: Any

    def between(self, one: str, other: str) -> str:
        return f"{self.key!r} is {self.value!r} on {one} and {self.other!r} on {other} in group {self.group}"


def _difference(first: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> _Difference | None:
    for k, (group, own) in enumerate(zip(first, other, strict=False)):
        for key, value in group.items():
            found = own.get(key, value)
            if found is value or not _is_compared(key, value) or not _is_compared(key, found):
                continue
            value, found = _built_in(value), _built_in(found)
            if not _are_alike(value, found):
                return _Difference(k, key, value, found)
    return None


def _is_compared(key: str, value: Any) -> bool:
    if key in _MEANS:
        return False
    if isinstance(value, (tuple, list)):
        return all(_is_compared(key, item) for item in value)
    return not isinstance(value, torch.Tensor) or (value.device.type == "cpu" and value.numel() == 1)


def _built_in(value: Any) -> Any:
    """Return plain numbers for tensors, and for those of numpy and enumerations; ``_NO_NUMBER`` for all else."""
    if isinstance(value, (tuple, list)):
        numbers = [_built_in(item) for item in value]
        return numbers if numbers and _NO_NUMBER not in numbers else _NO_NUMBER
    if type(value) in _BUILT_IN:
        return value
    if not isinstance(value, (int, float, np.integer, np.floating, np.bool_, torch.Tensor)):
        return _NO_NUMBER
    return int(value) if isinstance(value, (int, np.integer, np.bool_)) else float(value)


def _are_alike(one: Any, other: Any) -> bool:
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(_are_alike, one, other))
    if isinstance(one, (tuple, list, str)) or isinstance(other, (tuple, list, str)):
        return bool(one == other)
    return math.isclose(one, other, rel_tol=_RELATIVE_TOLERANCE) or (math.isnan(one) and math.isnan(other))
