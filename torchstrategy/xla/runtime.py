"""The XLA runtime of this process, if it is installed."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import re

import torch

from torchstrategy.xla.interface import TpuRuntime
from torchstrategy.xla.torch_xla_runtime import TorchXlaRuntime

__all__ = ["TpuRuntime", "check_installation", "get_runtime", "is_installed"]

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
        raise ImportError(
            "TPUs need torch_xla, which is not installed: pip install 'torchstrategy[tpu]'. It is there for Linux only."
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
