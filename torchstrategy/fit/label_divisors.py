"""The divisors of losses that labels or weights say, summed over the replicas and batches of an optimizer step.

Other losses are divided by the number of examples, which batches carry: see ``base/values.py``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchstrategy.base.devices import kind_of, tensor_device
from torchstrategy.base.options import ReduceOp
from torchstrategy.fit.batch_parts import unpack_x_y_sample_weight
from torchstrategy.fit.loss_parts import LossPart
from torchstrategy.fit.outputs import is_several
from torchstrategy.fit.steps import current_step
from torchstrategy.metrics.metric import sum_dtype
from torchstrategy.strategies.default import get_replica_context

__all__ = ["LabelDivisors", "entry_of", "sum_over_replicas"]

#: An output's key (``None`` for one output), loss, labels and weights.
_Row = tuple[Any, LossPart | None, Any, Any]


class LabelDivisors:
    """What losses with class weights, ignored labels or ``reduction="mean_with_sample_weight"`` are divided by.

    A vector of them has one number for each of these losses, in the order of the outputs' keys. Of the replicas of a
    process each asks for its own, and all share this object.

    Args:
        parts: the loss of the output, or of each output in a list or dict.
    """

    def __init__(self, parts: Any) -> None:
        self._parts = parts
        #: What ``using`` gave, by replica.
        self._given: dict[int, Tensor | Callable[[], Tensor]] = {}
        #: What the labels of the first batch of a step of several add, by replica.
        self._first: dict[int, Tensor] = {}
        #: Outputs all of whose labels are known to count alike.
        self._counted: frozenset[Any] = frozenset()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {
            "_given": {},
            "_first": {},
            "_counted": frozenset(),
        }  # which hold for what runs here now

    def local(self, y: Any, sample_weight: Any = None) -> Tensor | None:
        """Return what a replica's batch adds to the divisors; ``None`` if there are none.

        Args:
            y: labels, as for a call of the loss.
            sample_weight: weights, as for a call of the loss.
        """
        rows = self._with_divisor(self._rows(y, sample_weight))
        divisors = [part.divisor(label, weight).to(sum_dtype()) for _, _, part, label, weight in rows]
        return torch.stack(divisors) if divisors else None

    def of_windows(self, windows: Iterable[Sequence[Any]], strategy: Any) -> list[Tensor | None]:
        """Return the divisors of each optimizer step over the replicas of this process. Cross-replica context.

        Where these are all there are, adding up here saves them a meeting in each step.

        Args:
            windows: the batches of each step.
            strategy: whose replicas they are for.
        """
        device = strategy.placement.devices[0]
        if kind_of(device).is_traced:
            device = torch.device("cpu")  # each operation would be a program there
        sums: list[Tensor | None] = []
        for window in windows:
            parts = self._of_batches(share for batch in window for share in strategy.experimental_local_results(batch))
            sums.append(torch.stack([part.to(tensor_device(device)) for part in parts]).sum(0) if parts else None)
        return sums

    @contextlib.contextmanager
    def over_replicas(self, batches: Sequence[Any]) -> Iterator[None]:
        """Let the losses of an optimizer step be divided by what all replicas have. Replica context.

        Args:
            batches: this replica's, of the step.
        """
        parts = self._of_batches(batches)
        local = torch.stack(parts).sum(0) if len(parts) > 1 else next(iter(parts), None)
        if len(parts) > 1:
            self._first[_replica_id()] = parts[0]
        try:
            with self.using(sum_over_replicas(local)):
                yield
        finally:
            self._first.pop(_replica_id(), None)

    @contextlib.contextmanager
    def using(self, divisors: Tensor | Callable[[], Tensor] | None) -> Iterator[None]:
        """Give this replica's calls of the loss the divisors, so that they need not communicate.

        Args:
            divisors: the sum of ``local`` over replicas, and over the batches of one optimizer step; or what waits
                for it.
        """
        if divisors is None:
            yield
            return
        key = _replica_id()
        self._given[key] = divisors
        try:
            yield
        finally:
            del self._given[key]

    @contextlib.contextmanager
    def knowing(self, y: Any) -> Iterator[None]:
        """Look at all labels of the data to come, to save a sum over replicas in each step.

        Losses that can ignore labels, as torch's cross-entropy can by default, need no divisor of their own as long as
        no label is ignored. Cross-replica context; all processes must have the same labels.

        Args:
            y: all labels, of the structure that a call takes; ``None`` if they are not known, as those of a loader.
        """
        before, self._counted = self._counted, frozenset()
        rows = [] if y is None else self._with_divisor(self._rows(y, None))
        self._counted = frozenset(key for _, key, part, label, _ in rows if part.counts_all(label))
        try:
            yield
        finally:
            self._counted = before

    def find(self, outputs: Sequence[_Row], *, alone: bool) -> list[Tensor | None]:
        """Return each output's divisor over all replicas; ``None`` where it is the number of examples.

        Replica context. Unless ``using`` has given the divisors, all replicas must call this.

        Args:
            outputs: their losses, labels and weights.
            alone: whether this replica's batch is a batch of its own, whatever others have.

        Raises:
            ValueError: in one of several batches of a step, the labels are not those of the data, by which all of them
                were counted.
        """
        found: list[Tensor | None] = [None] * len(outputs)
        rows = self._with_divisor(outputs)
        if not rows:
            return found
        given = self._given.get(_replica_id())
        if not alone:
            self._check_counted(rows, given)
        if given is None:
            own: Sequence[Tensor] = [part.divisor(label, weight) for _, _, part, label, weight in rows]
            context = get_replica_context()
            if not (alone or context is None or context.num_replicas_in_sync == 1):
                own = context.all_reduce("sum", torch.stack([divisor.to(sum_dtype()) for divisor in own])).unbind()
        else:
            if not isinstance(given, Tensor):
                given = self._given[_replica_id()] = given()
            own = given.unbind()
        for (place, *_), divisor in zip(rows, own, strict=True):
            found[place] = divisor
        return found

    def _check_counted(self, rows: Sequence[tuple[int, Any, LossPart, Any, Any]], given: Any) -> None:
        """Check in a first batch, where looking costs nothing that matters, that its labels are those of the data."""
        context, first = get_replica_context(), self._first.get(_replica_id())
        shares = None if context is None else context.batch_shares
        if shares is None or shares.num_parts == 1 or not current_step().is_checked:
            return
        if given is not None and (first is None or kind_of(first.device).is_traced):
            return
        own = torch.stack([part.divisor(label, weight).to(sum_dtype()) for _, _, part, label, weight in rows])
        if (
            given is None
            or first is None
            or first.shape != own.shape
            or not torch.allclose(own.to(first.device), first)
        ):
            raise ValueError(
                f"The loss divides by what labels and weights count, and those of a step of your own are not those of "
                f"the data. In one of {shares.num_parts} batches of one optimizer step (gradient_accumulation_steps, "
                "ElasticTraining) nobody knows what the others count. Change labels and weights in the dataset, or "
                'give a loss of examples to ts.nn.compute_average_loss(..., global_batch_size="actual").'
            )

    def _of_batches(self, batches: Iterable[Any]) -> list[Tensor]:
        data = map(unpack_x_y_sample_weight, batches)
        parts = [self.local(y, weight) for _, y, weight in data if y is not None]
        return [part for part in parts if part is not None]

    def _with_divisor(self, rows: Iterable[_Row]) -> list[tuple[int, Any, LossPart, Any, Any]]:
        """Return the place, key, loss, labels and weights of what has a divisor, in the order of every vector."""
        found = [
            (place, key, part, label, weight)
            for place, (key, part, label, weight) in enumerate(rows)
            if part is not None and part.has_divisor(label, weight) and key not in self._counted
        ]
        return sorted(found, key=lambda row: str(row[1])) if len(found) > 1 else found

    def _rows(self, y: Any, sample_weight: Any) -> Iterator[_Row]:
        """Yield the outputs that have labels, before there are outputs."""
        keys: list[Any] = list(y) if isinstance(y, Mapping) else list(range(len(y))) if is_several(y) else [None]
        for key in keys:
            part, weight = self._parts, sample_weight
            if is_several(part):
                one = next(iter(part), None) if isinstance(part, Mapping) else 0
                part = entry_of(part, one if key is None or (len(part) == 1 and len(keys) == 1) else key)
            weight = entry_of(weight, key) if is_several(weight) else weight
            label = y if key is None else y[key]
            if label is not None:
                yield None if len(keys) == 1 else key, part, label, weight


def entry_of(values: Any, place: Any) -> Any:
    """Return the entry of a list or dict, or ``None``: what does not fit the outputs is refused when they are there."""
    if isinstance(values, Mapping):
        return values.get(place)
    return values[place] if isinstance(place, int) and 0 <= place < len(values) else None


def sum_over_replicas(local: Tensor | None) -> Tensor | Callable[[], Tensor] | None:
    """Return the sum of one replica's divisors and the others', or what waits for it. Replica context."""
    context: Any = get_replica_context()
    if local is None or context.num_replicas_in_sync == 1:
        return local
    strategy = context.strategy
    if strategy.workers is None or strategy.placement.num_local > 1 or not local.is_cpu:
        return torch.as_tensor(context.all_reduce(ReduceOp.SUM, local))
    # The others' numbers are there when the forward pass is done, so nobody waits for them.
    finish = strategy.workers.start_sum_of_numbers("the sum of what losses are divided by", local.tolist())
    return lambda: torch.tensor(finish(), dtype=local.dtype, device="cpu")


def _replica_id() -> int:
    context = get_replica_context()
    return -1 if context is None else context._replica_id
