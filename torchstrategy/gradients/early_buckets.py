"""Buckets of gradients that are summed during ``backward``: which gradients they hold, and whether these have changed.

A changed gradient is noticed: each backward pass has another number, each change in place gives another version, and a
change through ``p.grad.data``, which has no version, other sums of its elements, each times a fixed random number.
Unlike plain sums these change with a gradient whose elements add up to 0, too, when it is scaled, clamped or negated.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchstrategy.base.devices import kind_of
from torchstrategy.collectives.summing import plan_buckets
from torchstrategy.gradients.dense import Bucket
from torchstrategy.gradients.ledger import GradientLedger
from torchstrategy.gradients.plan import Plan

__all__ = ["EarlyBucket", "EarlyPlan", "OpenBuckets"]

#: A parameter that had no gradient in so many steps leaves its bucket.
_MAX_IDLE = 8
#: After so many steps in a row in which a gradient had changed, they are sums at ``step`` for a while: twice as long
#: each time, up to this number of steps.
_MAX_PAUSE = 256
#: Accelerators compare sums of elements in so many first steps, and then in every so-and-so-many-th one only, because
#: reading them waits for the device.
_NUM_COMPARED = 3
_COMPARED_EVERY = 100
#: So many elements are added up to one number; so many of 16 bits are copied to 32 at a time.
_ROW_NUMBERS = 4 << 10
_PART_NUMBERS = 256 << 10


class EarlyPlan:
    """What a plan of parameters has for sums that begin early.

    It is equal on all ranks but for ``references``, ``expected``, ``is_edited`` and, until there have been buckets,
    ``can_travel``.

    Args:
        plan: of the list of parameters.
        parameters: the list.
        device_types: those whose gradients can be summed early.
        ledger: what the gradients are.
    """

    def __init__(
        self, plan: Plan, parameters: Sequence[Tensor], device_types: Collection[str], ledger: GradientLedger
    ) -> None:
        self.number = plan.number
        self.ledger = ledger
        self.references = plan.references
        #: Shapes, dtypes and devices, also if a rank has dropped the parameters already.
        self.like = [torch.empty_like(parameter.detach(), device="meta") for parameter in parameters]
        self.devices = [parameter.device for parameter in parameters]
        one_of_each = {device.type: device for device in self.devices}
        #: For each parameter, whether its gradient can be summed early.
        self.can_travel = [
            d.type in device_types and d == one_of_each[d.type] and like.numel() > 0
            for d, like in zip(self.devices, self.like, strict=True)
        ]
        self.following: EarlyPlan | None = None
        self.num_sums = 0
        self.idle = [_MAX_IDLE] * len(parameters)  # for each parameter, how many sums ago it had a gradient
        self.buckets: list[list[int]] = []
        self.bucket_of: dict[int, int] = {}  # by id of the parameter
        self.num_failures = 0
        self.pause = 0
        self.num_opened = 0
        #: For each parameter, how many backward passes reached it before the last sum.
        self.expected = [0] * len(parameters)
        #: Whether this rank has changed a gradient past torch's version counter.
        self.is_edited = False

    def note_sum(self, summed: Sequence[int]) -> bool:
        """Take notice of which gradients were there; say whether other buckets are needed, alike on all ranks."""
        self.num_sums += 1
        self.idle = [count + 1 for count in self.idle]
        for k in summed:
            self.idle[k] = 0
        if self.num_sums <= 2:  # `can_travel` may differ between ranks: they find out when they plan the first buckets
            return self.num_sums == 2
        travelling = {k for bucket in self.buckets for k in bucket}
        has_new = any(self.can_travel[k] and k not in travelling for k in summed)
        return has_new or any(self.idle[k] == _MAX_IDLE for k in travelling)

    def travelling_types(self) -> list[str]:
        """Return for each parameter the type of its device; empty if its gradient can't be summed early."""
        return [d.type if can else "" for d, can in zip(self.devices, self.can_travel, strict=True)]

    def plan_buckets(self, order: Sequence[int], bucket_bytes: int) -> None:
        """Divide the gradients that travel over buckets.

        Args:
            order: the positions of all parameters in the order in which their gradients are complete.
            bucket_bytes: size in bytes at which a bucket is closed, if it is below those of the kind of device.
        """
        types = self.travelling_types()
        used = [k for k in order if types[k] and self.idle[k] < _MAX_IDLE]
        self.buckets = []
        for device_type in sorted({types[k] for k in used}):
            indices = [k for k in used if types[k] == device_type]
            first, rest = (min(bucket_bytes, size) for size in kind_of(device_type).early_bytes)
            buckets = plan_buckets([self.like[k] for k in indices], rest, first)
            self.buckets += [[indices[i] for i in bucket] for bucket in buckets]
        place = {k: i for i, k in enumerate(used)}
        self.buckets.sort(key=lambda bucket: place[bucket[-1]])  # those of another dtype may be complete sooner
        numbers = {k: number for number, bucket in enumerate(self.buckets) for k in bucket}
        self.bucket_of = {id(self.references[k]()): number for k, number in numbers.items()}

    def open_buckets(self, passes: Mapping[int, int]) -> list[EarlyBucket]:
        """Return the buckets of the next sum, which wait for the backward passes that are still to come.

        Args:
            passes: how many have reached each parameter since its last sum, by the parameter's id.
        """
        missing = [
            expected - passes.get(id(reference()), 0)
            for expected, reference in zip(self.expected, self.references, strict=True)
        ]
        number = self.num_opened + 1
        compares_now = number <= _NUM_COMPARED or number % _COMPARED_EVERY == 0
        return [
            EarlyBucket(
                self,
                indices,
                sum(missing[k] for k in indices),
                compares=compares_now or _always_compares(self, indices),
            )
            for indices in self.buckets
        ]

    def note_outcome(self, *, is_good: bool) -> None:
        """Take notice of whether the sums that were started early could be taken."""
        self.num_failures = 0 if is_good else self.num_failures + 1
        self.pause = 0 if is_good else min(1 << self.num_failures - 1, _MAX_PAUSE) - 1


class EarlyBucket(Bucket):
    """Gradients that travel together, perhaps before the last one is there.

    Args:
        plan: of the list of parameters.
        indices: the parameters' positions in the list.
        missing: backward passes that are still to come.
        compares: whether sums of elements show what has been changed past the version counter.
    """

    def __init__(self, plan: EarlyPlan, indices: list[int], missing: int, *, compares: bool) -> None:
        super().__init__(indices, [plan.like[k] for k in indices])
        self.missing = missing
        self._plan = plan
        self._compares = compares
        #: Which backward pass had left each gradient when it was copied.
        self._passes: list[int | None] = []
        #: What ``_totals`` returned for them.
        self._sums_of_elements: Tensor | None = None

    def fill_with_own(self) -> bool:
        """Copy the gradients and remember what they were; ``False`` if anything but ``backward`` made one."""
        found = self._own_gradients()
        if found is None:
            return False
        grads, self._passes = found
        if self._compares:
            self._sums_of_elements = _totals(grads)
        self._fill(grads)
        return True

    def fill_with_any(self) -> None:
        """Copy the gradients, for ranks that have started their sum; zeros stand for those that don't fit."""
        grads = []
        for k in self.indices:
            parameter = self._plan.references[k]()
            grad = None if parameter is None else parameter.grad
            grads.append(grad if grad is not None and self._fits(k, grad) else None)
        self._fill(grads)

    def is_good(self) -> bool:
        """Say whether the gradients are still what was copied or, if they were not, whether they can be."""
        return self._can_be_copied() if self.flat is None else self._is_fresh()

    def _own_gradients(self) -> tuple[list[Tensor | None], list[int | None]] | None:
        """Return the gradients and their backward passes; ``None`` if one is not as ``backward`` left it, or odd."""
        grads: list[Tensor | None] = []
        passes: list[int | None] = []
        for k in self.indices:
            parameter = self._plan.references[k]()
            if parameter is None:
                return None
            grad, last = parameter.grad, None
            if grad is not None:
                last = self._plan.ledger.own_pass(parameter)
                if last is None or not self._fits(k, grad):
                    return None
            grads.append(grad)
            passes.append(last)
        return grads, passes

    def _can_be_copied(self) -> bool:
        for k in self.indices:
            parameter = self._plan.references[k]()
            if parameter is None or self._plan.ledger.is_sum(parameter):
                return False
            if parameter.grad is not None and not self._fits(k, parameter.grad):
                return False
        return True

    def _is_fresh(self) -> bool:
        found = None if self._plan.is_edited else self._own_gradients()
        if found is None:
            return False
        grads, passes = found
        if passes != self._passes:
            return False
        if self._sums_of_elements is None or _equal(self._sums_of_elements, _totals(grads)):
            return True
        self._plan.is_edited = not _always_compares(self._plan, self.indices)
        return False

    def _fits(self, k: int, grad: Tensor) -> bool:
        like, device = self._plan.like[k], self._plan.devices[k]
        is_dense = grad.layout is torch.strided
        return is_dense and grad.dtype is like.dtype and grad.device == device and grad.shape == like.shape

    def _fill(self, grads: Sequence[Tensor | None]) -> None:
        device = self._plan.devices[self.indices[0]]
        with torch.no_grad():
            self.fill(
                [
                    torch.zeros(like.shape, dtype=like.dtype, device=device) if grad is None else grad
                    for grad, like in zip(grads, self.like, strict=True)
                ]
            )


@dataclass
class OpenBuckets:
    """The buckets of the optimizer that is expected to step next."""

    number: int
    plan: EarlyPlan
    buckets: list[EarlyBucket]
    num_started: int = 0
    is_halted: bool = False


def _always_compares(plan: EarlyPlan, indices: Sequence[int]) -> bool:
    """Say whether sums of elements show every change that has no version: reading them costs an accelerator a wait."""
    return plan.devices[indices[0]].type == "cpu"


def _totals(grads: Sequence[Tensor | None]) -> Tensor:
    """Return numbers that change with the elements of gradients of one dtype and device: sums of weighted elements."""
    sums: list[Tensor] = []
    for grad in grads:
        if grad is None:
            continue
        with torch.autocast(grad.device.type, enabled=False):  # `backward` may be inside of one, and `step` outside
            for part in torch.split(_in_one_dimension(grad.detach()), _PART_NUMBERS):
                wide = part.float() if part.dtype in (torch.float16, torch.bfloat16) else part
                weights = _weights(wide.dtype, wide.device)
                length = wide.numel() - wide.numel() % _ROW_NUMBERS
                if length:  # a product of a matrix and a vector reads the elements once and writes next to nothing
                    sums.append(torch.mv(wide[:length].view(-1, _ROW_NUMBERS), weights))
                if length < wide.numel():
                    rest = wide[length:]
                    sums.append(torch.dot(rest, weights[: rest.numel()]).view(1))
    return torch.cat(sums) if sums else torch.zeros(1)


def _in_one_dimension(grad: Tensor) -> Tensor:
    """Return the elements in the order in which they are in memory, if possible as a view."""
    numbers = torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad
    if numbers.is_contiguous():
        return numbers.view(-1)
    return numbers.permute(sorted(range(numbers.dim()), key=numbers.stride, reverse=True)).reshape(-1)


@functools.cache
def _weights(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return fixed numbers between 1 and 2, random ones so that elements in some pattern do not cancel out."""
    own = torch.Generator("cpu").manual_seed(0)
    return (1 + torch.rand(_ROW_NUMBERS, generator=own, dtype=torch.float64, device="cpu")).to(dtype).to(device)


def _equal(first: Tensor, second: Tensor) -> bool:
    """Compare sums of elements; those that are no number count as equal."""
    if first.shape != second.shape:
        return False
    return torch.equal(first, second) or bool((first == second).logical_or(first.isnan() & second.isnan()).all())
