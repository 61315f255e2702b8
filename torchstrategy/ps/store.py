"""The variables of one parameter server: plain tensors, each part with a lock and a version.

Reading a whole part lends its memory instead of copying it, as long as somebody holds the tensor that was lent (a
message on its way, say). Whoever writes meanwhile writes to new memory, so nobody ever reads half of an update.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchstrategy.errors import InvalidArgumentError, NotFoundError
from torchstrategy.ps.transport.messages import BufferPool

__all__ = [
    "SCATTER_METHODS",
    "Key",
    "ParameterStore",
    "StoredPart",
    "check_divisor",
    "check_rows",
    "check_value",
    "copy_bytes",
]

UPDATE_METHODS = ("assign", "assign_add", "assign_sub")
SCATTER_METHODS = (
    "scatter_add",
    "scatter_sub",
    "scatter_update",
    "scatter_min",
    "scatter_max",
    "scatter_mul",
    "scatter_div",
)
_COPIED_BYTES = 16 << 10  # up to here a copy costs less than keeping account of what is lent
_pool = BufferPool()


class Key(NamedTuple):
    """Names one part of one variable."""

    variable: int
    part: int


class StoredPart:
    """One part of a variable. All methods want ``lock`` to be held.

    Attributes:
        name: the part's, for messages.
        parameter: its tensor; optimizers know it by identity.
        version: counts its changes.
        lock: guards all the rest.
    """

    __slots__ = ("_lent", "lock", "name", "parameter", "version")

    def __init__(self, name: str, value: Tensor, *, trainable: bool, version: int = 1) -> None:
        gets_gradients = trainable and (value.is_floating_point() or value.is_complex())
        self.name = name
        self.parameter = torch.nn.Parameter(value, requires_grad=gets_gradients)
        self.version = version
        self.lock = threading.Lock()
        self._lent: list[weakref.ref[Any]] = []

    def lend(self) -> Tensor:
        """Return the current value, which stays what it is whatever happens to the part."""
        value = self.parameter.detach()
        if value.nbytes <= _COPIED_BYTES:
            return value.clone()
        # The array is what to watch: a tensor made from it, and every view of that, keeps this very object alive.
        array = value.reshape(-1).view(torch.uint8).numpy()
        self._lent = [lent for lent in self._lent if lent() is not None]
        self._lent.append(weakref.ref(array))
        return torch.from_numpy(array).view(value.dtype).view(value.shape)

    def writable(self) -> Tensor:
        """Return the value in memory that nobody reads, to be changed in place."""
        if self._is_lent():
            self._move(self.parameter.data)
        return self.parameter.data

    def assign(self, value: Tensor) -> None:
        """Take over another value."""
        if self._is_lent():
            self._move(value)
        else:
            copy_bytes(self.parameter.data, value)

    def _move(self, value: Tensor) -> None:
        """Leave the memory to those who read it."""
        memory = _pool.empty(value.nbytes).view(value.dtype).view(value.shape)
        copy_bytes(memory, value)
        self.parameter.data = memory
        self._lent.clear()

    def _is_lent(self) -> bool:
        return any(lent() is not None for lent in self._lent)


class ParameterStore:
    """Parts of variables by key. Every method may be called by several threads at once.

    An error leaves everything as it was; messages name the part.
    """

    def __init__(self) -> None:
        self._parts: dict[Key, StoredPart] = {}
        self._lock = threading.Lock()  # for parts that come and go; what is in them has locks of its own

    def create(self, key: Key, name: str, value: Tensor, *, trainable: bool, version: int = 1) -> None:
        """Store a new part, in memory of its own.

        Raises:
            ValueError: there is one of this key.
        """
        own = value.detach().clone(memory_format=torch.contiguous_format)
        part = StoredPart(name, own, trainable=trainable, version=version)
        with self._lock:
            if key in self._parts:
                raise ValueError(f"Variable {name!r} can't be made: there is {self._parts[key].name!r} as {key}.")
            self._parts[key] = part

    def find(self, key: Key) -> StoredPart:
        """Return a part.

        Raises:
            NotFoundError: there is none of this key.
        """
        part = self._parts.get(key)
        if part is None:
            raise NotFoundError(
                f"This parameter server has no part {key.part} of a variable {key.variable}; it has "
                f"{len(self._parts)} parts. Was the variable made under an earlier coordinator, or after the "
                "checkpoint from which this server was started again?"
            )
        return part

    def parts_of(self, variable: int) -> list[tuple[Key, StoredPart]]:
        """Return the parts of a variable that are here, in order."""
        with self._lock:
            return sorted((key, part) for key, part in self._parts.items() if key.variable == variable)

    def all_parts(self) -> list[tuple[Key, StoredPart]]:
        """Return all parts, in order."""
        with self._lock:
            return sorted(self._parts.items(), key=lambda item: item[0])

    def pull(self, keys: Sequence[Key], known: Sequence[int]) -> list[tuple[int, Tensor | None]]:
        """Return version and value of each part; ``None`` as value where the version is the known one."""
        pulled: list[tuple[int, Tensor | None]] = []
        for part, version in zip(list(map(self.find, keys)), known, strict=True):
            with part.lock:
                pulled.append((part.version, None if part.version == version else part.lend()))
        return pulled

    def rows(self, wanted: Sequence[tuple[Key, Tensor]]) -> list[Tensor]:
        """Return ``[k, ...]`` for each part: the rows that its indices ``[k]`` name.

        Raises:
            IndexError: an index is out of range.
            InvalidArgumentError: a part is a scalar, or the indices have another shape or dtype.
        """
        found = [(self.find(key), indices) for key, indices in wanted]
        for part, indices in found:
            check_rows(part.name, part.parameter.shape, indices)
        rows = []
        for part, indices in found:
            with part.lock:
                rows.append(part.parameter.data.index_select(0, indices))
        return rows

    def update(self, updates: Sequence[tuple[Key, str, Tensor]]) -> list[int]:
        """Assign, add or subtract values, and return the new versions.

        Raises:
            InvalidArgumentError: a value has not the part's shape and dtype, or the method is none of
                ``UPDATE_METHODS`` or not defined for the dtype.
        """
        found = [(self.find(key), method, value) for key, method, value in updates]
        for part, method, value in found:
            _check_method(method, UPDATE_METHODS, part)
            check_value(part.name, part.parameter.shape, part.parameter.dtype, value)
        versions = []
        for part, method, value in found:
            with part.lock:
                if method == "assign":
                    part.assign(value)
                else:
                    part.writable().add_(value, alpha=1 if method == "assign_add" else -1)
                part.version += 1
                versions.append(part.version)
        return versions

    def scatter(self, method: str, changes: Sequence[tuple[Key, Tensor, Tensor]]) -> list[int]:
        """Change the rows that indices ``[k]`` name with values ``[k, ...]``, and return the new versions.

        A row named several times takes all its values, ``scatter_update`` the last one.

        Raises:
            IndexError: an index is out of range.
            InvalidArgumentError: the values have not the rows' shape and dtype, the method is none of
                ``SCATTER_METHODS`` or not defined for the dtype, or a division of integers by zero.
        """
        found = [(self.find(key), indices, values) for key, indices, values in changes]
        for part, indices, values in found:
            _check_method(method, SCATTER_METHODS, part)
            check_rows(part.name, part.parameter.shape, indices)
            check_value(part.name, (len(indices), *part.parameter.shape[1:]), part.parameter.dtype, values)
            check_divisor(part.name, method, values)
        versions = []
        for part, indices, values in found:
            with part.lock:
                _SCATTERS[method](part.writable(), indices, values)
                part.version += 1
                versions.append(part.version)
        return versions

    def snapshot(self, key: Key) -> Tensor:
        """Return the flattened value of a part, to be read piece by piece: it stays what it is."""
        part = self.find(key)
        with part.lock:
            return part.lend().view(-1)

    def write(self, key: Key, start: int, values: Tensor) -> int:
        """Overwrite the elements of the flattened part from ``start`` on, and return the new version.

        Raises:
            InvalidArgumentError: ``values`` is not flat, has another dtype, or ends behind the part's last element.
        """
        part = self.find(key)
        check_value(part.name, (values.numel(),), part.parameter.dtype, values)
        if not 0 <= start <= part.parameter.numel() - values.numel():
            raise InvalidArgumentError(
                f"Variable {part.name!r} has {part.parameter.numel()} elements. "
                f"Received: {values.numel()} from number {start} on"
            )
        with part.lock:
            copy_bytes(part.writable().view(-1)[start : start + values.numel()], values)
            part.version += 1
            return part.version


def copy_bytes(to: Tensor, value: Tensor) -> None:
    """Copy a tensor into a contiguous one of its shape and dtype, with one thread.

    Torch shares a large copy out among threads: 40 MB then took 50 ms instead of 12 where no core was free.
    """
    if value.nbytes <= _COPIED_BYTES:
        to.copy_(value)
        return
    plain = value.detach().resolve_conj().resolve_neg().contiguous()
    np.copyto(to.reshape(-1).view(torch.uint8).numpy(), plain.reshape(-1).view(torch.uint8).numpy())


def check_value(name: str, shape: Sequence[int], dtype: torch.dtype, value: Tensor) -> None:
    """Check that a dense value fits a variable.

    Raises:
        InvalidArgumentError: it has another shape, dtype or layout.
    """
    if value.layout != torch.strided or value.dtype != dtype or tuple(value.shape) != tuple(shape):
        layout = "" if value.layout == torch.strided else f", {value.layout}"
        raise InvalidArgumentError(
            f"Variable {name!r} takes values of shape {list(shape)}, {dtype}. "
            f"Received: shape {list(value.shape)}, {value.dtype}{layout}"
        )


def check_rows(name: str, shape: Sequence[int], indices: Tensor) -> None:
    """Check that indices name rows of a variable.

    Raises:
        IndexError: one is out of range.
        InvalidArgumentError: the variable is a scalar, or the indices are not a vector of ``int64``.
    """
    if not shape:
        raise InvalidArgumentError(f"Variable {name!r} is a scalar and has no rows.")
    if indices.layout != torch.strided or indices.dtype != torch.int64 or indices.dim() != 1:
        raise InvalidArgumentError(
            f"Rows of variable {name!r} are named by a vector of int64. "
            f"Received: shape {list(indices.shape)}, {indices.dtype}"
        )
    if len(indices):
        first, last = map(int, torch.aminmax(indices))
        if first < 0 or last >= shape[0]:
            wrong = first if first < 0 else last
            raise IndexError(f"Variable {name!r} has rows 0 to {shape[0] - 1}. Received: index {wrong}")


def check_divisor(name: str, method: str, values: Tensor) -> None:
    """Check that ``"scatter_div"`` does not divide integers by zero.

    Raises:
        InvalidArgumentError: it does.
    """
    if method == "scatter_div" and not _is_fractional(values) and (values == 0).any():
        raise InvalidArgumentError(f"Variable {name!r} of integers can't be divided by 0.")


def _check_method(method: str, methods: Sequence[str], part: StoredPart) -> None:
    if method not in methods:
        raise InvalidArgumentError(f"Variable {part.name!r} knows {', '.join(methods)}. Received: {method!r}")
    dtype = part.parameter.dtype
    undefined = (dtype == torch.bool and method.endswith(("_sub", "_div"))) or (
        dtype.is_complex and method.endswith(("_min", "_max"))
    )
    if undefined:
        raise InvalidArgumentError(f"{method} is not defined for variable {part.name!r} of {dtype}.")


def _scatter_update(to: Tensor, indices: Tensor, values: Tensor) -> None:
    order = indices.argsort(stable=True)
    rows = indices[order]
    is_last = torch.ones_like(rows, dtype=torch.bool)
    is_last[:-1] = rows[1:] != rows[:-1]
    to.index_copy_(0, rows[is_last], values[order[is_last]])


def _scatter_div(to: Tensor, indices: Tensor, values: Tensor) -> None:
    rows, inverse = torch.unique(indices, return_inverse=True)
    divisors = torch.ones((len(rows), *to.shape[1:]), dtype=to.dtype)
    _reduce(divisors, inverse, values, "prod")
    to[rows] = torch.div(to[rows], divisors, rounding_mode=None if _is_fractional(to) else "trunc")


def _is_fractional(values: Tensor) -> bool:
    return values.is_floating_point() or values.is_complex()


def _reduce(to: Tensor, indices: Tensor, values: Tensor, reduction: str) -> None:
    to.scatter_reduce_(0, indices.view(-1, *[1] * (to.dim() - 1)).expand(values.shape), values, reduction)


_SCATTERS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "scatter_add": lambda to, indices, values: to.index_add_(0, indices, values),
    "scatter_sub": lambda to, indices, values: to.index_add_(0, indices, values, alpha=-1),
    "scatter_update": _scatter_update,
    "scatter_min": lambda to, indices, values: _reduce(to, indices, values, "amin"),
    "scatter_max": lambda to, indices, values: _reduce(to, indices, values, "amax"),
    "scatter_mul": lambda to, indices, values: _reduce(to, indices, values, "prod"),
    "scatter_div": _scatter_div,
}
