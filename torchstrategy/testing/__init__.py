"""Helpers for tests of distributed programs: processes to call functions in, clusters, and pytest fixtures of both.

``verify_replication`` compares a program's numbers with those of one replica.
"""

from __future__ import annotations

from torchstrategy.base import later

__getattr__, __dir__, __all__ = later.attach(__name__)
