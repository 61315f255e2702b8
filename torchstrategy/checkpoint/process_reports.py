"""What the processes of a job tell each other when they write a checkpoint or read one."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from torchstrategy import errors
from torchstrategy.base.log import name_error
from torchstrategy.base.names import difference_of_ranks, lines_of_ranks
from torchstrategy.checkpoint.archive import DamagedError
from torchstrategy.checkpoint.storage import absolute

__all__ = [
    "WriteFailedError",
    "agree_on_restore",
    "agree_on_write",
    "begin_together",
    "is_writer",
    "write_together",
]


class WriteFailedError(RuntimeError):
    """A process found no room for a checkpoint, no right to write it, or no disk; every process raises it."""


def write_together(strategy: Any, path: str, write: Callable[[], None]) -> None:
    """Let the chief write a checkpoint, then each process that was given a path of its own, as in tf's guide.

    Raises:
        RuntimeError: a process could not write; every process raises it.
    """
    if strategy.workers is None:
        write()
        return
    place = absolute(path)
    operation = f"writing of checkpoint {os.path.basename(path)}"
    failure = _failure_of(strategy, write) if strategy.is_chief else None
    reports = strategy.workers.exchange(operation, [place, *_describe_write(failure)])
    _raise_first(reports, failure)
    place_of_chief = reports[0][0]
    if any(other != place_of_chief for other, *_ in reports):
        strategy._take_up_new()  # before the first run the others' initial values are still their own
        failure = _failure_of(strategy, write) if place != place_of_chief else None
        _raise_first(strategy.workers.exchange(operation, [place, *_describe_write(failure)]), failure)


def is_writer(strategy: Any, path: str) -> bool:
    """Say whether this process writes a checkpoint: it is the chief, or has a path of its own. Every process asks."""
    if strategy.workers is None:
        return True
    place = absolute(path)
    places = strategy.workers.exchange(f"gathering for checkpoint {os.path.basename(path)}", place)
    return bool(strategy.is_chief or place != places[0])


def begin_together(strategy: Any, path: str, begin: Callable[[], None]) -> None:
    """Let the chief, and each process that was given a path of its own, begin to write a checkpoint.

    Raises:
        RuntimeError: a process could not; every process raises it.
    """
    if strategy.workers is None:
        begin()
        return
    place = absolute(path)
    places = strategy.workers.exchange(f"places of checkpoint {os.path.basename(path)}", place)
    if any(other != places[0] for other in places):
        strategy._take_up_new()  # before the first run the others' initial values are still their own
    failure = _failure_of(strategy, begin) if strategy.is_chief or place != places[0] else None
    agree_on_write(strategy, path, failure)


def agree_on_write(strategy: Any, path: str, failure: BaseException | None, *, is_told: bool = False) -> bool:
    """Raise on every process if one of them could not write a checkpoint.

    Args:
        strategy: the strategy.
        path: the checkpoint.
        failure: what went wrong here.
        is_told: whether that was raised already.

    Returns:
        Whether it was written.

    Raises:
        RuntimeError: it was not, and that was not raised already.
    """
    if strategy.workers is None:
        if failure is not None and not is_told:
            raise failure
        return failure is None
    report = [absolute(path), *_describe_write(None if is_told else failure), failure is None]
    reports = strategy.workers.exchange(f"writing of checkpoint {os.path.basename(path)}", report)
    _raise_first([report[:3] for report in reports], failure)
    return all(is_written for *_, is_written in reports)


def agree_on_restore(strategy: Any, path: str, error: Exception | None, mirrored: Sequence[str] = ()) -> None:
    """Raise on every process if one of them can't restore, before any has changed anything.

    Args:
        strategy: the strategy.
        path: the checkpoint.
        error: what went wrong here.
        mirrored: names of the objects that will be restored and are the same on all processes.
    """
    is_lost = isinstance(error, (DamagedError, errors.NotFoundError))
    reports: list[Any] = []
    if strategy.workers is not None:
        report = [os.path.basename(path), _describe(error), is_lost, sorted(mirrored)]
        reports = strategy.workers.exchange("restoring of a checkpoint", report)
    failures = [(lost, rank, name, text) for rank, (name, text, lost, _) in enumerate(reports) if text is not None]
    # If it failed for want of the file wherever it did, all ranks may go on from an earlier one.
    may_go_on = all(lost for lost, *_ in failures)
    if error is not None and (may_go_on or not is_lost):
        raise error
    if failures:
        _, rank, name, text = min(failures)
        kind = DamagedError if may_go_on else RuntimeError
        raise kind(f"Rank {rank} could not restore the checkpoint {name}, so no rank did: {text}") from error
    if len({name for name, *_ in reports}) > 1:
        _raise_different_paths([name for name, *_ in reports])
    found = [names for *_, names in reports]
    if any(names != found[0] for names in found):
        raise RuntimeError(
            f"The ranks would restore different objects of the checkpoint {os.path.basename(path)}. "
            f"{difference_of_ranks(found)}\nWhat was made in the strategy's scope is the same on all ranks: give it to "
            "ts.train.Checkpoint on all of them, under the same names."
        )


def _raise_different_paths(names: list[str]) -> NoReturn:
    raise RuntimeError(
        f"The ranks would restore different checkpoints:\n{lines_of_ranks(names)}\nThe directory must be on a file "
        "system that all hosts share."
    )


def _failure_of(strategy: Any, write: Callable[[], None]) -> Exception | None:
    watch = strategy.workers.watch
    num_collectives = watch.num_collectives
    try:
        write()
    except Exception as error:
        # A state_dict that called a collective has met the ranks that wait for this report: they wait no more.
        if watch.num_collectives != num_collectives:
            raise
        return error
    return None


def _raise_first(reports: list[Any], own: BaseException | None) -> None:
    for rank, (place, text, is_of_system) in enumerate(reports):
        if text is not None:
            kind = WriteFailedError if is_of_system else RuntimeError
            raise kind(f"Rank {rank} could not write the checkpoint {place}: {text}") from own


def _describe_write(error: BaseException | None) -> tuple[str | None, bool]:
    return _describe(error), isinstance(error, OSError)


def _describe(error: BaseException | None) -> str | None:
    return None if error is None else name_error(error)
