"""Heads: the loss, the predictions and the metrics of a task, on top of a network's logits."""

from torchstrategy.estimator.heads.class_heads import BinaryClassHead, MultiClassHead
from torchstrategy.estimator.heads.head import Head
from torchstrategy.estimator.heads.regression_heads import LogisticRegressionHead, PoissonRegressionHead, RegressionHead

__all__ = [
    "BinaryClassHead",
    "Head",
    "LogisticRegressionHead",
    "MultiClassHead",
    "PoissonRegressionHead",
    "RegressionHead",
]
