"""What strategies need of devices that XLA compiles for; an adapter for each backend has it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["TpuRuntime"]


class TpuRuntime(Protocol):
    """What strategies need of an XLA backend.

    Values are *shared* (one value, held by all devices, or split over them) or *local* (each replica's own, inside a
    replica function that is traced once for all replicas).
    """

    #: For messages, such as ``"torch_xla 2.9.0"``.
    name: str

    #: Whether the environment names the hardware, so that virtual devices are meant and not what is left without a TPU.
    is_requested: bool

    def start(
        self,
        *,
        spmd: bool,
        local_rank: int = 0,
        local_size: int = 1,
        num_processes: int = 1,
        cache_path: str | Path | None = None,
    ) -> None:
        """Do what must precede the first tensor on a device, and the first backward pass; once.

        Args:
            spmd: whether this process drives all its devices, instead of one.
            local_rank: with one process for each device, this one's number on its host.
            local_size: with one process for each device, processes on this host.
            num_processes: with one process for each device, processes of the job.
            cache_path: a folder for compiled programs that later runs take from there.

        Raises:
            RuntimeError: it is too late for that, or the devices don't fit to it.
        """

    @property
    def is_started(self) -> bool:
        """Whether ``start`` was called."""

    @property
    def is_spmd(self) -> bool:
        """Whether it was started for all devices of this process."""

    @property
    def device(self) -> torch.device:
        """What tensors of this process report as their device."""

    @property
    def hardware(self) -> str:
        """``"TPU"``, or ``"CPU"`` for virtual devices."""

    @property
    def num_devices(self) -> int:
        """Devices of all processes that XLA knows of."""

    @property
    def num_local_devices(self) -> int:
        """Devices that this process drives."""

    @property
    def process_index(self) -> int:
        """This process's place among those of the job."""

    @property
    def process_count(self) -> int:
        """Processes that XLA knows of."""

    def count_devices(self) -> tuple[int, int]:
        """Return the devices of all hosts, and of this one; nothing is started for that."""

    def device_coordinates(self) -> list[list[int]]:
        """Return where each device is, in the order of replicas: ``[x, y, z, core]``."""

    # One process for all its devices

    def enter(self, value: Tensor, *, split: bool) -> Tensor:
        """Return what each replica sees of a shared value: its rows of it, or all of it.

        Args:
            value: on the device; ``[num_devices * k, ...]`` with ``split``.
            split: divide the first dimension between the replicas.

        Raises:
            ValueError: the first dimension can't be divided.
        """

    def stack(self, value: Tensor) -> Tensor:
        """Return the replicas' local values ``[...]`` as one shared value ``[num_devices, ...]``, without gradient."""

    def assign(self, target: Tensor, value: Tensor) -> None:
        """Let a tensor hold another one's value, and forget how its own was divided."""

    def replicate(self, value: Tensor) -> Tensor:
        """Let every device hold all of a shared value; returns the same tensor."""

    def split(self, value: Tensor, partition: Sequence[int]) -> Tensor:
        """Divide a shared value over the devices, so that they share in what is computed of it.

        Args:
            value: on the device; gradients flow through.
            partition: parts in each dimension. If their product is less than the devices, several hold each part.

        Returns:
            The same value, split.

        Raises:
            ValueError: there is not one number for each dimension, or the devices can't be shared out so.
        """

    def place(self, value: Tensor, index: int) -> Tensor:
        """Return a shared value that is asked to be on one device; torch_xla has it on all, which changes no result.

        Raises:
            ValueError: there is no such device.
        """

    def upload(self, parts: Sequence[Tensor]) -> Tensor:
        """Send one host tensor ``[k, ...]`` for each local replica; returns a shared value that is split, at once.

        Raises:
            ValueError: there is not one part for each device of this process, or they differ in shape or dtype.
        """

    def rows(self, stacked: Tensor) -> list[Tensor]:
        """Return host copies of the replicas' rows of a shared value, for the replicas of this process; waits.

        The first dimension is divided between the replicas, wherever the compiler has put the value. One that was
        traced only makes it sync.

        Args:
            stacked: ``[num_devices * k, ...]``.

        Raises:
            ValueError: the first dimension can't be divided.
        """

    # One process for each device

    @property
    def ordinal(self) -> int:
        """This device's row in ``gather_over_devices``; it need not be the process's rank."""

    @property
    def connects_processes(self) -> bool:
        """Whether XLA knows all processes of the job; those with virtual devices it does not."""

    def sum_over_devices(self, value: Tensor) -> None:
        """Replace a value by the sum of all devices' values; all processes must run the same graph.

        Raises:
            RuntimeError: XLA does not connect this job's processes, or one of them drives several devices.
        """

    def gather_over_devices(self, value: Tensor) -> Tensor:
        """Return all devices' values ``[...]`` as ``[num_devices, ...]``, in the order of ordinals.

        Raises:
            RuntimeError: XLA does not connect this job's processes, or one of them drives several devices.
        """

    # Both

    def sync(self, *, wait: bool = False) -> None:
        """Run what was traced.

        Args:
            wait: until it has run.
        """

    def num_compilations(self) -> int:
        """How many graphs were compiled so far."""

    def set_seed(self, seed: int) -> None:
        """Seed the device's random numbers."""

    def get_seed(self) -> int:
        """Return the seed with which ``set_seed`` makes the device draw again what it will draw next."""

    def shutdown(self) -> None:
        """Finish what is under way; XLA itself ends with the process."""
