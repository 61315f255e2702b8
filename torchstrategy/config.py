"""``ts.config``: what tf has under ``tf.config``: the devices of this host, and how functions run."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from torchstrategy.base import later
from torchstrategy.base.devices import full_device_name, visible_devices
from torchstrategy.cluster_resolver.cluster_spec import ClusterSpec
from torchstrategy.cluster_resolver.resolver import ClusterResolver
from torchstrategy.cluster_resolver.tpu import TPUClusterResolver
from torchstrategy.replicas.functions import functions_run_eagerly, run_functions_eagerly
from torchstrategy.xla import system

__all__ = [
    "LogicalDevice",
    "PhysicalDevice",
    "experimental_connect_to_cluster",
    "functions_run_eagerly",
    "list_logical_devices",
    "list_physical_devices",
    "run_functions_eagerly",
]

later.explain_absent(__name__)


class PhysicalDevice(NamedTuple):
    """A device of this host.

    Args:
        name: such as ``"/physical_device:GPU:0"``.
        device_type: ``"CPU"``, ``"GPU"``, ...
    """

    name: str
    device_type: str


class LogicalDevice(NamedTuple):
    """A device under the name that strategies take.

    Args:
        name: such as ``"/device:GPU:0"``.
        device_type: ``"CPU"``, ``"GPU"``, ...
    """

    name: str
    device_type: str


def list_physical_devices(device_type: str | None = None) -> list[PhysicalDevice]:
    """Return the devices that torch can use on this host.

    Args:
        device_type: ``"CPU"``, ``"GPU"``, ... in any letter case; ``None`` means all.

    Returns:
        The CPU, of which torch has one, and then the accelerators; no device for a type that is not there or unknown.
        TPU devices are there once ``ts.tpu.experimental.initialize_tpu_system`` was called.

    Raises:
        TypeError: ``device_type`` is not a string.

    Example:
        >>> ts.config.list_physical_devices("cpu")
        [PhysicalDevice(name='/physical_device:CPU:0', device_type='CPU')]
        >>> ts.config.list_physical_devices("abacus")
        []
    """
    return [PhysicalDevice(f"/physical_device:{kind}:{index}", kind) for kind, index in _devices(device_type)]


def list_logical_devices(device_type: str | None = None) -> list[LogicalDevice]:
    """Return the devices of this host under the names that strategies take.

    There is one for each physical device. A program may use more CPU replicas than are listed: ``"cpu:1"`` is always
    there.

    Args:
        device_type: ``"CPU"``, ``"GPU"``, ... in any letter case; ``None`` means all.

    Returns:
        The CPU, then the accelerators; no device for a type that is not there or unknown. TPU devices are there once
        ``ts.tpu.experimental.initialize_tpu_system`` was called.

    Raises:
        TypeError: ``device_type`` is not a string.

    Example:
        >>> devices = ts.config.list_logical_devices("CPU")
        >>> devices
        [LogicalDevice(name='/device:CPU:0', device_type='CPU')]
        >>> ts.MirroredStrategy([device.name for device in devices]).num_replicas_in_sync
        1
    """
    return [LogicalDevice(f"/device:{kind}:{index}", kind) for kind, index in _devices(device_type)]


def experimental_connect_to_cluster(
    cluster_spec_or_resolver: ClusterSpec | ClusterResolver,
    job_name: str = "localhost",  # noqa: ARG001
    task_index: int = 0,  # noqa: ARG001
    protocol: str | None = None,  # noqa: ARG001
    make_master_device_default: bool = True,  # noqa: ARG001, FBT001, FBT002
    cluster_device_filters: Any = None,  # noqa: ARG001
) -> None:
    """See that this program can use a cluster; strategies connect by themselves when they are made.

    Programs for TPUs call it before ``ts.tpu.experimental.initialize_tpu_system``, as in tf.

    Args:
        cluster_spec_or_resolver: the cluster.
        job_name: without meaning here, as the following ones: a process's task is its resolver's business.
        task_index: see above.
        protocol: see above.
        make_master_device_default: see above.
        cluster_device_filters: see above.

    Raises:
        TypeError: ``cluster_spec_or_resolver`` is neither.
        UnimplementedError: the resolver is one of a TPU that is not this host's.

    Example:
        >>> ts.config.experimental_connect_to_cluster(ts.cluster_resolver.TPUClusterResolver("local"))
    """
    if isinstance(cluster_spec_or_resolver, TPUClusterResolver):
        cluster_spec_or_resolver.check_local("experimental_connect_to_cluster")
    elif not isinstance(cluster_spec_or_resolver, (ClusterSpec, ClusterResolver)):
        raise TypeError(
            "`cluster_spec_or_resolver` must be a `ClusterSpec` or a `ClusterResolver`. Received: "
            f"{type(cluster_spec_or_resolver).__name__}"
        )


def _devices(device_type: str | None) -> list[tuple[str, int]]:
    """Return types in tf's spelling and indices."""
    if device_type is not None and not isinstance(device_type, str):
        raise TypeError(f"device_type must be a string such as 'GPU', or None. Received: {device_type!r}")
    *accelerators, cpu = visible_devices()
    tpu = system.current()
    accelerators += [] if tpu is None else [f"xla:{index}" for index in range(tpu.runtime.num_local_devices)]
    found = [full_device_name(torch.device(name)).split(":")[-2:] for name in (cpu, *accelerators)]
    return [(kind, int(index)) for kind, index in found if device_type is None or kind == device_type.upper()]
