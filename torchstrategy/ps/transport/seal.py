"""Proof that a message comes from the other end of a session, and comes in order.

Both ends hold a key that travelled on the encrypted control connection only. Each connection and direction has a key
of its own, made of nonces from both ends, so what was recorded on one connection means nothing on another.
"""

from __future__ import annotations

import hashlib
import hmac
import struct

from torchstrategy.ps.transport.limits import Limits
from torchstrategy.ps.transport.messages import MessageError

__all__ = ["KEY_BYTES", "NONCE_BYTES", "Seal", "Sizes", "derive", "proof"]

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
