"""What a region does with each operation: run it, run it differently, or refuse it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch._decomp
from torch import Tensor
from torch._ops import HigherOrderOperator

from torchstrategy.tpu.batch_norm import run_batch_norm, run_batch_norm_backward
from torchstrategy.tpu.marks import Site, any_on_device, is_on_device, with_defaults
from torchstrategy.tpu.protocols import AnyRegion
from torchstrategy.tpu.random_draws import RANDOM, run_random
from torchstrategy.tpu.refusals import (
    DATA_DEPENDENT,
    HOST_COPIES,
    check_stays_on_device,
    refuse_branching,
    refuse_copy_to_host,
    refuse_distributed,
    refuse_dynamic_shape,
    refuse_embedding_bag,
    refuse_host_computation,
    refuse_mask,
    refuse_sparse_gradients,
)
from torchstrategy.tpu.resampling import AVERAGES, INTERPOLATIONS, MAXIMA, as_int64, constant, run_resampling
from torchstrategy.xla.kernels import Place, place_of, run_kernel

__all__ = ["COMPUTATIONS", "HANDLERS", "NUMBERS", "TENSOR_PLACES", "WRITERS", "Handler", "handler_of"]

Handler = Callable[[AnyRegion, Any, tuple[Any, ...], dict[str, Any]], Any]

#: By the ``id`` of an operation, which lives as long as the process; ``None``: it is simply run.
HANDLERS: dict[int, Handler | None] = {}
#: What handles operations that write to their arguments, which must be the program's own.
WRITERS: set[Handler | None] = {run_batch_norm}
#: What only computes: nothing but its results depends on it.
COMPUTATIONS: set[Handler | None] = {None}
#: By the same ``id``: the positions of arguments that are tensors, or numbers in their places, if there are several.
TENSOR_PLACES: dict[int, tuple[int, ...]] = {}
NUMBERS = {bool, int, float, complex}


def handler_of(func: Any) -> Handler | None:
    """Decide, at the first sight of an operation, what to do with it, and remember that."""
    if isinstance(func, HigherOrderOperator):
        refuse_branching(func.__name__)
    HANDLERS[id(func)] = handler = _decide(func)
    places = [i for i, argument in enumerate(func._schema.arguments) if "Tensor" in str(argument.type)]
    TENSOR_PLACES[id(func)] = tuple(places) if len(places) > 1 else ()
    return handler


def _decide(func: Any) -> Handler | None:
    packet = func.overloadpacket.__name__
    if func.namespace == "aten":
        named = _NAMED.get(packet) or _OVERLOADS.get(f"{packet}.{func._overloadname}")
        if named is not None:
            return named
    if func.namespace in {"c10d", "_c10d_functional"}:
        return refuse_distributed
    if any(argument.name == "device" for argument in func._schema.arguments):
        return _run_creation
    if not func._schema.returns or func.namespace == "prim" or func.overloadpacket.__name__ == "result_type":
        return None  # they read no values, such as `prim.device`
    place = place_of(func)
    if place is Place.HOST:
        return _run_decomposed if func in torch._decomp.decomposition_table else _refuse_on_device
    if place is not Place.DEVICE:
        return _run_carefully
    return _run_mutation if func._schema.is_mutable else None


def _refuse_on_device(region: AnyRegion, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Refuse an operation on tensors of the device that would be computed on the host."""
    if any_on_device((*args, *kwargs.values())):
        refuse_host_computation(region.outer_operation or func)
    return _run_mutation(region, func, args, kwargs)


def _run_decomposed(region: AnyRegion, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run what torch_xla has no implementation of as torch's own decomposition into operations that it has."""
    if not any_on_device((*args, *kwargs.values())):
        return func(*args, **kwargs)
    if func._schema.is_mutable:
        refuse_host_computation(region.outer_operation or func)
    with region.inside(func, decomposed=True):
        result = torch._decomp.decomposition_table[func](*args, **kwargs)
    return region.marked(result, func, (*args, *kwargs.values()))


def _run_carefully(region: AnyRegion, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation that may copy its tensors to the host, and watch the operations that it calls."""
    if not any_on_device((*args, *kwargs.values())):
        return func(*args, **kwargs)
    with region.inside(func):
        result = run_kernel(func, args, kwargs)
    site = region.site_if_local(func, (*args, *kwargs.values()))
    if site is not None:
        _mark_written(region, func, args, kwargs, site)
        region.mark_results(result, site)
    if func.namespace == "aten" and place_of(func) is Place.PARTS and not func._schema.is_mutable:
        HANDLERS[id(func)] = None  # it will call the same operations the next time
    return result


def _run_creation(region: AnyRegion, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation that can make a tensor on another device than its argument's."""
    if func.overloadpacket.__name__ == "_to_copy":
        check_stays_on_device(region, func, args, kwargs.get("device"))
    result = func(*args, **kwargs)
    if isinstance(result, Tensor) and is_on_device(result) and not any_on_device(args):
        return region.wrap(result)
    return region.marked(result, func, args)


def _run_mutation(region: AnyRegion, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation that writes to some of its arguments."""
    if region.is_decomposing and any_on_device(args):
        # Plain tensors know nothing of views: the base of a view would not be written to.
        refuse_host_computation(region.outer_operation or func)
    if any(isinstance(arg, Tensor) and not is_on_device(arg) for arg in args[:1]) and any_on_device(args[1:]):
        check_stays_on_device(region, func, args, "cpu")
    result = func(*args, **kwargs)
    site = region.site_if_local(func, (*args, *kwargs.values()))
    if site is not None:
        _mark_written(region, func, args, kwargs, site)
        region.mark_results(result, site)
    return result


def _mark_written(region: AnyRegion, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> None:
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            region.mark_results(args[position] if position < len(args) else kwargs.get(argument.name), site)


def _run_copy(region: AnyRegion, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copy into a new value: torch_xla would write to the tensor that held the old one, which others may hold."""
    target, source = args[:2]
    if not is_on_device(target) or isinstance(target, (list, tuple)):
        return _run_mutation(region, func, args, kwargs)
    if not isinstance(source, Tensor):
        source = torch.full((), source, dtype=target.dtype, device=target.device)
    result = source.to(device=target.device, dtype=target.dtype).expand(target.shape).clone()
    return region.marked(result, func, args)


def _run_foreach_copy(region: AnyRegion, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return [_run_copy(region, func, pair, kwargs) for pair in zip(args[0], args[1], strict=True)]


def _run_index(region: AnyRegion, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `x[indices]`, or `x[indices] = y`; of masks, only writing a number where they are true."""
    value, indices = args[:2]
    masks = [index for index in indices if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)]
    if masks and any_on_device((value, *masks)):
        writes_number = len(args) > 2 and len(indices) == 1 and args[2].numel() == 1 and (*args, False)[3] is False
        if not writes_number:
            refuse_mask(region, masks[0])
        mask = masks[0].to(device=value.device, dtype=torch.bool)
        mask = mask.reshape(mask.shape + (1,) * (value.dim() - mask.dim()))
        result = torch.where(mask, args[2].to(device=value.device, dtype=value.dtype).reshape(()), value)
    else:
        result = func(*args, **kwargs)
    return region.marked(result, func, args)


def _run_embedding(region: AnyRegion, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    is_sparse = with_defaults(args, 2, (-1, False, False))[4]
    if is_sparse and is_on_device(args[0]) and torch.is_grad_enabled():
        refuse_sparse_gradients()
    return _run_by_index(region, func, args, kwargs)


def _run_by_index(region: AnyRegion, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Take or write rows by an index. By one of several results, as of `sort`, torch_xla 2.9 ends the process."""
    place = 1 if func.overloadpacket.__name__ == "embedding" else 2
    result = func(*args[:place], args[place] * 1, *args[place + 1 :], **kwargs)
    return region.marked(result, func, args)


def _run_elu_backward(region: AnyRegion, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute the gradient of ``elu``, ``selu`` and ``celu``: torch_xla 2.9 takes the input for the result."""
    gradient, alpha, scale, input_scale, is_result, value = args
    if not is_on_device(value):
        return func(*args, **kwargs)
    factor = alpha * scale
    slope = value + factor if is_result else factor * torch.exp((value * input_scale).clamp(max=0))
    result = gradient * torch.where(value <= 0, slope * input_scale, scale).to(gradient.dtype)
    return region.marked(result, func, args)


def _run_norm(region: AnyRegion, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute the greatest or least absolute value for the orders inf and -inf, where torch_xla 2.9 is wrong."""
    value, order, *rest = args if len(args) > 1 else (*args, 2)
    if not is_on_device(value) or order is None or not math.isinf(order):
        result = _run_carefully(region, func, args, kwargs)
        HANDLERS[id(func)] = _run_norm  # for other orders
        return result
    dims, keepdim = with_defaults(tuple(rest), 0, (None, False))
    absolute = value.abs() if kwargs.get("dtype") is None else value.to(kwargs["dtype"]).abs()
    dims = dims or list(range(value.dim()))
    result = absolute.amax(dims, keepdim) if order > 0 else absolute.amin(dims, keepdim)
    return region.marked(result, func, args)


def _run_weight_norm(region: AnyRegion, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute ``v * g / |v|``, or its gradients, which torch_xla would do on the host."""
    if not is_on_device(args[0]):
        return func(*args, **kwargs)
    if func.overloadpacket.__name__ == "_weight_norm_interface":
        v, g, dim = with_defaults(args, 2, (0,))
        norm = (v * v).sum([i for i in range(v.dim()) if i != dim], keepdim=True).sqrt()
        result = (v * (g / norm), norm)
    else:
        gradient, v, g, norm, dim = args
        along = (gradient * v).sum([i for i in range(v.dim()) if i != dim], keepdim=True)
        result = (g / norm * (gradient - v * (along / (norm * norm))), along / norm)
    return region.marked(result, func, args)


def _run_addmm(region: AnyRegion, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute ``beta * value + alpha * a @ b``, as ``Muon`` does, which torch_xla would compute on the host."""
    beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
    if (beta, alpha) == (1, 1) or not is_on_device(args[0]):
        return _run_carefully(region, func, args, kwargs)
    value, first, second = args
    product = torch.mm(first, second) * alpha
    return region.marked(product + value * beta if beta else product, func, args)


def _run_with_indices(region: AnyRegion, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a pooling operation that says where the greatest values were."""
    results = _run_carefully(region, func, args, kwargs)
    if not is_on_device(args[0]):
        return results
    results = (results[0], as_int64(results[1]))
    return region.marked(results, func, args)


def _run_cumulative(region: AnyRegion, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute ``cummax``, and ``cummin``, which torch_xla would compute on the host, as that of the opposite."""
    value, dim = args
    if not is_on_device(value):
        return func(*args, **kwargs)
    if func.overloadpacket.__name__ == "cummin":
        opposite = torch.neg if value.dtype.is_floating_point else torch.bitwise_not
        best = opposite(_running_maximum(region, func, opposite(value), dim))
    else:
        best = _running_maximum(region, func, value, dim)
    # Of equal values the last one, where torch_xla takes the first.
    places = torch.arange(value.shape[dim] if value.dim() else 1, device="cpu")
    places = constant(region, value, places.reshape(-1, *(1,) * (value.dim() - 1 - dim % max(1, value.dim()))))
    is_best = (value == best) | value.isnan()
    where = _running_maximum(region, func, torch.where(is_best, places, 0).reshape(value.shape), dim)
    return region.marked((best, where), func, args)


def _running_maximum(region: AnyRegion, func: Any, value: Tensor, dim: int) -> Tensor:
    with region.inside(func):
        best: Tensor = run_kernel(torch.ops.aten.cummax.default, (value, dim), {})[0]
    if value.dtype.is_floating_point:  # torch_xla forgets that there was one
        best = torch.where(value.isnan().cumsum(dim) > 0, math.nan, best)
    return best


def _run_loss(region: AnyRegion, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute losses, or their gradients, for which torch calls operations that write to their arguments."""
    name = func.overloadpacket.__name__
    gradient = args[0] if name.endswith("_backward") else None
    value, target, reduction, *rest = with_defaults(args, 2, (_MEAN,)) if gradient is None else args[1:]
    if not is_on_device(value):
        return func(*args, **kwargs)
    if name == "huber_loss_backward":
        result = (value - target).clamp(-rest[0], rest[0])
    elif name == "soft_margin_loss_backward":
        result = -target * torch.sigmoid(-target * value)
    else:
        result = torch.nn.functional.softplus(-target * value)
    if gradient is not None:
        result = gradient * result / (value.numel() if reduction == _MEAN else 1)
    elif reduction:
        result = result.mean() if reduction == _MEAN else result.sum()
    return region.marked(result, func, args)


#: How torch passes `reduction="mean"` to operations.
_MEAN = 1

_NAMED: dict[str, Handler] = {
    **dict.fromkeys(HOST_COPIES, refuse_copy_to_host),
    **dict.fromkeys(DATA_DEPENDENT, refuse_dynamic_shape),
    **dict.fromkeys(RANDOM, run_random),
    "native_batch_norm": run_batch_norm,
    "native_batch_norm_backward": run_batch_norm_backward,
    "index": _run_index,
    "index_put": _run_index,
    "_index_put_impl": _run_index,
    **dict.fromkeys(INTERPOLATIONS | AVERAGES | MAXIMA, run_resampling),
    "max_pool2d_with_indices": _run_with_indices,
    "max_pool3d_with_indices": _run_with_indices,
    "addmm": _run_addmm,
    "cummax": _run_cumulative,
    "cummin": _run_cumulative,
    "linalg_vector_norm": _run_norm,
    "norm": _run_norm,
    **dict.fromkeys(("huber_loss_backward", "soft_margin_loss", "soft_margin_loss_backward"), _run_loss),
    "_pack_padded_sequence": _refuse_on_device,  # its kernel copies the lengths to the host
    "elu_backward": _run_elu_backward,
    "embedding": _run_embedding,
    **dict.fromkeys(("_embedding_bag", "_embedding_bag_forward_only"), refuse_embedding_bag),
    **dict.fromkeys(("index_select", "index_copy", "index_add", "index_fill"), _run_by_index),
    "_weight_norm_interface": _run_weight_norm,
    "_weight_norm_interface_backward": _run_weight_norm,
    "copy": _run_copy,
    "_foreach_copy": _run_foreach_copy,
}
COMPUTATIONS |= {_run_carefully, _run_index, _run_by_index}
_OVERLOADS: dict[str, Handler] = {"repeat_interleave.Tensor": refuse_dynamic_shape}
