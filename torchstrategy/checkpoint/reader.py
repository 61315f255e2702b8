"""Looking into a directory of checkpoints, and into a checkpoint without the objects that it was made of."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchstrategy import errors
from torchstrategy.checkpoint.archive import checkpoint_file, named_tensors, read_checkpoint
from torchstrategy.checkpoint.directory import read_index
from torchstrategy.checkpoint.storage import is_directory

__all__ = [
    "CheckpointReader",
    "CheckpointState",
    "get_checkpoint_state",
    "latest_checkpoint",
    "list_variables",
    "load_checkpoint",
    "load_variable",
]

_Path = str | os.PathLike[str]


class CheckpointState(NamedTuple):
    """The checkpoints of a directory; made by ``get_checkpoint_state``.

    Args:
        model_checkpoint_path: path of the latest one.
        all_model_checkpoint_paths: paths of those that are kept, oldest first.
        all_model_checkpoint_timestamps: when each was written, in seconds since 1970.
        last_preserved_timestamp: when the latest of those that a manager keeps for good was written, or when its
            directory was first used; ``None`` without a manager.
    """

    model_checkpoint_path: str
    all_model_checkpoint_paths: list[str]
    all_model_checkpoint_timestamps: list[float]
    last_preserved_timestamp: float | None


def get_checkpoint_state(checkpoint_dir: _Path, latest_filename: str | None = None) -> CheckpointState | None:
    """Return which checkpoints are in a directory, or ``None`` if there are none.

    The file ``checkpoint`` says so. If it is lost, damaged or older than the checkpoints that ``save`` or a manager
    wrote, they are found by themselves, and a log line says so.

    Args:
        checkpoint_dir: the directory that ``Checkpoint.save`` or a manager wrote to.
        latest_filename: name of the file that names the checkpoints; ``None`` means ``checkpoint``.

    Raises:
        DataLossError: that file names others than the directory's, or none that is there.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = ts.train.Checkpoint(step=torch.tensor(1)).save(f"{folder.name}/ckpt")
        >>> ts.train.get_checkpoint_state(folder.name).all_model_checkpoint_paths == [path]
        True
        >>> folder.cleanup()
    """
    directory = os.fspath(checkpoint_dir)
    index = read_index(directory, latest_filename)
    if index is None:
        return None
    paths = [os.path.join(directory, name) for name in index.written]
    return CheckpointState(paths[-1], paths, list(index.written.values()), index.last_preserved)


def latest_checkpoint(checkpoint_dir: _Path, latest_filename: str | None = None) -> str | None:
    """Return the path of a directory's latest checkpoint, or ``None`` if there is none.

    If its file is gone, it is the newest that is there, and a log line says so.

    Args:
        checkpoint_dir: the directory that ``Checkpoint.save`` or a manager wrote to. It may have been moved.
        latest_filename: name of the file that names the checkpoints; ``None`` means ``checkpoint``.

    Raises:
        DataLossError: that file names others than the directory's, or none that is there.

    Example:
        >>> ts.train.latest_checkpoint("no/such/directory") is None
        True
    """
    state = get_checkpoint_state(checkpoint_dir, latest_filename)
    return None if state is None else state.model_checkpoint_path


class CheckpointReader:
    """The tensors of one checkpoint, by name; made by ``load_checkpoint``.

    A name is the object's path in the checkpoint and the keys of its state, joined by dots: ``model.0.weight``,
    ``optimizer.state.0.exp_avg``. The number of the save is ``save_counter``.

    Args:
        path: the checkpoint.
        tensors: its tensors by their names.
    """

    def __init__(self, path: str, tensors: Mapping[str, Tensor]) -> None:
        self._path = path
        self._tensors = dict(sorted(tensors.items()))

    def get_tensor(self, tensor_str: str) -> Tensor:
        """Return a tensor, on the CPU.

        Args:
            tensor_str: its name.

        Raises:
            NotFoundError: there is none of this name.
        """
        if tensor_str not in self._tensors:
            raise errors.NotFoundError(
                f"The checkpoint {self._path} holds no tensor {tensor_str!r}. It holds: {', '.join(self._tensors)}."
            )
        return self._tensors[tensor_str].clone()

    def has_tensor(self, tensor_str: str) -> bool:
        """Say whether there is a tensor of this name."""
        return tensor_str in self._tensors

    def get_variable_to_shape_map(self) -> dict[str, list[int]]:
        """Return the shape of each tensor by its name."""
        return {name: list(tensor.shape) for name, tensor in self._tensors.items()}

    def get_variable_to_dtype_map(self) -> dict[str, torch.dtype]:
        """Return the dtype of each tensor by its name."""
        return {name: tensor.dtype for name, tensor in self._tensors.items()}


def load_checkpoint(ckpt_dir_or_file: _Path) -> CheckpointReader:
    """Return a reader of a checkpoint's tensors.

    Args:
        ckpt_dir_or_file: what ``save`` or ``write`` returned, or a directory, whose latest checkpoint is read.

    Raises:
        NotFoundError: there is no such file.
        DataLossError: the file is damaged or no checkpoint of this library.
        ValueError: the directory has no checkpoint.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = ts.train.Checkpoint(model=torch.nn.Linear(2, 1), step=torch.tensor(3)).write(f"{folder.name}/x")
        >>> reader = ts.train.load_checkpoint(path)
        >>> reader.get_variable_to_shape_map()
        {'model.bias': [1], 'model.weight': [1, 2], 'step': []}
        >>> reader.get_tensor("step")
        tensor(3)
        >>> folder.cleanup()
    """
    path = os.fspath(ckpt_dir_or_file)
    if is_directory(path):
        latest = latest_checkpoint(path)
        if latest is None:
            raise ValueError(f"The directory {path} has no latest checkpoint. Pass the path of a checkpoint.")
        path = latest
    content = read_checkpoint(checkpoint_file(path))
    tensors: dict[str, Tensor] = {}
    for key, entry in content["objects"].items():
        tensors.update(named_tensors(key, _state_of(entry)))
    if content["save_counter"] is not None:
        tensors["save_counter"] = torch.tensor(content["save_counter"])
    return CheckpointReader(path, tensors)


def load_variable(ckpt_dir_or_file: _Path, name: str) -> Tensor:
    """Return one tensor of a checkpoint.

    Args:
        ckpt_dir_or_file: as for ``load_checkpoint``.
        name: the tensor's name, as ``list_variables`` says it.

    Raises:
        NotFoundError: there is no such file, or no such tensor in it.
        DataLossError: the file is damaged or no checkpoint of this library.
        ValueError: the directory has no checkpoint.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = ts.train.Checkpoint(step=torch.tensor(3)).write(f"{folder}/x")
        ...     ts.train.load_variable(path, "step")
        tensor(3)
    """
    return load_checkpoint(ckpt_dir_or_file).get_tensor(name)


def list_variables(ckpt_dir_or_file: _Path) -> list[tuple[str, list[int]]]:
    """Return name and shape of each tensor of a checkpoint, in the order of their names.

    Args:
        ckpt_dir_or_file: as for ``load_checkpoint``.

    Raises:
        NotFoundError: there is no such file.
        DataLossError: the file is damaged or no checkpoint of this library.
        ValueError: the directory has no checkpoint.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = ts.train.Checkpoint(step=torch.tensor(3)).write(f"{folder}/x")
        ...     ts.train.list_variables(path)
        [('step', [])]
    """
    return list(load_checkpoint(ckpt_dir_or_file).get_variable_to_shape_map().items())


def _state_of(entry: dict[str, Any]) -> Any:
    """Return an object's state without what a checkpoint notes beside it."""
    state = entry["state"]
    if entry["kind"] == "metric":  # of one metric, whose name is empty, or of the parts of a collection or wrapper
        return {name: metric["values"] for name, metric in state.items()}
    return state["state"] if entry["kind"] == "optimizer" else state
