"""Programs for ``Model.fit`` that tests run under every strategy."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import torchstrategy as ts

CLASS_WEIGHT = {0: 1.0, 1: 2.5, 2: 0.5}
L2 = 0.05


@dataclass(frozen=True)
class FitProgram:
    """What is trained, and how; ``task`` is a key of ``TASKS``, ``weights`` "sample", "class" or ``None``,
    and ``reads`` says what kind of data it is: "arrays", "examples", "loader" or "pipeline".
    """

    task: str = "regression"
    loss: str = "mse"
    optimizer: str = "sgd"
    dtype: torch.dtype = torch.float64
    num_examples: int = 13
    batch_size: int = 5
    epochs: int = 2
    weights: str | None = None
    validation_split: float = 0.0
    is_regularized: bool = False
    adds_loss: bool = False
    accumulation: int = 1
    steps_per_execution: int = 1
    shuffle: bool = False
    reads: str = "arrays"

    def __repr__(self) -> str:
        changed = [f for f in fields(self) if getattr(self, f.name) != f.default]
        return f"FitProgram({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in changed)})"


def huber(y_true: Tensor, y_pred: Tensor) -> Tensor:
    """A user's loss: one number for each example."""
    return F.huber_loss(y_pred, y_true, reduction="none").mean(-1)


def weighted_cross_entropy(dtype: torch.dtype) -> nn.Module:
    return nn.CrossEntropyLoss(weight=torch.tensor([0.5, 1.0, 2.0], dtype=dtype))


class Net(nn.Module):
    """Two layers, whose output has the shape that the task asks for."""

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, ends_in_sigmoid: bool = False, adds_loss: bool = False
    ):
        super().__init__()
        self.hidden = nn.Linear(4, 6, dtype=dtype)
        self.last = nn.Linear(6, math.prod(shape), dtype=dtype)
        self.shape, self.ends_in_sigmoid, self.adds_loss = shape, ends_in_sigmoid, adds_loss

    def forward(self, x: Tensor) -> Tensor:
        if self.adds_loss:
            ts.add_loss(0.1 * self.last.weight.abs().sum())
        out = self.last(torch.tanh(self.hidden(x))).reshape(-1, *self.shape)
        return torch.sigmoid(out) if self.ends_in_sigmoid else out


class TwoHeads(nn.Module):
    """Two inputs by name, two outputs by name."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.hidden = nn.Linear(4, 6, dtype=dtype)
        self.value = nn.Linear(6, 1, dtype=dtype)
        self.label = nn.Linear(6, 3, dtype=dtype)

    def forward(self, left: Tensor, right: Tensor) -> dict[str, Tensor]:
        features = torch.tanh(self.hidden(torch.cat([left, right], 1)))
        return {"value": self.value(features), "label": self.label(features)}


@dataclass(frozen=True)
class Task:
    """How a task is compiled, and its losses: name -> (``compile``'s for a dtype, per example, divisor of a batch)."""

    make: Callable[[FitProgram], nn.Module]
    losses: dict[str, tuple[Any, Any, Any]]
    metrics: Callable[[], Any]
    weighted_metrics: Callable[[], Any] = lambda: None
    loss_weights: Any = None


def _count(y: Tensor, weight: Tensor) -> float:
    return float(weight.numel())


def _total_weight(y: Tensor, weight: Tensor) -> Tensor:
    return weight.sum()


def _squares(y: Tensor, out: Tensor) -> Tensor:
    return (out - y).square().mean(-1)


def _cross_entropy(y: Tensor, out: Tensor, **settings: Any) -> Tensor:
    return F.cross_entropy(out, y, reduction="none", **settings)


def _class_factors(y: Tensor) -> Tensor:
    return torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)[y]


REGRESSION_LOSSES = {
    "mse": (lambda dtype: "mse", _squares, _count),
    "torch mse": (lambda dtype: nn.MSELoss(), _squares, _count),
    "mws": (lambda dtype: ts.losses.MeanSquaredError(reduction="mean_with_sample_weight"), _squares, _total_weight),
    "sum": (lambda dtype: ts.losses.MeanSquaredError(reduction="sum"), _squares, lambda y, weight: 1.0),
    "function": (lambda dtype: huber, lambda y, out: F.huber_loss(out, y, reduction="none").mean(1), _count),
    "torch function": (
        lambda dtype: F.smooth_l1_loss,
        lambda y, out: F.smooth_l1_loss(out, y, reduction="none").mean(1),
        _count,
    ),
}
CLASS_LOSSES = {
    "logits": (lambda dtype: ts.losses.SparseCategoricalCrossentropy(from_logits=True), _cross_entropy, _count),
    "torch": (lambda dtype: nn.CrossEntropyLoss(), _cross_entropy, _count),
    "smoothed": (
        lambda dtype: nn.CrossEntropyLoss(label_smoothing=0.2),
        functools.partial(_cross_entropy, label_smoothing=0.2),
        _count,
    ),
    "ignoring": (
        lambda dtype: nn.CrossEntropyLoss(ignore_index=1),
        functools.partial(_cross_entropy, ignore_index=1),
        lambda y, weight: (y != 1).sum(),
    ),
    "by class": (
        weighted_cross_entropy,
        lambda y, out: _cross_entropy(y, out) * _class_factors(y).to(out),
        lambda y, weight: _class_factors(y).sum(),
    ),
}
BINARY_LOSSES = {
    "probabilities": (
        lambda dtype: "binary_crossentropy",
        lambda y, out: F.binary_cross_entropy(out, y, reduction="none").mean(1),
        _count,
    ),
    "torch bce": (
        lambda dtype: nn.BCELoss(),
        lambda y, out: F.binary_cross_entropy(out, y, reduction="none").mean(1),
        _count,
    ),
}
SEQUENCE_LOSSES = {name: REGRESSION_LOSSES[name] for name in ("mse", "mws", "torch mse")}
IMAGE_LOSSES = {name: CLASS_LOSSES[name] for name in ("torch", "ignoring", "by class")}
TWO_LOSSES = {
    "both": (
        lambda dtype: {"value": "mse", "label": nn.CrossEntropyLoss()},
        {"value": _squares, "label": _cross_entropy},
        {"value": _count, "label": _count},
    ),
    "unlike divisors": (
        lambda dtype: {"value": REGRESSION_LOSSES["mws"][0](dtype), "label": CLASS_LOSSES["by class"][0](dtype)},
        {"value": _squares, "label": CLASS_LOSSES["by class"][1]},
        {"value": _total_weight, "label": CLASS_LOSSES["by class"][2]},
    ),
}
TASKS = {
    "regression": Task(
        lambda p: Net((1,), p.dtype, adds_loss=p.adds_loss), REGRESSION_LOSSES, lambda: ["mae"], lambda: ["mae"]
    ),
    "classes": Task(
        lambda p: Net((3,), p.dtype, adds_loss=p.adds_loss),
        CLASS_LOSSES,
        lambda: [
            "accuracy",
            ts.metrics.MeanIoU(3, sparse_y_pred=False),
            torchmetrics.F1Score("multiclass", num_classes=3, average="macro"),
        ],
        lambda: ["accuracy"],
    ),
    "binary": Task(
        lambda p: Net((1,), p.dtype, ends_in_sigmoid=True, adds_loss=p.adds_loss),
        BINARY_LOSSES,
        lambda: ["accuracy", ts.metrics.AUC()],
        lambda: [ts.metrics.AUC(name="weighted_auc"), ts.metrics.Precision(name="weighted_precision")],
    ),
    "sequences": Task(lambda p: Net((2, 1), p.dtype), SEQUENCE_LOSSES, lambda: ["mae"], lambda: ["mae"]),
    "images": Task(
        lambda p: Net((3, 2), p.dtype), IMAGE_LOSSES, lambda: [ts.metrics.MeanIoU(3, sparse_y_pred=False, axis=1)]
    ),
    "two": Task(
        lambda p: TwoHeads(p.dtype),
        TWO_LOSSES,
        lambda: {"value": ["mae"], "label": ["accuracy"]},
        loss_weights={"value": 0.3, "label": 1.5},
    ),
}
OPTIMIZERS: dict[str, Any] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1),
    "momentum": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": functools.partial(torch.optim.Adam, lr=0.02),
}


def make_data(p: FitProgram) -> tuple[Any, Any, Tensor | None]:
    """Return inputs, labels and sample weights, some of which are 0."""
    generator = torch.Generator().manual_seed(p.num_examples)
    x = torch.randn(p.num_examples, 4, dtype=p.dtype, generator=generator)
    value = x[:, :1] * 2 - x[:, 1:2].abs() + 0.5
    label = torch.randint(3, (p.num_examples,), generator=generator)
    has_elements = p.task in ("sequences", "images")  # which have weights of their own
    shape = (p.num_examples, 2) if has_elements else (p.num_examples,)
    weight = torch.randint(4, shape, generator=generator).to(p.dtype) / 2
    y = {
        "regression": value,
        "classes": label,
        "binary": (value > 0).to(p.dtype),
        "sequences": torch.stack([value, -value.abs()], 1),
        "images": torch.stack([label, label.flip(0)], 1),
    }.get(p.task)
    sample_weight = weight if p.weights == "sample" else None
    if p.task == "two":
        return {"left": x[:, :1], "right": x[:, 1:]}, {"value": value, "label": label}, sample_weight
    return x, y, sample_weight


def make_net(p: FitProgram) -> nn.Module:
    torch.manual_seed(7)
    return TASKS[p.task].make(p)


def fit(strategy: ts.Strategy, p: FitProgram) -> dict[str, Any]:
    """Train, evaluate and predict by ``Model``; return all numbers."""
    task = TASKS[p.task]
    with strategy.scope():
        net = make_net(p)
        if p.is_regularized:
            ts.regularize(net, "hidden.weight", ts.regularizers.L2(L2))
        model = ts.Model(net)
    loss = task.losses[p.loss][0](p.dtype)
    model.compile(
        OPTIMIZERS[p.optimizer],
        loss,
        loss_weights=task.loss_weights,
        metrics=task.metrics(),
        weighted_metrics=task.weighted_metrics() if p.weights else None,
        steps_per_execution=p.steps_per_execution,
        gradient_accumulation_steps=p.accumulation,
    )
    x, y, sample_weight = make_data(p)
    torch.manual_seed(11)
    data = data_arguments(p, x, y, sample_weight)
    history = model.fit(
        **data,
        epochs=p.epochs,
        validation_split=p.validation_split,
        class_weight=CLASS_WEIGHT if p.weights == "class" else None,
        shuffle=p.shuffle,
        verbose=0,
    )
    result = model.evaluate(**data, return_dict=True, verbose=0)
    predictions = model.predict(x, batch_size=p.batch_size, verbose=0)
    return {
        "history": history.history,
        "evaluate": result,
        "predictions": {k: v.tolist() for k, v in predictions.items()} if p.task == "two" else predictions.tolist(),
        "weights": [parameter.detach().flatten().tolist() for parameter in net.parameters()],
    }


def data_arguments(p: FitProgram, x: Any, y: Any, sample_weight: Tensor | None) -> dict[str, Any]:
    """Return the arguments of ``fit`` and ``evaluate`` that are about data."""
    if p.reads == "arrays":
        return {"x": x, "y": y, "sample_weight": sample_weight, "batch_size": p.batch_size}
    parts = (x, y) if sample_weight is None else (x, y, sample_weight)
    if p.reads == "pipeline":
        return {"x": ts.data.Dataset.from_tensor_slices(parts).batch(p.batch_size)}
    if p.reads == "examples":
        return {"x": TensorDataset(*parts), "batch_size": p.batch_size}
    return {"x": DataLoader(TensorDataset(*parts), p.batch_size, shuffle=p.shuffle)}


def fit_on(devices: Sequence[str] | str | None, p: FitProgram) -> dict[str, Any]:
    """``fit`` under a new strategy: devices of a ``MirroredStrategy``, or a strategy's name."""
    with default_dtype(p.dtype):
        return fit(new_strategy(devices), p)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set torch's default dtype, in which metrics give their results."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def new_strategy(devices: Sequence[str] | str | None) -> ts.Strategy:
    if devices == "default":
        return ts.get_strategy()
    if devices == "one device":
        return ts.OneDeviceStrategy("cpu:0")
    if devices == "concurrent":
        return ts.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"], concurrent=True)
    if devices == "central":
        return ts.experimental.CentralStorageStrategy(compute_devices=["cpu:0", "cpu:1"], parameter_device="cpu:0")
    if isinstance(devices, str):  # "workers 2": a process of a MultiWorkerMirroredStrategy with 2 replicas each
        replicas = int(devices.split()[1])
        return ts.MultiWorkerMirroredStrategy(devices=[f"cpu:{i}" for i in range(replicas)])
    return ts.MirroredStrategy(devices)
