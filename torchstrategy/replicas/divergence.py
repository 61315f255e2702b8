"""Looks for what replicas must not do to tensors and hyper-parameters that all hold alike."""

from __future__ import annotations

import marshal
import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from torchstrategy.base.log import warn_once
from torchstrategy.errors import DivergenceError
from torchstrategy.replicas.dtensors import is_dtensor
from torchstrategy.replicas.fingerprints import fingerprints, have_equal_bits
from torchstrategy.replicas.module_tensors import Slot
from torchstrategy.replicas.variables import Variable

__all__ = [
    "DivergenceCheck",
    "LoneUpdates",
    "check_copies",
    "check_rows",
    "describe_divergence",
    "difference",
    "differences_between_copies",
    "digest",
    "hyper_parameters",
    "may_differ",
]

#: What an optimizer computes from gradients, such as a step size of its own, is rounded differently by unlike hardware.
_RATE_TOLERANCE = 1e-4
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
    return math.isclose(one, other, rel_tol=_RATE_TOLERANCE) or (math.isnan(one) and math.isnan(other))


#: In parts of a tensor's largest element. Adam turns rounding of tiny gradients into changes that are far larger than
#: the rounding of the element they change: 6e-7 was seen in half precision, for elements of at most 0.04.
_RELATIVE_TOLERANCE = 1e-4
_ABSOLUTE_TOLERANCE = 1e-7


class DivergenceCheck:
    """Compares the replicas' tensors around each turn and at the end of a run.

    Args:
        check_every: number of runs between two checks; the first two runs are always checked.
        name: says which replica a local id is.
    """

    def __init__(self, check_every: int, name: Callable[[int], str]) -> None:
        self._check_every = check_every
        self._name = name
        self._runs = 0
        self._before: list[list[Any]] = []
        self._slots: list[Slot] = []
        self.active = False

    def begin(self, slots: Callable[[], list[Slot]]) -> None:
        """Start a run."""
        self._runs += 1
        self.active = self._runs <= 2 or self._runs % self._check_every == 0
        self._slots = slots() if self.active else []

    def turn_starts(self) -> None:
        """Note all tensors before a turn."""
        self._before = [_fingerprint(dicts, name) for dicts, name in self._slots]

    def turn_ends(self, local_id: int) -> None:
        """Check that the turn changed nothing of the other replicas.

        Raises:
            DivergenceError: it did; the message names the tensor.
        """
        for (dicts, name), before in zip(self._slots, self._before, strict=True):
            for other, (was, now) in enumerate(zip(before, _fingerprint(dicts, name), strict=True)):
                if other != local_id and was != now:
                    what = "gradient" if was[:3] == now[:3] else "value"
                    tensor = dicts[other][name]
                    raise DivergenceError(
                        f"{self._name(local_id)} changed the {what} of {self._name(other)}'s tensor {name!r} (shape "
                        f"{tuple(tensor.shape)}). A list of parameters that was made outside `run`, such as "
                        "`params = list(model.parameters())`, belongs to replica 0: take it from the model inside the "
                        "replica function."
                    )

    def forget(self) -> None:
        """Let go of the tensors."""
        self._slots = []

    def end(self) -> None:
        """Check that all replicas have equal parameters.

        Raises:
            DivergenceError: they have not; the message names the parameter and by how much it differs.
        """
        found = differences_between_copies(self._slots, self._name)
        if found:
            raise DivergenceError(describe_divergence(*found[0]))


#: At so many parameters a process looks, from both ends of the model, and only at those of up to so many elements.
_NUM_LOOKED_AT, _NUMBERS_LOOKED_AT = 6, 1 << 16
#: Looks wait for an accelerator, so there are no more than these.
_NUM_LOOKS_AT_ACCELERATORS = 10


class LoneUpdates:
    """Notices that a process changes parameters by its own gradients, in a run in which it has met no other process.

    Nothing compares the processes of a program that updates by hand and forgets to sum, so each looks at itself: in its
    first run, and in runs after one that has computed gradients and met nobody, such as those of an accumulation.

    Args:
        parameters: returns the process's parameters.
        was_reached: says whether a backward pass of the run has reached one. Others may change: averages of them.
    """

    def __init__(self, parameters: Callable[[], Iterable[Tensor]], was_reached: Callable[[Tensor], bool]) -> None:
        self._parameters = parameters
        self._was_reached = was_reached
        self._is_due = True
        self._num_looks = 0
        self._before: list[tuple[Tensor, int]] = []

    def before_run(self) -> None:
        """Remember what some parameters hold, if the last run makes it worth while."""
        if not self._is_due:
            return
        trained = [p for p in self._parameters() if p.requires_grad and p.layout is torch.strided and not p.is_meta]
        trained = [p for p in trained if 0 < p.numel() <= _NUMBERS_LOOKED_AT and not is_dtensor(p)]
        ends = trained[: _NUM_LOOKED_AT // 2] + trained[_NUM_LOOKED_AT // 2 :][-_NUM_LOOKED_AT // 2 :]
        if all(p.is_cpu for p in ends) or self._num_looks < _NUM_LOOKS_AT_ACCELERATORS:
            self._num_looks += 1
            self._before = list(zip(ends, fingerprints(ends), strict=True))

    def after_run(self, contexts: Sequence[Any], *, has_failed: bool) -> None:
        """Warn if they were changed.

        Args:
            contexts: the replicas', which know whether they have computed gradients, and met others.
            has_failed: whether the run has ended by an error.
        """
        before, self._before = self._before, []
        self._is_due = any(c._has_computed for c in contexts) and not any(c._has_met for c in contexts)
        if not self._is_due or has_failed or not before:
            return
        now = fingerprints([parameter for parameter, _ in before])
        asked = set[int]().union(*[c._differentiated for c in contexts])
        by_copies = bool(asked - {id(p) for p in self._parameters()})  # as by torch.func, of whatever parameters
        changed = [
            tuple(p.shape)
            for (p, was), number in zip(before, now, strict=True)
            if was != number and (by_copies or id(p) in asked or self._was_reached(p))
        ]
        if changed:
            warn_once(
                f"A run has computed gradients and changed a parameter (shape {changed[0]}), but has met no other "
                "process. Each process has the gradients of its own share: if they were applied, the processes now "
                "train apart. Update by `optimizer.step()`, or by gradients that went through "
                '`ts.get_replica_context().all_reduce("SUM", gradient)`.',
                of=self,
            )


def describe_divergence(name: str, shape: Sequence[int], text: str) -> str:
    """Return what to say of a parameter that differs between the replicas of this process after a run.

    Args:
        name: the parameter's.
        shape: its shape.
        text: between which replicas it differs, and how.
    """
    return (
        f"After the run, parameter {name!r} (shape {tuple(shape)}) differs between {text}. Either the replicas applied "
        "different updates: use `optimizer.step()`, which sums the gradients, and do not change parameters by values "
        "that differ between replicas, such as random numbers, of which each replica draws its own (let an optimizer "
        "that needs some take them from a generator that it seeds in each step). Or the program wrote to "
        "`parameter.data` outside `run`, which reaches replica 0 only: write to the parameter itself, inside "
        "`with torch.no_grad():`."
    )


def differences_between_copies(
    slots: Sequence[Slot], name_of: Callable[[int], str]
) -> list[tuple[str, torch.Size, str]]:
    """Return the names and shapes of the parameters that differ between the replicas of this process, and how.

    Args:
        slots: where the parameters and buffers live.
        name_of: says which replica a local id is.
    """
    copies = []
    for dicts, name in slots:
        first = dicts[0].get(name)
        if not isinstance(first, torch.nn.Parameter) or any(may_differ(own.get(name)) for own in dicts):
            continue
        copies += [(name, other, first, own[name]) for other, own in enumerate(dicts[1:], 1)]
    found = []
    are_equal = have_equal_bits([(first, own) for _, _, first, own in copies])
    for (name, other, first, own), is_equal in zip(copies, are_equal, strict=True):
        text = None if is_equal else difference(first, own)
        if text is not None:
            found.append((name, first.shape, f"{name_of(0)} and {name_of(other)} {text}"))
    return found


def may_differ(tensor: Any) -> bool:
    """Say whether a tensor is a variable whose copies are meant to differ."""
    return isinstance(tensor, Variable) and tensor.diverges


def _fingerprint(dicts: Sequence[dict[str, Any]], name: str) -> list[Any]:
    return [_state(own.get(name)) for own in dicts]


def _state(tensor: Tensor | None) -> tuple[Any, ...]:
    if tensor is None or tensor.is_inference():
        return (None,)
    grad = tensor.grad if tensor.is_leaf else None
    return (id(tensor), tensor._version, tensor.data_ptr(), id(grad), None if grad is None else grad._version)


def difference(first: Tensor, other: Tensor) -> str | None:
    """Say by how much or where two tensors differ; ``None`` if they don't, or by rounding only."""
    a, b = first.detach(), other.detach().to(first.device)
    if a.shape != b.shape:
        return f"in shape, {tuple(a.shape)} and {tuple(b.shape)}"
    if torch.equal(a, b):
        return None
    if not (a.is_floating_point() or a.is_complex()):
        return f"at {int((a != b).sum())} of {a.numel()} places"
    tolerance = _ABSOLUTE_TOLERANCE + _RELATIVE_TOLERANCE * float(a.abs().nan_to_num(posinf=0.0).max())
    if torch.allclose(a, b, rtol=0.0, atol=tolerance, equal_nan=True):
        return None
    return f"by up to {float((a - b).abs().nan_to_num(nan=float('inf')).max()):.3g}"
