"""How a loss scales what it adds up, read from its graph."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

__all__ = ["sums_of"]

_MAX_NODES = 300
_THROUGH = ("Neg", "MaskedFill", "ToCopy", "Alias", "View", "Reshape", "Squeeze", "Unsqueeze", "Where", "Clone")


def sums_of(loss: Any) -> list[tuple[int, float]]:  # noqa: C901 - a table of operations
    """Return the sums that a loss consists of.

    Args:
        loss: a scalar tensor with a graph.

    Returns:
        For each sum over elements that constants scale: how many elements, and the constant each is scaled by.
    """
    if not isinstance(loss, Tensor) or loss.grad_fn is None:
        return []
    found: list[tuple[int, float]] = []
    waiting: list[tuple[Any, float, int | None]] = [(loss.grad_fn, 1.0, None)]
    for _ in range(_MAX_NODES):
        if not waiting:
            break
        node, factor, number = waiting.pop()
        kind = node.name()
        children = [child for child, _ in node.next_functions if child is not None]
        if kind.startswith("SumBackward") and number is None and _is_total(node):
            waiting += [(child, factor, math.prod(node._saved_self_sym_sizes)) for child in children]
        elif kind.startswith(("MulBackward", "DivBackward")) and len(children) == 1:
            constant = _constant(node)
            if constant:
                by = 1 / constant if kind.startswith("Div") else constant
                waiting.append((children[0], factor * by, number))
            elif number is not None:
                found.append((number, abs(factor)))
        elif kind.startswith(("AddBackward", "SubBackward")) and number is None:
            waiting += [(child, factor, None) for child in children]
        elif kind.startswith(_THROUGH) and children:
            waiting.append((children[0], factor, number))
        elif getattr(node, "_saved_reduction", None) == _SUM:
            size = getattr(node, "_saved_self", None)
            target = getattr(node, "_saved_target", None)
            rows = target if isinstance(target, Tensor) else size
            if isinstance(rows, Tensor):
                found.append((rows.numel(), abs(factor)))
        elif number is not None:
            found.append((number, abs(factor)))
    return found


_SUM = 2


def _is_total(node: Any) -> bool:
    is_vector = len(node._saved_self_sym_sizes) > 0  # of one element, too: the last batch may have one example
    return is_vector and all(math.prod(o.shape) == 1 for o in node._input_metadata)


def _constant(node: Any) -> float | None:
    for name in ("_saved_other", "_saved_self"):
        value = getattr(node, name, None)
        if isinstance(value, Tensor) and value.numel() == 1 and not value.requires_grad:
            return float(value)
        if isinstance(value, (int, float)):
            return float(value)
    return None
