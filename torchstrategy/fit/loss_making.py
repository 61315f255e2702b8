"""Makes of what ``compile(loss=...)`` is given for an output a ``LossPart``."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from torchstrategy import losses
from torchstrategy.base.context import has_strategy
from torchstrategy.fit.loss_parts import FunctionLoss, LossPart, ObjectLoss, chosen_crossentropy, loss_object
from torchstrategy.fit.torch_loss_parts import TorchLoss, is_torch_function
from torchstrategy.losses.loss import Loss
from torchstrategy.replicas.record import owner
from torchstrategy.strategies.default import get_strategy

__all__ = ["make_part"]

_CROSSENTROPIES = ("crossentropy", "ce")


def make_part(loss: Any) -> LossPart | None:
    """Return the loss of an output.

    To be called in the strategy's scope: modules made outside it are noted for the strategy.

    Args:
        loss: a name, an object, a class, a module or a function; ``None`` for no loss.

    Raises:
        ValueError: the name is not known, or the loss can't be taken apart into those of examples.
        TypeError: it is nothing of the above.
    """
    if loss is None:
        return None
    if isinstance(loss, str) and loss.lower() in _CROSSENTROPIES:
        return _AnyCrossentropy(loss)
    if inspect.isclass(loss) and issubclass(loss, (Loss, nn.Module)):
        loss = loss()
    loss = loss_object(losses.get(loss))
    if isinstance(loss, Loss):
        return ObjectLoss(loss)
    if isinstance(loss, nn.Module):
        part = TorchLoss(loss)
        _note_for_the_strategy(loss)
        return part
    return TorchLoss(loss) if is_torch_function(loss) else FunctionLoss(loss)


class _AnyCrossentropy(LossPart):
    """``loss="crossentropy"``: the one that fits the shapes."""

    def losses(self, y: Any, y_pred: Tensor) -> Tensor:
        return ObjectLoss(chosen_crossentropy(y, y_pred)).losses(y, y_pred)

    def check(self, y: Any, y_pred: Tensor) -> None:
        ObjectLoss(chosen_crossentropy(y, y_pred)).check(y, y_pred)


def _note_for_the_strategy(module: nn.Module) -> None:
    """Let each replica have the module's weights, which may have been made outside the scope, on its device."""
    if has_strategy() and owner(module) is None:
        for part in module.modules():
            get_strategy().record.add(part)
