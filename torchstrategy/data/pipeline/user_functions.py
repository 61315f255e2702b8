"""Calling a user's functions: errors keep their type, and a note says where they happened."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torchstrategy.data.pipeline.elements import call, describe

__all__ = ["add_note", "begin", "call_noted", "function_name"]


def call_noted(operation: str, fn: Callable[..., Any], element: Any, where: str) -> Any:
    """Call a function on an element.

    Args:
        operation: what the function was given to.
        fn: the user's function.
        element: its argument, or a tuple of them.
        where: which element it is.

    Raises:
        RuntimeError: the function raised ``StopIteration``, which would end the dataset in silence.
    """
    try:
        return call(fn, element)
    except StopIteration as error:
        raise RuntimeError(
            f"The function of {operation}({function_name(fn)}) raised StopIteration for {where}. To end a dataset "
            "early use take()."
        ) from error
    except Exception as error:
        add_note(error, operation, fn, f"{where}: {describe(element)}")
        raise


def begin(operation: str, fn: Callable[..., Any], make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """Return the iterator that a user's function makes.

    Raises:
        RuntimeError: the function raised ``StopIteration``, which would end the dataset in silence.
    """
    try:
        return make()
    except StopIteration as error:
        raise RuntimeError(f"The function of {operation}({function_name(fn)}) raised StopIteration.") from error


def add_note(error: Exception, operation: str, fn: Callable[..., Any], where: str) -> None:
    """Say on an error in which operation and at which element it was raised; before Python 3.11 there are no notes."""
    if hasattr(error, "add_note"):
        error.add_note(f"Raised in {operation}({function_name(fn)}) for {where}")


def function_name(fn: Any) -> str:
    """Return a short name for a function."""
    return str(getattr(fn, "__qualname__", type(fn).__name__)).rsplit("<locals>.", 1)[-1]
