"""An optimizer's state of one parameter: how it travels and is cut; and by trial, whether it may be cut at all.

Reading a class can't tell, and lists of names would miss what users write themselves. A trial is three steps of a few
numbers, once for each group of parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchstrategy.checkpoint.storage import new_tensor
from torchstrategy.errors import InvalidArgumentError, UnimplementedError
from torchstrategy.ps.layout import VariableSpec

__all__ = ["JoinedState", "accepts_gradients", "cut_state", "pack_state", "refuse_coupling", "unpack_state"]

MakeOptimizer = Callable[[list[Tensor], bool], Optimizer]  # of parameters, and whether their gradients are sparse

_Piece = tuple[int, slice]  # of a variable, the rows
_ALL = slice(None)
_TOGETHER: Sequence[Sequence[_Piece]] = [[(0, _ALL), (1, _ALL)]]  # the pieces of each optimizer
_APART: Sequence[Sequence[_Piece]] = [[(0, _ALL)], [(1, _ALL)]]
_CUT: Sequence[Sequence[_Piece]] = [[(0, slice(0, 2)), (1, slice(0, 1))], [(0, slice(2, 4)), (1, slice(1, 4))]]
_NUM_STEPS = 3


def refuse_coupling(name: str, make: MakeOptimizer, *, is_sharded: bool) -> None:
    """Check that an optimizer gives the same numbers when its variables are on several servers.

    Args:
        name: the optimizer's, for the message.
        make: makes one over other parameters, with hyper-parameters of its own as they are.
        is_sharded: whether some of its variables are cut into parts.

    Raises:
        UnimplementedError: the update of a variable needs another one, that of a row needs other rows although
            variables are cut, or no step can be made at all.
    """
    is_sparse = not accepts_gradients(make, is_sparse=False)
    try:
        together = _train(make, _TOGETHER, is_sparse=is_sparse)
    except Exception as error:
        raise UnimplementedError(f"{name}, as it is set, can't make a step on a parameter server: {error}") from error
    if not _equal(together, _train(make, _APART, is_sparse=is_sparse)):
        raise UnimplementedError(
            f"{name} updates one parameter by what it knows of others (or by chance), which may be on other parameter "
            "servers. Use an optimizer that treats each parameter for itself."
        )
    if is_sharded and not _equal(together, _train(make, _CUT, is_sparse=is_sparse)):
        raise UnimplementedError(
            f"{name} updates a row of a parameter by what it knows of other rows, such as the norm of them all, but "
            "its variables are cut into parts, which live apart. Use no variable_partitioner, or an optimizer that "
            "treats each element for itself, such as AdamW."
        )


def accepts_gradients(make: MakeOptimizer, *, is_sparse: bool) -> bool:
    """Say whether an optimizer takes dense or sparse gradients."""
    try:
        _train(make, _APART, is_sparse=is_sparse)
    except Exception:  # noqa: BLE001 - whatever a step says when it can't be made
        return False
    return True


def _train(make: MakeOptimizer, layout: Sequence[Sequence[_Piece]], *, is_sparse: bool) -> list[Tensor]:
    """Return two variables after a few steps, each optimizer of the layout stepping its own pieces of them."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2, 4, 3, generator=generator, dtype=torch.float64)
    gradients = torch.randn(_NUM_STEPS, 2, 4, 3, generator=generator, dtype=torch.float64)
    gradients[:, :, 1] = 0  # a row that sparse gradients don't have
    pieces = [[torch.nn.Parameter(values[v, rows].clone()) for v, rows in own] for own in layout]
    with torch.random.fork_rng(devices=[]):
        for own, parameters in zip(layout, pieces, strict=True):
            optimizer = make(list(parameters), is_sparse)
            for step in gradients:
                for (variable, rows), parameter in zip(own, parameters, strict=True):
                    gradient = step[variable, rows].clone()
                    parameter.grad = gradient.to_sparse(1) if is_sparse else gradient
                optimizer.step()
    trained: list[list[Tensor]] = [[], []]
    for own, parameters in zip(layout, pieces, strict=True):
        for (variable, _), parameter in zip(own, parameters, strict=True):
            trained[variable].append(parameter.detach())
    return [torch.cat(parts) for parts in trained]


def _equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-9, atol=1e-9) for a, b in zip(first, second, strict=True))


class JoinedState:
    """The state of a whole variable, put together part by part; large tensors may be in files, see ``new_tensor``.

    Args:
        spec: the variable.
    """

    def __init__(self, spec: VariableSpec) -> None:
        self.state: dict[str, Any] = {}
        self._spec = spec

    def add(self, index: int, state: Mapping[str, Any]) -> None:
        """Add the state of one part; one that has made no step has none, which stands for zeros."""
        shape = self._spec.part_shape(index)
        for name, value in state.items():
            has_rows = isinstance(value, Tensor) and value.dim() > 0 and value.shape[:1] == shape[:1]
            if not has_rows:
                self.state.setdefault(name, value)
                continue
            if name not in self.state:
                self.state[name] = new_tensor((self._spec.shape[0], *value.shape[1:]), value.dtype)
            self._spec.cut(self.state[name], index).copy_(value)


def cut_state(spec: VariableSpec, state: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return what one part needs of the state of a whole variable.

    Raises:
        InvalidArgumentError: the variable has several parts and a tensor does not have a row for each of its rows.
    """
    if not spec.is_sharded:
        return dict(state)
    cut = {}
    for name, value in state.items():
        has_rows = isinstance(value, Tensor) and value.dim() > 0
        if has_rows and len(value) != spec.shape[0]:
            raise InvalidArgumentError(
                f"The state {name!r} of variable {spec.name!r} has {len(value)} rows instead of {spec.shape[0]}, so it "
                f"can't be cut into {len(spec.parts)} parts."
            )
        cut[name] = spec.cut(value, index) if has_rows else value
    return cut


def pack_state(state: Mapping[str, Any], tensors: list[Tensor]) -> dict[str, Any]:
    """Return the state of one parameter as JSON can hold it; tensors are added to ``tensors``.

    Raises:
        TypeError: a value is no tensor, number, text, bool or ``None``.
    """
    packed: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            packed[name] = {"tensor": len(tensors)}
            tensors.append(value)
        elif value is None or isinstance(value, (bool, int, float, str)):
            packed[name] = {"value": value}
        else:
            raise TypeError(
                f"The state {name!r} of an optimizer is a {type(value).__name__}; only tensors, numbers, texts, bools "
                "and None can be moved between a program and its parameter servers."
            )
    return packed


def unpack_state(packed: Mapping[str, Any], tensors: Sequence[Tensor]) -> dict[str, Any]:
    """Return what ``pack_state`` was given.

    Raises:
        ValueError: it is something else.
    """
    try:
        return {
            name: tensors[value["tensor"]] if "tensor" in value else value["value"] for name, value in packed.items()
        }
    except (AttributeError, TypeError, KeyError, IndexError) as error:
        raise ValueError(f"This is no state of an optimizer: {packed!r:.200} ({error})") from error
