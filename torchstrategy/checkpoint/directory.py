"""What a directory of checkpoints says about itself."""

from __future__ import annotations

import os
from typing import NamedTuple

from torchstrategy.base.log import warning_once
from torchstrategy.checkpoint.atomic import SUFFIX, index_path, read_index

__all__ = ["CheckpointState", "get_checkpoint_state", "latest_checkpoint"]

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
    """Return what a directory's file ``checkpoint`` says, or ``None`` if there is none.

    Args:
        checkpoint_dir: the directory that ``Checkpoint.save`` or a manager wrote to.
        latest_filename: name of the file that names the checkpoints; ``None`` means ``checkpoint``.

    Raises:
        DataLossError: that file is damaged.

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

    If its file is gone, there is none either, and a log line says so.

    Args:
        checkpoint_dir: the directory that ``Checkpoint.save`` or a manager wrote to. It may have been moved.
        latest_filename: name of the file that names the checkpoints; ``None`` means ``checkpoint``.

    Raises:
        DataLossError: that file is damaged.

    Example:
        >>> ts.train.latest_checkpoint("no/such/directory") is None
        True
    """
    state = get_checkpoint_state(checkpoint_dir, latest_filename)
    if state is None:
        return None
    path = state.model_checkpoint_path
    if os.path.isfile(path + SUFFIX):
        return path
    index = index_path(os.fspath(checkpoint_dir), latest_filename)
    warning_once(
        f"Couldn't match files for checkpoint {path}: {index} names it as the latest, but it is gone, so no checkpoint "
        "is restored. To go on from an earlier one, delete this one from 'written' there."
    )
    return None
