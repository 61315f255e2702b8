"""FTRL-Proximal, which torch does not have: the default optimizer of linear models in tf.estimator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["Ftrl"]


class Ftrl(Optimizer):
    """Follow the regularized leader, as ``tf.keras.optimizers.legacy.Ftrl`` computes it.

    Each element keeps the sum ``n`` of its squared gradients and a sum ``z`` of its gradients, from which its value is
    computed anew in every step: with a gradient ``g``, a value ``w`` and ``p = -lr_power``,

    - ``n' = n + g²`` and ``z' = z + g - (n'^p - n^p) / lr * w``,
    - ``w' = 0`` if ``|z'| <= l1``, else ``(sign(z') * l1 - z') / ((beta + n'^p) / lr + 2 * l2)``.

    So ``l1`` gives exact zeros. A value that was not 0 at the beginning is forgotten with the first step (also where
    the gradient is 0), as in tf: start from zeros. Sparse gradients update the rows that they have.

    Args:
        params: parameters, or dicts of groups, as for every torch optimizer.
        lr: learning rate, more than 0.
        lr_power: how the rate falls with the squared gradients, at most 0; 0 means a fixed rate.
        initial_accumulator_value: ``n`` at first, at least 0.
        l1_regularization_strength: ``l1``, at least 0.
        l2_regularization_strength: ``l2``, at least 0: a penalty that does not depend on the data.
        l2_shrinkage_regularization_strength: at least 0: adds that times ``2 * w`` to the ``g`` in ``z'``.
        beta: at least 0, as in the formula.

    Raises:
        ValueError: an argument is not in its range.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = ts.optimizers.Ftrl([weight], lr=0.1, l1_regularization_strength=1.0)
        >>> weight.grad = torch.tensor([3.0, 0.5])
        >>> optimizer.step()
        >>> weight.detach()
        tensor([-0.0663,  0.0000])

    References:
        McMahan et al., "Ad click prediction: a view from the trenches", KDD 2013.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 0.001,
        lr_power: float = -0.5,
        initial_accumulator_value: float = 0.1,
        l1_regularization_strength: float = 0.0,
        l2_regularization_strength: float = 0.0,
        l2_shrinkage_regularization_strength: float = 0.0,
        beta: float = 0.0,
    ) -> None:
        if lr_power > 0:
            raise ValueError(f"lr_power must be at most 0, as the rate falls. Received: {lr_power}")
        not_negative = {
            "initial_accumulator_value": initial_accumulator_value,
            "l1_regularization_strength": l1_regularization_strength,
            "l2_regularization_strength": l2_regularization_strength,
            "l2_shrinkage_regularization_strength": l2_shrinkage_regularization_strength,
            "beta": beta,
        }
        for name, value in not_negative.items():
            if not value >= 0:
                raise ValueError(f"{name} must be at least 0. Received: {value}")
        _check_rate(lr)
        super().__init__(params, {"lr": lr, "lr_power": lr_power, **not_negative})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have gradients.

        Args:
            closure: computes the loss again and returns it; ``None`` means that there is no need to.

        Returns:
            The closure's loss, or ``None``.

        Raises:
            ValueError: a group's learning rate is not more than 0; nothing is changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            _check_rate(group["lr"])
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["accumulator"] = torch.full_like(parameter, group["initial_accumulator_value"])
            state["linear"] = torch.zeros_like(parameter)
        accumulator, linear = state["accumulator"], state["linear"]
        if not gradient.is_sparse:
            _apply(parameter, accumulator, linear, gradient, group)
            return
        gradient = gradient.coalesce()
        places = tuple(gradient.indices())
        rows = parameter[places], accumulator[places], linear[places]
        _apply(*rows, gradient.values(), group)
        parameter[places], accumulator[places], linear[places] = rows


def _apply(parameter: Tensor, accumulator: Tensor, linear: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
    """Update three tensors in place."""
    lr, power, l1 = group["lr"], -group["lr_power"], group["l1_regularization_strength"]
    l2 = group["l2_regularization_strength"] + group["beta"] / (2 * lr)
    previous = _power(accumulator, power)
    accumulator.addcmul_(gradient, gradient)
    current = _power(accumulator, power)
    if group["l2_shrinkage_regularization_strength"]:
        gradient = gradient + 2 * group["l2_shrinkage_regularization_strength"] * parameter
    linear.add_(gradient - (current - previous) / lr * parameter)
    value = (l1 * linear.sign() - linear) / (current / lr + 2 * l2)
    parameter.copy_(torch.where(linear.abs() <= l1, 0.0, value))  # nan is not small: it must stay to be seen


def _power(tensor: Tensor, power: float) -> Tensor:
    return tensor.sqrt() if power == 0.5 else tensor.pow(power)


def _check_rate(lr: float | Tensor) -> None:
    if not isinstance(lr, Tensor) and not lr > 0:  # looking at a tensor could stop the device
        raise ValueError(f"Ftrl divides by the learning rate, which must be more than 0. Received: lr={lr}")
