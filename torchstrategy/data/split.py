"""How a global batch is divided over replicas: pure arithmetic.

The rule is tf's: consecutive chunks of ``ceil(examples / replicas)``, so later replicas may get fewer or none. Chunk
``i`` goes to replica ``i``, whichever process hosts it.
"""

from __future__ import annotations

import functools
from itertools import accumulate, pairwise

__all__ = ["minibatch_sizes", "share_bounds", "share_sizes"]


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
