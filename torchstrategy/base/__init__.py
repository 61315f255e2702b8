"""What everything else stands on: values, options, devices, the stack of contexts, and what is said in the log."""

from importlib.metadata import PackageNotFoundError, version

__all__ = ["__version__"]

try:
    __version__ = version("torchstrategy")  # kept in pyproject.toml only
except PackageNotFoundError:  # a source tree that is not installed
    __version__ = "0+unknown"
