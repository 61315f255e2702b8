"""What becomes of the values that a replica function returns when it is traced for several replicas at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from torchstrategy.base import tree
from torchstrategy.base.values import PerReplica
from torchstrategy.tpu.device_values import SplitValues
from torchstrategy.tpu.trace import Trace
from torchstrategy.xla.runtime import TpuRuntime

__all__ = ["join_results"]


def join_results(runtime: TpuRuntime, trace: Trace, results: Sequence[Any], *, is_traced: bool = False) -> Any:
    """Return one structure for all replicas, given what each group returned.

    Tensors become ``SplitValues``; an object that all groups returned stays plain.

    Args:
        runtime: the devices.
        trace: the call of ``run``.
        results: one for each group.
        is_traced: whether the result is for a function that is traced itself.

    Raises:
        ValueError: the groups returned different structures.
    """
    of_local = trace.groups.of_local

    def join(*leaves: Any) -> Any:
        first = leaves[0]
        if isinstance(first, nn.Parameter) and all(leaf is first for leaf in leaves):
            return first
        if all(isinstance(leaf, Tensor) and leaf.device.type == runtime.device.type for leaf in leaves):
            if len({(leaf.shape, leaf.dtype) for leaf in leaves}) == 1:
                return SplitValues(runtime, [trace.stack(leaves)], (0,) * len(of_local), is_traced=is_traced)
            with trace.region.paused():
                stacks = [trace.rows(leaf) for leaf in leaves]
            return SplitValues(runtime, stacks, of_local, is_traced=is_traced)
        if all(leaf is first for leaf in leaves):
            return first
        return PerReplica([leaves[group] for group in of_local])

    specs = [tree.flatten(result)[1] for result in results]
    for spec in specs[1:]:
        if spec != specs[0]:  # said without the values, which can't be printed here
            raise ValueError(
                "The replicas' values must have the same nested structure (types and lengths of containers, keys of "
                f"dicts). Received values{tree.describe(specs[0])} and values{tree.describe(spec)}"
            )
    return tree.map_structure(join, results) if len(results) > 1 else tree.map_leaves(join, results[0])
