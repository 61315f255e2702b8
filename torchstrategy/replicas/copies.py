"""Deep copies of what a scope recorded, made together so that all references between them stay inside one copy."""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.optim import Optimizer

from torchstrategy.replicas.distributed_variables import DistributedVariable
from torchstrategy.replicas.dtensors import is_dtensor
from torchstrategy.replicas.facades import check_can_swap
from torchstrategy.replicas.fingerprints import can_change, is_plain, is_recorded
from torchstrategy.replicas.mirrored import mirror_of
from torchstrategy.replicas.object_hooks import copy_parameter_hooks, members_held
from torchstrategy.replicas.record import unrecorded
from torchstrategy.replicas.variables import refuse_one_for_all

__all__ = [
    "Memo",
    "bind_step",
    "check_can_be_copied",
    "copy_tensor",
    "copy_together",
    "deep_copy",
    "hold_copies",
    "keep_user_data",
    "own_tensors",
    "tensors_held",
    "updated_tensor",
    "users_own",
    "with_submodules",
]

#: ``copy.deepcopy``'s memo: id of an object -> its copy.
Memo = dict[int, Any]


def check_can_be_copied(obj: Any, *, swap: bool = False) -> None:
    """Refuse what can't have one copy for each replica.

    Args:
        obj: an object that a scope recorded.
        swap: whether it must be able to become a facade, too, with a copy for each replica of this process.

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
    divided = [key for key, tensor in getattr(obj, "_parameters", {}).items() if swap and is_dtensor(tensor)]
    if divided:
        raise TypeError(
            f"Parameters of {name} are DTensors, such as {divided[0]!r}: `fully_shard` (FSDP2) or `parallelize_module` "
            "has divided them between processes, but this process has several replicas, each of which needs a copy. "
            "Start a process for each device, by torchrun or `torchstrategy launch`, in which `fully_shard` is "
            "understood."
        )
    _check_values(obj, name)
    if swap:
        try:
            check_can_swap(obj)
        except TypeError as error:
            raise TypeError(
                f"A {name} can't be hosted for several replicas: {error}. Use an object of a plain Python class that "
                "keeps its data in attributes."
            ) from error


def _check_values(obj: Any, name: str) -> None:
    held = dict(getattr(obj, "__dict__", {}))
    if isinstance(obj, nn.Module):
        held |= {**obj._parameters, **obj._buffers}
    for key, value in held.items():
        refuse_one_for_all(f"{name}.{key}", value)
        if isinstance(value, Tensor) and torch.nn.parameter.is_lazy(value):
            raise TypeError(
                f"{name}.{key} is not initialised yet. Call the model on one batch, inside `strategy.scope()` and "
                "before the first `run`, so that lazy modules get their shapes."
            )


def with_submodules(objects: Sequence[Any]) -> list[Any]:
    """Return the objects and all submodules of modules, once each, without facades."""
    found: dict[int, Any] = {}
    for obj in objects:
        for member in obj.modules() if isinstance(obj, nn.Module) else (obj,):
            if mirror_of(member) is None:
                found.setdefault(id(member), member)
    return list(found.values())


def own_tensors(module: nn.Module) -> list[Tensor]:
    """Return a module's parameters, its buffers and the tensors among its attributes, without submodules'."""
    recomputed = {getattr(hook, "name", None) or getattr(hook, "_tensor_name", None)
                  for hook in module._forward_pre_hooks.values()
                  if isinstance(hook, (WeightNorm, SpectralNorm, BasePruningMethod))}  # fmt: skip
    attributes = [v for k, v in module.__dict__.items() if isinstance(v, Tensor) and (v.is_leaf or k in recomputed)]
    return [t for t in (*module._parameters.values(), *module._buffers.values(), *attributes) if t is not None]


def tensors_held(value: Any, known: Container[int]) -> list[Tensor]:
    """Return the leaf tensors in an object's attributes and containers, however deep, but not those of modules.

    Results of a forward pass, which can't be copied, are left to the error of the copy.

    Args:
        value: the object.
        known: ids of objects that are not looked into.
    """
    return [item for item in members_held(value, known) if isinstance(item, Tensor) and item.is_leaf]


def users_own(value: Any) -> list[Any]:
    """Return what replica 0 holds of an attribute's value as it is, because the user may have other names for it.

    That is the value and all in it, if nothing in it has a copy for each replica.
    """
    members = members_held(value)
    has_copies = any(is_recorded(member) or isinstance(member, DistributedVariable) for member in members)
    return [] if has_copies else [member for member in members if can_change(member)]


def copy_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a replica's copy of a tensor, without its gradient."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return tensor  # of a transform that the program is in, which takes it out of the module again
    result = copy.deepcopy(tensor) if tensor.is_leaf else tensor.detach().clone()
    result.grad = None  # gradients from before the first run count once
    if result.device != device:
        result.data = result.data.to(device)
    if isinstance(tensor, nn.Parameter):
        result.__dict__.update(tensor.__dict__)
        copy_parameter_hooks(tensor, result)
    return result


def updated_tensor(own: Any, first: Any, device: torch.device) -> Any:
    """Return a replica's tensor, changed to equal replica 0's."""
    if first is None:
        return None
    if own is None or type(own) is not type(first):
        return copy_tensor(first, device)
    with torch.no_grad():
        if own.shape == first.shape and own.dtype == first.dtype:
            own.copy_(first)
        else:
            own.grad = None
            own.data = first.detach().to(device, copy=True)
    own.requires_grad_(first.requires_grad)
    return own


def copy_together(objects: Sequence[Any], memo: Memo, *, is_first: bool) -> None:
    """Copy objects; ``memo`` receives the copies.

    Args:
        objects: modules with their submodules, and other objects.
        memo: what the copies share with others, such as tensors.
        is_first: whether these are replica 0's, which keep the user's own data.
    """
    others = [obj for obj in objects if not isinstance(obj, nn.Module)]
    shells = {}
    for obj in others:  # before the modules, which may refer to them
        shells[id(obj)] = memo[id(obj)] = object.__new__(type(obj))
    for obj in objects:
        if isinstance(obj, nn.Module) and id(obj) not in memo:
            memo[id(obj)] = deep_copy(obj, obj, memo)
    for obj in others:
        shell = shells[id(obj)]
        if is_first:
            shell.__dict__ = obj.__dict__
        else:
            # By __dict__: Optimizer.__getstate__ drops hooks, GradScaler's refuses in the middle of a step.
            state = {key: value for key, value in obj.__dict__.items() if key != "step"}
            shell.__dict__ = deep_copy(obj, state, memo)


def keep_user_data(obj: Any, copied: Any) -> None:
    """Give replica 0 the user's own containers, so that names for them that the user has stay good."""
    for name, value in obj.__dict__.items():
        is_hooks = "hook" in name and isinstance(value, dict)
        if name in ("_parameters", "_buffers") or is_hooks or is_plain(value) or isinstance(value, torch.Generator):
            copied.__dict__[name] = value


def hold_copies(body: Any) -> None:
    """Let replica 0's module or optimizer hold its copies of variables, as the other replicas' do."""
    if isinstance(body, nn.Module):
        for members in (body._parameters, body._buffers):
            for name, value in members.items():
                members[name] = _first_copy(value)
    if isinstance(body, Optimizer):
        for group in body.param_groups:
            group["params"][:] = [_first_copy(parameter) for parameter in group["params"]]
        for parameter in [key for key in body.state if isinstance(key, DistributedVariable)]:
            body.state[_first_copy(parameter)] = body.state.pop(parameter)


def _first_copy(value: Any) -> Any:
    return value.copy_on(0) if isinstance(value, DistributedVariable) else value


def bind_step(obj: Any, copied: Any) -> None:
    """Give an optimizer's copy the ``step`` that learning-rate schedulers wrap, bound to the copy."""
    if not isinstance(obj, Optimizer) or "step" not in obj.__dict__:
        return
    reference = weakref.ref(copied)

    @functools.wraps(type(copied).step)
    def step(*args: Any, **kwargs: Any) -> Any:
        optimizer: Any = reference()
        if optimizer is None:
            raise RuntimeError("The optimizer of this step no longer exists.")
        optimizer._opt_called = True
        return types.MethodType(type(optimizer).step, optimizer)(*args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    copied.__dict__["step"] = step


def deep_copy(obj: Any, value: Any, memo: Memo) -> Any:
    """Return a copy of ``value``; ``obj`` is what the error speaks of.

    Raises:
        TypeError: there can be none.
    """
    try:
        with unrecorded():
            return copy.deepcopy(value, memo)
    except Exception as error:
        raise TypeError(
            f"A {type(obj).__name__} can't be copied for each replica: {error}\n"
            "Keep what can't be copied (open files, locks, results of a forward pass) out of the objects made in "
            "`strategy.scope()`, or run one process for each replica with torchrun."
        ) from error
