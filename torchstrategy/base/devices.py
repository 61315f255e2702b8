"""Replica devices: what each kind of device can do, names of tf's and torch's style, and where replicas live.

No other module of the core compares a device's type with a name: it asks ``kind_of`` for what it needs.

``cpu:1`` is a label: torch has one CPU device, and its tensors say ``cpu``. A replica's device is therefore a
``torch.device`` that is kept beside the tensors, never read from them.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from torchstrategy.base.job import Job
from torchstrategy.base.log import logger
from torchstrategy.base.names import lines_of_ranks

__all__ = [
    "DeviceKind",
    "Placement",
    "accelerator_module",
    "accelerator_type",
    "canonical_device",
    "check_alike",
    "cpu_replicas",
    "devices_of_process",
    "full_device_name",
    "is_capturing",
    "kind_of",
    "local_devices",
    "names_for_log",
    "tensor_device",
    "visible_devices",
]

_TF_NAME = re.compile(r"^(?:/job:[^/]+)?(?:/replica:\d+)?(?:/task:\d+)?/?(?:device:)?([A-Za-z]+)(?::(\d+|\*))?$")
_ALIASES = {"gpu": "cuda"}
_instead: list[int] = []


@dataclass(frozen=True)
class DeviceKind:
    """What torch, and this library with it, can do on one type of device.

    Args:
        type: torch's name of it.
        tf_name: tf's; empty means torch's in capitals.
        collectives: the backend of ``torch.distributed`` that moves its tensors between processes; empty means that
            torch's table of backends says it, where anyone has registered one.
        is_read_by_gloo: whether gloo takes its tensors as they are.
        has_streams: whether copies can run beside the computation, on streams of the device's module in torch.
        pins_memory: whether such copies need pinned memory of the host.
        one_per_process: whether a process can use one device only.
        has_storages: whether a tensor's memory can be asked for its uses, and written to where there is but one.
        has_views: whether a view of a tensor, also of its bits, is the same memory.
        has_search: whether there is ``torch.searchsorted``.
        has_float64: whether there is double precision.
        has_batch_norm_statistics: whether there is ``torch.batch_norm_update_stats``.
        has_fused_steps: whether fused Adam computes what Adam does, and sooner.
        is_traced: whether a replica function is recorded and compiled for all replicas, so that no value can be looked
            at meanwhile.
        is_compiled: whether ``ts.function`` compiles there unless it is told not to.
        early_bytes: upper sizes in bytes of the first bucket of gradients that is summed during ``backward``, and of
            the others. Fast links of accelerators are idle for most of a small sum; a small first one begins soon.
    """

    type: str
    tf_name: str = ""
    collectives: str = ""
    is_read_by_gloo: bool = False
    has_streams: bool = False
    pins_memory: bool = False
    one_per_process: bool = False
    has_storages: bool = True
    has_views: bool = True
    has_search: bool = True
    has_float64: bool = True
    has_batch_norm_statistics: bool = False
    has_fused_steps: bool = False
    is_traced: bool = False
    is_compiled: bool = False
    early_bytes: tuple[int, int] = (1 << 20, 64 << 20)

    @property
    def module(self) -> Any:
        """``torch.cuda`` or its like; ``None`` where torch has no such module."""
        return getattr(torch, self.type, None)

    @property
    def native_backend(self) -> str:
        """The backend of ``torch.distributed`` for the kind's tensors, if it is there; else an empty string."""
        is_there = {"nccl": dist.is_nccl_available, "xccl": dist.is_xccl_available}
        name = self.collectives or dist.Backend.default_device_backend_map.get(self.type, "")
        if self.type == "cpu" or self.is_traced or name in ("", "gloo", "fake", "mpi", "ucc"):
            return ""
        known = is_there[name]() if name in is_there else name.upper() in dist.Backend._plugins
        return name if known else ""


_KINDS = {
    kind.type: kind
    for kind in (
        DeviceKind("cpu", has_batch_norm_statistics=True, has_fused_steps=True, early_bytes=(4 << 20, 4 << 20)),
        DeviceKind(
            "cuda", "GPU", "nccl", is_read_by_gloo=True, has_streams=True, pins_memory=True,
            has_batch_norm_statistics=True, has_fused_steps=True, is_compiled=True,
        ),
        DeviceKind("xpu", collectives="xccl", has_streams=True, pins_memory=True, is_compiled=True),
        DeviceKind("mps", has_storages=False, has_float64=False),
        # torch_xla's
        DeviceKind("xla", "TPU", has_storages=False, has_views=False, has_search=False, is_traced=True),
        # torch_tpu's: its streams are experimental, and a process is bound to one chip. Nothing of it has run on one.
        DeviceKind("tpu", collectives="tpu_dist", one_per_process=True, has_storages=False),
        DeviceKind("meta", has_storages=False),
    )
}  # fmt: skip


def kind_of(device: torch.device | str) -> DeviceKind:
    """Return what a device can do; of a kind that the table lacks, what its module in torch shows.

    Args:
        device: a device, or torch's name of its type.

    Example:
        >>> from torchstrategy.base.devices import kind_of
        >>> kind_of("cuda").tf_name, kind_of(torch.device("cpu")).is_traced
        ('GPU', False)
    """
    type_ = device if isinstance(device, str) else device.type
    return _KINDS.get(type_) or _unknown_kind(type_)


@functools.cache
def _unknown_kind(type_: str) -> DeviceKind:
    module = getattr(torch, type_, None)
    has_streams = all(hasattr(module, name) for name in ("Stream", "stream", "current_stream"))
    return DeviceKind(type_, has_streams=has_streams, pins_memory=has_streams and _can_pin())


def _can_pin() -> bool:
    try:
        return torch.empty(1, device="cpu", pin_memory=True).is_pinned()
    except (RuntimeError, NotImplementedError):
        return False


def accelerator_type() -> str:
    """Return the type of the accelerator that torch can use here; an empty string if there is none."""
    if not torch.accelerator.is_available():
        return ""
    accelerator = torch.accelerator.current_accelerator()
    return "" if accelerator is None else accelerator.type


def is_capturing(device_type: str | None = None) -> bool:
    """Say whether the accelerator's work on this thread is being captured as a graph, not done.

    Args:
        device_type: of the accelerator; ``None`` means the one that is there.
    """
    module = kind_of(device_type or accelerator_type() or "cuda").module
    asks = getattr(module, "is_current_stream_capturing", None)
    return asks is not None and bool(module.is_initialized() and asks())


@dataclass(frozen=True)
class Placement:
    """Which of a strategy's replicas this process hosts.

    Args:
        num_replicas: replicas in sync over all processes.
        first_replica: id of this process's first replica.
        devices: one device for each copy of the model in this process, in the order of the replicas' ids.
        replicas_per_copy: how many replicas of this process one copy of the model serves: all of them where XLA
            compiles one program for several devices.
    """

    num_replicas: int
    first_replica: int
    devices: tuple[torch.device, ...]
    replicas_per_copy: int = 1
    #: Replicas of this process.
    num_local: int = field(init=False, compare=False, repr=False)
    #: Their ids.
    local_replica_ids: range = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        num_local = len(self.devices) * self.replicas_per_copy
        object.__setattr__(self, "num_local", num_local)
        object.__setattr__(self, "local_replica_ids", range(self.first_replica, self.first_replica + num_local))

    def name_of(self, local_id: int) -> str:
        """Return what to call a local replica in messages."""
        return f"replica {self.first_replica + local_id} on {self.devices[local_id]}"

    def __str__(self) -> str:
        replicas = f"{self.num_replicas} replica{'' if self.num_replicas == 1 else 's'}"
        here = "" if self.num_local == self.num_replicas else f", {self.num_local}"
        return f"{replicas}{here} on {', '.join(map(str, self.devices))}"


def canonical_device(name: str | torch.device) -> torch.device:
    """Return the device for a tf-style or torch-style name.

    Args:
        name: for example ``"/gpu:0"``, ``"GPU:1"``, ``"cuda:0"``, ``"cpu:1"``,
            ``"/job:localhost/replica:0/task:0/device:GPU:0"``, or a ``torch.device``.

    Returns:
        A ``torch.device`` with an index.

    Raises:
        ValueError: the name can't be read, or no such device is there; the message lists the visible ones.

    Example:
        >>> from torchstrategy.base.devices import canonical_device
        >>> canonical_device("/job:localhost/replica:0/task:0/device:CPU:1")
        device(type='cpu', index=1)
    """
    if not isinstance(name, (str, torch.device)):
        raise TypeError(f"A device must be a string or a torch.device, such as 'cuda:0' or 'cpu:1'. Received: {name!r}")
    match = _TF_NAME.match(str(name))
    kind = _type_named(match[1].lower()) if match else None
    if match is None or kind is None:
        raise ValueError(
            f"Can't read the device name {name!r}. Expected names such as 'cuda:0', '/gpu:0', 'GPU:0', 'cpu:1' or "
            f"'/job:localhost/replica:0/task:0/device:GPU:0'. Visible devices: {', '.join(visible_devices())}"
        )
    index = 0 if match[2] in (None, "*") else int(match[2])
    if kind != "cpu":
        _check_present(kind, index, str(name))
    return torch.device(kind, index)


def _type_named(name: str) -> str | None:
    """Return torch's name of a type of device; ``None`` if nothing here is called so."""
    if name == "tpu" and torch._C._get_privateuse1_backend_name() != "tpu":  # which torch_tpu has renamed
        return "xla"
    name = _ALIASES.get(name, name)
    return name if (name in _KINDS and name != "meta") or name == accelerator_type() else None


def local_devices(devices: Sequence[str | torch.device] | int | None) -> tuple[torch.device, ...]:
    """Return a mirrored strategy's devices.

    Args:
        devices: a list of devices; ``None`` means all visible GPUs, or one CPU; a number means so many GPUs, or CPU
            replicas where there is none.

    Raises:
        ValueError: the list is empty or names a device twice, or there are not so many GPUs, or more than a process
            can use.
        TypeError: it is none of these.
    """
    if _instead:
        return tuple(torch.device("cpu", index) for index in range(_instead[-1]))
    found = _local_devices(devices)
    if len(found) > 1 and kind_of(found[0]).one_per_process:
        raise ValueError(
            f"A process can use one device of the type {found[0].type!r} only, and here are {len(found)}: "
            f"{', '.join(map(str, found))}. Start one for each: torchrun --nproc-per-node={len(found)} program.py. Or "
            f"name one: devices=['{found[0]}']."
        )
    return found


def _local_devices(devices: Sequence[str | torch.device] | int | None) -> tuple[torch.device, ...]:
    accelerators = tuple(torch.device(device) for device in visible_devices() if not device.startswith("cpu"))
    if devices is None:
        return accelerators or (torch.device("cpu", 0),)
    if isinstance(devices, int) and not isinstance(devices, bool):
        found = accelerators or tuple(torch.device("cpu", index) for index in range(devices))
        if not 1 <= devices <= len(found):
            there = f", of which {len(accelerators)} are visible" if accelerators else ""
            raise ValueError(f"devices must be a list of devices, or their number{there}. Received: {devices}")
        return found[:devices]
    if isinstance(devices, (str, torch.device)) or not isinstance(devices, Iterable):
        example = str(devices).split(",") if isinstance(devices, (str, torch.device)) else ["cpu:0", "cpu:1"]
        raise TypeError(f"devices must be a list of devices, such as {example}, or a number. Received: {devices!r}")
    result = tuple(canonical_device(device) for device in devices)
    if not result:
        raise ValueError("devices must name at least one device. Pass None to use all visible GPUs.")
    if len(set(result)) < len(result):
        raise ValueError(f"devices must not name a device twice. Received: {[str(d) for d in result]}")
    return result


def devices_of_process(devices: Sequence[str | torch.device] | int | None, job: Job | None) -> tuple[torch.device, ...]:
    """Return the devices of this process's replicas.

    Args:
        devices: the user's choice; ``None`` means the accelerator of the process's number on its host where the
            launcher gives one, else all visible accelerators, else one CPU replica.
        job: the processes, ``None`` if there is one.

    Raises:
        ValueError: a device is not there, or named twice.
        RuntimeError: the launcher started more processes on this host than there are accelerators.
    """
    if devices is not None or job is None or job.local_rank is None:
        return local_devices(devices)
    accelerators = [name for name in visible_devices() if not name.startswith("cpu")]
    if not accelerators:
        return (torch.device("cpu", 0),)
    if job.source == "SLURM" and job.local_size == 1:
        return local_devices(None)
    if job.local_rank >= len(accelerators):
        raise RuntimeError(
            f"{job.source} started {job.local_size} processes on this host, but only {len(accelerators)} accelerators "
            f"are visible: {', '.join(accelerators)}. Start at most that many, or pass devices=['cpu:0']."
        )
    return (torch.device(accelerators[job.local_rank]),)


def check_alike(brought: Sequence[Sequence[str]]) -> None:
    """Check that processes bring as many devices, of the same kinds.

    Args:
        brought: the names of each one's devices, in the order of ranks.

    Raises:
        RuntimeError: they don't.
    """
    kinds = [[device.split(":")[0] for device in row] for row in brought]
    if any(row != kinds[0] for row in kinds):
        raise RuntimeError("Every process must bring as many devices, of the same kinds:\n" + lines_of_ranks(brought))


@contextlib.contextmanager
def cpu_replicas(number: int) -> Iterator[None]:
    """Give mirrored strategies that are made meanwhile so many CPU replicas in a process, whatever they ask for.

    For programs that are verified as they are.
    """
    _instead.append(number)
    try:
        yield
    finally:
        _instead.pop()


def visible_devices() -> list[str]:
    """Return the names of the devices that torch can use here; ``cpu:0`` stands for any number of CPU replicas."""
    type_ = accelerator_type()
    accelerators = [f"{type_}:{i}" for i in range(torch.accelerator.device_count())] if type_ else []
    return [*accelerators, "cpu:0"]


def accelerator_module(device: torch.device) -> Any:
    """Return ``torch.cuda`` or its like: the streams, generators and current device of a kind of accelerators.

    ``None`` for the CPU, and for kinds that have no streams in torch, such as XLA's devices.
    """
    kind = kind_of(device)
    return kind.module if kind.has_streams else None


def tensor_device(device: torch.device) -> torch.device:
    """Return the device that tensors of this replica report: ``cpu`` for every CPU replica."""
    return torch.device("cpu") if device.type == "cpu" else device


def full_device_name(device: torch.device, job: str = "localhost", task: int = 0) -> str:
    """Return tf's full name, as in the guides' INFO lines.

    Args:
        device: a replica's device.
        job: the process's job in the cluster.
        task: its index there.
    """
    kind = kind_of(device).tf_name or device.type.upper()
    return f"/job:{job}/replica:0/task:{task}/device:{kind}:{device.index or 0}"


def names_for_log(devices: Sequence[torch.device], job: str = "localhost", task: int = 0) -> str:
    """Return torch's names of devices for a line of the log, before which tf's are logged in debug."""
    logger.debug("In tf's names: %s", ", ".join(full_device_name(device, job, task) for device in devices))
    return ", ".join(map(str, devices))


def _check_present(kind: str, index: int, name: str) -> None:
    if kind_of(kind).is_traced:  # torch_xla is asked only by TPUStrategy: touching it starts its runtime
        return
    visible = visible_devices()
    if f"{kind}:{index}" not in visible:
        raise ValueError(
            f"Device {name!r} is not there. Visible devices: {', '.join(visible)} (any cpu index is allowed). "
            "Check CUDA_VISIBLE_DEVICES, or name CPU replicas: devices=['cpu:0', 'cpu:1']."
        )
