"""The programs of ``fit_programs`` written out in plain torch: what ``Model.fit`` must give."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.fit.fit_programs import CLASS_WEIGHT, L2, OPTIMIZERS, TASKS, FitProgram, make_data, make_net


def plain_fit(p: FitProgram) -> dict[str, Any]:
    """What ``fit`` must give, without the library: the loss of a step is that of all its examples at once."""
    net = make_net(dataclasses.replace(p, adds_loss=False))  # it is added here
    optimizer = OPTIMIZERS[p.optimizer](net.parameters())
    x, y, weight = make_data(p)
    if weight is None:
        shape = (p.num_examples, 2) if p.task in ("sequences", "images") else (p.num_examples,)
        weight = torch.ones(shape, dtype=p.dtype)
    num_train = int(p.num_examples * (1 - p.validation_split))
    history: dict[str, list[float]] = {}
    class_factors = torch.tensor([CLASS_WEIGHT[k] for k in range(3)], dtype=p.dtype)
    train_weight = class_factors[y] if p.weights == "class" else weight
    for _ in range(p.epochs):
        sums = _Sums()
        batches = _ranges(0, num_train, p.batch_size)
        for start in range(0, len(batches), p.accumulation):
            window = batches[start : start + p.accumulation]
            rows = torch.cat(window)
            optimizer.zero_grad()
            loss = _add_numbers(p, net, (x, y, train_weight), rows, sums)
            loss.backward()
            optimizer.step()
        numbers = sums.results(p.weights is not None)
        if p.validation_split:
            rest = _evaluated(p, net, (x, y, weight), _ranges(num_train, p.num_examples, p.batch_size))
            numbers |= {f"val_{name}": value for name, value in rest.items()}
        for name, value in numbers.items():
            history.setdefault(name, []).append(value)
    with torch.no_grad():
        outputs = _call(net, x, torch.arange(p.num_examples))
    return {
        "history": history,
        "evaluate": _evaluated(p, net, (x, y, weight), _ranges(0, p.num_examples, p.batch_size)),
        "predictions": {k: v.tolist() for k, v in outputs.items()} if p.task == "two" else outputs.tolist(),
        "weights": [parameter.detach().flatten().tolist() for parameter in net.parameters()],
    }


def _ranges(start: int, stop: int, size: int) -> list[Tensor]:
    return list(torch.arange(start, stop).split(size))


def _call(net: nn.Module, x: Any, rows: Tensor) -> Any:
    return net(**{k: v[rows] for k, v in x.items()}) if isinstance(x, dict) else net(x[rows])


def _evaluated(p: FitProgram, net: nn.Module, data: Any, batches: list[Tensor]) -> dict[str, float]:
    sums = _Sums()
    with torch.no_grad():
        for rows in batches:
            _add_numbers(p, net, data, rows, sums)
    return sums.results(p.weights is not None)


def _add_numbers(p: FitProgram, net: Any, data: Any, rows: Tensor, sums: _Sums) -> Tensor:
    """Return the loss of the rows, with a graph, and add it and the metrics to the sums."""
    x, y, weight = data
    outputs = _call(net, x, rows)
    _, per_example, divisor = TASKS[p.task].losses[p.loss]
    w = weight[rows]
    seen = {k: v.detach() for k, v in outputs.items()} if p.task == "two" else outputs.detach()
    if p.task == "two":
        labels = {k: v[rows] for k, v in y.items()}
        parts = {
            k: _quotient((per_example[k](labels[k], outputs[k]) * w).sum(), divisor[k](labels[k], w)) for k in labels
        }
        for name, value in parts.items():
            sums.add(f"{name}_loss", value.item() * len(rows), len(rows))
        loss = 0.3 * parts["value"] + 1.5 * parts["label"]
        sums.add("value_mae", float((seen["value"] - labels["value"]).abs().sum()), len(rows))
        sums.add("label_accuracy", float((seen["label"].argmax(1) == labels["label"]).sum()), len(rows))
    else:
        labels = y[rows]
        loss = _quotient((per_example(labels, outputs) * w).sum(), divisor(labels, w))
        if p.task in ("regression", "sequences"):
            name, values = "mae", (seen - labels).abs().mean(-1)
        elif p.task in ("classes", "images"):
            name, values = "accuracy", (seen.argmax(1) == labels).to(w)
        else:
            name, values = "accuracy", ((seen > 0.5) == (labels > 0.5)).to(w).mean(1)
        if p.task != "images":
            sums.add(name, float(values.sum()), values.numel())
        if p.task not in ("images", "binary"):  # whose weighted metrics are others
            sums.add(f"weighted_{name}", float((values * w).sum()), float(w.sum()))
    if p.is_regularized:
        loss = loss + L2 * net.hidden.weight.square().sum()
    if p.adds_loss:
        loss = loss + 0.1 * net.last.weight.abs().sum()
    sums.add("loss", loss.item() * len(rows), len(rows))
    return loss


def _quotient(total: Any, divisor: Any) -> Any:
    """A mean of nothing, such as of examples that all weigh 0, is 0."""
    return total / divisor if float(divisor) else total * 0.0


class _Sums:
    def __init__(self) -> None:
        self._sums: dict[str, np.ndarray[Any, Any]] = {}

    def add(self, name: str, total: float, count: float) -> None:
        self._sums[name] = self._sums.get(name, np.zeros(2)) + np.array([total, count])

    def results(self, has_weights: bool) -> dict[str, float]:
        names = [name for name in self._sums if has_weights or not name.startswith("weighted_")]
        return {name: float(_quotient(*self._sums[name])) for name in names}
