"""The models of the recipes, for images ``[batch, 1, 28, 28]`` of ten classes; they return logits ``[batch, 10]``."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def conv_net(*, pool_first: bool = False) -> nn.Sequential:
    """Build the tutorial's network: two convolutions, each with pooling, and two dense layers.

    Args:
        pool_first: rectify the largest of four numbers instead of all four, which gives the same outputs and gradients.
    """
    return nn.Sequential(
        nn.Conv2d(1, 32, 3),
        *_rectify_and_pool(pool_first=pool_first),
        nn.Conv2d(32, 64, 3),
        *_rectify_and_pool(pool_first=pool_first),
        nn.Flatten(),
        nn.Linear(64 * 5 * 5, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def _rectify_and_pool(*, pool_first: bool) -> list[nn.Module]:
    return [nn.MaxPool2d(2), nn.ReLU()] if pool_first else [nn.ReLU(), nn.MaxPool2d(2)]


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


def deep_mlp(hidden_size: int, num_layers: int) -> nn.Sequential:
    """Build a network of dense layers, whose parameters are many for the work that they do."""
    sizes = [28 * 28, *[hidden_size] * num_layers]
    layers = [layer for i in range(num_layers) for layer in (nn.Linear(sizes[i], sizes[i + 1]), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(hidden_size, 10))


class ManyParameters(nn.Module):
    """A network of many tiny dense layers, each with a way around it: nearly all of its step is a cost per parameter.

    Args:
        width: of the layers.
        num_layers: of two parameters each, with the first one and the last one.
    """

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.first = nn.Linear(28 * 28, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers - 2))
        self.last = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits ``[batch, 10]``."""
        hidden = self.first(images.flatten(1))
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return self.last(hidden)


class Transformer(nn.Module):
    """An encoder that reads an image row by row.

    Args:
        width: of the tokens, one for each row.
        num_heads: of each layer's attention.
        num_layers: of the encoder.
        dropout: of all layers.
    """

    def __init__(self, width: int, num_heads: int, num_layers: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Linear(28, width)
        self.positions = nn.Parameter(torch.randn(28, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, num_heads, 4 * width, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits ``[batch, 10]``."""
        return self.head(self.encoder(self.embedding(images.squeeze(1)) + self.positions).mean(1))
