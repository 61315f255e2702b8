"""Checks of a recipe's options, made before anything is started.

Options are found by name, such as ``cluster.ps``, in a configuration or in plain dicts.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Options = Mapping[str, Any]  # hydra's are such


def integers(options: Options, *names: str, least: int = 1, most: int | None = None, may_be_null: bool = False) -> None:
    """Refuse what is no integer, or too small, or too large.

    Args:
        options: the recipe's.
        names: of those that must be integers.
        least: the smallest that is right.
        most: the largest; ``None`` means any.
        may_be_null: whether ``null`` is right as well.

    Raises:
        ValueError: one is wrong.
    """
    span = f"of at least {least}" if most is None else f"from {least} to {most}"
    for name in names:
        value = _find(options, name)
        if not (_is_integer(value, least, most) or (may_be_null and value is None)):
            raise ValueError(f"{name} must be {'null or ' * may_be_null}an integer {span}. Received: {value!r}")


def lists_of_integers(options: Options, *names: str, least: int = 1) -> None:
    """Refuse what is no list of integers, one or more, each of at least ``least``.

    Raises:
        ValueError: one is wrong.
    """
    for name in names:
        value = _find(options, name)
        if not _is_list(value) or not all(_is_integer(item, least) for item in value):
            raise ValueError(f"{name} must be a list of integers of at least {least}. Received: {value!r}")


def positive_numbers(options: Options, *names: str) -> None:
    """Refuse what is no finite number above 0.

    Raises:
        ValueError: one is wrong.
    """
    for name in names:
        value = _find(options, name)
        if not is_number(value) or value <= 0:
            raise ValueError(f"{name} must be a number above 0. Received: {value!r}")


def flags(options: Options, *names: str) -> None:
    """Refuse what is neither true nor false.

    Raises:
        ValueError: one is wrong.
    """
    for name in names:
        if not isinstance(value := _find(options, name), bool):
            raise ValueError(f"{name} must be true or false. Received: {value!r}")


def choices(options: Options, name: str, known: Iterable[Any]) -> None:
    """Refuse what is no list of some of the known choices, one or more.

    Raises:
        ValueError: it is none.
    """
    value, known = _find(options, name), list(known)
    if not _is_list(value):
        example = value if isinstance(value, str) and value else known[0]
        raise ValueError(f"{name} must be a list, such as '{name}=[{example}]'. Received: {value!r}")
    if unknown := [item for item in value if item not in known]:
        raise ValueError(f"{name} must be of {known}. Received: {unknown}")


def choice(options: Options, name: str, known: Iterable[Any]) -> None:
    """Refuse what is none of the known choices.

    Raises:
        ValueError: it is none.
    """
    if (value := _find(options, name)) not in (known := list(known)):
        raise ValueError(f"{name} must be one of {known}. Received: {value!r}")


def profile(options: Options) -> None:
    """Refuse options of ``profiles.Profile`` that are wrong.

    Raises:
        ValueError: one is.
    """
    flags(options, "profile")
    steps = options["profile_steps"]
    if not isinstance(steps, Mapping) or set(steps) != {"skip", "record"}:
        raise ValueError(f"profile_steps must be of the form {{skip: 5, record: 10}}. Received: {steps!r}")
    integers(options, "profile_steps.skip", "profile_steps.record")


def is_number(value: object) -> bool:
    """Return whether something is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _find(options: Options, name: str) -> Any:
    return functools.reduce(operator.getitem, name.split("."), options)


def _is_integer(value: object, least: int, most: int | None = None) -> bool:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    return is_integer and value >= least and (most is None or value <= most)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
