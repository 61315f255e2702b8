"""Which replicas can be traced together: those whose arguments have equal shapes.

A program for several devices has one shape for all of them, but the replicas' shares of a last batch may differ. So
the replicas form groups (at most three for a batch: full shares, the rest, none). The function is traced once for each
group, on all devices, and every replica takes the values of its own group.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchstrategy.base import tree
from torchstrategy.base.devices import Placement
from torchstrategy.base.values import BatchShares, DistributedValues, PerReplica, get_shares, set_shares
from torchstrategy.errors import DisagreementError, InvalidArgumentError
from torchstrategy.tpu.device_values import SplitValues
from torchstrategy.xla.runtime import TpuRuntime

__all__ = [
    "Groups",
    "check_shares",
    "compare_programs",
    "describe_program",
    "had_examples",
    "make_groups",
    "values_of_group",
]


def check_shares(shares: Sequence[BatchShares], num_kinds: int) -> None:
    """Refuse what hosts would trace differently.

    Args:
        shares: how the batches among the arguments were split, over all replicas.
        num_kinds: how many different shapes of arguments the replicas of this host have.

    Raises:
        InvalidArgumentError: some replicas' arguments have other shapes than others'.
    """
    uneven = [one.shares for one in shares if len(set(one.shares)) > 1]
    if not uneven and num_kinds == 1:
        return
    received = f"shares of {list(uneven[0])}" if uneven else f"arguments of {num_kinds} different shapes"
    raise InvalidArgumentError(
        "Hosts that drive their devices together compile one program, so that all replicas' arguments must have the "
        f"same shapes. Received: {received}. Drop the last batch (`drop_remainder=True` or `drop_last=True`), or start "
        "one process for each chip, such as by `torchrun`: there every share is taken."
    )


def describe_program(fn: Any, arguments: Any, tensors: Iterable[Tensor]) -> str:
    """Return what the hosts must have alike: the function's name, and shapes and dtypes of what it gets and trains."""
    leaves, spec = tree.flatten(arguments)
    seen = [getattr(fn, "__qualname__", type(fn).__name__), tree.describe(spec), *map(_describe, leaves)]
    return "; ".join([*seen, *map(_describe, tensors)])


def _describe(leaf: Any) -> str:
    if isinstance(leaf, SplitValues):  # whose values would be copied to the host
        return f"PerReplica({', '.join(dict.fromkeys(map(str, leaf.shapes)))} {leaf.stacks[0].dtype})"
    if isinstance(leaf, DistributedValues):
        return f"{type(leaf).__name__}({', '.join(dict.fromkeys(map(_describe, leaf.values)))})"
    return f"{tuple(leaf.shape)} {leaf.dtype}" if isinstance(leaf, Tensor) else type(leaf).__name__


def compare_programs(runtime: TpuRuntime, texts: Sequence[str]) -> None:
    """Compare what each local device's host is about to compile; every host calls this at the same time.

    Args:
        runtime: the devices.
        texts: for each device of this host, from ``describe_program``.

    Raises:
        DisagreementError: the hosts differ.
    """
    rows = runtime.upload([torch.tensor([zlib.crc32(text.encode()) - 2**31], dtype=torch.int32) for text in texts])
    differ = rows.max() != rows.min()
    runtime.sync()
    if bool(differ.cpu()):
        raise DisagreementError(
            "The hosts are about to run different programs: `run` was called with another function, arguments of other "
            f"shapes or dtypes, or another model than on other hosts. This host, {runtime.process_index}: {texts[0]}. "
            "Every host must make the same objects and the same calls."
        )


class Groups:
    """A partition of the replicas, and what selects each replica's value of those that the groups have.

    Args:
        runtime: the devices.
        group_of: for each replica, of all processes, the position of its group.
        local_ids: the replicas of this process.
    """

    def __init__(self, runtime: TpuRuntime, group_of: Sequence[int], local_ids: range) -> None:
        self.group_of = tuple(group_of)
        self.of_local = tuple(group_of[i] for i in local_ids)
        self.count = max(group_of) + 1
        self._runtime = runtime
        self._local_ids = local_ids
        self._masks: list[Tensor] | None = None

    def first_member(self, group: int) -> int:
        """Return the id of a group's first replica."""
        return self.group_of.index(group)

    def members_here(self, group: int) -> list[int]:
        """Return the positions, among this process's replicas, of a group's replicas."""
        return [i for i, own in enumerate(self.of_local) if own == group]

    def select(self, values: Sequence[Tensor]) -> Tensor:
        """Return each replica's own value: that of its group. To be called in the region of a run.

        Args:
            values: one for each group, of equal shape and dtype.
        """
        result = values[0]
        for group in range(1, self.count):
            result = torch.where(self._mask(group), values[group], result)
        return result

    def _mask(self, group: int) -> Tensor:
        if self._masks is None:
            self._masks = []
            for own in range(1, self.count):
                parts = [torch.tensor([self.group_of[i] == own]) for i in self._local_ids]
                self._masks.append(self._runtime.upload(parts))
        return self._runtime.enter(self._masks[group - 1], split=True).reshape(())


def find_groups(arguments: Any, num_local: int) -> list[int]:
    """Return for each replica of this process the position of its group, in the order of first appearance.

    Raises:
        IndexError: a distributed value has too few values.
    """
    leaves = [leaf for leaf in tree.all_leaves(arguments) if isinstance(leaf, DistributedValues)]
    signatures = [_signatures(leaf, num_local) for leaf in leaves]
    order: dict[Any, int] = {}
    return [order.setdefault(tuple(column[i] for column in signatures), len(order)) for i in range(num_local)]


def _signatures(leaf: DistributedValues, num_local: int) -> Sequence[Any]:
    if isinstance(leaf, SplitValues):
        return leaf.group_of if len(leaf.stacks) > 1 else (0,) * num_local
    if len(leaf.values) != num_local:
        raise IndexError(
            f"A {type(leaf).__name__} argument holds {len(leaf.values)} values, but this process has {num_local} "
            "replicas. Make it with this strategy."
        )
    return [_signature(value) for value in leaf.values]


def _signature(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, (bool, int, float, complex)):
        return type(value)
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value


def make_groups(runtime: TpuRuntime, placement: Placement, arguments: Any, shares: Sequence[BatchShares]) -> Groups:
    """Return which replicas, of all processes, are traced together.

    Raises:
        IndexError: a distributed value has too few values.
        InvalidArgumentError: the shapes differ, and several hosts drive the devices together.
    """
    ids = placement.local_replica_ids
    own = find_groups(arguments, len(ids))
    if len(ids) < placement.num_replicas:
        check_shares(shares, len(set(own)))
        own = [0] * placement.num_replicas
    return Groups(runtime, own, ids)


def had_examples(shares: Sequence[BatchShares], groups: Groups) -> list[bool]:
    """Say for each replica whether its share of the batch was not empty; of unknown batches, none is."""
    return [len(shares) != 1 or shares[0].shares[i] > 0 for i in range(len(groups.group_of))]


def values_of_group(
    runtime: TpuRuntime, leaf: Any, groups: Groups, group: int, enter: Callable[[Tensor], Tensor], num_local: int
) -> Any:
    """Return what the function gets for a leaf of its arguments when it is traced for a group."""
    value = _value_of_group(runtime, leaf, groups, group, enter, num_local)
    shares = get_shares(leaf)
    return value if shares is None or value is leaf else set_shares(value, shares)


def _value_of_group(
    runtime: TpuRuntime, leaf: Any, groups: Groups, group: int, enter: Callable[[Tensor], Tensor], num_local: int
) -> Any:
    if isinstance(leaf, SplitValues):
        return enter(leaf.stacks[_stack_of(leaf, groups, group)])
    if not isinstance(leaf, PerReplica):
        return leaf
    members = groups.members_here(group)
    example = leaf.values[members[0]]
    if isinstance(example, (bool, int, float, complex)):
        values = [torch.tensor(value) for value in leaf.values]
        return enter(runtime.upload([value.unsqueeze(0) for value in values]))
    if not isinstance(example, Tensor):
        return example
    blank = torch.zeros_like(example, device="cpu")
    rows = [leaf.values[i] if i in members else blank for i in range(num_local)]
    entered = enter(runtime.upload([row.detach().to("cpu").unsqueeze(0) for row in rows]))
    return entered.requires_grad_() if example.requires_grad else entered


def _stack_of(leaf: SplitValues, groups: Groups, group: int) -> int:
    """Return which of a value's tensors a group's replicas have."""
    return leaf.group_of[groups.members_here(group)[0]] if len(leaf.stacks) > 1 else 0
