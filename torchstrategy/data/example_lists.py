"""Lists with one entry for each example, such as a detection model's images: told apart from lists of components.

``(images, targets)`` may be two lists of three examples each, or a pair of lists of three tensors that each hold a
batch. Sizes don't tell: three images have three channels. But the collate function does: made to collate another
number of examples, it makes the former lists longer or shorter.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from torchstrategy.base import tree

__all__ = ["Examples", "with_example_lists"]

_Path = tuple[Any, ...]
_Paths = frozenset[_Path]


class Examples(list[Any]):
    """A list with an entry for each example, one component: pytrees take a subclass of ``list`` for a leaf.

    Args:
        values: the entries.
        kind: what they were in: ``list``, ``tuple`` or, for a list of strings, ``strings``.
    """

    def __init__(self, values: Iterable[Any] = (), kind: str = "list") -> None:
        super().__init__(values)
        self.kind = kind

    def cut(self, start: int, stop: int) -> Examples:
        """Return the entries from ``start`` to ``stop``."""
        return Examples(self[start:stop], self.kind)

    def to(self, device: torch.device) -> Examples:
        """Return it with its tensors on a device."""
        moved = [tree.map_leaves(lambda x: x.to(device) if isinstance(x, Tensor) else x, entry) for entry in self]
        return Examples(moved, self.kind)

    def as_given(self) -> Any:
        """Return what the user's batch had."""
        return tuple(self) if self.kind == "tuple" else list(self)


def with_example_lists(data: Any) -> Any:
    """Return a copy of a loader whose batches mark their lists of examples; other data as it is."""
    if not isinstance(data, DataLoader) or data.batch_sampler is None or data.collate_fn is default_collate:
        return data
    loader = copy.copy(data)
    loader.__dict__["collate_fn"] = _MarkingCollate(data.collate_fn)
    return loader


class _MarkingCollate:
    """Calls the user's collate function, and marks the lists of examples in its batches.

    Args:
        collate_fn: makes a batch of a list of examples.
    """

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self._collate_fn = collate_fn
        self._paths: _Paths | None = None  # of the lists of examples; None: not known yet

    def __call__(self, examples: Any) -> Any:
        if self._paths is not None or type(examples) is not list or not examples:
            return _mark(self._collate_fn(examples), self._paths or frozenset())
        spare = _copy(examples[0])  # before the collate function can change it
        batch = self._collate_fn(examples)
        if not _may_hold_example_lists(batch, len(examples)):
            if len(examples) > 1:
                self._paths = frozenset()
            return batch
        self._paths = self._find(batch, spare, len(examples))
        return _mark(batch, self._paths)

    def _find(self, batch: Any, spare: Any, num_examples: int) -> _Paths:
        # A batch of one more or fewer: of one, or of two if there is only one.
        try:
            others = [spare] if num_examples > 1 else [spare, copy.deepcopy(spare)]
            other = _without_random_effects(lambda: self._collate_fn(others))
        except Exception as error:
            paths = _lists(batch, num_examples)
            if not paths:
                return frozenset()
            raise ValueError(
                f"Batches of {num_examples} examples have a list of {num_examples} entries{_describe(paths[0])}. "
                "Whether it has an entry for each example, or each entry a row for each example, could not be told, "
                f"because collating {1 if num_examples > 1 else 2} example(s) raised {type(error).__name__}: {error}. "
                "Let the collate function take any number of examples, or make it return tensors of shape "
                "[batch, ...], or an object of a type that is registered by ts.data.register_splitter."
            ) from error
        return frozenset(_growing(batch, other, ()))


def _copy(example: Any) -> Any:
    try:
        return copy.deepcopy(example)
    except Exception:  # noqa: BLE001 - whatever an example's own methods raise: it is used as it is
        return example


def _without_random_effects(fn: Callable[[], Any]) -> Any:
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            return fn()
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def _children(node: Any) -> list[tuple[Any, Any]]:
    if isinstance(node, Mapping):
        return list(node.items())
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return [(field.name, getattr(node, field.name)) for field in dataclasses.fields(node)]
    return list(enumerate(node)) if isinstance(node, (list, tuple)) else []


def _is_list(node: Any) -> bool:
    return type(node) in (list, tuple) and not (node and all(isinstance(value, (str, bytes)) for value in node))


def _lists(node: Any, length: int, path: _Path = ()) -> list[_Path]:
    if _is_list(node) and len(node) == length:
        return [path]
    return [found for key, child in _children(node) for found in _lists(child, length, (*path, key))]


def _may_hold_example_lists(batch: Any, num_examples: int) -> bool:
    """Say whether a list has an entry for each example, or lies above something that has not a row for each."""
    if _is_list(batch) and (len(batch) == num_examples or not all(map(_has_rows(num_examples), batch))):
        return True
    return any(_may_hold_example_lists(child, num_examples) for _, child in _children(batch))


def _has_rows(num_examples: int) -> Callable[[Any], bool]:
    def has_rows(value: Any) -> bool:
        if isinstance(value, (Tensor, np.ndarray)):
            return value.ndim > 0 and len(value) == num_examples
        return bool(_children(value)) or value is None  # looked at by itself

    return has_rows


def _growing(batch: Any, other: Any, path: _Path) -> list[_Path]:
    """Return where the lists are that have another length in a batch of another number of examples."""
    if type(batch) is not type(other):
        return []
    if _is_list(batch) and len(batch) != len(other):
        return [path]
    others = dict(_children(other))
    return [
        found
        for key, child in _children(batch)
        if key in others
        for found in _growing(child, others[key], (*path, key))
    ]


def _mark(batch: Any, paths: _Paths) -> Any:
    for path in paths:
        batch = _replace(batch, path)
    return batch


def _replace(node: Any, path: _Path) -> Any:
    if not path:
        return Examples(node, type(node).__name__) if _is_list(node) else node
    key, *rest = path
    if isinstance(node, Mapping):
        if key not in node:
            return node
        result: Any = copy.copy(node)
        result[key] = _replace(node[key], tuple(rest))
        return result
    if isinstance(node, (list, tuple)):
        if key >= len(node):
            return node
        values = [_replace(value, tuple(rest)) if i == key else value for i, value in enumerate(node)]
        return type(node)(*values) if hasattr(node, "_fields") else type(node)(values)
    result = copy.copy(node)
    object.__setattr__(result, key, _replace(getattr(node, key), tuple(rest)))
    return result


def _describe(path: _Path) -> str:
    return " at " + "".join(f"[{key!r}]" for key in path) if path else ""
