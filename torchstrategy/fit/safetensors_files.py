"""Tensors by name in the format of safetensors, of the package of that name, which is an extra."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchstrategy import errors
from torchstrategy.checkpoint.atomic import write_file

__all__ = ["SAFE_SUFFIX", "find_safetensors", "read_safetensors", "write_safetensors"]

SAFE_SUFFIX = ".safetensors"


def find_safetensors() -> Any:
    """Return the package.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import safetensors.torch  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ImportError(
            "Files that end in .safetensors need the package safetensors: pip install 'torchstrategy[safetensors]'. Or "
            "take a path that ends in .pt, which plain torch reads."
        ) from error
    return safetensors


def write_safetensors(file: str, weights: Mapping[str, Any]) -> None:
    """Write tensors in the format of safetensors.

    Args:
        file: the path.
        weights: tensors by name, which may share memory.

    Raises:
        ValueError: not all are tensors that the format knows.
    """
    others = [name for name, value in weights.items() if not isinstance(value, Tensor)]
    if others:
        raise ValueError(
            f"save_weights: {file} can hold tensors only, and not {others[0]!r}, which is of an object's extra state. "
            "Take a path that ends in .pt."
        )
    memory: set[int] = set()
    tensors: dict[str, Tensor] = {}
    for name, value in weights.items():
        tensors[name] = value
        if value.layout is not torch.strided:
            continue  # which the library refuses
        storage = value.untyped_storage()
        # Two names for one memory are refused: readers would lose one of them.
        is_own = storage.nbytes() == value.numel() * value.itemsize and storage.data_ptr() not in memory
        tensors[name] = value.contiguous() if is_own else value.clone(memory_format=torch.contiguous_format)
        memory.add(storage.data_ptr())
    library = find_safetensors()
    try:
        # Into the file that is open already: the library takes a name, and would need all of the file in memory.
        write_file(file, lambda opened: library.torch.save_file(tensors, opened.name, metadata={"format": "pt"}))
    except (ValueError, KeyError, library.SafetensorError) as error:
        raise ValueError(
            f"save_weights: {file} can't hold these weights ({error}). Take a path that ends in .pt."
        ) from error


def read_safetensors(file: str) -> Mapping[str, Any]:
    """Return the tensors in a file, by name.

    Raises:
        DataLossError: it is damaged, or another kind of file.
        ImportError: the package is not installed.
    """
    library = find_safetensors()
    try:
        weights: dict[str, Tensor] = library.torch.load_file(file)
    except library.SafetensorError as error:
        raise errors.DataLossError(
            f"{file} is damaged, or no file of safetensors ({error}). Take another file."
        ) from error
    return weights
