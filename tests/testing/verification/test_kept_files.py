"""What a verified program writes is undone: files, folders and links are as they were, whoever wrote them."""

import os
import re
import shutil
import sqlite3
import tempfile
import warnings
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

import torchstrategy as ts
from torchstrategy.testing.verification.script_launch import KeptFiles, _put_back, _stamps
from torchstrategy.testing.verification.script_recorder import Setup


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A user's folder, which is the current one."""
    folder = tmp_path / "home"
    (folder / "run/old").mkdir(parents=True)
    for name in ("best.pt", "last.safetensors", "log.txt", "run/old/a", "run/b"):
        (folder / name).write_text(f"the user's {name}")
        os.utime(folder / name, ns=(10**18, 10**18 + 7))
    (folder / "latest").symlink_to("best.pt")
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def kept(tmp_path):
    folder = tmp_path / "verification"
    folder.mkdir()
    return KeptFiles(str(folder))


def state(folder):
    """Return everything in a folder: kind, content, and time of files."""
    found = {}
    for path in sorted(folder.rglob("*")):
        kind = "link" if path.is_symlink() else "folder" if path.is_dir() else "file"
        found[str(path.relative_to(folder))] = (
            (kind, path.read_bytes(), path.stat().st_mtime_ns) if kind == "file" else (kind,)
        )
    return found


def save_by_torch():
    torch.save({"w": torch.ones(3)}, "best.pt")
    torch.save({"w": torch.ones(3)}, "new.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 1), torch.ones(1, 2)), "run/b")


def save_by_safetensors():
    safetensors.torch.save_file({"w": torch.ones(3)}, "last.safetensors")


def save_by_checkpoint():
    manager = ts.train.CheckpointManager(ts.train.Checkpoint(model=torch.nn.Linear(2, 1)), "run/ck", max_to_keep=1)
    manager.save()
    manager.save()


def save_by_numpy():
    np.save("array.npy", np.ones(3))
    np.memmap("log.txt", np.uint8, "r+")[:] = 0


def write_and_append():
    Path("best.pt").write_text("mine")
    with open("log.txt", "a") as file:
        file.write("mine")
    with open("latest", "w") as file:  # a link
        file.write("mine")
    os.truncate("run/b", 1)


def move():
    os.rename("run", "moved")
    os.replace("log.txt", "best.pt")
    Path("moved/b").write_text("mine")
    os.makedirs("run/old")
    os.rename("moved/old", "run/old")


def remove():
    shutil.rmtree("run")
    os.remove("best.pt")
    os.remove("latest")
    os.mkdir("best.pt")
    Path("run").write_text("a file now")


def link():
    os.link("best.pt", "same.pt")
    os.symlink("run", "to_run")
    Path("same.pt").write_text("mine")
    Path("to_run/b").write_text("mine")


def make_folders():
    os.makedirs("deep/deeper")
    os.rename("deep", "deepest")
    Path("deepest/deeper/file").write_text("mine")


def touch():
    os.utime("log.txt")
    os.chmod("run/b", 0o600)


def write_a_database():
    sqlite3.connect("data.db").execute("create table t (x)").connection.close()


WRITERS = [
    save_by_torch,
    save_by_safetensors,
    save_by_checkpoint,
    save_by_numpy,
    write_and_append,
    move,
    remove,
    link,
    make_folders,
    touch,
    write_a_database,
]


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_all_is_as_before(write, home, kept):
    before = state(home)
    modes = {path: path.stat().st_mode for path in home.rglob("*")}
    with kept.watching():
        write()
    assert state(home) != before or write is touch
    assert kept.put_back() == []
    assert state(home) == before
    assert {path: path.stat().st_mode for path in home.rglob("*")} == modes


def test_the_first_process_keeps_what_was_there(home, kept):
    before = state(home)
    second = KeptFiles(str(Path(kept._folder).parent))
    with kept.watching():
        Path("best.pt").write_text("of rank 0")
    with second.watching():
        Path("best.pt").write_text("of rank 1")
    assert kept.put_back() == []
    assert state(home) == before


def test_nothing_is_overwritten_without_room(home, kept, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 10))
    with kept.watching(), pytest.raises(OSError, match=r"(?s)best.pt with 18 bytes.*too little room.*TMPDIR"):
        torch.save({}, "best.pt")
    assert Path("best.pt").read_text() == "the user's best.pt"


def test_what_is_only_read_is_not_copied(home, kept):
    with kept.watching():
        assert Path("best.pt").read_text()
        assert os.listdir("run")
    assert not os.path.exists(kept._folder)


def test_what_another_process_changes_is_named(home, kept, tmp_path, caplog):
    setup = Setup("train.py", (), str(Path(kept._folder).parent))
    before = _stamps([str(home)])
    Path("best.pt").write_text("by another process")
    with kept.watching():
        Path("log.txt").write_text("mine")
    _put_back(setup, before)
    assert [record.args[0] for record in caplog.records] == [str(home / "best.pt")]
    assert "can't be put back" in caplog.text
    caplog.clear()
    _put_back(setup, _stamps([str(home)]))
    assert not caplog.records


def test_copies_are_left_if_a_file_cannot_be_put_back(home, kept, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with kept.watching():
        torch.save({}, "best.pt")
    monkeypatch.setattr(shutil, "copy2", lambda *_: os.listdir("nowhere"))
    with pytest.raises(OSError, match=r"train.py has changed could not be put back: .*best.pt \(No such file") as error:
        _put_back(Setup("train.py", (), str(Path(kept._folder).parent)), {})
    folder = re.search(r"Copies are in (\S+), where", str(error.value))[1]
    assert [path.read_text() for path in Path(folder).glob("*/data")] == ["the user's best.pt"]
