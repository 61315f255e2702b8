"""The memory formats of what optimizers work on: torch's fused steps walk through the memory of all of it at once."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from torchstrategy.collectives.packing import in_format_of, memory_order
from torchstrategy.replicas.mirrored import bodies

__all__ = ["align_before_step", "align_state", "is_dense"]


def align_state(optimizer: Optimizer) -> None:
    """Give what an optimizer remembers of a parameter the parameter's memory format."""
    for body in bodies(optimizer):
        for parameter, state in body.state.items():
            if isinstance(parameter, Tensor) and isinstance(state, dict) and not is_lazy(parameter):
                _align(parameter, state)


def align_before_step(optimizer: Optimizer, *_: Any) -> None:
    """Do so for a fused step, with the gradients as well, whoever made them; a step pre-hook.

    A parameter that has gaps in its memory, as a part of another tensor, can't be updated by a fused step.
    """
    for group in optimizer.param_groups:
        if not group.get("fused"):
            continue
        for parameter in group["params"]:
            grad = parameter.grad
            if not is_dense(parameter):
                group["fused"] = False
            if grad is not None and not grad.is_sparse and grad.stride() != parameter.stride():
                parameter.grad = in_format_of(grad, parameter)
            _align(parameter, optimizer.state.get(parameter, {}))


def is_dense(tensor: Tensor) -> bool:
    """Say whether a tensor's elements lie in memory without gaps, each once."""
    return tensor.is_contiguous() or memory_order(tensor) is not None


def _align(parameter: Tensor, state: dict[str, Any]) -> None:
    strides, shape = parameter.stride(), parameter.shape
    for name, value in state.items():
        if isinstance(value, Tensor) and value.shape == shape and value.stride() != strides:
            state[name] = in_format_of(value, parameter)
