"""``ts.data.readers``: functions that read the examples of one file, for ``ts.data.Dataset.from_files``.

A reader is any function ``reader(path)`` that returns an iterable of examples; one with an argument ``start`` can skip
examples without making them. Options are given by ``functools.partial(ts.data.readers.npz, keys=["x", "y"])``, which
worker processes can receive.
"""

from torchstrategy.data.readers.arrays import idx, npy, npz
from torchstrategy.data.readers.formats import parquet, tar, text_lines
from torchstrategy.data.readers.reading import read_from

__all__ = ["idx", "npy", "npz", "parquet", "read_from", "tar", "text_lines"]
