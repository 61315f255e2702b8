"""Which arguments a function of the user's has, so that it is given those that it names."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

__all__ = ["argument_names"]


def argument_names(fn: Callable[..., Any]) -> frozenset[str]:
    """Return the names of a callable's arguments; of a ``functools.partial``, those that it does not give itself."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    given = fn.keywords if isinstance(fn, functools.partial) else {}
    parameters = inspect.signature(fn).parameters.items()
    return frozenset(name for name, parameter in parameters if parameter.kind in named and name not in given)
