"""How the ranks come to the same data order, and how they find out if they did not.

Whatever decides the order draws its random numbers from the chief's stream, on every rank. A rank's own stream is put
back afterwards, so that dropout and augmentation stay different between ranks.

Processes that divide a batch rely on each other: where one holds other data than the rest, examples would be lost.
"""

from __future__ import annotations

import base64
import hashlib
import sys
import zlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from torchstrategy.base import tree
from torchstrategy.base.devices import Placement
from torchstrategy.base.log import warn_once, warning_once
from torchstrategy.data.batch import Components, component_kind
from torchstrategy.data.example_lists import Examples
from torchstrategy.errors import DisagreementError, InvalidArgumentError

if TYPE_CHECKING:
    from typing_extensions import TypeIs

    from torchstrategy.data.pipeline.dataset import Dataset

__all__ = [
    "OrderDigest",
    "RandomSource",
    "SharedStream",
    "Workers",
    "check_equal",
    "check_kinds",
    "checksum",
    "declared_batch_size",
    "find_generators",
    "is_pipeline",
    "kind_of",
    "known_length",
    "note_small_batch",
    "raw_bytes",
    "warn_of_other_values",
]

T = TypeVar("T")


class Workers(Protocol):
    """The processes of a strategy that has more than one."""

    @property
    def rank(self) -> int:
        """This process's rank."""

    @property
    def size(self) -> int:
        """Number of processes."""

    def exchange(self, operation: str, payload: Any) -> list[Any]:
        """Give every rank's payload to all, in rank order; every rank calls it in the same order."""

    def broadcast_object(self, operation: str, payload: Any) -> Any:
        """Give rank 0's payload to all."""

    def report_failure(self, operation: str, error: BaseException) -> None:
        """Tell the other ranks that this one failed, so that none waits for it."""


class RandomSource(Protocol):
    """What random numbers are drawn from: a ``torch.Generator``, or what a pipeline remembers between iterations."""

    def get_state(self) -> Tensor:
        """Return the state, in bytes."""

    def set_state(self, state: Tensor, /) -> Any:
        """Put a state back."""


class SharedStream:
    """Random numbers for what decides the order of the data: the same on every rank, and the same after a resume.

    The first draw continues the chief's stream, exactly as in a program of one process. Later draws come from a stream
    of their own, because by then the ranks' models have drawn differently, and a model that draws must not change the
    order.

    Args:
        workers: the processes, ``None`` if there is one.
        generators: the data's own generators; the chief's states are adopted for good.
        start: the states at the start of an iteration that goes on, as ``start`` returned them.
        current: the state to go on with; ``None`` draws everything again from the start.
    """

    def __init__(
        self,
        workers: Workers | None,
        generators: Sequence[RandomSource],
        start: Sequence[Tensor] | None = None,
        current: Tensor | None = None,
    ) -> None:
        self._workers = workers
        self._generators = list(generators)
        self._start = None if start is None else list(start)
        self._is_replay = start is not None
        self._state = current

    @property
    def start(self) -> list[Tensor] | None:
        """The states of torch's default generator and the data's own ones before the first draw, once it was made."""
        return self._start

    @property
    def current(self) -> Tensor | None:
        """The state of the stream now, once it is one of its own."""
        return self._state

    def draw(self, fn: Callable[[], T]) -> T:
        """Call ``fn`` with the shared stream as torch's default CPU generator."""
        own = torch.get_rng_state()
        is_first = self._state is None
        if self._state is not None:
            torch.set_rng_state(self._state)
        else:
            self._begin(own)
        try:
            return fn()
        finally:
            drawn = torch.get_rng_state()
            self._state = _descendant(drawn) if is_first else drawn
            if self._is_replay or not is_first or (self._workers is not None and self._workers.rank != 0):
                torch.set_rng_state(own)

    def seed(self) -> int:
        """Return a seed that is a function of the states before the first draw."""
        states = self._start or []
        digest = hashlib.blake2b(b"".join(state.numpy().tobytes() for state in states), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1

    def _begin(self, own: Tensor) -> None:
        if self._start is None:
            states = [own, *(generator.get_state() for generator in self._generators)]
            self._start = states if self._workers is None else self._chief_states(self._workers, states)
            if self._workers is None or self._workers.rank == 0:
                return
        elif len(self._start) != len(self._generators) + 1:
            raise InvalidArgumentError(
                f"The state to resume from is of data with {len(self._start) - 1} torch generators, this data has "
                f"{len(self._generators)}. Build the same dataset as when the state was taken."
            )
        torch.set_rng_state(self._start[0])
        for generator, state in zip(self._generators, self._start[1:], strict=True):
            generator.set_state(state)

    @staticmethod
    def _chief_states(workers: Workers, states: list[Tensor]) -> list[Tensor]:
        received = workers.broadcast_object("data order: random state", [_encode(state) for state in states])
        if len(received) != len(states):
            raise DisagreementError(
                f"Rank 0's dataset has {len(received) - 1} torch generators, rank {workers.rank}'s has "
                f"{len(states) - 1}. Build the same dataset on every rank."
            )
        return [_decode(text) for text in received]


class OrderDigest(NamedTuple):
    """A running checksum of the index batches of one iteration."""

    num_batches: int = 0
    checksum: int = 0

    def add(self, indices: Sequence[Any]) -> OrderDigest:
        """Return the checksum with one more global index batch."""
        try:
            text = array("q", indices).tobytes()  # much faster than repr
        except (TypeError, OverflowError):
            text = repr(indices).encode()
        return OrderDigest(self.num_batches + 1, zlib.crc32(text, self.checksum + len(indices)))


def check_equal(workers: Workers, operation: str, payload: Any, advice: str) -> None:
    """Exchange a record and check that all ranks brought the same.

    Raises:
        DisagreementError: some did not; the message names them.
    """
    records = workers.exchange(operation, payload)
    different = [rank for rank, record in enumerate(records) if record != records[0]]
    if different:
        rows = "; ".join(f"rank {rank}: {records[rank]}" for rank in [0, *different])
        raise DisagreementError(f"The ranks disagree about the {operation}. {rows}. {advice}")


def find_generators(data: Any) -> list[RandomSource]:
    """Return what a loader's order is drawn from beside torch's default generator, each once.

    These are the torch generators that the loader, its batch sampler and its samplers hold; and, where it has no
    sampler, those of its dataset, and what a ``ts.data.Dataset`` remembers.
    """
    found: dict[int, RandomSource] = {}
    pending, seen = [data], set()
    while pending:
        holder = pending.pop(0)
        if id(holder) in seen:
            continue
        seen.add(id(holder))
        if is_pipeline(holder) and holder is not data:  # which has a position of its own
            if memories := holder._memories():
                found[id(holder)] = memories
            continue
        attributes = getattr(holder, "__dict__", {})
        found.update((id(value), value) for value in attributes.values() if isinstance(value, torch.Generator))
        pending.extend(attributes[name] for name in ("batch_sampler", "sampler") if name in attributes)
        if isinstance(holder, DataLoader) and (
            holder.batch_sampler is None or isinstance(holder.dataset, IterableDataset)
        ):
            pending.append(holder.dataset)
    return list(found.values())


def is_pipeline(data: Any) -> TypeIs[Dataset]:
    """Say whether data is a ``ts.data.Dataset``, without the modules that make one: who has none need not import them.

    Args:
        data: anything.

    Example:
        >>> from torchstrategy.data.data_order import is_pipeline
        >>> is_pipeline(ts.data.Dataset.range(3)), is_pipeline([0, 1, 2])
        (True, False)
    """
    made_by = sys.modules.get("torchstrategy.data.pipeline.dataset")
    return made_by is not None and isinstance(data, made_by.Dataset)


def known_length(data: Any) -> int | None:
    """Return ``len(data)``, or ``None`` if it has no length."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


def _descendant(state: Tensor) -> Tensor:
    """Return the state of a new stream: continuing ``state`` itself would repeat the chief's next draws."""
    seed = int.from_bytes(hashlib.sha256(state.numpy().tobytes()).digest()[:8], "little")
    return torch.Generator().manual_seed(seed).get_state()


def _encode(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _decode(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


_ROWS = 16


def kind_of(batch: Components) -> list[str]:
    """Return what must be the same in all processes: the structure, and each component's dtype and dimensions."""
    return [tree.describe(batch.spec), *map(component_kind, batch.leaves)]


def check_kinds(kinds: Sequence[list[str] | None]) -> None:
    """Check that the ranks' elements are of one kind.

    Args:
        kinds: what ``kind_of`` returned on each rank, ``None`` where it is not known.

    Raises:
        DisagreementError: they are not; the message shows each rank's.
    """
    known = [(rank, kind) for rank, kind in enumerate(kinds) if kind is not None]
    if any(kind != known[0][1] for _, kind in known):
        rows = "\n".join(f"  rank {rank}: {', '.join(leaves)}{structure}" for rank, (structure, *leaves) in known)
        raise DisagreementError(
            f"The ranks' elements have different structures, dtypes or numbers of dimensions:\n{rows}\n"
            "Every rank's dataset must give elements of the same structure (types and lengths of containers, keys "
            "of dicts) and dtypes; only sizes may differ."
        )


def warn_of_other_values(workers: Workers, batch: Components) -> None:
    """Warn if the ranks read a first batch with different values, each of which loses what the others divide."""
    values = workers.exchange("values of the first global batch", checksum(batch.leaves))
    different = [rank for rank, value in enumerate(values) if value != values[0]]
    if different:
        warn_once(
            f"Ranks {different} read other values in the first global batch than rank 0 did. Every rank must read the "
            "same global batches, because each keeps only its own part of them: a dataset that divides the data by "
            "rank itself would lose examples. Remove that, or distribute it with auto_shard_policy=OFF or "
            "distribute_datasets_from_function. If only random augmentation differs, all is well; seed it alike on "
            "all ranks (ts.utils.set_random_seed) and this is not said."
        )


def checksum(leaves: Iterable[Any]) -> int:
    """Return a checksum of the first and last examples of tensors and arrays."""
    value = 0
    for leaf in leaves:
        for rows in (raw_bytes(leaf, slice(None, _ROWS)), raw_bytes(leaf, slice(-_ROWS, None))):
            value = zlib.crc32(rows, value)
    return value


def declared_batch_size(data: Any) -> int | None:
    """Return the size of the data's batches if it says one, because its first batch may be a smaller last one."""
    size = getattr(data, "batch_size", None)
    if size is None and isinstance(data, DataLoader):
        size = getattr(data.batch_sampler, "batch_size", None) or getattr(data.dataset, "batch_size", None)
    return size if isinstance(size, int) else None


def note_small_batch(data: Any, placement: Placement) -> None:
    """Say once if data declares a global batch size that leaves replicas without examples in every step."""
    size, num_replicas = declared_batch_size(data), placement.num_replicas
    if size is not None and size < num_replicas and placement.first_replica == 0:
        warning_once(
            f"The batch size {size} is smaller than the number of replicas, {num_replicas}: every step leaves "
            f"{num_replicas - size} without examples. The batch size is that of all replicas together: choose "
            f"at least {num_replicas}, at best a multiple of it."
        )


def raw_bytes(leaf: Any, which: slice) -> bytes:
    """Return the memory of some examples of a component; nothing for what has no plain memory."""
    if isinstance(leaf, Tensor):
        if leaf.is_nested or leaf.layout is not torch.strided or leaf.is_quantized or not leaf.dim():
            return b""
        rows = leaf.detach()[which].cpu().resolve_conj().resolve_neg().contiguous()
        # A single row counts as contiguous whatever its stride, with which it can't be seen as bytes.
        return rows.flatten().as_strided((rows.numel(),), (1,)).view(torch.uint8).numpy().tobytes()
    if isinstance(leaf, np.ndarray):
        return b"" if leaf.dtype.hasobject or not leaf.ndim else np.ascontiguousarray(leaf[which]).tobytes()
    if isinstance(leaf, Examples) and leaf.kind != "strings":
        return b"".join(raw_bytes(value, slice(None)) for entry in leaf[which] for value in tree.all_leaves(entry))
    return repr(leaf[which]).encode() if isinstance(leaf, list) else b""
