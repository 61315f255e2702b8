"""What the processes of a job tell each other when one of them writes a checkpoint, or all read one."""

from __future__ import annotations

import os
from typing import Any, NoReturn

__all__ = ["agree_on_restore", "agree_on_write"]


def agree_on_write(strategy: Any, path: str, failure: Exception | None) -> None:
    """Wait for the chief; raise on every process if it failed."""
    if strategy.workers is not None:
        name = os.path.basename(path)
        report = strategy.workers.exchange(f"writing of checkpoint {name}", _describe(failure))[0]
        if report is not None:
            raise RuntimeError(f"Rank 0 could not write the checkpoint {path}: {report}") from failure
    elif failure is not None:
        raise failure


def agree_on_restore(strategy: Any, path: str, error: Exception | None) -> None:
    """Raise on every process if one of them can't restore, before any has changed anything."""
    if strategy.workers is None:
        reports: list[Any] = []
    else:
        reports = strategy.workers.exchange("restoring of a checkpoint", [os.path.basename(path), _describe(error)])
    if error is not None:
        raise error
    for rank, (name, report) in enumerate(reports):
        if report is not None:
            raise RuntimeError(f"Rank {rank} could not restore the checkpoint {name}, so no rank did: {report}")
    if len({name for name, _ in reports}) > 1:
        _raise_different_paths([name for name, _ in reports])


def _raise_different_paths(names: list[str]) -> NoReturn:
    rows = "\n".join(f"  rank {rank}: {name}" for rank, name in enumerate(names))
    raise RuntimeError(
        f"The ranks would restore different checkpoints:\n{rows}\nThe directory must be on a file system that all "
        "hosts share."
    )


def _describe(error: Exception | None) -> str | None:
    return None if error is None else f"{type(error).__name__}: {error}"
