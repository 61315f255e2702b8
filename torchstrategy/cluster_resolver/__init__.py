"""Which tasks a cluster has, and which of them this process is, under the names of ``tf.distribute.cluster_resolver``.

A resolver reads a description of the cluster; strategies take it as ``cluster_resolver``.
"""

from __future__ import annotations

from torchstrategy.base import later

# Strategies use a few of these modules; all together are 1 MB of each process.
__getattr__, __dir__, __all__ = later.attach(__name__)
