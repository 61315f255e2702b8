"""Models that ignore their features: what others must be better than."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from torchstrategy.estimator.canned.deferred_optimizers import make_factory
from torchstrategy.estimator.canned.networks import BiasModule, check_head
from torchstrategy.estimator.estimator import Estimator
from torchstrategy.estimator.heads.head import Head
from torchstrategy.estimator.heads.multi_class import binary_or_multi_class_head
from torchstrategy.estimator.heads.regression_heads import RegressionHead
from torchstrategy.estimator.run_config import RunConfig
from torchstrategy.estimator.specs import EstimatorSpec, ModeKeys
from torchstrategy.losses.loss import Reduction

__all__ = ["BaselineClassifier", "BaselineEstimator", "BaselineRegressor"]

_LEARNING_RATE = 0.3


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
        make_optimizer = make_factory(optimizer, "optimizer", _LEARNING_RATE)

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
