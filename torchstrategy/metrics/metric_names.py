"""Metrics by the names that tf.keras gives them, and those that choose by the shapes what they count."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from torchstrategy import losses
from torchstrategy.base.names import find, snake_case
from torchstrategy.metrics import auc, classification, confusion, iou, mean, regression_metrics
from torchstrategy.metrics.classification import equal_above, in_top_k_dense, in_top_k_sparse
from torchstrategy.metrics.mean import MeanMetricWrapper, value_of_loss
from torchstrategy.metrics.metric_inputs import as_pair

__all__ = ["REMEDY", "accuracy_by_shapes", "crossentropy_by_shapes", "get", "with_logits"]

REMEDY = (
    "Besides names, metrics can be objects of ts.metrics or torchmetrics, and functions f(y_true, y_pred) that return "
    "one value for each example. Names of tf.keras that need arguments are classes of ts.metrics."
)
_ALIASES = {
    "bce": "binary_crossentropy",
    "kld": "kl_divergence",
    "kullback_leibler_divergence": "kl_divergence",
    "log_cosh": "log_cosh_error",
    "logcosh": "log_cosh_error",
    "mae": "mean_absolute_error",
    "mape": "mean_absolute_percentage_error",
    "mse": "mean_squared_error",
    "msle": "mean_squared_logarithmic_error",
    "rmse": "root_mean_squared_error",
}
_CROSSENTROPIES = (
    losses.binary_crossentropy,
    losses.categorical_crossentropy,
    losses.sparse_categorical_crossentropy,
)


def get(identifier: Any) -> Any:
    """Return the metric that a name stands for.

    Args:
        identifier: a class's name, such as ``"MeanAbsoluteError"``, the same in snake case, or for short ``"mae"``, in
            any letter case. ``None`` and what can be called are returned as they are.

    Returns:
        A new metric, made with default arguments; made in a strategy's scope, it belongs to the strategy.

    Raises:
        ValueError: the name is not known.
        TypeError: ``identifier`` is neither a name nor callable.

    Example:
        >>> metric = ts.metrics.get("mae")
        >>> metric.update_state(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 5.0]))
        >>> metric.name, metric.result()
        ('mean_absolute_error', tensor(1.5000))
    """
    if isinstance(identifier, str):
        return find(identifier, _MAKERS, "metrics=", REMEDY)()
    if identifier is None or callable(identifier):
        return identifier
    raise TypeError(f"A metric must be a name or callable. Received: {identifier!r} of type "
                    f"{type(identifier).__name__}. {REMEDY}")  # fmt: skip


def with_logits(metric: Any) -> Any:
    """Return a metric that was made by name for predictions that are logits, if it can be one of them.

    Args:
        metric: what ``get`` returned for a name.
    """
    if isinstance(metric, classification.BinaryAccuracy):
        return classification.BinaryAccuracy(threshold=0.0)
    if isinstance(metric, auc.AUC):
        return auc.AUC(from_logits=True)
    if isinstance(metric, MeanMetricWrapper) and metric.fn_kwargs.get("loss") in _CROSSENTROPIES:
        metric.fn_kwargs["from_logits"] = True
    return metric


def accuracy_by_shapes(name: str, *, from_logits: bool = False, axis: int = -1) -> MeanMetricWrapper:
    """Return tf.keras' ``"accuracy"``: binary for one output, sparse for integer labels, categorical for one-hot ones.

    Args:
        name: the metric's name.
        from_logits: predictions are logits; a binary one above 0 means 1.
        axis: the classes' axis.
    """
    return MeanMetricWrapper(_accuracy, name, threshold=0.0 if from_logits else 0.5, axis=axis)


def crossentropy_by_shapes(name: str, *, from_logits: bool = False, axis: int = -1) -> MeanMetricWrapper:
    """Return tf.keras' ``"crossentropy"``, which chooses as ``"accuracy"`` does.

    Args:
        name: the metric's name.
        from_logits: predictions are logits.
        axis: the classes' axis.
    """
    return MeanMetricWrapper(_crossentropy, name, from_logits=from_logits, axis=axis)


def _accuracy(y_true: Any, y_pred: Any, threshold: float, axis: int) -> Tensor:
    labels, scores, kind = _with_classes_last(y_true, y_pred, axis)
    if kind == "binary":
        return equal_above(labels, scores, threshold)
    return in_top_k_sparse(labels, scores, None) if kind == "sparse" else in_top_k_dense(labels, scores, None)


def _crossentropy(y_true: Any, y_pred: Any, from_logits: bool, axis: int) -> Tensor:  # noqa: FBT001
    labels, scores, kind = _with_classes_last(y_true, y_pred, axis)
    if kind == "binary":
        return value_of_loss(labels, scores, losses.binary_crossentropy, from_logits=from_logits)
    fn = losses.sparse_categorical_crossentropy if kind == "sparse" else losses.categorical_crossentropy
    return fn(labels, scores, from_logits=from_logits)


def _with_classes_last(y_true: Any, y_pred: Any, axis: int) -> tuple[Tensor, Tensor, str]:
    """Return labels, predictions, and what tf.keras takes them for."""
    labels, scores = as_pair(y_true, y_pred)
    if scores.ndim > 2 and axis not in (-1, scores.ndim - 1):
        labels = labels.movedim(axis, -1) if labels.ndim == scores.ndim else labels
        scores = scores.movedim(axis, -1)
    if scores.ndim < 2 or scores.shape[-1] == 1:
        return labels, scores, "binary"
    is_sparse = labels.ndim < scores.ndim or labels.shape[-1] == 1
    return labels, scores, "sparse" if is_sparse else "categorical"


def _makers() -> dict[str, Callable[[], Any]]:
    found: dict[str, Callable[[], Any]] = {}
    for module in (auc, classification, confusion, iou, mean, regression_metrics):
        for name in module.__all__:
            cls = getattr(module, name)
            is_complete = inspect.isclass(cls) and cls not in (confusion.ConfusionMetric, mean.WeightedMean)
            # Those that need arguments are only reached as classes.
            if is_complete and not any(p.default is p.empty for p in inspect.signature(cls).parameters.values()):
                found[name] = found[snake_case(name)] = cls
    return found | {alias: found[name] for alias, name in _ALIASES.items()}


_MAKERS = _makers()
