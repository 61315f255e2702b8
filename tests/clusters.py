"""Clusters on this host, and being one of their tasks."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torchstrategy.base.addresses import ReservedPorts

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TF_CONFIG")


#: Ports stay reserved as long as this process lives.
_reserved: list[ReservedPorts] = []


def free_ports(number: int) -> list[int]:
    _reserved.append(ReservedPorts(number))
    return list(_reserved[-1].numbers)


def new_cluster(jobs: Sequence[str]) -> dict[str, list[str]]:
    """Return a cluster with a task for each named job, at free ports of this host."""
    cluster: dict[str, list[str]] = {}
    for job, port in zip(jobs, free_ports(len(jobs)), strict=True):
        cluster.setdefault(job, []).append(f"127.0.0.1:{port}")
    return cluster


@contextlib.contextmanager
def as_task(cluster: dict[str, list[str]] | None, job: str = "worker", index: int = 0) -> Iterator[None]:
    """Let this process be a task of a cluster, or of none: ``TF_CONFIG`` in place of what a launcher has set."""
    before = dict(os.environ)
    for name in LAUNCHER_VARIABLES:
        os.environ.pop(name, None)
    if cluster is not None:
        os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def task_of_rank(cluster: dict[str, list[str]], rank: int) -> tuple[str, int]:
    """Return the job and index of a task that trains, by its number; the chief has 0."""
    tasks = [(job, index) for job in ("chief", "worker") for index in range(len(cluster.get(job, [])))]
    return tasks[rank]


def run_programs(
    arguments: Sequence[str], environments: Sequence[Mapping[str, str]], folder: Path, timeout_s: float = 60.0
) -> list[tuple[int, str, str]]:
    """Run Python once with each environment, all at a time; return exit status, output and error output of each."""
    programs = [
        subprocess.Popen(
            [sys.executable, *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for environment in environments
    ]
    try:
        outputs = [program.communicate(timeout=timeout_s) for program in programs]
    finally:
        for program in programs:
            program.kill()
    return [(program.returncode, *output) for program, output in zip(programs, outputs, strict=True)]
