"""``ReplicaContext`` of replicas that one program computes: what differs between them is a tensor, not a number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from torchstrategy.replicas.runner import MergeRequest
from torchstrategy.strategies.replica_context import ReplicaContext
from torchstrategy.tpu.protocols import AnyHosting

__all__ = ["SpmdReplicaContext"]


class SpmdReplicaContext(ReplicaContext):
    """What a replica function can ask while it is traced for a group of replicas.

    Args:
        hosting: what traces it.
        strategy: the strategy.
        group: the position of the group.
        representative: the id of the group's first replica.
        inputs: what the function was called with.
    """

    def __init__(self, hosting: AnyHosting, strategy: Any, group: int, representative: int, inputs: Any) -> None:
        super().__init__(strategy, representative, 0, inputs)
        self.group = group
        self._hosting = hosting

    @property
    @override
    def replica_id_in_sync_group(self) -> Any:
        """This replica's id as a 0-d int64 tensor, as in tf: the function is traced once for all replicas."""
        return self._replica_id if self.num_replicas_in_sync == 1 else self._hosting.replica_id()

    @override
    def _sum(self, optimizer: Optimizer, *, is_fresh: bool = False, uses_applied: bool = False) -> None:
        self._hosting.gradients.sum_for(self, optimizer, is_fresh=is_fresh, uses_applied=uses_applied)

    @override
    def merge_call(
        self, merge_fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._check_active("merge_call")
        if self.num_replicas_in_sync == 1:
            return super().merge_call(merge_fn, args, kwargs)

        def merge(payloads: list[Any]) -> list[Any]:
            return self._hosting.merge(merge_fn, payloads)

        return self._meet(MergeRequest("merge_call", merge, (tuple(args), dict(kwargs or {}))))

    @override
    def _meet(self, request: MergeRequest) -> Any:
        return self._hosting.meet(self.group, request)

    @override
    def _all_gather(self, tensors: Sequence[Tensor], axis: int, operation: str) -> Any:
        hosting = self._hosting

        def merge(payloads: list[Sequence[Tensor]]) -> list[Any]:
            with torch.no_grad():
                gathered = [hosting.gather(column, axis) for column in zip(*payloads, strict=True)]
            return [gathered] * len(payloads)

        gathered = self._meet(MergeRequest(operation, merge, [tensor.detach() for tensor in tensors]))
        return [value for value, _ in gathered], [hosting.offset(sizes) for _, sizes in gathered]
