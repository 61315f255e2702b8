"""Estimators whose models are made of feature columns."""

from torchstrategy.estimator.canned.dnn import DNNClassifier, DNNEstimator, DNNRegressor
from torchstrategy.estimator.canned.dnn_linear_combined import (
    DNNLinearCombinedClassifier,
    DNNLinearCombinedEstimator,
    DNNLinearCombinedRegressor,
)
from torchstrategy.estimator.canned.linear import (
    BaselineClassifier,
    BaselineEstimator,
    BaselineRegressor,
    LinearClassifier,
    LinearEstimator,
    LinearRegressor,
)

__all__ = [
    "BaselineClassifier",
    "BaselineEstimator",
    "BaselineRegressor",
    "DNNClassifier",
    "DNNEstimator",
    "DNNLinearCombinedClassifier",
    "DNNLinearCombinedEstimator",
    "DNNLinearCombinedRegressor",
    "DNNRegressor",
    "LinearClassifier",
    "LinearEstimator",
    "LinearRegressor",
]
