"""What is known of each gradient, marked on the tensor itself: a replica's own, the sum over replicas, or used up."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from torchstrategy.collectives.call_site import call_site

__all__ = [
    "check_can_be_summed",
    "copy_mark",
    "is_marked",
    "is_own",
    "is_sum",
    "mark",
    "mark_applied",
    "note_backward",
    "own_mark",
    "unmark",
    "was_edited",
]

_MARK = "_ts_gradient"
_UNUSED_SUM = "_ts_unused_sum"


class _Mark(NamedTuple):
    """What a gradient is.

    ``"own"``: this replica's, from a backward pass in ``run``; ``"outside"``: from one outside ``run``; ``"summed"``
    over replicas; ``"applied"`` by a step; or ``"mixed"`` from a sum and a later backward. ``version`` is the
    gradient's at that moment.
    """

    kind: str
    version: int


def mark(parameter: Tensor) -> None:
    """Note that a parameter's gradient is the sum over replicas."""
    if parameter.grad is not None:
        setattr(parameter.grad, _MARK, _Mark("summed", parameter.grad._version))
        if getattr(parameter, "_post_accumulate_grad_hooks", None):  # else nobody would call `note_backward`
            setattr(parameter, _UNUSED_SUM, True)


def mark_applied(parameter: Tensor) -> None:
    """Note that a step has used a parameter's sum: another step may, but another backward must not add to it."""
    if parameter.grad is not None and is_marked(parameter):
        setattr(parameter.grad, _MARK, _Mark("applied", parameter.grad._version))
    _forget_unused_sum(parameter)


def unmark(parameter: Tensor) -> None:
    """Forget that a parameter's gradient was summed."""
    if parameter.grad is not None and hasattr(parameter.grad, _MARK):
        delattr(parameter.grad, _MARK)
    _forget_unused_sum(parameter)


def is_marked(parameter: Tensor) -> bool:
    """Say whether a parameter's gradient is the sum over replicas; edits after the step end that."""
    found = _mark_of(parameter)
    if parameter.grad is None:
        return False
    if found is None:  # the program may have replaced a summed gradient, as in `p.grad = clip(p.grad)`
        return hasattr(parameter, _UNUSED_SUM)
    return found.kind == "summed" or (found.kind == "applied" and found.version == parameter.grad._version)


def is_own(parameter: Tensor) -> bool:
    """Say whether a parameter's gradient is known to be one replica's, not summed."""
    found = _mark_of(parameter)
    return found is not None and found.kind == "own"


def own_mark(parameter: Tensor) -> object | None:
    """Return what stands for a replica's own gradient as the last backward pass has left it; ``None`` if it is not so.

    Every backward pass that adds to the gradient gives it another mark.
    """
    found = _mark_of(parameter)
    if found is None or found.kind != "own" or found.version != parameter.grad._version:  # type: ignore[union-attr]
        return None
    return found


def is_sum(gradient: Tensor) -> bool:
    """Say whether a gradient is known to be a sum over replicas, applied or not."""
    found: _Mark | None = getattr(gradient, _MARK, None)
    return found is not None and found.kind in ("summed", "applied")


def copy_mark(gradient: Tensor, other: Tensor) -> None:
    """Note of a gradient that stands for another one what is known of that."""
    found: _Mark | None = getattr(gradient, _MARK, None)
    if found is not None:
        setattr(other, _MARK, _Mark(found.kind, other._version))


def note_backward(parameter: Tensor, *, inside: bool) -> None:
    """Look at a parameter's gradient after a backward pass has added to it.

    Args:
        parameter: the parameter.
        inside: whether the backward pass is a replica's, in ``run``.

    Raises:
        RuntimeError: it is a sum over replicas that no step has used.
    """
    found = _mark_of(parameter)
    if parameter.grad is None:
        _forget_unused_sum(parameter)
        return
    if found is not None and found.kind == "summed":
        raise RuntimeError(
            f"`backward` adds to a gradient (shape {tuple(parameter.shape)}) that is already the sum over replicas. "
            "Call `optimizer.step()` or `optimizer.zero_grad()` after `sum_gradients` or `scaler.unscale_`, before "
            "the next backward."
        )
    kind = "own" if inside else "outside"
    if found is not None and parameter.grad._version == found.version + 1:  # nothing but this backward has touched it
        kind = {"applied": "mixed", "mixed": "mixed", "outside": "outside"}.get(found.kind, kind)
    _forget_unused_sum(parameter)
    setattr(parameter.grad, _MARK, _Mark(kind, parameter.grad._version))


def _forget_unused_sum(parameter: Tensor) -> None:
    if hasattr(parameter, _UNUSED_SUM):
        delattr(parameter, _UNUSED_SUM)


def _mark_of(parameter: Tensor) -> _Mark | None:
    found: _Mark | None = getattr(parameter.grad, _MARK, None)
    return found


def check_can_be_summed(k: int, parameter: Tensor) -> None:
    """Refuse parameter ``k`` if its gradient is not what this replica's ``backward`` gave in ``run``.

    Raises:
        RuntimeError: it comes from outside ``run``, or holds a sum that was applied and, on top of it, a later
            backward's.
    """
    found = _mark_of(parameter)
    if found is not None and found.kind == "outside":
        raise RuntimeError(
            f"The gradient of parameter {k} (shape {tuple(parameter.shape)}) was computed outside `run`, so it is not "
            "known which replica's part it is. Call `backward` inside the function that you give to `strategy.run`, or "
            f"clear it with `optimizer.zero_grad()`. (The sum was to be made at {call_site()}.)"
        )
    if found is not None and found.kind == "mixed":
        raise RuntimeError(
            f"`backward` has added to the gradient of parameter {k} (shape {tuple(parameter.shape)}) that the previous "
            "`optimizer.step()` applied, which is a sum over replicas, so the new one can't be told apart. Call "
            f"`optimizer.zero_grad()` between a step and the next backward. (The sum was to be made at {call_site()}.)"
        )


def was_edited(parameter: Tensor) -> bool:
    """Say whether a replica's own gradient was changed in place since its backward pass, other than to zeros."""
    found, grad = _mark_of(parameter), parameter.grad
    if found is None or grad is None or found.kind != "own" or found.version == grad._version:
        return False
    return bool((grad._values() if grad.is_sparse else grad).count_nonzero())
