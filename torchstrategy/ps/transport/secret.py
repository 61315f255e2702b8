"""The secret that the processes of one cluster share, and the keys that are derived from it.

Who knows it may connect, and who may connect can run code: see SECURITY.md.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import os
import secrets
import stat
import tempfile
from pathlib import Path

from torchstrategy.base.log import warning_once
from torchstrategy.ps.transport.optional import require, z85, zmq
from torchstrategy.ps.transport.seal import derive

__all__ = ["FILE_VARIABLE", "MIN_BYTES", "VARIABLE", "Secret", "default_path", "find_secret", "make_secret"]

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
