"""What one of two processes does with each resolver. A module of its own, because worker processes import it."""

import contextlib
import os
from types import SimpleNamespace

import torch

import torchstrategy as ts
from tests.clusters import LAUNCHER_VARIABLES

HERE = "127.0.0.1"


def slurm_step(rank, host):
    """What ``srun --ntasks=2 --nodes=1`` sets."""
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": host,
        "SLURM_STEP_TASKS_PER_NODE": "2",
    }


def _simple(rank, ports):
    spec = ts.cluster_resolver.ClusterSpec({"worker": [f"{HERE}:{port}" for port in ports]})
    return ts.cluster_resolver.SimpleClusterResolver(spec, task_type="worker", task_id=rank)


def _union(rank, ports):
    parts = [
        ts.cluster_resolver.ClusterSpec({job: [f"{HERE}:{ports[i]}"]}) for i, job in enumerate(("worker", "chief"))
    ]
    task_type = "chief" if rank == 0 else "worker"
    simple = map(ts.cluster_resolver.SimpleClusterResolver, parts)
    return ts.cluster_resolver.UnionResolver(*simple, task_type=task_type, task_id=0)


def _slurm(rank, ports):
    environ = slurm_step(rank, HERE)
    return ts.cluster_resolver.SlurmClusterResolver({"chief": 1, "worker": 1}, port_base=ports[0], environ=environ)


def _kubernetes(rank, ports):
    def pod(name, ip):
        return SimpleNamespace(
            metadata=SimpleNamespace(name=name), status=SimpleNamespace(phase="Running", host_ip=ip, pod_ip=None)
        )

    pods = SimpleNamespace(items=[pod("pod-1", "127.0.0.2"), pod("pod-0", HERE)])
    client = SimpleNamespace(list_pod_for_all_namespaces=lambda label_selector: pods)
    resolver = ts.cluster_resolver.KubernetesClusterResolver(tf_server_port=ports[0], override_client=client)
    resolver.task_type, resolver.task_id = "worker", rank
    return resolver


def _tpu(rank, ports):
    resolver = ts.cluster_resolver.TPUClusterResolver(",".join(f"grpc://{HERE}:{port}" for port in ports), environ={})
    resolver.task_id = rank
    return resolver


def _torchrun(rank, ports):
    numbers = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": ports[0]}
    environ = {name: str(number) for name, number in numbers.items()}
    return ts.cluster_resolver.TorchrunClusterResolver(environ={**environ, "MASTER_ADDR": HERE})


RESOLVERS = {
    "simple": _simple,
    "union": _union,
    "slurm": _slurm,
    "kubernetes": _kubernetes,
    "tpu": _tpu,
    "torchrun": _torchrun,
}


def _sum_of_ranks(strategy):
    found = strategy.run(lambda: torch.tensor(ts.get_replica_context().replica_id_in_sync_group + 1.0))
    return strategy.num_replicas_in_sync, float(strategy.reduce("SUM", found, axis=None)), strategy.is_chief


def train_with(kind, ports):
    """Return replicas, a sum over them and who is chief, for a strategy that was given a resolver."""
    rank = int(os.environ["RANK"])
    resolver = RESOLVERS[kind](rank, ports)
    strategy = ts.MultiWorkerMirroredStrategy(resolver, devices=["cpu:0"])
    assert strategy.cluster_resolver is resolver
    return _sum_of_ranks(strategy)


@contextlib.contextmanager
def only(environ):
    before = dict(os.environ)
    for name in LAUNCHER_VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def train_under_srun(job_id):
    """Return the same for a strategy that finds the variables of a Slurm step."""
    rank = int(os.environ["RANK"])
    with only({**slurm_step(rank, HERE), "SLURM_JOB_ID": str(job_id)}):
        strategy = ts.MultiWorkerMirroredStrategy(devices=["cpu:0"])
        resolver = strategy.cluster_resolver
        task = (type(resolver).__name__, resolver.task_type, resolver.task_id)
        return task, _sum_of_ranks(strategy)
