"""How the ranks come to the same data order, and how they find out if they did not.

Whatever decides the order draws its random numbers from the chief's stream, on every rank. A rank's own stream is put
back afterwards, so that dropout and augmentation stay different between ranks.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from torchstrategy.errors import DisagreementError

__all__ = ["OrderDigest", "SharedStream", "Workers", "check_equal", "find_generators", "known_length"]

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


class SharedStream:
    """Random numbers that are the same on every rank, for what decides the order of the data.

    The first draw continues the chief's stream, exactly as in a program of one process. Later ones come from a stream
    of their own, because by then the ranks' models have drawn differently.

    Args:
        workers: the processes.
        generators: the data's own generators; the chief's states are adopted for good.
    """

    def __init__(self, workers: Workers, generators: Sequence[torch.Generator]) -> None:
        self._workers = workers
        self._generators = list(generators)
        self._state: Tensor | None = None

    def draw(self, fn: Callable[[], T]) -> T:
        """Call ``fn`` with the shared stream as torch's default CPU generator."""
        own = torch.get_rng_state()
        if self._state is None:
            self._adopt_chief(own)
        else:
            torch.set_rng_state(self._state)
        try:
            return fn()
        finally:
            drawn = torch.get_rng_state()
            is_first, self._state = self._state is None, drawn
            if is_first:
                self._state = _descendant(drawn)
            if not is_first or self._workers.rank != 0:
                torch.set_rng_state(own)

    def _adopt_chief(self, own: Tensor) -> None:
        states = [_encode(own), *(_encode(generator.get_state()) for generator in self._generators)]
        received = self._workers.broadcast_object("data order: random state", states)
        if len(received) != len(states):
            raise DisagreementError(
                f"Rank 0's dataset has {len(received) - 1} torch generators, rank {self._workers.rank}'s has "
                f"{len(states) - 1}. Build the same dataset on every rank."
            )
        if self._workers.rank != 0:
            torch.set_rng_state(_decode(received[0]))
            for generator, state in zip(self._generators, received[1:], strict=True):
                generator.set_state(_decode(state))


class OrderDigest:
    """A running hash of the index batches of one iteration."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._num_batches = 0

    def add(self, indices: Sequence[Any]) -> None:
        """Count one global index batch in."""
        self._hash.update(repr(indices).encode())
        self._num_batches += 1

    def record(self) -> list[Any]:
        """Return what the ranks compare: the number of batches and their hash."""
        return [self._num_batches, self._hash.hexdigest()[:16]]


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


def find_generators(data: Any) -> list[torch.Generator]:
    """Return the torch generators that a loader, its batch sampler and its samplers hold, each once."""
    found: dict[int, torch.Generator] = {}
    pending, seen = [data], set()
    while pending:
        holder = pending.pop(0)
        if id(holder) in seen:
            continue
        seen.add(id(holder))
        attributes = getattr(holder, "__dict__", {})
        found.update((id(value), value) for value in attributes.values() if isinstance(value, torch.Generator))
        pending.extend(attributes[name] for name in ("batch_sampler", "sampler") if name in attributes)
        if isinstance(holder, DataLoader) and holder.batch_sampler is None:
            pending.append(holder.dataset)
    return list(found.values())


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
