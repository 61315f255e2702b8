"""Warns when a loop keeps compiling: a program that compiles in every step can be a thousand times slower, in silence.

What was traced is compared with what was compiled for the same functions before. Torch_xla keeps Python numbers that an
operation computes with (learning rates, factors) out of programs, but not those that say which elements it takes.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from torchstrategy.base import tree
from torchstrategy.base.names import dtype_name
from torchstrategy.base.values import DistributedValues
from torchstrategy.tpu.device_values import SplitValues
from torchstrategy.xla import runtime
from torchstrategy.xla.runtime import TpuRuntime

__all__ = ["Compilations"]

#: So many compilations among so many graphs are too many. A new loop needs up to five: its first step, the second (it
#: has an optimizer state), each again if some steps only accumulate, and a partial last batch.
_TOO_MANY = 6
_RECENT = 16

#: Of each leaf of the arguments: what a program is compiled for (shapes, dtypes, the kind of a number).
_Static = tuple[Any, ...]


class _Call(NamedTuple):
    """One call of ``run`` in the graph."""

    fn: Callable[..., Any]
    arguments: Any


class _Program(NamedTuple):
    """What was compiled."""

    static: tuple[_Static, ...]
    numbers: tuple[Any, ...]


class _History:
    """The latest compilations for the same functions."""

    def __init__(self) -> None:
        self.at: deque[int] = deque(maxlen=_TOO_MANY)
        self.last: _Program | None = None
        self.said: set[str] = set()


class Compilations:
    """Watches the compilations of a strategy's graphs.

    Args:
        runtime: what compiles.
    """

    def __init__(self, runtime: TpuRuntime) -> None:
        self._runtime = runtime
        self._calls: list[_Call] = []
        self._graph = -1
        self._before = 0
        self._num_graphs = 0
        self._histories: dict[tuple[Any, ...], _History] = {}

    def forget(self) -> None:
        """Begin anew: there are new modules or optimizers, and programs for them are expected."""
        self._histories.clear()

    def note(self, fn: Callable[..., Any], arguments: Any) -> None:
        """Note a call before it is traced.

        Args:
            fn: the replica function.
            arguments: its positional and its keyword arguments.
        """
        if not runtime.in_function() or self._graph != runtime.number():
            self._graph = runtime.number()
            self._calls.clear()
            self._before = self._runtime.num_compilations()
        self._calls.append(_Call(fn, arguments))

    def look(self) -> None:
        """See whether the graph that ends here was compiled, and warn if too many were lately."""
        calls, self._calls = self._calls, []
        self._num_graphs += 1
        if not calls or self._runtime.num_compilations() == self._before:
            return
        history = self._histories.setdefault(tuple(_code(call.fn) for call in calls), _History())
        leaves = [leaf for call in calls for leaf in tree.all_leaves(call.arguments)]
        program = _Program(tuple(map(_static, leaves)), tuple(map(_number, leaves)))
        last, history.last = history.last, program
        history.at.append(self._num_graphs)
        if last is None or len(history.at) < _TOO_MANY or history.at[-1] - history.at[0] >= _RECENT:
            return
        cause, text = _explain(last, program, calls)
        if cause not in history.said:
            history.said.add(cause)
            names = dict.fromkeys(f"`{_name(call.fn)}`" for call in calls)
            warnings.warn(
                f"{' and '.join(names)} {'was' if len(names) == 1 else 'were'} compiled {_TOO_MANY} times in the last "
                f"{history.at[-1] - history.at[0] + 1} steps. {text}",
                UserWarning,
                stacklevel=4,
            )


def _explain(last: _Program, program: _Program, calls: Sequence[_Call]) -> tuple[str, str]:
    """Return the kind of cause of a compilation, and what to tell."""
    if len(last.static) != len(program.static):
        return "structure", (
            f"Since the last one the arguments have changed their structure, from {len(last.static)} to "
            f"{len(program.static)} values. Pass the same structure in every step."
        )
    paths = [path for call in calls for path in _argument_paths(call)]
    changed = [i for i, pair in enumerate(zip(last.static, program.static, strict=True)) if pair[0] != pair[1]]
    if changed:
        parts = [f"{paths[i]} from {_describe(last.static[i])} to {_describe(program.static[i])}" for i in changed[:3]]
        more = f", and {len(changed) - 3} more" if len(changed) > 3 else ""
        return "shape", (
            f"Since the last one these arguments have changed: {', '.join(parts)}{more}. XLA compiles a program for "
            "each shape: drop the last batch (`drop_remainder=True` or `drop_last=True`), pad to one shape, or round "
            "lengths up to a few sizes (buckets)."
        )
    changed = [i for i, pair in enumerate(zip(last.numbers, program.numbers, strict=True)) if pair[0] != pair[1]]
    if changed:
        parts = [f"{paths[i]} from {last.numbers[i]!r} to {program.numbers[i]!r}" for i in changed[:3]]
        return "number", (
            f"Since the last one these numbers among the arguments have changed: {', '.join(parts)}. Factors and terms "
            "are no part of a program, but indices, slices, sizes and exponents are, and so is what an `if` decides. "
            "Pass tensors, such as `torch.tensor(i)`, and use `index_select`, `torch.where` and the like."
        )
    return "inside", (
        "No argument has changed, so something in the function differs from step to step: a Python number that is used "
        "as an index, slice, size, shift or exponent (`x[:, i]`, `x ** i`), the `eps` of a normalisation, a branch, or "
        "how many tensors the program holds that were not computed yet. Learning rates and factors are no cause. Pass "
        "such a number as a tensor, and keep what you collect on the host (`float(loss)`)."
    )


def _argument_paths(call: _Call) -> list[str]:
    """Return what to call each leaf of the arguments, such as ``images`` or ``batch['x']``."""
    args, kwargs = call.arguments
    try:
        bound = inspect.signature(call.fn).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        bound = {}
    names = {id(value): name for name, value in bound.items()}
    found: list[str] = []
    for key, value in (*enumerate(args), *kwargs.items()):
        name = names.get(id(value), f"argument {key}" if isinstance(key, int) else str(key))
        found.extend(f"`{name}{path}`" for path, _ in tree.leaf_paths(value))
    return found


def _static(leaf: Any) -> _Static:
    if isinstance(leaf, SplitValues):
        return tuple(_shape(leaf.stacks[group], 1) for group in leaf.group_of)
    if isinstance(leaf, DistributedValues):
        return tuple(kind for value in leaf.values for kind in _static(value))
    if isinstance(leaf, Tensor):
        return (_shape(leaf, 0),)
    if leaf is None or isinstance(leaf, (bool, str)):
        return (leaf,)
    return (type(leaf),)


def _shape(tensor: Tensor, first: int) -> tuple[tuple[int, ...], str]:
    return tuple(tensor.shape[first:]), dtype_name(tensor.dtype)


def _number(leaf: Any) -> Any:
    return leaf if isinstance(leaf, (int, float, complex)) else None


def _describe(static: _Static) -> str:
    """Return the shapes and dtypes of a leaf on the replicas, those that follow each other and are equal as one."""
    texts = [
        f"{kind[0]} {kind[1]}" if isinstance(kind, tuple) else kind.__name__ if isinstance(kind, type) else repr(kind)
        for kind in static
    ]
    runs = [(text, len(list(run))) for text, run in itertools.groupby(texts)]
    if len(runs) == 1:
        return texts[0]
    return f"[{', '.join(text if count == 1 else f'{count} times {text}' for text, count in runs)}]"


def _plain(fn: Any) -> Any:
    """Return a function without what decorators, ``functools.partial`` and objects have put around it."""
    while True:
        inner = fn.func if isinstance(fn, functools.partial) else getattr(fn, "__wrapped__", None)
        inner = getattr(fn, "__func__", None) if inner is None else inner
        if inner is None:
            return fn
        fn = inner


def _code(fn: Any) -> Any:
    """Return what functions that are made anew for each step have in common."""
    plain = _plain(fn)
    return runtime.name_of(fn) or getattr(plain, "__code__", None) or type(plain)


def _name(fn: Any) -> str:
    plain = _plain(fn)
    return runtime.name_of(fn) or getattr(plain, "__qualname__", type(plain).__name__).rpartition("<locals>.")[2]
