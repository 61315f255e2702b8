"""The parts of the canned models, which make parameters under tf's names and compute logits; and their summaries.

All parameters of a model belong to one module, because torch puts a dot between the names of a module and its
submodule, and tf's names have slashes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from torchstrategy import summary
from torchstrategy.estimator.feature_column.features import FeatureColumn
from torchstrategy.estimator.feature_column.layers import InputLayer, LinearLayer
from torchstrategy.estimator.heads.head import Head
from torchstrategy.optimizers.by_name import get

__all__ = [
    "BiasModule",
    "Dnn",
    "Linear",
    "MakeTrainOps",
    "Network",
    "SumModule",
    "as_columns",
    "as_list",
    "check_features",
    "check_head",
    "make_factory",
]

#: Makes an optimizer for parameters, or a list with one, as ``EstimatorSpec(train_op=)`` takes it.
MakeTrainOps = Callable[[Iterable[Tensor]], Any]

_NAMES = ("Adagrad", "Adam", "Ftrl", "RMSProp", "SGD")
_REMEDY = (
    "Give a name, or a class or function that makes a torch optimizer for parameters, such as "
    "functools.partial(torch.optim.SGD, lr=0.1); it may return a list of the optimizer and a scheduler."
)


def make_factory(optimizer: Any, argument: str, lr: float | None = None) -> MakeTrainOps:
    """Return a function of the parameters for what the user calls the optimizer.

    Args:
        optimizer: one of tf.estimator's names, or such a function.
        argument: the argument's name, for messages.
        lr: the learning rate of a name; ``None`` means Keras' default.

    Raises:
        ValueError: it is another name, an optimizer that exists, or nothing that makes one.
    """
    if isinstance(optimizer, str):
        if optimizer not in _NAMES:
            raise ValueError(f"{argument}={optimizer!r} is not known. Known names: {', '.join(_NAMES)}. {_REMEDY}")
        return get(optimizer, **({} if lr is None else {"lr": lr}))
    if isinstance(optimizer, Optimizer):
        raise ValueError(
            f"{argument}= is a {type(optimizer).__name__} of other parameters: the estimator's are not made yet. "
            f"{_REMEDY}"
        )
    if not callable(optimizer):
        raise ValueError(f"{argument}= must make an optimizer. Received: {optimizer!r}. {_REMEDY}")
    return functools.partial(_make, optimizer, argument)


def as_list(train_ops: Any) -> list[Any]:
    """Return what a factory made as a list."""
    return list(train_ops) if isinstance(train_ops, (list, tuple)) else [train_ops]


def _make(factory: MakeTrainOps, argument: str, parameters: Iterable[Tensor]) -> Any:
    """Call a program's function and look at what it returns."""
    made = factory(parameters)
    if any(isinstance(op, Optimizer) for op in as_list(made)):
        return made
    raise ValueError(
        f"The function {argument}= must return a torch.optim.Optimizer, or a list with one. It returned {made!r}. "
        f"{_REMEDY}"
    )


def write_layer(tag: str, values: Tensor, module: nn.Module) -> None:
    """Write which share of a layer's outputs is 0, and their histogram.

    Args:
        tag: the layer's name.
        values: its outputs.
        module: the model; summaries are written in training only.
    """
    if _wants_summaries(module):
        summary.scalar(f"{tag}/fraction_of_zero_values", (values == 0).float().mean())
        _write_histogram(f"{tag}/activation", values)


def write_weights(bias: Tensor, weights: Iterable[Tensor], module: nn.Module) -> None:
    """Write a linear model's bias, and which share of its weights is 0.

    Args:
        bias: ``[units]``.
        weights: those of its columns.
        module: the model; summaries are written in training only.
    """
    if _wants_summaries(module):
        if len(bias) > 1:
            _write_histogram("bias", bias)
        else:
            summary.scalar("bias", bias[0])
        every = torch.cat([weight.detach().flatten() for weight in weights])
        summary.scalar("fraction_of_zero_weights", (every == 0).float().mean())


def _wants_summaries(module: nn.Module) -> bool:
    has_step = summary.experimental.get_step() is not None  # a program's own default writer may have none
    return module.training and has_step and summary.should_record_summaries()


def _write_histogram(tag: str, values: Tensor) -> None:
    values = values.detach()
    finite = values[values.isfinite()]  # the loss tells of others
    if finite.numel():
        summary.histogram(tag, finite)


def as_columns(columns: Iterable[FeatureColumn] | FeatureColumn | None) -> tuple[FeatureColumn, ...]:
    """Return feature columns as a tuple; a single one will do."""
    return (columns,) if isinstance(columns, FeatureColumn) else tuple(columns or ())


def check_features(features: Any) -> None:
    """Check that features are a dictionary.

    Raises:
        ValueError: they are something else.
    """
    if not isinstance(features, Mapping):
        raise ValueError(
            "features should be a dictionary of tensors by the keys of the feature columns. Let input_fn return pairs "
            f"({{key: tensor, ...}}, labels). Received features of type {type(features).__name__}."
        )


def check_head(head: Any) -> None:
    """Check that something is a head.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(head, Head):
        raise TypeError(f"head must be a head, such as ts.estimator.RegressionHead(). Received: {head!r}")


_MOMENTUM = 0.999  # of the moving averages: tf.estimator's, as Keras' 0.99 forgets too fast for rare features
_EPSILON = 1e-3  # Keras'


class Network(Protocol):
    """A part of a model."""

    def make_parameters(self) -> dict[str, nn.Parameter]:
        """Make the parameters, by name."""

    def make_buffers(self) -> dict[str, Tensor]:
        """Make the buffers, by name."""

    def logits(self, features: Mapping[str, Any], module: nn.Module) -> Tensor:
        """Return ``[batch, units]``, with the module's parameters and in its mode."""


class Linear:
    """A linear model of feature columns.

    Args:
        feature_columns: its columns.
        units: how many logits.
        sparse_combiner: how an example's categories are combined.
    """

    def __init__(self, feature_columns: Iterable[FeatureColumn], units: int, sparse_combiner: str) -> None:
        self.layer = LinearLayer(feature_columns, units, sparse_combiner, scope="linear/linear_model")

    def make_parameters(self) -> dict[str, nn.Parameter]:
        """Make the parameters, by name."""
        return self.layer.make_parameters()

    def make_buffers(self) -> dict[str, Tensor]:
        """Make the buffers, by name: there are none."""
        return {}

    def logits(self, features: Mapping[str, Any], module: nn.Module) -> Tensor:
        """Return ``[batch, units]``."""
        logits = self.layer(features, module._parameters)
        bias = f"{self.layer.scope}/bias_weights"
        weights = (tensor for name, tensor in module.named_parameters() if name != bias and name.startswith("linear/"))
        write_weights(_own(module, bias), weights, module)
        return logits


class Dnn:
    """Dense layers over feature columns.

    Args:
        feature_columns: dense columns.
        units: how many logits.
        hidden_units: how many units the hidden layers have.
        activation_fn: of the hidden layers: a function, its name, or ``None`` for ``relu``.
        dropout: the probability that a hidden unit is dropped in training; ``None`` means none.
        batch_norm: whether to normalise the hidden layers' outputs.

    Raises:
        ValueError: an argument is none of these.
    """

    def __init__(
        self,
        feature_columns: Iterable[FeatureColumn],
        units: int,
        hidden_units: Iterable[int],
        activation_fn: Callable[[Tensor], Tensor] | str | None,
        dropout: float | None,
        *,
        batch_norm: bool,
    ) -> None:
        self.layer = InputLayer(feature_columns, scope="dnn/input_from_feature_columns/input_layer")
        self.units = units
        self.hidden_units = tuple(hidden_units) if isinstance(hidden_units, Iterable) else (0,)
        if any(not isinstance(size, int) or size < 1 for size in self.hidden_units):
            raise ValueError(f"hidden_units must be positive integers, such as [64, 32]. Received: {hidden_units!r}")
        if dropout is not None and not 0 <= dropout < 1:
            raise ValueError(f"dropout must be a probability in [0, 1), or None. Received: {dropout}")
        self.activation_fn = _activation(activation_fn)
        self.dropout = dropout
        self.batch_norm = batch_norm

    def make_parameters(self) -> dict[str, nn.Parameter]:
        """Make the parameters, by name: kernels by Glorot's rule, biases 0."""
        made = self.layer.make_parameters()
        size = self.layer.output_size
        for index, units in enumerate(self.hidden_units):
            scope = f"dnn/hiddenlayer_{index}"
            made |= _dense_parameters(scope, size, units)
            if self.batch_norm:
                made[f"{scope}/batchnorm_{index}/gamma"] = nn.Parameter(torch.ones(units))
                made[f"{scope}/batchnorm_{index}/beta"] = nn.Parameter(torch.zeros(units))
            size = units
        return made | _dense_parameters("dnn/logits", size, self.units)

    def make_buffers(self) -> dict[str, Tensor]:
        """Make the buffers, by name: the moving averages of batch normalisation."""
        made: dict[str, Tensor] = {}
        for index, units in enumerate(self.hidden_units if self.batch_norm else ()):
            made[f"dnn/hiddenlayer_{index}/batchnorm_{index}/moving_mean"] = torch.zeros(units)
            made[f"dnn/hiddenlayer_{index}/batchnorm_{index}/moving_variance"] = torch.ones(units)
        return made

    def logits(self, features: Mapping[str, Any], module: nn.Module) -> Tensor:
        """Return ``[batch, units]``."""
        net = self.layer(features, module._parameters)
        net = net.to(_own(module, "dnn/logits/kernel").dtype)  # columns give float32
        for index in range(len(self.hidden_units)):
            scope = f"dnn/hiddenlayer_{index}"
            net = self.activation_fn(_dense(net, scope, module))
            if self.dropout is not None:
                net = F.dropout(net, self.dropout, module.training)
            if self.batch_norm:
                net = _normalise(net, f"{scope}/batchnorm_{index}", module)
            write_layer(scope, net, module)
        logits = _dense(net, "dnn/logits", module)
        write_layer("dnn/logits", logits, module)
        return logits


class SumModule(nn.Module):
    """The module of a canned estimator: adds up the logits of its parts.

    Args:
        *parts: one or more, with parameters of different names.
    """

    def __init__(self, *parts: Network) -> None:
        super().__init__()
        self._parts = parts
        for part in parts:
            for name, parameter in part.make_parameters().items():
                self.register_parameter(name, parameter)
            for name, buffer in part.make_buffers().items():
                self.register_buffer(name, buffer)

    def forward(self, features: Any) -> Tensor:
        """Return the logits, ``[batch, units]``.

        Args:
            features: a dictionary of tensors, arrays and lists.
        """
        check_features(features)
        first, *others = (part.logits(features, self) for part in self._parts)
        return sum(others, start=first)


class BiasModule(nn.Module):
    """Gives every example the same logits.

    Args:
        units: how many.
        weight_key: a feature that says nothing of the number of examples, because it may be missing when serving.
    """

    def __init__(self, units: int, weight_key: str | None) -> None:
        super().__init__()
        self.register_parameter("baseline/bias", nn.Parameter(torch.zeros(units)))
        self._weight_key = weight_key

    def forward(self, features: Any) -> Tensor:
        """Return the logits, ``[batch, units]``.

        Args:
            features: a dictionary, or a tensor, whose first dimension is the batch.
        """
        bias = _own(self, "baseline/bias")
        return bias.expand(self._batch_size(features), -1)

    def _batch_size(self, features: Any) -> int:
        named = features if isinstance(features, Mapping) else {"features": features}
        sizes = {key: _length(value) for key, value in named.items() if key != self._weight_key}
        if not sizes:
            raise ValueError(
                "There are no features, which say how many examples there are. Let input_fn return at least one."
            )
        first = next(iter(sizes.values()))
        if any(size != first for size in sizes.values()):
            raise ValueError(f"All features must have the same batch size. Received: {sizes}")
        return first


def _activation(activation_fn: Any) -> Callable[[Tensor], Tensor]:
    found = getattr(F, activation_fn, None) if isinstance(activation_fn, str) else activation_fn
    found = torch.relu if activation_fn is None else found
    if not callable(found):
        raise ValueError(
            "activation_fn must be a function of a tensor, or its name in torch.nn.functional. "
            f"Received: {activation_fn!r}"
        )
    result: Callable[[Tensor], Tensor] = found
    return result


def _dense_parameters(scope: str, size: int, units: int) -> dict[str, nn.Parameter]:
    kernel = nn.init.xavier_uniform_(torch.empty(size, units))
    return {f"{scope}/kernel": nn.Parameter(kernel), f"{scope}/bias": nn.Parameter(torch.zeros(units))}


def _dense(net: Tensor, scope: str, module: nn.Module) -> Tensor:
    return F.linear(net, _own(module, f"{scope}/kernel").T, _own(module, f"{scope}/bias"))


def _normalise(net: Tensor, scope: str, module: nn.Module) -> Tensor:
    """Normalise as Keras does, whose moving variance is that of the batch as it is, where torch's is corrected."""
    mean, variance = _own(module, f"{scope}/moving_mean"), _own(module, f"{scope}/moving_variance")
    if module.training and len(net):
        batch_variance, batch_mean = torch.var_mean(net, 0, correction=0)
        with torch.no_grad():
            mean.lerp_(batch_mean.to(mean.dtype), 1 - _MOMENTUM)
            variance.lerp_(batch_variance.to(variance.dtype), 1 - _MOMENTUM)
        mean, variance = batch_mean, batch_variance
    normal = (net - mean) * torch.rsqrt(variance + _EPSILON)
    return normal * _own(module, f"{scope}/gamma") + _own(module, f"{scope}/beta")


def _length(value: Any) -> int:
    return value.shape[0] if isinstance(value, Tensor) else len(value)  # len() would fix the size of an exported model


def _own(module: nn.Module, name: str) -> Tensor:
    tensor: Tensor = getattr(module, name)
    return tensor
