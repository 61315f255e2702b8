"""The XLA runtime of this process, if it is installed, and what it is told of graphs: names, and where one ends."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import re
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from torchstrategy.base import how_to_install
from torchstrategy.xla.interface import TpuRuntime
from torchstrategy.xla.torch_xla_runtime import TorchXlaRuntime

__all__ = [
    "TpuRuntime",
    "check_installation",
    "cut",
    "get_runtime",
    "in_function",
    "is_installed",
    "name_of",
    "named",
    "number",
    "one_graph",
]

_PAIR = "2.9"  # what the extra [tpu] installs


@functools.cache
def get_runtime() -> TpuRuntime:
    """Return this process's runtime; nothing is started.

    Raises:
        ImportError: torch_xla is not installed, or does not fit to torch.
    """
    check_installation()
    try:
        return TorchXlaRuntime()
    except ImportError as error:
        raise ImportError(
            f"torch_xla {_installed_version() or 'of an unknown version'} can't be imported with torch "
            f"{torch.__version__}: {error}. {_how_to_install(_PAIR)}"
        ) from error


def is_installed() -> bool:
    """Say whether torch_xla is there; it is not imported."""
    return importlib.util.find_spec("torch_xla") is not None


def check_installation() -> None:
    """See whether torch_xla is there and fits to torch; a wrong pair would fail with an undefined symbol, or crash.

    Raises:
        ImportError: it is not, or does not.
    """
    if not is_installed():
        if importlib.util.find_spec("torch_tpu") is not None:
            raise ImportError(
                "TPUStrategy and initialize_tpu_system need torch_xla, which is not installed, but torch_tpu is. With "
                "it chips are devices of the type 'tpu', one for each process: torchrun --nproc-per-node=CHIPS, "
                "use ts.MultiWorkerMirroredStrategy, and leave out the calls of ts.tpu.experimental."
            )
        raise ImportError(
            f"TPUs need torch_xla, which is not installed: {how_to_install('tpu')}. It is there for Linux only."
        )
    version = _installed_version()
    if version is None or _release(version) == _release(torch.__version__):
        return
    needed = _release(version)
    raise ImportError(
        f"torch_xla {version} does not fit to torch {torch.__version__}: it needs torch {needed}, because each release "
        f"is built for the torch of the same number. {_how_to_install(needed)}"
    )


def _how_to_install(release: str) -> str:
    return f"Install a pair that fits: pip install 'torch=={release}.*' 'torch-xla[tpu]=={release}.*'"


def _installed_version() -> str | None:
    try:
        return importlib.metadata.version("torch-xla")
    except importlib.metadata.PackageNotFoundError:  # built from source and put on the path
        return None


def _release(version: str) -> str:
    """Return ``"2.9"`` for ``"2.9.1+cpu"``."""
    return ".".join(re.findall(r"\d+", version)[:2])


_Function = TypeVar("_Function", bound=Callable[..., object])
_NAME = "_ts_program"


class _Thread(threading.local):
    depth = 0
    number = 0
    waiting: tuple[TpuRuntime, Callable[[], None]] | None = None


_thread = _Thread()


def in_function() -> bool:
    """Say whether what is traced here belongs to the graph of a function."""
    return _thread.depth > 0


def number() -> int:
    """Return which of this thread's functions runs, counted from 1, or ran last; functions in functions don't count."""
    return _thread.number


def named(fn: _Function, name: str) -> _Function:
    """Let compilations of a function, such as ``functools.partial`` makes, be counted and shown by a name."""
    setattr(fn, _NAME, name)
    return fn


def name_of(fn: Callable[..., object]) -> str | None:
    """Return the name that ``named`` gave."""
    return getattr(fn, _NAME, None)


def cut(runtime: TpuRuntime, after: Callable[[], None] = lambda: None) -> None:
    """Run what was traced so far; inside a function, when that ends.

    Args:
        runtime: the devices.
        after: called as soon as that runs; inside a function the last cut's.
    """
    if _thread.depth:
        _thread.waiting = runtime, after
    else:
        runtime.sync()
        after()


@contextlib.contextmanager
def one_graph() -> Iterator[None]:
    """Let what is traced inside be one graph, which runs at the end; a function that raises runs nothing."""
    if not _thread.depth:
        _thread.number += 1
    _thread.depth += 1
    try:
        yield
        waiting = _thread.waiting
        if _thread.depth == 1 and waiting is not None:
            _thread.waiting = None
            runtime, after = waiting
            runtime.sync()
            after()
    finally:
        _thread.depth -= 1
        if not _thread.depth:
            _thread.waiting = None
