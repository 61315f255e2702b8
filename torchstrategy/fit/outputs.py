"""A model's outputs by name, and what belongs to each of them: labels, weights, losses, metrics.

A model has one output, a tensor, or several in a list, tuple or dict. Those of a list are ``output_0``, ``output_1``
and so on; those of a dict have its keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from torchstrategy import errors

__all__ = ["Outputs", "check_has_rows", "for_outputs", "is_several"]


class Outputs:
    """The outputs of a model.

    Args:
        y_pred: what the model returned: a tensor, or a list, tuple or dict of tensors.

    Raises:
        InvalidArgumentError: it returned something else.
    """

    def __init__(self, y_pred: Any) -> None:
        if isinstance(y_pred, Tensor):
            self.keys: tuple[Any, ...] | None = None
            self.tensors = [y_pred]
        elif is_several(y_pred) and y_pred:
            self.keys = tuple(y_pred) if isinstance(y_pred, Mapping) else tuple(range(len(y_pred)))
            self.tensors = [y_pred[key] for key in self.keys]
        else:
            self.tensors = []
        self.is_mapping = isinstance(y_pred, Mapping)
        if not self.tensors or not all(isinstance(tensor, Tensor) for tensor in self.tensors):
            raise errors.InvalidArgumentError(
                "A model must return a tensor, or a list, tuple or dict of tensors, for compile's losses and metrics. "
                f"Received: {_describe(y_pred)}. Override compute_loss or train_step for other outputs."
            )

    @property
    def names(self) -> tuple[str, ...] | None:
        """The outputs' names; ``None`` for one tensor, which needs none."""
        if self.keys is None:
            return None
        return tuple(str(key) if self.is_mapping else f"output_{key}" for key in self.keys)

    @property
    def signature(self) -> tuple[Any, ...]:
        """What two batches' outputs must have in common."""
        return self.keys, self.is_mapping

    def parts_of(self, value: Any, what: str, needed: Sequence[bool]) -> list[Any]:
        """Return the part of a value for each output; ``None`` for outputs that need none.

        Args:
            value: labels: a tensor if there is one output, else a list or tuple or dict as the outputs are.
            what: what the value is, such as ``"y"``.
            needed: for each output, whether its part must be there.

        Raises:
            InvalidArgumentError: parts are missing, or there are others.
        """
        if self.keys is None or (len(self.keys) == 1 and not is_several(value)):
            is_one = is_several(value) and len(value) == 1
            return [next(iter(value.values() if isinstance(value, Mapping) else value)) if is_one else value]
        if isinstance(value, Mapping) != self.is_mapping or not is_several(value):
            raise errors.InvalidArgumentError(
                f"{what} must have the structure of the model's outputs, {self._structure()}. Received: "
                f"{_describe(value)}."
            )
        keys = list(value) if self.is_mapping else list(range(len(value)))
        missing = [key for key, need in zip(self.keys, needed, strict=True) if need and key not in keys]
        unknown = [key for key in keys if key not in self.keys]
        if missing or unknown:
            raise errors.InvalidArgumentError(
                f"{what} must have a part for each of the model's outputs, {self._structure()}. "
                + _missing_and_unknown(missing, unknown)
            )
        return [value[key] if key in keys else None for key in self.keys]

    def weights_of(self, sample_weight: Any) -> list[Any]:
        """Return the sample weights of each output; weights that are no list or dict are those of all outputs.

        Args:
            sample_weight: weights or ``None``.

        Raises:
            InvalidArgumentError: there are weights for other outputs, or for too few of a list.
        """
        if not is_several(sample_weight):
            return [sample_weight] * len(self.tensors)
        return self.parts_of(sample_weight, "sample_weight", [not self.is_mapping] * len(self.tensors))

    def _structure(self) -> str:
        if self.keys is None:
            return "a tensor"
        return f"a dict with the keys {list(self.keys)}" if self.is_mapping else f"a list of {len(self.keys)}"


def check_has_rows(y_pred: Tensor) -> None:
    """Check that an output, to which a loss or a metric belongs, has an axis of examples.

    Args:
        y_pred: the output.

    Raises:
        InvalidArgumentError: it is a scalar.
    """
    if y_pred.ndim == 0:
        raise errors.InvalidArgumentError(
            "An output of the model is a scalar, of shape (), where the first axis must be the batch. If forward ends "
            "in squeeze(), name the axis, squeeze(-1): a replica's share may be one example, whose axis would go, too."
        )


def is_several(value: Any) -> bool:
    """Say whether a value is a list, tuple or mapping.

    Args:
        value: anything.
    """
    return isinstance(value, (list, tuple, Mapping))


def for_outputs(spec: Any, outputs: Outputs, argument: str, *, may_miss: bool) -> list[Any]:
    """Return the entry of a list or dict for each output.

    Args:
        spec: a list or tuple with an entry for each output, or a dict by the outputs' names.
        outputs: the outputs.
        argument: the argument's name, such as ``"loss"``.
        may_miss: whether outputs may be missing in a dict, which gives ``None``.

    Raises:
        ValueError: entries are missing, or there are others.
    """
    names = outputs.names
    if isinstance(spec, Mapping):
        if names is None and len(spec) == 1:
            return list(spec.values())
        names = names or ()
        missing = [] if may_miss else [name for name in names if name not in spec]
        unknown = [key for key in spec if key not in names]
        if missing or unknown or not names:
            model = f"the model's outputs are {list(names)}" if names else "the model has one output without a name"
            raise ValueError(
                f"{argument}= must have a key for each output, and {model}. {_missing_and_unknown(missing, unknown)}"
                + (f" For an output without one, write {argument}={{{missing[0]!r}: None, ...}}." if missing else "")
            )
        return [spec.get(name) for name in names]
    if outputs.is_mapping and len(spec) > 1:
        keys = list(outputs.keys or ())
        raise ValueError(
            f"{argument}= is a list, but the model's outputs are a dict with the keys {keys}. Give a dict: "
            f"{argument}={{{keys[0]!r}: ...}}."
        )
    if len(spec) != len(outputs.tensors):
        raise ValueError(
            f"{argument}= is a list of {len(spec)}, but the number of the model's outputs is {len(outputs.tensors)}. "
            "Give one entry for each output."
        )
    return list(spec)


def _missing_and_unknown(missing: Sequence[Any], unknown: Sequence[Any]) -> str:
    return " ".join(
        [f"Missing: {', '.join(map(repr, missing))}."] * bool(missing)
        + [f"Not an output: {', '.join(map(repr, unknown))}."] * bool(unknown)
    )


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a dict with the keys {list(value)}"
    return f"a {type(value).__name__} of {len(value)}" if isinstance(value, (list, tuple)) else f"{value!r}"
