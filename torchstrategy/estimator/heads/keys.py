"""Names of a head's metrics and predictions, which are tf.estimator's."""

from __future__ import annotations

__all__ = ["MetricKeys", "PredictionKeys"]


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
