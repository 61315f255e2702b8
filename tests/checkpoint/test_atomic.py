"""Checkpoint files are complete or not there, and damage is noticed."""

import json
import os
import resource
import signal
import zipfile

import pytest
import torch

from torchstrategy.checkpoint import atomic
from torchstrategy.errors import DataLossError, NotFoundError


@pytest.fixture
def path(tmp_path):
    path = str(tmp_path / "ck-1.pt")
    atomic.write_checkpoint(path, {"value": torch.arange(1000.0), "number": 3})
    return path


def test_round_trip(path, tmp_path):
    content = atomic.read_checkpoint(path)
    assert torch.equal(content["value"], torch.arange(1000.0))
    assert content["number"] == 3
    assert os.listdir(tmp_path) == ["ck-1.pt"]
    assert atomic.checkpoint_file(str(tmp_path / "ck-1")) == atomic.checkpoint_file(path) == path


@pytest.mark.parametrize("part", [0.0, 0.3, 0.99])
def test_truncated_file(path, part):
    os.truncate(path, int(os.path.getsize(path) * part))
    with pytest.raises(DataLossError, match="is damaged or not a checkpoint"):
        atomic.read_checkpoint(path)


def test_flipped_bits(path):
    with zipfile.ZipFile(path) as archive:
        names = [info.filename for info in archive.infolist()]
        offset = next(info.header_offset for info in archive.infolist() if info.filename.endswith("data/0"))
    assert names
    with open(path, "r+b") as file:
        file.seek(offset + 2000)
        byte = file.read(1)
        file.seek(offset + 2000)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(DataLossError, match=r"the checksum of its part '.*data/0' does not fit"):
        atomic.read_checkpoint(path)


def test_other_files(tmp_path):
    torch.save({"a": torch.zeros(1)}, tmp_path / "other.pt")
    with pytest.raises(DataLossError, match="was not written by ts"):
        atomic.read_checkpoint(str(tmp_path / "other.pt"))
    torch.save(os.system, tmp_path / "code.pt")  # is not run
    with pytest.raises(DataLossError, match="damaged or not a checkpoint"):
        atomic.read_checkpoint(str(tmp_path / "code.pt"))
    torch.save({"format": "torchstrategy.checkpoint", "version": 99}, tmp_path / "new.pt")
    with pytest.raises(DataLossError, match="format version 99"):
        atomic.read_checkpoint(str(tmp_path / "new.pt"))


def test_paths_that_are_no_checkpoints(tmp_path):
    with pytest.raises(NotFoundError, match="no file"):
        atomic.checkpoint_file(str(tmp_path / "missing"))
    with pytest.raises(DataLossError, match="is a directory"):
        atomic.checkpoint_file(str(tmp_path))


@pytest.mark.parametrize("tensors", [1, 50])  # one large write fails, or what small ones left to be flushed
def test_a_failed_write_leaves_what_was_there(path, tmp_path, tensors):
    with open(path, "rb") as file:
        before = file.read()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))  # the disk is full
    try:
        with pytest.raises(OSError, match="File too large") as raised:
            atomic.write_checkpoint(path, {str(i): torch.zeros(100_000 // tensors**2) for i in range(tensors)})
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
        atomic.write_checkpoint(path, {"value": torch.zeros(1)})
    assert os.listdir(tmp_path) == ["ck-1.pt"]
    assert len(atomic.read_checkpoint(path)["value"]) == 1000


def test_index(tmp_path):
    assert atomic.read_index(str(tmp_path)) is None
    assert atomic.read_index(str(tmp_path / "missing")) is None
    atomic.write_index(str(tmp_path), {"ck-1": 1.0, "ck-2": 2.0}, 0.5)
    index = atomic.read_index(str(tmp_path))
    assert (index.latest, index.written, index.last_preserved) == ("ck-2", {"ck-1": 1.0, "ck-2": 2.0}, 0.5)
    assert json.loads((tmp_path / "checkpoint").read_text())["latest"] == "ck-2"


@pytest.mark.parametrize("text", ["", "[]", '"ck-1"', '{"latest": "ck-1"}', '{"written": [1], "last_preserved": 0}'])
def test_damaged_index(tmp_path, text):
    (tmp_path / "checkpoint").write_text(text)
    with pytest.raises(DataLossError, match="Delete it and restore a checkpoint by its path"):
        atomic.read_index(str(tmp_path))
