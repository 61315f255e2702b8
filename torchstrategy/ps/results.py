"""What a closure returned or raised, as JSON and tensors: nothing that arrives here can run code.

Plain JSON stands for itself where it can; everything else is an object with one key that names its kind. Tensors and
arrays are numbered, and travel beside the JSON.
"""

from __future__ import annotations

import base64
import builtins
import json
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchstrategy import errors
from torchstrategy.ps.transport.messages import Message, tensor_bytes

__all__ = ["decode_error", "decode_result", "decode_side", "encode_error", "encode_result"]

_MAX_DEPTH = 100
_MAX_MESSAGE = 16 * 1024
_MAX_TRACEBACK = 32 * 1024
_ALLOWED = (
    "A function that is scheduled may return None, bool, int, float, complex, str, bytes, tensors, numpy arrays and "
    "numbers, and lists, tuples and dictionaries of these"
)


def encode_result(value: Any, side: Any = None) -> Message:
    """Return the message that carries a closure's result.

    Tensors and arrays are copied, so that what the closure's program writes to them later does not show. Subclasses of
    containers arrive as the plain container, a named tuple as a tuple.

    Args:
        value: what the closure returned.
        side: what it gave beside that, for ``decode_side``; of the same kinds.

    Returns:
        A ``"done"`` message. Its JSON is in blobs, because headers have narrow limits.

    Raises:
        TypeError: there is something in it that can't be sent.
        ValueError: its containers are nested too deeply, or contain themselves.

    Example:
        >>> from torchstrategy.ps.results import decode_result, encode_result
        >>> decode_result(encode_result({"loss": torch.tensor(0.5), 3: (None, "text")}))
        {'loss': tensor(0.5000), 3: (None, 'text')}
    """
    tensors: list[Tensor] = []
    trees = [_encode(value, (), tensors)]
    if side is not None:
        trees.append(_encode(side, (), tensors))
    blobs = tuple(json.dumps(tree, separators=(",", ":"), allow_nan=False).encode() for tree in trees)
    return Message("done", {}, tuple(tensors), blobs)


def decode_result(message: Message) -> Any:
    """Return what ``encode_result`` was given.

    Args:
        message: the message.

    Raises:
        ValueError: it was not made by ``encode_result``.
    """
    return _read(message.blobs[:1], message.tensors)


def decode_side(message: Message) -> Any:
    """Return what ``encode_result`` was given as ``side``.

    Args:
        message: the message.

    Raises:
        ValueError: it was not made by ``encode_result``.
    """
    return _read(message.blobs[1:], message.tensors) if len(message.blobs) > 1 else None


def encode_error(error: BaseException) -> dict[str, Any]:
    """Return the JSON fields that describe an error of a closure.

    Args:
        error: the error.

    Returns:
        ``type``, the class's name; ``bases``, the names of its base classes, nearest first; ``message`` and
        ``traceback``, which are shortened where they are very long.
    """
    is_quoted = isinstance(error, KeyError) and len(error.args) == 1 and isinstance(error.args[0], str)
    try:
        message = str(error.args[0] if is_quoted else error)
    except Exception as wrong:  # noqa: BLE001 - __str__ is the user's
        message = f"<its message can't be made: {type(wrong).__name__}>"
    text = "".join(traceback.format_exception(error))
    return {
        "type": _name(type(error)),
        "bases": [_name(cls) for cls in type(error).__mro__[1:]],
        "message": _shorten(message, _MAX_MESSAGE),
        "traceback": _shorten(text, _MAX_TRACEBACK),
    }


def decode_error(fields: Mapping[str, Any]) -> Exception:
    """Return an error like the one that ``encode_error`` was given.

    Exceptions of Python, of torch and of ``ts.errors`` keep their class. Any other one becomes the nearest of its base
    classes that is one of these, or a ``RuntimeError`` if that is just ``Exception``; its message then begins with the
    name of its own class. The traceback is added as a note.

    Args:
        fields: what ``encode_error`` returned.

    Raises:
        ValueError: they were not made by ``encode_error``.

    Example:
        >>> from torchstrategy.ps.results import decode_error, encode_error
        >>> class NoRowsError(LookupError):
        ...     pass
        >>> decode_error(encode_error(NoRowsError("no rows")))
        LookupError('NoRowsError: no rows')
    """
    try:
        name, message, trace = (str(fields[key]) for key in ("type", "message", "traceback"))
        bases = [str(base) for base in fields.get("bases", ())]
    except (KeyError, TypeError) as error:
        raise ValueError(f"An error that can't be read: {type(error).__name__}: {error}") from error
    short_name = name.rpartition(".")[2]
    own = _KNOWN_ERRORS.get(name)
    rebuilt = None if own is None else _rebuild(own, message)
    if rebuilt is None:
        nearest = next((_KNOWN_ERRORS[base] for base in bases if base in _KNOWN_ERRORS), RuntimeError)
        text = f"{short_name}: {message}"
        rebuilt = _rebuild(nearest, text) or RuntimeError(text)
    if hasattr(rebuilt, "add_note"):
        rebuilt.add_note(f"It was raised there:\n{trace.rstrip()}")
    else:  # Python 3.10
        rebuilt.__cause__ = RuntimeError(f"It was raised there:\n{trace.rstrip()}")
    return rebuilt


# Errors


def _name(cls: type) -> str:
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def _known_errors() -> dict[str, type[Exception]]:
    """Return the exceptions that may be made from a message alone, by name; ``Exception`` is no answer to anything."""
    torchs = [value for module in (torch, torch.linalg) for value in vars(module).values()]
    classes = [*vars(builtins).values(), *(getattr(errors, name) for name in errors.__all__), *torchs]
    found = [cls for cls in classes if isinstance(cls, type) and issubclass(cls, Exception) and cls is not Exception]
    return {_name(cls): cls for cls in found if not issubclass(cls, Warning)}


_KNOWN_ERRORS = _known_errors()


def _rebuild(cls: type[Exception], message: str) -> Exception | None:
    try:
        return cls(message)
    except TypeError:  # its constructor takes something else, such as that of UnicodeDecodeError
        return None


def _shorten(text: str, num_chars: int) -> str:
    if len(text) <= num_chars:
        return text
    half = num_chars // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"


# Results


def _encode(value: Any, path: tuple[Any, ...], tensors: list[Tensor]) -> Any:  # noqa: C901 - one case for each kind
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode("ascii")}
    if isinstance(value, np.generic):  # before float: np.float64 is one
        return {"number": _slot(_from_numpy(np.asarray(value), value, path), tensors)}
    if isinstance(value, int):
        return int(value) if abs(value) < 2**63 else {"int": hex(value)}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": repr(float(value))}
    if isinstance(value, complex):
        return {"complex": [_encode(part, path, tensors) for part in (value.real, value.imag)]}
    if isinstance(value, Tensor):
        return {"tensor": _slot(_plain_tensor(value, path), tensors)}
    if isinstance(value, np.ndarray):
        return {"array": _slot(_from_numpy(value, value, path), tensors)}
    if len(path) > _MAX_DEPTH:
        raise ValueError(f"The result's containers are nested more than {_MAX_DEPTH} deep, or contain themselves.")
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_encode(item, (*path, index), tensors) for index, item in enumerate(value)]}
    if isinstance(value, dict):
        return {"dict": [_encode_item(key, item, path, tensors) for key, item in value.items()]}
    raise _not_allowed(value, path)


def _encode_item(key: Any, value: Any, path: tuple[Any, ...], tensors: list[Tensor]) -> list[Any]:
    if isinstance(key, (Tensor, np.ndarray)):
        raise _not_allowed(key, path, " in a dictionary's key", "Use its item()")
    return [_encode(key, path, tensors), _encode(value, (*path, key), tensors)]


def _slot(tensor: Tensor, tensors: list[Tensor]) -> int:
    tensors.append(tensor)
    return len(tensors) - 1


def _plain_tensor(value: Tensor, path: tuple[Any, ...]) -> Tensor:
    local = value.detach()  # of a variable the value here
    if local.layout != torch.strided:
        raise _not_allowed(value, path, f" with the layout {local.layout}", "Return its to_dense()")
    if local.is_quantized:
        raise _not_allowed(value, path, " that is quantized", "Return its dequantize()")
    if local.is_meta:
        raise _not_allowed(value, path, " on the meta device", "It holds no data")
    plain = local.to("cpu").resolve_conj().resolve_neg()
    copy = torch.empty(plain.shape, dtype=plain.dtype).copy_(plain)
    try:
        tensor_bytes(copy)
    except TypeError:
        raise _not_allowed(value, path, f" of {value.dtype}", "Return it as another dtype") from None
    return copy


def _from_numpy(array: np.ndarray[Any, Any], value: Any, path: tuple[Any, ...]) -> Tensor:
    try:
        return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))
    except TypeError:
        raise _not_allowed(value, path, f" of dtype {array.dtype}", "Return numbers, or its tolist()") from None


def _not_allowed(value: Any, path: Sequence[Any], detail: str = "", remedy: str | None = None) -> TypeError:
    where = "".join(f"[{key!r}]" for key in path)
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    remedy = remedy or _REMEDIES.get(type(value).__name__, "Return the numbers that you need of it")
    return TypeError(f"{_ALLOWED}. Received {_article(kind)}{detail} as result{where}. {remedy}.")


_REMEDIES = {
    "set": "Return sorted(value)",
    "frozenset": "Return sorted(value)",
    "dict_keys": "Return list(value)",
    "dict_values": "Return list(value)",
    "generator": "Return list(value)",
    "range": "Return list(value)",
    "bytearray": "Return bytes(value)",
    "PerReplica": "Return strategy.experimental_local_results(value), or reduce it",
}


def _article(kind: str) -> str:
    return f"{'an' if kind[0].lower() in 'aeiou' else 'a'} {kind}"


def _read(blobs: Sequence[bytes], tensors: Sequence[Tensor]) -> Any:
    try:
        (text,) = blobs
        return _decode(json.loads(text), tensors)
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"A result that can't be read: {type(error).__name__}: {error}") from error


def _decode(tree: Any, tensors: Sequence[Tensor]) -> Any:
    if not isinstance(tree, Mapping):
        if tree is None or isinstance(tree, (bool, int, float, str)):
            return tree
        raise TypeError(f"expected an object, received {type(tree).__name__}")
    ((kind, content),) = tree.items()
    return _DECODERS[kind](content, tensors)


_DECODERS: dict[str, Callable[[Any, Sequence[Tensor]], Any]] = {
    "int": lambda text, _: int(text, 16),
    "float": lambda text, _: float(text),
    "complex": lambda parts, tensors: complex(_decode(parts[0], tensors), _decode(parts[1], tensors)),
    "bytes": lambda text, _: base64.b64decode(text, validate=True),
    "tensor": lambda index, tensors: _tensor(index, tensors),
    "array": lambda index, tensors: _tensor(index, tensors).numpy(),
    "number": lambda index, tensors: _tensor(index, tensors).numpy()[()],
    "list": lambda items, tensors: [_decode(item, tensors) for item in items],
    "tuple": lambda items, tensors: tuple(_decode(item, tensors) for item in items),
    "dict": lambda items, tensors: {_decode(key, tensors): _decode(item, tensors) for key, item in items},
}


def _tensor(index: int, tensors: Sequence[Tensor]) -> Tensor:
    if not 0 <= index < len(tensors):
        raise IndexError(f"there is no tensor {index}")
    return tensors[index]
