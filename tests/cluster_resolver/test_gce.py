import json
import sys

import pytest

import torchstrategy as ts

PAGES = [
    {"items": [{"instance": "https://x/zones/z/instances/i2"}, {"instance": "https://x/zones/z/instances/i1"}]},
    {"items": [{"instance": "i3"}]},
    {},
]
ADDRESSES = {"i1": "10.0.0.2", "i2": "10.0.0.9", "i3": "10.0.0.1"}


class Request:
    def __init__(self, answer, page=0):
        self.answer = answer
        self.page = page

    def execute(self):
        return self.answer


class Service:
    """Answers as Google's client of ``compute`` does, with three pages of instances."""

    def instanceGroups(self):
        return self

    def listInstances(self, *, project, zone, instanceGroup, body, orderBy):
        assert (project, zone, instanceGroup, orderBy) == ("p", "z", "g", "name")
        assert body == {"instanceState": "RUNNING"}
        return Request(PAGES[0])

    def listInstances_next(self, *, previous_request, previous_response):
        assert previous_response is PAGES[previous_request.page]
        page = previous_request.page + 1
        return Request(PAGES[page], page) if page < len(PAGES) else None

    def instances(self):
        return self

    def get(self, *, project, zone, instance):
        assert (project, zone) == ("p", "z")
        return Request({"networkInterfaces": [{"networkIP": ADDRESSES[instance]}]})


def test_instances_of_all_pages():
    resolver = ts.cluster_resolver.GCEClusterResolver("p", "z", "g", 8470, task_id=1, service=Service())
    assert resolver.cluster_spec().as_dict() == {"worker": ["10.0.0.1:8470", "10.0.0.2:8470", "10.0.0.9:8470"]}
    assert (resolver.task_type, resolver.task_id, resolver.environment) == ("worker", 1, "")
    assert resolver.master() == "grpc://10.0.0.2:8470"
    resolver.task_id, resolver.rpc_layer = 2, ""
    assert resolver.master() == "10.0.0.9:8470"
    assert resolver.master("worker", 0, "x") == "x://10.0.0.1:8470"
    with pytest.raises(RuntimeError, match="pass it to the constructor"):
        resolver.task_type = "chief"


def test_without_the_client(monkeypatch):
    monkeypatch.setitem(sys.modules, "googleapiclient", None)
    monkeypatch.setitem(sys.modules, "googleapiclient.discovery", None)
    with pytest.raises(ImportError, match=r"the argument service: pip install 'google-api-python-client>="):
        ts.cluster_resolver.GCEClusterResolver("p", "z", "g", 8470)


def test_with_googles_client():
    """The names of methods and arguments are those of the real interface."""
    discovery = pytest.importorskip("googleapiclient.discovery", reason="needs the extra gce")
    http = pytest.importorskip("googleapiclient.http")
    details = {"networkInterfaces": [{"networkIP": "10.0.0.2"}]}
    answers = [({"status": "200"}, json.dumps(answer)) for answer in ({"items": [{"instance": "i1"}]}, details)]
    service = discovery.build("compute", "v1", http=http.HttpMockSequence(answers))
    resolver = ts.cluster_resolver.GCEClusterResolver("p", "z", "g", 8470, service=service)
    assert resolver.cluster_spec().as_dict() == {"worker": ["10.0.0.2:8470"]}
