from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field

import pytest

from torchstrategy.base import tree

Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Box:
    a: object
    b: object = None
    size: int = field(default=0, init=False)


STRUCTURES = [
    3,
    None,
    (),
    {},
    [1, (2, None)],
    {"b": 1, "a": [2, {"c": 3}]},
    Pair(1, [2]),
    OrderedDict(z=1, a=2),
    {"x": Box((1, 2), Box(3))},
    Pair(Box(1), (Box([2]),)),
]


@pytest.mark.parametrize("structure", STRUCTURES, ids=repr)
def test_flatten_and_unflatten(structure):
    leaves, spec = tree.flatten(structure)
    assert spec.unflatten(leaves) == structure
    assert tree.map_leaves(lambda leaf: leaf, structure) == structure


def test_map_leaves_keeps_containers():
    assert tree.map_leaves(lambda x: x * 2, {"p": Pair(1, [2]), "d": Box(3, (4,))})["p"] == Pair(2, [4])


def test_map_structure():
    assert tree.map_structure(lambda a, b: a + b, [{"x": (1, 2)}, {"x": (10, 20)}]) == {"x": (11, 22)}
    with pytest.raises(ValueError, match="same nested structure"):
        tree.map_structure(max, [(1,), [1]])
    with pytest.raises(ValueError, match="same nested structure"):
        tree.map_structure(max, [{"a": 1}, {"b": 1}])
    with pytest.raises(ValueError, match="same nested structure"):
        tree.map_structure(max, [({"a": 1, "b": 2},), ({"b": 1, "a": 2}, 3)])


def test_map_structure_takes_keys_in_any_order():
    """As in tf; the result has the first one's order."""
    first = {"a": 1, "b": [{"x": 2, "y": Pair(3, {"p": 4, "q": 5})}]}
    other = {"b": [{"y": Pair(30, {"q": 50, "p": 40}), "x": 20}], "a": 10}
    added = tree.map_structure(lambda a, b: a + b, [first, other])
    assert added == {"a": 11, "b": [{"x": 22, "y": Pair(33, {"p": 44, "q": 55})}]}
    assert list(added) == ["a", "b"]
    assert list(other) == ["b", "a"]


@pytest.mark.parametrize("structure", STRUCTURES, ids=repr)
def test_leaf_paths_are_in_the_order_of_the_leaves(structure):
    assert [leaf for _, leaf in tree.leaf_paths(structure)] == tree.all_leaves(structure)


def test_leaf_paths():
    structure = {"x": [1, None], "pair": Pair(2, Box(3, (4,)))}
    paths = ["['x'][0]", "['x'][1]", "['pair'].x", "['pair'].y.a", "['pair'].y.b[0]", "['pair'].y.size"]
    assert [path for path, _ in tree.leaf_paths(structure)] == paths
    assert tree.leaf_paths(5) == [("", 5)]
