"""Evaluation mode: no gradients, and every module back in its own mode afterwards."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Evaluating"]


class Evaluating:
    """Puts a model into evaluation mode without gradients, and back into the mode of each of its modules."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._no_grad = torch.no_grad()

    def __enter__(self) -> None:
        self._modes = [(module, module.training) for module in self._model.modules()]
        self._model.eval()
        self._no_grad.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._no_grad.__exit__(*error)
        for module, training in self._modes:
            if module.training is not training:
                module.training = training
