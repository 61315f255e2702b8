"""Feature columns under tf's names: how a model reads a dictionary of features, strings among them."""

from torchstrategy.estimator.feature_column.categorical import (
    categorical_column_with_hash_bucket,
    categorical_column_with_identity,
    crossed_column,
    weighted_categorical_column,
)
from torchstrategy.estimator.feature_column.embedding import embedding_column, indicator_column
from torchstrategy.estimator.feature_column.features import CategoricalColumn, DenseColumn, FeatureColumn
from torchstrategy.estimator.feature_column.layers import DenseFeatures, LinearModel
from torchstrategy.estimator.feature_column.numeric import bucketized_column, numeric_column
from torchstrategy.estimator.feature_column.vocabulary import (
    categorical_column_with_vocabulary_file,
    categorical_column_with_vocabulary_list,
)

__all__ = [
    "CategoricalColumn",
    "DenseColumn",
    "DenseFeatures",
    "FeatureColumn",
    "LinearModel",
    "bucketized_column",
    "categorical_column_with_hash_bucket",
    "categorical_column_with_identity",
    "categorical_column_with_vocabulary_file",
    "categorical_column_with_vocabulary_list",
    "crossed_column",
    "embedding_column",
    "indicator_column",
    "numeric_column",
    "weighted_categorical_column",
]
