"""The secret that the processes of one cluster share, keys derived from it, and seals on messages.

Who knows it may connect, and who may connect can run code: see SECURITY.md.

Both ends hold a key that travelled on the encrypted control connection only. Each connection and direction has a key
of its own, made of nonces from both ends, so what was recorded on one connection means nothing on another.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import hmac
import os
import secrets
import stat
import struct
import tempfile
from pathlib import Path

from torchstrategy.base.log import warning_once
from torchstrategy.ps.transport.limits import Limits
from torchstrategy.ps.transport.messages import MessageError
from torchstrategy.ps.transport.sockets import require, z85, zmq

__all__ = [
    "FILE_VARIABLE",
    "KEY_BYTES",
    "NONCE_BYTES",
    "VARIABLE",
    "Seal",
    "Secret",
    "Sizes",
    "default_path",
    "derive",
    "find_secret",
    "make_secret",
    "proof",
]

KEY_BYTES = 32
NONCE_BYTES = 16
_MAC_BYTES = 16
_PREFIX = struct.Struct("<QIQ")  # number, bytes of the header, bytes of all tensors

Sizes = tuple[int, int]


class Seal:
    """One direction of one connection, at one of its ends.

    Args:
        key: this direction's, which the other end has too.
    """

    #: What stands before a header.
    num_bytes = _PREFIX.size + _MAC_BYTES

    def __init__(self, key: bytes) -> None:
        self._hash = hashlib.blake2b(key=key, digest_size=_MAC_BYTES)
        self._number = 0

    def close(self, header: bytes | memoryview, num_tensor_bytes: int) -> bytes:
        """Return what to send before the next message's header."""
        self._number += 1
        prefix = _PREFIX.pack(self._number, len(header), num_tensor_bytes)
        return prefix + self._mac(prefix, header)

    def sizes(self, prefix: bytes | memoryview, limits: Limits) -> Sizes:
        """Read what stood before a header; nothing of it is proven yet.

        Args:
            prefix: ``num_bytes`` bytes.
            limits: what a message may have at most.

        Returns:
            Bytes of the header, and of all tensors.

        Raises:
            MessageError: too large.
        """
        if len(prefix) != self.num_bytes:
            raise MessageError("a truncated message")
        _, header_bytes, tensor_bytes = _PREFIX.unpack_from(prefix)
        if header_bytes > limits.max_header_bytes or tensor_bytes > limits.max_message_bytes:
            raise MessageError(
                f"a message of {tensor_bytes:,} bytes with a header of {header_bytes:,}; at most "
                f"{limits.max_message_bytes:,} and {limits.max_header_bytes:,} are allowed"
            )
        return header_bytes, tensor_bytes

    def open(self, prefix: bytes | memoryview, header: bytes | memoryview) -> None:
        """Check that the other end has sent this header, and sent it now.

        Raises:
            MessageError: it is forged or altered, or an older message once more.
        """
        fields, mac = bytes(prefix[: _PREFIX.size]), bytes(prefix[_PREFIX.size :])
        if not hmac.compare_digest(mac, self._mac(fields, header)):
            raise MessageError("a message that the other end of this connection did not send")
        number, _, _ = _PREFIX.unpack(fields)
        if number <= self._number:
            raise MessageError(f"message {number} again, after message {self._number}: a replay")
        self._number = number

    def _mac(self, prefix: bytes, header: bytes | memoryview) -> bytes:
        state = self._hash.copy()
        state.update(prefix)
        state.update(header)
        return state.digest()


def derive(key: bytes, purpose: str, *parts: bytes) -> bytes:
    """Return a key for one purpose.

    Args:
        key: what it is derived from; up to 64 bytes.
        purpose: different ones give unrelated keys.
        parts: fixed-length values that it depends on as well.
    """
    return hashlib.blake2b(purpose.encode() + b"\0" + b"".join(parts), key=key, digest_size=KEY_BYTES).digest()


def proof(key: bytes, purpose: str, *parts: bytes) -> bytes:
    """Return what shows that one knows a key; compare it with ``hmac.compare_digest``."""
    return derive(key, f"proof of {purpose}", *parts)


VARIABLE = "TORCHSTRATEGY_SECRET"
FILE_VARIABLE = "TORCHSTRATEGY_SECRET_FILE"
MIN_BYTES = 16
_MADE_BYTES = 32
_MIN_DISTINCT = 8  # of 16 random bytes, fewer distinct ones than this turn up once in 10^13 tries
_HOW_TO_MAKE = f"Make one with `torchstrategy keys` and give it to every process in {VARIABLE} or {FILE_VARIABLE}."


class Secret:
    """A shared secret.

    Args:
        text: at least 128 random bits, in hex or base64.
        source: where it comes from, for messages.

    Raises:
        ValueError: it is something else, or shorter.
    """

    def __init__(self, text: str, source: str = "the given text") -> None:
        raw = _parse(text)
        if raw is None or len(raw) < MIN_BYTES or len(set(raw)) < _MIN_DISTINCT:
            what = "neither hex nor base64" if raw is None else f"{8 * len(raw)} bits" if raw else "empty"
            if raw and len(raw) >= MIN_BYTES:
                what = "not random: it has the same few bytes again and again"
            raise ValueError(
                f"The secret in {source} must be at least {8 * MIN_BYTES} random bits in hex or base64; it is {what}. "
                f"{_HOW_TO_MAKE}"
            )
        self.source = source
        self._key = hashlib.blake2b(raw, person=b"torchstrategy", digest_size=32).digest()

    def key_pair(self, owner: str) -> tuple[bytes, bytes]:
        """Return the public and the secret CURVE key of ``"server"`` or ``"client"``."""
        require()
        private = z85.encode(derive(self._key, f"curve {owner}"))
        return zmq.curve_public(private), private

    def signature(self, *texts: bytes) -> bytes:
        """Return what shows that somebody who has the secret wrote these texts."""
        return proof(
            self._key, "the writer", *(hashlib.blake2b(text, digest_size=KEY_BYTES).digest() for text in texts)
        )

    @property
    def fingerprint(self) -> str:
        """Sixteen hex digits by which two hosts can see that they have the same one; it tells nothing else of it."""
        return derive(self._key, "fingerprint").hex()[:16]

    def __repr__(self) -> str:
        return f"Secret(from {self.source})"


def make_secret() -> str:
    """Return a new secret: 256 random bits in hex."""
    return secrets.token_hex(_MADE_BYTES)


def find_secret(is_loopback: bool) -> Secret:  # noqa: FBT001 - the agreed signature
    """Return the secret of this process's cluster.

    Args:
        is_loopback: whether all its addresses are of this host. Then, if none is configured, the user has one for all
            their processes, in a file that only they can read.

    Raises:
        ValueError: none is configured and some address is reachable from elsewhere; or it can't be read, is too
            short, or others can read the user's own file.
    """
    text, path = os.environ.get(VARIABLE), os.environ.get(FILE_VARIABLE)
    if text is not None:
        return Secret(text, VARIABLE)
    if path:
        return Secret(_read(Path(path), f"{FILE_VARIABLE}={path}"), path)
    if not is_loopback:
        raise ValueError(
            "No secret is configured, and without one only processes of this host may be connected (127.0.0.1, ::1): "
            f"whoever can connect can run code. {_HOW_TO_MAKE}"
        )
    return _users_own(default_path())


def default_path() -> Path:
    """Return the file of the user's own secret, for connections within a host."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "torchstrategy" / "secret"


def _users_own(path: Path) -> Secret:
    try:
        with contextlib.suppress(FileExistsError):
            if not path.exists():
                _make_file(path)
        status = path.stat()
    except OSError as error:
        raise ValueError(f"A secret can't be kept in {path}: {error}. {_HOW_TO_MAKE}") from error
    if hasattr(os, "getuid") and (status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077):
        raise ValueError(
            f"Others can read the secret in {path}, or it is not yours. Delete it, and a new one will be made, or "
            f"chmod 600 it."
        )
    return Secret(_read(path, str(path)), str(path))


def _make_file(path: Path) -> None:
    """Make the file with its content: another process sees all of it or nothing, and of two one wins."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=".secret-", dir=path.parent)  # with mode 0600
    try:
        with os.fdopen(handle, "w") as file:
            file.write(make_secret() + "\n")
        os.link(temporary, path)
    finally:
        Path(temporary).unlink()


def _read(path: Path, source: str) -> str:
    try:
        text = path.read_text(encoding="utf-8")
        mode = path.stat().st_mode
    except (OSError, UnicodeError) as error:
        raise ValueError(f"The secret can't be read from {source}: {error}. {_HOW_TO_MAKE}") from error
    if hasattr(os, "getuid") and mode & stat.S_IROTH:
        warning_once(f"Every user of this host can read the secret in {path}: chmod 600 it.")
    return text


def _parse(text: str) -> bytes | None:
    text = "".join(text.split())
    with contextlib.suppress(ValueError):
        return bytes.fromhex(text)
    padded = text.rstrip("=")
    padded += "=" * (-len(padded) % 4)
    with contextlib.suppress(binascii.Error, ValueError):
        return base64.b64decode(padded.replace("-", "+").replace("_", "/"), validate=True)
    return None
