"""The parts of a batch: ``x``, ``y`` and ``sample_weight``, as Keras packs and unpacks them; and weights by class."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from torchstrategy.base import tree
from torchstrategy.base.devices import kind_of
from torchstrategy.base.values import get_shares
from torchstrategy.fit.arguments import DataArguments

__all__ = ["check_first_batch", "class_weight_applier", "pack_x_y_sample_weight", "unpack_x_y_sample_weight"]


def unpack_x_y_sample_weight(data: Any) -> tuple[Any, Any, Any]:
    """Return the parts of a batch, as a ``train_step`` of your own gets it.

    A tuple or a list, such as a ``DataLoader`` gives, holds up to three parts. Anything else is ``x`` alone; so a model
    with several inputs gets them as a tuple *in* the tuple, ``((x1, x2), y)``, or in a dict.

    Args:
        data: a batch.

    Returns:
        ``(x, y, sample_weight)``, with ``None`` for what the batch doesn't hold.

    Raises:
        ValueError: the batch is a tuple or list of no or more than three parts.

    Example:
        >>> ts.utils.unpack_x_y_sample_weight(["x", "y"])
        ('x', 'y', None)
        >>> ts.utils.unpack_x_y_sample_weight({"image": "x"})
        ({'image': 'x'}, None, None)
    """
    if not isinstance(data, (tuple, list)):
        return data, None, None
    if not 1 <= len(data) <= 3:
        raise ValueError(
            "A batch must be x, (x,), (x, y) or (x, y, sample_weight); several inputs or outputs go into a tuple or "
            f"dict of their own, such as ((x1, x2), y). Received a {type(data).__name__} of {len(data)} parts."
        )
    x, y, sample_weight = (*data, None, None)[:3]
    return x, y, sample_weight


def pack_x_y_sample_weight(x: Any, y: Any = None, sample_weight: Any = None) -> Any:
    """Return a batch of its parts: what ``unpack_x_y_sample_weight`` takes apart.

    Args:
        x: the inputs.
        y: the targets, or ``None``.
        sample_weight: the weights of the examples, or ``None``.

    Returns:
        A tuple without the trailing parts that are ``None``; ``x`` itself if it is alone and no tuple or list.

    Example:
        >>> ts.utils.pack_x_y_sample_weight("x")
        'x'
        >>> ts.utils.pack_x_y_sample_weight(("x1", "x2"))
        (('x1', 'x2'),)
        >>> ts.utils.pack_x_y_sample_weight("x", "y")
        ('x', 'y')
    """
    if sample_weight is not None:
        return x, y, sample_weight
    if y is not None:
        return x, y
    return (x,) if isinstance(x, (tuple, list)) else x


def check_first_batch(element: Any, names: DataArguments) -> None:
    """Check that an element is a batch; in cross-replica context.

    Args:
        element: of a distributed dataset.
        names: of the method's arguments.

    Raises:
        ValueError: it has other parts than ``(x, y, sample_weight)``, or ``x`` or ``y`` have no batch dimension.
    """
    try:
        parts = unpack_x_y_sample_weight(element)
    except ValueError as error:
        raise ValueError(f"{names.x} gives something else than batches: {error}") from None
    for name, part in zip(("x", "y"), parts, strict=False):
        leaves = [(path, leaf) for path, leaf in tree.leaf_paths(part) if leaf is not None]
        if leaves and all(get_shares(leaf) is None for _, leaf in leaves):
            path, leaf = leaves[0]
            raise ValueError(
                f"{names.x} must give batches, but in the first one the {name}{path} has no batch dimension: "
                f"{leaf!r:.80}. If it gives single examples, batch them: ts.data.Dataset.batch(32), "
                f"DataLoader(..., batch_size=32), or {names.batch_size.replace('...', '32')} for a torch Dataset or "
                "another dataset without batches."
            )


def class_weight_applier(class_weight: Mapping[int, float], method: str = "fit") -> Callable[[Any], Any]:
    """Return a function that adds sample weights to a batch, in replica context, by the classes of its labels.

    Args:
        class_weight: the weights of classes, by their ids. A class that is not in it weighs 1.
        method: of the model, for messages.

    Returns:
        A function from ``(x, y)`` to ``(x, y, weights)``, whose ``y`` are ids ``[batch]`` or ``[batch, 1]``, or rows
        ``[batch, classes]`` of which the largest number is the class. It raises ``ValueError`` if a batch has no
        labels, labels of another shape or several outputs, or sample weights already.

    Raises:
        TypeError: ``class_weight`` is no dict of numbers by integers.
        ValueError: it is empty, or a weight is negative or not finite.

    Example:
        >>> from torchstrategy.fit.batch_parts import class_weight_applier
        >>> weigh = class_weight_applier({0: 1.0, 1: 3.0})
        >>> weigh((torch.zeros(3, 2), torch.tensor([1, 0, 7])))[2]
        tensor([3., 1., 1.])
    """
    return _ClassWeights(class_weight, f"{method}(class_weight=...)")


class _ClassWeights:
    def __init__(self, class_weight: Mapping[int, float], name: str) -> None:
        _check(class_weight, name)
        self._name = name
        pairs = sorted((int(key), float(weight)) for key, weight in class_weight.items())
        self._ids = torch.tensor([key for key, _ in pairs], device="cpu")
        self._weights = torch.tensor([weight for _, weight in pairs], dtype=torch.get_default_dtype(), device="cpu")
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def __call__(self, data: Any) -> tuple[Any, Any, Tensor]:
        x, y, sample_weight = unpack_x_y_sample_weight(data)
        if sample_weight is not None:
            raise ValueError(
                f"{self._name} and sample weights can't be given at the same time. Multiply the sample weights by "
                "those of the examples' classes, and leave class_weight out."
            )
        classes = self._classes(y)
        if classes.device not in self._tables:
            self._tables[classes.device] = (self._ids.to(classes.device), self._weights.to(classes.device))
        ids, weights = self._tables[classes.device]
        if kind_of(classes.device).has_search:
            places = torch.searchsorted(ids, classes)
        else:
            places = (classes.unsqueeze(-1) > ids).sum(-1)
        places = places.clamp(max=len(ids) - 1)
        return x, y, torch.where(ids[places] == classes, weights[places], 1.0)

    def _classes(self, y: Any) -> Tensor:
        if not isinstance(y, Tensor):
            what = "no labels" if y is None else f"several outputs, in a {type(y).__name__}"
            raise ValueError(
                f"{self._name} is for models with a single output and integer or one-hot labels. The batch has {what}. "
                "Pass sample weights, one for each output."
            )
        if y.dim() not in (1, 2) or y.is_complex():
            raise ValueError(
                f"{self._name} needs labels of shape [batch], [batch, 1] or, one-hot, [batch, classes]. Received "
                f"labels of shape {list(y.shape)} and dtype {y.dtype}. Pass sample weights of that shape instead."
            )
        if y.dim() == 2 and y.shape[1] != 1:
            return y.argmax(1)
        return (y.round() if y.is_floating_point() else y).reshape(-1).long()


def _check(class_weight: Any, name: str) -> None:
    if not isinstance(class_weight, Mapping):
        raise TypeError(
            f"{name} must be a dict of weights by class ids, such as {{0: 1.0, 1: 5.0}}; a list or array of weights "
            f"becomes one by dict(enumerate(weights)). Received: {class_weight!r:.100}"
        )
    if not class_weight:
        raise ValueError(
            f"{name} is empty. Leave it out, or give the weights by class ids, such as {{0: 1.0, 1: 5.0}}."
        )
    for key, weight in class_weight.items():
        if not isinstance(key, numbers.Integral) or isinstance(key, bool):
            raise TypeError(f"The keys of {name} must be class ids, integers as in the labels. Received: {key!r}")
        if not isinstance(weight, numbers.Real):
            raise TypeError(f"The weights in {name} must be numbers. Received: {weight!r} for class {key}")
        if not math.isfinite(weight) or weight < 0:
            raise ValueError(f"The weights in {name} must be finite and not negative. Received: {weight!r} for {key}")
