"""Dense networks over feature columns."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchstrategy.estimator.canned.networks import Dnn, SumModule, as_columns, check_features, check_head, make_factory
from torchstrategy.estimator.estimator import Estimator
from torchstrategy.estimator.feature_column.features import FeatureColumn
from torchstrategy.estimator.heads.class_heads import binary_or_multi_class_head
from torchstrategy.estimator.heads.head import Head
from torchstrategy.estimator.heads.regression_heads import RegressionHead
from torchstrategy.estimator.run_config import RunConfig
from torchstrategy.estimator.specs import EstimatorSpec, ModeKeys
from torchstrategy.estimator.warm_start import WarmStartSettings
from torchstrategy.losses.loss import Reduction

__all__ = ["DNNClassifier", "DNNEstimator", "DNNRegressor"]


class DNNEstimator(Estimator):
    """Dense layers over feature columns, under any head.

    Kernels begin with Glorot's uniform values. Names are ``dnn/hiddenlayer_<i>/kernel`` (``[inputs, units]``),
    ``dnn/hiddenlayer_<i>/bias``, ``dnn/logits/kernel`` and ``dnn/logits/bias``; those of embeddings begin with
    ``dnn/input_from_feature_columns/input_layer``.

    Args:
        head: the loss, the predictions and the metrics.
        hidden_units: how many units the hidden layers have, such as ``[64, 32]``.
        feature_columns: dense columns; categorical ones need an ``indicator_column`` or ``embedding_column``.
        model_dir: see ``Estimator``.
        optimizer: ``"Adagrad"``, ``"Adam"``, ``"Ftrl"``, ``"RMSProp"`` or ``"SGD"``, with Keras' learning rates, or a
            class or function that makes an optimizer for parameters.
        activation_fn: of the hidden layers: a function, or its name in ``torch.nn.functional``; ``None`` means
            ``torch.relu``.
        dropout: the probability that a hidden unit is dropped in training; ``None`` means none.
        config: see ``Estimator``.
        warm_start_from: see ``Estimator``.
        batch_norm: whether to normalise the hidden layers' outputs, each replica by its own batch.

    Raises:
        ValueError: the columns, the units, the optimizer, the activation or the dropout is refused.
        TypeError: ``head`` is no head.

    Example:
        >>> x = ts.feature_column.numeric_column("x")
        >>> estimator = ts.estimator.DNNEstimator(ts.estimator.RegressionHead(), [4], [x])
        >>> def input_fn():
        ...     return {"x": torch.tensor([[0.0], [1.0]])}, torch.tensor([1.0, 2.0])
        >>> estimator.train(input_fn, steps=1).get_variable_value("dnn/logits/kernel").shape
        (4, 1)
    """

    def __init__(  # noqa: PLR0913 - tf's arguments
        self,
        head: Head,
        hidden_units: Iterable[int],
        feature_columns: Iterable[FeatureColumn] | FeatureColumn,
        model_dir: str | os.PathLike[str] | None = None,
        optimizer: Any = "Adagrad",
        activation_fn: Callable[[Tensor], Tensor] | str | None = torch.relu,
        dropout: float | None = None,
        config: RunConfig | None = None,
        warm_start_from: str | os.PathLike[str] | WarmStartSettings | None = None,
        batch_norm: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        check_head(head)
        network = Dnn(
            as_columns(feature_columns),
            head.logits_dimension,
            hidden_units,
            activation_fn,
            dropout,
            batch_norm=batch_norm,
        )
        make_optimizer = make_factory(optimizer, "optimizer")

        def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
            check_features(features)
            module = SumModule(network)
            train_ops = make_optimizer(module.parameters()) if mode == ModeKeys.TRAIN else None
            return head.create_estimator_spec(features, mode, module, labels, train_ops)

        super().__init__(model_fn, model_dir, config, warm_start_from=warm_start_from)


class DNNRegressor(DNNEstimator):
    """Regression by dense layers over feature columns: mean squared error.

    Its predictions are ``{"predictions": ...}``; its metrics are ``average_loss``, ``prediction/mean`` and
    ``label/mean``.

    Args:
        hidden_units: see ``DNNEstimator``.
        feature_columns: see ``DNNEstimator``.
        model_dir: see ``Estimator``.
        label_dimension: how many numbers an example's label has.
        weight_column: the name of the feature with the examples' weights, or a numeric column; ``None`` means that all
            weigh 1.
        optimizer: see ``DNNEstimator``.
        activation_fn: see ``DNNEstimator``.
        dropout: see ``DNNEstimator``.
        config: see ``Estimator``.
        warm_start_from: see ``Estimator``.
        loss_reduction: ``ts.losses.Reduction.SUM_OVER_BATCH_SIZE`` or ``SUM``.
        batch_norm: see ``DNNEstimator``.

    Raises:
        ValueError: an argument is refused, as for ``DNNEstimator``, or the dimension or the reduction is.

    Example:
        >>> x = ts.feature_column.numeric_column("x")
        >>> regressor = ts.estimator.DNNRegressor([8, 4], [x], dropout=0.1)
        >>> regressor.train(lambda: ({"x": torch.ones(2, 1)}, torch.ones(2)), steps=1).latest_checkpoint()[-12:]
        'model.ckpt-1'
    """

    def __init__(  # noqa: PLR0913 - tf's arguments
        self,
        hidden_units: Iterable[int],
        feature_columns: Iterable[FeatureColumn] | FeatureColumn,
        model_dir: str | os.PathLike[str] | None = None,
        label_dimension: int = 1,
        weight_column: Any = None,
        optimizer: Any = "Adagrad",
        activation_fn: Callable[[Tensor], Tensor] | str | None = torch.relu,
        dropout: float | None = None,
        config: RunConfig | None = None,
        warm_start_from: str | os.PathLike[str] | WarmStartSettings | None = None,
        loss_reduction: Reduction | str = Reduction.SUM_OVER_BATCH_SIZE,
        batch_norm: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        head = RegressionHead(label_dimension, weight_column, loss_reduction)
        super().__init__(
            head,
            hidden_units,
            feature_columns,
            model_dir,
            optimizer,
            activation_fn,
            dropout,
            config,
            warm_start_from,
            batch_norm,
        )


class DNNClassifier(DNNEstimator):
    """Classification by dense layers over feature columns.

    Its predictions and metrics are those of ``BinaryClassHead``, or of ``MultiClassHead`` for more classes than 2.

    Args:
        hidden_units: see ``DNNEstimator``.
        feature_columns: see ``DNNEstimator``.
        model_dir: see ``Estimator``.
        n_classes: how many classes there are, at least 2.
        weight_column: the name of the feature with the examples' weights, or a numeric column; ``None`` means that all
            weigh 1.
        label_vocabulary: the labels as strings, in the order of the classes; ``None`` means that labels are numbers:
            in [0, 1] for two classes, else integers from 0 to ``n_classes - 1``.
        optimizer: see ``DNNEstimator``.
        activation_fn: see ``DNNEstimator``.
        dropout: see ``DNNEstimator``.
        config: see ``Estimator``.
        warm_start_from: see ``Estimator``.
        loss_reduction: ``ts.losses.Reduction.SUM_OVER_BATCH_SIZE`` or ``SUM``.
        batch_norm: see ``DNNEstimator``.

    Raises:
        ValueError: an argument is refused, as for ``DNNEstimator``, or the classes or the reduction are.

    Example:
        >>> x = ts.feature_column.numeric_column("x")
        >>> classifier = ts.estimator.DNNClassifier([8], [x], n_classes=3)
        >>> def input_fn():
        ...     return {"x": torch.ones(2, 1)}, torch.tensor([0, 2])
        >>> sorted(classifier.train(input_fn, steps=1).evaluate(input_fn, steps=1))
        ['accuracy', 'average_loss', 'global_step', 'loss']
    """

    def __init__(  # noqa: PLR0913 - tf's arguments
        self,
        hidden_units: Iterable[int],
        feature_columns: Iterable[FeatureColumn] | FeatureColumn,
        model_dir: str | os.PathLike[str] | None = None,
        n_classes: int = 2,
        weight_column: Any = None,
        label_vocabulary: Sequence[str] | None = None,
        optimizer: Any = "Adagrad",
        activation_fn: Callable[[Tensor], Tensor] | str | None = torch.relu,
        dropout: float | None = None,
        config: RunConfig | None = None,
        warm_start_from: str | os.PathLike[str] | WarmStartSettings | None = None,
        loss_reduction: Reduction | str = Reduction.SUM_OVER_BATCH_SIZE,
        batch_norm: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        head = binary_or_multi_class_head(n_classes, weight_column, label_vocabulary, loss_reduction)
        super().__init__(
            head,
            hidden_units,
            feature_columns,
            model_dir,
            optimizer,
            activation_fn,
            dropout,
            config,
            warm_start_from,
            batch_norm,
        )
