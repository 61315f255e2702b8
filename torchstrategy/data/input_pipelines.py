"""Input pipelines: datasets that a process reads for itself, and how their positions travel to other processes.

With another number of pipelines than before, pipeline ``j`` goes on with the old ones ``j``, ``j + num``, ... one after
the other, so that nothing is lost or repeated.

The processes tell each other at each step how much they have, and go on until nobody has any. A replica without data
gets an empty part, so that all replicas run the same function and meet at the same collectives.
"""

from __future__ import annotations

import base64
import contextlib
import io
import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from torchstrategy.base import tree
from torchstrategy.base.values import BatchShares
from torchstrategy.data.batch import (
    Components,
    LocalBatch,
    batch_length,
    blank_leaf,
    component_kind,
    components,
    empty_like,
    from_plain,
    join_parts,
    plain_leaves,
)
from torchstrategy.data.data_order import Workers, check_kinds, is_pipeline, kind_of
from torchstrategy.data.position import END, Position, StreamPosition, StreamReader
from torchstrategy.data.sources import first_element
from torchstrategy.errors import DisagreementError

__all__ = ["PipelineReader", "Rounds", "combine_states", "open_pipelines", "position_of"]


class Rounds:
    """The steps of one iteration.

    Args:
        workers: the processes, ``None`` if there is one.
        num_steps: how many steps of the iteration were made before.
        example: returns an element of data that this process might have, or raises ``ValueError``.
    """

    def __init__(self, workers: Workers | None, num_steps: int, example: Callable[[], Components]) -> None:
        self._workers = workers
        self._example = example
        self.num_steps = num_steps
        self._template: Components | None = None  # of an empty part
        self._kinds: list[Any] = [None] * (1 if workers is None else workers.size)  # by rank, as last heard
        self._told: Any = None

    def step(self, parts: Sequence[Components | None], *, has_data: bool) -> LocalBatch | None:
        """Combine the parts of all replicas into one step.

        Args:
            parts: one for each replica of this process, ``None`` where there is no data.
            has_data: whether this process still has data, even if all its parts of this step are empty.

        Returns:
            The step, or ``None`` if no process has data any more.

        Raises:
            DisagreementError: the processes' elements have different structures.
        """
        example = next((part for part in parts if part is not None), None)
        if self._template is None:
            self._template = self._make_template(example)
        record = self._record(parts, example, has_data=has_data)
        records = [record] if self._workers is None else self._workers.exchange("next batches", record)
        steps = [record["step"] for record in records]
        if len(set(steps)) > 1:
            raise DisagreementError(
                f"The ranks are at different steps of the dataset (by rank): {steps}. Load the same state on every "
                "rank."
            )
        if not any(record["has_data"] for record in records):
            return None
        self._check_kinds(records)
        if self._workers is not None and any(record["lengths"] is None for record in records):
            self._share_template(self._workers)
            record = self._record(parts, example, has_data=has_data)
            records = self._workers.exchange("next batches", record)
        if self._template is None or not _is_complete(records):
            return None
        template = self._template
        filled = [template if part is None else part for part in parts]
        self.num_steps += 1
        return join_parts(filled, _shares(records))

    def _make_template(self, example: Components | None) -> Components | None:
        if example is None and self._workers is not None:  # all data may be with other processes after a resume
            with contextlib.suppress(ValueError):
                example = self._example()
        if example is None:
            return None
        # Beside examples a scalar stays what it is; alone it can't be empty.
        return example if _is_scalar(example) else empty_like(example)

    def _record(
        self, parts: Sequence[Components | None], example: Components | None, *, has_data: bool
    ) -> dict[str, Any]:
        """Return what the ranks tell each other: who has data, and the length of every component for every replica."""
        template = self._template
        if template is None:
            nothing = {"has_data": False, "is_full": False, "is_scalar": False, "lengths": None, "kind": None}
            return {"step": self.num_steps, **nothing}
        kind = None
        if example is not None:
            kind = kind_of(example)
            kind, self._told = (None if kind == self._told else kind), kind
        count = range(len(template.leaves))
        return {
            "step": self.num_steps,
            "has_data": has_data,
            "is_full": all(part is not None for part in parts),
            "is_scalar": _is_scalar(template),
            "lengths": [[0 if part is None else batch_length(part.leaves[i]) for part in parts] for i in count],
            "kind": kind,
        }

    def _check_kinds(self, records: list[dict[str, Any]]) -> None:
        if all(record["kind"] is None for record in records):
            return
        self._kinds = [record["kind"] or kind for record, kind in zip(records, self._kinds, strict=True)]
        check_kinds(self._kinds)

    def _share_template(self, workers: Workers) -> None:
        """Give ranks that never had an element the structure of an empty one."""
        own = None if self._template is None else _to_record(self._template)
        heard = workers.exchange("structure of an empty batch", own)
        without = [rank for rank, record in enumerate(heard) if record is None]
        template = _from_record(next(record for record in heard if record is not None), without)
        self._template = self._template or template


def _is_scalar(element: Components) -> bool:
    """Say whether an element has no batch dimension anywhere."""
    leaves = [leaf for leaf in element.leaves if leaf is not None]
    return bool(leaves) and all(batch_length(leaf) is None for leaf in leaves)


def _to_record(template: Components) -> Any:
    kinds = [component_kind(leaf) for leaf in template.leaves]
    sizes = [list(leaf.shape[1:]) if hasattr(leaf, "shape") else None for leaf in template.leaves]
    return [tree.to_text(template.spec), kinds, sizes]


def _from_record(record: Any, without: list[int]) -> Components:
    text, kinds, sizes = record
    leaves = [blank_leaf(kind, size) for kind, size in zip(kinds, sizes, strict=True)]
    if text is None or any(leaf is NotImplemented for leaf in leaves):
        raise RuntimeError(
            f"The dataset gave ranks {without} no data at all while others have some, and the structure of an empty "
            f"batch can't be sent there: it holds dataclasses, scalars or objects that are no tensors ({kinds}). Give "
            "every input pipeline at least one batch."
        )
    return Components(leaves, tree.from_text(text))


def _is_complete(records: list[dict[str, Any]]) -> bool:
    """Say whether every replica has a part that can stand for it: an element without batch dimension can't be empty."""
    return all(record["is_full"] for record in records) or not any(record["is_scalar"] for record in records)


def _shares(records: list[dict[str, Any]]) -> list[BatchShares | None]:
    shares: list[BatchShares | None] = []
    for columns in zip(*(record["lengths"] for record in records), strict=True):
        sizes = [size for column in columns for size in column]
        shares.append(None if None in sizes else BatchShares(tuple(sizes)))
    return shares


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

    def __init__(self, ids: list[int], positions: list[StreamPosition], leftovers: list[Any]) -> None:
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


def position_of(rounds: Rounds, readers: Sequence[PipelineReader], **more: Any) -> Position:
    """Return where this process is in its pipelines.

    Args:
        rounds: counts the steps.
        readers: the pipelines.
        more: what else a source's state holds.
    """
    positions = [reader.position for reader in readers]  # not the readers, which hold worker processes

    def ask() -> dict[str, Any]:
        states = {i: state for position in positions for i, state in position.states().items()}
        return {"step": rounds.num_steps, "pipelines": states}

    return Position(ask=ask, **more)


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
