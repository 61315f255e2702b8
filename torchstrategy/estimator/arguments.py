"""Which arguments a function of the user's has, so that it is given those that it names."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

__all__ = ["argument_names"]


def argument_names(fn: Callable[..., Any]) -> frozenset[str]:
    """Return the names of a callable's arguments; of a partial, those that can still be given."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(name for name, parameter in inspect.signature(fn).parameters.items() if parameter.kind in named)
