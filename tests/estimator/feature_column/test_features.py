"""Raw features: which values are read, and as what."""

import numpy as np
import pytest
import torch

from torchstrategy.estimator.feature_column.features import Features, as_strings


def ragged(*rows):
    """Return an array of lists, which is what a ragged feature travels in."""
    array = np.empty(len(rows), dtype=object)
    array[:] = rows
    return array


@pytest.mark.parametrize(
    "value",
    [
        ["x", ""],
        ("x", ""),
        [b"x", b""],
        ["x", None],
        np.array(["x", ""]),
        np.array([b"x", b""]),
        np.array(["x", ""], dtype=object),
        np.array([["x"], [""]]),
    ],
    ids=repr,
)
def test_strings(value):
    values, present = Features({"a": value}).strings("a")
    assert values.tolist() == [["x"], [""]]
    assert all(type(text) is str for text in values.ravel())
    assert present.tolist() == [[True], [False]]


@pytest.mark.parametrize(
    "value",
    [
        [3, -1],
        (3, -1),
        [3, None],
        torch.tensor([3, -1]),
        torch.tensor([[3], [-1]], dtype=torch.int32),
        torch.tensor([3, 255], dtype=torch.uint8).to(torch.int8),
        np.array([3, -1]),
        np.array([3, -1], dtype=np.int16),
    ],
    ids=repr,
)
def test_integers(value):
    values, present = Features({"a": value}).integers("a")
    assert values.dtype == torch.int64
    assert values.tolist() == [[3], [-1]]
    assert present.tolist() == [[True], [False]]


@pytest.mark.parametrize(
    "value",
    [
        [[5, 6], [], [7]],
        ragged([5, 6], [], [7]),
        ragged(np.array([5, 6]), np.array([], dtype=int), np.array([7])),
        [torch.tensor([5, 6]), torch.tensor([], dtype=torch.int64), torch.tensor([7])],
        torch.sparse_coo_tensor([[0, 0, 2], [0, 1, 0]], [5, 6, 7], (3, 2), check_invariants=True),
        torch.nested.nested_tensor(
            [torch.tensor([5, 6]), torch.tensor([], dtype=torch.int64), torch.tensor([7])], layout=torch.jagged
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_ragged_integers(value):
    features = Features({"a": value})
    values, present = features.integers("a")
    assert features.raw("a").is_ragged
    assert values.dtype == torch.int64
    assert present.tolist() == [[True, True], [False, False], [True, False]]
    assert values[present].tolist() == [5, 6, 7]


def test_ragged_strings_keep_empty_ones():
    values, present = Features({"a": [["x", ""], []]}).strings("a")
    assert values.tolist() == [["x", ""], ["", ""]]
    assert present.tolist() == [[True, True], [False, False]]


def test_sparse_values_of_one_place_are_not_added():
    tensor = torch.sparse_coo_tensor([[0, 0], [0, 0]], [5, 6], (1, 1), check_invariants=True)
    assert Features({"a": tensor}).integers("a")[0].item() in (5, 6)


def test_rows_with_missing_values():
    values, present = Features({"a": [["x", None], None, []]}).strings("a")
    assert present.tolist() == [[True, False], [False, False], [False, False]]
    values, present = Features({"a": [[7, None], None, [8]]}).integers("a")
    assert values[present].tolist() == [7, 8]


@pytest.mark.parametrize("empty", [[], np.empty((0, 2), dtype=object), np.empty(0, dtype=str)], ids=repr)
def test_batches_without_examples(empty):
    values, present = Features({"a": empty}).integers("a")
    assert len(values) == len(present) == 0
    texts, present = Features({"a": empty}).strings("a")
    assert len(texts) == len(present) == 0


def test_values_of_several_dimensions_become_one():
    assert Features({"a": torch.zeros(2, 3, 4, dtype=torch.int64)}).integers("a")[0].shape == (2, 12)


def test_what_is_not_there():
    with pytest.raises(ValueError, match=r"Feature b is not in features dictionary. It has: a"):
        Features({"a": [1]}).raw("b")
    with pytest.raises(ValueError, match=r"dictionary from keys to values. Received: Tensor"):
        Features(torch.zeros(2))


@pytest.mark.parametrize("scalar", [torch.tensor(1), np.array(1), np.array("x")], ids=repr)
def test_scalars_are_refused(scalar):
    with pytest.raises(ValueError, match=r"Feature \(key: a\) cannot have rank 0"):
        Features({"a": scalar}).raw("a")


def test_other_types_are_refused():
    with pytest.raises(ValueError, match=r"must be a tensor, a NumPy array or a list. Received: str"):
        Features({"a": "text"}).raw("a")
    with pytest.raises(ValueError, match=r"key: a\): Expected strings .* Received 1 of type int"):
        Features({"a": ["x", 1]}).raw("a")
    with pytest.raises(ValueError, match=r"numbers only, or strings only. Received datetime.date"):
        Features({"a": np.array(["2020-01-01"], dtype="datetime64[D]")}).raw("a")
    with pytest.raises(ValueError, match=r"numbers only, or strings only. Received 1 of type int"):
        Features({"a": [1, "x"]}).raw("a")


def test_strings_are_no_integers():
    with pytest.raises(ValueError, match=r"Invalid input, not integer. key: a, dtype: str"):
        Features({"a": ["x"]}).integers("a")
    with pytest.raises(ValueError, match=r"not integer. key: a, dtype: torch.float32"):
        Features({"a": torch.zeros(2)}).integers("a")
    with pytest.raises(ValueError, match=r"not integer. key: a, dtype: torch.bool"):
        Features({"a": torch.zeros(2, dtype=torch.bool)}).integers("a")
    with pytest.raises(ValueError, match=r"must be compatible. key: a, column dtype: str"):
        Features({"a": torch.zeros(2)}).strings("a")


def test_as_strings_keeps_the_shape_and_refuses_numbers():
    assert as_strings(np.array([["a", "b"]])).shape == (1, 2)
    with pytest.raises(ValueError, match="Received 1 of type int"):
        as_strings(["a", 1])
    with pytest.raises(ValueError, match="Received a tensor of dtype"):
        as_strings(torch.zeros(1))


class Column:
    """What other libraries give, such as pandas."""

    def __init__(self, *values):
        self.values = values

    def __array__(self, dtype=None, copy=None):
        return np.array(self.values, dtype=dtype)


def test_arrays_of_other_libraries():
    assert Features({"a": Column(1, 2)}).integers("a")[0].tolist() == [[1], [2]]
    assert Features({"a": Column("x", "y")}).strings("a")[0].tolist() == [["x"], ["y"]]


def test_arrays_that_are_read_only():
    array = np.array([1, 2])
    array.setflags(write=False)
    assert Features({"a": array}).integers("a")[0].tolist() == [[1], [2]]


def test_numbers_go_to_the_device():
    features = Features({"a": np.array([1]), "b": ["x"]}, torch.device("meta"))
    assert features.raw("a").values.device.type == "meta"
    assert features.strings("b")[1].device.type == "meta"
    assert Features({"a": [1], "b": torch.zeros(1, device="meta")}).device.type == "meta"
