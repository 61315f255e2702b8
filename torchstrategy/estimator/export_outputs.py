"""What an exported model computes under one of its signatures, from the outputs of the module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from typing_extensions import override

__all__ = [
    "DEFAULT_SERVING_SIGNATURE_DEF_KEY",
    "ClassificationOutput",
    "ExportOutput",
    "PredictOutput",
    "RegressionOutput",
]

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
