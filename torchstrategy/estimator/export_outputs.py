"""The two sides of an exported model's signature: what it is given, and what it computes from the module's outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from torchstrategy.base import tree

__all__ = [
    "DEFAULT_SERVING_SIGNATURE_DEF_KEY",
    "ClassificationOutput",
    "ExportOutput",
    "PredictOutput",
    "RegressionOutput",
    "ServingInputReceiver",
    "TensorServingInputReceiver",
    "build_raw_serving_input_receiver_fn",
]

_ADVICE = (
    "An exported program takes tensors only: strings must become numbers before, such as the ids of a vocabulary, also "
    "among the features that the model is trained with."
)


class ServingInputReceiver:
    """What an exported model receives, and the features that it makes of that.

    Args:
        features: the features that ``model_fn`` and its module take, made of ``receiver_tensors``: the same tensors in
            any structure, or a function of ``receiver_tensors`` that returns the features, such as one that scales
            images. It becomes a part of the exported program.
        receiver_tensors: examples ``[batch, ...]``, of any values, of the tensors that the exported model is called
            with: a dict, or one tensor.
        receiver_tensors_alternatives: must be ``None``.
        dynamic_batch: whether the exported model takes batches of any size. ``False`` fixes that of the examples.

    Raises:
        ValueError: ``features`` or ``receiver_tensors`` is missing or holds something else than tensors, or features
            are other tensors than those that are received.

    Example:
        >>> receiver = ts.estimator.export.ServingInputReceiver(
        ...     lambda received: {"x": received["image"].float() / 255},
        ...     {"image": torch.zeros(2, 28, 28, dtype=torch.uint8)},
        ... )
        >>> receiver.features_of(receiver.receiver_tensors)["x"].dtype
        torch.float32
    """

    def __init__(
        self,
        features: Any,
        receiver_tensors: Any,
        receiver_tensors_alternatives: None = None,
        *,
        dynamic_batch: bool = True,
    ) -> None:
        if features is None:
            raise ValueError("features must be defined.")
        if receiver_tensors_alternatives is not None:
            raise ValueError(
                "receiver_tensors_alternatives must be None: make another export for other inputs. Received: "
                f"{receiver_tensors_alternatives!r}"
            )
        self.features = features
        self.receiver_tensors = _checked_tensors(receiver_tensors)
        self.dynamic_batch = dynamic_batch
        self._places: Any = None if callable(features) else self._find_places(receiver_tensors)

    def features_of(self, received: Any) -> Any:
        """Return the features.

        Args:
            received: tensors in the structure of ``receiver_tensors``.
        """
        if self._places is None:
            return self.features(received)
        leaves = tree.all_leaves(received)
        return tree.map_leaves(lambda place: leaves[place], self._places)

    def _find_places(self, received: Any) -> Any:
        """Return the features' structure with the number of the received tensor in each place."""
        numbers = {id(leaf): number for number, leaf in enumerate(tree.all_leaves(received))}
        leaves, spec = tree.flatten(self.features)
        if any(id(leaf) not in numbers for leaf in leaves):
            raise ValueError(
                "ServingInputReceiver(features=...) holds tensors that are not in receiver_tensors. If they are "
                "computed, pass a function: features=lambda received: {...}."
            )
        return tree.unflatten(spec, [numbers[id(leaf)] for leaf in leaves])


class TensorServingInputReceiver(ServingInputReceiver):
    """``ServingInputReceiver`` by tf's name for a model whose features are one tensor.

    Args:
        features: one tensor, or a function that returns one.
        receiver_tensors: as for ``ServingInputReceiver``.
        receiver_tensors_alternatives: must be ``None``.

    Raises:
        ValueError: ``features`` is no tensor; else as ``ServingInputReceiver``.

    Example:
        >>> x = torch.zeros(2, 1)
        >>> receiver = ts.estimator.export.TensorServingInputReceiver(x, {"x": x})
        >>> receiver.features_of({"x": torch.ones(1, 1)})
        tensor([[1.]])
    """

    def __init__(self, features: Any, receiver_tensors: Any, receiver_tensors_alternatives: None = None) -> None:
        if features is not None and not isinstance(features, Tensor) and not callable(features):
            raise ValueError(f"features must be one tensor. Received: {features!r:.200}")
        super().__init__(features, receiver_tensors, receiver_tensors_alternatives)


def build_raw_serving_input_receiver_fn(
    features: Mapping[str, Any] | Any, default_batch_size: int | None = None
) -> Callable[[], ServingInputReceiver]:
    """Return a function for ``export_saved_model``: the exported model takes the features as they are.

    Args:
        features: examples ``[batch, ...]`` of any values: a dict of tensors or arrays, or one.
        default_batch_size: the number of examples that the exported model takes; ``None`` means any.

    Raises:
        ValueError: ``features`` holds something else than tensors.

    Example:
        >>> receiver_fn = ts.estimator.export.build_raw_serving_input_receiver_fn({"x": torch.zeros(2, 1)})
        >>> receiver_fn().receiver_tensors["x"].shape
        torch.Size([2, 1])
    """
    examples = _checked_tensors(features)
    if default_batch_size is not None:
        size = default_batch_size
        examples = tree.map_leaves(lambda leaf: leaf.new_zeros(size, *leaf.shape[1:]), examples)

    def serving_input_receiver_fn() -> ServingInputReceiver:
        return ServingInputReceiver(examples, examples, dynamic_batch=default_batch_size is None)

    return serving_input_receiver_fn


def _checked_tensors(received: Any) -> Any:
    """Return tensors on the CPU, made of tensors or arrays."""
    if received is None or (isinstance(received, Mapping) and not received):
        raise ValueError("receiver_tensors must be defined: a tensor, or a dict of tensors by name.")
    if isinstance(received, Mapping) and not all(isinstance(name, str) for name in received):
        raise ValueError(f"The names of receiver_tensors must be strings. Received: {list(received)}")

    def convert(leaf: Any) -> Tensor:
        try:
            return torch.as_tensor(leaf).detach().cpu()
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"receiver_tensors must be tensors or arrays of numbers. {_ADVICE} Received: {leaf!r:.200}"
            ) from error

    return tree.map_leaves(convert, dict(received) if isinstance(received, Mapping) else received)


#: The signature that serving programs use unless they are told another.
DEFAULT_SERVING_SIGNATURE_DEF_KEY = "serving_default"

_Compute = Callable[[Any], Any]


class ExportOutput:
    """A signature of an exported model: tensors by name, computed from the module's outputs."""

    #: What kind of signature it is; tf writes it as the signature's method.
    method = ""

    def compute(self, outputs: Any) -> dict[str, Any]:
        """Return the tensors of the signature by name.

        Args:
            outputs: what the module returned.
        """
        raise NotImplementedError

    @property
    def constants(self) -> dict[str, Any]:
        """What is the same for all examples, such as the names of classes."""
        return {}


class PredictOutput(ExportOutput):
    """Any tensors by name.

    Args:
        outputs: called with the module's outputs; returns a dict of tensors ``[batch, ...]``, or one tensor, whose name
            is then ``output``.

    Raises:
        TypeError: ``outputs`` is no function.

    Example:
        >>> output = ts.estimator.export.PredictOutput(lambda logits: logits.softmax(-1))
        >>> output.compute(torch.zeros(1, 2))
        {'output': tensor([[0.5000, 0.5000]])}
    """

    method = "predict"

    def __init__(self, outputs: _Compute) -> None:
        self.outputs = _function("PredictOutput(outputs=...)", outputs)

    @override
    def compute(self, outputs: Any) -> dict[str, Any]:
        made = self.outputs(outputs)
        return dict(made) if isinstance(made, Mapping) else {"output": made}


class RegressionOutput(ExportOutput):
    """A number for each example, under the name ``outputs``.

    Args:
        value: called with the module's outputs; returns a floating-point tensor ``[batch, ...]``.

    Raises:
        TypeError: ``value`` is no function.

    Example:
        >>> ts.estimator.export.RegressionOutput(lambda outputs: 2 * outputs).compute(torch.ones(1))
        {'outputs': tensor([2.])}
    """

    method = "regress"

    def __init__(self, value: _Compute) -> None:
        self.value = _function("RegressionOutput(value=...)", value)

    @override
    def compute(self, outputs: Any) -> dict[str, Any]:
        value = self.value(outputs)
        if not isinstance(value, Tensor) or not value.is_floating_point():
            raise ValueError(f"Regression output value must be a float32 tensor. Received: {_described(value)}")
        return {"outputs": value}


class ClassificationOutput(ExportOutput):
    """Scores of classes, their names, or both.

    Args:
        scores: called with the module's outputs; returns a floating-point tensor ``[batch, classes]``, under the name
            ``scores``.
        classes: the names of the classes in the order of the scores, which the exported model carries as a constant; or
            a function of the outputs that returns the ids of classes, under the name ``classes``.

    Raises:
        ValueError: both are ``None``.
        TypeError: an argument is nothing of the above.

    Example:
        >>> output = ts.estimator.export.ClassificationOutput(lambda logits: logits.softmax(-1), ["cat", "dog"])
        >>> output.compute(torch.zeros(1, 2)), output.constants
        ({'scores': tensor([[0.5000, 0.5000]])}, {'classes': ['cat', 'dog']})
    """

    method = "classify"

    def __init__(self, scores: _Compute | None = None, classes: _Compute | Sequence[Any] | None = None) -> None:
        if scores is None and classes is None:
            raise ValueError("ClassificationOutput: at least one of scores and classes must be given.")
        self.scores = None if scores is None else _function("ClassificationOutput(scores=...)", scores)
        self.classes = classes
        if not (
            classes is None or callable(classes) or (isinstance(classes, Sequence) and not isinstance(classes, str))
        ):
            raise TypeError(
                "ClassificationOutput(classes=...) must be a list of names or a function of the module's outputs. "
                f"Received: {classes!r}"
            )

    @override
    def compute(self, outputs: Any) -> dict[str, Any]:
        made: dict[str, Any] = {}
        if self.scores is not None:
            made["scores"] = self.scores(outputs)
            if not isinstance(made["scores"], Tensor) or not made["scores"].is_floating_point():
                raise ValueError(
                    f"Classification scores must be a float32 tensor. Received: {_described(made['scores'])}"
                )
        if callable(self.classes):
            made["classes"] = self.classes(outputs)
        return made

    @property
    @override
    def constants(self) -> dict[str, Any]:
        return (
            {} if self.classes is None or callable(self.classes) else {"classes": [str(name) for name in self.classes]}
        )


def _function(argument: str, value: Any) -> _Compute:
    if isinstance(value, Tensor) or not callable(value):
        raise TypeError(
            f"{argument} must be a function of the module's outputs, such as `lambda outputs: outputs`: model_fn is "
            f"called once, and so a tensor would stay what it is. Received: {value!r:.200}"
        )
    result: _Compute = value
    return result


def _described(value: Any) -> str:
    return f"a tensor of {value.dtype}" if isinstance(value, Tensor) else repr(value)
