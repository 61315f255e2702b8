"""Tensors by name in the format of safetensors, of the package of that name, which is an extra.

The format has no checksums, so a SHA-256 of each tensor stands in its metadata, which other readers pass over.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchstrategy import errors
from torchstrategy.base import how_to_install
from torchstrategy.checkpoint.storage import write_file
from torchstrategy.collectives.summing import in_a_row

__all__ = ["SAFE_SUFFIX", "find_safetensors", "read_safetensors", "write_safetensors"]

SAFE_SUFFIX = ".safetensors"
_SUMS = "torchstrategy.sha256"


def find_safetensors() -> Any:
    """Return the package.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import safetensors.torch  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ImportError(
            f"Files that end in .safetensors need the package safetensors: {how_to_install('safetensors')}. Or "
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
        OSError: the file can't be written; what was there before is unchanged.
        ImportError: the package is not installed.
    """
    others = [name for name, value in weights.items() if not isinstance(value, Tensor)]
    if others:
        raise ValueError(
            f"save_weights: {file} can hold tensors only, and not {others[0]!r}, which is of an object's extra state. "
            "Take a path that ends in .pt."
        )
    library = find_safetensors()
    try:
        tensors = _with_own_memory(weights)
        sums = json.dumps({name: _digest(tensor) for name, tensor in tensors.items() if tensor.layout is torch.strided})
        metadata = {"format": "pt", _SUMS: sums}
        # Into the file that is open already: the library takes a name, and would need all of the file in memory.
        write_file(file, lambda opened: library.torch.save_file(tensors, opened.name, metadata=metadata))
    except (ValueError, KeyError, RuntimeError, library.SafetensorError) as error:
        of_system = re.search(r"os error (\d+)", str(error))
        if of_system is not None:
            raise OSError(int(of_system[1]), os.strerror(int(of_system[1])), file) from error
        raise ValueError(
            f"save_weights: {file} can't hold these weights ({error}). Take a path that ends in .pt."
        ) from error


def _with_own_memory(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors as the format wants them: their numbers one after the other, in memory that no other one has.

    Two names for one memory are refused, because readers would lose one of them.
    """
    memory: set[int] = set()
    tensors: dict[str, Tensor] = {}
    for name, value in weights.items():
        tensors[name] = value
        if value.layout is not torch.strided:
            continue  # which the library refuses
        plain = value.resolve_conj().resolve_neg()  # what memory holds is not the value otherwise
        storage = plain.untyped_storage()
        is_own = storage.nbytes() == plain.numel() * plain.itemsize and storage.data_ptr() not in memory
        tensors[name] = plain.contiguous() if is_own else plain.clone(memory_format=torch.contiguous_format)
        memory.add(storage.data_ptr())
    return tensors


def read_safetensors(file: str) -> Mapping[str, Any]:
    """Return the tensors in a file, by name.

    Raises:
        DataLossError: it is damaged, or another kind of file.
        ImportError: the package is not installed.
    """
    library = find_safetensors()
    try:
        with library.safe_open(file, framework="pt") as opened:
            weights = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
            sums = (opened.metadata() or {}).get(_SUMS)
        _check(file, weights, None if sums is None else json.loads(sums))
    except (library.SafetensorError, ValueError) as error:
        raise errors.DataLossError(
            f"{file} is damaged, or no file of safetensors ({error}). Take another file."
        ) from error
    return weights


def _check(file: str, weights: Mapping[str, Tensor], sums: Any) -> None:
    if sums is None:  # of another program, or of an earlier release
        return
    if not isinstance(sums, dict) or sums.keys() != weights.keys():
        raise errors.DataLossError(
            f"{file} is damaged: its tensors are not those that were written. Take another file."
        )
    for name, tensor in weights.items():
        if _digest(tensor) != sums[name]:
            raise errors.DataLossError(f"{file} is damaged: {name!r} is not what was written. Take another file.")


def _digest(tensor: Tensor) -> str:
    plain = tensor.detach().cpu().contiguous()
    found = hashlib.sha256(f"{plain.dtype} {tuple(plain.shape)}".encode())
    found.update(in_a_row(plain).view(torch.uint8).numpy().data)
    return found.hexdigest()
