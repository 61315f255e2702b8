"""Linear models of feature columns, and baselines that ignore the features."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from typing import Any

from torchstrategy.estimator.canned.networks import (
    BiasModule,
    Linear,
    MakeTrainOps,
    SumModule,
    as_columns,
    check_features,
    check_head,
    make_factory,
)
from torchstrategy.estimator.estimator import Estimator
from torchstrategy.estimator.feature_column.features import FeatureColumn
from torchstrategy.estimator.heads.class_heads import binary_or_multi_class_head
from torchstrategy.estimator.heads.head import Head
from torchstrategy.estimator.heads.regression_heads import RegressionHead
from torchstrategy.estimator.run_config import RunConfig
from torchstrategy.estimator.specs import EstimatorSpec, ModeKeys
from torchstrategy.estimator.warm_start import WarmStartSettings
from torchstrategy.losses.loss import Reduction

__all__ = [
    "BaselineClassifier",
    "BaselineEstimator",
    "BaselineRegressor",
    "LinearClassifier",
    "LinearEstimator",
    "LinearRegressor",
]

_BASELINE_LEARNING_RATE = 0.3


class BaselineEstimator(Estimator):
    """One bias for all examples, under any head; its name is ``baseline/bias``.

    Args:
        head: the loss, the predictions and the metrics.
        model_dir: see ``Estimator``.
        optimizer: ``"Adagrad"``, ``"Adam"``, ``"Ftrl"``, ``"RMSProp"`` or ``"SGD"``, with a learning rate of 0.3, or a
            class or function that makes an optimizer for parameters.
        config: see ``Estimator``.

    Raises:
        ValueError: the optimizer is refused.
        TypeError: ``head`` is no head.

    Example:
        >>> estimator = ts.estimator.BaselineEstimator(ts.estimator.PoissonRegressionHead())
        >>> estimator.train(lambda: ({"x": torch.ones(2)}, torch.ones(2)), steps=1).get_variable_value("baseline/bias")
        array([0.], dtype=float32)
    """

    def __init__(
        self,
        head: Head,
        model_dir: str | os.PathLike[str] | None = None,
        optimizer: Any = "Ftrl",
        config: RunConfig | None = None,
    ) -> None:
        check_head(head)
        make_optimizer = make_factory(optimizer, "optimizer", _BASELINE_LEARNING_RATE)

        def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
            module = BiasModule(head.logits_dimension, head.weight_key)
            train_ops = make_optimizer(module.parameters()) if mode == ModeKeys.TRAIN else None
            return head.create_estimator_spec(features, mode, module, labels, train_ops)

        super().__init__(model_fn, model_dir, config)


class BaselineRegressor(BaselineEstimator):
    """Learns the labels' mean.

    Its predictions are ``{"predictions": ...}``; its metrics are ``average_loss``, ``prediction/mean`` and
    ``label/mean``.

    Args:
        model_dir: see ``Estimator``.
        label_dimension: how many numbers an example's label has.
        weight_column: the name of the feature with the examples' weights, or a numeric column; ``None`` means that all
            weigh 1.
        optimizer: see ``BaselineEstimator``.
        config: see ``Estimator``.
        loss_reduction: ``ts.losses.Reduction.SUM_OVER_BATCH_SIZE`` or ``SUM``.

    Raises:
        ValueError: the optimizer, the dimension or the reduction is refused.

    Example:
        >>> regressor = ts.estimator.BaselineRegressor(optimizer="SGD")
        >>> def input_fn():
        ...     return {"x": torch.ones(2)}, torch.tensor([1.0, 3.0])
        >>> prediction = next(regressor.train(input_fn, steps=20).predict(input_fn))
        >>> prediction["predictions"].round()
        array([2.], dtype=float32)
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str] | None = None,
        label_dimension: int = 1,
        weight_column: Any = None,
        optimizer: Any = "Ftrl",
        config: RunConfig | None = None,
        loss_reduction: Reduction | str = Reduction.SUM_OVER_BATCH_SIZE,
    ) -> None:
        super().__init__(RegressionHead(label_dimension, weight_column, loss_reduction), model_dir, optimizer, config)


class BaselineClassifier(BaselineEstimator):
    """Learns the classes' shares.

    Its predictions and metrics are those of ``BinaryClassHead``, or of ``MultiClassHead`` for more classes than 2.

    Args:
        model_dir: see ``Estimator``.
        n_classes: how many classes there are, at least 2.
        weight_column: the name of the feature with the examples' weights, or a numeric column; ``None`` means that all
            weigh 1.
        label_vocabulary: the labels as strings, in the order of the classes; ``None`` means that labels are numbers:
            in [0, 1] for two classes, else integers from 0 to ``n_classes - 1``.
        optimizer: see ``BaselineEstimator``.
        config: see ``Estimator``.
        loss_reduction: ``ts.losses.Reduction.SUM_OVER_BATCH_SIZE`` or ``SUM``.

    Raises:
        ValueError: the optimizer, the classes or the reduction is refused.

    Example:
        >>> classifier = ts.estimator.BaselineClassifier(n_classes=3)
        >>> def input_fn():
        ...     return {"x": torch.ones(4)}, torch.tensor([2, 2, 0, 2])
        >>> classifier.train(input_fn, steps=10).evaluate(input_fn, steps=1)["accuracy"]
        0.75
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str] | None = None,
        n_classes: int = 2,
        weight_column: Any = None,
        label_vocabulary: Sequence[str] | None = None,
        optimizer: Any = "Ftrl",
        config: RunConfig | None = None,
        loss_reduction: Reduction | str = Reduction.SUM_OVER_BATCH_SIZE,
    ) -> None:
        head = binary_or_multi_class_head(n_classes, weight_column, label_vocabulary, loss_reduction)
        super().__init__(head, model_dir, optimizer, config)


_LEARNING_RATE = 0.2


class LinearEstimator(Estimator):
    """A linear model of feature columns under any head.

    All weights begin at 0. Their names are ``linear/linear_model/<column>/weights`` and
    ``linear/linear_model/bias_weights``.

    Args:
        head: the loss, the predictions and the metrics.
        feature_columns: dense and categorical columns.
        model_dir: see ``Estimator``.
        optimizer: ``"Adagrad"``, ``"Adam"``, ``"Ftrl"``, ``"RMSProp"`` or ``"SGD"``, with a learning rate of 0.2, or a
            class or function that makes an optimizer for parameters. ``None`` means ``Ftrl`` with a learning rate of at
            most ``1 / sqrt(number of columns)``.
        config: see ``Estimator``.
        sparse_combiner: how the weights of an example's categories are combined: ``"sum"``, ``"mean"`` or ``"sqrtn"``.
        warm_start_from: see ``Estimator``.

    Raises:
        ValueError: the columns, the optimizer or the combiner is refused.
        TypeError: ``head`` is no head.

    Example:
        >>> x = ts.feature_column.numeric_column("x")
        >>> estimator = ts.estimator.LinearEstimator(ts.estimator.PoissonRegressionHead(), [x])
        >>> def input_fn():
        ...     return {"x": torch.tensor([[0.0], [1.0]])}, torch.tensor([1.0, 2.0])
        >>> estimator.train(input_fn, steps=5).evaluate(input_fn, steps=1)["label/mean"]
        1.5
    """

    def __init__(
        self,
        head: Head,
        feature_columns: Iterable[FeatureColumn] | FeatureColumn,
        model_dir: str | os.PathLike[str] | None = None,
        optimizer: Any = "Ftrl",
        config: RunConfig | None = None,
        sparse_combiner: str = "sum",
        warm_start_from: str | os.PathLike[str] | WarmStartSettings | None = None,
    ) -> None:
        check_head(head)
        network = Linear(as_columns(feature_columns), head.logits_dimension, sparse_combiner)
        make_optimizer = _factory(optimizer, len(network.layer.columns))

        def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
            check_features(features)
            module = SumModule(network)
            train_ops = make_optimizer(module.parameters()) if mode == ModeKeys.TRAIN else None
            return head.create_estimator_spec(features, mode, module, labels, train_ops)

        super().__init__(model_fn, model_dir, config, warm_start_from=warm_start_from)


class LinearRegressor(LinearEstimator):
    """Linear regression on feature columns: mean squared error.

    Its predictions are ``{"predictions": ...}``; its metrics are ``average_loss``, ``prediction/mean`` and
    ``label/mean``. Weights are named as ``LinearEstimator``'s.

    Args:
        feature_columns: dense and categorical columns.
        model_dir: see ``Estimator``.
        label_dimension: how many numbers an example's label has.
        weight_column: the name of the feature with the examples' weights, or a numeric column; ``None`` means that all
            weigh 1.
        optimizer: see ``LinearEstimator``.
        config: see ``Estimator``.
        warm_start_from: see ``Estimator``.
        loss_reduction: ``ts.losses.Reduction.SUM_OVER_BATCH_SIZE`` or ``SUM``.
        sparse_combiner: see ``LinearEstimator``.

    Raises:
        ValueError: the columns, the optimizer, the combiner, the dimension or the reduction is refused.

    Example:
        >>> feats = ts.feature_column.numeric_column("feats")
        >>> regressor = ts.estimator.LinearRegressor([feats], optimizer="SGD")
        >>> def input_fn():
        ...     return ts.data.Dataset.from_tensors(({"feats": [1.0]}, [1.0])).repeat(100).batch(10)
        >>> regressor.train(input_fn, steps=10).evaluate(input_fn)["prediction/mean"]
        0.9999998807907104
    """

    def __init__(  # noqa: PLR0913 - tf's arguments
        self,
        feature_columns: Iterable[FeatureColumn] | FeatureColumn,
        model_dir: str | os.PathLike[str] | None = None,
        label_dimension: int = 1,
        weight_column: Any = None,
        optimizer: Any = "Ftrl",
        config: RunConfig | None = None,
        warm_start_from: str | os.PathLike[str] | WarmStartSettings | None = None,
        loss_reduction: Reduction | str = Reduction.SUM_OVER_BATCH_SIZE,
        sparse_combiner: str = "sum",
    ) -> None:
        head = RegressionHead(label_dimension, weight_column, loss_reduction)
        super().__init__(head, feature_columns, model_dir, optimizer, config, sparse_combiner, warm_start_from)


class LinearClassifier(LinearEstimator):
    """Logistic or softmax regression on feature columns.

    Its predictions and metrics are those of ``BinaryClassHead``, or of ``MultiClassHead`` for more classes than 2.
    Weights are named as ``LinearEstimator``'s.

    Args:
        feature_columns: dense and categorical columns.
        model_dir: see ``Estimator``.
        n_classes: how many classes there are, at least 2.
        weight_column: the name of the feature with the examples' weights, or a numeric column; ``None`` means that all
            weigh 1.
        label_vocabulary: the labels as strings, in the order of the classes; ``None`` means that labels are numbers:
            in [0, 1] for two classes, else integers from 0 to ``n_classes - 1``.
        optimizer: see ``LinearEstimator``.
        config: see ``Estimator``.
        warm_start_from: see ``Estimator``.
        loss_reduction: ``ts.losses.Reduction.SUM_OVER_BATCH_SIZE`` or ``SUM``.
        sparse_combiner: see ``LinearEstimator``.

    Raises:
        ValueError: the columns, the optimizer, the combiner, the classes or the reduction is refused.

    Example:
        >>> color = ts.feature_column.categorical_column_with_vocabulary_list("color", ["red", "green"])
        >>> classifier = ts.estimator.LinearClassifier([color], label_vocabulary=["stop", "go"])
        >>> def input_fn():
        ...     return {"color": ["red", "green"]}, ["stop", "go"]
        >>> _ = classifier.train(input_fn, steps=20)
        >>> [prediction["classes"][0] for prediction in classifier.predict(lambda: [{"color": ["green", "red"]}])]
        ['go', 'stop']
    """

    def __init__(  # noqa: PLR0913 - tf's arguments
        self,
        feature_columns: Iterable[FeatureColumn] | FeatureColumn,
        model_dir: str | os.PathLike[str] | None = None,
        n_classes: int = 2,
        weight_column: Any = None,
        label_vocabulary: Sequence[str] | None = None,
        optimizer: Any = "Ftrl",
        config: RunConfig | None = None,
        warm_start_from: str | os.PathLike[str] | WarmStartSettings | None = None,
        loss_reduction: Reduction | str = Reduction.SUM_OVER_BATCH_SIZE,
        sparse_combiner: str = "sum",
    ) -> None:
        head = binary_or_multi_class_head(n_classes, weight_column, label_vocabulary, loss_reduction)
        super().__init__(head, feature_columns, model_dir, optimizer, config, sparse_combiner, warm_start_from)


def _factory(optimizer: Any, num_columns: int) -> MakeTrainOps:
    if optimizer is None:
        return make_factory("Ftrl", "optimizer", min(_LEARNING_RATE, 1 / math.sqrt(num_columns)))
    return make_factory(optimizer, "optimizer", _LEARNING_RATE)
