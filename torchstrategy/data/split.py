"""How a global batch is divided over replicas: arithmetic, and how a batch of any type is cut.

The rule is tf's: consecutive chunks of ``ceil(examples / replicas)``, so later replicas may get fewer or none. Chunk
``i`` goes to replica ``i``, whichever process hosts it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

__all__ = [
    "Splittable",
    "as_splittable",
    "even_sizes",
    "minibatch_sizes",
    "register_splitter",
    "share_bounds",
    "share_sizes",
]

_Cut = Callable[[Any, int, int], Any]
_splitters: dict[type, tuple[_Cut, Callable[[Any], int]]] = {}


class Splittable:
    """A component of a registered type.

    Args:
        value: the user's object.
        fn: cuts it.
        length: counts its examples.
    """

    def __init__(self, value: Any, fn: _Cut, length: Callable[[Any], int]) -> None:
        self.value = value
        self._fn = fn
        self._length = length

    def __len__(self) -> int:
        return self._length(self.value)

    def cut(self, start: int, stop: int) -> Splittable:
        """Return the examples from ``start`` to ``stop``."""
        if (start, stop) == (0, len(self)):
            return self
        part = Splittable(self._fn(self.value, start, stop), self._fn, self._length)
        if len(part) != stop - start:
            raise ValueError(
                f"The splitter of {type(self.value).__name__} gave {len(part)} examples where {stop - start} were asked"
                f" for (from {start} to {stop}). fn(value, start, stop) must return exactly these, and length(value) "
                "must count them."
            )
        return part

    def to(self, device: Any) -> Splittable:
        """Return it on a device, if its type can be moved."""
        move = getattr(self.value, "to", None)
        return self if move is None else Splittable(move(device), self._fn, self._length)


def register_splitter(cls: type, fn: Callable[[Any, int, int], Any], length: Callable[[Any], int] = len) -> None:
    """Say how batches of a type are cut into the examples of each replica.

    Without it a batch may consist of tensors, numpy arrays, lists of strings, and tuples, lists, mappings, named tuples
    and dataclasses of them; ``PackedSequence`` is registered already. An object of another type is refused, because
    nothing says where its examples are. A registered type counts as one component, also if it is a container. An
    object that has a method ``to`` is moved to its replica's device with it.

    Call it at the top of the program, on every rank alike, before data is distributed.

    Args:
        cls: the type; its subclasses count too, unless they are registered themselves.
        fn: ``fn(value, start, stop)`` returns an object with the examples from ``start`` to ``stop - 1``, where
            ``0 <= start <= stop <= length(value)``. Where a batch has fewer examples than there are replicas,
            ``start == stop``; raise an error if an object without examples can't be made.
        length: returns the number of examples of an object.

    Raises:
        TypeError: ``cls`` is no type, or a type whose cut is fixed, or ``fn`` or ``length`` can't be called.

    Example:
        A batch of graphs, each of which has another number of nodes:

        >>> import torchstrategy as ts
        >>> class Graphs:
        ...     def __init__(self, graphs):
        ...         self.graphs = graphs
        >>> ts.data.register_splitter(
        ...     Graphs,
        ...     lambda batch, start, stop: Graphs(batch.graphs[start:stop]),
        ...     length=lambda batch: len(batch.graphs),
        ... )
        >>> strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> data = strategy.experimental_distribute_dataset([Graphs(["a", "b", "c"])])
        >>> [[part.graphs for part in batch.values] for batch in data]
        [[['a', 'b'], ['c']]]
    """
    if not isinstance(cls, type) or cls in (object, list, tuple, dict, str, bytes, int, float, bool, type(None)):
        raise TypeError(f"register_splitter() takes a type of batches of your own or of a library. Received: {cls!r}")
    if not callable(fn) or not callable(length):
        raise TypeError(f"fn and length must be functions. Received: fn={fn!r}, length={length!r}")
    _splitters[cls] = (fn, length)


def as_splittable(value: Any) -> Splittable | None:
    """Return a value as a component of its registered type, or ``None`` if it is of none."""
    for cls in type(value).__mro__:
        if cls in _splitters:
            return Splittable(value, *_splitters[cls])
    return None


def _cut_packed(packed: PackedSequence, start: int, stop: int) -> PackedSequence:
    if start == stop:
        raise ValueError(
            f"A replica would get no example of a PackedSequence of {_count_packed(packed)}, and torch has no empty "
            "one. Give each replica an example at least (drop_last=True, or another batch size), or pad the sequences "
            "and pack them in the replica function."
        )
    padded, lengths = pad_packed_sequence(packed)
    is_sorted = packed.sorted_indices is None
    return pack_padded_sequence(padded[:, start:stop], lengths[start:stop], enforce_sorted=is_sorted)


def _count_packed(packed: PackedSequence) -> int:
    return int(packed.batch_sizes[0]) if len(packed.batch_sizes) else 0


register_splitter(PackedSequence, _cut_packed, _count_packed)


@functools.lru_cache(maxsize=256)
def share_sizes(num_examples: int, num_replicas: int) -> tuple[int, ...]:
    """Return how many examples of one global batch each replica gets.

    Args:
        num_examples: examples in the global batch; may be 0.
        num_replicas: replicas in sync over all processes.

    Returns:
        One size for each replica, in the order of replica ids.

    Example:
        >>> from torchstrategy.data.split import share_sizes
        >>> share_sizes(5, 4)
        (2, 2, 1, 0)
    """
    chunk = -(-num_examples // num_replicas)
    return tuple(min(chunk, max(0, num_examples - i * chunk)) for i in range(num_replicas))


def even_sizes(num_examples: int, num_parts: int) -> tuple[int, ...]:
    """Return sizes of parts that differ by one at most, larger ones first.

    Example:
        >>> from torchstrategy.data.split import even_sizes
        >>> even_sizes(5, 3)
        (2, 2, 1)
    """
    size, num_larger = divmod(num_examples, num_parts)
    return (size + 1,) * num_larger + (size,) * (num_parts - num_larger)


def minibatch_sizes(batch_size: int, num_replicas: int, first_replica: int) -> list[int]:
    """Return the sizes of the minibatches that a process cuts from a stream of its own, one after the other in a cycle.

    Measured on tf 2.21: the floor and ceiling of ``batch_size / num_replicas``, larger ones first, from where the
    process's first replica is.

    Args:
        batch_size: examples in a global batch.
        num_replicas: replicas in sync over all processes.
        first_replica: id of the process's first replica.

    Returns:
        ``num_replicas`` sizes; together they are ``batch_size``.

    Example:
        >>> from torchstrategy.data.split import minibatch_sizes
        >>> minibatch_sizes(6, 4, first_replica=2)
        [1, 1, 2, 2]
    """
    size, num_larger = divmod(batch_size, num_replicas)
    sizes = [size + 1] * num_larger + [size] * (num_replicas - num_larger)
    return sizes[first_replica:] + sizes[:first_replica]


def share_bounds(sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return where each replica's share starts and ends within the global batch.

    Example:
        >>> from torchstrategy.data.split import share_bounds
        >>> share_bounds((2, 2, 1, 0))
        [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    return list(pairwise(accumulate(sizes, initial=0)))
