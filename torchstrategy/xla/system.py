"""The TPU system of this process: whether it is initialised, and what would lose its state if it were once more.

XLA itself starts once in a process and ends with it. What tf programs rely on is the order of calls, so that is kept.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from pathlib import Path

from torchstrategy.base.log import logger
from torchstrategy.errors import NotFoundError
from torchstrategy.xla.holders import describe_living
from torchstrategy.xla.runtime import TpuRuntime, get_runtime
from torchstrategy.xla.topology import Topology

__all__ = ["TpuSystem", "current", "initialize", "require_initialized", "shutdown"]

_ORDER = (
    "The order of calls is: resolver = ts.cluster_resolver.TPUClusterResolver('local'); "
    "ts.config.experimental_connect_to_cluster(resolver); ts.tpu.experimental.initialize_tpu_system(resolver); "
    "strategy = ts.TPUStrategy(resolver)."
)


@dataclass(frozen=True, eq=False)
class TpuSystem:
    """An initialised TPU system.

    Args:
        runtime: its devices.
        topology: where they are.
    """

    runtime: TpuRuntime
    topology: Topology

    def check(self) -> None:
        """See that it was not shut down meanwhile.

        Raises:
            RuntimeError: it was.
        """
        if _current is not self:
            raise RuntimeError(
                "The TPU system that this strategy was made for was shut down. Make the strategy, the model and the "
                f"optimizer anew. {_ORDER}"
            )

    def register(self, user: object) -> None:
        """Remember who relies on the system, such as a strategy, for as long as it lives."""
        _users.add(user)


_current: TpuSystem | None = None
_users: weakref.WeakSet[object] = weakref.WeakSet()


def current() -> TpuSystem | None:
    """Return the system; ``None`` before it is initialised and after it was shut down."""
    return _current


def require_initialized() -> TpuSystem:
    """Return the system.

    Raises:
        RuntimeError: it is not initialised; the message has the order of calls.
    """
    if _current is None:
        raise RuntimeError(f"The TPU system is not initialised. {_ORDER}")
    return _current


def initialize(
    *,
    spmd: bool,
    local_rank: int = 0,
    local_size: int = 1,
    num_processes: int = 1,
    cache_path: str | Path | None = None,
) -> TpuSystem:
    """Start the devices of this process.

    Args:
        spmd: whether this process drives all its devices, instead of one.
        local_rank: with one process for each device, this one's number on its host.
        local_size: with one process for each device, processes on this host.
        num_processes: with one process for each device, processes of the job.
        cache_path: a folder for compiled programs.

    Raises:
        ImportError: torch_xla is not installed, or does not fit to torch.
        NotFoundError: this host has no TPU, and no virtual devices are asked for.
        RuntimeError: something lives on the devices, or they can't be started so any more.
    """
    global _current
    runtime = get_runtime()
    if not runtime.is_requested:
        raise NotFoundError(
            f"This host has no TPU that {runtime.name} can use. On a TPU's host see whether libtpu is installed (pip "
            "install 'torchstrategy[tpu]') and no other process holds the TPU. For virtual devices set PJRT_DEVICE=CPU "
            "and CPU_NUM_DEVICES=4 before the program starts."
        )
    holders = describe_living(_users)
    if holders:
        raise RuntimeError(
            "The TPU system must be initialised before anything lives on its devices, because that would be lost. Now "
            f"these do: {holders}. Call ts.tpu.experimental.initialize_tpu_system once, at the program's start; or "
            f"delete them before. {_ORDER}"
        )
    if _current is not None:
        logger.warning("The TPU system was initialised before. Initialising it again starts nothing anew.")
    runtime.start(
        spmd=spmd, local_rank=local_rank, local_size=local_size, num_processes=num_processes, cache_path=cache_path
    )
    _current = TpuSystem(runtime, _topology_of(runtime))
    return _current


def shutdown() -> None:
    """Finish what the devices are doing; strategies that were made for them can't run any more.

    What still lives on the devices is named in a warning: its memory is not freed.

    Raises:
        RuntimeError: the system is not initialised.
    """
    global _current
    system = require_initialized()
    _current = None
    system.runtime.shutdown()
    holders = describe_living(_users)
    _users.clear()
    if holders:
        logger.warning("The TPU system was shut down. What still lives on its devices keeps their memory: %s", holders)


def _topology_of(runtime: TpuRuntime) -> Topology:
    coordinates = runtime.device_coordinates()
    mesh_shape = [max(place[axis] for place in coordinates) + 1 for axis in range(len(coordinates[0]))]
    num_local = max(1, len(coordinates) // max(1, runtime.process_count))
    tasks = [coordinates[start : start + num_local] for start in range(0, len(coordinates), num_local)]
    return Topology(mesh_shape, tasks)
