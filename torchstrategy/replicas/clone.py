"""One copy of everything that a scope recorded for each replica of this process, and keeping the copies in step.

All new objects are copied together with one memo for each replica, so that optimizers point at their own replica's
parameters and tied weights stay tied. Replica 0 keeps the user's tensors.
"""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchstrategy import tree
from torchstrategy.context import current_replica_context
from torchstrategy.devices import tensor_device
from torchstrategy.replicas.adapters import prepare_body
from torchstrategy.replicas.mirrored import Mirror, mirror_of, swap_class
from torchstrategy.replicas.record import Record

__all__ = ["ReplicaSet", "check_can_be_copied"]

_Memo = dict[int, Any]
#: Key in the memo of replica 0; no object has this id.
_FIRST = -1
#: ``_parameters`` or ``_buffers`` of one module on every replica, and a name in it.
Slot = tuple[tuple[dict[str, Any], ...], str]


class ReplicaSet:
    """The replicas' copies of what one strategy recorded.

    Args:
        strategy: the strategy.
        devices: one for each replica of this process.
        record: what the strategy's scopes recorded.
        prepare: called with each new object that is not a module, after its copies are made.
    """

    def __init__(
        self, strategy: Any, devices: Sequence[torch.device], record: Record, prepare: Callable[[Any], None]
    ) -> None:
        self.strategy = strategy
        self._devices = devices
        self._record = record
        self._prepare = prepare
        #: id of a user's object or tensor -> (weak reference to it, one counterpart for each replica)
        self._known: dict[int, tuple[weakref.ref[Any], tuple[Any, ...]]] = {}
        self._facades: list[weakref.ref[Any]] = []
        self._slots: list[Slot] = []
        self._stamps: list[tuple[Any, ...]] = []
        self._stale = False

    def current(self) -> int | None:
        """Return the position in this process of the replica that is running on this thread, or ``None``."""
        context = current_replica_context()
        if context is None or context.strategy is not self.strategy:
            return None
        return int(context.local_id)

    def adopt(self, objects: Iterable[Any]) -> None:
        """Copy new objects for each replica and make them facades.

        Raises:
            TypeError: an object can't be copied; the message says which and why. Nothing has changed then.
        """
        new = _with_submodules([obj for obj in objects if mirror_of(obj) is None])
        if not new:
            return
        for obj in new:
            check_can_be_copied(obj)
        memos = [self._start_memo(i, new) for i in range(len(self._devices))]
        for memo in memos:
            _copy_together(new, memo)
        copies = [tuple(memo[id(obj)] for memo in memos) for obj in new]
        self._note_tensors(new, memos)
        for obj, own in zip(new, copies, strict=True):
            self._make_facade(obj, own)
        self._stale = True

    def value_for(self, local_id: int, value: Any) -> Any:
        """Return what a value that the user sets from outside is on one replica."""
        modules = [leaf for leaf in tree.all_leaves(value) if isinstance(leaf, nn.Module)]
        self.adopt(modules)
        if local_id == 0:
            return tree.map_leaves(lambda leaf: self.counterpart(0, leaf), value)
        memo = self._start_memo(local_id, [])
        return copy.deepcopy(value, memo)

    def counterpart(self, local_id: int, obj: Any) -> Any:
        """Return a replica's counterpart of a user's object or tensor; the object itself if it has none."""
        entry = self._known.get(id(obj))
        return entry[1][local_id] if entry is not None and entry[0]() is obj else obj

    def original(self, obj: Any) -> Any:
        """Return the user's object for a value that is the same object's counterpart on each replica, or ``None``."""
        for reference, own in self._known.values():
            if any(item is obj for item in own):
                return reference()
        return None

    def slots(self) -> list[Slot]:
        """Return where every parameter and buffer lives, on each replica."""
        if self._stale:
            self._find_slots()
        return self._slots

    def before_run(self) -> None:
        """Give the other replicas what was changed on replica 0 since the last run.

        Raises:
            RuntimeError: gradients were computed or edited outside ``run``.
        """
        for facade in self._facades:
            mirror = mirror_of(facade())
            if mirror is not None and mirror.seen is not None:
                if isinstance(mirror.bodies[0], Optimizer):
                    self._copy_optimizer_state(mirror)
                mirror.push_changes()
            if mirror is not None and isinstance(mirror.bodies[0], Optimizer):
                _copy_hyper_parameters(mirror.bodies)
        slots = self.slots()
        for index, (slot, stamp) in enumerate(zip(slots, self._stamps, strict=True)):
            now = _stamp(slot)
            if now != stamp:
                self._copy_slot(slot, stamp, now)
                self._stamps[index] = now

    def after_run(self) -> None:
        """Note the state of replica 0's tensors."""
        self._stamps = [_stamp(slot) for slot in self.slots()]

    def _start_memo(self, local_id: int, new: Sequence[Any]) -> _Memo:
        memo: _Memo = {}
        for key, (reference, own) in list(self._known.items()):
            if reference() is not None:
                memo[key] = own[local_id]
        device = tensor_device(self._devices[local_id])
        for module in new:
            if not isinstance(module, nn.Module):
                continue
            for tensor in _own_tensors(module):
                if id(tensor) not in memo:
                    memo[id(tensor)] = tensor if local_id == 0 else _copy_tensor(tensor, device)
        memo[id(self.strategy)] = self.strategy
        memo[_FIRST] = local_id == 0
        return memo

    def _note_tensors(self, new: Sequence[Any], memos: Sequence[_Memo]) -> None:
        for module in new:
            if isinstance(module, nn.Module):
                for tensor in [*module._parameters.values(), *module._buffers.values()]:
                    if tensor is not None and id(tensor) not in self._known:
                        self._know(tensor, tuple(memo[id(tensor)] for memo in memos))

    def _know(self, obj: Any, own: tuple[Any, ...]) -> None:
        key = id(obj)
        self._known[key] = (weakref.ref(obj, lambda _: self._known.pop(key, None)), own)

    def _make_facade(self, obj: Any, own: tuple[Any, ...]) -> None:
        cls = type(obj)
        if isinstance(obj, nn.Module):
            for name in ("_parameters", "_buffers"):
                own[0].__dict__[name] = obj.__dict__[name]
        self._move_devices(own)
        try:
            swap_class(obj, Mirror(self, cls, own))
        except TypeError as error:
            raise TypeError(f"A {cls.__name__} can't be hosted for several replicas: {error}") from error
        self._know(obj, own)
        for i, body in enumerate(own):
            prepare_body(body, i)
            self._record.own(body)
            if not isinstance(body, nn.Module):
                self._prepare(body)
        self._facades.append(weakref.ref(obj, self._forget_facade))

    def _forget_facade(self, reference: weakref.ref[Any]) -> None:
        self._facades = [facade for facade in self._facades if facade is not reference]
        self._stale = True

    def _move_devices(self, own: Sequence[Any]) -> None:
        """Let ``torch.device`` attributes of the copies name their own replica's device."""
        first = tensor_device(self._devices[0])
        for body, device in list(zip(own, self._devices, strict=True))[1:]:
            to = tensor_device(device)
            if to != first:
                for name, value in list(body.__dict__.items()):
                    if isinstance(value, torch.device) and value == first:
                        body.__dict__[name] = to

    def _find_slots(self) -> None:
        old = {(id(dicts[0]), name): stamp for (dicts, name), stamp in zip(self._slots, self._stamps, strict=True)}
        self._slots, self._stamps = [], []
        for facade in self._facades:
            mirror = mirror_of(facade())
            if mirror is None or not mirror.is_module:
                continue
            for kind in ("_parameters", "_buffers"):
                dicts = tuple(body.__dict__[kind] for body in mirror.bodies)
                for name, value in dicts[0].items():
                    if value is not None:
                        slot = (dicts, name)
                        self._slots.append(slot)
                        self._stamps.append(old.get((id(dicts[0]), name)) or _stamp(slot))
        self._stale = False

    def _copy_slot(self, slot: Slot, before: tuple[Any, ...], now: tuple[Any, ...]) -> None:
        dicts, name = slot
        first = dicts[0].get(name)
        if before[:4] != now[:4]:
            for i, own in enumerate(dicts[1:], 1):
                own[name] = _updated(own.get(name), first, tensor_device(self._devices[i]))
        if before[4:] == now[4:] or first is None:
            return
        if first.grad is not None and bool(first.grad.detach().count_nonzero()):
            raise RuntimeError(
                f"The gradient of parameter {name!r} (shape {tuple(first.shape)}) was changed outside `run`, on replica "
                "0 only. Compute and edit gradients inside the function that you give to `strategy.run`, or clear them "
                "with `optimizer.zero_grad()`."
            )
        for own in dicts[1:]:
            own[name].grad = None if first.grad is None else torch.zeros_like(own[name])

    def _copy_optimizer_state(self, mirror: Mirror) -> None:
        for i, body in enumerate(mirror.bodies[1:], 1):
            body.state = copy.deepcopy(mirror.bodies[0].state, self._start_memo(i, []))


def check_can_be_copied(obj: Any) -> None:
    """Refuse what can't have one copy for each replica.

    Raises:
        TypeError: the object is such a thing.
    """
    name = type(obj).__name__
    if isinstance(obj, torch.jit.ScriptModule):
        raise TypeError(f"{name} is a TorchScript module, which can't be hosted for several replicas. Use the module.")
    if isinstance(obj, nn.parallel.DistributedDataParallel) or name == "FullyShardedDataParallel":
        raise TypeError(
            f"{name} synchronises by itself. Make the plain module in the scope: the strategy sums the gradients."
        )
    if isinstance(obj, nn.Module):
        for key, value in [*obj._parameters.items(), *obj._buffers.items()]:
            if torch.nn.parameter.is_lazy(value):
                raise TypeError(
                    f"{name}.{key} is not initialised yet. Call the model on one batch, inside `strategy.scope()` and "
                    "before the first `run`, so that lazy modules get their shapes."
                )


def _with_submodules(objects: Sequence[Any]) -> list[Any]:
    """Return the objects and all submodules of modules, once each."""
    found: dict[int, Any] = {}
    for obj in objects:
        members = obj.modules() if isinstance(obj, nn.Module) else (obj,)
        for member in members:
            if mirror_of(member) is None:
                found.setdefault(id(member), member)
    return list(found.values())


def _own_tensors(module: nn.Module) -> list[Tensor]:
    candidates = [*module._parameters.values(), *module._buffers.values(), *module.__dict__.values()]
    return [value for value in candidates if isinstance(value, Tensor) and value.is_leaf]


def _copy_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    result = copy.deepcopy(tensor)
    result.grad = None  # gradients from before the first run count once
    if result.device != device:
        result.data = result.data.to(device)
    return result


def _copy_together(objects: Sequence[Any], memo: _Memo) -> None:
    """Copy objects so that all references between them stay inside the copy; ``memo`` receives the copies."""
    others = [obj for obj in objects if not isinstance(obj, nn.Module)]
    shells = {}
    for obj in others:  # before the modules, which may refer to them
        shells[id(obj)] = memo[id(obj)] = object.__new__(type(obj))
    for obj in objects:
        if isinstance(obj, nn.Module):
            _copy_one(obj, memo)
    for obj in others:
        shell = shells[id(obj)]
        if memo.get(_FIRST):
            shell.__dict__ = obj.__dict__  # replica 0's object is the user's, under its plain class
        else:
            # By __dict__: Optimizer.__getstate__ drops hooks, GradScaler's refuses in the middle of a step.
            state = {key: value for key, value in obj.__dict__.items() if key != "step"}
            shell.__dict__ = _deep_copy(obj, state, memo)
        _bind_step(obj, shell)


def _copy_one(obj: Any, memo: _Memo) -> None:
    if id(obj) not in memo:
        memo[id(obj)] = _deep_copy(obj, obj, memo)


def _deep_copy(obj: Any, value: Any, memo: _Memo) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception as error:  # noqa: BLE001 - any class may refuse in its own way
        raise TypeError(
            f"A {type(obj).__name__} made in the scope can't be copied for each replica: {error}\n"
            "Keep what can't be copied (open files, locks, results of a forward pass) out of the objects made in "
            "`strategy.scope()`, or run one process for each replica with torchrun."
        ) from error


def _bind_step(obj: Any, copied: Any) -> None:
    """Give an optimizer's copy the ``step`` that learning-rate schedulers wrap, bound to the copy."""
    if not isinstance(obj, Optimizer) or "step" not in obj.__dict__:
        return
    reference = weakref.ref(copied)
    plain = type(copied).step

    @functools.wraps(plain)
    def step(*args: Any, **kwargs: Any) -> Any:
        optimizer = reference()
        if optimizer is None:
            raise RuntimeError("The optimizer of this step no longer exists.")
        optimizer._opt_called = True  # type: ignore[attr-defined]
        return types.MethodType(plain, optimizer)(*args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    copied.__dict__["step"] = step


def _stamp(slot: Slot) -> tuple[Any, ...]:
    dicts, name = slot
    tensor = dicts[0].get(name)
    if tensor is None:
        return (None, 0, 0, False, None, 0)
    grad = tensor.grad if tensor.is_leaf else None
    return (
        id(tensor),
        _version(tensor),
        tensor.data_ptr(),
        tensor.requires_grad,
        None if grad is None else id(grad),
        0 if grad is None else _version(grad),
    )


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _updated(own: Any, first: Any, device: torch.device) -> Any:
    """Return a replica's tensor, changed to equal replica 0's."""
    if first is None:
        return None
    if own is None or type(own) is not type(first):
        return _copy_tensor(first, device)
    with torch.no_grad():
        if own.shape == first.shape and own.dtype == first.dtype:
            own.copy_(first)
        else:
            own.data = first.detach().to(device, copy=True)
    own.requires_grad_(first.requires_grad)
    return own


def _copy_hyper_parameters(optimizers: Sequence[Optimizer]) -> None:
    first = optimizers[0].param_groups
    for other in optimizers[1:]:
        for source, target in zip(first, other.param_groups, strict=True):
            for key, value in source.items():
                if key == "params":
                    continue
                current = target.get(key)
                if isinstance(value, Tensor) or isinstance(current, Tensor):
                    if not isinstance(current, Tensor) or not torch.equal(value, current.to(value.device)):
                        target[key] = copy.deepcopy(value)
                elif current is not value and current != value:
                    target[key] = copy.deepcopy(value)
