"""Archives of tensors and plain values that are known to be whole when they are read.

An archive is the zip file that ``torch.save`` writes, which plain torch reads. In its comment stands a seal: a SHA-256
of every byte of the file, which does not depend on what torch computes, and what the writer says of the file. It is
never unpickled freely.
"""

from __future__ import annotations

import contextlib
import errno
import pickle
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any, cast

import torch
from torch import Tensor

from torchstrategy import errors
from torchstrategy.checkpoint.seal import Sealing, find_seal, fits_seal
from torchstrategy.checkpoint.storage import is_directory, is_file, local_copy, open_file, write_file

__all__ = [
    "FORMAT",
    "SUFFIX",
    "VERSION",
    "WEIGHTS",
    "DamagedError",
    "check_version",
    "checkpoint_file",
    "named_tensors",
    "read_archive",
    "read_checkpoint",
    "read_seal",
    "read_unchecked",
    "write_archive",
    "write_checkpoint",
]

SUFFIX = ".pt"

#: What the content of a checkpoint says that it is.
FORMAT = "torchstrategy.checkpoint"
#: What the seal of a ``state_dict`` says that is in the file, which can be restored as a checkpoint's ``model``.
WEIGHTS = "weights"
#: Version 1 had no seal, and relied on the checksums of zip files, which torch can be told to leave out.
VERSION = 2


class DamagedError(errors.DataLossError):
    """A file is not what was written, so that an earlier one must serve."""


def write_checkpoint(
    path: str, content: dict[str, Any], about: dict[str, Any] | None = None, check: Callable[[], None] = lambda: None
) -> None:
    """Write a checkpoint file.

    Args:
        path: the file.
        content: what it holds.
        about: what its seal says of it.
        check: called when the file is complete; if it raises, the file does not get its name.

    Raises:
        OSError: the file can't be written; what was there before is unchanged.
    """
    write_archive(path, {"format": FORMAT, "version": VERSION, **content}, about, check)


def read_checkpoint(path: str, *, mapped: bool = False) -> dict[str, Any]:
    """Return what ``write_checkpoint`` was given, with all tensors on the CPU.

    Args:
        path: the file.
        mapped: whether tensors are read from the file when they are used; it must not be overwritten in place then.

    Raises:
        DataLossError: the file is damaged or not a checkpoint of this library.
    """
    content = read_archive(path, mapped=mapped, what="a checkpoint", remedy=_REMEDY)
    seal = read_seal(path)
    if seal is not None and seal.get("holds") == WEIGHTS:
        objects = {"model": {"kind": "module", "state": content}}
        if "iterations" in seal:
            objects["iterations"] = {"kind": "tensor", "state": torch.tensor(seal["iterations"])}
        return {"format": FORMAT, "version": VERSION, "save_counter": None, "objects": objects}
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise errors.DataLossError(f"{path} was not written by ts.train.Checkpoint. {_REMEDY}")
    check_version(path, content, VERSION)
    if content["version"] > 1 and seal is None:
        raise DamagedError(f"{path} is damaged: its seal is missing, the comment at its end. {_REMEDY}")
    return content


def check_version(path: str, content: dict[str, Any], newest: int) -> None:
    """Check that this release knows the format version of a file's content.

    Raises:
        DataLossError: it does not.
    """
    version = content.get("version")
    if type(version) is not int:
        raise errors.DataLossError(
            f"{path} does not say the version of its format, but {version!r}, so it was not written by this library."
        )
    if version > newest:
        raise errors.DataLossError(
            f"{path} has the format version {version}; this release reads up to {newest}. Upgrade it."
        )


def write_archive(
    path: str, content: Any, about: dict[str, Any] | None = None, check: Callable[[], None] = lambda: None
) -> None:
    """Write tensors and plain values; the arguments are those of ``write_checkpoint``.

    Raises:
        OSError: the file can't be written; what was there before is unchanged.
    """

    def write(file: IO[bytes]) -> None:
        sealing = Sealing(file)
        with _zip_checksums():
            torch.save(content, cast(IO[bytes], sealing))
        sealing.seal(about or {})

    write_file(path, write, check=check)


def read_archive(path: str, *, what: str, remedy: str, mapped: bool = False, may_be_old: bool = False) -> Any:
    """Return what ``torch.save`` wrote: tensors, which are on the CPU then, and plain values only.

    Args:
        path: the file.
        what: what the file should be, for error messages.
        remedy: what to do if it is damaged.
        mapped: whether tensors are read from the file when they are used; it must not be overwritten in place then.
        may_be_old: whether files are read that torch wrote before 1.6, which have no checksums.

    Raises:
        FileNotFoundError: there is no file.
        DataLossError: the file is damaged or no such file.
    """
    with local_copy(path) as file:
        is_mapped = mapped and file == path
        try:
            if may_be_old and _is_old(file):
                return torch.load(file, map_location="cpu", weights_only=True)
            _check_kind(path, file, what, remedy)
            _check_whole(path, file, remedy)
        except DamagedError:
            raise
        except _SIGNS_OF_DAMAGE as error:
            raise DamagedError(f"{path} is damaged or not {what}: {error}. {remedy}") from error
        try:
            return torch.load(file, map_location="cpu", weights_only=True, mmap=is_mapped)
        except pickle.UnpicklingError as error:  # it is whole, so this is how it was written
            raise errors.DataLossError(
                f"{path} is not {what}: it holds objects that run code when they are loaded, so it was not. "
                f"{remedy} torch says: {str(error).splitlines()[0]}"
            ) from error
        except _SIGNS_OF_DAMAGE as error:
            raise DamagedError(f"{path} is damaged or not {what}: {error}. {remedy}") from error


def read_unchecked(path: str) -> Any:
    """Return an archive's content without looking for damage, and without reading its tensors; ``None`` if it is none.

    Of a store that is no folder, in which that would take as long as reading all, nothing is read.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, *_SIGNS_OF_DAMAGE):
        return None


def read_seal(path: str) -> dict[str, Any] | None:
    """Return what the writer said of an archive, without reading it all; ``None`` if nothing.

    Raises:
        FileNotFoundError: there is no file.
    """
    with open_file(path) as file:
        found = find_seal(file)
    return None if found is None else found.about


def checkpoint_file(path: str) -> str:
    """Return the file of a checkpoint path as ``save`` returned it; the suffix may be there already.

    Raises:
        NotFoundError: it is not there.
        DataLossError: it is a directory.
    """
    for candidate in (path + SUFFIX, path):
        if is_file(candidate):
            return candidate
    if is_directory(path):
        raise errors.DataLossError(
            f"{path} is a directory, not a checkpoint. Pass ts.train.latest_checkpoint({path!r}) to restore its latest."
        )
    raise errors.NotFoundError(f"There is no checkpoint {path}: no file {path + SUFFIX}.")


def named_tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in a structure with their names, which join its keys by dots."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from named_tensors(".".join(str(part) for part in (name, key) if part != ""), item)
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from named_tensors(f"{name}.{i}", item)


def _check_kind(path: str, local: str, what: str, remedy: str) -> None:
    """Check that a file begins as a zip file does.

    Raises:
        DamagedError: it does not.
    """
    with open(local, "rb") as file:
        begin = file.read(len(_ZIP))
    if begin == _ZIP:
        return
    if begin.strip(b"\0"):
        raise DamagedError(f"{path} is not {what}: torch.save writes no file that begins with {begin!r}. {remedy}")
    raise DamagedError(f"{path} is damaged or not {what}: it is empty, or begins with zeros. {remedy}")


def _check_whole(path: str, local: str, remedy: str) -> None:
    """Check that a file is as it was written.

    Raises:
        DamagedError: it is not.
    """
    with open(local, "rb") as file:
        is_whole = fits_seal(file)
    if is_whole is not None:
        if not is_whole:
            raise DamagedError(f"{path} is damaged: {_damaged_part(local)}. {remedy}")
        return
    try:
        with zipfile.ZipFile(local) as archive:  # of plain torch, or of a release before the seal
            part = archive.testzip()
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise DamagedError(f"{path} is damaged: its directory names places outside of it. {remedy}") from error
    if part:
        raise DamagedError(f"{path} is damaged: {_damaged_part(local)}. {remedy}")


def _damaged_part(local: str) -> str:
    """Say which part of an archive is not as it was written."""
    try:
        with zipfile.ZipFile(local) as archive:
            part = archive.testzip()
            parts = [info for info in archive.infolist() if "/data/" in info.filename and info.file_size]
        if part is None:
            return "the checksum of the file does not fit, outside of its tensors"
        message = f"the checksum of its part {part!r} does not fit"
        if "/data/" not in part:
            return message
        content = torch.load(local, map_location="cpu", weights_only=True, mmap=True)
        names: dict[int, str] = {}
        for name, tensor in named_tensors("", content):
            if tensor.layout is torch.strided and tensor.untyped_storage().nbytes():
                name = name.removeprefix("objects.").replace(".state.", ".")
                names.setdefault(tensor.untyped_storage().data_ptr(), name)
        in_order = [info.filename for info in sorted(parts, key=lambda info: info.header_offset)]
        if len(in_order) == len(names):  # in one order in memory and in the file
            message += f", which holds the tensor {names[sorted(names)[in_order.index(part)]]!r}"
    except (OSError, *_SIGNS_OF_DAMAGE) as error:
        return f"the checksum of the file does not fit ({error})"
    return message


@contextlib.contextmanager
def _zip_checksums() -> Iterator[None]:
    """Let torch write the checksums of parts, by which damage can be told to be a certain tensor's."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _is_old(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(len(_OLD)) == _OLD


#: With what ``torch.save(..., _use_new_zipfile_serialization=False)`` begins: its magic number, pickled.
_OLD = pickle.dumps(torch.serialization.MAGIC_NUMBER, protocol=2)
_ZIP = b"PK\x03\x04"
_REMEDY = "Restore another checkpoint."
_SIGNS_OF_DAMAGE = (
    zipfile.BadZipFile, zlib.error, pickle.UnpicklingError, EOFError, ValueError, KeyError, RuntimeError
)  # fmt: skip
