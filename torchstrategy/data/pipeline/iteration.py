"""Iterating over a pipeline, the share of it that a process reads, and the states from which an iteration continues."""

from __future__ import annotations

import dataclasses
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch.utils.data import get_worker_info

from torchstrategy.data.pipeline.op import OTHER_POSITION, Node, Op, State
from torchstrategy.data.pipeline.ops import BatchOp, ShardOp, elements_of
from torchstrategy.data.pipeline.randomness import Draws, WorkerDraws
from torchstrategy.errors import InvalidArgumentError

__all__ = [
    "Iterations",
    "PipelineIterator",
    "has_hint",
    "shard_by_hint",
    "shard_files",
    "splits_by_file",
    "without_buffers",
]


def splits_by_file(op: Op) -> bool:
    """Say whether the elements over parts of the files are, together, those over all files."""
    drops = any(isinstance(part, BatchOp) and part.drop_remainder for part in op.tree())
    return op.num_files is not None and not drops and all(part.splits_by_file for part in op.tree())


def shard_files(op: Op, num_shards: int, index: int) -> Op:
    """Return the pipeline over every ``num_shards``-th file."""
    return op.transformed(lambda part: part.with_part_of_files(num_shards, index))


def has_hint(op: Op) -> bool:
    """Say whether there is a ``shard`` whose numbers a strategy chooses."""
    return any(isinstance(part, ShardOp) and part.is_hint for part in op.tree())


def shard_by_hint(op: Op, num_shards: int, index: int) -> Op:
    """Return the pipeline with numbers in place of the hints."""

    def change(part: Op) -> Op:
        if isinstance(part, ShardOp) and part.is_hint:
            return dataclasses.replace(part, num_shards=num_shards, index=index)
        return part

    return op.transformed(change)


def without_buffers(op: Op) -> Op:
    """Return the pipeline without what only orders, keeps or reads ahead, to look at one element."""
    return op.transformed(lambda part: part.inputs[0] if part.only_buffers else part)


class Iterations:
    """Where the latest iteration of a dataset stands, and where its next one begins.

    Args:
        op: the dataset's last operation.
    """

    def __init__(self, op: Op) -> None:
        self._op = op
        self._loaded: State | None = None
        self._latest: weakref.ref[PipelineIterator] | None = None
        self._latest_number = 0
        self._left: State | None = None  # the latest iterator's state, once that is gone
        self._worker: tuple[int, Op] | None = None
        self._num_begun = 0

    def copy(self) -> Iterations:
        """Return the position of a copy of the dataset: only what was loaded counts there."""
        result = Iterations(self._op)
        result._loaded = self._loaded
        return result

    def iterate(self) -> PipelineIterator:
        """Begin an iteration, or continue at the state that was loaded."""
        op, make_draws = self._share_of_worker()
        if self._loaded is not None:
            _check_pipeline(self._loaded, op)  # a worker process has another part of the pipeline
        self._latest_number += 1
        iterator = PipelineIterator(op, make_draws, self._loaded, partial(self._take_over, self._latest_number))
        self._loaded = self._left = None
        self._latest = weakref.ref(iterator)
        return iterator

    def state_dict(self) -> State:
        """Return the state of the latest iterator, or of the next one if a state was loaded since."""
        iterator = None if self._latest is None else self._latest()
        if self._loaded is not None:
            return self._loaded
        if iterator is not None:
            return iterator.state_dict()
        if self._left is not None:
            return _checked(self._left)
        return _beginning(self._share_of_worker()[0])

    def load_state_dict(self, state: State) -> None:
        """Let the next iteration begin at a state."""
        self.check(state)
        self._loaded = state
        self._latest = self._left = None
        self._latest_number += 1

    def check(self, state: State) -> None:
        """Check that a state is one of this pipeline.

        Raises:
            TypeError: it is none of a dataset.
            InvalidArgumentError: it is another pipeline's.
        """
        _check_state(state, self._share_of_worker()[0])

    def _take_over(self, number: int, iterator: PipelineIterator) -> None:
        if number == self._latest_number:
            self._left = iterator.final_state()

    def _share_of_worker(self) -> tuple[Op, Callable[[], Draws]]:
        """In a worker process of a ``DataLoader``, return its part of the pipeline, with seeds equal in all workers."""
        info = get_worker_info()
        if info is None:
            return self._op, Draws
        if info.num_workers == 1:
            self._worker = (info.id, self._op)
        if self._worker is None or self._worker[0] != info.id:
            by_file = splits_by_file(self._op) and (self._op.num_files or 0) >= info.num_workers
            share = shard_files(self._op, info.num_workers, info.id) if by_file else None
            self._worker = (info.id, share or ShardOp((self._op,), info.num_workers, info.id))
        return self._worker[1], lambda: self._worker_draws(info.seed - info.id)

    def _worker_draws(self, loader_seed: int) -> Draws:
        self._num_begun += 1
        return WorkerDraws([loader_seed], [self._num_begun - 1])


class PipelineIterator(Iterator[Any]):
    """Iterates over a dataset once. It begins at the first ``next``, where random seeds are drawn.

    Args:
        op: the last operation.
        make_draws: gives the seeds.
        state: where to continue; ``None`` for the beginning.
        on_close: called when the iterator is dropped.
    """

    def __init__(
        self,
        op: Op,
        make_draws: Callable[[], Draws],
        state: State | None,
        on_close: Callable[[PipelineIterator], None],
    ) -> None:
        self._op = op
        self._make_draws = make_draws
        self._loaded = state
        self._on_close = on_close
        self._node: Node | None = None
        self._keys: list[list[int]] = []
        self._is_finished = False
        self._failure: str | None = None  # not the error itself, whose traceback would keep threads alive

    def __iter__(self) -> PipelineIterator:
        return self

    def __next__(self) -> Any:
        if self._is_finished:
            raise StopIteration
        if self._failure is not None:
            raise RuntimeError(f"This iterator ended with an error: {self._failure}. Take a new one: iter(dataset).")
        try:
            if self._node is None:
                self._node = self._begin()
            return next(self._node)
        except StopIteration:
            self._is_finished, self._node = True, None
            raise
        except Exception as error:
            self._failure, self._node = repr(error), None
            raise

    def state_dict(self) -> State:
        """Return the position after the last element.

        Raises:
            RuntimeError: the iterator ended with an error.
        """
        return _checked(self.final_state())

    def load_state_dict(self, state_dict: State) -> None:
        """Continue where a state was taken; if that was at the end, a new iteration begins.

        Raises:
            TypeError: it is no state of a dataset.
            InvalidArgumentError: it belongs to another pipeline; nothing has changed.
        """
        self._check_state(state_dict)
        self._loaded, self._node, self._is_finished, self._failure = state_dict, None, False, None

    def _check_state(self, state: State) -> None:
        _check_state(state, self._op)

    def final_state(self) -> State:
        """Return the position after the last element, or an error."""
        if self._failure is not None:
            return {"error": self._failure}
        if self._node is None and not self._is_finished:
            return _beginning(self._op) if self._loaded is None else self._loaded
        position = None if self._node is None else self._node.state_dict()
        return _state(self._op, is_finished=self._is_finished, keys=self._keys, position=position)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._on_close(self)

    def _begin(self) -> Node:
        state = self._loaded
        if state is not None:
            for op, (iteration, base) in zip(self._op.random_ops(), state["memories"], strict=True):
                op.memory.recall(iteration, base)
            self._op.adopt(state["keys"])
        continues = state is not None and state["position"] is not None
        self._keys = state["keys"] if continues else self._op.resolve(self._make_draws())  # type: ignore[index]
        node = elements_of(self._op.make(iter(self._keys)))
        node.reset(state["position"] if continues else None)  # type: ignore[index]
        self._loaded = None
        return node


def _state(op: Op, *, is_finished: bool, keys: list[list[int]], position: State | None) -> State:
    memories = [[op.memory.iteration, op.memory.base] for op in op.random_ops()]
    return {
        "pipeline": op.describe(),
        "is_finished": is_finished,
        "keys": keys,
        "memories": memories,
        "position": position,
    }


def _check_state(state: State, op: Op) -> None:
    keys = {"pipeline", "is_finished", "keys", "memories", "position"}
    if not isinstance(state, dict) or set(state) != keys:
        is_distributed = isinstance(state, dict) and "kind" in state
        raise TypeError(
            "Expected what state_dict() of a ts.data.Dataset returned. Received: "
            + (f"that of a distributed dataset. {OTHER_POSITION}" if is_distributed else f"{state!r:.200}")
        )
    _check_pipeline(state, op)


def _check_pipeline(state: State, op: Op) -> None:
    if state["pipeline"] != op.describe():
        raise InvalidArgumentError(
            f"The state belongs to another pipeline. The state's: {state['pipeline']}. This one: {op.describe()}. "
            "Build the dataset with the same operations, sizes and number of files, and the same number of workers."
        )


def _beginning(op: Op) -> State:
    return _state(op, is_finished=False, keys=op.kept_keys(), position=None)


def _checked(state: State) -> State:
    if "error" in state:
        raise RuntimeError(
            f"The latest iteration ended with an error, so its position is not known: {state['error']}. Take states "
            "before, or begin a new iteration."
        )
    return state
