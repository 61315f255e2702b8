"""Several hosts that drive their devices together: each traces the program for itself, and all must be the same."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchstrategy.base import tree
from torchstrategy.base.values import BatchShares, DistributedValues
from torchstrategy.errors import DisagreementError, InvalidArgumentError
from torchstrategy.tpu.device_values import SplitValues
from torchstrategy.xla.runtime import TpuRuntime

__all__ = ["check_shares", "compare_programs", "describe_program"]


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
