"""The data sets of the recipes: where their files are looked for, how they are read and checked.

Checksums are of the unpacked bytes, so that a file is right however it was compressed (Debian's gzip headers differ).
"""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import shutil
import urllib.error
import urllib.request
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock
from torch.utils.data import TensorDataset

SLICE_PATH = Path(__file__).parent / "data" / "fashion_mnist_slice.npz"
SLICE_SHA256 = "b3a5ef00123a6fcb94b9de321db87656eb8fb8f8a3ae1a4a4b2175975aec0fce"


def load_slice(path: str | Path = SLICE_PATH) -> tuple[TensorDataset, TensorDataset]:
    """Read the balanced slice of Fashion-MNIST that comes with the recipes.

    Args:
        path: the ``.npz`` file.

    Returns:
        6,000 training and 1,000 test examples: images ``[1, 28, 28]`` in [0, 1] and their labels.

    Raises:
        FileNotFoundError: the file is not there.
        ValueError: the file is damaged.
    """
    restore = "Restore it with `git checkout -- recipes/data`, or choose data=fashion_mnist."
    if not Path(path).exists():
        raise FileNotFoundError(f"{path} is missing. {restore}")
    if hashlib.sha256(Path(path).read_bytes()).hexdigest() != SLICE_SHA256:
        raise ValueError(f"{path} is damaged: its SHA-256 is not {SLICE_SHA256}. {restore}")
    with np.load(path) as arrays:
        return (
            _to_dataset(arrays["train_images"], arrays["train_labels"]),
            _to_dataset(arrays["test_images"], arrays["test_labels"]),
        )


def load_idx(
    name: str, root: str | None, folders: Sequence[str], cache: str, url: str, sha256: Mapping[str, str | None]
) -> tuple[TensorDataset, TensorDataset]:
    """Read a data set in MNIST's format: four idx files, compressed (``.gz``) or not.

    Args:
        name: the data set's name in messages.
        root: the folder that holds the files; ``None`` means the first complete one of ``folders`` and ``cache``,
            and if there is none, a download.
        folders: where packages install the files.
        cache: where a download is kept.
        url: the address that the files' names are appended to.
        sha256: for each of the four names, training images and labels first, the checksum of the unpacked bytes;
            ``None`` as a checksum switches the check off.

    Returns:
        The training and the test examples: images ``[1, height, width]`` in [0, 1] and their labels.

    Raises:
        FileNotFoundError: ``root`` lacks files, or they can't be downloaded.
        ValueError: a file is damaged.
    """
    if root is not None:
        folder = Path(root).expanduser()
        missing = [file for file in sha256 if _find(folder, file) is None]
        if missing:
            raise FileNotFoundError(
                f"The folder data.root={root} lacks {', '.join(missing)} (each with or without .gz) of {name}. "
                "Give another folder, or leave data.root out to search the usual places and download."
            )
    else:
        places = [Path(place).expanduser() for place in (*folders, cache)]
        complete = (place for place in places if all(_find(place, file) for file in sha256))
        folder = next(complete, places[-1])
        if folder == places[-1]:
            _download(name, folder, url, sha256)
    arrays = [_read_idx(_find(folder, file), file, digest) for file, digest in sha256.items()]
    return _to_dataset(*arrays[:2]), _to_dataset(*arrays[2:])


def first_per_class(images: np.ndarray, labels: np.ndarray, num_per_class: int) -> tuple[np.ndarray, np.ndarray]:
    """Choose the first examples of each class, keeping the original order: how the slice was made."""
    chosen = np.sort(np.concatenate([np.flatnonzero(labels == label)[:num_per_class] for label in np.unique(labels)]))
    return images[chosen], labels[chosen]


def _to_dataset(images: np.ndarray, labels: np.ndarray) -> TensorDataset:
    if len(images) != len(labels):
        raise ValueError(f"There are {len(images)} images but {len(labels)} labels: the files don't belong together.")
    return TensorDataset(torch.tensor(images[:, None]) / 255, torch.tensor(labels, dtype=torch.int64))


def _find(folder: Path, file: str) -> Path | None:
    return next((path for path in (folder / f"{file}.gz", folder / file) if path.is_file()), None)


def _read_idx(path: Path, file: str, sha256: str | None) -> np.ndarray:
    """Read and check one idx file; ``file`` is its name without ``.gz``, which says how many axes there must be."""
    remedy = "Delete it and run again to download it, or get a good copy."
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is damaged: unpacking failed ({error}). {remedy}") from error
    num_axes = int(file.split("-idx")[1][0])
    magic = bytes((0, 0, 8, num_axes))
    if content[:4] != magic:
        raise ValueError(f"{path} is no idx file of bytes: it begins with {content[:4]!r}, not {magic!r}. {remedy}")
    start = 4 + 4 * num_axes
    shape = [int.from_bytes(content[i : i + 4], "big") for i in range(4, start, 4)]
    if len(content) != start + math.prod(shape):
        raise ValueError(
            f"{path} is damaged: shape {shape} needs {start + math.prod(shape)} bytes, not {len(content)}. {remedy}"
        )
    found = hashlib.sha256(content).hexdigest()
    if sha256 is not None and found != sha256:
        raise ValueError(f"{path} is damaged: its unpacked bytes have SHA-256 {found}, not {sha256}. {remedy}")
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)


def _download(name: str, folder: Path, url: str, sha256: Mapping[str, str | None]) -> None:
    """Fetch what is missing; a file gets its name only after its checksum was found right."""
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):  # one of several processes downloads, the others wait and find the files
        for file, digest in sha256.items():
            if _find(folder, file) is not None:
                continue
            partial = folder / f"partial-{os.getpid()}-{file}.gz"
            try:
                with urllib.request.urlopen(f"{url}/{file}.gz", timeout=60) as response, partial.open("wb") as target:
                    shutil.copyfileobj(response, target)
                _read_idx(partial, file, digest)
                partial.replace(folder / f"{file}.gz")
            except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
                raise FileNotFoundError(
                    f"{name} is not on this machine and {url}/{file}.gz can't be downloaded ({error}). Put the four "
                    f"files {', '.join(sha256)} (each with or without .gz) into a folder and pass data.root=FOLDER. "
                    "Debian and Ubuntu have Fashion-MNIST as a package: apt install dataset-fashion-mnist"
                ) from error
            finally:
                partial.unlink(missing_ok=True)
