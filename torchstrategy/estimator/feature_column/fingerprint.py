"""Fingerprints of strings: FarmHash's ``Fingerprint64`` by Geoff Pike, which tf hashes strings with.

Only so do strings fall into the buckets that they have in tf, on every machine and in every version. Crossing combines
fingerprints in ``int64`` tensors, whose products wrap as C's ``uint64`` do.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

__all__ = ["bucket_of", "combine_fingerprints", "fingerprint64", "fingerprint_of", "to_buckets", "to_signed"]

_State = tuple[int, int, int, int, int, int, int]

_MASK = (1 << 64) - 1
_K0 = 0xC3A5C85C97CB3127
_K1 = 0xB492B66FBE98F273
_K2 = 0x9AE16A3B2F90404F
_CROSS_MULTIPLIER = 0xC6A4A7935BD1E995


def fingerprint64(data: bytes) -> int:
    """Return the fingerprint of ``data``, from 0 to 2^64 - 1."""
    size = len(data)
    if size <= 16:
        return _up_to_16(data, size)
    if size <= 32:
        return _up_to_32(data, size)
    return _up_to_64(data, size) if size <= 64 else _beyond_64(data, size)


@functools.lru_cache(maxsize=1 << 16)  # values come again and again, and one takes microseconds
def fingerprint_of(text: str) -> int:
    """Return the fingerprint of a string's UTF-8."""
    return fingerprint64(text.encode("utf-8", "surrogateescape"))


def bucket_of(text: str, num_buckets: int) -> int:
    """Return the bucket of a string, from 0 to ``num_buckets - 1``."""
    return fingerprint_of(text) % num_buckets


def to_signed(number: int) -> int:
    """Return the ``int64`` that has the bits of a ``uint64``."""
    number &= _MASK
    return number - (1 << 64) if number >> 63 else number


def combine_fingerprints(first: Tensor, second: Tensor) -> Tensor:
    """Combine ``int64`` tensors of fingerprints, or of what stands for them; the order matters."""
    multiplier = to_signed(_CROSS_MULTIPLIER)
    result = first ^ multiplier
    result = result ^ (_mix(second * multiplier) * multiplier)
    result = result * multiplier
    return _mix(_mix(result) * multiplier)


def to_buckets(fingerprints: Tensor, num_buckets: int) -> Tensor:
    """Return fingerprints modulo ``num_buckets``, taking the ``int64`` for the ``uint64`` of the same bits."""
    half = (fingerprints >> 1) & torch.iinfo(torch.int64).max
    return (half % num_buckets * 2 + (fingerprints & 1)) % num_buckets


def _mix(values: Tensor) -> Tensor:
    return values ^ ((values >> 47) & 0x1FFFF)  # the mask makes it a shift of unsigned numbers


def _shift_mix(value: int) -> int:
    return value ^ (value >> 47)


def _rotate(value: int, shift: int) -> int:
    value &= _MASK
    return (value >> shift) | (value << (64 - shift)) & _MASK


def _word(data: bytes, at: int, size: int = 8) -> int:
    return int.from_bytes(data[at : at + size], "little")


def _join(low: int, high: int, multiplier: int) -> int:
    a = _shift_mix((low ^ high) * multiplier & _MASK)
    b = _shift_mix(((high & _MASK) ^ a) * multiplier & _MASK)
    return b * multiplier & _MASK


def _up_to_16(data: bytes, size: int) -> int:
    multiplier = _K2 + size * 2
    if size >= 8:
        a = _word(data, 0) + _K2
        b = _word(data, size - 8)
        c = _rotate(b, 37) * multiplier + a
        return _join(c & _MASK, (_rotate(a, 25) + b) * multiplier, multiplier)
    if size >= 4:
        return _join(size + (_word(data, 0, 4) << 3), _word(data, size - 4, 4), multiplier)
    if size == 0:
        return _K2
    y = data[0] + (data[size >> 1] << 8)
    z = size + (data[-1] << 2)
    return _shift_mix((y * _K2 ^ z * _K0) & _MASK) * _K2 & _MASK


def _up_to_32(data: bytes, size: int) -> int:
    multiplier = _K2 + size * 2
    a = _word(data, 0) * _K1
    b = _word(data, 8)
    c = _word(data, size - 8) * multiplier
    d = _word(data, size - 16) * _K2
    return _join((_rotate(a + b, 43) + _rotate(c, 30) + d) & _MASK, (a + _rotate(b + _K2, 18) + c) & _MASK, multiplier)


def _up_to_64(data: bytes, size: int) -> int:
    multiplier = _K2 + size * 2
    a = _word(data, 0) * _K2
    b = _word(data, 8)
    c = _word(data, size - 8) * multiplier
    d = _word(data, size - 16) * _K2
    y = (_rotate(a + b, 43) + _rotate(c, 30) + d) & _MASK
    z = _join(y, (a + _rotate(b + _K2, 18) + c) & _MASK, multiplier)
    e = _word(data, 16) * multiplier
    f = _word(data, 24)
    g = (y + _word(data, size - 32)) * multiplier
    h = (z + _word(data, size - 24)) * multiplier
    return _join((_rotate(e + f, 43) + _rotate(g, 30) + h) & _MASK, (e + _rotate(f + a, 18) + g) & _MASK, multiplier)


def _beyond_64(data: bytes, size: int) -> int:
    x = (81 * _K2 + _word(data, 0)) & _MASK
    y = (81 * _K1 + 113) & _MASK
    z = _shift_mix((y * _K2 + 113) & _MASK) * _K2 & _MASK
    state: _State = (x, y, z, 0, 0, 0, 0)
    for at in range(0, size - 1 & ~63, 64):
        state = _absorb(data, at, state, _K1, 1)
    x, y, z, v0, v1, w0, w1 = state
    multiplier = _K1 + ((z & 0xFF) << 1)
    w0 += size - 1 & 63
    v0 += w0
    w0 += v0
    x, y, z, v0, v1, w0, w1 = _absorb(data, size - 64, (x, y, z, v0, v1, w0, w1), multiplier, 9)
    return _join(
        (_join(v0, w0, multiplier) + _shift_mix(y) * _K0 + z) & _MASK,
        (_join(v1, w1, multiplier) + x) & _MASK,
        multiplier,
    )


def _absorb(data: bytes, at: int, state: _State, multiplier: int, factor: int) -> _State:
    """Take 64 bytes into the state."""
    x, y, z, v0, v1, w0, w1 = state
    x = _rotate(x + y + v0 + _word(data, at + 8), 37) * multiplier
    y = _rotate(y + v1 + _word(data, at + 48), 42) * multiplier
    x = (x ^ w1 * factor) & _MASK
    y = (y + v0 * factor + _word(data, at + 40)) & _MASK
    z = _rotate(z + w0, 33) * multiplier & _MASK
    v0, v1 = _weak(data, at, v1 * multiplier, x + w0)
    w0, w1 = _weak(data, at + 32, z + w1, y + _word(data, at + 16))
    return z, y, x, v0, v1, w0, w1


def _weak(data: bytes, at: int, a: int, b: int) -> tuple[int, int]:
    last = _word(data, at + 24)
    a += _word(data, at)
    b = _rotate(b + a + last, 21)
    c = a
    a += _word(data, at + 8) + _word(data, at + 16)
    b += _rotate(a, 44)
    return (a + last) & _MASK, (b + c) & _MASK
