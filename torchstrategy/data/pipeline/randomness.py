"""Where the random numbers of a pipeline come from.

When an iteration begins, every random operation gets a *key*, a few integers that decide everything random in it. Keys
are part of a pipeline's state. Only here is torch's random stream read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchstrategy.data.pipeline.dataset_options import check_int
from torchstrategy.data.pipeline.elements import call, to_element
from torchstrategy.errors import InvalidArgumentError

__all__ = [
    "Draws",
    "KeyedDraws",
    "Memories",
    "Memory",
    "Rejection",
    "Weighted",
    "WorkerDraws",
    "mix",
    "random_key",
    "random_stream",
]

_MASK = (1 << 64) - 1


@dataclass
class Memory:
    """What a random operation remembers between iterations.

    Args:
        iteration: how many iterations have begun.
        bases: the order it drew once, if it keeps one for ever. Copies share it: they may be parts of one split.
    """

    iteration: int = 0
    bases: list[int] = field(default_factory=list)

    @property
    def base(self) -> int | None:
        """The order it drew once."""
        return self.bases[0] if self.bases else None

    def recall(self, iteration: int, base: int | None) -> None:
        """Remember what was so before; an order that was drawn once stays if there was none."""
        self.iteration = iteration
        if base is not None:
            self.bases[:] = [base]


class Memories:
    """What the random operations of a pipeline remember, as the state of a generator.

    Args:
        memories: those of the operations.
    """

    def __init__(self, memories: Sequence[Memory]) -> None:
        self._memories = memories

    def get_state(self) -> Tensor:
        """Return it in bytes."""
        numbers = [[memory.iteration, -1 if memory.base is None else memory.base] for memory in self._memories]
        return torch.tensor(numbers, dtype=torch.int64, device="cpu").flatten().view(torch.uint8)

    def set_state(self, state: Tensor) -> None:
        """Put it back; an order that was drawn once stays if there was none.

        Raises:
            InvalidArgumentError: it is of another pipeline.
        """
        numbers = state.clone().view(torch.int64).tolist()
        if len(numbers) != 2 * len(self._memories):
            raise InvalidArgumentError(
                f"The state to resume from is of a ts.data.Dataset with {len(numbers) // 2} random operations, this "
                f"one has {len(self._memories)}. Build the same dataset as when the state was taken."
            )
        for memory, iteration, base in zip(self._memories, numbers[::2], numbers[1::2], strict=True):
            memory.recall(iteration, None if base < 0 else base)


class Draws:
    """Gives random operations their seeds when an iteration begins, from torch's default CPU generator."""

    def seed(self) -> int:
        """Return a new seed."""
        return int(torch.empty((), dtype=torch.int64, device="cpu").random_())

    def fixed_seed(self, memory: Memory) -> int:
        """Return the seed of an operation that has one order for ever, drawn once."""
        if not memory.bases:
            memory.bases.append(self.seed())
        return memory.bases[0]

    def iteration(self, memory: Memory) -> list[int]:
        """Count an iteration, and return what tells it from others."""
        memory.iteration += 1
        return [memory.iteration - 1]

    def silent_seed(self) -> int:
        """Return a seed that takes nothing from torch's stream: a hash of the generator's state."""
        return int.from_bytes(hashlib.sha256(torch.get_rng_state().numpy().tobytes()).digest()[:8], "little")

    def for_cache(self, memory: object) -> Draws | None:  # noqa: ARG002 - for subclasses
        """Return what gives a cache its order; ``None`` if it keeps its first one."""
        return None


class KeyedDraws(Draws):
    """As a function of a key: for datasets inside datasets.

    Args:
        key: what decides the seeds of the dataset.
        number: integers that say which of several iterations of it this is.
    """

    def __init__(self, key: Sequence[int], number: Sequence[int]) -> None:
        self._key = list(key)
        self._number = list(number)
        self._num_seeds = 0
        self._numbers: dict[int, int] = {}  # of what is used several times and must be the same

    def seed(self) -> int:
        """Return a new seed."""
        self._num_seeds += 1
        return mix([*self._key, *self._number, self._num_seeds])

    def fixed_seed(self, memory: Memory) -> int:
        """Return a seed that is the same in all iterations."""
        return mix([*self._key, self._number_of(memory.bases)])

    def iteration(self, memory: Memory) -> list[int]:  # noqa: ARG002 - the number decides alone
        """Return the iteration's number."""
        return self._number

    def silent_seed(self) -> int:
        """Return a new seed."""
        return self.seed()

    def for_cache(self, memory: object) -> Draws | None:
        """Return what depends on the key and on the cache only: all those datasets may share it."""
        return KeyedDraws([*self._key, self._number_of(memory), 0], [])

    def _number_of(self, thing: object) -> int:
        return self._numbers.setdefault(id(thing), len(self._numbers))


class WorkerDraws(KeyedDraws):
    """In the worker processes of a ``DataLoader``, whose seed, new in each epoch, is the key.

    The memories of operations are copies there, and often end with the epoch.
    """

    def fixed_seed(self, memory: Memory) -> int:
        """Return the seed that was drawn before the workers began.

        Raises:
            ValueError: none was; each epoch's workers would choose another order.
        """
        if memory.base is None:
            raise ValueError(
                "shuffle(reshuffle_each_iteration=False), random() or sample_from_datasets() needs a seed in the "
                "worker processes of a DataLoader, because they can't remember an order from one epoch to the next."
            )
        return memory.base

    def iteration(self, memory: Memory) -> list[int]:
        """Return what tells this epoch from others."""
        return [*self._key, *super().iteration(memory)]

    def for_cache(self, memory: object) -> None:
        """A cache keeps its first order."""


def mix(values: Sequence[int]) -> int:
    """Return one integer of 63 bits that depends on all of some integers."""
    sequence = np.random.SeedSequence([value & _MASK for value in values])
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))


def random_key(draws: Draws, memory: Memory, seed: int | None, *, changes: bool) -> list[int]:
    """Return the key of an operation with an argument ``seed``, another one in each iteration if it ``changes``."""
    iteration = draws.iteration(memory)
    if seed is None:
        return [draws.seed() if changes else draws.fixed_seed(memory)]
    return [seed, *iteration] if changes else [seed]


def random_stream(key: Sequence[int], repetition: int, num_drawn: int) -> np.random.Generator:
    """Return the random numbers of a key and a repetition, of which some have been drawn."""
    return np.random.Generator(np.random.PCG64(mix([*key, repetition])).advance(num_drawn))


class Weighted:
    """Makes a random integer of 32 bits one of a few numbers.

    Args:
        weights: how often each number comes, relative to the others.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self._limits = np.cumsum(np.asarray(weights, np.float64))

    def __call__(self, random: Tensor) -> int:
        """Return a number."""
        return int(np.searchsorted(self._limits, int(random) / 2**32 * self._limits[-1], side="right"))


class Rejection:
    """Accepts elements at random so that their classes come as often as they shall; a function for ``scan``.

    Args:
        class_func: the user's, returns an element's class.
        target: how often each class shall come, relative to the others.
        initial: how often each comes; ``None`` for as often as it has come so far.
    """

    def __init__(
        self, class_func: Callable[..., Any], target: Sequence[float], initial: Sequence[float] | None
    ) -> None:
        self._class_func = class_func
        self._target = torch.tensor(target, dtype=torch.float64, device="cpu")
        self._initial = None if initial is None else torch.tensor(initial, dtype=torch.float64, device="cpu")

    def __call__(self, counts: Tensor, pair: tuple[Any, Tensor]) -> tuple[Tensor, Any]:
        """Return new counts of classes, and whether to accept an element, its class and itself."""
        element, number = pair
        answer = to_element(call(self._class_func, element))
        label = check_int("what class_func returns", answer)
        if not 0 <= label < len(self._target):
            raise InvalidArgumentError(
                f"class_func of rejection_resample() must return a class from 0 to {len(self._target) - 1}, as "
                f"target_dist has {len(self._target)} numbers. Received: {label}"
            )
        counts = counts.clone()
        counts[label] += 1
        initial = counts if self._initial is None else self._initial
        ratios = torch.where(initial > 0, self._target / initial, 0)
        is_accepted = int(number) / 2**32 * ratios.max() < ratios[label]
        return counts, (is_accepted, (answer, element))
