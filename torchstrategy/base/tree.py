"""Map, flatten and zip nested structures; the only file that touches torch's pytree.

Containers are what torch's pytree knows (tuple, list, dict, OrderedDict, namedtuple, ...) plus dataclass instances.
``None`` is a leaf, as a replica's return value is.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils import _pytree

__all__ = [
    "all_leaves",
    "describe",
    "flatten",
    "flatten_row",
    "from_text",
    "leaf_paths",
    "map_leaves",
    "map_structure",
    "to_text",
    "unflatten",
]

_Spec = _pytree.TreeSpec
_DESCRIBED = 120
_NUM_DESCRIPTIONS = 64
#: Of specs by their ids, with the specs themselves: batches of a loader share one, and each asks for its text.
_descriptions: dict[int, tuple[_Spec, str]] = {}


class _Fields:
    """Marks, in a spec, the dataclass whose fields were flattened as a dict."""

    def __init__(self, values: dict[str, Any], cls: type) -> None:
        self.values = values
        self.cls = cls


_pytree.register_pytree_node(
    _Fields,
    lambda fields: (list(fields.values.values()), (fields.cls, tuple(fields.values))),
    lambda values, context: _rebuild_dataclass(context, list(values)),
    flatten_with_keys_fn=lambda fields: (
        [(_pytree.GetAttrKey(name), value) for name, value in fields.values.items()],
        (fields.cls, tuple(fields.values)),
    ),
)


def flatten(structure: Any) -> tuple[list[Any], _Spec]:
    """Return the leaves in order and a spec whose ``unflatten(leaves)`` builds the structure again."""
    return _pytree.tree_flatten(_expand(structure))


def flatten_row(row: Any) -> tuple[list[Any], _Spec]:
    """Do what ``flatten`` does, ten times faster, for a list, tuple or dict that is known to hold no containers."""
    if type(row) is dict:
        return list(row.values()), _dict_spec(tuple(row))
    cls: Any = type(row)
    return list(row), _sequence_spec(cls, len(row))


def unflatten(spec: _Spec, leaves: Sequence[Any]) -> Any:
    """Build the structure again."""
    if spec.type in (tuple, list) and spec.num_nodes == len(leaves) + 1:  # much faster than torch's general way
        return spec.type(leaves)
    return spec.unflatten(leaves)


@functools.lru_cache(maxsize=64)
def _sequence_spec(cls: Any, length: int) -> _Spec:
    return flatten(cls([None] * length))[1]


@functools.lru_cache(maxsize=64)
def _dict_spec(keys: tuple[Any, ...]) -> _Spec:
    return flatten(dict.fromkeys(keys))[1]


def all_leaves(structure: Any) -> list[Any]:
    """Return the leaves in order."""
    return flatten(structure)[0]


def leaf_paths(structure: Any) -> list[tuple[str, Any]]:
    """Return every leaf, in order, with where it stands, such as ``['image'][0]``; an empty text for a single leaf."""
    pairs = _pytree.tree_flatten_with_path(_expand(structure))[0]
    return [(_pytree.keystr(path), leaf) for path, leaf in pairs]


def map_leaves(fn: Callable[[Any], Any], structure: Any) -> Any:
    """Apply ``fn`` to every leaf and keep the structure."""
    if not isinstance(structure, (tuple, list, dict)) and not _is_dataclass(structure):
        return fn(structure)
    leaves, spec = flatten(structure)
    return spec.unflatten([fn(leaf) for leaf in leaves])


def map_structure(fn: Callable[..., Any], structures: Sequence[Any]) -> Any:
    """Apply ``fn`` to the corresponding leaves of several equal structures; the keys of dicts may be in any order.

    Raises:
        ValueError: the structures differ (types and lengths of containers, keys of dicts).
    """
    leaves, spec = flatten(structures[0])
    columns = [leaves]
    for structure in structures[1:]:
        other_leaves, other_spec = flatten(structure)
        if other_spec != spec:  # of dicts, maybe their order only
            other_leaves, other_spec = flatten(_in_order_of(structures[0], structure))
        if other_spec != spec:
            raise ValueError(
                "The replicas' values must have the same nested structure (types and lengths of containers, keys of "
                f"dicts). Received: {structures[0]!r} and {structure!r}"
            )
        columns.append(other_leaves)
    return spec.unflatten([fn(*row) for row in zip(*columns, strict=True)])


def _in_order_of(first: Any, other: Any) -> Any:
    """Return a structure whose dicts have their keys in the order of the first's, wherever these are the same."""
    kind = type(first)
    if kind is not type(other):
        return other
    if kind in (dict, OrderedDict, defaultdict) and first.keys() == other.keys():
        ordered = copy.copy(other)
        for key, value in first.items():
            ordered[key] = _in_order_of(value, ordered.pop(key))
        return ordered
    if isinstance(first, (tuple, list)) and len(first) == len(other):
        parts = map(_in_order_of, first, other)
        if kind in (tuple, list):
            return kind(parts)
        if hasattr(first, "_fields"):
            return kind(*parts)
    return other


def describe(spec: _Spec) -> str:
    """Return `` of `` and the structure, shortened; nothing for a single leaf."""
    known = _descriptions.get(id(spec))
    if known is not None and known[0] is spec:
        return known[1]
    if len(_descriptions) >= _NUM_DESCRIPTIONS:
        _descriptions.clear()
    text = _describe(spec)
    _descriptions[id(spec)] = (spec, text)
    return text


def _describe(spec: _Spec) -> str:
    if spec.num_children == 0 and spec.num_leaves == 1:
        return ""
    text = " ".join(repr(spec).replace("TreeSpec", "").split())
    return f" of {text}" if len(text) <= _DESCRIBED else f" of {text[:_DESCRIBED]}... ({zlib.crc32(text.encode()):x})"


def to_text(spec: _Spec) -> str | None:
    """Return a spec as text for another process, or ``None`` if it holds a class that text can't name."""
    try:
        return _pytree.treespec_dumps(spec)
    except (TypeError, NotImplementedError, ValueError):
        return None


def from_text(text: str) -> _Spec:
    """Return the spec that ``to_text`` made a text of."""
    return _pytree.treespec_loads(text)


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _expand(structure: Any) -> Any:
    if _is_dataclass(structure):
        values = {field.name: _expand(getattr(structure, field.name)) for field in dataclasses.fields(structure)}
        return _Fields(values, type(structure))
    if isinstance(structure, tuple) and hasattr(structure, "_fields"):
        return type(structure)(*map(_expand, structure))
    if type(structure) in (list, tuple):
        return type(structure)(map(_expand, structure))
    if type(structure) is dict:
        return {key: _expand(value) for key, value in structure.items()}
    return structure


def _rebuild_dataclass(context: Any, values: list[Any]) -> Any:
    cls, names = context
    fields = {field.name: field for field in dataclasses.fields(cls)}
    result = cls(**{n: v for n, v in zip(names, values, strict=True) if fields[n].init})
    for name, value in zip(names, values, strict=True):
        if not fields[name].init:
            object.__setattr__(result, name, value)
    return result
