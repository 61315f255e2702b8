"""Interpolation and adaptive pooling, which torch_xla would compute on the host for most arguments.

All but the greatest value in a window are linear, one dimension after the other: torch computes each dimension's
matrix on the host, and the device takes the few entries of it that are not zero. A gradient takes the transposed one.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from torch import Tensor

from torchstrategy.tpu.marks import get_mark, is_on_device
from torchstrategy.tpu.protocols import AnyRegion
from torchstrategy.tpu.refusals import refuse_host_computation

__all__ = ["AVERAGES", "INTERPOLATIONS", "MAXIMA", "as_int64", "constant", "run_resampling"]

_NEAREST = {f"{kind}{n}d" for n in (1, 2, 3) for kind in ("upsample_nearest", "_upsample_nearest_exact")}
_SMOOTH = {
    *("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d"),
    *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
}
_BACKWARD = "_backward"
INTERPOLATIONS = {name + suffix for name in _NEAREST | _SMOOTH for suffix in ("", _BACKWARD)}
AVERAGES = {f"_adaptive_avg_pool{n}d{suffix}" for n in (2, 3) for suffix in ("", _BACKWARD)}
MAXIMA = {f"adaptive_max_pool{n}d{suffix}" for n in (2, 3) for suffix in ("", _BACKWARD)}


def run_resampling(region: AnyRegion, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation of this module as gathers, products and sums."""
    if not is_on_device(args[0]):
        return func(*args, **kwargs)
    name = func.overloadpacket.__name__
    if not args[0].dtype.is_floating_point or func._schema.is_mutable:
        refuse_host_computation(func)
    run = _interpolate if name in INTERPOLATIONS else _average if name in AVERAGES else _maximum
    result = run(region, func, name, args)
    return region.marked(result, func, args)


def _interpolate(region: AnyRegion, _func: Any, name: str, args: tuple[Any, ...]) -> Any:
    value, sizes, *rest = args
    is_gradient = name.endswith(_BACKWARD)
    own = value.shape[2:]
    if is_gradient:
        own, rest = rest[0][2:], rest[1:]
    name = name.removesuffix(_BACKWARD)
    options = () if name in _NEAREST else (rest.pop(0),)
    rest += [None] * len(sizes)  # scales, which the dispatcher leaves out if there are none
    for dim, (before, after, scale) in enumerate(zip(own, sizes, rest, strict=False), value.dim() - len(sizes)):
        value = _multiply(region, value, dim, name, before, after, (*options, scale), is_gradient=is_gradient)
    return value


def _average(region: AnyRegion, func: Any, name: str, args: tuple[Any, ...]) -> Any:
    value = args[0]
    is_gradient = name.endswith(_BACKWARD)
    num_dims = int(name.removesuffix(_BACKWARD)[-2])
    own, sizes = (
        (args[1].shape[-num_dims:], value.shape[-num_dims:]) if is_gradient else (value.shape[-num_dims:], args[1])
    )
    if _divides(own, sizes):
        return func(*args)
    for dim, (before, after) in enumerate(zip(own, sizes, strict=True), value.dim() - num_dims):
        value = _multiply(region, value, dim, name.removesuffix(_BACKWARD), before, after, (), is_gradient=is_gradient)
    return value


def _maximum(region: AnyRegion, func: Any, name: str, args: tuple[Any, ...]) -> Any:
    value = args[0]
    num_dims = int(name.removesuffix(_BACKWARD)[-2])
    if name.endswith(_BACKWARD):
        own, sizes = args[1].shape[-num_dims:], value.shape[-num_dims:]
        if _divides(own, sizes) and num_dims == 2:
            return func(*args)
        blank = torch.zeros_like(args[1]).flatten(-num_dims)
        flat = blank.scatter_add(-1, args[2].flatten(-num_dims), value.flatten(-num_dims))
        return _unflatten(flat, -1, own)
    own, sizes = value.shape[-num_dims:], args[1]
    if _divides(own, sizes) and num_dims == 2:
        best, where = func(*args)
        return best, as_int64(where)
    windows = _windows(tuple(own), tuple(sizes))
    places = constant(region, value, windows)
    taken = value.flatten(-num_dims).index_select(-1, places.flatten())
    taken = _unflatten(taken, -1, windows.shape)
    position = taken.argmax(-1, keepdim=True)
    best = taken.gather(-1, position).squeeze(-1)
    where = places.expand(taken.shape).gather(-1, position).squeeze(-1)
    return _unflatten(best, -1, sizes), _unflatten(where, -1, sizes)


def as_int64(indices: Tensor) -> Tensor:
    """Return indices as what they say they are: for some operations XLA has 32 bits, and can't stack them."""
    return torch.add(indices, torch.zeros_like(indices))


def _unflatten(value: Tensor, dim: int, sizes: Any) -> Tensor:
    result: Tensor = value.unflatten(dim, list(sizes))  # type: ignore[no-untyped-call]
    return result


def _divides(own: Any, sizes: Any) -> bool:
    return all(before % after == 0 for before, after in zip(own, sizes, strict=True))


def constant(region: AnyRegion, like: Tensor, value: Tensor) -> Tensor:
    """Return a tensor of the host as one that can be combined with another one."""
    moved = value.to(like.device)
    return moved if get_mark(like) is None else region.enter(moved)


def _multiply(
    region: AnyRegion,
    value: Tensor,
    dim: int,
    name: str,
    before: int,
    after: int,
    options: tuple[Any, ...],
    *,
    is_gradient: bool,
) -> Tensor:
    """Apply one dimension's matrix, or the transposed one."""
    dtype = value.dtype if value.dtype == torch.float64 else torch.float32
    indices, weights = _taps(name, before, after, options, dtype, is_gradient=is_gradient)
    taken = value.to(dtype).index_select(dim, constant(region, value, indices.flatten()))
    taken = _unflatten(taken, dim, indices.shape)
    factors = constant(region, value, weights.reshape(*weights.shape, *(1,) * (taken.dim() - dim - 2)))
    if (weights == 0).any():  # infinity is not to be multiplied by them
        taken = torch.where(factors != 0, taken, 0)
    return (taken * factors).sum(dim + 1).to(value.dtype)


@functools.lru_cache(maxsize=256)
def _taps(
    name: str, before: int, after: int, options: tuple[Any, ...], dtype: torch.dtype, *, is_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Return which inputs make each output ``[outputs, k]``, and their weights."""
    # Other dimensions stay as they are. They are not 1: torch 2.9 smooths wrongly on the CPU if the last one is.
    others = (2,) * (int(name.removesuffix("_aa")[-2]) - 1)
    unit = torch.eye(before, dtype=dtype, device="cpu").reshape(1, before, before, *(1 for _ in others))
    unit = unit.expand(1, before, before, *others).contiguous()
    scales = (*options, *(None for _ in others)) if options else ()
    matrix = getattr(torch.ops.aten, name)(unit, [after, *others], *scales).reshape(before, after, -1)[..., 0]
    matrix = matrix if is_gradient else matrix.T
    used = (matrix != 0).to(torch.int8)
    indices = used.argsort(stable=True, dim=1, descending=True)[:, : max(1, int(used.sum(1).max()))]
    return indices, matrix.gather(1, indices)


@functools.lru_cache(maxsize=256)
def _windows(own: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
    """Return the places, in the flattened input, of each output's window ``[outputs, k]``; the last may be repeated."""
    found = []
    for output in itertools.product(*map(range, sizes)):
        spans = [
            range(i * before // after, -(-(i + 1) * before // after))
            for i, before, after in zip(output, own, sizes, strict=True)
        ]
        places = [0]
        for span, before in zip(spans, own, strict=True):
            places = [place * before + i for place in places for i in span]
        found.append(places)
    longest = max(map(len, found))
    return torch.tensor([places + places[-1:] * (longest - len(places)) for places in found], device="cpu")
