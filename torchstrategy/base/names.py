"""What a name such as ``"mse"`` stands for, what was probably meant if nothing does; names of classes and of ranks.

And what such classes were made with, as Keras lists it.
"""

from __future__ import annotations

import difflib
import enum
import inspect
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from typing_extensions import Self

__all__ = [
    "Configurable",
    "alike",
    "as_dtype",
    "difference_of_ranks",
    "dtype_name",
    "find",
    "lines_of_ranks",
    "named_ranks",
    "set_default_dtype",
    "snake_case",
    "tensors_of",
    "uncompiled_name",
]

_T = TypeVar("_T")
_MOST_LISTED = 4  # ranks that follow each other
_MOST_LINES = 16
_MOST_NAMED = 4  # tensors in an error


def find(name: str, known: Mapping[str, _T], argument: str, remedy: str) -> _T:
    """Return what a name stands for; its letter case does not matter.

    Args:
        name: the name as the user wrote it.
        known: what there is, by names.
        argument: how the user gave it, such as ``"loss="``.
        remedy: what can be given instead of a name; ends the message.

    Returns:
        The entry of ``known``.

    Raises:
        ValueError: there is no such name; the message lists those that are like it.
    """
    if name in known:
        return known[name]
    folded = {key.lower(): key for key in known}
    key = folded.get(name.lower())
    if key is not None:
        return known[key]
    similar = list(dict.fromkeys(folded[match] for match in difflib.get_close_matches(name.lower(), folded, 4, 0.6)))
    meant = (
        f"Did you mean {' or '.join(map(repr, similar))}?" if similar else f"Known names: {', '.join(sorted(known))}."
    )
    raise ValueError(f"{argument}{name!r} is not known. {meant} {remedy}")


class Configurable:
    """What can say the arguments of its class that make an equal one, if it keeps each under its name."""

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that make an equal object: names, and numbers, strings or lists of them where it can be.

        Raises:
            NotImplementedError: the object does not keep one of its arguments under the argument's name.
        """
        config = {}
        for name, parameter in inspect.signature(type(self)).parameters.items():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            try:
                value = self._argument(name)
            except AttributeError as error:
                raise NotImplementedError(
                    f"{type(self).__name__} does not keep its argument {name!r} as an attribute: set self.{name} in "
                    "__init__, or define get_config."
                ) from error
            value = value.value if isinstance(value, enum.Enum) else value
            config[name] = dtype_name(value) if isinstance(value, torch.dtype) else value
        return config

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Return a new object for what ``get_config`` returned.

        Args:
            config: the arguments by their names.
        """
        return cls(**config)

    def _argument(self, name: str) -> Any:
        return getattr(self, name)


def snake_case(name: str) -> str:
    """Return a class's name as Keras writes it: ``MeanIoU`` is ``mean_io_u``, ``F1Score`` is ``f1_score``.

    Args:
        name: of the class.
    """
    name = re.sub(r"\W+", "", name)
    name = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()


def dtype_name(dtype: object) -> str:
    """Return ``"float32"`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def as_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """Return a dtype for a dtype or its name."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype or its name, such as 'float32'. Received: {dtype!r}")
    return found


def set_default_dtype(name: object) -> None:
    """Give this process another one's default dtype: what that one's functions and optimizers make has it here, too.

    Args:
        name: such as ``"float32"``.

    Raises:
        ValueError: it is none.
    """
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"The default dtype must be a floating-point dtype. Received: {name!r}")
    torch.set_default_dtype(dtype)


def uncompiled_name(name: str) -> str:
    """Return a parameter's name, or the beginning of one, as it is in a module that was not compiled."""
    return f"{name}.".replace("_orig_mod.", "").removesuffix(".")


def named_ranks(ranks: Sequence[int]) -> str:
    """Return ranks, which rise, as a text: ``rank 3``, or ``ranks 0, 1, 5 to 1023``."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    parts = [f"{span[0]} to {span[-1]}" if len(span) > _MOST_LISTED else ", ".join(map(str, span)) for span in spans]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(parts)}" if ranks else "none"


def alike(values: Sequence[_T]) -> list[tuple[list[int], _T]]:
    """Return ranks with what is of each, for one line of an error each; of many ranks those together that are alike.

    Args:
        values: one for each rank.
    """
    found: dict[object, tuple[list[int], _T]] = {}
    for rank, value in enumerate(values):
        found.setdefault(repr(value) if len(values) > _MOST_LINES else rank, ([], value))[0].append(rank)
    return list(found.values())


def lines_of_ranks(values: Sequence[Any]) -> str:
    """Return a line for each rank with its value; of many ranks one for those whose values are alike."""
    return "\n".join(f"  {named_ranks(ranks)}: {value}" for ranks, value in alike(values))


def difference_of_ranks(brought: Sequence[Any]) -> str:
    """Say what each rank brought, in lines; of long lists only the number of entries and the first difference."""
    if not all(isinstance(value, list) for value in brought):
        return lines_of_ranks(brought)
    columns = list(itertools.zip_longest(*brought, fillvalue="nothing"))
    index, column = next((i, column) for i, column in enumerate(columns) if any(v != column[0] for v in column))
    lines = lines_of_ranks([f"{value} ({len(own)} in all)" for value, own in zip(column, brought, strict=True)])
    return f"The first difference is at position {index}:\n{lines}"


def tensors_of(brought: Any) -> str:
    """Say what tensors a rank has brought to an operation, in brackets, if the payload of its record says it."""
    match brought:
        case [[*shape], str(dtype)]:
            return f" ({dtype}{shape})"
        case [str(), *_] if all(isinstance(one, str) and len(one) < 100 for one in brought):  # no state as text
            more = f" and {len(brought) - _MOST_NAMED} more" if len(brought) > _MOST_NAMED else ""
            return f" ({', '.join(brought[:_MOST_NAMED])}{more})"
    return ""
