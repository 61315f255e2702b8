"""Settings of a model and its optimizer that make steps faster and leave their numbers as they are but for rounding."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from torchstrategy.base import tree
from torchstrategy.base.context import current_replica_context
from torchstrategy.base.devices import kind_of
from torchstrategy.base.log import logger
from torchstrategy.base.values import RemoteTensor
from torchstrategy.checkpoint.objects import align_before_step, align_state, is_dense
from torchstrategy.fit.calling import copy_module
from torchstrategy.fit.weight_files import plain_module
from torchstrategy.optimizers.by_name import plain_class
from torchstrategy.patches import keep_freed_memory
from torchstrategy.replicas.dtensors import is_dtensor
from torchstrategy.replicas.mirrored import bodies
from torchstrategy.replicas.record import optimizer_parameters, owner

__all__ = ["tune", "tune_for_fit"]

_CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)
#: Whose gradients are never sparse, which fused steps can't take.
_FUSED = (torch.optim.Adam, torch.optim.AdamW)


def tune(model: nn.Module, optimizer: Optimizer | None = None, example: Any = None) -> str:
    """Set what makes training steps faster on the device at hand; results change by rounding only.

    On CPUs the process keeps the memory that a step frees (``keep_freed_memory``), the weights of two-dimensional
    convolutions take the memory format ``channels_last``, in which torch computes them sooner, and Adam and AdamW
    become fused. On GPUs they become fused, and the rest stays as it is. Nothing changes on XLA devices, nor where
    parameter servers hold the model. ``Model.fit`` does the same by itself, but for the convolutions.

    In ``channels_last`` a convolution's output and its weight can't be flattened by ``view``, only by ``reshape`` or
    ``flatten``. So a model that has modules or hooks of the program's is tried out first: a copy computes ``example``
    forwards and backwards. If that fails, or there is no example, the convolutions stay as they are.

    Call it after the model and the optimizer are made, outside of ``run``; with several processes each one calls it.

    Args:
        model: the model.
        optimizer: trains it.
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
    return _tune(model, optimizer, lambda: _turn_convolutions(model, example))


def tune_for_fit(model: nn.Module, optimizer: Optimizer | None) -> str:
    """Do as ``tune`` without the convolutions: a loss, a callback or the program later may ``view`` their weights."""
    return _tune(model, optimizer, list)


def _tune(model: nn.Module, optimizer: Optimizer | None, turn_convolutions: Callable[[], list[str]]) -> str:
    types = _device_types(model)
    done: list[str] = []
    if types == {"cpu"}:
        if keep_freed_memory():
            done.append("freed memory is kept")
        done += turn_convolutions()
    if optimizer is not None and all(kind_of(type_).has_fused_steps for type_ in types) and _fuse(optimizer):
        done.append(f"{plain_class(type(bodies(optimizer)[0])).__name__} is fused")
    line = f"Tuned for {' and '.join(sorted(types)) or 'no device'}: {'; '.join(done) or 'nothing to do'}."
    logger.info(line)
    return line


def _device_types(model: nn.Module) -> set[str]:
    """Return where a model computes: on its strategy's devices, to which it may still have to move."""
    parameters = list(model.parameters())
    if any(isinstance(parameter, RemoteTensor) for parameter in parameters):
        return {"parameter servers"}
    strategy = owner(model)
    if strategy is not None and kind_of(strategy.placement.devices[0]).is_traced:
        return {strategy.placement.devices[0].type}
    return {parameter.device.type for parameter in parameters}


def _turn_convolutions(model: nn.Module, example: Any) -> list[str]:
    """Turn the weights of convolutions to ``channels_last`` where the model can work on it; say what was done."""
    found = [module for module in model.modules() if _has_plain_weight(module)]
    if not found:
        return []
    what = f"{len(found)} convolution{'s' * (len(found) > 1)}"
    if not all(map(_is_torch_own, plain_module(model).modules())):
        if example is None:
            return [f"{what} left as they are, since no example= shows whether the model's forward can work on them"]
        problem = _try_out(model, example)
        if problem:
            return [f"{what} left as they are, because in channels_last the model fails: {problem}"]
    weights = [body._parameters["weight"] for module in found for body in bodies(module)]
    for weight in weights:
        weight.data = _turned(weight.data)
    for optimizer in _optimizers_of(weights):
        align_state(optimizer)
        _align_steps(optimizer)
    return [f"{what} in channels_last"]


def _has_plain_weight(module: nn.Module) -> bool:
    """Say whether a module is a convolution whose weight is a parameter; it may also be computed from others."""
    if not isinstance(module, _CONVOLUTIONS):
        return False
    weight = bodies(module)[0]._parameters.get("weight")
    return weight is not None and not is_lazy(weight) and weight.is_floating_point() and not is_dtensor(weight)


def _turned(weight: Tensor) -> Tensor:
    return weight.contiguous(memory_format=torch.channels_last)


def _is_torch_own(module: nn.Module) -> bool:
    body = bodies(module)[0]
    has_hooks = body._forward_hooks or body._forward_pre_hooks or body._backward_hooks or body._backward_pre_hooks
    return type(body).__module__.startswith("torch.nn.") and not has_hooks


def _try_out(model: nn.Module, example: Any) -> str:
    """Return the error of a copy of a model whose weights are turned; empty if it has none."""
    try:
        copied = copy_module(model, Tensor.clone).train(model.training)
        for module in copied.modules():
            if _has_plain_weight(module):
                weight: Any = module.weight
                weight.data = _turned(weight.data)
        with torch.enable_grad(), torch.random.fork_rng([]):
            outputs = copied(*example) if isinstance(example, (tuple, list)) else copied(example)
            results = [leaf for leaf in tree.all_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
            torch.autograd.backward([result.sum() for result in results])
    except Exception as error:  # noqa: BLE001 - whatever the program's code raises
        return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    return ""


def _optimizers_of(parameters: Iterable[Tensor]) -> list[Optimizer]:
    """Return the optimizers that train some parameters, of which the program may have others than it gives."""
    keys = set(map(id, parameters))
    optimizers = [obj for obj in gc.get_objects() if issubclass(type(obj), Optimizer)]
    return [o for o in optimizers if any(id(p) in keys for group in o.param_groups for p in group["params"])]


def _align_steps(optimizer: Optimizer) -> None:
    """Let an optimizer's steps find all in one memory format, in which fused ones take it to be."""
    if align_before_step not in bodies(optimizer)[0]._optimizer_step_pre_hooks.values():
        optimizer.register_step_pre_hook(align_before_step)


def _fuse(optimizer: Optimizer) -> bool:
    """Make an optimizer's steps fused, if they can be; say whether they are."""
    copies = bodies(optimizer)
    # torch's fused steps don't take DTensors together with other tensors.
    is_mixed = len(set(map(is_dtensor, optimizer_parameters(copies[0])))) > 1
    if plain_class(type(copies[0])) not in _FUSED or is_mixed:
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
        if not all(parameter.is_floating_point() and is_dense(parameter) for parameter in group["params"]):
            return False
    align_state(optimizer)
    _align_steps(optimizer)
    for body in copies:
        body.defaults["fused"] = True
        for group in body.param_groups:
            group["fused"] = True
            for parameter in group["params"]:
                step = body.state.get(parameter, {}).get("step")
                if step is not None:
                    body.state[parameter]["step"] = torch.as_tensor(step, dtype=torch.float32, device=parameter.device)
    return True
