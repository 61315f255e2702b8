"""The program's own modules, which are no installed packages: what they define is sent to workers by value."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import site
import sys
import sysconfig
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchstrategy.ps.transport.sockets import cloudpickle

__all__ = ["CodePickler", "dumps", "is_sent_by_value", "pickled_by_value"]

_CloudPickler: Any = object if cloudpickle is None else cloudpickle.CloudPickler


class CodePickler(_CloudPickler):  # type: ignore[misc]
    """Pickles by value what can't be imported."""

    def reducer_override(self, obj: Any) -> Any:
        """Pickle odd modules by name, and keep a code's file, which cloudpickle 3.1.3 drops and tracebacks show."""
        if isinstance(obj, types.CodeType):
            _, arguments = self.dispatch_table[types.CodeType](obj)
            return _make_code, (obj.co_filename, arguments)
        if isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType:
            name = vars(obj).get("__name__")
            if sys.modules.get(str(name)) is obj:  # torch.ops, of which cloudpickle knows no reduction
                return importlib.import_module, (name,)
        return super().reducer_override(obj)


def dumps(obj: Any) -> bytes:
    """Pickle an object, and by value what can't be imported."""
    buffer = io.BytesIO()
    CodePickler(buffer).dump(obj)
    return buffer.getvalue()


def is_sent_by_value(fn: Any) -> bool:
    """Say whether a function is the program's own."""
    module = getattr(fn, "__module__", None)
    return module == "__main__" or module in _names_of_user_modules(len(sys.modules))


@contextlib.contextmanager
def pickled_by_value() -> Iterator[None]:
    """Pickle what the program's own modules define by value: a worker need not have its files."""
    before = cloudpickle.list_registry_pickle_by_value()
    new = [module for module in _user_modules(len(sys.modules)) if module.__name__ not in before]
    for module in new:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in new:
            cloudpickle.unregister_pickle_by_value(module)


def _make_code(file: str, arguments: tuple[Any, ...]) -> types.CodeType:
    return types.CodeType(*arguments).replace(co_filename=file)


@functools.lru_cache(maxsize=1)
def _names_of_user_modules(num_modules: int) -> frozenset[str]:
    return frozenset(module.__name__ for module in _user_modules(num_modules))


@functools.lru_cache(maxsize=1)
def _user_modules(_: int) -> list[types.ModuleType]:
    installed = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    installed |= {*site.getsitepackages(), site.getusersitepackages()}
    own = str(Path(__file__).parents[1])
    found = []
    for name, module in sys.modules.copy().items():
        file = getattr(module, "__file__", None)
        if name == "__main__" or not isinstance(module, types.ModuleType) or not isinstance(file, str):
            continue
        if name == module.__name__ and not any(file.startswith(f"{path}/") for path in (*installed, own)):
            found.append(module)
    return found
