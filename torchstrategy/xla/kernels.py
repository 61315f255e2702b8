"""Which operations XLA computes, and which torch_xla would copy to the host and compute there.

A copy to the host in the middle of a replica function ends the process, so it must be known before.

Functions of torch_xla that don't pass torch's dispatcher must not be called either: collectives see one replica
there, and return their input or end the process.
"""

from __future__ import annotations

import enum
import functools
import warnings
from types import ModuleType
from typing import Any

import torch

__all__ = ["CUTS", "KEYS", "Place", "functions_to_refuse", "place_of", "run_kernel", "show_parts"]

#: Names of functions that would run half of a step.
CUTS = {"sync", "mark_step", "_xla_step_marker", "_xla_sync_multi", "unlazy", "wait_device_ops", "optimizer_step"}
_COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_bucketized",
    "all_to_all",
    "collective_broadcast",
    "collective_permute",
    "reduce_scatter",
    "reduce_scatter_bucketized",
    "mesh_reduce",
    "rendezvous",
    "send",
    "recv",
    "reduce_gradients",
    "broadcast_master_param",
)


@functools.cache
def functions_to_refuse() -> list[tuple[ModuleType, str]]:
    """Return the modules and names of these functions; none if torch_xla is not installed."""
    try:
        import torch_xla  # noqa: PLC0415 - optional
        import torch_xla.core.xla_model as xla_model  # noqa: PLC0415
    except ImportError:
        return []
    names = {torch_xla: ["sync"], torch_xla._XLAC: [], xla_model: list(_COLLECTIVES)}
    for module in names:
        names[module] += [name for name in sorted(CUTS) if hasattr(module, name) and name not in names[module]]
    return [(module, name) for module, found in names.items() for name in found if hasattr(module, name)]


# From torch_xla 2.9's aten_xla_type.cpp (`call_fallback_fn`): for some arguments these run on the host.
_SOMETIMES_ON_HOST = {
    "_adaptive_avg_pool2d",
    "_adaptive_avg_pool2d_backward",
    "_adaptive_avg_pool3d",
    "_adaptive_avg_pool3d_backward",
    "_embedding_bag_backward",
    "_embedding_bag_forward_only",
    "_linalg_eigh",
    "adaptive_max_pool2d",
    "adaptive_max_pool2d_backward",
    "addmm",
    "as_strided",
    "as_strided_scatter",
    "avg_pool2d_backward",
    "avg_pool3d_backward",
    "cumprod",
    "dot",
    "linalg_inv_ex",
    "max_pool2d_with_indices",
    "max_pool2d_with_indices_backward",
    "max_pool3d_with_indices",
    "max_pool3d_with_indices_backward",
    "norm",
    "scatter",
    "scatter_reduce",
    "upsample_bilinear2d_backward",
    "upsample_nearest2d_backward",
}
_COMPOSITES = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional", "CompositeImplicitAutograd")
#: Where the dispatcher looks for XLA's kernel.
KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.XLA)


class Place(enum.Enum):
    """Where torch_xla computes an operation."""

    DEVICE = enum.auto()
    #: On the device, or for some arguments on the host.
    EITHER = enum.auto()
    #: Where the operations that it consists of are computed.
    PARTS = enum.auto()
    HOST = enum.auto()


def place_of(func: Any) -> Place:
    """Return where an operation on XLA tensors is computed."""
    name = func.name()
    if torch._C._dispatch_has_kernel_for_dispatch_key(name, "XLA"):
        sometimes = func.namespace != "aten" or func.overloadpacket.__name__ in _SOMETIMES_ON_HOST
        return Place.EITHER if sometimes else Place.DEVICE
    has_parts = any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in _COMPOSITES)
    return Place.PARTS if has_parts else Place.HOST


def run_kernel(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on XLA tensors, past the dispatch modes, which see the operations that it calls."""
    return func.redispatch(KEYS, *args, **kwargs)


@functools.cache
def show_parts() -> torch.library.Library:
    """Let `torch.einsum` and `max_pool3d` call the operations that they consist of, so that dispatch modes see them.

    Torch_xla's own have gradients of their own and call none. Returns what must live as long as this holds.
    """
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel is replaced
        for name in ("einsum", "max_pool3d"):
            operation: Any = getattr(torch.ops.aten, name).default
            parts = functools.partial(operation._op_dk, torch._C.DispatchKey.CompositeImplicitAutograd)
            library.impl(name, parts, "AutogradXLA", allow_override=True)  # type: ignore[no-untyped-call]
    return library
