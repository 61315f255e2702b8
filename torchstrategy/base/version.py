"""The version, kept in ``pyproject.toml`` only."""

from importlib.metadata import PackageNotFoundError, version

__all__ = ["__version__"]

try:
    __version__ = version("torchstrategy")
except PackageNotFoundError:  # a source tree that is not installed
    __version__ = "0+unknown"
