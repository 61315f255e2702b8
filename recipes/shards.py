"""Images in shard files of four formats: how the recipe writes them, and what reads them again."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow
import pyarrow.parquet
import torch
import webdataset
from filelock import FileLock
from torch import Tensor

import torchstrategy as ts


class Shard(NamedTuple):
    """The examples of one file: images ``[n, 28, 28]`` of bytes, their labels, and their places in the data set."""

    images: np.ndarray
    labels: np.ndarray
    ids: np.ndarray


class Format(NamedTuple):
    """How shards are written and read.

    Args:
        suffixes: what is appended to a shard's name; several are several files, which are read as one.
        write: takes the paths and the shard.
        reader: what ``from_files`` reads them with.
        keys: image, label and id in the dicts that the reader gives; ``None`` if it gives tuples.
    """

    suffixes: tuple[str, ...]
    write: Callable[[Sequence[Path], Shard], None]
    reader: Callable[..., Any]
    keys: tuple[str, str, str] | None

    def to_tuple(self, *example: Any) -> tuple[Any, ...]:
        """Return image, label and id of what the reader gave."""
        return example if self.keys is None else tuple(example[0][key] for key in self.keys)


def make_files(folder: Path, form: Format, num_shards: int, images: Tensor, labels: Tensor) -> list[Any]:
    """Write shard files, unless they are there; of several processes one does it, and the others wait.

    Args:
        folder: where they are.
        form: one of ``FORMATS``.
        num_shards: number of shards; example ``i`` goes into shard ``i % num_shards``.
        images: ``[examples, 1, 28, 28]`` in [0, 1].
        labels: ``[examples]``.

    Returns:
        The files, as ``from_files`` takes them.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not folder.exists():
            partial = folder.with_suffix(".partial")  # has its name only when it is complete
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            pixels = (images[:, 0] * 255).round().to(torch.uint8).numpy()
            for k in range(num_shards):
                chosen = slice(k, None, num_shards)
                shard = Shard(pixels[chosen], labels.numpy()[chosen], np.arange(len(pixels))[chosen])
                form.write(_paths(partial, form, k), shard)
            partial.rename(folder)
    files = [_paths(folder, form, k) for k in range(num_shards)]
    return [paths[0] if len(paths) == 1 else paths for paths in files]


def _paths(folder: Path, form: Format, number: int) -> tuple[Path, ...]:
    return tuple(folder / f"{number:03d}{suffix}" for suffix in form.suffixes)


def _write_npz(paths: Sequence[Path], shard: Shard) -> None:
    np.savez(paths[0], **shard._asdict())


def _write_idx(paths: Sequence[Path], shard: Shard) -> None:
    for path, array, code, dtype in zip(paths, shard, (0x08, 0x08, 0x0C), ("u1", "u1", ">i4"), strict=True):
        header = bytes((0, 0, code, array.ndim)) + np.array(array.shape, ">u4").tobytes()
        path.write_bytes(header + array.astype(dtype).tobytes())


def _write_parquet(paths: Sequence[Path], shard: Shard) -> None:
    columns: dict[str, Any] = shard._asdict()
    columns["images"] = pyarrow.FixedShapeTensorArray.from_numpy_ndarray(np.ascontiguousarray(shard.images))
    pyarrow.parquet.write_table(pyarrow.table(columns), paths[0])


def _write_tar(paths: Sequence[Path], shard: Shard) -> None:
    with webdataset.TarWriter(str(paths[0])) as writer:
        for image, label, number in zip(*shard, strict=True):
            writer.write({"__key__": f"{number:06d}", "npy": image, "cls": int(label), "id": int(number)})


FORMATS = {
    "npz": Format((".npz",), _write_npz, ts.data.readers.npz, Shard._fields),
    "idx": Format(("-images.idx", "-labels.idx", "-ids.idx"), _write_idx, ts.data.readers.idx, None),
    "parquet": Format((".parquet",), _write_parquet, ts.data.readers.parquet, Shard._fields),
    "tar": Format((".tar",), _write_tar, ts.data.readers.tar, ("npy", "cls", "id")),
}
