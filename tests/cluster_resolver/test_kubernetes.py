import sys
from types import SimpleNamespace

import pytest

import torchstrategy as ts

Kubernetes = ts.cluster_resolver.KubernetesClusterResolver
Location = ts.cluster_resolver.KubernetesExecutableLocation


def pod(name, phase="Running"):
    number = sum(map(ord, name)) % 250
    status = SimpleNamespace(phase=phase, host_ip=f"10.0.0.{number}", pod_ip=f"10.9.0.{number}")
    return SimpleNamespace(metadata=SimpleNamespace(name=name), status=status)


class Client:
    """Answers as ``kubernetes.client.CoreV1Api`` does."""

    def __init__(self, **pods):
        self.pods = pods
        self.asked = []

    def list_pod_for_all_namespaces(self, *, label_selector):
        self.asked.append((None, label_selector))
        return SimpleNamespace(items=self.pods.get(label_selector, []))

    def list_namespaced_pod(self, namespace, *, label_selector):
        self.asked.append((namespace, label_selector))
        return SimpleNamespace(items=self.pods.get(label_selector, []))


def test_pods_are_sorted_within_a_selector():
    client = Client(first=[pod("b"), pod("a")], second=[pod("A")])
    resolver = Kubernetes({"worker": ["first", "second"]}, override_client=client)
    hosts = [f"10.0.0.{ord(name)}:8470" for name in "abA"]
    assert resolver.cluster_spec().as_dict() == {"worker": hosts}
    assert client.asked == [(None, "first"), (None, "second")]


def test_the_task_must_be_told():
    resolver = Kubernetes({"worker": ["x"]}, override_client=Client(x=[pod("a"), pod("b")]))
    assert (resolver.task_type, resolver.task_id, resolver.master()) == (None, None, "")
    resolver.task_type, resolver.task_id = "worker", 1
    assert resolver.master() == "grpc://10.0.0.98:8470"
    assert resolver.master("worker", 0, "x") == "x://10.0.0.97:8470"


def test_the_cluster_is_asked_each_time():
    client = Client()
    resolver = Kubernetes(override_client=client)
    assert resolver.cluster_spec().num_tasks("worker") == 0
    client.pods["job-name=tensorflow"] = [pod("a")]
    assert resolver.cluster_spec().num_tasks("worker") == 1


def test_addresses_of_pods_of_one_namespace():
    client = Client(x=[pod("a")])
    resolver = Kubernetes({"worker": ["x"]}, 90, override_client=client, namespace="mine", use_pod_ip=True)
    assert resolver.cluster_spec().as_dict() == {"worker": ["10.9.0.97:90"]}
    assert client.asked == [("mine", "x")]


def test_a_pod_that_does_not_run():
    with pytest.raises(RuntimeError, match="Pod 'b' is not running; phase: 'Pending'"):
        Kubernetes({"worker": ["x"]}, override_client=Client(x=[pod("a"), pod("b", "Pending")])).cluster_spec()


def test_without_the_client(monkeypatch):
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    monkeypatch.setitem(sys.modules, "kubernetes.client", None)
    with pytest.raises(ImportError, match=r"pip install 'kubernetes>="):
        Kubernetes()


@pytest.mark.parametrize(
    ("location", "loader"), [(Location.WITHIN_CLUSTER, "incluster"), (Location.OFF_CLUSTER, "kube")]
)
def test_where_the_client_finds_the_cluster(location, loader, monkeypatch):
    loaded = []
    client = SimpleNamespace(CoreV1Api=lambda: Client(x=[pod("a")]))
    loaders = {f"load_{name}_config": lambda name=name: loaded.append(name) for name in ("incluster", "kube")}
    config = SimpleNamespace(**loaders)
    for name, module in {
        "kubernetes": SimpleNamespace(),
        "kubernetes.client": client,
        "kubernetes.config": config,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    resolver = Kubernetes({"worker": ["x"]}, executable_location=location)
    assert resolver.cluster_spec().num_tasks("worker") == 1
    assert loaded == [loader]


def test_bad_arguments():
    with pytest.raises(ValueError, match="KubernetesExecutableLocation"):
        Kubernetes(override_client=Client(), executable_location="here")
    with pytest.raises(TypeError, match="Job 'worker' must have a list of label selectors"):
        Kubernetes({"worker": "job-name=x"}, override_client=Client())
