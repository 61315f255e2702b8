"""How a global batch is divided over replicas: pure arithmetic.

The rule is tf's: consecutive chunks of ``ceil(examples / replicas)``, so later replicas may get fewer or none. Chunk
``i`` goes to replica ``i``, whichever process hosts it.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

__all__ = ["share_bounds", "share_sizes"]


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


def share_bounds(sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return where each replica's share starts and ends within the global batch.

    Example:
        >>> from torchstrategy.data.split import share_bounds
        >>> share_bounds((2, 2, 1, 0))
        [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    return list(pairwise(accumulate(sizes, initial=0)))
