"""The modes of a model's modules: training, and evaluation without gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["Evaluating", "put_into_training"]


class Evaluating:
    """Puts a model into evaluation mode without gradients, and back into the mode of each of its modules."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._no_grad = torch.no_grad()

    def __enter__(self) -> None:
        self._modes = _modes_of(self._model)
        self._model.eval()
        self._no_grad.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._no_grad.__exit__(*error)
        _restore(self._modes)


def put_into_training(model: Any) -> None:
    """Put a model into training mode, but for what the program has frozen and put into evaluation mode.

    That is each module in evaluation mode with parameters of which none is trained, such as a pretrained part with
    batch norms, and all that is in it; and each one without parameters, such as a dropout, that was put into it by
    itself.

    Args:
        model: the model.
    """
    kept = [pair for module in _frozen(model, is_alone=True) for pair in _modes_of(module)]
    model.train()
    _restore(kept)


def _frozen(module: Any, *, is_alone: bool) -> Iterator[Any]:
    """Yield the outermost modules that stay in evaluation mode.

    Args:
        module: where to look.
        is_alone: whether its mode is its own, and not that of a larger part that was put into evaluation mode.
    """
    if not module.training:
        parameters = list(module.parameters())
        if not any(p.requires_grad for p in parameters) and (parameters or is_alone):
            yield module
            return
    for child in module.children():
        yield from _frozen(child, is_alone=module.training)


def _modes_of(model: Any) -> list[tuple[Any, bool]]:
    return [(module, module.training) for module in model.modules()]


def _restore(modes: list[tuple[Any, bool]]) -> None:
    for module, training in modes:
        if module.training is not training:
            module.training = training
