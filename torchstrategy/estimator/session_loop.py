"""The loop that train, evaluate and predict share: hooks around steps, until the data or a hook ends it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torchstrategy.base.labels import label
from torchstrategy.estimator.input_batches import Batches
from torchstrategy.estimator.session import Session
from torchstrategy.estimator.session_hooks import HookCalls, SessionRunHook
from torchstrategy.estimator.step_results import StepResult
from torchstrategy.strategies.strategy import Strategy

__all__ = ["reporting_failures", "run_steps"]


def run_steps(
    session: Session,
    batches: Batches,
    hooks: Sequence[SessionRunHook],
    prepare: Callable[[], None],
    step: Callable[[Any, Any], StepResult],
) -> Iterator[Any]:
    """Run steps until the data ends or a hook asks for the end.

    Args:
        session: what the hooks see.
        batches: the data.
        hooks: in the order in which they are called.
        prepare: called between the hooks' ``begin`` and ``after_create_session``; it restores values.
        step: makes one with features and labels.

    Yields:
        The outputs of each step.
    """
    with HookCalls(hooks, session.checkpoint.global_step) as calls:
        with session.strategy.scope():  # variables that hooks make belong to the model's replicas
            calls.begin()
        prepare()
        session.note_restored()
        calls.after_create_session(session)
        session.agree_to_stop()
        while not session.should_stop():
            calls.before_run(session)
            with label("input"):
                batch = batches.next()
            if batch is None:
                break
            result = step(*batch)
            session.end_step(*result)
            calls.after_run(session.resolve)
            session.agree_to_stop()
            yield result.outputs
        calls.end(session)


@contextlib.contextmanager
def reporting_failures(strategy: Strategy) -> Iterator[None]:
    """Tell the processes that step together of an error here, because they would wait for this one."""
    try:
        yield
    except Exception as error:
        if strategy.workers is not None:
            strategy.workers.report_failure("Estimator", error)
        raise
