"""``ts.data``: datasets under tf.data's names, readers of files, and, inside, how batches reach the replicas."""

from __future__ import annotations

from torchstrategy.base import later

# Programs that bring a DataLoader or arrays need none of these modules.
__getattr__, __dir__, __all__ = later.attach(__name__)
