"""Looks for what replicas must not do to each other's tensors, in the first runs and every ``check_every`` runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchstrategy.errors import DivergenceError
from torchstrategy.replicas.clone import Slot
from torchstrategy.replicas.variables import Variable

__all__ = ["DivergenceCheck", "describe_divergence", "difference", "differences_between_copies"]

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
        "that differ between replicas. Or the program wrote to `parameter.data` outside `run`, which reaches replica 0 "
        "only: write to the parameter itself, inside `with torch.no_grad():`."
    )


def differences_between_copies(
    slots: Sequence[Slot], name_of: Callable[[int], str]
) -> list[tuple[str, torch.Size, str]]:
    """Return the names and shapes of the parameters that differ between the replicas of this process, and how.

    Args:
        slots: where the parameters and buffers live.
        name_of: says which replica a local id is.
    """
    found = []
    for dicts, name in slots:
        first = dicts[0].get(name)
        if not isinstance(first, torch.nn.Parameter) or any(_may_differ(own.get(name)) for own in dicts):
            continue
        for other, own in enumerate(dicts[1:], 1):
            text = difference(first, own[name])
            if text is not None:
                found.append((name, first.shape, f"{name_of(0)} and {name_of(other)} {text}"))
    return found


def _may_differ(tensor: Any) -> bool:
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
