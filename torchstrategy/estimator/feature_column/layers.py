"""What models are made of: columns put side by side, or weighted and added up.

``InputLayer`` and ``LinearLayer`` hold no variables. They make them, under tf's names, and take them as an argument, so
that one module can have those of several layers; submodules would put dots into the names. ``DenseFeatures`` and
``LinearModel`` are modules for one layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchstrategy.estimator.feature_column.embedding import check_combiner, combine_rows
from torchstrategy.estimator.feature_column.features import (
    CategoricalColumn,
    DenseColumn,
    FeatureColumn,
    Features,
    as_count,
    variable_scope,
)

__all__ = ["DenseFeatures", "InputLayer", "LinearLayer", "LinearModel"]


class InputLayer:
    """Puts dense columns side by side, in the order of their names.

    Args:
        feature_columns: dense columns.
        scope: what the names of its variables begin with.

    Raises:
        ValueError: there are no columns, two have one name, or one is not dense.
    """

    def __init__(self, feature_columns: Iterable[FeatureColumn] | FeatureColumn, scope: str = "input_layer") -> None:
        self.scope = scope
        self.columns: list[DenseColumn] = []
        for column in _check_columns(feature_columns):
            if not isinstance(column, DenseColumn):
                raise ValueError(
                    "Items of feature_columns must be a DenseColumn. You can wrap a categorical column with an "
                    f"embedding_column or indicator_column. Given: {column}"
                )
            self.columns.append(column)
        _check_scopes(self.columns)
        self.output_size = sum(math.prod(column.variable_shape) for column in self.columns)

    def make_parameters(self) -> dict[str, nn.Parameter]:
        """Make the variables, by name."""
        return {name: variable for column in self.columns for name, variable in _own_variables(column, self.scope)}

    def __call__(self, features: Mapping[str, Any], parameters: Mapping[str, Tensor | None]) -> Tensor:
        """Return the columns' values.

        Args:
            features: the batch.
            parameters: the variables, by name. Of others only the device is looked at, where they all are.

        Returns:
            ``[batch, output_size]``.

        Raises:
            ValueError: a feature is missing or does not fit its column, or features have different batch sizes.
        """
        own = [_select(column, self.scope, parameters) for column in self.columns]
        batch = Features(features, next((x.device for x in parameters.values() if x is not None), None))
        pairs = zip(self.columns, own, strict=True)
        values = [_flat_dense(column, batch, variables) for column, variables in pairs]
        _check_batch_sizes(self.columns, values)
        return torch.cat(values, dim=-1)


class LinearLayer:
    """Adds up columns times weights, and a bias.

    Args:
        feature_columns: dense and categorical columns. A bucketized column counts as categorical.
        units: numbers for each example.
        sparse_combiner: how the weights of an example's categories are combined: ``"sum"``, ``"mean"`` or ``"sqrtn"``.
        scope: what the names of its variables begin with.

    Raises:
        ValueError: there are no columns, two have one name, ``units`` is not positive, or there is no such
            ``sparse_combiner``.
    """

    def __init__(
        self,
        feature_columns: Iterable[FeatureColumn] | FeatureColumn,
        units: int = 1,
        sparse_combiner: str = "sum",
        scope: str = "linear_model",
    ) -> None:
        self.scope = scope
        self.columns: list[DenseColumn | CategoricalColumn] = []
        for column in _check_columns(feature_columns):
            if not isinstance(column, (DenseColumn, CategoricalColumn)):
                raise ValueError(
                    f"Items of feature_columns must be either a DenseColumn or CategoricalColumn. Given: {column}"
                )
            self.columns.append(column)
        _check_scopes(self.columns)
        self.units = as_count("units", units)
        if units < 1:
            raise ValueError(f"units must be positive. Received: {units}")
        check_combiner("sparse_combiner", sparse_combiner)
        self.sparse_combiner = sparse_combiner

    def make_parameters(self) -> dict[str, nn.Parameter]:
        """Make the variables, by name: ``weights`` of each column and ``bias_weights``, all zero."""
        made: dict[str, nn.Parameter] = {}
        for column in self.columns:
            made.update(_own_variables(column, self.scope))
            size = column.num_buckets if isinstance(column, CategoricalColumn) else math.prod(column.variable_shape)
            made[_variable_name(column, self.scope, "weights")] = nn.Parameter(torch.zeros(size, self.units))
        made[f"{self.scope}/bias_weights"] = nn.Parameter(torch.zeros(self.units))
        return made

    def __call__(self, features: Mapping[str, Any], parameters: Mapping[str, Tensor | None]) -> Tensor:
        """Return the sums.

        Args:
            features: the batch.
            parameters: the variables, by name. Others are not looked at.

        Returns:
            ``[batch, units]``.

        Raises:
            ValueError: a feature is missing or does not fit its column, or features have different batch sizes.
        """
        bias = _get(parameters, f"{self.scope}/bias_weights")
        batch = Features(features, bias.device)
        sums = [self._weigh(column, batch, parameters) for column in self.columns]
        _check_batch_sizes(self.columns, sums)
        return torch.stack(sums).sum(dim=0) + bias if len(sums) > 1 else sums[0] + bias

    def _weigh(
        self, column: DenseColumn | CategoricalColumn, batch: Features, parameters: Mapping[str, Tensor | None]
    ) -> Tensor:
        weights = _get(parameters, _variable_name(column, self.scope, "weights"))
        if isinstance(column, CategoricalColumn):
            return combine_rows(weights, column.ids(batch), self.sparse_combiner)
        dense = _flat_dense(column, batch, _select(column, self.scope, parameters))
        return dense.to(weights.dtype) @ weights


class DenseFeatures(nn.Module):
    """A layer that turns a dictionary of features into the numbers that dense columns make of them.

    The columns stand side by side in the order of their names. The variables of embeddings are parameters named
    ``<name>/<column>/embedding_weights``.

    Args:
        feature_columns: dense columns; categorical ones first need an ``indicator_column`` or ``embedding_column``.
        name: what the names of the parameters begin with.

    Raises:
        ValueError: there are no columns, two have one name, or one is not dense.

    Example:
        >>> age = ts.feature_column.numeric_column("age")
        >>> pets = ts.feature_column.categorical_column_with_identity("pets", num_buckets=3)
        >>> layer = ts.feature_column.DenseFeatures([age, ts.feature_column.embedding_column(pets, dimension=2)])
        >>> layer.output_size, [name for name, _ in layer.named_parameters()]
        (3, ['dense_features/pets_embedding/embedding_weights'])
        >>> model = torch.nn.Sequential(layer, torch.nn.Linear(layer.output_size, 1))
        >>> model({"age": torch.tensor([30.0, 40.0]), "pets": torch.tensor([0, 2])}).shape
        torch.Size([2, 1])
    """

    def __init__(
        self, feature_columns: Iterable[FeatureColumn] | FeatureColumn, *, name: str = "dense_features"
    ) -> None:
        super().__init__()
        self._layer = InputLayer(feature_columns, scope=name)
        for parameter_name, parameter in self._layer.make_parameters().items():
            self.register_parameter(parameter_name, parameter)

    @property
    def output_size(self) -> int:
        """How many numbers there are for each example."""
        return self._layer.output_size

    def forward(self, features: Mapping[str, Any]) -> Tensor:
        """Return the numbers.

        Args:
            features: a dictionary from the columns' keys to tensors, NumPy arrays or lists: ``[batch]`` or
                ``[batch, ...]``.

        Returns:
            ``[batch, output_size]``.

        Raises:
            ValueError: a feature is missing or does not fit its column, or features have different batch sizes.
        """
        return self._layer(features, self._parameters)


class LinearModel(nn.Module):
    """A linear model of feature columns: ``[batch, units]`` sums of weighted columns and a bias.

    Dense columns are multiplied by their weights; of categorical ones, each example's categories pick theirs. The
    parameters are named ``<name>/<column>/weights`` and ``<name>/bias_weights``, and start at zero.

    Args:
        feature_columns: dense and categorical columns. A bucketized column counts as categorical.
        units: numbers for each example.
        sparse_combiner: how the weights of an example's categories are combined: ``"sum"``, ``"mean"`` or ``"sqrtn"``.
        name: what the names of the parameters begin with.

    Raises:
        ValueError: there are no columns, two have one name, ``units`` is not positive, or there is no such
            ``sparse_combiner``.

    Example:
        >>> price = ts.feature_column.numeric_column("price")
        >>> city = ts.feature_column.categorical_column_with_vocabulary_list("city", ["Bonn", "Ulm"])
        >>> model = ts.feature_column.LinearModel([price, city])
        >>> {name: list(parameter.shape) for name, parameter in model.named_parameters()}
        {'linear_model/city/weights': [2, 1], 'linear_model/price/weights': [1, 1], 'linear_model/bias_weights': [1]}
        >>> model({"price": torch.tensor([1.0, 5.0]), "city": ["Ulm", "Bonn"]}).shape
        torch.Size([2, 1])
    """

    def __init__(
        self,
        feature_columns: Iterable[FeatureColumn] | FeatureColumn,
        units: int = 1,
        sparse_combiner: str = "sum",
        *,
        name: str = "linear_model",
    ) -> None:
        super().__init__()
        self._layer = LinearLayer(feature_columns, units, sparse_combiner, scope=name)
        for parameter_name, parameter in self._layer.make_parameters().items():
            self.register_parameter(parameter_name, parameter)

    def forward(self, features: Mapping[str, Any]) -> Tensor:
        """Return the sums.

        Args:
            features: a dictionary from the columns' keys to tensors, NumPy arrays or lists: ``[batch]`` or
                ``[batch, ...]``.

        Returns:
            ``[batch, units]``.

        Raises:
            ValueError: a feature is missing or does not fit its column, or features have different batch sizes.
        """
        return self._layer(features, self._parameters)


def _check_columns(feature_columns: Any) -> list[FeatureColumn]:
    """Return columns in the order of their names."""
    if isinstance(feature_columns, FeatureColumn):
        feature_columns = [feature_columns]
    if isinstance(feature_columns, Mapping):
        raise ValueError("Expected feature_columns to be iterable, found dict.")
    columns = list(feature_columns)
    if not columns:
        raise ValueError("feature_columns must not be empty.")
    names: dict[str, FeatureColumn] = {}
    for column in columns:
        if not isinstance(column, FeatureColumn):
            raise ValueError(
                f"Items of feature_columns must be a FeatureColumn. Given (type {type(column).__name__}): {column}."
            )
        if column.name in names:
            raise ValueError(
                f"Duplicate feature column name found for columns: {column} and {names[column.name]}. This usually "
                "means that these columns refer to same base feature. Either one must be discarded or a duplicated but "
                "renamed item must be inserted in features dict."
            )
        names[column.name] = column
    return sorted(columns, key=lambda column: column.name)


def _check_scopes(columns: Sequence[FeatureColumn]) -> None:
    """Check that no two variables get one name."""
    scopes: dict[str, str] = {}
    for column in columns:
        other = scopes.setdefault(variable_scope(column.name), column.name)
        if other != column.name:
            raise ValueError(
                f"The columns {other!r} and {column.name!r} would have variables of the same name, in which "
                f"{variable_scope(other)!r} stands for both. Rename one of the features."
            )


def _variable_name(column: FeatureColumn, scope: str, name: str) -> str:
    return f"{scope}/{variable_scope(column.name)}/{name}"


def _own_variables(column: FeatureColumn, scope: str) -> Iterator[tuple[str, nn.Parameter]]:
    for name, variable in column.make_variables().items():
        yield _variable_name(column, scope, name), variable


def _select(column: FeatureColumn, scope: str, parameters: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: _get(parameters, _variable_name(column, scope, name)) for name in column.variable_names}


def _flat_dense(column: DenseColumn, batch: Features, variables: Mapping[str, Tensor]) -> Tensor:
    values = column.dense(batch, variables)
    return values.reshape(values.shape[0], math.prod(column.variable_shape))


def _get(parameters: Mapping[str, Tensor | None], name: str) -> Tensor:
    parameter = parameters.get(name)
    if parameter is None:
        raise KeyError(f"There is no variable {name!r}. Make those of the layer by make_parameters().")
    return parameter


def _check_batch_sizes(columns: Sequence[FeatureColumn], values: Sequence[Tensor]) -> None:
    for column, value in zip(columns, values, strict=True):
        if value.shape[0] != values[0].shape[0]:  # not len(), which would fix the size of an exported program's batches
            raise ValueError(
                "Batch size (first dimension) of each feature must be same. Batch size of columns "
                f"({columns[0].name}, {column.name}): ({values[0].shape[0]}, {value.shape[0]})"
            )
