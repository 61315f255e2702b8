"""The memory formats of what optimizers remember."""

from __future__ import annotations

from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from torchstrategy.collectives.packing import in_format_of
from torchstrategy.replicas.mirrored import bodies

__all__ = ["align_state"]


def align_state(optimizer: Optimizer) -> None:
    """Give what an optimizer remembers of a parameter the parameter's memory format.

    torch's fused steps walk through the memory of both at once, and would compute wrong numbers otherwise.
    """
    for body in bodies(optimizer):
        for parameter, state in body.state.items():
            if is_lazy(parameter):
                continue
            for name, value in state.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    state[name] = in_format_of(value, parameter)
