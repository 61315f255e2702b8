import pytest

import torchstrategy as ts

Topology = ts.tpu.experimental.Topology
DeviceAssignment = ts.tpu.experimental.DeviceAssignment


@pytest.fixture
def pod():
    """Two hosts with four chips each, a core on each chip, as a v4-16."""
    hosts = [[[x, y, z, 0] for y in range(2) for x in range(2)] for z in range(2)]
    return Topology([2, 2, 2, 1], hosts)


def test_topology(pod):
    assert (pod.num_tasks, pod.num_tpus_per_task, pod.mesh_rank, pod.missing_devices) == (2, 4, 4, [])
    assert pod.task_ordinal_at_coordinates([0, 1, 1, 0]) == 1
    assert pod.tpu_device_ordinal_at_coordinates((0, 1, 1, 0)) == 2
    assert pod.tpu_device_name_at_coordinates([0, 1, 1, 0], job="worker") == "/job:worker/task:1/device:TPU:2"
    assert pod.cpu_device_name_at_coordinates([0, 1, 1, 0]) == "/task:1/device:CPU:0"
    with pytest.raises(ValueError, match=r"no device at \[0, 0, 3, 0\]"):
        pod.task_ordinal_at_coordinates([0, 0, 3, 0])


def test_missing_devices():
    assert Topology([2, 1, 1, 2], [[[0, 0, 0, 0], [1, 0, 0, 1]]]).missing_devices == [(0, 0, 0, 1), (1, 0, 0, 0)]


@pytest.mark.parametrize(
    ("shape", "places", "problem"),
    [
        ([2, 1, 1], [[[0, 0, 0, 0]]], "4 positive entries"),
        ([2, 0, 1, 1], [[[0, 0, 0, 0]]], "4 positive entries"),
        ([1, 1, 1, 1], [[[0, 0, 0, 1]]], "must lie in the mesh"),
        ([1, 1, 1, 1], [[[0, 0, 0]]], "must lie in the mesh"),
        ([2, 1, 1, 1], [[[0, 0, 0, 0]] * 2], "same place"),
        ([2, 1, 1, 1], [[[0, 0, 0, 0]], []], "equally many"),
        ([2, 1, 1, 1], [], "equally many"),
    ],
)
def test_topologies_that_cannot_be(shape, places, problem):
    with pytest.raises(ValueError, match=problem):
        Topology(shape, places)


def test_one_replica_on_each_device(pod):
    assignment = DeviceAssignment.build(pod, num_replicas=8)
    assert (assignment.num_replicas, assignment.num_cores_per_replica) == (8, 1)
    assert len({assignment.coordinates(replica, 0) for replica in range(8)}) == 8
    assert assignment.lookup_replicas(0, 0) == [0, 1, 2, 3]
    assert assignment.lookup_replicas(1, 0) == [4, 5, 6, 7]
    assert [assignment.tpu_ordinal(replica) for replica in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert assignment.tpu_device(5, job="worker") == "/job:worker/task:1/device:TPU:1"
    assert assignment.host_device(5) == "/task:1/device:CPU:0"
    with pytest.raises(ValueError, match="in task 2"):
        assignment.lookup_replicas(2, 0)


def test_replicas_of_several_devices(pod):
    assignment = DeviceAssignment.build(pod, [2, 2, 1, 1], num_replicas=2)
    assert (assignment.num_replicas, assignment.num_cores_per_replica) == (2, 4)
    assert assignment.core_assignment[1] == [[0, 0, 1, 0], [1, 0, 1, 0], [0, 1, 1, 0], [1, 1, 1, 0]]


def test_strides(pod):
    assignment = DeviceAssignment.build(pod, [1, 1, 2, 1], [2, 1, 1, 1], num_replicas=4)
    assert len({tuple(place) for replica in assignment.core_assignment for place in replica}) == 8
    assert assignment.core_assignment[0] == [[0, 0, 0, 0], [0, 0, 1, 0]]
    assert assignment.core_assignment[2] == [[1, 0, 0, 0], [1, 0, 1, 0]]


def test_cores_of_a_chip_come_first():
    topology = Topology([2, 1, 1, 2], [[[x, 0, 0, core] for x in range(2) for core in range(2)]])
    assignment = DeviceAssignment.build(topology, num_replicas=4)
    assert [replica[0] for replica in assignment.core_assignment] == topology.device_coordinates[0]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"num_replicas": 9}, "There are 8 blocks"),
        ({"num_replicas": 0}, "There are 8 blocks"),
        ({"computation_shape": [2, 2, 2, 1], "num_replicas": 2}, "There are 1 blocks"),
        ({"computation_shape": [3, 1, 1, 1]}, "does not fit"),
        ({"computation_shape": [2, 2]}, "`computation_shape` must have 4"),
        ({"computation_stride": [0, 1, 1, 1]}, "`computation_stride` must have 4"),
    ],
)
def test_blocks_that_do_not_fit(pod, options, problem):
    with pytest.raises(ValueError, match=problem):
        DeviceAssignment.build(pod, **options)


@pytest.mark.parametrize(
    ("assignment", "problem"),
    [
        ([[[0, 0, 0, 0]], [[0, 0, 0, 0]]], "assigned twice"),
        ([[[0, 0, 0, 0], [1, 0, 0, 0]], [[0, 1, 0, 0]]], "equally many"),
        ([], "at least one"),
        ([[[7, 0, 0, 0]]], "no device at"),
    ],
)
def test_assignments_that_cannot_be(pod, assignment, problem):
    with pytest.raises(ValueError, match=problem):
        DeviceAssignment(pod, assignment)


def test_assignment_without_topology():
    with pytest.raises(TypeError, match="initialize_tpu_system"):
        DeviceAssignment(None, [[[0, 0, 0, 0]]])
