"""How a recipe gets its `TPUStrategy`: tf's calls, in tf's order."""

from __future__ import annotations

from pathlib import Path

import torchstrategy as ts


def connect(tpu: str, compilation_cache: str | None = None) -> ts.TPUStrategy:
    """Find the TPU, start it and return a strategy for all its cores.

    Args:
        tpu: what ``TPUClusterResolver`` takes.
        compilation_cache: a folder for compiled programs; ``None`` means that each start compiles anew.
    """
    resolver = ts.cluster_resolver.TPUClusterResolver(tpu)
    ts.config.experimental_connect_to_cluster(resolver)
    cache_path = None if compilation_cache is None else Path(compilation_cache).expanduser().absolute()
    ts.tpu.experimental.initialize_tpu_system(resolver, cache_path=cache_path)
    return ts.TPUStrategy(resolver)
