import pytest

import torchstrategy as ts

ClusterSpec = ts.cluster_resolver.ClusterSpec
Simple = ts.cluster_resolver.SimpleClusterResolver
Union = ts.cluster_resolver.UnionResolver


def of(cluster, **kwargs):
    return Simple(ClusterSpec(cluster), **kwargs)


def test_simple_says_what_it_was_given():
    spec = ClusterSpec({"worker": ["a:1", "b:1"]})
    resolver = Simple(spec, "m:1", "worker", 1, "cloud", {"GPU": 4}, "grpc")
    assert resolver.cluster_spec() is spec
    assert (resolver.task_type, resolver.task_id, resolver.environment) == ("worker", 1, "cloud")
    assert resolver.num_accelerators("worker", 0) == {"GPU": 4}
    assert resolver.master() == resolver.master("worker") == "grpc://m:1"
    assert resolver.master("worker", 0, "") == "grpc://a:1"
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "chief", 0, None
    assert (resolver.task_type, resolver.task_id, resolver.master()) == ("chief", 0, "m:1")


def test_simple_defaults():
    resolver = of({})
    found = (resolver.master(), resolver.task_type, resolver.task_id, resolver.environment, resolver.num_accelerators())
    assert found == ("", None, None, "", {})


def test_simple_wants_a_cluster_spec():
    with pytest.raises(TypeError, match=r"ClusterSpec\(\{'worker': \['host1:2222'\]\}\).*Received"):
        Simple({"worker": ["a:1"]})


def test_union_keeps_duplicates_and_overrides():
    first, second = of({"worker": ["a:1"]}, task_type="worker", task_id=1), of({"worker": ["a:1"], "ps": ["p:1"]})
    union = Union(first, second, task_type="chief", rpc_layer="grpc")
    assert union.cluster_spec().as_dict() == {"worker": ["a:1", "a:1"], "ps": ["p:1"]}
    assert (union.task_type, union.task_id, union.rpc_layer) == ("chief", 1, "grpc")
    union.task_type, union.task_id, union.rpc_layer = None, 0, None
    assert (union.task_type, union.task_id, union.rpc_layer) == ("worker", 0, None)


def test_union_keeps_indices_that_have_holes():
    assert Union(of({"worker": {2: "c:1"}}), of({"worker": ["a:1", "b:1"]})).cluster_spec().as_dict() == {
        "worker": ["a:1", "b:1", "c:1"]
    }
    with pytest.raises(KeyError, match=r"the tasks \[1\] of job 'worker'"):
        Union(of({"worker": {1: "c:1"}}), of({"worker": ["a:1", "b:1"]})).cluster_spec()


def test_union_ignores_empty_jobs():
    parts = of({"worker": []}), of({"worker": ["a:1"]}), of({"worker": ["b:1"]})
    assert Union(*parts).cluster_spec().as_dict() == {"worker": ["a:1", "b:1"]}


def test_union_asks_again():
    environ = {"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}'}
    union = Union(ts.cluster_resolver.TFConfigClusterResolver(environ=environ), of({"ps": ["p:1"]}))
    assert union.cluster_spec().jobs == ["worker", "ps"]
    environ["TF_CONFIG"] = "{}"
    assert union.cluster_spec().jobs == ["ps"]


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "message"),
    [
        ((), {}, ValueError, "at least one"),
        (("x",), {}, TypeError, "must be cluster resolvers. Received: 'x'"),
        ((of({}),), {"task_index": 0}, ValueError, r"Received: \['task_index'\]"),
    ],
)
def test_union_refuses(args, kwargs, error, message):
    with pytest.raises(error, match=message):
        Union(*args, **kwargs)


def test_a_resolver_of_ones_own_needs_both_methods():
    with pytest.raises(TypeError, match="abstract"):
        ts.cluster_resolver.ClusterResolver()
