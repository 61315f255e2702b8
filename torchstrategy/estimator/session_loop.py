"""The loop that train, evaluate and predict share, hooks around steps, and the batches that it reads."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torchstrategy.base import tree
from torchstrategy.base.labels import label
from torchstrategy.base.log import logger
from torchstrategy.base.values import get_shares, select_replica
from torchstrategy.data.distribute import distribute_from_function
from torchstrategy.estimator.building import Definition
from torchstrategy.estimator.model_fn import as_dataset, call_input_fn, parse_element
from torchstrategy.estimator.session import Session, StepResult
from torchstrategy.estimator.session_hooks import HookCalls, SessionRunHook
from torchstrategy.estimator.specs import ModeKeys
from torchstrategy.strategies.default import DefaultStrategy
from torchstrategy.strategies.strategy import Strategy

__all__ = ["Batches", "open_batches", "run_steps"]


class Batches:
    """Gives one batch to each replica, again and again.

    Args:
        dataset: the distributed dataset.
        drops_incomplete: whether the data ends where a replica, of whatever process, has no batch any more.
    """

    def __init__(self, dataset: Any, *, drops_incomplete: bool) -> None:
        self._dataset = dataset
        self._drops_incomplete = drops_incomplete
        self._ahead: Any = None
        self._is_at_start = True
        self._has_ended = False
        self.is_restored = False
        self._begin()

    def example(self) -> tuple[Any, Any] | None:
        """Return features and labels for this process's first replica, or ``None`` if there is no data at all.

        They are not lost: the next call of ``next`` gives them.
        """
        if self._ahead is None:
            self._ahead = next(self._iterator, None)
        return None if self._ahead is None else parse_element(select_replica(0, self._ahead))

    def next(self) -> tuple[Any, Any] | None:
        """Return features and labels for the replicas of this process, or ``None`` at the end of the data."""
        if self._has_ended:
            return None
        element, self._ahead = self._ahead, None
        if element is None:
            element = next(self._iterator, None)
        self._is_at_start = False
        if element is not None and self._drops_incomplete and _lacks_batches(element):
            logger.info("The last batches are dropped: there are fewer of them than replicas.")
            element = None
        self._has_ended = element is None
        return None if element is None else parse_element(element)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that ``next`` gave."""
        return self._start if self._is_at_start else self._dataset.state_dict()  # type: ignore[no-any-return]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a state was taken; if that was the end of the data, begin anew."""
        self._dataset.load_state_dict(state)
        self.is_restored = True
        self._begin()

    @property
    def state_is_collective(self) -> bool:
        """Whether every process must call ``state_dict`` at the same point."""
        return bool(self._dataset.state_is_collective)

    def _begin(self) -> None:
        self._iterator = iter(self._dataset)
        self._start = self._dataset.state_dict()
        self._ahead = None
        self._is_at_start = True
        self._has_ended = False


def open_batches(
    input_fn: Callable[..., Any],
    definition: Definition,
    strategy: Strategy,
    mode: str,
    *,
    is_distributed: bool,
) -> Batches:
    """Call a program's ``input_fn``, once in this process, and deal its batches to the replicas.

    Args:
        input_fn: the program's function.
        definition: has what the function is given.
        strategy: whose replicas get the batches.
        mode: what the data is for; in training the data ends where a replica has no batch.
        is_distributed: whether the function is told about the replicas, by ``input_context``.
    """

    def dataset_fn(context: Any) -> Any:
        params = copy.deepcopy(definition.params)
        return as_dataset(call_input_fn(input_fn, mode, params, definition.config, context if is_distributed else None))

    if isinstance(strategy, DefaultStrategy):  # which would give the data as it is
        dataset = distribute_from_function(dataset_fn, strategy.placement, None, None)
    else:
        dataset = strategy.distribute_datasets_from_function(dataset_fn)
    return Batches(dataset, drops_incomplete=mode == ModeKeys.TRAIN)


def _lacks_batches(element: Any) -> bool:
    """Say whether a replica of any process has no batch."""
    shares = (get_shares(leaf) for leaf in tree.all_leaves(element))
    return any(tag is not None and len(tag.shares) > 1 and 0 in tag.shares for tag in shares)


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
