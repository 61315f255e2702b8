"""tf.distribute for PyTorch: one training program, any number of replicas."""

from __future__ import annotations

from torchstrategy import patches
from torchstrategy.base import later

#: What nearly every program needs; few need many of the other names, which all together take 8 MB of each process and
#: as long to import as the rest.
_NOW = (
    "torchstrategy.base.context",
    "torchstrategy.base.options",
    "torchstrategy.base.values",
    "torchstrategy.base.version",
    "torchstrategy.collectives.cross_device_ops",
    "torchstrategy.errors",
    "torchstrategy.nn",
    "torchstrategy.strategies.default",
    "torchstrategy.strategies.mirrored_strategy",
    "torchstrategy.strategies.one_device",
    "torchstrategy.strategies.replica_context",
    "torchstrategy.strategies.strategy",
)

__getattr__, __dir__, __all__ = later.attach(__name__, now=_NOW)

patches.forget_sources()
