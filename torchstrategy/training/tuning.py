"""Settings of a model and its optimizer that make steps faster and leave their numbers as they are but for rounding."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from torchstrategy.base import tree
from torchstrategy.base.context import current_replica_context
from torchstrategy.base.host_memory import keep_freed_memory
from torchstrategy.base.log import logger
from torchstrategy.gradients.host_updates import HostedOptimizer
from torchstrategy.parameter_server.served import Served
from torchstrategy.replicas.mirrored import bodies
from torchstrategy.replicas.record import owner
from torchstrategy.replicas.state_formats import align_state
from torchstrategy.training.example import copy_module
from torchstrategy.training.weight_files import plain_module

__all__ = ["tune"]

_CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)
#: Whose gradients are never sparse, which fused steps can't take.
_FUSED = (torch.optim.Adam, torch.optim.AdamW)


def tune(model: nn.Module, optimizer: Optimizer | None = None, example: Any = None) -> str:
    """Set what makes training steps faster on the device at hand; results change by rounding only.

    On CPUs the process keeps the memory that a step frees (``keep_freed_memory``), the weights of two-dimensional
    convolutions take the memory format ``channels_last``, in which torch computes them sooner, and Adam and AdamW
    become fused. On GPUs they become fused, and the rest stays as it is. Nothing changes on XLA devices, nor where
    parameter servers hold the model.

    In ``channels_last`` a convolution's output can't be flattened by ``view``, only by ``reshape`` or ``flatten``. So a
    model with a ``forward`` of its own is tried out first: a copy in evaluation mode, without its hooks, computes
    ``example``. If that fails, or there is no example, the convolutions stay as they are.

    Call it after the model and the optimizer are made, outside of ``run``; with several processes each one calls it.
    ``Model.fit`` does so by itself.

    Args:
        model: the model.
        optimizer: trains it. What it remembers takes the parameters' memory format, now and whenever it is loaded.
        example: inputs of the model, or a tuple or list of them: tensors like those that it gets in training.

    Returns:
        One line that says what was done, which is logged as well.

    Raises:
        TypeError: ``model`` is no module, or ``optimizer`` no optimizer.
        RuntimeError: called inside ``run``.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(1, 8, 3), torch.nn.Flatten(), torch.nn.Linear(72, 2))
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> line = ts.utils.tune(model, optimizer)
        >>> model[0].weight.is_contiguous(memory_format=torch.channels_last), optimizer.param_groups[0]["fused"]
        (True, True)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"tune takes a torch.nn.Module. Received: {model!r} of type {type(model).__name__}.")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer= must be a torch optimizer. Received: {optimizer!r} of {type(optimizer).__name__}.")
    if current_replica_context() is not None:
        raise RuntimeError("tune was called inside `run`. Call it before, when model and optimizer are made.")
    types = _device_types(model)
    done: list[str] = []
    if types == {"cpu"}:
        if keep_freed_memory():
            done.append("freed memory is kept")
        done += _turn_convolutions(model, example)
    if optimizer is not None and types <= {"cpu", "cuda"}:
        if _fuse(optimizer):
            done.append(f"{_plain_class(bodies(optimizer)[0]).__name__} is fused")
        align_state(optimizer)
        if align_state not in bodies(optimizer)[0]._optimizer_load_state_dict_post_hooks.values():
            optimizer.register_load_state_dict_post_hook(align_state)
    line = f"Tuned for {' and '.join(sorted(types)) or 'no device'}: {'; '.join(done) or 'nothing to do'}."
    logger.info(line)
    return line


def _device_types(model: nn.Module) -> set[str]:
    """Return where a model computes: on its strategy's devices, to which it may still have to move."""
    parameters = list(model.parameters())
    if any(isinstance(parameter, Served) for parameter in parameters):
        return {"parameter servers"}
    strategy = owner(model)
    if strategy is not None and strategy.placement.devices[0].type == "xla":
        return {"xla"}
    return {parameter.device.type for parameter in parameters}


def _turn_convolutions(model: nn.Module, example: Any) -> list[str]:
    """Turn the weights of convolutions to ``channels_last`` where the model can work on it; say what was done."""
    found = [module for module in model.modules() if isinstance(module, _CONVOLUTIONS) and _has_plain_weight(module)]
    if not found:
        return []
    what = f"{len(found)} convolution{'s' * (len(found) > 1)}"
    if not all(map(_is_torch_own, _around(plain_module(model), found))):
        if example is None:
            return [f"{what} left as they are, since no example= shows whether the model's forward can work on them"]
        problem = _try_out(model, example)
        if problem:
            return [f"{what} left as they are, because in channels_last the model's forward fails: {problem}"]
    for module in found:
        for body in bodies(module):
            body.weight.data = _turned(body.weight.data)
    return [f"{what} in channels_last"]


def _has_plain_weight(module: nn.Module) -> bool:
    """Say whether a convolution's weight is a parameter, which it is not if it is computed from others."""
    weight = module.weight
    return isinstance(weight, nn.Parameter) and not is_lazy(weight) and weight.is_floating_point()


def _turned(weight: Tensor) -> Tensor:
    return weight.contiguous(memory_format=torch.channels_last)


def _around(model: nn.Module, found: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules that contain convolutions, whose ``forward`` gets their outputs."""
    inner = set(map(id, found))
    return [m for m in model.modules() if id(m) not in inner and any(id(child) in inner for child in m.modules())]


def _is_torch_own(module: nn.Module) -> bool:
    cls = type(bodies(module)[0])
    return cls.__module__.startswith("torch.nn.")


def _try_out(model: nn.Module, example: Any) -> str:
    """Return the error of a copy of a model whose weights are turned; empty if it has none."""
    try:
        copied = copy_module(model, Tensor.clone)
        for module in copied.modules():
            module._forward_hooks.clear()
            module._forward_pre_hooks.clear()
            if isinstance(module, _CONVOLUTIONS) and _has_plain_weight(module):
                module.weight.data = _turned(module.weight.data)
        with torch.no_grad(), torch.random.fork_rng([]):
            copied(*example) if isinstance(example, (tuple, list)) else copied(example)
    except Exception as error:  # noqa: BLE001 - whatever the program's code raises
        return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    return ""


def _plain_class(optimizer: Optimizer) -> type:
    """Return the class that an optimizer had before central storage changed it."""
    bases = type(optimizer).__bases__
    return bases[1] if bases[0] is HostedOptimizer else type(optimizer)


def _fuse(optimizer: Optimizer) -> bool:
    """Make an optimizer's steps fused, if they can be; say whether they are."""
    copies = bodies(optimizer)
    if _plain_class(copies[0]) not in _FUSED:
        return False
    for group in copies[0].param_groups:
        values = [value for key, value in group.items() if key not in ("params", "lr")]
        if (
            group.get("foreach")
            or group.get("differentiable")
            or group.get("capturable")
            or group.get("fused") is False
        ):
            return False  # as the program has asked for
        if any(isinstance(value, Tensor) for value in tree.all_leaves(values)):
            return False
        if not all(parameter.is_floating_point() for parameter in group["params"]):
            return False
    for body in copies:
        body.defaults["fused"] = True
        for group in body.param_groups:
            group["fused"] = True
            for parameter in group["params"]:
                step = body.state.get(parameter, {}).get("step")
                if step is not None:
                    body.state[parameter]["step"] = torch.as_tensor(step, dtype=torch.float32, device=parameter.device)
    return True
