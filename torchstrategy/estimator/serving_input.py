"""What an exported model is given: examples of the tensors, from which it is traced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from torchstrategy.base import tree

__all__ = ["ServingInputReceiver", "TensorServingInputReceiver", "build_raw_serving_input_receiver_fn"]

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
