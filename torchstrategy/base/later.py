"""Names of a package that are imported when they are first used (PEP 562); its stub file lists them, each once.

A name that tf has and this library has not raises an error that says what to use: the table ``tf_names.csv`` knows.
"""

from __future__ import annotations

import ast
import csv
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeVar

__all__ = ["attach", "explain_absent", "explains_absent", "explains_arguments"]

_Class = TypeVar("_Class")
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


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
    refuse = _refusal(package)

    def find(name: str) -> Any:
        home = homes.get(name)
        if home is None:
            refuse(name)
        if home == package:  # one of its own modules
            value = importlib.import_module(f"{package}.{name}")
        else:
            value = getattr(importlib.import_module(home), name)
        namespace[name] = value
        return value

    def names() -> list[str]:
        return sorted({*homes, *(name for name in namespace if name.startswith("__"))})  # what it imports is no part

    for name in now:
        importlib.import_module(name)
    # A compiler that meets a name of the package which is not there yet does not know how to find it.
    for name, home in homes.items():
        if home in now or f"{home}.{name}" in now:
            find(name)
    return find, names, sorted(homes)


def explain_absent(package: str) -> None:
    """Let a package whose names are all there say what to use for those that only tf has.

    Args:
        package: its name.

    Example:
        >>> ts.coordinator.ParameterServerStrategy
        Traceback (most recent call last):
        AttributeError: module 'torchstrategy.coordinator' has no attribute 'ParameterServerStrategy'
    """
    vars(sys.modules[package])["__getattr__"] = _refusal(package)


def explains_absent(owner: str) -> Callable[[type[_Class]], type[_Class]]:
    """Return a decorator of a class whose objects say what to use for attributes that only tf has.

    Args:
        owner: the class's name in tf, without ``tf.distribute``, ``tf.keras`` or ``tf``.

    Example:
        >>> ts.get_strategy().unwrap
        Traceback (most recent call last):
        AttributeError: 'DefaultStrategy' object has no attribute 'unwrap'. Use `experimental_local_results(value)`.
    """

    def decorate(cls: type[_Class]) -> type[_Class]:
        above: Callable[[object, str], Any] | None = getattr(cls, "__getattr__", None)  # that of modules

        def find(self: object, name: str) -> Any:
            if above is not None:
                try:
                    return above(self, name)
                except AttributeError:
                    if name.startswith("_"):
                        raise
            _raise_absent(f"{type(self).__name__!r} object", self, name, owner)

        cls.__getattr__ = find  # type: ignore[attr-defined] # where a checker does not see it: it would allow any name
        return cls

    return decorate


def explains_arguments(hint: str) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """Return a decorator of a function that says what to write if its arguments are those of another version of tf.

    Args:
        hint: what the error ends with.

    Example:
        >>> from torchstrategy.base.later import explains_arguments
        >>> explains_arguments("Use `n`.")(lambda n: n)(count=3)
        Traceback (most recent call last):
        TypeError: <lambda>(): missing a required argument: 'n'. Use `n`.
    """

    def decorate(fn: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        signature = inspect.signature(fn)

        @functools.wraps(fn)
        def checked(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{fn.__qualname__}(): {error}. {hint}") from None
            return fn(*args, **kwargs)

        return checked

    return decorate


def _refusal(package: str) -> Callable[[str], NoReturn]:
    owner = package.partition(".")[2]

    def find(name: str) -> NoReturn:
        _raise_absent(f"module {package!r}", sys.modules[package], name, owner)

    return find


def _raise_absent(what: str, obj: object, name: str, owner: str) -> NoReturn:
    path = f"{owner}.{name}".lstrip(".")
    known = {} if name.startswith("_") else _remarks()
    remark = known.get(path) or known.get(path.removeprefix("compat.v1."))
    message = f"{what} has no attribute {name!r}"
    raise AttributeError(f"{message}. {remark}" if remark else message, name=name, obj=obj)


@functools.cache
def _remarks() -> dict[str, str]:
    """Return what to say of each name of tf that the library has not."""
    found = {}
    with resources.files(__package__).joinpath("tf_names.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if not row["torchstrategy"]:
                name = row["TensorFlow"].removeprefix("tf.").removeprefix("distribute.").removeprefix("keras.")
                found[name] = row["remark"]
                for prefix in ("compat.v1.distribute.", "compat.v1."):
                    found.setdefault(name.removeprefix(prefix), row["remark"])
    return found
