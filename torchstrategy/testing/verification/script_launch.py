"""Starts the processes of a verified script, as ``python`` and ``torchrun`` start them, and keeps the user's files.

A program that is verified runs several times. What it writes is undone after each run, so that the user's files stay as
they were and each run begins from the same ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import itertools
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from torchstrategy.base.addresses import ReservedPorts
from torchstrategy.base.log import logger
from torchstrategy.testing.verification.script_recorder import Setup

__all__ = ["KeptFiles", "log_path", "start"]

_AFTER_ERROR_S = 15.0
_NUM_LINES = 8
#: What a launcher around this command, or an earlier one, has set.
_OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TF_CONFIG")
_PREFIXES = ("SLURM_", "TORCHELASTIC_", "OMPI_", "PMI_")
#: Python's audit events before a change of files: which arguments are paths, and which their folders' descriptors.
_CHANGES = {
    "open": ((0, None),),
    "os.truncate": ((0, None),),
    "os.utime": ((0, 3),),
    "os.chmod": ((0, 2),),
    "os.remove": ((0, 1),),
    "os.rmdir": ((0, 1),),
    "os.mkdir": ((0, 2),),
    "os.symlink": ((1, 2),),
    "os.link": ((0, 2), (1, 3)),
    "os.rename": ((0, 2), (1, 3)),
    "shutil.rmtree": ((0, 1),),
    "sqlite3.connect": ((0, None),),
}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
#: What writes files below Python, so that no event tells of it.
_UNHEARD = (
    (torch._C, "PyTorchFileWriter"),
    (torch.jit, "save"),
    (torch.jit._script.RecursiveScriptModule, "save"),
    ("safetensors.torch", "serialize_file"),
    ("safetensors.numpy", "serialize_file"),
)
_MAX_STAMPS = 5000
_NUM_SHOWN = 5
#: The library may lie beside the program or in a folder that only this process knows of.
_MAIN = (
    "import sys; sys.path[0] = sys.argv[1]; from torchstrategy.testing.verification.script_process import main; "
    "del sys.path[0]; main(sys.argv[2])"
)


def start(setups: Sequence[Setup], timeout_s: float) -> list[str | None]:
    """Run a script in one new interpreter for each setup, and wait until they have ended.

    Args:
        setups: what each process is told.
        timeout_s: seconds that they may take together.

    Returns:
        For each process how it has ended, which is why it left no record if it left none.

    Raises:
        OSError: what the script has changed could not be put back; the message says where the copies are.
    """
    before = _stamps([os.getcwd(), os.path.dirname(os.path.abspath(setups[0].script))])
    ports = ReservedPorts(1)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for setup in setups:
            processes.append(_start(setup, ports.numbers[0]))
        is_late = _wait(processes, time.monotonic() + timeout_s)
    finally:
        for process in processes:
            _end(process)
        ports.close()
        _put_back(setups[0], before)
    return [_why(setup, process, timeout_s, is_late) for setup, process in zip(setups, processes, strict=True)]


def _start(setup: Setup, port: int) -> subprocess.Popen[bytes]:
    folder = Path(setup.folder)
    settings = folder / f"rank{setup.rank}.json"
    settings.write_text(json.dumps(dataclasses.asdict(setup)), encoding="utf-8")
    home = str(Path(__file__).parents[3])
    command = [sys.executable, "-c", _MAIN, home, str(settings)]
    with log_path(setup).open("wb") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=_environment(setup, port),
            start_new_session=True,  # its own processes, such as a loader's, are ended with it
        )


def _environment(setup: Setup, port: int) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _OF_LAUNCHERS and not name.startswith(_PREFIXES)
    }
    fixed = {
        "CUDA_VISIBLE_DEVICES": "",
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
        "TORCHDYNAMO_DISABLE": "1",  # compiled code has no calls of modules to watch
    }
    job = {
        "RANK": setup.rank,
        "WORLD_SIZE": setup.size,
        "LOCAL_RANK": setup.rank,
        "LOCAL_WORLD_SIZE": setup.size,
        "GROUP_RANK": 0,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": "verify",
    }
    return {**kept, **fixed, **({name: str(value) for name, value in job.items()} if setup.is_job else {})}


def _wait(processes: Sequence[subprocess.Popen[bytes]], deadline: float) -> bool:
    """Wait until all have ended; say whether time was up. After one's failure the others get some seconds."""
    limit = deadline
    while any(process.poll() is None for process in processes):
        if any(process.returncode for process in processes):
            limit = min(limit, time.monotonic() + _AFTER_ERROR_S)
        if time.monotonic() > limit:
            return limit == deadline
        time.sleep(0.02)
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    if not hasattr(os, "killpg"):  # on Windows, where it has no group
        process.kill()
    else:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _why(setup: Setup, process: subprocess.Popen[bytes], timeout_s: float, is_late: bool) -> str:  # noqa: FBT001
    if is_late:
        return f"process {setup.rank} did not end within {timeout_s:g} s: raise --timeout, or record fewer --steps"
    lines = log_path(setup).read_text(encoding="utf-8", errors="replace").strip().splitlines()
    status = process.returncode
    was_killed = status == -getattr(signal, "SIGKILL", 0)
    how = "was ended after another one's failure" if was_killed else f"ended with exit status {status}"
    return "\n".join([f"process {setup.rank} {how}", *lines[-_NUM_LINES:]])


def log_path(setup: Setup) -> Path:
    """Return the file that gets what a process writes to stderr, and to stdout below Python."""
    return Path(setup.folder) / f"rank{setup.rank}.log"


class KeptFiles:
    """Files and folders as they were before a program changed them.

    The processes of a run share them: who is about to change a path first puts aside what is there. ``open``,
    ``os.replace`` and the like are audit events of Python, which come before the change; torch's and safetensors' own
    writers are wrapped. What other processes or libraries in C write isn't seen.

    Args:
        folder: the folder of the run, where they are put.
    """

    def __init__(self, folder: str) -> None:
        self._run = os.path.realpath(folder)
        self._folder = os.path.join(self._run, "kept")
        self._known: set[str] = set()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Put aside what this process is about to change."""
        with contextlib.ExitStack() as stack:
            for owner, name in _UNHEARD:
                with contextlib.suppress(ImportError):
                    module = importlib.import_module(owner) if isinstance(owner, str) else owner
                    stack.callback(setattr, module, name, getattr(module, name))
                    setattr(module, name, self._before_writing(getattr(module, name)))
            is_on = [True]
            stack.callback(is_on.clear)
            sys.addaudithook(lambda event, args: self._on_event(event, args) if event in _CHANGES and is_on else None)
            yield

    def _before_writing(self, write: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(write, updated=())
        def write_kept(*args: Any, **kwargs: Any) -> Any:
            for value in (*args, *kwargs.values()):
                if isinstance(value, (str, os.PathLike)):
                    self.keep(os.fspath(value))
            return write(*args, **kwargs)

        return write_kept

    def _on_event(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and not (isinstance(args[2], int) and args[2] & _WRITING):
            return
        paths = []
        for position, folder in _CHANGES[event]:
            path = args[position]
            if not isinstance(path, (str, bytes, os.PathLike)):
                return  # an open file, which was kept when it was opened
            if folder is not None and folder < len(args) and args[folder] not in (None, -1):
                return  # by shutil.rmtree, which has told of the whole tree
            paths.append(os.fsdecode(path))
        if event in {"os.rename", "shutil.rmtree"}:
            self._keep_tree(paths)
        for path in paths:
            self.keep(path)

    def _keep_tree(self, paths: Sequence[str]) -> None:
        """Put aside all that is in the first folder, and under its names in the second."""
        for root, folders, names in os.walk(paths[0]) if not self._is_new(paths[0]) else ():
            for name in (*folders, *names):
                for path in paths:
                    self.keep(os.path.join(path, os.path.relpath(os.path.join(root, name), paths[0])))

    def keep(self, path: str) -> None:
        """Put aside what is at a path, unless this was done before.

        Args:
            path: a file, a folder, a link, or where one is about to be made.

        Raises:
            OSError: there is no room for it, or it can't be read.
        """
        path = _place(path)
        if path.startswith((self._run + os.sep, "/dev/", "/proc/", "/sys/")) or "__pycache__" in path:
            return
        if os.path.islink(path) and os.path.realpath(path) != path:
            self.keep(os.path.realpath(path))
        if path in self._known or os.path.exists(self._copy(path)) or self._is_new(path):
            return
        draft = os.path.join(self._folder, uuid.uuid4().hex)
        os.makedirs(draft)
        try:
            entry = self._put_aside(path, draft)
            if entry is not None:
                Path(draft, "entry").write_text(json.dumps(entry), encoding="utf-8")
                os.rename(draft, self._copy(path))  # fails if another process was first; none writes before this
        except OSError:
            if not os.path.exists(self._copy(path)):
                raise
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        self._known.add(path)

    def _copy(self, path: str) -> str:
        return os.path.join(self._folder, hashlib.sha256(os.fsencode(path)).hexdigest()[:32])

    def _put_aside(self, path: str, draft: str) -> dict[str, Any] | None:
        try:
            status = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return {"path": path, "kind": "new"}
        entry = {"path": path, "mode": stat.S_IMODE(status.st_mode)}
        if stat.S_ISDIR(status.st_mode):
            return {**entry, "kind": "folder"}
        if stat.S_ISLNK(status.st_mode):
            return {**entry, "kind": "link", "target": os.readlink(path)}
        if not stat.S_ISREG(status.st_mode):
            return None  # a device or a pipe
        if 2 * status.st_size > shutil.disk_usage(draft).free:
            raise OSError(
                f"torchstrategy verify keeps what the program is about to overwrite, {path} with {status.st_size} "
                f"bytes, and there is too little room for it in {os.path.dirname(self._run)}. Have the program write "
                "elsewhere, or set TMPDIR to a folder with more room."
            )
        shutil.copy2(path, os.path.join(draft, "data"))
        return {**entry, "kind": "file"}

    def _is_new(self, path: str) -> bool:
        """Say whether a path, or a folder that it is in, was not there before the run."""
        path = _place(path)
        for part in (path, *map(str, Path(path).parents)):
            with contextlib.suppress(FileNotFoundError):
                entry = Path(self._copy(part), "entry").read_text(encoding="utf-8")
                if json.loads(entry)["kind"] == "new":
                    return True
        return False

    def put_back(self) -> list[str]:
        """Make everything what it was before the run, when its processes have ended.

        Returns:
            What could not be done: each path with the reason.
        """
        kept = [json.loads(path.read_text(encoding="utf-8")) for path in Path(self._folder).glob("*/entry")]
        order = {"new": 0, "folder": 1, "file": 2, "link": 3}
        failed = []
        for entry in sorted(kept, key=lambda entry: (order[entry["kind"]], entry["path"])):
            try:
                self._put_one_back(entry)
            except OSError as error:
                failed.append(f"{entry['path']} ({error.strerror}; kept as {self._copy(entry['path'])})")
        return failed

    def _put_one_back(self, entry: dict[str, Any]) -> None:
        path, kind = entry["path"], entry["kind"]
        if kind == "new":
            _delete(path)
        elif kind == "folder":
            if os.path.islink(path) or not os.path.isdir(path):
                _delete(path)
                os.mkdir(path)
            if stat.S_IMODE(os.stat(path).st_mode) != entry["mode"]:
                os.chmod(path, entry["mode"])
        elif kind == "link":
            if not os.path.islink(path) or os.readlink(path) != entry["target"]:
                _delete(path)
                os.symlink(entry["target"], path)
        else:
            if os.path.islink(path) or not os.path.isfile(path) or not os.access(path, os.W_OK):
                _delete(path)
            shutil.copy2(os.path.join(self._copy(path), "data"), path)  # in its place: it may have other names


def _place(path: str) -> str:
    """Return where a path is, without following it if it is a link."""
    folder, name = os.path.split(os.path.abspath(path))
    return os.path.join(os.path.realpath(folder), name)


def _delete(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)


def _stamp(path: str) -> list[int] | None:
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return [status.st_mtime_ns, status.st_size]


def _stamps(folders: Sequence[str]) -> dict[str, list[int] | None]:
    """Return times and sizes of the files in folders, but for hidden ones; nothing if there are too many."""
    found: dict[str, list[int] | None] = {}
    for root, inner, names in itertools.chain.from_iterable(map(os.walk, folders)):
        inner[:] = [name for name in inner if not name.startswith((".", "__pycache__", "torchstrategy_verify_"))]
        found.update({path: _stamp(path) for path in (os.path.join(root, name) for name in names)})
        if len(found) > _MAX_STAMPS:
            return {}
    return found


def _put_back(setup: Setup, before: dict[str, list[int] | None]) -> None:
    try:
        failed = KeptFiles(setup.folder).put_back()
    except KeyboardInterrupt:
        failed = ["interrupted"]
    if failed:
        saved = shutil.move(os.path.join(setup.folder, "kept"), tempfile.mkdtemp(prefix="torchstrategy_kept_"))
        raise OSError(
            f"What {setup.script} has changed could not be put back: {'; '.join(failed)}. Copies are in {saved}, where "
            "each file entry names the path that data belongs to."
        )
    after = _stamps([os.getcwd(), os.path.dirname(os.path.abspath(setup.script))]) if before else {}
    changed = sorted(path for path in before | after if before.get(path) != after.get(path))
    if changed:
        more = f" and {len(changed) - _NUM_SHOWN} more" if len(changed) > _NUM_SHOWN else ""
        logger.warning(
            "torchstrategy verify: %s%s changed while %s ran, by another process or a library that does not write by "
            "Python or torch. That can't be put back, and the next run finds it so.",
            ", ".join(changed[:_NUM_SHOWN]),
            more,
            setup.script,
        )
