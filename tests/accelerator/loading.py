"""Builds the accelerator for tests (standin.cpp) once for each source and torch, and makes it this process's.

``load`` gives PrivateUse1 its name for as long as the process lives, and what has no device named is on it from then on
(``torch.accelerator`` finds it): so it is loaded where each file's tests have a process of their own.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
from pathlib import Path

import torch

from tests.accelerator import device_module
from tests.accelerator.device_module import NAME

DEVICES = (f"{NAME}:0", f"{NAME}:1")
SOURCE = Path(__file__).with_name("standin.cpp")
_OPTIONS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-w")


@functools.cache
def why_not() -> str | None:
    """Return why the accelerator can't be used here, ``None`` if it can."""
    if torch.cuda.is_available():
        return "there is a GPU, which runs the same tests"
    if platform.system() != "Linux":
        return "the accelerator for tests is built on Linux only"
    if shutil.which("g++") is None:
        return "the accelerator for tests needs a compiler: g++"
    return None


def is_loaded() -> bool:
    return torch._C._get_privateuse1_backend_name() == NAME


def load(name: str = NAME) -> None:
    """Make the accelerator the one of this process, unless it is.

    Args:
        name: what torch calls it, for a process of its own in which it stands in for a kind of accelerators.
    """
    if torch._C._get_privateuse1_backend_name() == name:
        return
    library, error = _build()
    if error:
        raise RuntimeError(f"The accelerator for tests can't be built with torch {torch.__version__}:\n{error}")
    torch.ops.load_library(library)
    torch.utils.rename_privateuse1_backend(name)
    device_module.NAME = name
    generators = (torch.ops.standin.default_generator(index) for index in range(device_module.device_count()))
    device_module.default_generators = tuple(generators)
    torch._register_device_module(name, device_module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


@functools.cache
def _build() -> tuple[str, str]:
    """Return the library's path, and what the compiler says if it failed."""
    source = SOURCE.read_bytes()
    compiler = subprocess.run(["g++", "--version"], capture_output=True, check=True).stdout
    torch_folder = Path(torch.__file__).parent
    seen = (source, compiler, torch.__version__, str(torch_folder), platform.machine(), " ".join(_OPTIONS))
    key = hashlib.blake2b(
        b"\0".join(part if isinstance(part, bytes) else part.encode() for part in seen), digest_size=8
    )
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchstrategy-tests"
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"{NAME}-{key.hexdigest()}.so"
    with open(folder / f"{NAME}.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several files' processes come at once
        if not library.exists():
            unfinished = library.with_suffix(f".{os.getpid()}")
            includes = [f"-I{torch_folder / 'include'}", f"-I{torch_folder / 'include/torch/csrc/api/include'}"]
            libraries = [f"-L{torch_folder / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
            command = ["g++", *_OPTIONS, *includes, str(SOURCE), "-o", str(unfinished), *libraries]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                return "", done.stderr
            unfinished.replace(library)
    return str(library), ""
