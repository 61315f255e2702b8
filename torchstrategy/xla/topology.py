"""Where the devices of a TPU are, and which of them make one replica."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["DeviceAssignment", "Topology"]

_RANK = 4


@dataclass(frozen=True)
class Topology:
    """The devices of a TPU, as ``tf.tpu.experimental.Topology``.

    Args:
        mesh_shape: how many devices there are in each direction: ``[x, y, z, core]``.
        device_coordinates: for each process its devices' coordinates, each ``[x, y, z, core]``.

    Raises:
        ValueError: a list has another form, or two devices have the same coordinates.

    Example:
        >>> topology = ts.tpu.experimental.Topology([2, 1, 1, 1], [[[0, 0, 0, 0], [1, 0, 0, 0]]])
        >>> topology.num_tasks, topology.num_tpus_per_task, topology.mesh_rank
        (1, 2, 4)
        >>> topology.tpu_device_name_at_coordinates([1, 0, 0, 0], job="localhost")
        '/job:localhost/task:0/device:TPU:1'
    """

    mesh_shape: Sequence[int]
    device_coordinates: Sequence[Sequence[Sequence[int]]]

    def __post_init__(self) -> None:
        if len(self.mesh_shape) != _RANK or any(size < 1 for size in self.mesh_shape):
            raise ValueError(f"`mesh_shape` must be a sequence of 4 positive entries. Received: {self.mesh_shape}")
        if len({len(devices) for devices in self.device_coordinates}) != 1:
            raise ValueError("`device_coordinates` must have equally many devices for each process, and at least one.")
        places = [tuple(place) for place in self._places]
        if any(
            len(place) != _RANK or not all(0 <= at < size for at, size in zip(place, self.mesh_shape, strict=True))
            for place in places
        ):
            raise ValueError(f"`device_coordinates` must lie in the mesh {list(self.mesh_shape)}. Received: {places}")
        if len(set(places)) < len(places):
            raise ValueError(f"Two devices of `device_coordinates` are at the same place. Received: {places}")

    @property
    def _places(self) -> list[Sequence[int]]:
        return [place for devices in self.device_coordinates for place in devices]

    @property
    def mesh_rank(self) -> int:
        """Dimensions of the mesh, which are 4."""
        return len(self.mesh_shape)

    @property
    def num_tasks(self) -> int:
        """Processes."""
        return len(self.device_coordinates)

    @property
    def num_tpus_per_task(self) -> int:
        """Devices of each process."""
        return len(self.device_coordinates[0])

    @property
    def missing_devices(self) -> list[tuple[int, ...]]:
        """Places of the mesh without a device."""
        there = {tuple(place) for place in self._places}
        return [place for place in itertools.product(*map(range, self.mesh_shape)) if place not in there]

    def task_ordinal_at_coordinates(self, device_coordinates: Sequence[int]) -> int:
        """Return which process the device at these coordinates belongs to."""
        return self._find(device_coordinates)[0]

    def tpu_device_ordinal_at_coordinates(self, device_coordinates: Sequence[int]) -> int:
        """Return the number that the device at these coordinates has in its process."""
        return self._find(device_coordinates)[1]

    def cpu_device_name_at_coordinates(self, device_coordinates: Sequence[int], job: str | None = None) -> str:
        """Return the name of the CPU of the device's process."""
        return f"{_job(job)}/task:{self._find(device_coordinates)[0]}/device:CPU:0"

    def tpu_device_name_at_coordinates(self, device_coordinates: Sequence[int], job: str | None = None) -> str:
        """Return the name of the device at these coordinates."""
        task, ordinal = self._find(device_coordinates)
        return f"{_job(job)}/task:{task}/device:TPU:{ordinal}"

    def _find(self, coordinates: Sequence[int]) -> tuple[int, int]:
        for task, devices in enumerate(self.device_coordinates):
            for ordinal, place in enumerate(devices):
                if list(place) == list(coordinates):
                    return task, ordinal
        raise ValueError(f"There is no device at {list(coordinates)}. There are: {[list(p) for p in self._places]}")


@dataclass(frozen=True)
class DeviceAssignment:
    """Which devices make one replica, as ``tf.tpu.experimental.DeviceAssignment``.

    Args:
        topology: where the devices are.
        core_assignment: for each replica the coordinates of its devices.

    Raises:
        ValueError: there is no device at a place, a device is given to two replicas, or replicas differ in size.

    Example:
        >>> topology = ts.tpu.experimental.Topology([2, 1, 1, 1], [[[0, 0, 0, 0], [1, 0, 0, 0]]])
        >>> one = ts.tpu.experimental.DeviceAssignment.build(topology, computation_shape=[2, 1, 1, 1])
        >>> one.num_replicas, one.num_cores_per_replica
        (1, 2)
        >>> two = ts.tpu.experimental.DeviceAssignment.build(topology, num_replicas=2)
        >>> two.core_assignment
        [[[0, 0, 0, 0]], [[1, 0, 0, 0]]]
    """

    topology: Topology
    core_assignment: Sequence[Sequence[Sequence[int]]]

    def __post_init__(self) -> None:
        if not isinstance(self.topology, Topology):
            raise TypeError(
                "topology must be a Topology, such as initialize_tpu_system() returns. Received: "
                f"{type(self.topology).__name__}"
            )
        places = [tuple(place) for replica in self.core_assignment for place in replica]
        for place in places:
            self.topology.task_ordinal_at_coordinates(place)
        if len(set(places)) < len(places):
            raise ValueError(f"A device is assigned twice: {places}")
        if len({len(replica) for replica in self.core_assignment}) != 1 or not places:
            raise ValueError("`core_assignment` must have equally many devices for each replica, and at least one.")

    @staticmethod
    def build(
        topology: Topology,
        computation_shape: Sequence[int] | None = None,
        computation_stride: Sequence[int] | None = None,
        num_replicas: int = 1,
    ) -> DeviceAssignment:
        """Give each replica a block of the mesh.

        Args:
            topology: where the devices are.
            computation_shape: a block's size in each direction; ``None`` means one device.
            computation_stride: the distance of a block's devices in each direction; ``None`` means 1.
            num_replicas: how many blocks.

        Returns:
            The assignment: the cores of a chip first, then along x, y and z.

        Raises:
            ValueError: so many blocks of this size don't fit into the mesh.
        """
        shape = list(computation_shape or [1] * topology.mesh_rank)
        stride = list(computation_stride or [1] * topology.mesh_rank)
        for name, entries in (("computation_shape", shape), ("computation_stride", stride)):
            if len(entries) != topology.mesh_rank or any(entry < 1 for entry in entries):
                raise ValueError(f"`{name}` must have {topology.mesh_rank} positive entries; got {entries}")
        block = [size * step for size, step in zip(shape, stride, strict=True)]
        if any(size > there for size, there in zip(block, topology.mesh_shape, strict=True)):
            raise ValueError(f"A block of {block} devices does not fit into the mesh {list(topology.mesh_shape)}.")
        counts = [there // size for there, size in zip(topology.mesh_shape, block, strict=True)]
        # The devices between those of a strided block make blocks of their own.
        possible = math.prod(counts) * math.prod(stride)
        if not 0 < num_replicas <= possible:
            raise ValueError(f"There are {possible} blocks of {block} devices. Received: num_replicas={num_replicas}")
        starts = [
            [number * size + offset for number, size, offset in zip(numbers, block, offsets, strict=True)]
            for offsets in _places_in(stride)
            for numbers in _places_in(counts)
        ]
        within = [[index * step for index, step in zip(place, stride, strict=True)] for place in _places_in(shape)]
        assignment = [
            [[at + by for at, by in zip(start, offset, strict=True)] for offset in within]
            for start in starts[:num_replicas]
        ]
        return DeviceAssignment(topology, assignment)

    @property
    def num_replicas(self) -> int:
        """Replicas."""
        return len(self.core_assignment)

    @property
    def num_cores_per_replica(self) -> int:
        """Devices of each replica."""
        return len(self.core_assignment[0])

    def coordinates(self, replica: int, logical_core: int) -> tuple[int, ...]:
        """Return where a replica's device is."""
        return tuple(self.core_assignment[replica][logical_core])

    def lookup_replicas(self, task_id: int, logical_core: int) -> list[int]:
        """Return the replicas whose device of this number belongs to a process.

        Raises:
            ValueError: there are none.
        """
        found = [
            replica
            for replica in range(self.num_replicas)
            if self.topology.task_ordinal_at_coordinates(self.coordinates(replica, logical_core)) == task_id
        ]
        if not found:
            raise ValueError(f"No replica has its device {logical_core} in task {task_id}.")
        return found

    def tpu_ordinal(self, replica: int = 0, logical_core: int = 0) -> int:
        """Return the number that a replica's device has in its process."""
        return self.topology.tpu_device_ordinal_at_coordinates(self.coordinates(replica, logical_core))

    def host_device(self, replica: int = 0, logical_core: int = 0, job: str | None = None) -> str:
        """Return the name of the CPU of a replica's device."""
        return self.topology.cpu_device_name_at_coordinates(self.coordinates(replica, logical_core), job)

    def tpu_device(self, replica: int = 0, logical_core: int = 0, job: str | None = None) -> str:
        """Return the name of a replica's device."""
        return self.topology.tpu_device_name_at_coordinates(self.coordinates(replica, logical_core), job)


def _job(name: str | None) -> str:
    return "" if name is None else f"/job:{name}"


def _places_in(sizes: Sequence[int]) -> list[list[int]]:
    """Return all places of a block: the core changes fastest, then x, y and z."""
    *chips, cores = sizes
    return [
        [*reversed(chip), core] for chip in itertools.product(*map(range, reversed(chips))) for core in range(cores)
    ]
