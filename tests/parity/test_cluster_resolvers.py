"""tf.distribute's measured cases of cluster resolvers, ``multi_worker_util`` and ``CommunicationOptions``.

Each case gives what TF gave, or what a known difference makes of it: these are listed here, with the title of their
entry in ``docs/differences.md`` and with what has to come instead.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

import torchstrategy as ts
from tests.parity.driver import EXCEPTIONS
from torchstrategy.cluster_resolver import multi_worker_util
from torchstrategy.cluster_resolver.slurm import expand_hostlist, expand_tasks_per_node

HERE = Path(__file__).parent
DIFFERENCES_PATH = HERE.parents[1] / "docs" / "differences.md"
CASES = json.loads((HERE / "cluster_resolver_cases.json").read_text())
SECTION = "Differences of cluster resolvers"

Spec = ts.cluster_resolver.ClusterSpec
Simple = ts.cluster_resolver.SimpleClusterResolver
Union = ts.cluster_resolver.UnionResolver
Options = ts.experimental.CommunicationOptions
Implementation = ts.experimental.CommunicationImplementation


def without_gpus(output):
    """A task of a host without GPUs has none, and CUDA_VISIBLE_DEVICES stays what it was."""
    return {**output, "num_accelerators": {}, "CUDA_VISIBLE_DEVICES": ""}


def alone_on_n1(expected):
    assert expected == {"exception": "FileNotFoundError"}
    return {
        "before_cluster_spec": [None, None, [None, None], ""],
        "cluster_spec": {"worker": ["n1:8888"]},
        "task_info": ["worker", 0],
        "master": "grpc://n1:8888",
        "num_accelerators": {},
        "CUDA_VISIBLE_DEVICES": None,
        "rpc_layer": "grpc",
        "environment": "",
    }


# Pattern over a case's id -> title of the entry in docs/differences.md, and what makes our result of TF's
KNOWN_DIFFERENCES = {
    r"slurm\.cuda_empty_counts_one": ("A Slurm step needs no GPUs", lambda e: {"output": without_gpus(e["output"])}),
    r"slurm\.no_cuda_no_smi": ("A Slurm step needs no GPUs", lambda e: {"output": alone_on_n1(e)}),
    r"union\.override_zero": ("UnionResolver takes task 0", lambda e: {"output": 0}),
}


def plain(value):
    """Return a value as the figures have it."""
    if isinstance(value, Spec):
        return {"ClusterSpec": plain(value.as_dict())}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, Implementation):
        return str(value)
    return value


# ClusterSpec

FULL = {"worker": ["a:1", "b:2"], "ps": ["c:3"]}
SPARSE = {"worker": {1: "a:1", 3: "b:2"}}
CLUSTER_SPEC = {
    "cs.jobs": lambda: Spec(FULL).jobs,
    "cs.task_indices.missing": lambda: Spec(FULL).task_indices("x"),
    "cs.task_address": lambda: Spec(FULL).task_address("worker", 1),
    "cs.task_address.badidx": lambda: Spec(FULL).task_address("worker", 2),
    "cs.task_address.negidx": lambda: Spec(FULL).task_address("worker", -1),
    "cs.job_tasks": lambda: Spec(FULL).job_tasks("worker"),
    "cs.sparse.task_indices": lambda: Spec({"worker": {1: "a:1"}}).task_indices("worker"),
    "cs.empty": lambda: [Spec({}).as_dict(), bool(Spec({})), Spec({}).jobs, repr(Spec({}))],
    "cs.empty_job_list": lambda: [
        Spec({"worker": []}).as_dict(),
        bool(Spec({"worker": []})),
        Spec({"worker": []}).num_tasks("worker"),
        Spec({"worker": []}).jobs,
    ],
    "cs.eq_same": lambda: Spec(FULL) == Spec(FULL),
    "cs.eq_dict_list": lambda: Spec(FULL) == FULL,
    "cs.eq_dict_idx": lambda: Spec(FULL) == {"worker": {0: "a:1", 1: "b:2"}, "ps": {0: "c:3"}},
    "cs.copy_from_spec": lambda: [Spec(Spec(FULL)).as_dict(), Spec(Spec(FULL)).jobs],
    "cs.hash": lambda: hash(Spec(FULL)),
}


def cluster_spec(case):
    if case["id"] in CLUSTER_SPEC:
        return CLUSTER_SPEC[case["id"]]()
    return Spec(case["inputs"]).as_dict()


# The resolvers


def tf_config(case):
    two = {"cluster": {"worker": ["h1:1", "h2:1"]}, "task": {"type": "worker", "index": 0}}
    if case["id"] == "tfconfig.master_args":
        resolver = ts.cluster_resolver.TFConfigClusterResolver(environ={"TF_CONFIG": json.dumps(two)})
        return [resolver.master("worker", 1), resolver.master("worker", 1, "rpc"), resolver.master(task_id=1)]
    text = case["inputs"]["TF_CONFIG"]
    environ = {} if text is None else {"TF_CONFIG": text if isinstance(text, str) else json.dumps(text)}
    resolver = ts.cluster_resolver.TFConfigClusterResolver(**case["inputs"]["kwargs"], environ=environ)
    value = getattr(resolver, case["inputs"]["read"])
    return value() if callable(value) else value


WORKERS = Spec({"worker": ["h1:1", "h2:1"]})
SIMPLE = {
    "simple.master_default_rpc": lambda: Simple(WORKERS, task_type="worker", task_id=1, rpc_layer="grpc").master(),
    "simple.master_explicit_rpc": lambda: Simple(WORKERS).master("worker", 1, "x"),
    "simple.master_oor": lambda: Simple(WORKERS).master("worker", 5),
}


def of(cluster, **kwargs):
    return Simple(Spec(cluster), **kwargs)


FIRST = {"task_type": "worker", "task_id": 1, "environment": "e", "num_accelerators": {"GPU": 2}, "rpc_layer": "g"}
OTHER = {"task_type": "ps", "task_id": 7, "environment": "o", "num_accelerators": {"GPU": 9}, "rpc_layer": "o"}


def first_wins():
    first, other = of({"worker": ["a:1"]}, master="m", **FIRST), of({"ps": ["p:1"]}, master="o", **OTHER)
    union = Union(first, other)
    return [
        union.task_type,
        union.task_id,
        union.rpc_layer,
        union.environment,
        union.num_accelerators(),
        union.master(),
    ]


def jobs():
    return of({"worker": ["a:1"]}), of({"worker": ["b:1"], "ps": ["p:1"]})


UNION = {
    "union.none": Union,
    "union.badtype": lambda: Union("x"),
    "union.concat": lambda: Union(of({"worker": ["a:1", "b:1"]}), of({"worker": ["c:1"]})).cluster_spec(),
    "union.concat_rev": lambda: Union(of({"worker": ["c:1"]}), of({"worker": ["a:1", "b:1"]})).cluster_spec(),
    "union.jobs": lambda: Union(*jobs()).cluster_spec(),
    "union.dict_ok": lambda: Union(of({"worker": {1: "a:1"}}), of({"worker": {3: "b:1"}})).cluster_spec(),
    "union.dict_list_ok": lambda: Union(of({"worker": ["a:1", "b:1"]}), of({"worker": {5: "f:1"}})).cluster_spec(),
    "union.first_wins": first_wins,
    "union.override_zero": lambda: Union(of({"worker": ["a:1"]}, **FIRST), task_id=0).task_id,
    "union.first_none": lambda: Union(of({"worker": ["a:1"]}), of({"ps": ["p:1"]}, **OTHER)).task_type,
    "union.master_explicit": lambda: Union(*jobs()).master("ps", 0),
    "union.master_explicit_rpc": lambda: Union(*jobs(), rpc_layer="z").master("ps", 0),
}


def slurm(case):
    name = case["id"].split(".")[1]
    if name == "expand_hostlist":
        return expand_hostlist(case["inputs"])
    if name == "expand_tasks_per_node":
        return expand_tasks_per_node(case["inputs"])
    environ = dict(case["inputs"]["env"])
    resolver = ts.cluster_resolver.SlurmClusterResolver(**case["inputs"]["kwargs"], environ=environ)
    before = [resolver.task_type, resolver.task_id, resolver.get_task_info(), resolver.master()]
    return {
        "before_cluster_spec": before,
        "cluster_spec": resolver.cluster_spec().as_dict(),
        "task_info": resolver.get_task_info(),
        "master": resolver.master(),
        "num_accelerators": resolver.num_accelerators(),
        "CUDA_VISIBLE_DEVICES": environ.get("CUDA_VISIBLE_DEVICES"),
        "rpc_layer": resolver.rpc_layer,
        "environment": resolver.environment,
    }


def pods(of_selectors):
    def named(name, ip):
        status = SimpleNamespace(phase="Running", host_ip=ip, pod_ip="no")
        return SimpleNamespace(metadata=SimpleNamespace(name=name), status=status)

    return SimpleNamespace(
        list_pod_for_all_namespaces=lambda label_selector: SimpleNamespace(
            items=[named(*pod) for pod in of_selectors.get(label_selector, [])]
        )
    )


KUBERNETES = {
    "k8s.empty": lambda: ts.cluster_resolver.KubernetesClusterResolver(override_client=pods({})).cluster_spec(),
    "k8s.multi": lambda: ts.cluster_resolver.KubernetesClusterResolver(
        {"worker": ["x", "y"], "ps": ["z"]},
        tf_server_port=90,
        override_client=pods({"x": [("z-pod", "1.0.0.1")], "y": [("a-pod", "1.0.0.2")], "z": [("p", "1.0.0.3")]}),
    ).cluster_spec(),
}


def tpu_of(*asked, **kwargs):
    resolver = ts.cluster_resolver.TPUClusterResolver("grpc://10.1.2.3:8470", environ={}, **kwargs)
    return [resolver.cluster_spec().as_dict(), *(ask(resolver) for ask in asked)]


TPU = {
    "tpu.jobname": lambda: tpu_of(lambda r: r.get_job_name(), job_name="tpu_worker"),
    "tpu.address_coord": lambda: tpu_of(
        lambda r: r.master(),
        lambda r: r.task_type,
        lambda r: r.task_id,
        coordinator_name="coordinator",
        coordinator_address="10.128.1.5:10203",
    ),
}


# multi_worker_util


def util(case):
    name, *rest = case["id"].split(".")[1:]
    inputs = case["inputs"]
    if name == "validate":
        spec, *task = {
            "bad_type": (["a:1"], "worker", 0),
            "negative_id_ok": (inputs, "worker", -1),
            "type_none": (inputs, None, None),
        }[rest[0]]
        return multi_worker_util.validate_cluster_spec(spec, *task)
    if name == "coordination_leader":
        return multi_worker_util.coordination_leader(inputs)
    function = getattr(multi_worker_util, name)
    if not isinstance(inputs, dict):
        return function()
    task = [inputs["task_type"]] if name == "worker_count" else [inputs["task_type"], inputs["task_id"]]
    return function(inputs["spec"], *task)


# CommunicationOptions


def communication(case):
    special = {
        "co.alias": lambda: ts.experimental.CollectiveCommunication is Implementation,
        "co.positional": lambda: "Options" if Options(1) == Options(bytes_per_pack=1) else None,
        "co.merge_none": lambda: Options(1, 2.0, "NCCL").merge(Options()),
        "co.hints": lambda: (
            "Options"
            if isinstance(ts.experimental.CollectiveHints(bytes_per_pack=5, timeout_seconds=1), Options)
            else ""
        ),
    }
    if case["id"] in special:
        found = special[case["id"]]()
    else:
        found = Options(**{key: argument(key, text) for key, text in case["inputs"].items()})
    return (
        found if not isinstance(found, Options) else [found.bytes_per_pack, found.timeout_seconds, found.implementation]
    )


def argument(key, text):
    if key != "implementation":
        return json.loads(text)
    name = text.removeprefix("CommunicationImplementation.")
    return name if name == text else Implementation[name]


AREAS = {
    "cs": cluster_spec,
    "tfconfig": tf_config,
    "simple": lambda case: SIMPLE[case["id"]](),
    "union": lambda case: UNION[case["id"]](),
    "slurm": slurm,
    "k8s": lambda case: KUBERNETES[case["id"]](),
    "tpu": lambda case: TPU[case["id"]](),
    "mwu": util,
    "co": communication,
}


def area_of(case):
    return case["id"].split(".")[0]


def run(case):
    try:
        return {"output": plain(AREAS[area_of(case)](case))}
    except Exception as error:  # noqa: BLE001
        return error


def equal(expected, got):
    if "exception" in expected:
        name = expected["exception"]
        kinds = (json.JSONDecodeError,) if name == "JSONDecodeError" else EXCEPTIONS.get(name, ())
        return isinstance(got, Exception) and isinstance(got, kinds)
    return got == {"output": plain(expected["output"])}


@pytest.fixture
def _host_without_gpus(monkeypatch):
    """The figures are of one."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("torchstrategy.cluster_resolver.resolver.visible_devices", lambda: ["cpu:0"])


@pytest.mark.usefixtures("_host_without_gpus")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_measured_cases(case):
    found = [entry for pattern, entry in KNOWN_DIFFERENCES.items() if re.fullmatch(pattern, case["id"])]
    got = run(case)
    if found:
        assert not equal(case["expected"], got), "listed as a difference, but equal to TF"
    expected = found[0][1](case["expected"]) if found else case["expected"]
    assert equal(expected, got), f"expected {expected}, got {got!r}"


def test_all_cases_are_there():
    assert Counter(map(area_of, CASES)) == {
        "cs": 20,
        "tfconfig": 73,
        "simple": 3,
        "union": 12,
        "slurm": 34,
        "k8s": 2,
        "tpu": 2,
        "mwu": 36,
        "co": 9,
    }


def test_every_pattern_matches_a_case():
    assert not [p for p in KNOWN_DIFFERENCES if not any(re.fullmatch(p, case["id"]) for case in CASES)]


def test_every_difference_is_explained():
    section = DIFFERENCES_PATH.read_text().partition(f"\n## {SECTION}\n")[2].partition("\n## ")[0]
    titles = {title.replace("`", "") for title in re.findall(r"^### (.*)$", section, re.MULTILINE)}
    assert {title for title, _ in KNOWN_DIFFERENCES.values()} <= titles
