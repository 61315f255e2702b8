"""Checkpoint files are complete or not there, and damage is noticed."""

import os
import resource
import signal
import zipfile

import pytest
import torch

from torchstrategy.checkpoint import archive
from torchstrategy.errors import DataLossError, NotFoundError


@pytest.fixture
def path(tmp_path):
    path = str(tmp_path / "ck-1.pt")
    archive.write_checkpoint(path, {"value": torch.arange(1000.0), "number": 3})
    return path


def test_round_trip(path, tmp_path):
    content = archive.read_checkpoint(path)
    assert torch.equal(content["value"], torch.arange(1000.0))
    assert content["number"] == 3
    assert os.listdir(tmp_path) == ["ck-1.pt"]
    assert archive.checkpoint_file(str(tmp_path / "ck-1")) == archive.checkpoint_file(path) == path


@pytest.mark.parametrize("part", [0.0, 0.3, 0.99])
def test_truncated_file(path, part):
    os.truncate(path, int(os.path.getsize(path) * part))
    with pytest.raises(DataLossError, match="is damaged"):
        archive.read_checkpoint(path)


def test_flipped_bits(path):
    with zipfile.ZipFile(path) as opened:
        offset = next(info.header_offset for info in opened.infolist() if info.filename.endswith("data/0"))
    flip(path, offset + 2000)
    said = r"the checksum of its part '.*data/0' does not fit, which holds the tensor 'value'"
    with pytest.raises(DataLossError, match=said):
        archive.read_checkpoint(path)


def flip(path, place):
    with open(path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)
        file.seek(place)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("torchs", [True, False])
def test_every_byte_counts(tmp_path, torchs):
    """Whatever torch's own checksums are set to."""
    path = str(tmp_path / "ck-1.pt")
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(torchs)
    try:
        archive.write_checkpoint(path, {"value": torch.arange(3.0), "number": 3}, {"attempt": 7})
        assert torch.serialization.get_crc32_options() is torchs
    finally:
        torch.serialization.set_crc32_options(before)
    assert archive.read_checkpoint(path)["number"] == 3
    size = os.path.getsize(path)
    for place in range(size):
        flip(path, place)
        with pytest.raises(DataLossError):
            archive.read_checkpoint(path)
        flip(path, place)
    assert archive.read_checkpoint(path)["number"] == 3
    assert archive.read_seal(path) == {"attempt": 7}
    assert torch.load(path, weights_only=True)["number"] == 3  # plain torch


def test_a_longer_file(path):
    with open(path, "ab") as file:
        file.write(b"more")
    with pytest.raises(DataLossError, match="is damaged"):
        archive.read_checkpoint(path)


@pytest.mark.parametrize("version", [None, "2", 99])
def test_versions(tmp_path, version):
    content = {"format": archive.FORMAT} if version is None else {"format": archive.FORMAT, "version": version}
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(DataLossError, match="version"):
        archive.read_checkpoint(str(tmp_path / "x.pt"))


def test_other_files(tmp_path):
    torch.save({"a": torch.zeros(1)}, tmp_path / "other.pt")
    with pytest.raises(DataLossError, match="was not written by ts"):
        archive.read_checkpoint(str(tmp_path / "other.pt"))
    torch.save(os.system, tmp_path / "code.pt")  # is not run
    with pytest.raises(DataLossError, match="holds objects that run code"):
        archive.read_checkpoint(str(tmp_path / "code.pt"))
    torch.save({"format": "torchstrategy.checkpoint", "version": 99}, tmp_path / "new.pt")
    with pytest.raises(DataLossError, match="format version 99"):
        archive.read_checkpoint(str(tmp_path / "new.pt"))


def test_paths_that_are_no_checkpoints(tmp_path):
    with pytest.raises(NotFoundError, match="no file"):
        archive.checkpoint_file(str(tmp_path / "missing"))
    with pytest.raises(DataLossError, match="is a directory"):
        archive.checkpoint_file(str(tmp_path))


@pytest.mark.parametrize("tensors", [1, 50])  # one large write fails, or what small ones left to be flushed
def test_a_failed_write_leaves_what_was_there(path, tmp_path, tensors):
    with open(path, "rb") as file:
        before = file.read()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))  # the disk is full
    try:
        with pytest.raises(OSError, match="File too large") as raised:
            archive.write_checkpoint(path, {str(i): torch.zeros(100_000 // tensors**2) for i in range(tensors)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert raised.value.filename == path
    assert os.listdir(tmp_path) == ["ck-1.pt"]
    with open(path, "rb") as file:
        assert file.read() == before


def test_an_interrupted_write_is_invisible(path, tmp_path, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        archive.write_checkpoint(path, {"value": torch.zeros(1)})
    assert os.listdir(tmp_path) == ["ck-1.pt"]
    assert len(archive.read_checkpoint(path)["value"]) == 1000
