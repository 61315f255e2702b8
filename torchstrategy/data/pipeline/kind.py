"""Tells a pipeline from other data, without the modules that make one: who has none need not import them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import TypeIs

    from torchstrategy.data.pipeline.dataset import Dataset

__all__ = ["is_pipeline"]


def is_pipeline(data: Any) -> TypeIs[Dataset]:
    """Say whether data is a ``ts.data.Dataset``.

    Args:
        data: anything.

    Example:
        >>> from torchstrategy.data.pipeline.kind import is_pipeline
        >>> is_pipeline(ts.data.Dataset.range(3)), is_pipeline([0, 1, 2])
        (True, False)
    """
    made_by = sys.modules.get("torchstrategy.data.pipeline.dataset")
    return made_by is not None and isinstance(data, made_by.Dataset)
