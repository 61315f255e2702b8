"""What everything else stands on: values, options, devices, the stack of contexts, and what is said in the log."""

from importlib.metadata import PackageNotFoundError, requires, version

__all__ = ["__version__", "how_to_install"]

try:
    __version__ = version("torchstrategy")  # kept in pyproject.toml only
except PackageNotFoundError:  # a source tree that is not installed
    __version__ = "0+unknown"


def how_to_install(extra: str) -> str:
    """Return the command that installs the packages of an extra, wherever the library itself came from.

    Args:
        extra: its name in pyproject.toml.

    Example:
        >>> from torchstrategy.base import how_to_install
        >>> how_to_install("files")
        "pip install 'pyarrow>=15' 'webdataset>=1'"
    """
    try:
        lines = [line.partition(";") for line in requires("torchstrategy") or ()]
    except PackageNotFoundError:
        return f"pip install '.[{extra}]' in the library's checkout"
    packages = [package.strip() for package, _, condition in lines if condition.strip() == f"extra == '{extra}'"]
    return " ".join(["pip install", *(f"'{package}'" for package in packages)])
