"""Names of a head's metrics and predictions, which are tf.estimator's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["MetricKeys", "PredictionKeys", "all_class_ids", "all_class_names", "check_keys", "class_names", "names_of"]


def check_keys(keys: Sequence[str] | None, known: Iterable[str]) -> list[str]:
    """Return the keys that are asked for; all without an answer.

    Raises:
        ValueError: one is not known.
    """
    known = list(known)
    if not keys:
        return known
    if unknown := [key for key in keys if key not in known]:
        raise ValueError(f"There are no predictions {unknown}. The head has {known}.")
    return list(keys)


def class_names(ids: Tensor, vocabulary: Sequence[str] | None) -> np.ndarray[Any, Any]:
    """Return the names of classes as an array of strings in the shape of their ids."""
    numbers = ids.detach().cpu().reshape(-1).tolist()
    names = np.array([str(number) if vocabulary is None else vocabulary[number] for number in numbers], dtype=object)
    return names.reshape(tuple(ids.shape))


def all_class_ids(logits: Tensor, n_classes: int) -> Tensor:
    """Return the ids of all classes for each example, ``[batch, n_classes]``."""
    return torch.arange(n_classes, device=logits.device).expand(logits.shape[0], n_classes)


def all_class_names(logits: Tensor, n_classes: int, vocabulary: Sequence[str] | None) -> np.ndarray[Any, Any]:
    """Return the names of all classes for each example, an array ``[batch, n_classes]``."""
    names = np.array(names_of(n_classes, vocabulary), dtype=object)
    return np.broadcast_to(names, (len(logits), n_classes)).copy()


def names_of(n_classes: int, vocabulary: Sequence[str] | None) -> list[str]:
    """Return the names of all classes."""
    return [str(number) for number in range(n_classes)] if vocabulary is None else list(vocabulary)


class MetricKeys:
    """What ``evaluate`` returns under a head."""

    ACCURACY = "accuracy"
    ACCURACY_AT_THRESHOLD = "accuracy/positive_threshold_%f"
    ACCURACY_BASELINE = "accuracy_baseline"
    AUC = "auc"
    AUC_PR = "auc_precision_recall"
    LABEL_MEAN = "label/mean"
    LOSS_MEAN = "average_loss"
    LOSS_REGULARIZATION = "regularization_loss"
    PRECISION = "precision"
    PRECISION_AT_THRESHOLD = "precision/positive_threshold_%f"
    PREDICTION_MEAN = "prediction/mean"
    RECALL = "recall"
    RECALL_AT_THRESHOLD = "recall/positive_threshold_%f"


class PredictionKeys:
    """What ``predict`` returns under a head."""

    ALL_CLASSES = "all_classes"
    ALL_CLASS_IDS = "all_class_ids"
    CLASSES = "classes"
    CLASS_IDS = "class_ids"
    LOGISTIC = "logistic"
    LOGITS = "logits"
    PREDICTIONS = "predictions"
    PROBABILITIES = "probabilities"
