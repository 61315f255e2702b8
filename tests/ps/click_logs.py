"""Clicks on recommended items, made up, and a network that learns to predict them.

The data has the shape of real click logs: most users and items are seen once or never, a few of them all the time, and
few impressions are clicked. What makes somebody click is planted, so that it is known how good a prediction can be.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

NUM_FEATURES = 8
NUM_TASTES = 4
Floats = np.ndarray


class ClickModel(nn.Module):
    """Predicts clicks from one large table of embeddings, of users and items, and some dense features.

    Args:
        num_rows: users and items together.
        embedding_size: columns of the table.
        hidden_size: of the two dense layers.
        sparse: whether the table's gradient holds only the rows of the batch; its optimizer has to know such ones.
    """

    def __init__(self, num_rows: int, embedding_size: int, hidden_size: int, *, sparse: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_rows, embedding_size, sparse=sparse)
        nn.init.normal_(self.embedding.weight, std=0.01)
        self.dense = nn.Sequential(
            nn.Linear(3 * embedding_size + NUM_FEATURES, hidden_size),
            nn.ReLU(),
            nn.Linear(hidden_size, hidden_size),
            nn.ReLU(),
            nn.Linear(hidden_size, 1),
        )

    def forward(self, ids: Tensor, features: Tensor) -> Tensor:
        """Return logits ``[batch]`` of users and items ``[batch, 2]`` and features ``[batch, 8]``."""
        user, item = self.embedding(ids).unbind(1)
        return self.dense(torch.cat([user, item, 10 * user * item, features], dim=1)).squeeze(1)


class World:
    """What makes users click: the quality of items, the tastes of users, and where and when an item is shown.

    Args:
        num_rows: users and items together; 3 of 5 are users, whose ids come first.
        seed: of all random numbers.
    """

    def __init__(self, num_rows: int, seed: int) -> None:
        if num_rows < 5:
            raise ValueError(f"num_rows must be at least 5: some users and some items. Received: {num_rows}")
        self.num_users = num_rows * 3 // 5
        self.num_items = num_rows - self.num_users
        rng = np.random.default_rng([seed, 0])
        self._quality = rng.normal(0, 1.0, num_rows).astype(np.float32)  # of users: how readily they click
        self._tastes = rng.normal(0, 1.0, (num_rows, NUM_TASTES)).astype(np.float32)

    def show(self, number: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
        """Return ids ``[number, 2]`` and features ``[number, 8]`` of impressions."""
        users = power_law(number, self.num_users, 0.6, rng)
        items = power_law(number, self.num_items, 1.05, rng) + self.num_users
        hour = rng.uniform(0, 2 * np.pi, number)
        place = rng.integers(0, 10, number)
        price = rng.normal(0, 1, number)
        device = rng.choice(3, number, p=(0.6, 0.3, 0.1))
        columns = [np.sin(hour), np.cos(hour), place / 10, price, rng.normal(0, 1, number), *np.eye(3)[device].T]
        return np.stack([users, items], axis=1), np.stack(columns, axis=1).astype(np.float32)

    def logits(self, ids: Floats, features: Floats) -> Floats:
        """Return the logarithm of the odds of a click, ``[number]``."""
        users, items = ids.T
        agreement = (self._tastes[users] * self._tastes[items]).sum(1) / np.sqrt(NUM_TASTES)
        sine, _, place, price, _, phone, tablet, _ = features.T
        circumstances = 0.5 * sine * phone - 3.0 * place - 0.4 * price**2 + 0.4 * tablet * price
        return np.asarray(self._quality[items] + 0.5 * self._quality[users] + 0.7 * agreement + circumstances - 0.8)


def load_clicks(num_rows: int, num_train: int, num_test: int, seed: int) -> tuple[TensorDataset, TensorDataset]:
    """Make up impressions and who clicked.

    Args:
        num_rows: users and items together.
        num_train: examples to learn from.
        num_test: examples to test with.
        seed: of all random numbers; the same one gives the same data on every host.

    Returns:
        Training and test examples: users and items ``[2]``, features ``[8]``, and 1.0 for a click, else 0.0.
    """
    world = World(num_rows, seed)

    def make(number: int, part: int) -> TensorDataset:
        rng = np.random.default_rng([seed, part])
        ids, features = world.show(number, rng)
        clicks = rng.uniform(size=number) < 1 / (1 + np.exp(-world.logits(ids, features)))
        return TensorDataset(
            torch.from_numpy(ids), torch.from_numpy(features), torch.from_numpy(clicks.astype(np.float32))
        )

    return make(num_train, 1), make(num_test, 2)


def power_law(number: int, size: int, exponent: float, rng: np.random.Generator) -> Floats:
    """Draw ids below ``size`` of which the r-th most frequent one has a share of about ``r ** -exponent``.

    Frequent ids are spread over all of them, as hashed ids are, not the first ones.
    """
    least = (size + 1.0) ** (1 - exponent)
    rank = (1 - rng.uniform(size=number) * (1 - least)) ** (1 / (1 - exponent))  # of a density: the inverse of its sum
    step = int(0.618 * size) + 1  # successive multiples of the golden section are far from each other
    while math.gcd(step, size) > 1:  # without a common divisor different ranks go to different ids
        step += 1
    return (np.minimum(rank.astype(np.int64), size) - 1) * step % size
