"""One stream of random numbers for each replica.

torch has one default CPU generator. A replica's state is put into it for the replica's turn; of replicas that run at
the same time the first uses it, and the others have generators of their own. Replica 0 draws from the program's own
stream, as one replica would; the others' streams derive from its state and their ids, and start anew whenever the
program's stream was moved or seeded outside. Switching costs about a microsecond. Accelerators have a generator each,
which ``torch.manual_seed`` seeds alike: there only the seeds are changed. A generator that an object of the scope holds
has streams in the same way, because all processes seed theirs alike.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchstrategy.replicas.thread_generators import own_generator

__all__ = ["RandomStreams", "derive_seed", "replica_generator"]


class RandomStreams:
    """The random streams of this process's replicas.

    Args:
        replica_ids: ids of this process's replicas.
        devices: their devices.
        generator: the one that the replicas use in turn; ``None`` for torch's default one.
        concurrent: whether the replicas draw at the same time: each but the first has a generator of its own.
    """

    def __init__(
        self,
        replica_ids: Sequence[int],
        devices: Sequence[torch.device],
        generator: torch.Generator | None = None,
        *,
        concurrent: bool = False,
    ) -> None:
        self._replica_ids = replica_ids
        self._generator = torch.default_generator if generator is None else generator
        self._generators = [
            torch.Generator() if concurrent and local_id else self._generator for local_id in range(len(replica_ids))
        ]
        self._at_once = range(len(replica_ids)) if concurrent else ()
        self._held: dict[torch.Generator, RandomStreams] = {}
        self._held_in_run: list[RandomStreams] = []
        self._accelerators = [(i, d) for i, d in zip(replica_ids, devices, strict=True) if i and d.type == "cuda"]
        self._seeds: dict[int, int] = {}
        #: The other replicas' streams; replica 0's is the program's.
        self._states: list[Tensor | None] = [None] * len(replica_ids)
        self._start: Tensor | None = None
        self._program: Tensor | None = None
        self._entries: list[Tensor | None] = [None] * len(replica_ids)
        self._moved = False

    def hold(self, objects: Iterable[Any]) -> None:
        """Take up the generators that recorded objects hold, for the first replica; others have their counterparts."""
        first = self._replica_ids[0]
        if first == 0:
            return
        for obj in objects:
            for member in obj.modules() if isinstance(obj, nn.Module) else (obj,):
                for value in member.__dict__.values():
                    if isinstance(value, torch.Generator) and value not in self._held:
                        self._held[value] = RandomStreams([first], [value.device], value)

    def begin(self) -> None:
        """Take over the generator for a run; replicas that draw at the same time enter here, and leave at the end."""
        self._held_in_run = list(self._held.values())
        for held in self._held_in_run:
            held.begin()
        state = self._generator.get_state()
        if self._program is None or not torch.equal(state, self._program):
            self._states = [None] * len(self._replica_ids)
        self._start = self._program = state
        self._moved = False
        for local_id in self._at_once:
            self.enter(local_id)

    def seed_accelerators(self) -> None:
        """Give the accelerators' generators seeds of their own if the user has seeded them alike since."""
        for replica_id, device in self._accelerators:
            generator = _default_generator(device)
            seed = generator.initial_seed()
            if seed != self._seeds.get(replica_id):
                self._seeds[replica_id] = derive_seed(torch.tensor([seed]), replica_id)
                generator.manual_seed(self._seeds[replica_id])

    def enter(self, local_id: int) -> None:
        """Put a replica's stream into its generator."""
        for held in self._held_in_run if local_id == 0 else ():
            held.enter(0)
        generator = self._generators[local_id]
        start, program = self._begun()
        if self._replica_ids[local_id] == 0:
            generator.set_state(program)
            return
        state = self._states[local_id]
        if state is None:
            # From the state at the start of the run: where replica 0's stream is by now depends on merge points.
            generator.manual_seed(derive_seed(start, self._replica_ids[local_id]))
            state = generator.get_state()
        else:
            generator.set_state(state)
        self._entries[local_id] = state

    def leave(self, local_id: int) -> None:
        """Take a replica's stream out of its generator."""
        for held in self._held_in_run if local_id == 0 else ():
            held.leave(0)
        state = self._generators[local_id].get_state()
        if self._replica_ids[local_id] == 0:
            self._program = state
            return
        entry = self._entries[local_id]
        self._moved = self._moved or entry is None or not torch.equal(state, entry)
        self._states[local_id] = state

    def end(self) -> None:
        """Give the generator back to the program.

        If replicas drew but the program's stream did not move, it moves by one draw: seeding it again with the same
        seed is then visible to ``begin``.
        """
        for local_id in self._at_once:
            self.leave(local_id)
        for held in self._held_in_run:
            held.end()
        start, program = self._begun()
        self._generator.set_state(program)
        if self._moved and torch.equal(program, start):
            torch.empty((), dtype=torch.int64, device=self._generator.device).random_(generator=self._generator)
            self._program = self._generator.get_state()

    def on_this_thread(self, local_id: int) -> contextlib.AbstractContextManager[None]:
        """Let this thread draw from a replica's generator, if that is not the default one."""
        generator = self._generators[local_id]
        return contextlib.nullcontext() if generator is self._generator else own_generator(generator, self)

    def _begun(self) -> tuple[Tensor, Tensor]:
        if self._start is None or self._program is None:
            raise RuntimeError("RandomStreams.begin() was not called.")
        return self._start, self._program


def replica_generator(generator: torch.Generator, replica_id: int) -> torch.Generator:
    """Return a replica's counterpart of a generator that the user made: its stream is another one."""
    return torch.Generator(generator.device).manual_seed(derive_seed(generator.get_state(), replica_id))


def _default_generator(device: torch.device) -> torch.Generator:
    torch.cuda.init()  # type: ignore[no-untyped-call]
    return torch.cuda.default_generators[device.index or 0]


def derive_seed(state: Tensor, replica_id: int) -> int:
    """Return the seed of a replica's stream for a state of the program's."""
    digest = hashlib.blake2b(state.numpy().tobytes(), digest_size=8, person=replica_id.to_bytes(8, "little"))
    return int.from_bytes(digest.digest(), "little") >> 1
