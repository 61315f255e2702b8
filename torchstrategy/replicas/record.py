"""What a scope records: modules, optimizers, schedulers, gradient scalers and what the user names.

While a scope is open, the constructors of these classes note the new object. Nothing else is patched, and the
originals return when the last scope closes.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from torchstrategy.context import current_frame

__all__ = ["Record", "owner", "recorded_classes", "start_recording", "stop_recording"]

_RECORDED: tuple[type, ...] = (torch.nn.Module, torch.optim.Optimizer, LRScheduler, torch.amp.GradScaler)

_owners: dict[int, tuple[weakref.ref[Any], Any]] = {}
_lock = threading.RLock()
_active = 0
_originals: dict[type, Callable[..., None]] = {}


def recorded_classes() -> tuple[type, ...]:
    """Return the classes whose instances a scope records."""
    return _RECORDED


def owner(obj: Any) -> Any:
    """Return the strategy that recorded an object (or a replica's copy of it), or ``None``."""
    entry = _owners.get(id(obj))
    return entry[1] if entry is not None and entry[0]() is obj else None


class Record:
    """The objects that one strategy has recorded, in the order of their creation.

    Args:
        strategy: the strategy.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._objects: list[weakref.ref[Any]] = []
        self._new: list[weakref.ref[Any]] = []

    def add(self, obj: Any) -> None:
        """Note an object that the user made."""
        if owner(obj) is self._strategy:
            return
        reference = self.own(obj)
        self._objects.append(reference)
        self._new.append(reference)

    def own(self, obj: Any) -> weakref.ref[Any]:
        """Note that an object belongs to the strategy, such as a replica's copy."""
        key = id(obj)

        def forget(_: weakref.ref[Any]) -> None:
            _owners.pop(key, None)

        try:
            reference = weakref.ref(obj, forget)
        except TypeError:
            raise TypeError(
                f"A {type(obj).__name__} can't have a copy for each replica. Use an object of a plain Python class "
                f"that keeps its data in attributes. Received: {obj!r}"
            ) from None
        _owners[key] = (reference, self._strategy)
        return reference

    @property
    def has_new(self) -> bool:
        """Whether objects were added since ``take_new``."""
        return bool(self._new)

    def take_new(self) -> list[Any]:
        """Return the living objects added since the last call."""
        new, self._new = self._new, []
        return [obj for obj in (reference() for reference in new) if obj is not None]

    def put_back(self, obj: Any) -> None:
        """Offer an object to ``take_new`` again."""
        self._new.append(weakref.ref(obj))

    def __iter__(self) -> Iterator[Any]:
        self._objects = [reference for reference in self._objects if reference() is not None]
        return iter([obj for obj in (reference() for reference in self._objects) if obj is not None])


def start_recording() -> None:
    """Patch the constructors, unless an open scope has done so."""
    global _active
    with _lock:
        _active += 1
        if _active > 1:
            return
        for cls in (*_RECORDED, *_subclasses(LRScheduler)):
            _originals[cls] = cls.__init__  # type: ignore[misc]
            cls.__init__ = _recording(cls.__init__)  # type: ignore[misc]


def stop_recording() -> None:
    """Undo ``start_recording`` when the last scope closes."""
    global _active
    with _lock:
        _active -= 1
        if _active == 0:
            for cls, original in _originals.items():
                cls.__init__ = original  # type: ignore[misc]
            _originals.clear()


def _subclasses(cls: type[Any]) -> Iterator[type]:
    """Yield the subclasses with a constructor of their own: some schedulers do not call their base class's."""
    for subclass in cls.__subclasses__():
        if "__init__" in vars(subclass):
            yield subclass
        yield from _subclasses(subclass)


def _recording(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        frame = current_frame()
        # Objects made by the replica function are the replica's own.
        if frame is not None and frame.replica_context is None:
            frame.strategy.record.add(self)

    return init
