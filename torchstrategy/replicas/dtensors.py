"""Parameters that FSDP2 has divided: DTensors, of which each process has a part, and which are left to FSDP2."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn

__all__ = ["is_dtensor", "keeps_parts", "leave_to_fsdp", "reshard"]

#: Whether this process keeps what it gathers of others: it need not if another one writes the file.
keeps_parts: ContextVar[bool] = ContextVar("torchstrategy_keeps_parts", default=True)


def is_dtensor(value: Any) -> bool:
    """Say whether a tensor is a DTensor, a part of which each process has; its module need not be imported for that."""
    kind = type(value)
    if kind is nn.Parameter or kind is Tensor:  # nearly all are
        return False
    return any(base.__name__ == "DTensor" and base.__module__.startswith("torch.") for base in kind.__mro__)


def reshard(objects: Iterable[Any]) -> None:
    """Let modules that FSDP2 has divided show their DTensors, not the whole parameters that a forward pass may leave.

    The next forward pass gathers them again.
    """
    for module in _fsdp_modules(_modules_of(objects)):
        module.reshard()


def leave_to_fsdp(objects: Iterable[Any], num_replicas: int) -> None:
    """Leave the parameters that FSDP2 has divided to it, and let it add up their gradients instead of averaging them.

    Losses are divided by the size of the global batch, so that a mean over the ranks would divide a second time.

    Args:
        objects: those among them that are modules are looked at, with their submodules.
        num_replicas: over all processes, which have one each.

    Raises:
        TypeError: there are other DTensors, or FSDP2 divides over other processes; nothing was changed.
    """
    modules = _modules_of(objects)
    own: set[int] = set()
    divided = _fsdp_modules(modules)
    for module in divided:
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.9 has one
        for group in (state._fsdp_param_group,) if groups is None else groups:
            if group is None:  # it has no parameters
                continue
            size = group.mesh_info.mesh.size()
            if size != num_replicas:
                raise TypeError(
                    f"`fully_shard` has divided the parameters of {type(module).__name__} over a data-parallel mesh of "
                    f"{size} processes, but the strategy has {num_replicas} replicas, each with data of its own. Give "
                    f"it all of them: fully_shard(module, mesh=init_device_mesh(device_type, ({num_replicas},))), with "
                    "one replica in each process. Tensor parallelism beside it needs a program without a strategy."
                )
            own.update(id(parameter.sharded_param) for parameter in group.fsdp_params)
    for module in divided:
        module.reshard()
    for name, tensor in _dtensors(modules):
        if id(tensor) not in own:
            raise TypeError(
                f"{name} is a DTensor that `fully_shard` (FSDP2) does not manage, as `parallelize_module` makes them. "
                "Its processes compute one batch together, but every replica of a strategy has data of its own. Divide "
                "the module by fully_shard(module, mesh=init_device_mesh(device_type, "
                f"({num_replicas},))), or train it without a strategy."
            )
    for module in divided:
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo can't multiply first


def _modules_of(objects: Iterable[Any]) -> list[Any]:
    """Return the modules among some objects and their submodules, once each; none where there can be no DTensors."""
    if "torch.distributed.tensor" not in sys.modules:
        return []
    modules = [obj for obj in objects if isinstance(obj, nn.Module)]
    return list({id(member): member for module in modules for member in module.modules()}.values())


def _fsdp_modules(modules: Iterable[Any]) -> list[Any]:
    """Return the modules that ``fully_shard`` was called for."""
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return [] if fsdp is None else [module for module in modules if isinstance(module, fsdp)]


def _dtensors(modules: Iterable[Any]) -> Iterator[tuple[str, Tensor]]:
    for module in modules:
        for own in (module._parameters, module._buffers):
            for key, value in own.items():
                if is_dtensor(value):
                    yield f"{key!r} of {type(module).__name__}", value
