"""Brings what a head is given to the shapes that it computes with, or says what does not fit; and tf's names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchstrategy.errors import InvalidArgumentError
from torchstrategy.estimator.feature_column.numeric import NumericColumn
from torchstrategy.estimator.model_fn import argument_names
from torchstrategy.losses.loss import Reduction

__all__ = [
    "MetricKeys",
    "PredictionKeys",
    "all_class_ids",
    "all_class_names",
    "as_logits",
    "check_keys",
    "check_label_range",
    "check_loss_fn",
    "check_reduction",
    "check_vocabulary",
    "class_names",
    "column_key",
    "example_weights",
    "label_ids",
    "label_tensor",
    "names_of",
]


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


def check_reduction(loss_reduction: Any) -> Reduction:
    """Return ``SUM`` or ``SUM_OVER_BATCH_SIZE``.

    Raises:
        ValueError: it is none of tf's reductions that give a number.
    """
    try:
        reduction = Reduction.parse(loss_reduction)
    except ValueError:
        reduction = Reduction.NONE
    if reduction in (Reduction.NONE, Reduction.MEAN_WITH_SAMPLE_WEIGHT):
        raise ValueError(
            f"Invalid loss_reduction: {loss_reduction!r}. A head takes ts.losses.Reduction.SUM or SUM_OVER_BATCH_SIZE."
        )
    return Reduction.SUM if reduction is Reduction.SUM else Reduction.SUM_OVER_BATCH_SIZE


def check_loss_fn(loss_fn: Callable[..., Any]) -> None:
    """Check the arguments of a program's loss function.

    Raises:
        ValueError: it does not take labels and logits, or takes something unknown.
    """
    names = argument_names(loss_fn)
    if missing := {"labels", "logits"} - names:
        raise ValueError(f"loss_fn must have the argument {', '.join(sorted(missing))}. It has {sorted(names)}.")
    if unknown := names - {"labels", "logits", "features", "loss_reduction"}:
        raise ValueError(
            f"loss_fn has unexpected arguments {sorted(unknown)}. It may have labels, logits, features and "
            "loss_reduction."
        )


def check_vocabulary(label_vocabulary: Sequence[str] | None) -> tuple[str, ...] | None:
    """Return the vocabulary as a tuple.

    Raises:
        ValueError: it is no list or tuple, or a label is there twice.
    """
    if label_vocabulary is None:
        return None
    if not isinstance(label_vocabulary, (list, tuple)):
        raise ValueError(
            f"label_vocabulary should be a list or a tuple of strings. Received: {type(label_vocabulary).__name__}"
        )
    if len(set(label_vocabulary)) < len(label_vocabulary):
        raise ValueError(f"label_vocabulary must have each label once. Received: {label_vocabulary!r}")
    return tuple(label_vocabulary)


def as_logits(logits: Any, dimension: int) -> Tensor:
    """Return logits ``[batch, ..., dimension]`` in at least ``float32``.

    Raises:
        ValueError: they have another shape.
    """
    if not isinstance(logits, Tensor):
        logits = torch.as_tensor(logits)
    if logits.ndim < 2 or logits.shape[-1] != dimension:
        raise ValueError(
            f"logits must have the shape [batch, ..., logits_dimension], here [..., {dimension}]. Received: "
            f"{tuple(logits.shape)}"
        )
    checked: Tensor = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return checked


def label_tensor(labels: Any, logits: Tensor, dimension: int) -> Tensor:
    """Return labels that are numbers, in the shape of the logits but for the last dimension, on their device.

    Raises:
        ValueError: there are none, they are no numbers, or have another shape.
    """
    _check_present(labels)
    if _is_text(labels):
        raise ValueError("The labels are strings. Give label_vocabulary= with all of them, or numbers as labels.")
    if isinstance(labels, Tensor) and labels.layout is not torch.strided:
        raise ValueError("The labels are a sparse tensor. Give dense ones: labels.to_dense().")
    labels = torch.as_tensor(labels, device=logits.device)
    if labels.ndim == logits.ndim - 1:
        labels = labels.unsqueeze(-1)
    _check_label_shape(tuple(labels.shape), logits, dimension)
    checked: Tensor = labels
    return checked


def label_ids(labels: Any, logits: Tensor, vocabulary: Sequence[str]) -> Tensor:
    """Return the places of labels that are strings in their vocabulary, ``[batch, ..., 1]``.

    Raises:
        ValueError: there are none, they are no strings or none of the vocabulary, or have another shape.
    """
    _check_present(labels)
    if not _is_text(labels):
        kind = labels.dtype if isinstance(labels, (Tensor, np.ndarray)) else type(labels).__name__
        raise ValueError(
            f"With label_vocabulary, labels must be strings, such as a NumPy array of str. Received: {kind}"
        )
    texts = np.asarray(labels)
    places = {label: place for place, label in enumerate(vocabulary)}
    ids = [places.get(_text(label), -1) for label in texts.reshape(-1).tolist()]
    if -1 in ids:
        unknown = _text(texts.reshape(-1)[ids.index(-1)])
        raise ValueError(f"The label {unknown!r} is not in label_vocabulary, which is {list(vocabulary)!r:.500}.")
    made = torch.tensor(ids, dtype=torch.int64, device=logits.device).reshape(texts.shape)
    return label_tensor(made, logits, 1)


def check_label_range(labels: Tensor, n_classes: int) -> Tensor:
    """Return labels, if all are at least 0 and at most ``n_classes - 1``.

    Raises:
        InvalidArgumentError: one is not.
    """
    wrong = ~((labels >= 0) & (labels <= n_classes - 1))
    if wrong.any():
        raise InvalidArgumentError(
            f"Labels must be in [0, n_classes - 1], here [0, {n_classes - 1}]. Received: {labels[wrong][0].item()}"
        )
    return labels


def example_weights(
    features: Any, weight_column: Any, logits: Tensor, *, allow_per_logit_weights: bool = False
) -> Tensor | None:
    """Return the weights of examples, ``[batch, ..., 1]`` or as the logits; ``None`` if there is no column.

    Raises:
        ValueError: the feature is missing, is no number, or has another shape.
        TypeError: the column is neither a name nor a numeric column.
    """
    if weight_column is None:
        return None
    key = column_key(weight_column)
    if not isinstance(features, Mapping) or key not in features:
        raise ValueError(f"The weight column {key!r} is not among the features. Let input_fn give features[{key!r}].")
    weights = torch.as_tensor(features[key], device=logits.device)
    if weights.is_complex() or weights.dtype is torch.bool:
        raise ValueError(f"Weights must be numbers. Received features[{key!r}] of {weights.dtype}.")
    weights = weights.to(logits.dtype)
    if weights.ndim == logits.ndim - 1:
        weights = weights.unsqueeze(-1)
    normalizer_fn = getattr(weight_column, "normalizer_fn", None)
    if normalizer_fn is not None:
        weights = normalizer_fn(weights)
    fitting = {(*logits.shape[:-1], 1)} | ({tuple(logits.shape)} if allow_per_logit_weights else set())
    if tuple(weights.shape) not in fitting:
        raise ValueError(
            f"Weights must have the shape {' or '.join(map(str, sorted(fitting)))}, as the logits are "
            f"{tuple(logits.shape)}. Received features[{key!r}] of {tuple(weights.shape)}."
        )
    return weights


def column_key(weight_column: Any) -> str:
    """Return the name of the feature that has the weights.

    Raises:
        TypeError: the column is neither a name nor a numeric column.
    """
    if isinstance(weight_column, str):
        return weight_column
    if isinstance(weight_column, NumericColumn):
        return weight_column.key
    raise TypeError(
        f"weight_column must be the name of a feature or a numeric_column. Received: {type(weight_column).__name__}"
    )


def _check_present(labels: Any) -> None:
    if labels is None:
        raise ValueError("There are no labels. Let input_fn return pairs (features, labels).")
    if isinstance(labels, Mapping):
        raise ValueError(
            f"The labels are a dictionary of {sorted(map(str, labels))}. A head has one tensor of labels: let input_fn "
            "return that one."
        )


def _check_label_shape(shape: tuple[int, ...], logits: Tensor, dimension: int) -> None:
    if len(shape) < 2 or shape[-1] != dimension or shape[:-1] != tuple(logits.shape[:-1]):
        expected = (*logits.shape[:-1], dimension)
        raise ValueError(
            f"Labels must have the shape {expected}{f' or {expected[:-1]}' if dimension == 1 else ''}. "
            f"Received: {shape}. One-hot labels are no class numbers: check n_classes or label_dimension, and what "
            "input_fn returns."
        )


def _is_text(labels: Any) -> bool:
    if isinstance(labels, Tensor):
        return False
    return np.asarray(labels).dtype.kind in "OSU"


def _text(label: Any) -> str:
    return label.decode() if isinstance(label, bytes) else str(label)
