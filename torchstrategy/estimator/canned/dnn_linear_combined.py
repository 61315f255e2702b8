"""Wide and deep models: the logits of a linear model and of dense layers, added up."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchstrategy.estimator.canned.networks import (
    Dnn,
    Linear,
    MakeTrainOps,
    Network,
    SumModule,
    as_columns,
    as_list,
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

__all__ = ["DNNLinearCombinedClassifier", "DNNLinearCombinedEstimator", "DNNLinearCombinedRegressor"]

_DNN_LEARNING_RATE = 0.001
_LINEAR_LEARNING_RATE = 0.005

_Columns = Iterable[FeatureColumn] | FeatureColumn | None


class DNNLinearCombinedEstimator(Estimator):
    """A linear model and dense layers, whose logits are added, under any head.

    Each part has its own columns and its own optimizer; names of variables are those of ``LinearEstimator`` and of
    ``DNNEstimator``.

    Args:
        head: the loss, the predictions and the metrics.
        model_dir: see ``Estimator``.
        linear_feature_columns: columns of the linear model; ``None`` means that there is none.
        linear_optimizer: its optimizer: one of ``LinearEstimator``'s names, with a learning rate of 0.005, or at most
            ``1 / sqrt(number of columns)``; or a class or function that makes an optimizer for parameters.
        dnn_feature_columns: dense columns of the layers; ``None`` means that there are none.
        dnn_optimizer: their optimizer: a name, with a learning rate of 0.001, or a class or function.
        dnn_hidden_units: how many units the hidden layers have; needed with ``dnn_feature_columns``.
        dnn_activation_fn: see ``activation_fn`` of ``DNNEstimator``.
        dnn_dropout: see ``dropout`` of ``DNNEstimator``.
        config: see ``Estimator``.
        batch_norm: see ``DNNEstimator``.
        linear_sparse_combiner: see ``sparse_combiner`` of ``LinearEstimator``.
        warm_start_from: see ``Estimator``.

    Raises:
        ValueError: there are no columns at all, or an argument is refused, as for the two parts alone.
        TypeError: ``head`` is no head.

    Example:
        >>> x = ts.feature_column.numeric_column("x")
        >>> city = ts.feature_column.categorical_column_with_vocabulary_list("city", ["Bonn", "Ulm"])
        >>> estimator = ts.estimator.DNNLinearCombinedEstimator(
        ...     ts.estimator.RegressionHead(),
        ...     linear_feature_columns=[city],
        ...     dnn_feature_columns=[x],
        ...     dnn_hidden_units=[4],
        ... )
        >>> def input_fn():
        ...     return {"x": torch.ones(2, 1), "city": ["Ulm", "Bonn"]}, torch.ones(2)
        >>> estimator.train(input_fn, steps=1).get_variable_value("linear/linear_model/city/weights").shape
        (2, 1)
    """

    def __init__(  # noqa: PLR0913 - tf's arguments
        self,
        head: Head,
        model_dir: str | os.PathLike[str] | None = None,
        linear_feature_columns: _Columns = None,
        linear_optimizer: Any = "Ftrl",
        dnn_feature_columns: _Columns = None,
        dnn_optimizer: Any = "Adagrad",
        dnn_hidden_units: Iterable[int] | None = None,
        dnn_activation_fn: Callable[[Tensor], Tensor] | str | None = torch.relu,
        dnn_dropout: float | None = None,
        config: RunConfig | None = None,
        batch_norm: bool = False,  # noqa: FBT001, FBT002
        linear_sparse_combiner: str = "sum",
        warm_start_from: str | os.PathLike[str] | WarmStartSettings | None = None,
    ) -> None:
        check_head(head)
        parts: list[tuple[Network, str, MakeTrainOps]] = []
        dnn_columns, linear_columns = as_columns(dnn_feature_columns), as_columns(linear_feature_columns)
        if not dnn_columns and not linear_columns:
            raise ValueError("Either linear_feature_columns or dnn_feature_columns must be defined.")
        if dnn_columns:
            hidden_units = tuple(dnn_hidden_units or ())
            if not hidden_units:
                raise ValueError("dnn_hidden_units must be defined when dnn_feature_columns is specified.")
            dnn = Dnn(
                dnn_columns, head.logits_dimension, hidden_units, dnn_activation_fn, dnn_dropout, batch_norm=batch_norm
            )
            parts.append((dnn, "dnn/", make_factory(dnn_optimizer, "dnn_optimizer", _DNN_LEARNING_RATE)))
        if linear_columns:
            linear = Linear(linear_columns, head.logits_dimension, linear_sparse_combiner)
            lr = min(_LINEAR_LEARNING_RATE, 1 / math.sqrt(len(linear_columns)))
            parts.append((linear, "linear/", make_factory(linear_optimizer, "linear_optimizer", lr)))

        def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
            check_features(features)
            module = SumModule(*(network for network, _, _ in parts))
            train_ops = None
            if mode == ModeKeys.TRAIN:
                train_ops = []
                for _, scope, make_optimizer in parts:
                    own = [parameter for name, parameter in module.named_parameters() if name.startswith(scope)]
                    train_ops += as_list(make_optimizer(own))
            return head.create_estimator_spec(features, mode, module, labels, train_ops)

        super().__init__(model_fn, model_dir, config, warm_start_from=warm_start_from)


class DNNLinearCombinedRegressor(DNNLinearCombinedEstimator):
    """Regression by a linear model and dense layers: mean squared error.

    Its predictions are ``{"predictions": ...}``; its metrics are ``average_loss``, ``prediction/mean`` and
    ``label/mean``.

    Args:
        model_dir: see ``Estimator``.
        linear_feature_columns: see ``DNNLinearCombinedEstimator``.
        linear_optimizer: see ``DNNLinearCombinedEstimator``.
        dnn_feature_columns: see ``DNNLinearCombinedEstimator``.
        dnn_optimizer: see ``DNNLinearCombinedEstimator``.
        dnn_hidden_units: see ``DNNLinearCombinedEstimator``.
        dnn_activation_fn: see ``activation_fn`` of ``DNNEstimator``.
        dnn_dropout: see ``dropout`` of ``DNNEstimator``.
        label_dimension: how many numbers an example's label has.
        weight_column: the name of the feature with the examples' weights, or a numeric column; ``None`` means that all
            weigh 1.
        config: see ``Estimator``.
        warm_start_from: see ``Estimator``.
        loss_reduction: ``ts.losses.Reduction.SUM_OVER_BATCH_SIZE`` or ``SUM``.
        batch_norm: see ``DNNEstimator``.
        linear_sparse_combiner: see ``sparse_combiner`` of ``LinearEstimator``.

    Raises:
        ValueError: an argument is refused, as for ``DNNLinearCombinedEstimator``, or the dimension or the reduction is.

    Example:
        >>> x = ts.feature_column.numeric_column("x")
        >>> regressor = ts.estimator.DNNLinearCombinedRegressor(linear_feature_columns=[x])
        >>> regressor.train(lambda: ({"x": torch.ones(2, 1)}, torch.ones(2)), steps=1).latest_checkpoint()[-12:]
        'model.ckpt-1'
    """

    def __init__(  # noqa: PLR0913 - tf's arguments
        self,
        model_dir: str | os.PathLike[str] | None = None,
        linear_feature_columns: _Columns = None,
        linear_optimizer: Any = "Ftrl",
        dnn_feature_columns: _Columns = None,
        dnn_optimizer: Any = "Adagrad",
        dnn_hidden_units: Iterable[int] | None = None,
        dnn_activation_fn: Callable[[Tensor], Tensor] | str | None = torch.relu,
        dnn_dropout: float | None = None,
        label_dimension: int = 1,
        weight_column: Any = None,
        config: RunConfig | None = None,
        warm_start_from: str | os.PathLike[str] | WarmStartSettings | None = None,
        loss_reduction: Reduction | str = Reduction.SUM_OVER_BATCH_SIZE,
        batch_norm: bool = False,  # noqa: FBT001, FBT002
        linear_sparse_combiner: str = "sum",
    ) -> None:
        super().__init__(
            RegressionHead(label_dimension, weight_column, loss_reduction),
            model_dir,
            linear_feature_columns,
            linear_optimizer,
            dnn_feature_columns,
            dnn_optimizer,
            dnn_hidden_units,
            dnn_activation_fn,
            dnn_dropout,
            config,
            batch_norm,
            linear_sparse_combiner,
            warm_start_from,
        )


class DNNLinearCombinedClassifier(DNNLinearCombinedEstimator):
    """Classification by a linear model and dense layers.

    Its predictions and metrics are those of ``BinaryClassHead``, or of ``MultiClassHead`` for more classes than 2.

    Args:
        model_dir: see ``Estimator``.
        linear_feature_columns: see ``DNNLinearCombinedEstimator``.
        linear_optimizer: see ``DNNLinearCombinedEstimator``.
        dnn_feature_columns: see ``DNNLinearCombinedEstimator``.
        dnn_optimizer: see ``DNNLinearCombinedEstimator``.
        dnn_hidden_units: see ``DNNLinearCombinedEstimator``.
        dnn_activation_fn: see ``activation_fn`` of ``DNNEstimator``.
        dnn_dropout: see ``dropout`` of ``DNNEstimator``.
        n_classes: how many classes there are, at least 2.
        weight_column: the name of the feature with the examples' weights, or a numeric column; ``None`` means that all
            weigh 1.
        label_vocabulary: the labels as strings, in the order of the classes; ``None`` means that labels are numbers:
            in [0, 1] for two classes, else integers from 0 to ``n_classes - 1``.
        config: see ``Estimator``.
        warm_start_from: see ``Estimator``.
        loss_reduction: ``ts.losses.Reduction.SUM_OVER_BATCH_SIZE`` or ``SUM``.
        batch_norm: see ``DNNEstimator``.
        linear_sparse_combiner: see ``sparse_combiner`` of ``LinearEstimator``.

    Raises:
        ValueError: an argument is refused, as for ``DNNLinearCombinedEstimator``, or the classes or the reduction are.

    Example:
        >>> x = ts.feature_column.numeric_column("x")
        >>> classifier = ts.estimator.DNNLinearCombinedClassifier(dnn_feature_columns=[x], dnn_hidden_units=[4])
        >>> classifier.train(lambda: ({"x": torch.ones(2, 1)}, torch.ones(2)), steps=1).latest_checkpoint()[-12:]
        'model.ckpt-1'
    """

    def __init__(  # noqa: PLR0913 - tf's arguments
        self,
        model_dir: str | os.PathLike[str] | None = None,
        linear_feature_columns: _Columns = None,
        linear_optimizer: Any = "Ftrl",
        dnn_feature_columns: _Columns = None,
        dnn_optimizer: Any = "Adagrad",
        dnn_hidden_units: Iterable[int] | None = None,
        dnn_activation_fn: Callable[[Tensor], Tensor] | str | None = torch.relu,
        dnn_dropout: float | None = None,
        n_classes: int = 2,
        weight_column: Any = None,
        label_vocabulary: Sequence[str] | None = None,
        config: RunConfig | None = None,
        warm_start_from: str | os.PathLike[str] | WarmStartSettings | None = None,
        loss_reduction: Reduction | str = Reduction.SUM_OVER_BATCH_SIZE,
        batch_norm: bool = False,  # noqa: FBT001, FBT002
        linear_sparse_combiner: str = "sum",
    ) -> None:
        super().__init__(
            binary_or_multi_class_head(n_classes, weight_column, label_vocabulary, loss_reduction),
            model_dir,
            linear_feature_columns,
            linear_optimizer,
            dnn_feature_columns,
            dnn_optimizer,
            dnn_hidden_units,
            dnn_activation_fn,
            dnn_dropout,
            config,
            batch_norm,
            linear_sparse_combiner,
            warm_start_from,
        )
