"""Pickling what a model is, without its tensors: those go into the part of a file that is read without running code.

Objects are pickled by Python's rules: classes and functions by the names that they have in their modules.
"""

from __future__ import annotations

import importlib
import inspect
import io
import pickle
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchstrategy.base.values import RemoteTensor
from torchstrategy.checkpoint.tracked import to_plain
from torchstrategy.replicas.mirrored import bodies

__all__ = ["dump_objects", "load_objects"]

_PROTOCOL = 4


def dump_objects(objects: Mapping[str, Any], known: Mapping[int, Tensor]) -> dict[str, Any]:
    """Return objects as plain data. A tensor that several of them hold stays one tensor.

    Args:
        objects: by the names that error messages give them, such as ``model``.
        known: by the ids of tensors in them, plain tensors of the same values, to be written once.

    Returns:
        What ``load_objects`` reads: ``pickles`` by name, and ``tensors``.

    Raises:
        TypeError: one of them can't be pickled; the message says which part of it.
    """
    tensors = _Tensors(known)
    return {"pickles": {name: _dump(name, obj, tensors) for name, obj in objects.items()}, "tensors": tensors.records}


def load_objects(content: Mapping[str, Any], names: list[str], path: str) -> list[Any]:
    """Return objects that ``dump_objects`` wrote, with their tensors on torch's default device.

    This runs code that the pickles name.

    Args:
        content: what ``dump_objects`` returned.
        names: which objects.
        path: the file, for error messages.

    Raises:
        ImportError: a class or function is not where it was when the file was written.
    """
    tensors: dict[int, Tensor] = {}  # shared: what was one tensor is one again
    return [_load(name, content, tensors, path) for name in names]


class _Tensors:
    """The tensors of pickled objects, each once."""

    def __init__(self, known: Mapping[int, Tensor]) -> None:
        self._known = known
        self.records: list[tuple[Tensor, bool, bool]] = []
        self._numbers: dict[int, tuple[int, Tensor]] = {}  # with the tensor, whose id must stay its own

    def number(self, tensor: Tensor) -> int:
        """Return a tensor's number."""
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = len(self.records), tensor
            is_parameter = isinstance(tensor, nn.Parameter)
            value = self._known.get(id(tensor))
            value = to_plain(tensor, "a tensor of the model") if value is None else value
            self.records.append((value, is_parameter, tensor.requires_grad))
        return self._numbers[id(tensor)][0]


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, tensors: _Tensors) -> None:
        super().__init__(file, _PROTOCOL)
        self._tensors = tensors

    def persistent_id(self, obj: Any) -> int | None:
        is_plain = type(obj) in (Tensor, nn.Parameter) or isinstance(obj, RemoteTensor)
        return self._tensors.number(obj) if is_plain else None


#: Modules of the library that files name and that have other names now, in the order in which they moved.
_MOVED = {
    "torchstrategy.losses.arguments": "torchstrategy.losses.loss",
    "torchstrategy.losses.names": "torchstrategy.losses.loss_names",
    "torchstrategy.metrics.base": "torchstrategy.metrics.metric",
    "torchstrategy.metrics.inputs": "torchstrategy.metrics.metric_inputs",
    "torchstrategy.metrics.names": "torchstrategy.metrics.metric_names",
    "torchstrategy.metrics.regression": "torchstrategy.metrics.mean",
    "torchstrategy.callbacks": "torchstrategy.fit.callbacks",
    "torchstrategy.training": "torchstrategy.fit",
    "torchstrategy.estimator.feature_column.column": "torchstrategy.estimator.feature_column.features",
    "torchstrategy.estimator.feature_column.crossed": "torchstrategy.estimator.feature_column.categorical",
    "torchstrategy.fit.callbacks.history": "torchstrategy.fit.callbacks.callback",
    "torchstrategy.fit.callbacks.lambda_callback": "torchstrategy.fit.callbacks.callback_list",
    "torchstrategy.fit.callbacks.monitor": "torchstrategy.fit.callbacks.stopping",
    "torchstrategy.fit.callbacks.torch_scheduler": "torchstrategy.fit.callbacks.rates",
    "torchstrategy.fit.loss_tracker": "torchstrategy.fit.compiled_loss",
    "torchstrategy.metrics.mean_errors": "torchstrategy.metrics.mean",
    "torchstrategy.losses.distributions": "torchstrategy.losses.regression",
    "torchstrategy.fit.callbacks.csv_logger": "torchstrategy.fit.callbacks.progress",
}
#: Where else a module's names may be since, if they are not there.
_SPLIT = {
    "torchstrategy.losses.crossentropies": "torchstrategy.losses.rare_classes",
    "torchstrategy.losses.regression": "torchstrategy.losses.crossentropies",
    "torchstrategy.metrics.mean": "torchstrategy.metrics.regression_metrics",
}


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, records: list[Any], tensors: dict[int, Tensor]) -> None:
        super().__init__(file)
        self._records = records
        self._tensors = tensors

    def find_class(self, module_name: str, global_name: str) -> Any:
        for before, now in _MOVED.items():
            if module_name == before or module_name.startswith(f"{before}."):
                module_name = now + module_name.removeprefix(before)
        if module_name in _SPLIT and not hasattr(importlib.import_module(module_name), global_name):
            module_name = _SPLIT[module_name]
        return super().find_class(module_name, global_name)

    def persistent_load(self, pid: Any) -> Tensor:
        if pid not in self._tensors:
            value, is_parameter, requires_grad = self._records[pid]
            value = value.to(torch.get_default_device(), copy=True)
            self._tensors[pid] = (
                nn.Parameter(value, requires_grad) if is_parameter else value.requires_grad_(requires_grad)
            )
        return self._tensors[pid]


def _dump(name: str, obj: Any, tensors: _Tensors) -> bytes:
    file = io.BytesIO()
    try:
        _Pickler(file, tensors).dump(obj)
    except _PICKLING_ERRORS as error:
        place, culprit = _find_culprit(name, obj)
        raise TypeError(
            f"{place} can't be saved: {_describe(culprit)} ({error}). Define classes and functions at the top level of "
            "a module that can be imported where the model is loaded; or save the weights only (save_weights), and "
            "build the model again before load_weights."
        ) from error
    return file.getvalue()


_PICKLING_ERRORS = (pickle.PicklingError, AttributeError, TypeError, NotImplementedError, RecursionError)


def _load(name: str, content: Mapping[str, Any], tensors: dict[int, Tensor], path: str) -> Any:
    try:
        return _Unpickler(io.BytesIO(content["pickles"][name]), content["tensors"], tensors).load()
    except (AttributeError, ImportError) as error:
        # Of a program that is run by `python -m`, the module shows by another name.
        is_of_main = "__main__" in str(error) or repr(sys.modules["__main__"]) in str(error)
        hint = (
            " It was defined in the program that saved the model (__main__), which is another one now: move it to a "
            "module that both programs import."
            if is_of_main
            else " Make its module importable here, under the same name."
        )
        raise ImportError(
            f"The {name} of {path} needs a class or function that is not here: {error}.{hint} Or build the model and "
            "call load_weights, which needs the tensors of the file only."
        ) from error


def _find_culprit(place: str, obj: Any) -> tuple[str, Any]:
    """Return the innermost part of an object that can't be pickled, and where it stands."""
    seen = {id(obj)}
    while True:
        for step, part in _parts(obj):
            if id(part) not in seen and not _can_be_pickled(part):
                seen.add(id(part))
                place, obj = place + step, part
                break
        else:
            return place, obj


def _parts(obj: Any) -> Iterator[tuple[str, Any]]:
    obj = bodies(obj)[0]
    if isinstance(obj, nn.Module):
        yield from ((f".{name}", child) for name, child in obj.named_children())
    if isinstance(obj, Mapping):
        yield from ((f"[{key!r}]", value) for key, value in obj.items())
    elif isinstance(obj, (list, tuple)):
        yield from ((f"[{i}]", value) for i, value in enumerate(obj))
    elif not inspect.isroutine(obj) and not isinstance(obj, type):
        yield from ((f".{name}", value) for name, value in getattr(obj, "__dict__", {}).items())


def _can_be_pickled(obj: Any) -> bool:
    try:
        _Pickler(io.BytesIO(), _Tensors({})).dump(obj)
    except _PICKLING_ERRORS:
        return False
    return True


def _describe(obj: Any) -> str:
    name = getattr(obj, "__qualname__", "")
    if "<lambda>" in name:
        return "it is a lambda"
    if inspect.isroutine(obj):
        return f"it is the function {name}"
    cls = obj if isinstance(obj, type) else type(obj)
    return f"it is a {cls.__qualname__}" + (", a class defined in a function" if "<locals>" in cls.__qualname__ else "")
