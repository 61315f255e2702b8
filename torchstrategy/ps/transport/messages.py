"""What travels between processes: a kind, fields in JSON, raw tensors, raw bytes; errors; and memory for what arrives.

Nothing here unpickles: decoding a message runs no code that the message brings.
"""

from __future__ import annotations

import builtins
import json
import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchstrategy import errors
from torchstrategy.ps.transport.limits import Limits

__all__ = [
    "BufferPool",
    "FencedError",
    "Header",
    "Message",
    "MessageError",
    "RefusedError",
    "check_size",
    "decode",
    "encode",
    "error_message",
    "parse_header",
    "put_together",
    "raise_error",
    "rebuild_error",
    "tensor_bytes",
]

_MIN_BYTES = 1 << 20
_MAX_IDLE_BYTES = 512 << 20

_Block = npt.NDArray[np.uint8]


class BufferPool:
    """Blocks that come back by themselves when the last tensor over them is gone.

    Needs no lock, which a garbage collection could find taken by its own thread: single operations on a dict are
    atomic.

    Args:
        max_idle_bytes: what is kept at most for later messages.
    """

    def __init__(self, max_idle_bytes: int = _MAX_IDLE_BYTES) -> None:
        self._idle: dict[int, _Block] = {}
        self._max_idle_bytes = max_idle_bytes

    def empty(self, num_bytes: int) -> Tensor:
        """Return ``[num_bytes]`` of type uint8 with any content."""
        if num_bytes < _MIN_BYTES:
            return torch.empty(num_bytes, dtype=torch.uint8)
        block = self._take(num_bytes)
        lease = block.view()
        weakref.finalize(lease, self._give_back, block).atexit = False
        return torch.from_numpy(lease)

    @property
    def idle_bytes(self) -> int:
        """Bytes that are kept for later messages."""
        return sum(block.nbytes for block in list(self._idle.values()))

    def _take(self, num_bytes: int) -> _Block:
        for key, block in self._idle.copy().items():
            if block.nbytes == num_bytes and self._idle.pop(key, None) is not None:
                return block
        return np.empty(num_bytes, np.uint8)

    def _give_back(self, block: _Block) -> None:
        self._idle[id(block)] = block
        for key in list(self._idle):
            if self.idle_bytes <= self._max_idle_bytes:
                break
            self._idle.pop(key, None)


# Those whose elements are whole bytes and that mean the same without a scale kept elsewhere.
_DTYPES: Mapping[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
    if hasattr(torch, name)
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MAX_KIND = 64
_ALIGNMENT = 16
_JSON = json.JSONEncoder(separators=(",", ":"))


class MessageError(ValueError):
    """What arrived is no message, or one that is larger than allowed."""


class Message(NamedTuple):
    """One request or reply.

    Args:
        kind: what it asks or answers.
        fields: its values; anything JSON can hold, with strings as keys.
        tensors: any shape and dtype; they arrive on the CPU.
        blobs: raw bytes; on control connections only, because these are always encrypted.
        number: the connection's number of a control message that has arrived, which a later reply refers to.
    """

    kind: str
    fields: dict[str, Any]
    tensors: tuple[Tensor, ...] = ()
    blobs: tuple[bytes, ...] = ()
    number: int = 0


class TensorHeader(NamedTuple):
    """What is known of a tensor before its bytes are there."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    num_bytes: int


class Header(NamedTuple):
    """What is known of a message before its tensors and blobs are there."""

    kind: str
    fields: dict[str, Any]
    tensors: tuple[TensorHeader, ...]
    blob_sizes: tuple[int, ...]


class _Buffer(Protocol):
    def __buffer__(self, flags: int, /) -> memoryview: ...  # what bytes, arrays and frames of ZeroMQ have


def encode(message: Message) -> list[bytes | memoryview]:
    """Return a message's frames: its header, the tensors and the blobs.

    Args:
        message: the message; it must live until the frames have been sent.

    Returns:
        The frames. Those of contiguous CPU tensors are views of the tensors' own memory.

    Raises:
        TypeError: JSON can't hold the fields, or a tensor is sparse, quantized or on the meta device.
    """
    frames = [tensor_bytes(tensor) for tensor in message.tensors]
    header = {
        "kind": message.kind,
        "fields": message.fields,
        "tensors": [[_NAMES[tensor.dtype], list(tensor.shape)] for tensor in message.tensors],
        "blobs": [len(blob) for blob in message.blobs],
    }
    try:
        text = _JSON.encode(header).encode()
    except (TypeError, ValueError) as error:
        raise TypeError(f"JSON can't hold the fields of a message of kind {message.kind!r}: {error}") from error
    # With spaces at the end: in memory that begins with the header, the first tensor is aligned.
    return [text + b" " * (-len(text) % _ALIGNMENT), *frames, *message.blobs]


def decode(frames: Sequence[_Buffer | bytes | memoryview], limits: Limits) -> Message:
    """Make a message of its frames.

    Args:
        frames: as ``encode`` made them, in memory that the message may keep.
        limits: what it may have at most.

    Returns:
        The message. Its tensors share the frames' memory where that can be written to and is aligned.

    Raises:
        MessageError: it is damaged, or too large.
    """
    if not frames:
        raise MessageError("a message without a header")
    header = parse_header(frames[0], limits)
    payload = [memoryview(frame).cast("B") for frame in frames[1:]]
    sizes = [*(tensor.num_bytes for tensor in header.tensors), *header.blob_sizes]
    if [len(frame) for frame in payload] != sizes:
        raise MessageError(
            f"the header announces {len(sizes)} frames of {sum(sizes):,} bytes, there are {len(payload)} of "
            f"{sum(map(len, payload)):,}"
        )
    num_tensors = len(header.tensors)
    tensors = tuple(map(_tensor, payload[:num_tensors], header.tensors))
    return Message(header.kind, header.fields, tensors, tuple(map(bytes, payload[num_tensors:])))


def check_size(kind: str, frames: Sequence[bytes | memoryview], limits: Limits) -> None:
    """Check what ``encode`` has made.

    Raises:
        ValueError: the other side would refuse it.
    """
    num_bytes = sum(map(len, frames[1:]))
    if num_bytes > limits.max_message_bytes or len(frames[0]) > limits.max_header_bytes:
        raise ValueError(
            f"A message of kind {kind!r} has {num_bytes:,} bytes and {len(frames[0]):,} in its fields; at most "
            f"{limits.max_message_bytes:,} and {limits.max_header_bytes:,} are allowed on this connection. Send less "
            "at once, or set TORCHSTRATEGY_MAX_MESSAGE_BYTES (tensor connections), TORCHSTRATEGY_MAX_CONTROL_BYTES "
            "(control connections) or TORCHSTRATEGY_MAX_HEADER_BYTES in all processes."
        )


def put_together(header: Header, data: memoryview) -> Message:
    """Make a message without blobs of its header and the bytes of all tensors, which the tensors share."""
    tensors = []
    start = 0
    for tensor in header.tensors:
        tensors.append(_tensor(data[start : start + tensor.num_bytes], tensor))
        start += tensor.num_bytes
    return Message(header.kind, header.fields, tuple(tensors))


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return a tensor's bytes, without a copy if it is contiguous and on the CPU.

    Raises:
        TypeError: it is sparse, quantized or on the meta device.
    """
    if tensor.layout != torch.strided or tensor.dtype not in _NAMES or tensor.is_meta:
        raise TypeError(
            f"A tensor of dtype {tensor.dtype} and layout {tensor.layout} on {tensor.device} can't be sent. Send a "
            "dense one; of a sparse one the indices and values, of a quantized one what int_repr() gives and the scale."
        )
    with torch._C.DisableTorchFunctionSubclass():
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        flat = plain.as_strided((plain.numel(),), (1,))  # of few elements the last stride may be any
        return flat.view(torch.uint8).numpy().data


def parse_header(frame: _Buffer | bytes | memoryview, limits: Limits) -> Header:
    """Read a message's header.

    Args:
        frame: the first frame.
        limits: what the message may have at most.

    Raises:
        MessageError: it is damaged, or announces too much.
    """
    data = memoryview(frame).cast("B")
    if len(data) > limits.max_header_bytes:
        raise MessageError(f"a header of {len(data):,} bytes; at most {limits.max_header_bytes:,} are allowed")
    try:
        header = json.loads(str(data, "utf-8"))
    except (ValueError, RecursionError) as error:
        raise MessageError(f"the header is no JSON: {error}") from None
    if not isinstance(header, dict) or header.keys() != {"kind", "fields", "tensors", "blobs"}:
        raise MessageError("the header is not an object with kind, fields, tensors and blobs")
    kind, fields, tensors, blobs = header["kind"], header["fields"], header["tensors"], header["blobs"]
    if not isinstance(kind, str) or not 0 < len(kind) <= _MAX_KIND or not kind.isprintable():
        raise MessageError("the header's kind is no short name")
    if not isinstance(fields, dict) or not isinstance(tensors, list) or not isinstance(blobs, list):
        raise MessageError("the header's fields are no object, or its tensors or blobs no list")
    if len(tensors) + len(blobs) > limits.max_frames:
        raise MessageError(f"{len(tensors) + len(blobs):,} frames; at most {limits.max_frames:,} are allowed")
    _check_depth(fields, limits.max_header_depth)
    described = tuple(_tensor_header(tensor, limits) for tensor in tensors)
    if not all(_is_size(size) for size in blobs):
        raise MessageError("a blob's size is no number of bytes")
    total = sum(tensor.num_bytes for tensor in described) + sum(blobs)
    if total > limits.max_message_bytes:
        raise MessageError(f"a message of {total:,} bytes; at most {limits.max_message_bytes:,} are allowed")
    return Header(kind, fields, described, tuple(blobs))


def _tensor_header(described: object, limits: Limits) -> TensorHeader:
    if not isinstance(described, list) or len(described) != 2:
        raise MessageError("a tensor is described by something else than its dtype and shape")
    name, shape = described
    dtype = _DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise MessageError(f"a tensor of unknown dtype {str(name)[:_MAX_KIND]!r}")
    if not isinstance(shape, list) or len(shape) > limits.max_tensor_dims or not all(map(_is_size, shape)):
        raise MessageError("a tensor's shape is no list of sizes")
    # Without its empty dimensions too, so that torch can compute the strides of an empty tensor.
    if math.prod(size for size in shape if size) * dtype.itemsize > limits.max_message_bytes:
        raise MessageError(f"a tensor with more than {limits.max_message_bytes:,} bytes")
    return TensorHeader(dtype, tuple(shape), math.prod(shape) * dtype.itemsize)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check_depth(fields: object, max_depth: int) -> None:
    level = [fields]
    for _ in range(max_depth):
        level = [
            part
            for whole in level
            for part in (whole.values() if isinstance(whole, dict) else whole if isinstance(whole, list) else ())
            if isinstance(part, (dict, list))
        ]
        if not level:
            return
    raise MessageError(f"the header's fields are nested deeper than {max_depth} levels")


def _tensor(frame: memoryview, header: TensorHeader) -> Tensor:
    if not header.num_bytes:
        return torch.empty(header.shape, dtype=header.dtype)
    if frame.readonly:
        flat = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
    else:
        flat = torch.frombuffer(frame, dtype=torch.uint8)
        if flat.data_ptr() % header.dtype.itemsize:
            flat = flat.clone()
    return flat.view(header.dtype).view(header.shape)


class RefusedError(errors.UnavailableError):
    """The server does not work for this client, and says why."""


class FencedError(RefusedError):
    """A newer coordinator has taken over the server."""


_NEEDS_MORE = (UnicodeError, getattr(builtins, "BaseExceptionGroup", UnicodeError))
_OURS = {cls.__name__: cls for cls in (RefusedError, FencedError)}


def error_message(error: BaseException) -> Message:
    """Return the reply that tells an exception.

    Args:
        error: of any class; one that the other side may not know becomes a ``RuntimeError`` whose text names it.
    """
    name = type(error).__name__
    is_known = _find_class(name) is type(error)
    text = str(error.args[0]) if isinstance(error, KeyError) and len(error.args) == 1 else str(error)
    return Message(
        "error", {"type": name if is_known else "RuntimeError", "message": text if is_known else f"{name}: {text}"}
    )


def rebuild_error(message: Message) -> Exception:
    """Return the exception that a reply of kind ``"error"`` tells."""
    name, text = str(message.fields.get("type")), str(message.fields.get("message"))
    cls = _find_class(name)
    return RuntimeError(f"{name}: {text}") if cls is None else cls(text)


def raise_error(message: Message) -> NoReturn:
    """Raise the exception that a reply of kind ``"error"`` tells."""
    raise rebuild_error(message)


def _find_class(name: str) -> type[Exception] | None:
    """Return an exception class that can be made of one text."""
    cls = _OURS.get(name) or (getattr(errors, name, None) if name in errors.__all__ else getattr(builtins, name, None))
    is_usable = isinstance(cls, type) and issubclass(cls, Exception) and not issubclass(cls, _NEEDS_MORE)
    return cls if is_usable else None
