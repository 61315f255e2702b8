"""Errors of the other side: how one becomes a message, and a message an exception again."""

from __future__ import annotations

import builtins
from typing import NoReturn

from torchstrategy import errors
from torchstrategy.ps.transport.messages import Message

__all__ = ["FencedError", "RefusedError", "error_message", "raise_error", "rebuild_error"]


class RefusedError(errors.UnavailableError):
    """The server does not work for this client, and says why."""


class FencedError(RefusedError):
    """A newer coordinator has taken over the server."""


_NEEDS_MORE = (UnicodeError, getattr(builtins, "BaseExceptionGroup", UnicodeError))
_OURS = {cls.__name__: cls for cls in (RefusedError, FencedError)}


def error_message(error: BaseException) -> Message:
    """Return the reply that tells an exception.

    Args:
        error: of any class; one that the other side may not know becomes a ``RuntimeError`` whose text names it.
    """
    name = type(error).__name__
    is_known = _find_class(name) is type(error)
    text = str(error.args[0]) if isinstance(error, KeyError) and len(error.args) == 1 else str(error)
    return Message(
        "error", {"type": name if is_known else "RuntimeError", "message": text if is_known else f"{name}: {text}"}
    )


def rebuild_error(message: Message) -> Exception:
    """Return the exception that a reply of kind ``"error"`` tells."""
    name, text = str(message.fields.get("type")), str(message.fields.get("message"))
    cls = _find_class(name)
    return RuntimeError(f"{name}: {text}") if cls is None else cls(text)


def raise_error(message: Message) -> NoReturn:
    """Raise the exception that a reply of kind ``"error"`` tells."""
    raise rebuild_error(message)


def _find_class(name: str) -> type[Exception] | None:
    """Return an exception class that can be made of one text."""
    cls = _OURS.get(name) or (getattr(errors, name, None) if name in errors.__all__ else getattr(builtins, name, None))
    is_usable = isinstance(cls, type) and issubclass(cls, Exception) and not issubclass(cls, _NEEDS_MORE)
    return cls if is_usable else None
