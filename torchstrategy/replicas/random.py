"""One stream of CPU random numbers for each replica.

torch has one default CPU generator. A replica's state is put into it for the replica's turn. Replica 0 draws from the
program's own stream, as one replica would; the others' streams derive from its state and their ids, and start anew
whenever the program's stream was moved or seeded outside. Switching costs about a microsecond.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["RandomStreams"]


class RandomStreams:
    """The CPU random streams of this process's replicas.

    Args:
        replica_ids: ids of this process's replicas.
    """

    def __init__(self, replica_ids: Sequence[int]) -> None:
        self._replica_ids = replica_ids
        self._states: list[Tensor | None] = [None] * len(replica_ids)
        self._program: Tensor | None = None
        self._entry: list[Tensor | None] = [None] * len(replica_ids)
        self._moved = False

    def begin(self) -> None:
        """Take over the generator for a run."""
        state = torch.default_generator.get_state()
        if self._program is None or not torch.equal(state, self._program):
            self._states = [None] * len(self._replica_ids)
        self._program = state
        self._moved = False

    def enter(self, local_id: int) -> None:
        """Put a replica's stream into the generator."""
        generator = torch.default_generator
        if self._replica_ids[local_id] == 0:
            generator.set_state(self._require_program())
            return
        state = self._states[local_id]
        if state is None:
            generator.manual_seed(derive_seed(self._require_program(), self._replica_ids[local_id]))
            state = generator.get_state()
        else:
            generator.set_state(state)
        self._entry[local_id] = state

    def leave(self, local_id: int) -> None:
        """Take a replica's stream out of the generator."""
        state = torch.default_generator.get_state()
        if self._replica_ids[local_id] == 0:
            self._program = state
            return
        entry = self._entry[local_id]
        self._moved = self._moved or entry is None or not torch.equal(state, entry)
        self._states[local_id] = state

    def end(self, start: Tensor | None = None) -> None:
        """Give the generator back to the program.

        If replicas drew but the program's stream did not move, it moves by one draw: seeding it again with the same
        seed is then visible to ``begin``.
        """
        program = self._require_program()
        torch.default_generator.set_state(program)
        if self._moved and start is not None and torch.equal(program, start):
            torch.empty((), dtype=torch.int64).random_()
            self._program = torch.default_generator.get_state()

    @property
    def program_state(self) -> Tensor | None:
        """State of the program's stream."""
        return self._program

    def _require_program(self) -> Tensor:
        if self._program is None:
            raise RuntimeError("RandomStreams.begin() was not called.")
        return self._program


def derive_seed(state: Tensor, replica_id: int) -> int:
    """Return the seed of a replica's stream for a state of the program's."""
    digest = hashlib.blake2b(state.numpy().tobytes(), digest_size=8, person=replica_id.to_bytes(8, "little"))
    return int.from_bytes(digest.digest(), "little") >> 1
