"""Replica devices: tf-style and torch-style names, the devices that are there, and where replicas live.

``cpu:1`` is a label: torch has one CPU device, and its tensors say ``cpu``. A replica's device is therefore a
``torch.device`` that is kept beside the tensors, never read from them.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = [
    "Placement",
    "accelerator_module",
    "canonical_device",
    "cpu_replicas",
    "full_device_name",
    "local_devices",
    "tensor_device",
    "visible_devices",
]

_TF_NAME = re.compile(r"^(?:/job:[^/]+)?(?:/replica:\d+)?(?:/task:\d+)?/?(?:device:)?([A-Za-z]+)(?::(\d+|\*))?$")
_TYPES = {"gpu": "cuda", "cuda": "cuda", "cpu": "cpu", "xla": "xla", "tpu": "xla", "mps": "mps", "xpu": "xpu"}
_instead: list[int] = []


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
    kind = _kind(match[1]) if match else None
    if match is None or kind is None:
        raise ValueError(
            f"Can't read the device name {name!r}. Expected names such as 'cuda:0', '/gpu:0', 'GPU:0', 'cpu:1' or "
            f"'/job:localhost/replica:0/task:0/device:GPU:0'. Visible devices: {', '.join(visible_devices())}"
        )
    index = 0 if match[2] in (None, "*") else int(match[2])
    if kind != "cpu":
        _check_present(kind, index, str(name))
    return torch.device(kind, index)


def local_devices(devices: Sequence[str | torch.device] | int | None) -> tuple[torch.device, ...]:
    """Return a mirrored strategy's devices.

    Args:
        devices: a list of devices; ``None`` means all visible GPUs, or one CPU; a number means so many GPUs, or CPU
            replicas where there is none.

    Raises:
        ValueError: the list is empty or names a device twice, or there are not so many GPUs.
        TypeError: it is none of these.
    """
    if _instead:
        return tuple(torch.device("cpu", index) for index in range(_instead[-1]))
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
        example = [str(devices)] if isinstance(devices, (str, torch.device)) else ["cpu:0", "cpu:1"]
        raise TypeError(f"devices must be a list of devices, such as {example}, or a number. Received: {devices!r}")
    result = tuple(canonical_device(device) for device in devices)
    if not result:
        raise ValueError("devices must name at least one device. Pass None to use all visible GPUs.")
    if len(set(result)) < len(result):
        raise ValueError(f"devices must not name a device twice. Received: {[str(d) for d in result]}")
    return result


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
    accelerators = []
    if torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is not None:
            accelerators = [f"{accelerator.type}:{i}" for i in range(torch.accelerator.device_count())]
    return [*accelerators, "cpu:0"]


def accelerator_module(device: torch.device) -> Any:
    """Return ``torch.cuda`` or its like: the streams, generators and current device of a kind of accelerators.

    ``None`` for the CPU, and for kinds that have no streams in torch, such as XLA's devices.
    """
    module = None if device.type == "cpu" else getattr(torch, device.type, None)
    return module if hasattr(module, "Stream") else None


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
    kind = {"cuda": "GPU", "xla": "TPU"}.get(device.type, device.type.upper())
    return f"/job:{job}/replica:0/task:{task}/device:{kind}:{device.index or 0}"


def _kind(word: str) -> str | None:
    """Return torch's type of device for a word; besides those that have names in tf, it is the one that torch has."""
    known = _TYPES.get(word.lower())
    accelerator = None if known else torch.accelerator.current_accelerator()
    return accelerator.type if accelerator is not None and word.lower() == accelerator.type else known


def _check_present(kind: str, index: int, name: str) -> None:
    if kind == "xla":  # torch_xla is asked only by TPUStrategy: touching it starts its runtime
        return
    visible = visible_devices()
    if f"{kind}:{index}" not in visible:
        raise ValueError(
            f"Device {name!r} is not there. Visible devices: {', '.join(visible)} (any cpu index is allowed). "
            "Check CUDA_VISIBLE_DEVICES, or name CPU replicas: devices=['cpu:0', 'cpu:1']."
        )
