"""Communication between processes that users bring: algorithms of their own, and c10d backends."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from torchstrategy.base.options import register_implementation_name
from torchstrategy.collectives.backends import C10dBackend, DataBackend

__all__ = ["Factory", "make_registered_backend", "register_communication"]

Factory = Callable[[Store, int, int, timedelta], Any]

_OPERATIONS = ("start_sum", "start_all_gather", "start_broadcast")
_C10D_OPERATIONS = ("allreduce", "allgather", "broadcast")
_factories: dict[str, Factory] = {}


def register_communication(name: str, factory: Factory) -> None:
    """Give a way of communication between processes a name, for ``CommunicationOptions(implementation=name)``.

    It then carries the data of all collectives between the processes of a strategy: tensors on whatever device the
    replicas have. The library's own checks come first, over its own connections: when an operation starts, all ranks
    are in it with equal shapes and dtypes.

    Args:
        name: any name but ``auto``, ``ring`` and ``nccl``; letter case does not count. Register it on every process.
        factory: called as ``factory(store, rank, size, timeout)`` when a strategy is made, with a store of the
            strategy's own, in which the processes can find each other, and a ``datetime.timedelta``. It returns a c10d
            process group, as creators of ``torch.distributed.Backend.register_backend`` do, or an object with three
            methods:

            - ``start_sum(tensor)`` replaces a contiguous tensor by its sum over ranks; every rank must get the same
              bits, or the replicas drift apart;
            - ``start_all_gather(outputs, tensor)`` copies the tensor of each rank to its place in the list; ``uint8``;
            - ``start_broadcast(tensor)`` overwrites a ``uint8`` tensor with rank 0's.

            Each returns a function ``wait(check)``, which returns when the result is there. It calls ``check()`` first
            and then at least once a second while it waits, and lets pass what that raises: another rank has failed, or
            the time is up. A broken connection is a ``ConnectionError``.

    Raises:
        ValueError: the name is taken or empty.
        TypeError: ``name`` is no string, or ``factory`` can't be called.

    Example:
        >>> import torch.distributed as dist
        >>> ts.experimental.register_communication("plain-gloo", dist.ProcessGroupGloo)
        >>> ts.experimental.CommunicationOptions(implementation="plain-gloo").implementation
        'plain-gloo'
    """
    if not callable(factory):
        raise TypeError(f"factory must be callable as factory(store, rank, size, timeout). Received: {factory!r}")
    if isinstance(name, str) and name.lower() in _factories:
        raise ValueError(f"The name {name!r} is taken. Taken are: {', '.join(sorted(_factories))}.")
    _factories[register_implementation_name(name)] = factory


def make_registered_backend(name: str, store: Store, rank: int, size: int, timeout: timedelta) -> DataBackend:
    """Make a registered communication.

    Raises:
        ValueError: nothing is registered under the name.
        RuntimeError: its factory failed.
        TypeError: what it returned lacks an operation.
    """
    factory = _factories.get(name.lower())
    if factory is None:
        raise ValueError(
            f"No communication is registered as {name!r} in this process. Registered are: "
            f"{', '.join(sorted(_factories)) or 'none'}. Every process must call "
            "ts.experimental.register_communication."
        )
    try:
        made = factory(store, rank, size, timeout)
    except Exception as error:
        raise RuntimeError(
            f"The factory of the communication {name!r} failed on rank {rank}: {type(error).__name__}: {error}"
        ) from error
    if all(callable(getattr(made, operation, None)) for operation in _C10D_OPERATIONS):
        return C10dBackend(made, name)
    lacking = [operation for operation in _OPERATIONS if not callable(getattr(made, operation, None))]
    if lacking:
        raise TypeError(
            f"The factory of the communication {name!r} returned {made!r}, which is no c10d process group (with "
            f"{', '.join(_C10D_OPERATIONS)}) and lacks {', '.join(lacking)}."
        )
    return made  # type: ignore[no-any-return]
