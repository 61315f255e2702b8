"""Input pipelines: datasets that a process reads for itself, and how their positions travel to other processes.

With another number of pipelines than before, pipeline ``j`` goes on with the old ones ``j``, ``j + num``, ... one after
the other, so that nothing is lost or repeated.
"""

from __future__ import annotations

import base64
import io
import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from torchstrategy.data.batch import Components, components, from_plain, plain_leaves
from torchstrategy.data.data_order import Workers
from torchstrategy.data.pipeline.kind import is_pipeline
from torchstrategy.data.position import END, Position, StreamReader
from torchstrategy.data.rounds import Rounds
from torchstrategy.data.sources import first_element

__all__ = ["PipelineReader", "PipelinesPosition", "combine_states", "open_pipelines"]

#: Returns the data of pipeline ``i`` of ``n``.
Make = Callable[[int, int], Iterable[Any]]


class PipelineReader:
    """Reads the elements of one pipeline, or of several old ones that it takes over.

    Args:
        data: the pipelines' data by their ids, in the order in which they are read.
        states: their positions, or ``None`` to start.
        starts_anew: begin the iterations that follow those whose positions ``states`` holds.
        keeps_elements: elements are still used when the next ones are read.
    """

    def __init__(
        self,
        data: dict[int, Iterable[Any]],
        states: list[dict[str, Any]] | None,
        *,
        starts_anew: bool = False,
        keeps_elements: bool = False,
    ) -> None:
        self._readers = [
            StreamReader(data[i], None, None if states is None else states[i]["reader"], starts_anew=starts_anew)
            for i in data
        ]
        leftovers = [None if states is None or starts_anew else states[i]["leftover"] for i in data]
        self.position = _PipelinePosition(list(data), [reader.position for reader in self._readers], leftovers)
        # A loader makes each batch anew; anybody else may fill the same memory again.
        are_new = [isinstance(value, DataLoader) or is_pipeline(value) for value in data.values()]
        self._copies = [keeps_elements and not is_new for is_new in are_new]

    def next(self) -> Components | None:
        """Return the next element, or ``None`` at the end."""
        position = self.position
        while position.current < len(self._readers):
            reader, leftover = self._readers[position.current], position.leftovers[position.current]
            if leftover is not None:
                position.leftovers[position.current] = None
                return components(first_element(reader.data).spec.unflatten(list(map(from_plain, leftover))))
            item = reader.next()
            if item is not END:
                element = components(item)
                return element.clone() if self._copies[position.current] else element
            position.current += 1
        return None


class _PipelinePosition:
    """Where one reader is; ``rest`` is the part of its latest element that was not used."""

    def __init__(self, ids: list[int], positions: list[Position], leftovers: list[Any]) -> None:
        self._ids = ids
        self._positions = positions
        self.leftovers = leftovers
        self.current = 0
        self.rest: Components | None = None

    def states(self) -> dict[int, dict[str, Any]]:
        """Return the position of each pipeline, by its id."""
        leftovers = list(self.leftovers)
        if self.rest is not None:
            leftovers[min(self.current, len(self._ids) - 1)] = plain_leaves(self.rest)
        positions = [position.state() for position in self._positions]
        return {
            i: {"reader": position, "leftover": leftover}
            for i, position, leftover in zip(self._ids, positions, leftovers, strict=True)
        }


class PipelinesPosition:
    """Where this process is in its pipelines.

    Args:
        rounds: counts the steps.
        readers: the pipelines.
        more: what else a source's state holds; it may be changed.
    """

    def __init__(self, rounds: Rounds, readers: Sequence[PipelineReader], more: dict[str, Any]) -> None:
        self._rounds = rounds
        self._positions = [reader.position for reader in readers]
        self.more = more
        self.is_finished = False

    def state(self) -> dict[str, Any]:
        """Return the position after the last step."""
        return {
            "step": self._rounds.num_steps,
            "is_finished": self.is_finished,
            "pipelines": {i: state for position in self._positions for i, state in position.states().items()},
            **self.more,
        }


def open_pipelines(
    num_pipelines: int, indices: Iterable[int], make: Make, state: dict[str, Any] | None, *, keeps_elements: bool
) -> list[PipelineReader]:
    """Open this process's pipelines, at the start of their data or where a state says.

    Args:
        num_pipelines: how many pipelines there are over all processes.
        indices: which of them this process reads.
        make: returns the data of pipeline ``i`` of ``n``.
        state: what ``combine_states`` returned, or ``None``.
        keeps_elements: elements are still used when the next ones are read.
    """
    states = None if state is None else state["pipelines"]
    starts_anew = state is not None and bool(state["is_finished"])
    if starts_anew and states is not None and len(states) != num_pipelines:
        states, starts_anew = None, False
    num_before = num_pipelines if states is None else len(states)
    return [
        PipelineReader(
            {i: make(num_before, i) for i in range(num_before) if i % num_pipelines == index},
            states,
            starts_anew=starts_anew,
            keeps_elements=keeps_elements,
        )
        for index in indices
    ]


def combine_states(workers: Workers | None, state: dict[str, Any]) -> dict[str, Any]:
    """Return a process's state with the positions of all processes' pipelines, listed by their ids; every one calls it.

    Raises:
        TypeError: a position is not plain data.
    """
    positions = dict(state["pipelines"])
    if workers is not None:
        for text in workers.exchange("state of the input pipelines", _encode(state["pipelines"])):
            positions.update(_decode(text))
    return {**state, "pipelines": [positions[i] for i in sorted(positions)]}


def _encode(states: dict[int, dict[str, Any]]) -> str:
    buffer = io.BytesIO()
    torch.save(states, buffer)
    text = base64.b64encode(buffer.getvalue()).decode()
    _decode(text)  # here it can still be said whose state is unreadable
    return text


def _decode(text: str) -> Any:
    try:
        return torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)
    except (pickle.UnpicklingError, RuntimeError) as error:
        raise TypeError(
            "The state_dict() of a dataset must be plain data: tensors, numbers, strings, None, and dicts, lists, "
            f"tuples and sets of these. ({error})"
        ) from None
