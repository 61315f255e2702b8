"""The programs of area 8 in NumPy: what ``Model.fit`` has to compute, written out, and what Keras computes instead.

Keras makes each replica's loss the mean over its own share, divides by the number of replicas and sums: ``replicas=1``
is the rule of this library for any number of replicas, and other numbers give what Keras measured for them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

ROWS = np.arange(10)
X = np.stack([0.1 * ROWS, 1 - 0.05 * ROWS, 0.5 * (ROWS % 3)], axis=1)
Y = (0.3 * ROWS - 0.2)[:, None]
LABELS = ROWS % 3
SAMPLE_WEIGHT = np.array([1, 2, 0.5, 1, 0, 1, 3, 1, 1, 0.25])
CLASS_WEIGHT = {0: 1.0, 1: 2.0, 2: 0.5}
KERNEL, BIAS = np.array([[0.5], [-0.25], [0.1]]), np.array([0.05])
CLASS_KERNEL = np.array([[0.5, -0.2, 0.1], [-0.25, 0.3, 0.2], [0.1, 0.0, -0.4]])
CLASS_BIAS = np.array([0.05, 0.0, -0.05])


@dataclass(frozen=True)
class Program:
    """One training, evaluation or prediction of area 8; ``batch_size`` is that of the global batch.

    Args:
        batch_size: ``None`` is the default, 32.
        reads: "arrays", "dataset", "distributed" or "from_function".
        is_class: a softmax over 3 classes at rate 0.5, else a regression at 0.1.
        optimizer: "sgd" or "adam".
        reduction: the loss's, where it is not the mean.
    """

    batch_size: int | None = 4
    reads: str = "arrays"
    is_class: bool = False
    optimizer: str = "sgd"
    reduction: str | None = None
    l2: float = 0.0
    has_sample_weight: bool = False
    has_class_weight: bool = False
    validation: str | None = None
    steps_per_epoch: int | None = None
    steps_per_execution: int = 1
    epochs: int = 3

    @property
    def rate(self) -> float:
        return 0.01 if self.reduction == "sum" else 0.5 if self.is_class else 0.1


class Reference:
    """A linear model in float64 that trains as a program says."""

    def __init__(self, program: Program, replicas: int = 1) -> None:
        self.program, self.replicas = program, replicas
        start = (CLASS_KERNEL, CLASS_BIAS) if program.is_class else (KERNEL, BIAS)
        self.kernel, self.bias = (values.copy() for values in start)
        self._moments = [[np.zeros_like(v), np.zeros_like(v)] for v in start]
        self._step = 0

    def fit(self) -> dict[str, Any]:
        p = self.program
        num_rows = int(len(X) * (1 - 0.3)) if p.validation == "split" else len(X)
        rows = batches(np.arange(num_rows), p.batch_size or 32)
        if p.steps_per_epoch:
            rows = itertools.cycle(rows)
        history: dict[str, list[float]] = {}
        for _ in range(p.epochs):
            epoch = itertools.islice(rows, p.steps_per_epoch) if p.steps_per_epoch else rows
            sums = _Sums()
            for batch in epoch:
                gradients = [np.zeros_like(self.kernel), np.zeros_like(self.bias)]
                for share in shares(batch, self.replicas):
                    self._add_gradients(share, gradients)
                    self._add_numbers(share, sums, batch)
                self._update(gradients)
            for name, value in {**sums.results(), **self._validate()}.items():
                history.setdefault(name, []).append(value)
        return {"history": history, "weights": self.weights()}

    def evaluate(self) -> dict[str, float]:
        sums = _Sums()
        for batch in batches(np.arange(len(X)), self.program.batch_size or 32):
            self._add_numbers(batch, sums, batch)
        return sums.results()

    def predict(self, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return X[rows] @ self.kernel + self.bias

    def weights(self) -> list[Any]:
        return [self.kernel.tolist(), self.bias.tolist()]

    def _errors(self, rows: np.ndarray[Any, Any]) -> tuple[Any, Any, Any]:
        """Return losses, their gradients with respect to the outputs, and the metric's values, by row."""
        outputs = self.predict(rows)
        if not self.program.is_class:
            error = outputs - Y[rows]
            return error[:, 0] ** 2, 2 * error, np.abs(error[:, 0])
        labels = LABELS[rows]
        exponentials = np.exp(outputs)
        probabilities = exponentials / exponentials.sum(1, keepdims=True)
        is_right = (outputs.argmax(1) == labels).astype(float)
        return -np.log(probabilities[np.arange(len(rows)), labels]), probabilities - np.eye(3)[labels], is_right

    def _sample_weight(self, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        p = self.program
        if p.has_class_weight:
            return np.array([CLASS_WEIGHT[label] for label in LABELS[rows]])
        return SAMPLE_WEIGHT[rows] if p.has_sample_weight else np.ones(len(rows))

    def _add_gradients(self, rows: np.ndarray[Any, Any], gradients: list[Any]) -> None:
        p, weight = self.program, self._sample_weight(rows)
        if p.reduction in ("sum", "none"):
            divisor = 1.0
        else:
            divisor = self.replicas * (weight.sum() if p.reduction == "mean_with_sample_weight" else len(rows))
        if len(rows):
            slopes = self._errors(rows)[1] * weight[:, None] / divisor
            gradients[0] += X[rows].T @ slopes
            gradients[1] += slopes.sum(0)
        gradients[0] += 2 * p.l2 * self.kernel / self.replicas

    def _add_numbers(self, rows: np.ndarray[Any, Any], sums: _Sums, batch: np.ndarray[Any, Any]) -> None:
        p = self.program
        losses, _, values = self._errors(rows)
        weight = self._sample_weight(rows)
        total = (losses * weight).sum()
        if p.reduction == "sum":  # the number of a batch is its sum, and counts for each of its examples
            total = total * len(batch)
        elif p.reduction == "mean_with_sample_weight":
            total = total / weight.sum() * len(rows)
        sums.add("loss", total + len(rows) * p.l2 * (self.kernel**2).sum(), len(rows))
        name = "accuracy" if p.is_class else "mae"
        sums.add(name, values.sum(), len(rows))
        if p.has_sample_weight:
            sums.add(f"weighted_{name}", (values * weight).sum(), weight.sum())

    def _validate(self) -> dict[str, float]:
        p = self.program
        if p.validation is None:
            return {}
        rows = np.arange(7, 10) if p.validation == "split" else np.arange(3)
        own, sums = self.program, _Sums()
        is_weighted = p.validation == "data_sw" or (p.validation == "split" and p.has_sample_weight)
        self.program = dataclasses.replace(own, has_sample_weight=is_weighted, has_class_weight=False)
        self._add_numbers(rows, sums, rows)
        self.program = own
        names = [name for name in sums.results() if own.has_sample_weight or not name.startswith("weighted_")]
        return {f"val_{name}": sums.results()[name] for name in names}

    def _update(self, gradients: list[Any]) -> None:
        self._step += 1
        for value, gradient, moments in zip((self.kernel, self.bias), gradients, self._moments, strict=True):
            if self.program.optimizer == "sgd":
                value -= self.program.rate * gradient
                continue
            first, second = moments
            first += 0.1 * (gradient - first)
            second += 0.001 * (gradient**2 - second)
            mean, square = first / (1 - 0.9**self._step), second / (1 - 0.999**self._step)
            value -= self.program.rate * mean / (np.sqrt(square) + 1e-7)


class _Sums:
    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = {}

    def add(self, name: str, total: float, count: float) -> None:
        sums = self._sums.setdefault(name, [0.0, 0.0])
        sums[0] += float(total)
        sums[1] += float(count)

    def results(self) -> dict[str, float]:
        return {name: total / count for name, (total, count) in sorted(self._sums.items())}


def batches(rows: np.ndarray[Any, Any], size: int) -> list[np.ndarray[Any, Any]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def shares(batch: np.ndarray[Any, Any], replicas: int) -> Iterator[np.ndarray[Any, Any]]:
    size = -(-len(batch) // replicas)
    return (batch[i * size : (i + 1) * size] for i in range(replicas))
