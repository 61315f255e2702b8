"""One copy of everything that a scope recorded for each replica of this process, and keeping the copies in step.

All new objects are copied together with one memo for each replica, so that optimizers point at their own replica's
parameters and tied weights stay tied. Replica 0 keeps the user's tensors.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchstrategy.base import tree
from torchstrategy.base.context import current_frame
from torchstrategy.base.devices import tensor_device
from torchstrategy.replicas.adapters import prepare_body
from torchstrategy.replicas.copies import (
    Memo,
    bind_step,
    check_can_be_copied,
    copy_tensor,
    copy_together,
    deep_copy,
    hold_copies,
    keep_user_data,
    own_tensors,
    tensors_held,
    updated_tensor,
    users_own,
    with_submodules,
)
from torchstrategy.replicas.distributed_variables import DistributedVariable, recorded_variables, user_variable
from torchstrategy.replicas.facades import swap_class, take_strays
from torchstrategy.replicas.fingerprints import is_plain
from torchstrategy.replicas.metric_states import is_metric
from torchstrategy.replicas.mirrored import Mirror, mirror_of, push_attributes
from torchstrategy.replicas.module_tensors import (
    Noted,
    Slot,
    Stamp,
    attribute_slots,
    grad_stamp,
    leaf_grad,
    tensors_now,
    tensors_of,
)
from torchstrategy.replicas.object_hooks import recorded_in
from torchstrategy.replicas.random import replica_generator
from torchstrategy.replicas.record import Record
from torchstrategy.replicas.variables import Variable

__all__ = ["ReplicaSet"]


class ReplicaSet:
    """The replicas' copies of what one strategy recorded.

    Args:
        strategy: the strategy.
        devices: one for each replica of this process.
        record: what the strategy's scopes recorded.
        running: returns the position of the replica whose turn it is, or ``None``.
    """

    def __init__(
        self, strategy: Any, devices: Sequence[torch.device], record: Record, running: Callable[[], int | None]
    ) -> None:
        self.strategy = strategy
        self._devices = [tensor_device(device) for device in devices]
        self._record = record
        self._running = running
        self._facades: list[weakref.ref[Any]] = []
        self._all_noted = False
        #: How often modules got or lost tensors, or attributes that may hold some.
        self.num_layouts = 0
        #: What the gradients of replica 0's copies of variables were after the last run.
        self._variable_grads: dict[int, tuple[Tensor | None, int]] = {}
        #: The parameters in the groups of replica 0's optimizers after the last run, by their ids.
        self._groups: weakref.WeakKeyDictionary[Optimizer, list[tuple[int, ...]]] = weakref.WeakKeyDictionary()

    def current(self) -> int | None:
        """Return the position in this process of the replica that is running on this thread, or ``None``."""
        frame = current_frame()
        if frame is None:
            return self._running()  # autograd's threads of accelerators have no context of their own
        context = frame.replica_context
        return int(context.local_id) if context is not None and context.strategy is self.strategy else None

    def adopt(self, objects: Iterable[Any]) -> None:
        """Copy new objects for each replica and make them facades.

        Raises:
            TypeError: an object can't be copied; the message says which and why. Nothing has changed then.
        """
        new = with_submodules([obj for obj in objects if mirror_of(obj) is None and not isinstance(obj, Tensor)])
        if new:
            copies = {id(mirror.bodies[0]) for mirror in self._mirrors()}
            new = [obj for obj in new if id(obj) not in copies]
        if not new:
            return
        for obj in new:
            check_can_be_copied(obj, swap=True)
        memos = [self._start_memo(i, new) for i in range(len(self._devices))]
        for i, memo in enumerate(memos):
            copy_together(new, memo, is_first=i == 0)
        attributes = [dict(obj.__dict__) for obj in new]
        mirrors = []
        for obj in new:
            tensors = own_tensors(obj) if isinstance(obj, nn.Module) else []
            mirror = self._make_facade(obj, tuple(memo[id(obj)] for memo in memos))
            for tensor in tensors:
                mirror.know(tuple(memo[id(tensor)] for memo in memos))
            mirrors.append(mirror)
        for mirror, values in zip(mirrors, attributes, strict=True):  # when all are facades
            for name, value in values.items():
                if name not in mirror.members:
                    mirror.hold(name, value)
            mirror.note_shared()

    def values_for(self, value: Any) -> list[Any]:
        """Return what a value that the user sets or passes from outside is on each replica."""
        count = len(self._devices)
        if is_plain(value):
            return [value, *(copy.deepcopy(value) for _ in range(1, count))]
        if isinstance(value, DistributedVariable):
            return list(value.copies)
        if isinstance(value, Tensor):
            return [value, *(self._counterparts(value) or [copy_tensor(value, d) for d in self._devices[1:]])]
        leaves = tree.all_leaves(value)
        self.adopt([leaf for leaf in leaves if isinstance(leaf, nn.Module)])
        values = [tree.map_leaves(lambda leaf: self.counterpart(0, leaf), value)]
        for i in range(1, count):
            memo = self._start_memo(i, [])
            for tensor in [*tensors_held(value, memo), *(leaf for leaf in leaves if isinstance(leaf, Tensor))]:
                if id(tensor) not in memo:
                    memo[id(tensor)] = copy_tensor(tensor, self._devices[i])
            for leaf in leaves:
                if isinstance(leaf, torch.Generator):
                    memo[id(leaf)] = self._generator(i, leaf)
            values.append(deep_copy(value, value, memo))
        return values

    def facades_in(self, value: Any) -> list[Any]:
        """Return the facades that a value holds, however deep, itself or by replica 0's objects behind them."""
        found = {id(obj): obj for obj in recorded_in(value)}
        if not found:
            return []
        living = [(obj, mirror_of(obj)) for obj in (reference() for reference in self._facades)]
        return [obj for obj, mirror in living if mirror and (id(obj) in found or id(mirror.bodies[0]) in found)]

    def facade_of(self, mirror: Mirror) -> Any:
        """Return the facade that a mirror belongs to."""
        return next(obj for reference in self._facades if mirror_of(obj := reference()) is mirror)

    def note_everything(self) -> None:
        """Note what replica 0's attributes hold, before code that may change them without the facades' knowledge."""
        if not self._all_noted:
            self._all_noted = True
            for mirror in self._mirrors():
                mirror.note_all()

    def counterpart(self, local_id: int, obj: Any) -> Any:
        """Return a replica's counterpart of a user's object or tensor; the object itself if it has none."""
        if isinstance(obj, DistributedVariable):
            return obj.copy_on(local_id)
        if isinstance(obj, Tensor):
            others = None if local_id == 0 else self._counterparts(obj)
            return obj if others is None else others[local_id - 1]
        mirror = mirror_of(obj)
        return obj if mirror is None or mirror.replicas is not self else mirror.bodies[local_id]

    def original(self, obj: Any) -> Any:
        """Return the user's tensor that has this counterpart, or ``None``."""
        if isinstance(obj, Variable) and obj.user_variable is not None:
            return obj.user_variable
        for mirror in self._mirrors():
            for reference, others in list(mirror.known.values()):
                tensor = reference()
                if tensor is obj or any(other is obj for other in others):
                    return tensor
        return None

    def slots(self) -> list[Slot]:
        """Return where every parameter and buffer lives, on each replica."""
        of_modules: list[Slot] = []
        for mirror in self._mirrors():
            if mirror.is_module:
                of_modules += tensors_now(mirror).slots
        return of_modules + [variable.slot for variable in recorded_variables(self._record)]

    def attribute_slots(self) -> list[Slot]:
        """Return where tensors live that are attributes of objects, or in a container or object that is one.

        Not those of metrics, of which each replica has its own part, and of optimizers.
        """
        found = [mirror.bodies for mirror in self._mirrors() if not isinstance(mirror.bodies[0], Optimizer)]
        return [slot for bodies in found if not is_metric(bodies[0]) for slot in attribute_slots(bodies)]

    def optimizers(self) -> list[tuple[Optimizer, ...]]:
        """Return the replicas' copies of each optimizer."""
        return [mirror.bodies for mirror in self._mirrors() if isinstance(mirror.bodies[0], Optimizer)]

    def before_run(self) -> None:
        """Give the other replicas what was changed on replica 0 since the last run.

        Raises:
            RuntimeError: gradients were computed or edited outside ``run``.
        """
        self._all_noted = False
        for variable in recorded_variables(self._record):
            grad, version = self._variable_grads.get(id(variable), (None, 0))
            if grad_stamp(variable.copy_on(0)) != ((0, 0) if grad is None else (id(grad), version)):
                _check_gradient(variable.name, variable.copy_on(0))
            variable.follow_first()
        for obj in [obj for reference in self._facades if (obj := reference()) is not None]:
            take_strays(obj)
        mirrors = self._mirrors()
        for mirror in mirrors:
            mirror.push_hooks()
        modules = [(mirror, tensors_of(mirror)) for mirror in mirrors if mirror.is_module]
        changed = [(mirror, *change) for mirror, tensors in modules for change in tensors.changes()]
        moved = modules if any(before[0] != now[0] for _, _, before, now in changed) else ()
        noted = {key: had for _, tensors in moved for key, had in tensors.noted()}
        for change in changed:
            self._copy_slot(*change, noted)
        for _, tensors in modules:
            tensors.accept_changes()
            tensors.push_belongings(self.values_for, noted)
        push_attributes(mirrors)
        for mirror in mirrors:  # when none compares any more: several may hold a container
            mirror.hide_facades()
        for optimizers in self.optimizers():  # after the modules, whose parameters may be new
            self.copy_groups(optimizers)

    def after_run(self) -> None:
        """Note the state of replica 0's tensors."""
        variables = recorded_variables(self._record)
        for variable in variables:
            variable.note_in_step()
        grads = {id(variable): leaf_grad(variable.copy_on(0)) for variable in variables}
        self._variable_grads = {key: (grad, 0 if grad is None else grad._version) for key, grad in grads.items()}
        known: dict[int, Any] = {}
        for mirror in self._mirrors():
            mirror.hooks.note()
            mirror.note_shared(known)
            if mirror.is_module:
                tensors_now(mirror).note()
            elif isinstance(mirror.bodies[0], Optimizer):
                self._groups[mirror.bodies[0]] = _group_ids(mirror.bodies[0])

    def _mirrors(self) -> list[Mirror]:
        return [mirror for reference in self._facades if (mirror := mirror_of(reference())) is not None]

    def _start_memo(self, local_id: int, new: Sequence[Any]) -> Memo:
        memo: Memo = {id(self.strategy): self.strategy}
        for variable in recorded_variables(self._record):
            memo[id(variable)] = memo[id(variable.copy_on(0))] = variable.copy_on(local_id)
        for reference in self._facades:
            obj = reference()
            mirror = mirror_of(obj)
            if mirror is None:
                continue
            memo[id(obj)] = memo[id(mirror.bodies[0])] = mirror.bodies[local_id]
            if mirror.is_module:
                tensors_of(mirror)
                memo.update(mirror.known_on(local_id))
        self._add_new(memo, local_id, new)
        return memo

    def _add_new(self, memo: Memo, local_id: int, new: Sequence[Any]) -> None:
        for obj in new:
            held = own_tensors(obj) if isinstance(obj, nn.Module) else []
            for tensor in [*held, *tensors_held(obj.__dict__, memo)]:
                if id(tensor) not in memo:
                    memo[id(tensor)] = tensor if local_id == 0 else copy_tensor(tensor, self._devices[local_id])
            for value in obj.__dict__.values():
                if isinstance(value, torch.Generator) and id(value) not in memo:
                    memo[id(value)] = self._generator(local_id, value)
                if local_id == 0:
                    memo.update((id(member), member) for member in users_own(value) if id(member) not in memo)

    def _generator(self, local_id: int, generator: torch.Generator) -> torch.Generator:
        first = self.strategy.placement.first_replica
        return generator if local_id == 0 else replica_generator(generator, first + local_id)

    def _counterparts(self, tensor: Tensor) -> tuple[Tensor, ...] | None:
        variable = user_variable(tensor)
        if isinstance(variable, DistributedVariable):
            return variable.copies[1:]
        for mirror in self._mirrors():
            if mirror.is_module:
                tensors_of(mirror)
                others = mirror.counterparts(tensor)
                if others is not None:
                    return others
        return None

    def _counterpart_or(self, local_id: int, tensor: Any, default: Any) -> Any:
        others = None if tensor is None else self._counterparts(tensor)
        return default if others is None else others[local_id - 1]

    def _make_facade(self, obj: Any, own: tuple[Any, ...]) -> Mirror:
        children: dict[str, Any] = {}
        if isinstance(obj, nn.Module):
            children = obj._modules
            keep_user_data(obj, own[0])
        hold_copies(own[0])
        self._move_devices(own)
        for body in own:
            bind_step(obj, body)
        mirror = Mirror(self, type(obj), own, children)
        swap_class(obj, mirror)
        for i, body in enumerate(own):
            prepare_body(body, i)
            self._record.own(body)
        self._facades.append(weakref.ref(obj, self._forget_facade))
        if isinstance(own[0], Optimizer):
            self._groups[own[0]] = _group_ids(own[0])
        return mirror

    def _forget_facade(self, reference: weakref.ref[Any]) -> None:
        self._facades = [facade for facade in self._facades if facade is not reference]

    def _move_devices(self, own: Sequence[Any]) -> None:
        """Let ``torch.device`` attributes of the copies name their own replica's device."""
        first = self._devices[0]
        for body, device in list(zip(own, self._devices, strict=True))[1:]:
            if device != first:
                for name, value in body.__dict__.copy().items():
                    if isinstance(value, torch.device) and value == first:
                        body.__dict__[name] = device

    def copy_groups(self, optimizers: Sequence[Optimizer]) -> None:
        """Give the other replicas' optimizers the groups of replica 0's: their parameters and hyper-parameters."""
        first = optimizers[0].param_groups
        is_regrouped = _group_ids(optimizers[0]) != self._groups.get(optimizers[0])
        for i, optimizer in enumerate(optimizers[1:], 1):
            groups = optimizer.param_groups
            if is_regrouped:
                groups[:] = [*groups[: len(first)], *({} for _ in first[len(groups) :])]
            for source, target in zip(first, groups, strict=True):
                if is_regrouped:
                    target["params"] = [self.counterpart(i, parameter) for parameter in source["params"]]
                _copy_hyper_parameters(source, target)

    def _copy_slot(self, mirror: Mirror, slot: Slot, before: Stamp, now: Stamp, noted: Mapping[int, Noted]) -> None:
        dicts, name = slot
        first = dicts[0].get(name)
        if before[:4] != now[:4] and not isinstance(first, Variable):  # which keeps its copies in step itself
            for i, own in enumerate(dicts[1:], 1):
                known = own.get(name) if before[0] == now[0] else self._counterpart_or(i, first, own.get(name))
                own[name] = updated_tensor(known, first, self._devices[i])
            if first is not None:
                mirror.know(tuple(own[name] for own in dicts))
        has_known = before[0] != now[0] and now[0] in noted and noted[now[0]].gradient == now[4:]
        if before[4:] == now[4:] or first is None or has_known:  # another module's parameter, whose replicas have it
            return
        _check_gradient(name, first)
        for own in dicts[1:]:
            if before[4] == now[4] and own[name].grad is not None:
                own[name].grad.zero_()  # it stays what it was, such as a sum
            else:
                own[name].grad = None if first.grad is None else torch.zeros_like(own[name])


def _group_ids(optimizer: Optimizer) -> list[tuple[int, ...]]:
    return [tuple(map(id, group["params"])) for group in optimizer.param_groups]


def _check_gradient(name: str, first: Tensor) -> None:
    """Refuse a gradient that replica 0's tensor got outside ``run``."""
    if first.grad is not None and not _is_zero(first.grad):
        raise RuntimeError(
            f"The gradient of parameter {name!r} (shape {tuple(first.shape)}) was changed outside `run`, on replica 0 "
            "only. Compute and edit gradients inside the function that you give to `strategy.run`, or clear them with "
            "`optimizer.zero_grad()`."
        )


def _is_zero(grad: Tensor) -> bool:
    return not bool((grad._values() if grad.is_sparse else grad).detach().count_nonzero())


def _copy_hyper_parameters(source: dict[str, Any], target: dict[str, Any]) -> None:
    for key in target.keys() - source.keys():
        del target[key]
    for key, value in source.items():
        current = target.get(key)
        if key == "params" or (current is value and key in target):
            continue
        if isinstance(value, Tensor) or isinstance(current, Tensor):
            if not isinstance(current, Tensor) or not torch.equal(value, current.to(value.device)):
                target[key] = copy.deepcopy(value)
        elif key not in target or current != value:
            target[key] = copy.deepcopy(value)
