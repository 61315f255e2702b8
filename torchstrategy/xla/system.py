"""The TPU system of this process: whether it is initialised, and what would lose its state if it were once more.

XLA itself starts once in a process and ends with it. What tf programs rely on is the order of calls, so that is kept.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchstrategy.base.log import logger
from torchstrategy.errors import NotFoundError
from torchstrategy.xla.runtime import TpuRuntime, get_runtime
from torchstrategy.xla.topology import Topology

__all__ = ["TpuSystem", "current", "initialize", "require_initialized", "shutdown"]

_MAX_NAMED = 5


def describe_living(users: Iterable[object] = ()) -> str:
    """Name the modules, optimizers and other tensors that live on XLA devices.

    Args:
        users: objects to name besides, such as strategies.

    Returns:
        For example ``"TPUStrategy, Linear (module), 2 x tensor of shape (3,)"``; an empty string if there is nothing.
    """
    gc.collect()  # what was deleted may wait in a cycle
    with torch._C.DisableTorchFunctionSubclass():  # some tensors stand for others
        objects = gc.get_objects()
        modules = _outermost([m for m in objects if issubclass(type(m), nn.Module) and any(map(_is_here, _held_by(m)))])
        optimizers = [o for o in objects if issubclass(type(o), Optimizer) and any(map(_is_here, _state_of(o)))]
        tensors = [t for t in objects if issubclass(type(t), Tensor) and _is_here(t)]
        inside = {id(tensor) for module in modules for tensor in _held_by(module)}
        inside |= {id(tensor) for optimizer in optimizers for tensor in _state_of(optimizer)}
        names = [
            *(type(user).__name__ for user in users),
            *(f"{type(module).__name__} (module)" for module in modules),
            *(f"{type(optimizer).__name__} (optimizer)" for optimizer in optimizers),
            *(f"tensor of shape {tuple(tensor.shape)}" for tensor in tensors if id(tensor) not in inside),
        ]
    named = [name if count == 1 else f"{count} x {name}" for name, count in Counter(names).items()]
    return ", ".join(named[:_MAX_NAMED]) + (f", and {len(named) - _MAX_NAMED} more" if named[_MAX_NAMED:] else "")


def _is_here(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type == "xla"


def _held_by(module: nn.Module) -> Iterator[object]:
    """Yield the tensors of a module and of those in it; ``parameters()`` may be the user's own."""
    for part in nn.Module.modules(module):
        for tensor in (*part._parameters.values(), *part._buffers.values()):
            yield tensor
            yield getattr(tensor, "grad", None) if isinstance(tensor, Tensor) and tensor.is_leaf else None


def _state_of(optimizer: Optimizer) -> Iterator[object]:
    for state in optimizer.state.values():
        yield from state.values() if isinstance(state, dict) else ()
    for group in optimizer.param_groups:
        yield from group["params"]


def _outermost(modules: list[nn.Module]) -> list[nn.Module]:
    inner = {id(part) for module in modules for part in nn.Module.modules(module) if part is not module}
    return [module for module in modules if id(module) not in inner]


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
