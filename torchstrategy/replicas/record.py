"""What a scope records: modules, optimizers, schedulers, gradient scalers and what the user names.

While a scope is open, the constructors of these classes note the new object, and so do the methods by which ``copy``
and ``pickle`` make one, also of classes that are made or imported meanwhile. Nothing else is patched, and the originals
return when the last scope closes. Only the constructors of optimizers and schedulers stay patched while there is a
strategy with several replicas that had a scope: one that is made outside the scope, for parameters that were made
inside, is taken up at the next run, because the replicas would share a plain one and count steps twice. Where all is
given to ``strategy.replicate`` none is patched.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from torchstrategy import patches
from torchstrategy.base.context import current_frame

__all__ = [
    "Record",
    "find_owner",
    "optimizer_parameters",
    "owned_by",
    "owner",
    "recorded_classes",
    "start_recording",
    "stop_recording",
    "unrecorded",
]

_WATCHED: tuple[type, ...] = (torch.optim.Optimizer, LRScheduler)
_RECORDED: tuple[type, ...] = (torch.nn.Module, torch.amp.GradScaler, *_WATCHED)

_owners: dict[int, tuple[weakref.ref[Any], Any]] = {}
_lock = threading.RLock()
_active = 0
_is_watching = False
#: What stood in a class's dictionary before a method was replaced; ``None`` if nothing did.
_originals: dict[tuple[type, str], Any] = {}
#: Optimizers and schedulers that were made outside every scope and belong to no strategy yet.
_unclaimed: dict[int, weakref.ref[Any]] = {}
_records: weakref.WeakSet[Record] = weakref.WeakSet()
#: Optimizers of no strategy's parameters: how many objects were recorded and how many parameters they had when asked.
_strangers: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()
_num_made_outside = 0
#: While a scope is open, what takes the patches from the list of those that are active.
_recording_ends: list[Callable[[], None]] = []


class _Quiet(threading.local):
    value = False


#: Whether this thread makes objects of the library's own.
_quiet = _Quiet()


def optimizer_parameters(optimizer: Any) -> list[torch.Tensor]:
    """Return an optimizer's parameters in its order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def recorded_classes() -> tuple[type, ...]:
    """Return the classes whose instances a scope records."""
    return _RECORDED


def owner(obj: Any) -> Any:
    """Return the strategy that recorded an object (or a replica's copy of it), or ``None``."""
    entry = _owners.get(id(obj))
    return entry[1] if entry is not None and entry[0]() is obj else None


def owned_by(strategy: Any) -> list[Any]:
    """Return the living objects of a strategy: what it recorded, replicas' copies of it, and datasets."""
    return [obj for reference, own in list(_owners.values()) if own is strategy and (obj := reference()) is not None]


def find_owner(optimizer: torch.optim.Optimizer) -> Any:
    """Return the strategy that recorded an optimizer, takes it up now (see ``Record.claim``), or has its parameters."""
    if id(optimizer) in _unclaimed:
        for record in list(_records):
            record.claim()
    found = owner(optimizer)
    if found is not None:
        return found
    records = list(_records)
    state = (sum(record.num_added for record in records), sum(len(group["params"]) for group in optimizer.param_groups))
    if _strangers.get(optimizer) == state:
        return None
    for record in records:
        if record.has_parameters_of(optimizer):
            return record.strategy
    _strangers[optimizer] = state
    return None


class Record:
    """The objects that one strategy has recorded, in the order of their creation.

    Args:
        strategy: the strategy.
    """

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy
        self._objects: list[weakref.ref[Any]] = []
        self._new: list[weakref.ref[Any]] = []
        #: Those of variables; some may be gone.
        self.tensor_references: list[weakref.ref[torch.Tensor]] = []
        #: How many objects were added so far.
        self.num_added = 0
        #: The ids of the dictionaries of those buffers that modules write to past torch's version counter.
        self.written_past: set[int] = set()
        self._claimed_at = (0, 0)
        self.prepare: Callable[[Any], object] = lambda _: None  # is given new objects before the program takes methods
        #: Whether the strategy takes up what is made outside every scope for what was made in one of its own, and
        #: whether it had one.
        self.takes_up, self.has_scope = strategy.num_replicas_in_sync > 1, False
        if strategy.num_replicas_in_sync > 1:
            _records.add(self)

    def add(self, obj: Any) -> None:
        """Note an object that the user made."""
        if owner(obj) is self.strategy:
            return
        reference = self.own(obj)
        self._objects.append(reference)
        self._new.append(reference)
        self.num_added += 1
        _unclaimed.pop(id(obj), None)
        if isinstance(obj, torch.Tensor):
            self.tensor_references.append(reference)
        self.prepare(obj)

    def claim(self) -> None:
        """Take up what was made outside every scope for this strategy.

        That is an optimizer of parameters that the strategy has recorded, and a scheduler of such an optimizer.
        """
        state = (_num_made_outside, self.num_added)
        if not self.has_scope or not _unclaimed or state == self._claimed_at:
            return
        parameters = self._parameters()
        for reference in list(_unclaimed.values()):
            obj = reference()
            if obj is not None and self._is_meant_by(obj, parameters):
                self.add(obj)
        self._claimed_at = (_num_made_outside, self.num_added)

    def has_parameters_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """Say whether an optimizer trains a recorded parameter."""
        return self._is_meant_by(optimizer, self._parameters())

    def _parameters(self) -> set[int]:
        """Return the ids of the recorded parameters and variables."""
        parameters = {id(p) for obj in self if isinstance(obj, torch.nn.Module) for p in obj.parameters()}
        parameters.update(map(id, self.tensors()))
        return parameters

    def _is_meant_by(self, obj: Any, parameters: set[int]) -> bool:
        if isinstance(obj, torch.optim.Optimizer):
            return any(id(p) in parameters for group in obj.param_groups for p in group["params"])
        return owner(getattr(obj, "optimizer", None)) is self.strategy

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
        _owners[key] = (reference, self.strategy)
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
        self.tensor_references = [reference for reference in self.tensor_references if reference() is not None]
        return [tensor for tensor in (reference() for reference in self.tensor_references) if tensor is not None]

    def __iter__(self) -> Iterator[Any]:
        self._objects = [reference for reference in self._objects if reference() is not None]
        return iter([obj for obj in (reference() for reference in self._objects) if obj is not None])


def start_recording(strategy: Any = None) -> None:
    """Patch the classes, unless an open scope has done so.

    Args:
        strategy: whose scope opens. If it takes up optimizers and schedulers that are made outside every scope, these
            are noted from now on, as long as it lives.
    """
    global _active
    if strategy is not None and strategy.record.takes_up:
        strategy.record.has_scope = True
        _watching.use(strategy)
    with _lock:
        _active += 1
        if _active == 1:
            what = "constructors and copies of modules, optimizers, schedulers and gradient scalers"
            why = "the scope records what is made in it"
            _recording_ends.append(patches.note(what, why, "the last scope is left"))
        _patch_constructors(_RECORDED)
        for cls in _RECORDED:
            _patch(cls, "__setstate__", _recording_state, getattr(cls, "__setstate__", _set_state))


def stop_recording() -> None:
    """Undo ``start_recording`` when the last scope closes."""
    global _active
    with _lock:
        _active -= 1
        if _active == 0:
            _restore()
            _recording_ends.pop()()


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """Make copies that are the library's own, although a scope may be open."""
    before, _quiet.value = _quiet.value, True
    try:
        yield
    finally:
        _quiet.value = before


def _watch() -> list[Callable[[], None]]:
    global _is_watching
    with _lock:
        _is_watching = True
        _patch_constructors(_WATCHED)
    why = "what is made outside the scope for what was made inside is taken up"
    until = "no strategy with several replicas that had a scope is left"
    return [patches.note("constructors of optimizers and schedulers", why, until, _stop_watching)]


def _stop_watching() -> None:
    global _is_watching
    with _lock:
        _is_watching = False
        if _active == 0:
            _restore()


_watching = patches.WhileUsed(_watch)


def _restore() -> None:
    """Put back what nobody needs replaced any more."""
    for key, original in _originals.copy().items():
        cls, name = key
        if _is_watching and name in ("__init__", "__init_subclass__") and issubclass(cls, _WATCHED):
            continue
        if _originals.pop(key, _originals) is _originals:  # another thread was collecting strategies meanwhile
            continue
        if original is None:
            delattr(cls, name)
        else:
            setattr(cls, name, original)


def _patch_constructors(classes: tuple[type, ...]) -> None:
    for cls in classes:
        _patch(cls, "__init__", _recording, cls.__init__)  # type: ignore[misc]
        if cls is not torch.amp.GradScaler:  # whose subclasses are served elsewhere
            _patch(cls, "__init_subclass__", functools.partial(_recording_classes, cls), None)
        for subclass in _subclasses(cls):
            _patch_own(subclass)


def _patch_own(cls: type) -> None:
    """Patch what a class sees to itself: copies; some schedulers, and optimizers around another one, constructors."""
    own = vars(cls)
    if "__init__" in own and issubclass(cls, _WATCHED):
        _patch(cls, "__init__", _recording, own["__init__"])
    for name, wrap in _COPYING.items() if _active else ():
        if name in own:
            _patch(cls, name, wrap, own[name])


def _recording_classes(base: Any, _: Any) -> classmethod[Any, Any, None]:
    """Return an ``__init_subclass__`` that patches classes which are made, or imported, while others are patched."""

    def init_subclass(cls: type, /, **kwargs: Any) -> None:
        super(base, cls).__init_subclass__(**kwargs)
        with _lock:
            _patch_own(cls)

    return classmethod(init_subclass)


def _patch(cls: type, name: str, wrap: Callable[[Any], Any], original: Any) -> None:
    if (cls, name) not in _originals:
        _originals[cls, name] = vars(cls).get(name)
        setattr(cls, name, wrap(original))


def _subclasses(cls: type[Any]) -> list[type]:
    """Return all classes below one; every scope asks for the hundreds of modules."""
    found = type.__subclasses__(cls)
    for subclass in found:  # which grows meanwhile
        found += type.__subclasses__(subclass)
    return found


def _recording(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _note(self)

    return init


def _recording_state(original: Callable[..., None]) -> Callable[..., None]:
    """Return a ``__setstate__`` that notes the object: copies and unpickled objects have no other constructor."""

    @functools.wraps(original)
    def set_state(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if current_frame() is not None:
            _note(self)

    return set_state


def _recording_copy(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``__copy__`` or ``__deepcopy__`` that notes its result."""

    @functools.wraps(original)
    def copied(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if current_frame() is not None and isinstance(result, _RECORDED):
            _note(result)
        return result

    return copied


#: How classes of the program's make copies, where they see to that themselves.
_COPYING = {"__setstate__": _recording_state, "__copy__": _recording_copy, "__deepcopy__": _recording_copy}


def _set_state(obj: Any, state: dict[str, Any]) -> None:
    """Do what ``copy`` and ``pickle`` do with an object of a class without ``__setstate__``."""
    obj.__dict__.update(state)


def _note(obj: Any) -> None:
    if _quiet.value or torch._guards.CompileContext.try_get() is not None:
        return  # the library's own, or torch.compile's, which one rank may make and others not
    frame = current_frame()
    # Objects made by the replica function are the replica's own.
    if frame is None:
        _note_made_outside(obj)
    elif frame.replica_context is None:
        frame.strategy.record.add(obj)


def _note_made_outside(obj: Any) -> None:
    global _num_made_outside
    key = id(obj)
    if not _is_watching or key in _unclaimed or owner(obj) is not None:
        return
    if isinstance(obj, _WATCHED):
        _unclaimed[key] = weakref.ref(obj, lambda _: _unclaimed.pop(key, None))
        _num_made_outside += 1
