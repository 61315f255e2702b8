import os

import pytest
import torch

import torchstrategy as ts
from torchstrategy.cluster_resolver import slurm

Slurm = ts.cluster_resolver.SlurmClusterResolver


def step(rank, nodes="n[9-11]", tasks="2,1(x2)", **more):
    """Variables of a step of four tasks on n9 (two), n10 and n11, but for those that say where the task is."""
    environ = {"SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": nodes}
    return environ | {"SLURM_STEP_TASKS_PER_NODE": tasks, **{name: str(value) for name, value in more.items()}}


def real_step(rank, node, local_rank, **more):
    return step(rank, SLURM_NODEID=node, SLURM_LOCALID=local_rank, **more)


def address_of(resolver):
    return resolver.cluster_spec().task_address(*resolver.get_task_info())


# What Slurm's four distributions make of these hosts: for each task its node and its number there.
LAYOUTS = {
    "block": [(0, 0), (0, 1), (1, 0), (2, 0)],
    "cyclic": [(0, 0), (1, 0), (2, 0), (0, 1)],
    "block:cyclic": [(0, 0), (0, 1), (1, 0), (2, 0)],
    "cyclic:block,Pack": [(0, 0), (1, 0), (2, 0), (0, 1)],
    "plane=1": [(0, 0), (1, 0), (2, 0), (0, 1)],
    "plane=2": [(0, 0), (0, 1), (1, 0), (2, 0)],
}


@pytest.mark.parametrize("distribution", LAYOUTS)
def test_every_task_of_a_real_step_has_the_address_of_its_host(distribution):
    hosts = ["n9", "n10", "n11"]
    specs = []
    for rank, (node, local_rank) in enumerate(LAYOUTS[distribution]):
        environ = real_step(rank, node, local_rank, SLURM_DISTRIBUTION=distribution)
        resolver = Slurm(environ=environ)
        assert resolver.cluster_spec()
        assert resolver.get_task_info() == ("worker", rank)
        assert address_of(resolver) == f"{hosts[node]}:{8888 + local_rank}"
        assert (resolver.local_rank, resolver.local_size) == (local_rank, 2 if node == 0 else 1)
        specs.append(resolver.cluster_spec())
    assert all(spec == specs[0] for spec in specs)


def test_planes_are_dealt_in_turn():
    environ = {"SLURM_PROCID": "4", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NODELIST": "a,b", "SLURM_NODEID": "0"}
    environ |= {"SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_DISTRIBUTION": "plane", "SLURM_DIST_PLANESIZE": "2"}
    hosts = [address[0] for address in Slurm(environ=environ).cluster_spec().job_tasks("worker")]
    assert hosts == ["a", "a", "b", "b", "a", "a", "b", "b"]


def test_a_task_elsewhere_than_its_number_says_is_an_error():
    resolver = Slurm(environ=real_step(1, 1, 0))  # as with a distribution that we don't know
    with pytest.raises(RuntimeError, match=r"Task 1 should be on host n9.*started it on n10.*--distribution=block"):
        resolver.cluster_spec()


def test_hosts_that_are_given_keep_slurms_order():
    hosts = {"n10": 1, "n11": 1, "n9": 2}
    resolver = Slurm(tasks_per_node=hosts, environ=real_step(2, 1, 0))
    assert resolver.cluster_spec().job_tasks("worker") == ["n9:8888", "n9:8889", "n10:8888", "n11:8888"]
    assert address_of(resolver) == "n10:8888"


def test_fixed_number_of_tasks_per_node():
    environ = {"SLURM_PROCID": "3", "SLURM_STEP_NODELIST": "a,b"}
    resolver = Slurm({"worker": 3, "chief": 1}, tasks_per_node=2, port_base=9000, rpc_layer="", environ=environ)
    spec = resolver.cluster_spec()
    assert spec.as_dict() == {"chief": ["a:9000"], "worker": ["a:9001", "b:9000", "b:9001"]}
    assert (resolver.get_task_info(), resolver.master()) == (("worker", 2), "b:9001")
    assert resolver.master("chief", 0, "grpc") == "grpc://a:9000"


@pytest.mark.parametrize(
    "name", ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"]
)
def test_missing_variables(name):
    environ = step(0)
    del environ[name]
    with pytest.raises(RuntimeError, match=f"{name} not found in environment. Not running inside a SLURM step?"):
        Slurm(environ=environ)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"SLURM_PROCID": "x"}, ValueError, "SLURM_PROCID must be an integer. Received: 'x'"),
        ({"SLURM_STEP_NUM_TASKS": "3"}, RuntimeError, "Requested 3 tasks but only 4 were assigned"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2,2"}, RuntimeError, "has 3 hosts, but SLURM_STEP_TASKS_PER_NODE has 2"),
        ({"SLURM_STEP_NODELIST": "n[1"}, ValueError, "Host names must look like"),
    ],
)
def test_bad_variables(change, error, message):
    with pytest.raises(error, match=message):
        Slurm(environ=step(0) | change)


def two_on_one_host(rank, **more):
    environ = {"SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n1"}
    return environ | {"SLURM_STEP_TASKS_PER_NODE": "2", **more}


@pytest.mark.parametrize(
    ("visible", "kwargs", "own", "num_gpus"),
    [
        ("0,1,2,3", {}, "2,3", 2),
        ("4,5,6,7", {}, "6,7", 2),  # GPUs of a job that has half of the host
        ("GPU-a,GPU-b", {}, "GPU-b", 1),
        ("0,1,2", {}, "1", 1),
        ("0,1,2,3", {"gpus_per_task": 1}, "1", 1),
        (None, {"gpus_per_node": 4}, "2,3", 2),
        ("0", {"gpus_per_node": 4}, "2,3", 2),
        ("5", {}, "5", 1),  # Slurm has given each task one
        ("", {}, "", 0),
        (None, {}, None, 0),
        ("0,1", {"gpus_per_task": 0}, "0,1", 0),
        ("0,1,2,3", {"auto_set_gpu": False}, "0,1,2,3", 2),
    ],
)
def test_gpus_of_the_second_task(visible, kwargs, own, num_gpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    environ = two_on_one_host(1) if visible is None else two_on_one_host(1, CUDA_VISIBLE_DEVICES=visible)
    for _ in range(2):  # a second resolver of the process finds the same
        resolver = Slurm(**kwargs, environ=environ)
        assert resolver.cluster_spec() == resolver.cluster_spec()
        assert environ.get("CUDA_VISIBLE_DEVICES") == own
        assert resolver.num_accelerators() == ({"GPU": num_gpus} if num_gpus else {})


def test_another_environments_gpus_are_not_remembered():
    """Of an equal step, which had been given what another resolver chose from more."""
    for visible, own in (("0,1,2,3", "2,3"), ("2,3", "3")):
        environ = two_on_one_host(1, CUDA_VISIBLE_DEVICES=visible)
        Slurm(environ=environ).cluster_spec()
        assert environ["CUDA_VISIBLE_DEVICES"] == own


def test_gpus_that_slurm_gave_to_each_task():
    environ = two_on_one_host(1, CUDA_VISIBLE_DEVICES="0,1", SLURM_GPUS_PER_TASK="2")
    resolver = Slurm(environ=environ)
    resolver.cluster_spec()
    assert resolver.has_own_gpus
    assert (environ["CUDA_VISIBLE_DEVICES"], resolver.num_accelerators()) == ("0,1", {"GPU": 2})


def test_gpus_that_only_torch_sees(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    environ = two_on_one_host(1)
    Slurm(environ=environ).cluster_spec()
    assert environ["CUDA_VISIBLE_DEVICES"] == "1"


def test_gpus_that_are_set_too_late(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.warns(UserWarning, match="sets CUDA_VISIBLE_DEVICES=9, but CUDA was used before"):
        Slurm(environ=two_on_one_host(1, CUDA_VISIBLE_DEVICES="8,9")).cluster_spec()


@pytest.mark.parametrize("kwargs", [{"gpus_per_node": 1}, {"gpus_per_node": 3, "gpus_per_task": 2}])
def test_too_few_gpus(kwargs):
    resolver = Slurm(**kwargs, environ=two_on_one_host(1))
    with pytest.raises(ValueError, match=r"has 2 tasks, which need .* each.*gpus_per_task=0"):
        resolver.cluster_spec()


def test_a_rank_beyond_the_last_task():
    environ = step(7, CUDA_VISIBLE_DEVICES="0,1")
    with pytest.raises(IndexError, match="SLURM_PROCID=7, but the step has 4 tasks"):
        Slurm(environ=environ).cluster_spec()
    resolver = Slurm(auto_set_gpu=False, environ=environ)
    resolver.cluster_spec()
    assert (resolver.get_task_info(), resolver.master(), resolver.local_rank) == ((None, None), "", None)


def test_the_process_environment_is_used(monkeypatch):
    for name, value in two_on_one_host(1, CUDA_VISIBLE_DEVICES="0,1").items():
        monkeypatch.setenv(name, value)
    Slurm().cluster_spec()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")  # so that monkeypatch restores what was there


@pytest.mark.parametrize(
    ("change", "has_terminal", "expected"),
    [
        ({}, False, True),
        ({}, True, True),
        ({"SLURM_PTY_PORT": "4000"}, True, False),  # a shell with `srun --pty`
        ({"SLURM_PTY_PORT": "4000"}, False, True),  # a step that was started in such a shell
        ({"SLURM_STEP_NUM_TASKS": "1"}, False, False),
        ({"SLURM_STEP_NUM_TASKS": ""}, False, False),
    ],
)
def test_steps_of_several(change, has_terminal, expected, monkeypatch):
    monkeypatch.setattr(os, "isatty", lambda _: has_terminal)
    assert slurm.is_step_of_several(two_on_one_host(0) | change) is expected


def test_no_step():
    assert not slurm.is_step_of_several({"SLURM_STEP_NUM_TASKS": "4"})
