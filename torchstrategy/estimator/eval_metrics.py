"""The metrics of evaluations, kept in event files as tf's are: TensorBoard shows them, and early stopping reads them.

The few kinds of records that are needed are written and read here, so that no TensorBoard has to be installed.
"""

from __future__ import annotations

import functools
import itertools
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from torchstrategy.base.log import logger
from torchstrategy.checkpoint.storage import list_files, open_file, write_file
from torchstrategy.estimator.session_hooks import show_value

__all__ = ["read_eval_metrics", "write_eval_metrics"]

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_files = itertools.count()


def write_eval_metrics(eval_dir: str | os.PathLike[str], global_step: int, metrics: Mapping[str, Any]) -> None:
    """Write an evaluation's numbers into a new event file; what is no number is left out, with a log line.

    Args:
        eval_dir: the directory; it is made if need be.
        global_step: the step of the evaluated model.
        metrics: numbers by names.
    """
    shown = ", ".join(f"{name} = {show_value(value)}" for name, value in sorted(metrics.items()))
    logger.info("Saving dict for global step %d: %s", global_step, shown)
    values = []
    for name, value in metrics.items():
        number = _number(value)
        if name == "global_step":
            continue
        if number is None:
            logger.warning("Skipping summary for %s, must be a number. Received: %r", name, value)
        else:
            values.append(_field(1, _field(1, name.encode()) + _key(2, _FIXED32) + number))
    now = time.time()
    start = _key(1, _FIXED64) + struct.pack("<d", now)
    events = [
        start + _field(3, b"brain.Event:2"),
        start + _key(2, _VARINT) + _varint(global_step) + _field(5, b"".join(values)),
    ]
    name = f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{os.getpid()}.{next(_files):06d}"
    content = b"".join(_frame(event) for event in events)
    write_file(os.path.join(eval_dir, name), lambda file: file.write(content))


def read_eval_metrics(eval_dir: str | os.PathLike[str]) -> dict[int, dict[str, float]]:
    """Read the metrics of all evaluations in a directory.

    Args:
        eval_dir: where ``evaluate`` writes: ``Estimator.eval_dir(name)``.

    Returns:
        For each step, in order, the metrics by their names, as ``float32`` numbers; nothing if there is no directory.
        If a step was evaluated several times, the last time counts.
    """
    directory = os.fspath(eval_dir)
    events: list[_Event] = []
    for name in sorted(list_files(directory)):
        if ".tfevents." in name and not name.startswith("."):  # others are unfinished
            with open_file(os.path.join(directory, name)) as file:
                events.extend(map(_parse_event, _frames(file.read())))
    found: dict[int, dict[str, float]] = {}
    # By their own time: a copy, such as one in a store, changes that of files.
    for event in sorted(events, key=lambda event: event.wall_time):
        if event.values:
            found.setdefault(event.step, {}).update(event.values)
    return dict(sorted(found.items()))


class _Event(NamedTuple):
    """What a record says: when it was written, in seconds, at which step, and numbers by name."""

    wall_time: float
    step: int
    values: dict[str, float]


def _number(value: Any) -> bytes | None:
    """Return a number as the bytes of a ``float32``, or ``None`` if it is none."""
    if isinstance(value, (torch.Tensor, np.ndarray)) and value.ndim == 0:
        value = value.item()
    if not isinstance(value, (bool, int, float, np.number, np.bool_)):
        return None
    with np.errstate(over="ignore"):  # what is too large becomes infinite
        return np.array(float(value)).astype("<f4").tobytes()


def _parse_event(event: bytes) -> _Event:
    wall_time, step = 0.0, 0
    values: dict[str, float] = {}
    for number, kind, value in _fields(event):
        if number == 1 and kind == _FIXED64:
            (wall_time,) = struct.unpack("<d", value)
        elif number == 2 and kind == _VARINT:
            step = value
        elif number == 5 and kind == _BYTES:
            values |= _parse_summary(value)
    return _Event(wall_time, step, values)


def _parse_summary(summary: bytes) -> dict[str, float]:
    values = {}
    for number, kind, value in _fields(summary):
        if number == 1 and kind == _BYTES:
            parts = {(number, kind): part for number, kind, part in _fields(value)}
            if (1, _BYTES) in parts and (2, _FIXED32) in parts:
                values[parts[1, _BYTES].decode()] = struct.unpack("<f", parts[2, _FIXED32])[0]
    return values


def _fields(message: bytes) -> Iterator[tuple[int, int, Any]]:
    """Yield the number, the kind and the value of each field of a protobuf message."""
    at = 0
    while at < len(message):
        key, at = _read_varint(message, at)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, at = _read_varint(message, at)
            yield number, kind, value
            continue
        if kind == _BYTES:
            size, at = _read_varint(message, at)
        else:
            size = {_FIXED64: 8, _FIXED32: 4}[kind]
        yield number, kind, message[at : at + size]
        at += size


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def _field(number: int, value: bytes) -> bytes:
    return _key(number, _BYTES) + _varint(len(value)) + value


def _key(number: int, kind: int) -> bytes:
    return _varint(number << 3 | kind)


def _varint(value: int) -> bytes:
    data = bytearray()
    while value > 127:
        data.append(value & 127 | 128)
        value >>= 7
    return bytes([*data, value])


def _frames(data: bytes) -> Iterator[bytes]:
    """Yield the records of a file; one that is not yet written to its end is left for the next time."""
    at = 0
    while at + 12 <= len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        end = at + 12 + size
        if end + 4 > len(data):
            return
        yield data[at + 12 : end]
        at = end + 4


def _frame(record: bytes) -> bytes:
    size = struct.pack("<Q", len(record))
    return size + _checksum(size) + record + _checksum(record)


def _checksum(data: bytes) -> bytes:
    """Return the masked CRC-32C of the TFRecord format."""
    table, crc = _crc_table(), 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 255] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


@functools.cache
def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
        table.append(crc)
    return table
