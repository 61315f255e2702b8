import dataclasses
import json
import sys
import types

import pytest
import torch

import torchstrategy as ts
from torchstrategy.base import devices
from torchstrategy.cluster_resolver.detect import explain, find_job

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "host0",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_PROCID": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "n[9-10]",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
}
# The cluster of tf's multi-worker guide.
GUIDE = {"worker": ["host1:12345", "host2:23456", "host3:34567"], "ps": ["host4:45678", "host5:56789"]}


def tf_config(cluster, task_type=None, index=0):
    task = {} if task_type is None else {"task": {"type": task_type, "index": index}}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, **task})}


def test_the_guides_tf_config():
    job = find_job(environ=tf_config(GUIDE, "worker", 1))
    assert (job.source, job.task_type, job.task_id) == ("TF_CONFIG", "worker", 1)
    assert (job.rank, job.size, job.address, job.port, job.hosted) == (1, 3, "host1", 12345, False)
    assert job.cluster_spec.as_dict() == GUIDE
    assert (job.local_rank, job.local_size, job.attempt) == (None, None, 0)
    assert isinstance(job.resolver, ts.cluster_resolver.TFConfigClusterResolver)
    assert job.resolver.master() == "host2:23456"


def test_a_chief_is_rank_0_and_leads():
    cluster = {"worker": ["w0:1", "w1:1"], "chief": ["[::1]:2"], "evaluator": ["e:1"]}
    ranks = [("chief", 0), ("worker", 0), ("worker", 1)]
    jobs = [find_job(environ=tf_config(cluster, *task)) for task in ranks]
    assert [(job.rank, job.size, job.address, job.port) for job in jobs] == [(rank, 3, "::1", 2) for rank in range(3)]


@pytest.mark.parametrize("cluster", [GUIDE, {**GUIDE, "evaluator": ["host9:1"]}])
def test_an_evaluator_stands_alone(cluster):
    job = find_job(environ=tf_config(cluster, "evaluator"))
    assert (job.task_type, job.rank, job.size) == ("evaluator", 0, 1)


def test_one_worker_needs_no_port():
    assert find_job(environ=tf_config({"worker": ["localhost"]}, "worker")).size == 1


@pytest.mark.parametrize(
    "environ",
    [{}, {"TF_CONFIG": "{}"}, tf_config({}, "worker"),
     {"WORLD_SIZE": "1"}, {**SLURM, "SLURM_STEP_NUM_TASKS": "1"}],
)  # fmt: skip
def test_alone(environ):
    assert find_job(environ=environ) is None
    assert explain(environ)[-1] == "alone: nothing names other processes. Taken."


@pytest.mark.parametrize("is_given", [False, True])
@pytest.mark.parametrize("others", ["", '"clsuter": {"worker": ["a:1", "b:1"]}, '])
def test_a_task_without_a_cluster_is_alone_and_warned(others, is_given, monkeypatch):
    monkeypatch.setattr("torchstrategy.base.log._said", set())
    environ = {"TF_CONFIG": f'{{{others}"task": {{"type": "worker", "index": 1}}}}'}
    resolver = ts.cluster_resolver.TFConfigClusterResolver(environ=environ) if is_given else None
    with pytest.warns(
        UserWarning, match=r'TF_CONFIG says that this process is worker 1, but has no "cluster"'
    ) as warned:
        assert find_job(resolver, environ) is None
    assert warned[0].filename == __file__


def test_an_evaluator_without_a_cluster_is_not_warned():
    assert find_job(environ={"TF_CONFIG": '{"task": {"type": "evaluator", "index": 0}}'}) is None


def test_torchrun():
    environ = {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}
    job = find_job(environ=environ)
    assert (job.source, job.task_type, job.task_id, job.rank, job.size) == ("torchrun", "worker", 3, 3, 4)
    assert (job.address, job.port, job.hosted, job.attempt) == ("host0", 29500, True, 2)
    assert (job.local_rank, job.local_size) == (1, 2)
    assert job.cluster_spec.as_dict() == {"worker": ["host0:29500"]}
    assert job.resolver.task_id == 3


@pytest.mark.parametrize(("rank", "source"), [(3, "Ray Train"), (2, "torchrun")])
def test_ray_train_is_named_in_its_own_workers(rank, source, monkeypatch):
    """By its context, which must say what the variables say; nothing imports Ray."""
    context = types.SimpleNamespace(get_world_rank=lambda: rank, get_world_size=lambda: 4)
    monkeypatch.setitem(sys.modules, "ray.train", types.SimpleNamespace(get_context=lambda: context))
    job = find_job(environ=TORCHRUN)
    assert (job.source, job.rank, job.local_rank) == (source, 3, 1)
    assert job.reason.startswith("Ray Train has set torchrun's variables (RANK=3" if rank == 3 else "torchrun's variab")


@pytest.mark.parametrize(
    ("source", "expected"), [("torchrun", ["cuda:0"]), ("Ray Train", ["cuda:0"]), ("SLURM", ["cuda:0", "cuda:1"])]
)
def test_a_process_that_is_alone_on_its_host_takes_one_gpu_but_for_slurm(source, expected, monkeypatch):
    monkeypatch.setattr(devices, "visible_devices", lambda: ["cuda:0", "cuda:1"])
    monkeypatch.setattr(devices, "local_devices", lambda _: (torch.device("cuda:0"), torch.device("cuda:1")))
    job = dataclasses.replace(find_job(environ=TORCHRUN), source=source, local_rank=0, local_size=1)
    assert list(map(str, devices.devices_of_process(None, job))) == expected


def test_a_driver_of_ray_may_be_started_by_torchrun(monkeypatch):
    def get_context():
        raise RuntimeError("`get_context` cannot be used outside of a Ray Train training function.")

    monkeypatch.setitem(sys.modules, "ray.train", types.SimpleNamespace(get_context=get_context))
    assert find_job(environ=TORCHRUN).source == "torchrun"


def test_slurm():
    ranks = [("0", "0", "0"), ("1", "0", "1"), ("2", "1", "0")]
    jobs = []
    for rank, node, local_rank in ranks:
        place = {"SLURM_PROCID": rank, "SLURM_NODEID": node, "SLURM_LOCALID": local_rank, "SLURM_RESTART_COUNT": "1"}
        jobs.append(find_job(environ={**SLURM, **place, "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "1"}))
    assert [(job.source, job.rank, job.size, job.attempt) for job in jobs] == [("SLURM", r, 3, 1) for r in range(3)]
    assert [(job.local_rank, job.local_size) for job in jobs] == [(0, 2), (1, 2), (0, 1)]
    assert {(job.address, job.port) for job in jobs} == {("n9", 25288)}
    assert all(job.resolver.get_task_info() == ("worker", job.rank) for job in jobs)


def test_steps_of_one_host_meet_at_ports_of_their_own():
    steps = [{"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)} for job in (4711, 4712) for step in range(3)]
    ports = {find_job(environ={**SLURM, **step}).port for step in steps}
    assert len(ports) == len(steps)
    assert all(1024 < port < 32768 for port in ports)  # outside of what systems give away by themselves


def test_slurm_with_gpus_of_each_tasks_own():
    environ = {**SLURM, "SLURM_PROCID": "1", "SLURM_NODEID": "0", "SLURM_LOCALID": "1"}
    bound = {**environ, "CUDA_VISIBLE_DEVICES": "3"}
    shared = {**environ, "CUDA_VISIBLE_DEVICES": "0,1"}
    assert (find_job(environ=bound).local_rank, find_job(environ=bound).local_size) == (None, 2)
    assert find_job(environ=shared).local_rank == 1
    assert (bound["CUDA_VISIBLE_DEVICES"], shared["CUDA_VISIBLE_DEVICES"]) == ("3", "0,1")  # looking changes nothing


def simple(cluster, *task):
    spec = ts.cluster_resolver.ClusterSpec(cluster)
    resolver = ts.cluster_resolver.SimpleClusterResolver(spec)
    resolver.task_type, resolver.task_id = task or (None, None)
    return resolver


def test_the_order_of_precedence():
    everything = {**SLURM, **tf_config(GUIDE, "worker", 1), **TORCHRUN}
    given = find_job(simple({"worker": ["a:1", "b:1"]}, "worker", 1), everything)
    assert (given.source, given.address) == ("SimpleClusterResolver", "a")
    assert given.reason == (
        "the strategy was given a SimpleClusterResolver; torchrun and TF_CONFIG and SLURM are set too and not used"
    )
    assert find_job(environ=everything).reason == (
        "torchrun's variables are set (RANK=3, WORLD_SIZE=4); TF_CONFIG and SLURM are set too and not used"
    )
    del everything["WORLD_SIZE"]
    assert find_job(environ=everything).reason == "TF_CONFIG has a cluster; SLURM is set too and not used"
    del everything["TF_CONFIG"]
    assert find_job(environ=everything).reason == "this is task 2 of 3 of a SLURM step"
    assert find_job(simple({}), {**TORCHRUN}) is None  # an empty cluster that is given is one too


def test_sources_that_agree_are_not_named():
    cluster = {"worker": ["a:1", "b:1", "c:1", "d:1"]}
    job = find_job(environ={**TORCHRUN, **tf_config(cluster, "worker", 3)})
    assert job.reason == "torchrun's variables are set (RANK=3, WORLD_SIZE=4)"


def test_what_is_not_taken_may_be_wrong():
    job = find_job(environ={**TORCHRUN, "TF_CONFIG": "{bad"})
    assert job.reason.endswith("TF_CONFIG is set too and not used")


def test_given_resolvers():
    environ = tf_config(GUIDE, "worker", 2)
    job = find_job(ts.cluster_resolver.TFConfigClusterResolver(environ=environ), environ)
    assert (job.source, job.rank) == ("TFConfigClusterResolver", 2)
    assert job.reason == "the strategy was given a TFConfigClusterResolver"
    torchrun = find_job(ts.cluster_resolver.TorchrunClusterResolver(environ=TORCHRUN), {})
    assert (torchrun.source, torchrun.rank, torchrun.size) == ("torchrun", 3, 4)
    assert find_job(ts.cluster_resolver.TorchrunClusterResolver(environ={}), TORCHRUN) is None
    slurm = ts.cluster_resolver.SlurmClusterResolver({"chief": 1, "worker": 2}, auto_set_gpu=False, environ=SLURM)
    job = find_job(slurm, {})
    assert (job.source, job.task_type, job.task_id, job.rank, job.port) == (
        "SlurmClusterResolver",
        "worker",
        1,
        2,
        8888,
    )
    with pytest.raises(TypeError, match=r"must be a ts.cluster_resolver.ClusterResolver. Received: 'TF_CONFIG'"):
        find_job("TF_CONFIG")


@pytest.mark.parametrize(
    ("environ", "error", "message"),
    [
        ({"TF_CONFIG": "{bad"}, json.JSONDecodeError, "TF_CONFIG is not JSON.*Write for example"),
        ({"TF_CONFIG": ""}, json.JSONDecodeError, "TF_CONFIG is not JSON.*Unset it"),
        (tf_config(GUIDE), ValueError, "you must also specify `task_type` and `task_id`.*Add for example"),
        (tf_config(GUIDE, "ps"), ValueError, "this process is ps 0, but a parameter server takes no part"),
        (tf_config(GUIDE, "worker", 3), ValueError, "TF_CONFIG: .*index is 3, but the cluster has 3"),
        (tf_config(GUIDE, "worker", -1), ValueError, "index must be 0 or more. Received: 'worker' -1"),
        (tf_config(GUIDE, "worker", "x"), ValueError, "task.index must be an integer. Received: 'x'"),
        (tf_config(GUIDE, "chief"), ValueError, "type is 'chief', but the cluster has the jobs"),
        (tf_config(GUIDE, "boss"), ValueError, "Received: 'boss'"),
        (tf_config({"boss": ["a:1"]}, "boss"), ValueError, r"Received also \['boss'\]"),
        (tf_config({"worker": ["host1", "b:1"]}, "worker"), ValueError, "worker 0 in TF_CONFIG must be host:port"),
        (tf_config({"worker": ["host1:http", "b:1"]}, "worker"), ValueError, "Received: 'host1:http'"),
        (tf_config({"worker": ["host1:99999", "b:1"]}, "worker"), ValueError, "a port from 1 to 65535"),
        (tf_config({"worker": ["a:1", "a:1"]}, "worker"), ValueError, "TF_CONFIG lists a:1 twice"),
        (tf_config({"worker": ["http://a:1", "b:1"]}, "worker"), ValueError, "write 'a:1', without 'http://'"),
        (tf_config({"worker": "host1:1"}, "worker"), TypeError, "must be a list"),
        ({**TORCHRUN, "MASTER_PORT": ""}, RuntimeError, "MASTER_PORT not set"),
        ({**SLURM, "SLURM_STEP_NODELIST": "n[9"}, ValueError, "Host names must look like"),
        ({**SLURM, "SLURM_NODEID": "0"}, RuntimeError, "Task 2 should be on host n10, but Slurm started it on n9"),
        ({**SLURM, "SLURM_PROCID": "3"}, ValueError, "task_type=None"),
    ],
)
def test_what_is_wrong(environ, error, message):
    with pytest.raises(error, match=message) as raised:
        find_job(environ=environ)
    lines = explain(environ)
    assert any(f"{raised.value} Taken, which fails: mend it or unset it." in line for line in lines)


def test_a_resolver_of_ones_own():
    class Mine(ts.cluster_resolver.ClusterResolver):
        def cluster_spec(self):
            return {"chief": ["a:1"], "worker": ["b:1"]}

        def master(self, task_type=None, task_id=None, rpc_layer=None):
            return ""

    mine = Mine()
    mine.task_type, mine.task_id = "worker", 0
    job = find_job(mine, {})
    assert (job.source, job.rank, job.size, job.address, job.resolver) == ("Mine", 1, 2, "a", mine)
    mine.task_id = "0"
    with pytest.raises(TypeError, match=r"Mine: task_id must be an integer. Received: '0'"):
        find_job(mine, {})


def test_a_given_resolver_without_a_task():
    with pytest.raises(ValueError, match=r"SimpleClusterResolver has the cluster.*Set the resolver's task_type"):
        find_job(simple(GUIDE), {})


def test_a_shell_in_a_step_stands_alone(monkeypatch):
    environ = {**SLURM, "SLURM_PTY_PORT": "4000"}
    assert find_job(environ=environ).size == 3  # a step that was started in the shell inherits the variable
    monkeypatch.setattr("os.isatty", lambda _: True)
    assert find_job(environ=environ) is None
    assert explain(environ)[2] == "SLURM: this is a shell in a step. Not taken."


def test_explain_says_why():
    lines = explain({**TORCHRUN, **tf_config(GUIDE, "worker", 1)})
    assert lines == [
        "torchrun: rank 3 of 4, worker 3; they meet at host0:29500. Taken.",
        "TF_CONFIG: rank 1 of 3, worker 1; they meet at host1:12345. Not taken, because torchrun comes first.",
        "SLURM: this is not one of several tasks of a step. Not taken.",
        "alone: not taken, because of torchrun.",
    ]
    assert explain({"TF_CONFIG": "{}"})[1] == "TF_CONFIG: it has no cluster. Not taken."
