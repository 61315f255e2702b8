"""torch_xla's functions that must not be called while a replica function is traced for all replicas.

They don't pass torch's dispatcher. Collectives see one replica there: they return their input or end the process.
"""

from __future__ import annotations

import functools
from types import ModuleType

__all__ = ["CUTS", "functions_to_refuse"]

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
