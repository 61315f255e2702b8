"""Notices what the replicas of a process change in a run, each of them, although there is only one of it for all.

Python's variables, attributes of plain objects, and tensors and modules that no scope has made belong to the process.
What each replica counts up, updates or leaves there is not what one replica would have: a count grows by the number of
replicas, and a state that is carried from batch to batch is another replica's. The first runs of each function are
looked at.
"""

from __future__ import annotations

import contextlib
import dis
import inspect
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from torchstrategy.base import tree
from torchstrategy.base.log import warn_once
from torchstrategy.replicas.dtensors import is_dtensor
from torchstrategy.replicas.fingerprints import is_of_library
from torchstrategy.replicas.mirrored import mirror_of
from torchstrategy.replicas.record import owner, recorded_classes

__all__ = ["watching_shared_state"]

#: So many functions are looked at for what they find, and no dict of more members: a vocabulary is no state.
_MOST_FUNCTIONS, _MOST_MEMBERS = 30, 1000


@contextlib.contextmanager
def watching_shared_state(
    given: Any, fn: Any, contexts: Sequence[Any], parameters: Callable[[], Sequence[Tensor]]
) -> Iterator[Any]:
    """Warn of what each replica counts up, updates or sets, also in runs that fail.

    Args:
        given: the replica function; what is yielded is to be called in its place.
        fn: what it is without wrappers.
        contexts: of this process's replicas.
        parameters: returns those of the first.
    """
    watch = _Watch(fn, contexts)
    try:
        yield watch.noting(given)
    finally:
        watch.end()
        counted = watch.counted()
        updated, carried = ([], []) if counted else (watch.updated(parameters), watch.carried())
        count = len(contexts)
        for name in counted:
            warn_once(
                f"`{name}` grew by {count} in one run, by 1 for each replica of this process. Python's numbers, and "
                "tensors and objects that were not made in the scope, belong to the process, so what the replica "
                "function computes from a count of its calls depends on the number of replicas. Count outside `run` "
                "and pass the number in `args`, or make the object in the scope, or the number an attribute of a "
                "module of the scope, of which each replica has its own. (What is meant to add up over the replicas of "
                "this process may stay.)",
                stacklevel=6,
            )
        for name in updated[:1]:
            warn_once(
                f"`{name}` was changed by each of {count} replicas of this process in one run, one after the other. It "
                "is of a module that was not made in the scope, of which there is one for all, so an update of a "
                f"moving average or a target network is made {count} times. Make the module in the scope, where each "
                "replica gets its own (a copy by copy.deepcopy, too), or update it outside `run`.",
                stacklevel=6,
            )
        for name in carried:
            warn_once(
                f"`{name}` was set by each of {count} replicas of this process in one run, to values that differ. "
                "Python's variables, and objects that were not made in the scope, belong to the process: a replica "
                "finds there what another one has left, and the program the last one's. Return the value from the "
                "replica function, for `run` gives one of each replica, which `args` takes in the next run; or make it "
                "an attribute of a module of the scope, of which each replica has its own.",
                stacklevel=6,
            )


class _Watch:
    """What a replica function finds in outer variables, at the start and the end of each replica's call.

    Args:
        fn: the function; what functions find that it finds is looked at, too.
        contexts: of this process's replicas.
    """

    def __init__(self, fn: Any, contexts: Sequence[Any]) -> None:
        self._contexts = contexts
        self._functions = _functions_from(fn)
        self._counts = _counts_of(fn)
        found = self._found()
        modules = {k: m for k, m in found.items() if isinstance(m, nn.Module) and _is_shared(m)}
        named = [(f"{key}.{name}", p) for key, module in modules.items() for name, p in module.named_parameters()]
        self._weights = [(name, p) for name, p in named if not p.is_inference() and not is_dtensor(p)]
        self._versions = [[p._version for _, p in self._weights]]
        self._starts: list[dict[str, Any]] = []
        self._ends = [found]

    def noting(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return what calls the function and notes what it finds."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._starts.append(self._found())
            result = fn(*args, **kwargs)
            self._versions.append([p._version for _, p in self._weights])
            self._ends.append(self._found())
            return result

        with contextlib.suppress(ValueError, TypeError):  # it has none
            call.__signature__ = inspect.signature(fn, follow_wrapped=False)  # type: ignore[attr-defined]
        call.__name__ = getattr(fn, "__name__", "the function")
        return call

    def end(self) -> None:
        """Note what is found when the run ends, however it does."""
        self._starts.append(self._found())

    def counted(self) -> list[str]:
        """Return the names of the whole numbers that grew by 1 for each replica."""
        after = _counts_of(self._functions[0]) if self._counts else {}
        return [name for name, value in self._counts.items() if after.get(name) == value + len(self._contexts)]

    def updated(self, own: Callable[[], Sequence[Tensor]]) -> list[str]:
        """Return the weights from outside to which each replica has written, other than copies of a replica's own."""
        if not self._weights or len(self._versions) != len(self._contexts) + 1:
            return []
        written = [
            (name, p)
            for (name, p), *versions in zip(self._weights, *self._versions, strict=True)
            if all(first < second for first, second in pairwise(versions))
        ]
        return [name for name, p in written if not any(_are_alike(p, other) for other in own())]

    def carried(self) -> list[str]:
        """Return the names that each replica has set to a value of its own, which it or the program would read.

        What is added up over the replicas is set by each of them as well. So what is read in the function, too, must
        be as large as the replica's share of the batch in one dimension, as a hidden state is, and no sum.
        """
        if len(self._starts) != len(self._contexts) + 1 or len(self._ends) != len(self._starts):
            return []
        return [name for name in self._ends[0] if any(self._is_carried(name, s) for s in (self._ends, self._starts))]

    def _is_carried(self, name: str, states: Sequence[dict[str, Any]]) -> bool:
        values = [state.get(name) for state in states]
        if any(first is second for first, second in pairwise(values)):
            return False
        columns = [_numbers_in(value) for value in values[1:]]
        if any(column is None for column in columns) or all(_are_equal(columns[0], column) for column in columns[1:]):
            return False
        return not self._is_read(name) or all(
            any(context._num_own_examples in getattr(number, "shape", ()) for number in column or ())
            for context, column in zip(self._contexts, columns, strict=True)
        )

    def _is_read(self, name: str) -> bool:
        """Say whether a function reads what it finds by a name, as far as its code tells."""
        if name.endswith("]"):
            return True
        last = name.rpartition(".")[2]
        instructions = [i for function in self._functions for i in dis.get_instructions(function.__code__)]
        return any(i.opname.startswith("LOAD") and i.argval == last for i in instructions)

    def _found(self) -> dict[str, Any]:
        return {name: value for function in self._functions for name, value in _found_by(function).items()}


def _found_by(fn: Any) -> dict[str, Any]:
    """Return what a function finds by names of outer variables, and the members of objects and dicts among it."""
    code = fn.__code__
    found: dict[str, Any] = {"self": fn.__self__} if isinstance(fn, MethodType) else {}
    found |= {name: fn.__globals__[name] for name in code.co_names if name in fn.__globals__}
    for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # it is empty
            found[name] = cell.cell_contents
    for name, value in found.copy().items():
        if type(value) is dict:
            members = value.copy() if len(value) <= _MOST_MEMBERS else {}
            found |= {f"{name}[{key!r}]": member for key, member in members.items()}
        elif not isinstance(value, (type, ModuleType, *recorded_classes())) and not _is_of_another(value):
            found |= {f"{name}.{key}": member for key, member in dict(getattr(value, "__dict__", {})).items()}
    return found


def _is_of_another(value: Any) -> bool:
    """Say whether an object is a library's, or stands for one of each replica."""
    return mirror_of(value) is not None or is_of_library(value)


def _is_shared(module: nn.Module) -> bool:
    """Say whether a module is no scope's."""
    return owner(module) is None and mirror_of(module) is None


def _functions_from(fn: Any) -> list[Any]:
    """Return a function and those that it finds, and so on."""
    functions = [fn]
    for function in functions:
        for value in _found_by(function).values():
            is_function = isinstance(value, (FunctionType, MethodType)) and hasattr(value, "__code__")
            if is_function and value not in functions and len(functions) < _MOST_FUNCTIONS and _is_users(value):
                functions.append(value)
    return functions


def _is_users(fn: Any) -> bool:
    return str(fn.__module__).partition(".")[0] not in ("torch", "torchstrategy")


def _counts_of(fn: Any) -> dict[str, int]:
    """Return the whole numbers that a function may count up: outer variables, and members of objects and dicts."""
    found = _found_by(fn)
    for name, value in found.copy().items():
        if isinstance(value, nn.Module):
            found |= dict(_counters_of(value, name))
    return {name: int(value) for name, value in found.items() if type(value) is int or _is_count(value)}


def _counters_of(module: nn.Module, path: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers of a module from outside, such as an ``AveragedModel``, which may count its updates in one."""
    if _is_shared(module):
        yield from module.named_buffers(path, recurse=False)
        for name, child in module.named_children():
            yield from _counters_of(child, f"{path}.{name}")


def _is_count(value: Any) -> bool:
    """Say whether a value is a plain tensor of one whole number, which no replica has a copy of."""
    return type(value) is Tensor and value.numel() == 1 and value.is_cpu and value.dtype in (torch.int64, torch.int32)


def _numbers_in(value: Any) -> list[Any] | None:
    """Return the tensors and floats that a value is or has as a tuple, list or dict; ``None`` if it has others."""
    leaves = tree.all_leaves(value) if isinstance(value, (Tensor, float, tuple, list, dict)) else []
    return leaves if leaves and all(type(leaf) in (Tensor, float) for leaf in leaves) else None


def _are_equal(first: Sequence[Any] | None, second: Sequence[Any] | None) -> bool:
    if first is None or second is None or len(first) != len(second):
        return False
    return all(_are_alike(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(first, second, strict=True))


def _are_alike(first: Tensor, second: Tensor) -> bool:
    is_comparable = first.shape == second.shape and first.device == second.device and first.dtype == second.dtype
    return is_comparable and torch.equal(first.detach(), second.detach())
