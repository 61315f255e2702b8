"""What is known of the parameters that an optimizer updates: their layout, how many sums there were, what to sum."""

from __future__ import annotations

import hashlib
import itertools
import operator
import sys
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchstrategy.base.devices import kind_of
from torchstrategy.collectives.summing import USES_OF_OWN_STORAGE, memory_order
from torchstrategy.gradients.ledger import GradientLedger
from torchstrategy.gradients.notes import State

__all__ = ["Look", "Plan", "Plans", "describe_layout", "look_at"]

#: So often, between two comparisons that are due anyway, parameters are compared because some ranks wrote to them and
#: others did not.
_NUM_UNLIKE = 20
_Key = tuple[tuple[int, ...], tuple[Any, ...]]
#: Shape, dtype and strides of each parameter, no strides where there is a gap or an overlap in its memory: read faster
#: than a layout, and says no less.
_Form = list[tuple[torch.Size, torch.dtype, tuple[int, ...] | None]]


class Plan:
    """One optimizer's list of parameters, in one layout.

    Args:
        number: counts the lists in the order of their first sums, which is the same on all ranks.
        layout: shape, dtype and memory format of each parameter.
        parameters: the first local replica's.
    """

    def __init__(self, number: int, layout: tuple[Any, ...], parameters: Sequence[Tensor]) -> None:
        self.number = number
        self.digest = hashlib.sha256(repr(layout).encode()).hexdigest()[:16]
        self.num_sums = 0
        self._writes: list[int] = []
        self._num_unlike = 0
        #: Weak ones to the parameters.
        self.references = [weakref.ref(parameter) for parameter in parameters]
        #: What a change of the layout shows in.
        self.form = _form_of(parameters)

    def is_of(self, parameters: Sequence[Tensor]) -> bool:
        """Say whether these are the parameters."""
        own = [reference() for reference in self.references]
        return len(own) == len(parameters) and all(map(operator.is_, own, parameters))

    def is_due(self, writes: Sequence[int], check_every: int) -> bool:
        """Say whether the ranks' parameters are to be compared before this sum; the same on all ranks.

        They are where some ranks wrote to theirs more often since the last sum than others, such as one that alone
        loads a checkpoint. Where that is so again and again without a difference, ranks make their steps differently.

        Args:
            writes: by rank, how often the parameters were written to.
            check_every: number of sums between two comparisons, in any case.
        """
        writes = [number - writes[0] for number in writes]
        is_unlike, self._writes = writes != self._writes, writes
        if self.num_sums < 2 or (self.num_sums + 1) % check_every == 0:
            self._num_unlike = 0
            return True
        self._num_unlike += is_unlike
        return is_unlike and self._num_unlike <= _NUM_UNLIKE

    def is_alive(self) -> bool:
        """Say whether the program still has all parameters."""
        return all(reference() is not None for reference in self.references)


class Plans:
    """The plans of all lists of parameters whose gradients were summed."""

    def __init__(self) -> None:
        self._plans: dict[_Key, Plan] = {}
        #: The one that was asked for last, by the id of its first parameter.
        self._last: dict[int, Plan] = {}
        self._num_plans = 0

    def last_of(self, parameters: Sequence[Tensor]) -> Plan | None:
        """Return the plan that a list of parameters had when last asked for, whatever has become of their layout."""
        plan = self._last.get(id(parameters[0]))
        return plan if plan is not None and plan.is_of(parameters) else None

    def of(self, parameters: Sequence[Tensor]) -> Plan:
        """Return the plan of a list of parameters, another one where a shape, dtype or memory format has changed."""
        layout = tuple((tuple(p.shape), str(p.dtype), memory_order(p)) for p in parameters)
        key = (tuple(map(id, parameters)), layout)
        plan = self._plans.get(key)
        if plan is None or not plan.is_of(parameters):
            self._plans = {key: plan for key, plan in self._plans.items() if plan.is_alive()}
            self._last = {first: plan for first, plan in self._last.items() if plan.is_alive()}
            self._num_plans += 1
            plan = self._plans[key] = Plan(self._num_plans, layout, parameters)
        else:
            plan.form = _form_of(parameters)  # of the same layout: axes of size 1 may have other strides
        self._last[id(parameters[0])] = plan
        return plan


def _form_of(parameters: Sequence[Tensor]) -> _Form:
    return [(p.shape, p.dtype, p.stride() if _is_without_gaps(p) else None) for p in parameters]


def _is_without_gaps(parameter: Tensor) -> bool:
    if parameter.layout is not torch.strided:
        return False
    return parameter.is_contiguous() or memory_order(parameter) is not None


class Look(NamedTuple):
    """What gradients one replica has when they are to be summed.

    Args:
        fits: whether the parameters are surely laid out as their plan has it.
        gradients: of each parameter, if there is one.
        dense: a mask of the dense ones, the first parameter's bit the lowest.
        sparse: a mask of the sparse ones.
        are_as_made: whether all dense ones are as their backward passes have left them.
        may_overwrite: for each parameter, whether the sum may be written to its gradient's memory: ``backward`` has
            left it so, it is laid out as the parameter is, and neither the program nor a graph nor another tensor uses
            it, as do views that autograd gives to several parameters. Where it is missing or sparse, whether a new
            dense one is laid out as the parameter is.
    """

    fits: bool
    gradients: list[Tensor | None]
    dense: int
    sparse: int
    are_as_made: bool
    may_overwrite: list[bool]

    @property
    def are_all_dense(self) -> bool:
        """Whether each parameter has a dense gradient."""
        return self.dense == (1 << len(self.gradients)) - 1


def look_at(parameters: Sequence[Tensor], plan: Plan | None, ledger: GradientLedger) -> Look:
    """Look at all that a replica brings to a sum, in one pass: each one costs a step as much as the sum itself.

    Args:
        parameters: an optimizer's.
        plan: theirs, or that of the first local replica's.
        ledger: knows their gradients.
    """
    local, count_holders, count_uses = State.LOCAL, sys.getrefcount, torch._C._storage_Use_Count
    gradients: list[Tensor | None] = []
    may_overwrite: list[bool] = []
    missing: list[int] = []
    sparse: list[int] = []
    fits = are_as_made = True
    form = [(None, None, None)] * len(parameters) if plan is None else plan.form
    for parameter, (shape, dtype, stride), note in zip(parameters, form, ledger.notes_of(parameters), strict=True):
        grad = parameter.grad
        if parameter.shape != shape or parameter.dtype is not dtype or stride is None or parameter.stride() != stride:
            fits, stride = False, None
        if grad is None or grad.is_sparse:
            (missing if grad is None else sparse).append(len(gradients))
            may_overwrite.append(stride is not None)
        elif note is not None and note.state is local and note.gradient() is grad and note.version == grad._version:
            is_own = False
            if (
                count_holders(grad) <= _HOLDERS_OF_OWN
                and grad._use_count() <= _USES_OF_OWN  # type: ignore[attr-defined]
                and not grad.requires_grad
                and grad.layout is torch.strided
                and grad.stride() == stride
                and (grad.is_cpu or kind_of(grad.device).has_storages)
            ):
                storage = grad.untyped_storage()
                is_own = (
                    count_uses(storage._cdata) <= USES_OF_OWN_STORAGE
                    and storage.resizable()  # not of NumPy or another library
                    and not (grad.is_neg() or grad.is_conj())
                )
            may_overwrite.append(is_own)
        else:
            are_as_made = False
            may_overwrite.append(False)
        gradients.append(grad)
    if len(set(map(id, gradients))) < len(gradients) - max(len(missing) - 1, 0):  # of a parameter that is there twice
        uses = Counter(map(id, gradients))
        may_overwrite = [may and uses[id(grad)] == 1 for may, grad in zip(may_overwrite, gradients, strict=True)]
    sparse_mask = sum([1 << k for k in sparse])
    dense_mask = (1 << len(gradients)) - 1 & ~(sparse_mask | sum([1 << k for k in missing]))
    return Look(fits, gradients, dense_mask, sparse_mask, are_as_made, may_overwrite)


def _count_own() -> None:
    """Find out how often ``look_at`` sees a gradient in use that nothing else holds: Python's versions count apart."""
    global _HOLDERS_OF_OWN, _USES_OF_OWN
    with torch.inference_mode(mode=False):
        ledger, parameter = GradientLedger(1), torch.nn.Parameter(torch.zeros(1, device="cpu"))
        ledger.watch(parameter, 0)
        parameter.grad = torch.zeros(1, device="cpu")
        (note,) = ledger.notes_of([parameter])
        if note is not None:
            note.set(State.LOCAL, parameter.grad, 0)
        plan = Plans().of([parameter])
        for holders, uses in itertools.product(range(_MOST_USES), repeat=2):
            _HOLDERS_OF_OWN, _USES_OF_OWN = holders, uses
            if look_at([parameter], plan, ledger).may_overwrite[0]:
                return
    _HOLDERS_OF_OWN = _USES_OF_OWN = 0  # so that nothing is written to


_MOST_USES = 8
#: How often a gradient is in use that only its parameter has, in Python and in torch.
_HOLDERS_OF_OWN = _USES_OF_OWN = 0


def describe_layout(parameters: Sequence[Tensor]) -> list[list[Any]]:
    """Return shapes, dtypes and memory formats for an error message."""
    return [[list(p.shape), str(p.dtype), *_format_name(p)] for p in parameters]


def _format_name(parameter: Tensor) -> list[str]:
    order = memory_order(parameter)
    return [] if order is None else [f"axes {list(order)} in memory"]


_count_own()
