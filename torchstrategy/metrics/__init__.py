"""Metrics under tf's names, on top of torchmetrics, and what makes any torchmetrics metric right over replicas."""

from __future__ import annotations

import typing

from torchstrategy.base import later

if typing.TYPE_CHECKING:
    from torchstrategy.metrics.auc import AUC
    from torchstrategy.metrics.classification import (
        Accuracy,
        BinaryAccuracy,
        CategoricalAccuracy,
        SparseCategoricalAccuracy,
        SparseTopKCategoricalAccuracy,
        TopKCategoricalAccuracy,
    )
    from torchstrategy.metrics.confusion import (
        FalseNegatives,
        FalsePositives,
        Precision,
        Recall,
        TrueNegatives,
        TruePositives,
    )
    from torchstrategy.metrics.iou import IoU, MeanIoU
    from torchstrategy.metrics.mean import Mean, MeanMetricWrapper, Sum
    from torchstrategy.metrics.mean_errors import (
        MeanAbsoluteError,
        MeanAbsolutePercentageError,
        MeanSquaredError,
        RootMeanSquaredError,
    )
    from torchstrategy.metrics.metric import Metric
    from torchstrategy.metrics.metric_names import get

__all__ = [
    "AUC",
    "Accuracy",
    "BinaryAccuracy",
    "CategoricalAccuracy",
    "FalseNegatives",
    "FalsePositives",
    "IoU",
    "Mean",
    "MeanAbsoluteError",
    "MeanAbsolutePercentageError",
    "MeanIoU",
    "MeanMetricWrapper",
    "MeanSquaredError",
    "Metric",
    "Precision",
    "Recall",
    "RootMeanSquaredError",
    "SparseCategoricalAccuracy",
    "SparseTopKCategoricalAccuracy",
    "Sum",
    "TopKCategoricalAccuracy",
    "TrueNegatives",
    "TruePositives",
    "get",
]

_NAMES = {
    "auc": ("AUC",),
    "metric": ("Metric",),
    "classification": (
        "Accuracy",
        "BinaryAccuracy",
        "CategoricalAccuracy",
        "SparseCategoricalAccuracy",
        "SparseTopKCategoricalAccuracy",
        "TopKCategoricalAccuracy",
    ),
    "confusion": ("FalseNegatives", "FalsePositives", "Precision", "Recall", "TrueNegatives", "TruePositives"),
    "iou": ("IoU", "MeanIoU"),
    "mean": ("Mean", "MeanMetricWrapper", "Sum"),
    "metric_names": ("get",),
    "mean_errors": (
        "MeanAbsoluteError",
        "MeanAbsolutePercentageError",
        "MeanSquaredError",
        "RootMeanSquaredError",
    ),
}
_LATER = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names}

if not typing.TYPE_CHECKING:  # torchmetrics takes a second to import: only those who use it wait
    __getattr__, __dir__ = later.import_later(__name__, _LATER)
