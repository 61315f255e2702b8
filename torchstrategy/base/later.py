"""Names of a package that are imported when they are first used (PEP 562); its stub file lists them, each once."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["attach"]


def attach(package: str, now: Sequence[str] = ()) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a package, as ``__init__.pyi`` beside it says.

    The stub has imports only, such as ``from torchstrategy.ps.server import Server as Server``: type checkers read it,
    and so does this, so there is no second list that could differ.

    Args:
        package: its name.
        now: modules that are imported at once, and all names that are in them.

    Example:
        >>> from torchstrategy.base.later import attach
        >>> find, _, names = attach("torchstrategy")
        >>> find("Server") is ts.Server, "Server" in names
        (True, True)
    """
    module = sys.modules[package]
    stub = str(Path(str(module.__file__)).with_suffix(".pyi"))
    try:  # by what has loaded the package, perhaps from an archive
        source = module.__spec__.loader.get_data(stub)  # type: ignore[union-attr]
    except OSError as error:
        raise ImportError(
            f"{stub} is missing, which lists the names of {package}: it belongs to the package."
        ) from error
    homes = {
        alias.name: node.module
        for node in ast.parse(source).body
        if isinstance(node, ast.ImportFrom) and node.module is not None
        for alias in node.names
    }
    namespace = vars(module)

    def find(name: str) -> Any:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if home == package:  # one of its own modules
            value = importlib.import_module(f"{package}.{name}")
        else:
            value = getattr(importlib.import_module(home), name)
        namespace[name] = value
        return value

    def names() -> list[str]:
        return sorted({*namespace, *homes})

    for name in now:
        importlib.import_module(name)
    # A compiler that meets a name of the package which is not there yet does not know how to find it.
    for name, home in homes.items():
        if home in now or f"{home}.{name}" in now:
            find(name)
    return find, names, sorted(homes)
