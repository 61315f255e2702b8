"""tf.distribute for PyTorch: one training program, any number of replicas."""

from __future__ import annotations

import os
import sys

from torchstrategy.base import later

#: What nearly every program needs; few need many of the other names, which all together take 8 MB of each process and
#: as long to import as the rest.
_NOW = (
    "torchstrategy.base.context",
    "torchstrategy.base.options",
    "torchstrategy.base.values",
    "torchstrategy.base",
    "torchstrategy.collectives.cross_device_ops",
    "torchstrategy.errors",
    "torchstrategy.nn",
    "torchstrategy.strategies.default",
    "torchstrategy.strategies.mirrored_strategy",
    "torchstrategy.strategies.one_device",
    "torchstrategy.strategies.replica_context",
    "torchstrategy.strategies.strategy",
)

#: ``torchstrategy`` or ``python -m torchstrategy``, whose help is there before torch would be; no program of a user.
_IS_COMMAND = sys.orig_argv[1:3] == ["-m", __name__] or os.path.basename("".join(sys.orig_argv[1:2])) == __name__

__getattr__, __dir__, __all__ = later.attach(__name__, now=() if _IS_COMMAND else _NOW)

if not _IS_COMMAND:
    from torchstrategy import patches

    patches.forget_sources()
    later.explain_absent("torchstrategy.errors")  # which imports nothing itself
