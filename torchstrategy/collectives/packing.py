"""Many tensors in one buffer and back, and the plan of buckets that gradients travel in."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

__all__ = ["pack", "plan_buckets", "split_into_packs", "unpack"]


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Copy tensors of one dtype and device into one flat buffer."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def unpack(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return views of the buffer in the shapes of ``like``."""
    # One call into C++, three times as fast as `split` and `view`; DDP uses it, too. In torch 2.9 it gives empty
    # tensors one dimension.
    views = _unflatten_dense_tensors(flat, like)  # type: ignore[no-untyped-call]
    return [
        view if view.shape == tensor.shape else view.reshape(tensor.shape)
        for view, tensor in zip(views, like, strict=True)
    ]


def plan_buckets(tensors: Sequence[Tensor], bucket_bytes: int) -> list[list[int]]:
    """Group the positions of tensors into buckets of one dtype and device, each of about ``bucket_bytes``.

    Args:
        tensors: what will be packed; only shapes, dtypes and devices count.
        bucket_bytes: size in bytes at which a bucket is closed; a larger tensor has a bucket of its own.

    Returns:
        Positions in ``tensors``, each in exactly one bucket.
    """
    buckets: list[list[int]] = []
    open_buckets: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    for index, tensor in enumerate(tensors):
        key = (tensor.dtype, tensor.device)
        size = tensor.numel() * tensor.element_size()
        members, filled = open_buckets.get(key, ([], 0))
        if not members or filled + size > bucket_bytes:
            members, filled = [], 0
            buckets.append(members)
        members.append(index)
        open_buckets[key] = (members, filled + size)
    return buckets


def split_into_packs(count: int, num_packs: int) -> list[range]:
    """Cut ``count`` positions into at most ``num_packs`` consecutive ranges of nearly equal length."""
    packs = max(1, min(num_packs, count))
    bounds = [count * i // packs for i in range(packs + 1)]
    return [range(bounds[i], bounds[i + 1]) for i in range(packs)]
