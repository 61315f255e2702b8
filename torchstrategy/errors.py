"""Every exception class of the library.

Names that end in ``Error`` and exist in ``tf.errors`` mean the same here. Each also derives from the built-in
exception that a Python user would catch for it.
"""

from __future__ import annotations

__all__ = [
    "CancelledError",
    "DataLossError",
    "DeadlineExceededError",
    "DisagreementError",
    "DivergenceError",
    "FailedPreconditionError",
    "InternalError",
    "InvalidArgumentError",
    "NotFoundError",
    "OpError",
    "OutOfRangeError",
    "ReplicaFailedError",
    "UnavailableError",
    "UnimplementedError",
]


class OpError(Exception):
    """Base class of the errors that ``tf.errors`` has a counterpart for."""


class InvalidArgumentError(OpError, ValueError):
    """An argument has the wrong shape, dtype or value."""


class FailedPreconditionError(OpError, RuntimeError):
    """Something must not be done in the state that things are in, such as saving where a later attempt has saved."""


class OutOfRangeError(OpError, RuntimeError):
    """An iterator was asked for an element after its last one."""


class UnavailableError(OpError, RuntimeError):
    """Another task can't be reached (any more)."""


class DeadlineExceededError(OpError, RuntimeError):
    """A collective did not complete in time; the message says which ranks arrived and where the others are."""


class CancelledError(OpError, RuntimeError):
    """The operation was given up because of something else, such as another replica's failure."""


class NotFoundError(OpError, FileNotFoundError):
    """A file, such as a checkpoint, is not there."""


class DataLossError(OpError, RuntimeError):
    """A file is there but damaged or not what it should be."""


class InternalError(OpError, RuntimeError):
    """What a server was made for does not fit together; tf's class for a task that its cluster does not have."""


class UnimplementedError(OpError, NotImplementedError):
    """The combination of options is not supported."""


class ReplicaFailedError(UnavailableError):
    """Another rank of the job failed; the message names it and carries its error."""


class DisagreementError(RuntimeError):
    """The ranks did not bring the same thing to a collective; the message says what each one brought."""


class DivergenceError(RuntimeError):
    """The replicas' copies of one tensor are no longer equal, or one replica wrote to another's copy."""
