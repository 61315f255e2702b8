"""The seal of an archive: the comment of a zip file, with a sum of every byte and what the writer says of the file."""

from __future__ import annotations

import hashlib
import json
import os
from typing import IO, Any, NamedTuple

__all__ = ["Seal", "Sealing", "find_seal", "fits_seal"]


class Seal(NamedTuple):
    """What stands in a file's comment.

    Args:
        about: what the writer says.
        begin: where the comment begins.
        said: ``about``, as it is written.
        digest: the sum of all before the comment and of ``said``, in hexadecimal digits.
    """

    about: dict[str, Any]
    begin: int
    said: bytes
    digest: str


class Sealing:
    """What ``torch.save`` writes to: it passes on what is written, and its sum.

    The last two bytes of a zip file are the length of its comment. They are held back until the comment is known.

    Args:
        file: the open file.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._sum = hashlib.sha256()
        self._last = b""

    def write(self, data: Any) -> int:
        """Write bytes."""
        view = memoryview(data).cast("B")
        self._sum.update(view)
        if len(view) >= len(_NO_COMMENT):
            self._file.write(self._last)
            self._file.write(view[: -len(_NO_COMMENT)])
            self._last = bytes(view[-len(_NO_COMMENT) :])
        else:
            last = self._last + bytes(view)
            self._file.write(last[: -len(_NO_COMMENT)])
            self._last = last[-len(_NO_COMMENT) :]
        return len(view)

    def flush(self) -> None:
        """Do what a file does."""
        self._file.flush()

    def seal(self, about: dict[str, Any]) -> None:
        """Write the seal, after the archive is complete."""
        if self._last != _NO_COMMENT:
            raise RuntimeError("torch.save wrote no zip file that this release of the library knows. Report it.")
        said = json.dumps(about, separators=(",", ":")).encode()
        self._sum.update(said)
        comment = b"".join((_MAGIC, said, _SUM_MARK, self._sum.hexdigest().encode()))
        self._file.write(len(comment).to_bytes(2, "little") + comment)


_MAGIC = b"torchstrategy "
_SUM_MARK = b" sha256="
_NO_COMMENT = b"\0\0"
_MAX_COMMENT = 0xFFFF
_END_RECORD = b"PK\x05\x06"
_END_SIZE = 22


def find_seal(file: IO[bytes]) -> Seal | None:
    """Return the seal of a file that can be read from any place; ``None`` if it has none."""
    size = file.seek(0, os.SEEK_END)
    tail_size = min(size, _MAX_COMMENT + _END_SIZE)
    file.seek(size - tail_size)
    tail = file.read(tail_size)
    begin = tail.rfind(_MAGIC)
    if begin < _END_SIZE or tail[begin - _END_SIZE :][: len(_END_RECORD)] != _END_RECORD:
        return None
    comment = tail[begin:]
    said, mark, digest = comment[len(_MAGIC) :].rpartition(_SUM_MARK)
    if not mark or int.from_bytes(tail[begin - 2 : begin], "little") != len(comment):
        return None
    try:
        about = json.loads(said)
        return Seal(about, size - len(comment), said, digest.decode()) if isinstance(about, dict) else None
    except ValueError:
        return None


def fits_seal(file: IO[bytes]) -> bool | None:
    """Say whether a file is as it was when it was sealed; ``None`` if it has no seal."""
    seal = find_seal(file)
    if seal is None:
        return None
    total = hashlib.sha256()
    file.seek(0)
    left = seal.begin - len(_NO_COMMENT)
    while left > 0 and (chunk := file.read(min(left, _CHUNK))):
        total.update(chunk)
        left -= len(chunk)
    total.update(_NO_COMMENT + seal.said)
    return total.hexdigest() == seal.digest


_CHUNK = 1 << 22
