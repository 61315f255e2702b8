"""What a scope records: modules, optimizers, schedulers, gradient scalers and what the user names.

While a scope is open, the constructors of these classes note the new object. Nothing else is patched, and the
originals return when the last scope closes. Only those of optimizers, schedulers and gradient scalers stay patched once
there is a strategy with several replicas: an optimizer or scheduler that is made outside the scope, for parameters that
were made inside, is taken up at the next run, because the replicas would share a plain one and count steps twice.
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

__all__ = ["Record", "find_owner", "owner", "recorded_classes", "start_recording", "stop_recording", "watch"]

_WATCHED: tuple[type, ...] = (torch.optim.Optimizer, LRScheduler, torch.amp.GradScaler)
_RECORDED: tuple[type, ...] = (torch.nn.Module, *_WATCHED)

_owners: dict[int, tuple[weakref.ref[Any], Any]] = {}
_lock = threading.RLock()
_active = 0
_watching: Callable[[Any], None] | None = None
_originals: dict[type, Callable[..., None]] = {}
#: Optimizers and schedulers that were made outside every scope and belong to no strategy yet.
_unclaimed: dict[int, weakref.ref[Any]] = {}
_records: weakref.WeakSet[Record] = weakref.WeakSet()
_num_made_outside = 0


def recorded_classes() -> tuple[type, ...]:
    """Return the classes whose instances a scope records."""
    return _RECORDED


def owner(obj: Any) -> Any:
    """Return the strategy that recorded an object (or a replica's copy of it), or ``None``."""
    entry = _owners.get(id(obj))
    return entry[1] if entry is not None and entry[0]() is obj else None


def find_owner(obj: Any) -> Any:
    """Return the strategy that recorded an object, or that takes it up now: see ``Record.claim``."""
    if id(obj) in _unclaimed:
        for record in list(_records):
            record.claim()
    return owner(obj)


class Record:
    """The objects that one strategy has recorded, in the order of their creation.

    Args:
        strategy: the strategy.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._objects: list[weakref.ref[Any]] = []
        self._new: list[weakref.ref[Any]] = []
        self._tensors: list[weakref.ref[torch.Tensor]] = []
        self._num_added = 0
        self._claimed_at = (0, 0)
        if strategy.num_replicas_in_sync > 1:
            _records.add(self)

    def add(self, obj: Any) -> None:
        """Note an object that the user made."""
        if owner(obj) is self._strategy:
            return
        reference = self.own(obj)
        self._objects.append(reference)
        self._new.append(reference)
        self._num_added += 1
        _unclaimed.pop(id(obj), None)
        if isinstance(obj, torch.Tensor):
            self._tensors.append(reference)

    def claim(self) -> None:
        """Take up what was made outside every scope for this strategy.

        That is an optimizer of parameters that the strategy has recorded, and a scheduler of such an optimizer.
        """
        state = (_num_made_outside, self._num_added)
        if not _unclaimed or state == self._claimed_at:
            return
        parameters = {id(p) for obj in self if isinstance(obj, torch.nn.Module) for p in obj.parameters()}
        parameters.update(map(id, self.tensors()))
        for reference in list(_unclaimed.values()):
            obj = reference()
            if obj is not None and self._is_meant_by(obj, parameters):
                self.add(obj)
        self._claimed_at = (_num_made_outside, self._num_added)

    def _is_meant_by(self, obj: Any, parameters: set[int]) -> bool:
        if isinstance(obj, torch.optim.Optimizer):
            return any(id(p) in parameters for group in obj.param_groups for p in group["params"])
        return owner(getattr(obj, "optimizer", None)) is self._strategy

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

    def peek_new(self) -> list[Any]:
        """Return what ``take_new`` would."""
        return [obj for obj in (reference() for reference in self._new) if obj is not None]

    def put_back(self, obj: Any) -> None:
        """Offer an object to ``take_new`` again."""
        self._new.append(weakref.ref(obj))

    def tensors(self) -> list[torch.Tensor]:
        """Return the living tensors, which are variables."""
        self._tensors = [reference for reference in self._tensors if reference() is not None]
        return [tensor for tensor in (reference() for reference in self._tensors) if tensor is not None]

    def __iter__(self) -> Iterator[Any]:
        self._objects = [reference for reference in self._objects if reference() is not None]
        return iter([obj for obj in (reference() for reference in self._objects) if obj is not None])


def start_recording() -> None:
    """Patch the constructors, unless an open scope has done so."""
    global _active
    with _lock:
        _active += 1
        _patch(_RECORDED)


def stop_recording() -> None:
    """Undo ``start_recording`` when the last scope closes."""
    global _active
    with _lock:
        _active -= 1
        if _active == 0:
            for cls, original in list(_originals.items()):
                if _watching is None or not issubclass(cls, _WATCHED):
                    cls.__init__ = original  # type: ignore[misc]
                    del _originals[cls]


def watch(prepare_scaler: Callable[[Any], None]) -> None:
    """Note optimizers and schedulers that are made outside every scope, from now on.

    Args:
        prepare_scaler: called with each gradient scaler that is.
    """
    global _watching
    with _lock:
        _watching = prepare_scaler
        _patch(_WATCHED)


def _patch(classes: tuple[type, ...]) -> None:
    for cls in (*classes, *_subclasses(LRScheduler)):
        if cls not in _originals:
            _originals[cls] = cls.__init__  # type: ignore[misc]
            cls.__init__ = _recording(cls.__init__)  # type: ignore[misc]


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
        if frame is None:
            _note_made_outside(self)
        elif frame.replica_context is None:
            frame.strategy.record.add(self)

    return init


def _note_made_outside(obj: Any) -> None:
    global _num_made_outside
    key = id(obj)
    if _watching is None or key in _unclaimed or owner(obj) is not None:
        return
    if isinstance(obj, torch.amp.GradScaler):
        _watching(obj)
    elif isinstance(obj, _WATCHED):
        _unclaimed[key] = weakref.ref(obj, lambda _: _unclaimed.pop(key, None))
        _num_made_outside += 1
