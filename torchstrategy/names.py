"""Finds what a name such as ``"mse"`` stands for, and says what was probably meant if nothing does."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TypeVar

__all__ = ["find"]

_T = TypeVar("_T")


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
