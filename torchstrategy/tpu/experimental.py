"""``ts.tpu.experimental``: initialising a TPU, and where its devices are."""

from __future__ import annotations

from pathlib import Path

from torchstrategy.base import later
from torchstrategy.base.log import logger, show_info
from torchstrategy.cluster_resolver.tpu import TPUClusterResolver, TPUSystemMetadata, initialize_system
from torchstrategy.xla import system
from torchstrategy.xla.topology import DeviceAssignment, Topology

__all__ = [
    "DeviceAssignment",
    "TPUSystemMetadata",
    "Topology",
    "initialize_tpu_system",
    "shutdown_tpu_system",
]

later.explain_absent(__name__)


def initialize_tpu_system(
    cluster_resolver: TPUClusterResolver | None = None, *, cache_path: str | Path | None = None
) -> Topology:
    """Start the devices of this host's TPU; before any tensor is on them, and before ``ts.TPUStrategy``.

    Alone, a process drives all devices of its host. In a job of several processes (``torchrun``, ``TF_CONFIG``) each
    drives one. Without a TPU, ``PJRT_DEVICE=CPU`` and ``CPU_NUM_DEVICES=4`` in the environment make virtual devices.

    Args:
        cluster_resolver: where the TPU is; ``None`` means this host.
        cache_path: a folder where compiled programs are kept, so that the next run finds them; ``None`` means that of
            the variable ``TORCHSTRATEGY_XLA_CACHE``, if it is set. Each process of a job needs a folder of its own. Not
            in tf.

    Returns:
        Where the devices are.

    Raises:
        ImportError: torch_xla is not installed, or does not fit to torch.
        NotFoundError: this host has no TPU, and no virtual devices are asked for.
        RuntimeError: a strategy or tensors live on the devices, which would be lost; or torch_xla was used before.
        TypeError: ``cluster_resolver`` is another kind of resolver.
        UnimplementedError: the TPU is not this host's.

    Example:
        >>> resolver = ts.cluster_resolver.TPUClusterResolver("local")
        >>> ts.config.experimental_connect_to_cluster(resolver)
        >>> topology = ts.tpu.experimental.initialize_tpu_system(resolver)
        >>> len(ts.config.list_logical_devices("TPU")) == topology.num_tpus_per_task
        True
        >>> ts.tpu.experimental.shutdown_tpu_system(resolver)
    """
    resolver = _checked(cluster_resolver)
    topology = initialize_system(resolver, cache_path).topology
    show_info()
    runtime = system.require_initialized().runtime
    logger.info(
        "Initialised the TPU system: %d %s devices, %d of them here (%s)",
        runtime.num_devices, runtime.hardware, runtime.num_local_devices, runtime.name,
    )  # fmt: skip
    return topology


def shutdown_tpu_system(cluster_resolver: TPUClusterResolver | None = None) -> None:
    """Finish what the devices are doing and end the use of the TPU: strategies that were made for it raise from now on.

    XLA itself ends with the process. What still lives on the devices is named in a warning, as it keeps their memory.

    Args:
        cluster_resolver: as it was given to ``initialize_tpu_system``.

    Raises:
        RuntimeError: the system is not initialised.
        TypeError: ``cluster_resolver`` is another kind of resolver.
        UnimplementedError: the TPU is not this host's.

    Example:
        >>> resolver = ts.cluster_resolver.TPUClusterResolver("local")
        >>> topology = ts.tpu.experimental.initialize_tpu_system(resolver)
        >>> ts.tpu.experimental.shutdown_tpu_system(resolver)
    """
    _checked(cluster_resolver).check_local("shutdown_tpu_system")
    system.shutdown()


def _checked(resolver: TPUClusterResolver | None) -> TPUClusterResolver:
    if resolver is None:
        return TPUClusterResolver("local")
    if not isinstance(resolver, TPUClusterResolver):
        raise TypeError(
            f"cluster_resolver must be a ts.cluster_resolver.TPUClusterResolver. Received: {type(resolver).__name__}"
        )
    return resolver
