"""Elements of a dataset: nested tuples, dicts and dataclasses of tensors and strings.

As in tf, numbers, arrays and lists in an element become tensors. Strings, lists of strings, ``None`` and other objects
stay what they are. A list is therefore never a container.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchstrategy.base import log
from torchstrategy.errors import InvalidArgumentError

__all__ = [
    "add_note",
    "begin",
    "call",
    "call_noted",
    "describe",
    "function_name",
    "leaf_paths",
    "map_leaves",
    "parts",
    "rebuild",
    "to_element",
    "to_raw",
]


def to_element(value: Any) -> Any:
    """Return the element that a value of the user's becomes; arrays are copied, because users often refill them.

    Raises:
        InvalidArgumentError: a list can't become a tensor.
    """
    if isinstance(value, Tensor) or value is None or type(value) in (str, bytes):
        return value
    if type(value) is tuple:
        return tuple([to_element(part) for part in value])
    if isinstance(value, (bool, int, float, complex)) and not isinstance(value, np.generic):
        return _from_number(value)
    if isinstance(value, np.generic) or hasattr(value, "__array__"):
        return _from_array(np.asarray(value))
    if isinstance(value, list):
        return _from_list(value)
    if isinstance(value, Mapping) and not isinstance(value, (dict, OrderedDict)):
        value = dict(value)
    found = parts(value)
    return value if found is None else rebuild(value, [to_element(part) for part in found[1]])


_NUMPY_NUMBERS = (np.bool_, np.uint8, np.int8, np.int16, np.int32, np.int64, np.float16, np.float32, np.float64)
_UNCHANGING = frozenset({Tensor, int, float, bool, str, bytes, type(None), *_NUMPY_NUMBERS})


def to_raw(value: Any) -> Any:
    """Return what ``to_element`` makes the element of later; numbers wait, because ``batch`` converts many at once."""
    kind = type(value)
    if kind is tuple:
        return value if _UNCHANGING.issuperset(map(type, value)) else tuple(map(to_raw, value))
    if kind in _UNCHANGING:
        return value
    if kind is dict:
        return {key: to_raw(part) for key, part in value.items()}
    return to_element(value)


def parts(value: Any) -> tuple[list[Any], list[Any]] | None:
    """Return the keys and the values of a container; ``None`` for a leaf."""
    if isinstance(value, tuple):
        return list(getattr(value, "_fields", range(len(value)))), list(value)
    if isinstance(value, dict):
        return list(value), list(value.values())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return names, [getattr(value, name) for name in names]
    return None


def rebuild(like: Any, values: list[Any]) -> Any:
    """Return a container of the same kind with other values."""
    if isinstance(like, tuple):
        return type(like)(*values) if hasattr(like, "_fields") else tuple(values)
    if isinstance(like, dict):
        pairs = zip(like, values, strict=True)
        return OrderedDict(pairs) if isinstance(like, OrderedDict) else dict(pairs)
    result = copy.copy(like)
    for field, value in zip(dataclasses.fields(like), values, strict=True):
        object.__setattr__(result, field.name, value)
    return result


def map_leaves(fn: Callable[[Any], Any], element: Any) -> Any:
    """Apply ``fn`` to every leaf and keep the structure."""
    if type(element) is tuple:  # by far the most frequent container: this is called for every element
        return tuple([map_leaves(fn, part) for part in element])
    if isinstance(element, Tensor):
        return fn(element)
    found = parts(element)
    return fn(element) if found is None else rebuild(element, [map_leaves(fn, part) for part in found[1]])


def leaf_paths(element: Any, path: str = "") -> list[tuple[str, Any]]:
    """Return every leaf with where it stands, such as ``['image'][0]``."""
    found = parts(element)
    if found is None:
        return [(path, element)]
    pairs = zip(*found, strict=True)
    return [pair for key, part in pairs for pair in leaf_paths(part, f"{path}[{key!r}]")]


def describe(element: Any) -> str:
    """Return an element's structure with a dtype and shape for each tensor, such as ``(float32[28, 28], int64[])``."""
    if isinstance(element, Tensor):
        return f"{str(element.dtype).removeprefix('torch.')}{list(element.shape)}"
    found = parts(element)
    if found is None:
        return f"list[{len(element)}]" if isinstance(element, list) else type(element).__name__
    inner = [describe(part) for part in found[1]]
    if isinstance(element, dict):
        return "{" + ", ".join(f"{key!r}: {text}" for key, text in zip(found[0], inner, strict=True)) + "}"
    if type(element) is tuple:
        return f"({', '.join(inner)}{',' if len(inner) == 1 else ''})"
    return f"{type(element).__name__}({', '.join(f'{k}={t}' for k, t in zip(found[0], inner, strict=True))})"


def call(fn: Callable[..., Any], element: Any) -> Any:
    """Call a user's function as tf does: a plain tuple is unpacked into arguments, anything else is one argument."""
    return fn(*element) if type(element) is tuple else fn(element)


def _from_number(value: complex) -> Tensor:
    # torch.tensor takes three times as long.
    if isinstance(value, (bool, int)):
        return torch.from_numpy(np.array(value, np.bool_ if isinstance(value, bool) else np.int64))
    return torch.scalar_tensor(value, device="cpu") if isinstance(value, float) else torch.tensor(value, device="cpu")


def _from_array(array: np.ndarray[Any, Any]) -> Any:
    if array.dtype.kind not in "biufc":
        return array.tolist()
    return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))


def _from_list(values: list[Any]) -> Any:
    if not values:
        return torch.tensor([], device="cpu")
    if all(isinstance(value, (str, bytes)) for value in values):
        return list(values)
    if all(isinstance(value, (bool, int, float, complex)) and not isinstance(value, np.generic) for value in values):
        return torch.tensor(values, device="cpu")
    items = [to_element(list(value) if type(value) is tuple else value) for value in values]
    if all(isinstance(item, list) for item in items):
        return items
    try:
        return torch.stack(items)
    except (TypeError, RuntimeError):
        raise InvalidArgumentError(
            f"A list in an element becomes a tensor, as in tf, and this one can't: {describe(tuple(items))}. Use a "
            "tuple or a dict for several components."
        ) from None


def call_noted(operation: str, fn: Callable[..., Any], element: Any, where: str) -> Any:
    """Call a function on an element.

    Args:
        operation: what the function was given to.
        fn: the user's function.
        element: its argument, or a tuple of them.
        where: which element it is.

    Raises:
        RuntimeError: the function raised ``StopIteration``, which would end the dataset in silence.
    """
    try:
        return call(fn, element)
    except StopIteration as error:
        raise RuntimeError(
            f"The function of {operation}({function_name(fn)}) raised StopIteration for {where}. To end a dataset "
            "early use take()."
        ) from error
    except Exception as error:
        add_note(error, operation, fn, f"{where}: {describe(element)}")
        raise


def begin(operation: str, fn: Callable[..., Any], make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """Return the iterator that a user's function makes.

    Raises:
        RuntimeError: the function raised ``StopIteration``, which would end the dataset in silence.
    """
    try:
        return make()
    except StopIteration as error:
        raise RuntimeError(f"The function of {operation}({function_name(fn)}) raised StopIteration.") from error


def add_note(error: Exception, operation: str, fn: Callable[..., Any], where: str) -> None:
    """Say on an error in which operation and at which element it was raised."""
    log.add_note(error, f"Raised in {operation}({function_name(fn)}) for {where}")


def function_name(fn: Any) -> str:
    """Return a short name for a function."""
    return str(getattr(fn, "__qualname__", type(fn).__name__)).rsplit("<locals>.", 1)[-1]
