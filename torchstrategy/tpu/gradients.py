"""The sum of gradients where one program computes all replicas, and the mean of buffers that goes with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchstrategy.base.log import info_once
from torchstrategy.gradients.notes import State
from torchstrategy.gradients.summer import doubt, optimizer_parameters
from torchstrategy.replicas.runner import MergeRequest
from torchstrategy.tpu.protocols import AnyHosting
from torchstrategy.tpu.traced_context import SpmdReplicaContext

__all__ = ["SpmdGradients"]


class _Part(NamedTuple):
    """What one group brings: its gradients (``None`` where there is none or it is summed already) and buffers.

    ``changed`` has the keys of those buffers that differ between the group's replicas.
    """

    gradients: list[Tensor | None]
    buffers: dict[int, Tensor]
    changed: set[int]


class SpmdGradients:
    """Sums gradients over replicas in the graph that is traced.

    Args:
        hosting: where the replicas run.
    """

    def __init__(self, hosting: AnyHosting) -> None:
        self._hosting = hosting

    def sum_for(self, context: SpmdReplicaContext, optimizer: Optimizer, *, is_fresh: bool, uses_applied: bool) -> None:
        """Replace a group's gradients by their sum over replicas; every group calls it.

        Raises:
            RuntimeError: a gradient can't be summed, or some groups have summed one that others have not.
        """
        parameters = optimizer_parameters(optimizer)
        ledger = context.strategy.gradients.ledger
        states = [State.LOCAL] * len(parameters)
        if not is_fresh:
            states = ledger.states(parameters, context, uses_applied=uses_applied)
        gradients = []
        for k, (parameter, state) in enumerate(zip(parameters, states, strict=True)):
            if state is State.DOUBTFUL:
                raise RuntimeError(doubt(k, parameter))
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise RuntimeError(
                    f"The gradient of parameter {k} (shape {tuple(parameter.shape)}) is sparse, which XLA does not "
                    "support. Use Embedding(sparse=False)."
                )
            gradients.append(parameter.grad if state is State.LOCAL else None)
        marked = [state is not State.LOCAL for state in states]  # an edited one can't be looked at, but was summed
        buffers = self._hosting.state.buffers_to_average(parameters, all_of_them=self._hosting.num_groups > 1)
        values = {key: buffer.detach() for key, buffer in buffers.items()}
        own = _Part(gradients, values, self._hosting.local_of(buffers))
        totals, means = context._meet(MergeRequest("the sum of gradients", self._merge, (own, marked)))
        with torch.no_grad():
            for parameter, total in zip(parameters, totals, strict=True):
                if total is not None:
                    parameter.grad = total.clone() if self._hosting.num_groups > 1 else total
            ledger.note_sum([p for p, total in zip(parameters, totals, strict=True) if total is not None], context)
            for key, mean in means.items():
                self._hosting.write_shared(buffers[key], mean)

    def _merge(self, payloads: list[Any]) -> Sequence[Any]:
        parts = [part for part, _ in payloads]
        if any(marked != payloads[0][1] for _, marked in payloads):
            raise RuntimeError(
                "Some replicas have already summed gradients that others have not. Every replica must call "
                "`sum_gradients` for the same optimizers."
            )
        columns = list(zip(*(part.gradients for part in parts), strict=True))
        with torch.no_grad():
            totals = [self._sum(column) for column in columns]
            changed = set().union(*(part.changed for part in parts))
            means = {key: self._mean([part.buffers[key] for part in parts]) for key in changed}
        if not any(total is not None for total in totals):
            return [(totals, means)] * len(payloads)
        info_once(
            f"Gradient all_reduce: {sum(total is not None for total in totals)} tensors, num_replicas = "
            f"{self._hosting.num_replicas}, implementation = XLA"
        )
        return [(totals, means)] * len(payloads)

    def _sum(self, column: Sequence[Tensor | None]) -> Tensor | None:
        present = [gradient for gradient in column if gradient is not None]
        if not present:
            return None
        values = [torch.zeros_like(present[0]) if gradient is None else gradient for gradient in column]
        return self._hosting.sum(values)

    def _mean(self, column: Sequence[Tensor]) -> Tensor:
        rows = self._hosting.stack(column)
        if not (rows.is_floating_point() or rows.is_complex()):
            return rows[0]
        counts = self._hosting.had_examples()
        if not any(counts):
            return rows.mean(0)
        # A replica without examples may hold NaN, which a zero weight would spread.
        taken = [rows[i] for i, counted in enumerate(counts) if counted]
        return rows.mean(0) if all(counts) else torch.stack(taken).mean(0)
