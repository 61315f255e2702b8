"""The models of the recipes, for images ``[batch, 1, 28, 28]`` of ten classes; they return logits ``[batch, 10]``."""

from __future__ import annotations

from torch import nn


def conv_net() -> nn.Sequential:
    """Build the tutorial's network: two convolutions, each with pooling, and two dense layers."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 5 * 5, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def shallow_conv_net() -> nn.Sequential:
    """Build the network of the Estimator tutorial: one convolution with pooling, and two dense layers."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 13 * 13, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def mlp(hidden_size: int, dropout: float) -> nn.Sequential:
    """Build a network with one hidden dense layer, for quick tries."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(28 * 28, hidden_size), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden_size, 10)
    )
