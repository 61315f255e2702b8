"""What the parts of a trace need of its region and its hosting; and the replica's context in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from torchstrategy.replicas.runner import MergeRequest
from torchstrategy.strategies.replica_context import ReplicaContext
from torchstrategy.xla.runtime import TpuRuntime

__all__ = ["AnyHosting", "AnyRegion", "SpmdReplicaContext"]


class AnyRegion(Protocol):
    """See ``Region``."""

    runtime: TpuRuntime
    num_replicas: int
    outer_operation: Any
    batch_count: Tensor | None
    is_decomposing: bool

    def inside(self, func: Any, *, decomposed: bool = False) -> AbstractContextManager[None]:
        """Note that an operation is computed by others."""

    def entered(self, values: Any) -> Any:
        """Return values with the shared ones among them entered."""

    def enter(self, value: Tensor) -> Tensor:
        """Return a shared value as one of the region."""

    def seed_before_draws(self, *, keep_host: bool = False) -> None:
        """Give the device its seed before the first random number."""

    def site_if_local(self, func: Any, values: Iterable[Any]) -> Any:
        """Return where a result is made, if an argument is local."""

    def marked(self, results: Any, func: Any, values: Iterable[Any]) -> Any:
        """Return results, which are local if an argument is."""

    def mark_results(self, results: Any, site: Any) -> None:
        """Note that results are local."""

    def wrap(self, plain: Tensor) -> Tensor:
        """Return a tensor for a plain one."""

    def wrap_local(self, func: Any, plain: Tensor) -> Tensor:
        """Return a local tensor for a plain one."""

    def describe(self, value: Tensor) -> str:
        """Return what to call a value in messages."""


class AnyGradients(Protocol):
    """See ``SpmdGradients``."""

    def sum_for(self, context: Any, optimizer: Optimizer, *, is_fresh: bool, uses_applied: bool) -> None:
        """Replace a group's gradients by their sum over replicas."""


class AnyHosting(Protocol):
    """See ``SpmdHosting``."""

    num_replicas: int
    state: Any

    @property
    def gradients(self) -> AnyGradients:
        """What sums gradients."""

    @property
    def num_groups(self) -> int:
        """How many groups of replicas the function is traced for."""

    def replica_id(self) -> Tensor:
        """Return the replica's id as a tensor."""

    def meet(self, local_id: int, request: MergeRequest) -> Any:
        """Meet the other groups."""

    def merge(self, fn: Callable[..., Any], arguments: Sequence[tuple[Any, Any]]) -> list[Any]:
        """Call a merge function in cross-replica context."""

    def gather(self, values: Sequence[Tensor], axis: int) -> tuple[Tensor, list[int]]:
        """Return the values of all replicas in one tensor, and their sizes."""

    def offset(self, sizes: Sequence[int]) -> Tensor:
        """Return how much stands before a replica's own part."""

    def sum(self, values: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
        """Return the sum over replicas."""

    def stack(self, values: Sequence[Tensor]) -> Tensor:
        """Return the replicas' values as rows."""

    def had_examples(self) -> list[bool]:
        """Say of each replica whether it has examples."""

    def write_shared(self, buffer: Tensor, value: Tensor) -> None:
        """Write a value that all replicas share."""

    def local_of(self, buffers: dict[int, Tensor]) -> set[int]:
        """Return the keys of those that differ between the group's replicas."""

    def one_step(self, parameters: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Let the first group's step be that of all."""


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
        """This replica's id as a 0-d int64 tensor, as in tf, since the function is traced once for all replicas."""
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

    @override
    def _gather_rows(self, row: Tensor, operation: str) -> Tensor:
        def merge(payloads: list[Tensor]) -> list[Tensor]:
            with torch.no_grad():
                return [self._hosting.stack(payloads)] * len(payloads)

        return self._meet(MergeRequest(operation, merge, row.detach()))  # type: ignore[no-any-return]
