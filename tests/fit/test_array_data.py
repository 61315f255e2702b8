"""Arrays as the arguments of ``fit``: what they become, and what is wrong with them."""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from tests.fit.input_data import Frame
from torchstrategy.fit.arguments import named_arguments
from torchstrategy.fit.array_data import make_arrays

X = np.ones((4, 2), np.float32)


def arrays_of(x, y=None, sample_weight=None):
    return make_arrays(x, y, sample_weight, named_arguments("fit"))


def first_rows(x, order=None):
    (leaf,) = arrays_of(x).rows(0, 2, order).leaves
    return leaf


@dataclass
class Inputs:
    image: Any
    text: Any


@pytest.mark.parametrize(
    ("array", "dtype"),
    [
        (np.ones(4), torch.float32),
        (np.ones(4, np.float16), torch.float32),
        (np.ones(4, np.int64), torch.int64),
        (np.ones(4, np.uint8), torch.uint8),
        (np.ones(4, np.uint16), torch.uint16),
        (np.ones(4, bool), torch.bool),
        (np.ones(4, np.complex64), torch.complex64),
        (Frame(np.ones(4)), torch.float32),
        (torch.ones(4, dtype=torch.float64), torch.float64),
        (torch.ones(4, dtype=torch.float16), torch.float16),
        (torch.ones(4, requires_grad=True), torch.float32),
        (np.ones(4, ">i4"), torch.int32),
        (np.ones(8)[::-2], torch.float32),
        (np.ones((4, 2)).T[0], torch.float32),
    ],
)
@pytest.mark.parametrize("order", [None, torch.tensor([2, 0, 1, 3])])
def test_dtypes(array, dtype, order):
    rows = first_rows(array, order)
    assert rows.dtype is dtype
    assert rows.tolist() == [1, 1]
    assert not rows.requires_grad


def test_numpys_floats_become_the_default_dtype():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert first_rows(np.ones(4, np.float32)).dtype is torch.float64
        assert first_rows(torch.ones(4, dtype=torch.float32)).dtype is torch.float32
    finally:
        torch.set_default_dtype(before)


def test_the_memory_is_that_of_the_users_arrays():
    x, tensor = np.zeros((1000, 3)), torch.zeros(1000)
    arrays = arrays_of(x, tensor)
    assert np.shares_memory(arrays.tensors[0].numpy(), x)
    assert arrays.tensors[1].data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("order", [None, torch.arange(4)])
@pytest.mark.parametrize("make", [lambda: np.zeros(4, np.float32), lambda: np.zeros(4), lambda: torch.zeros(4)])
def test_what_a_step_does_to_its_batch_does_not_reach_the_users_array(make, order):
    x = make()
    first_rows(x, order).fill_(7)
    assert x.sum() == 0


def test_memory_maps_do_not_warn(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(4))
    x = np.load(tmp_path / "x.npy", mmap_mode="r")
    first_rows(x).fill_(7)
    assert x.tolist() == [0, 1, 2, 3]


def test_structures():
    x = Inputs(image=[torch.arange(4), {"a": np.arange(4)}], text=(torch.ones(4),))
    batch = arrays_of(x, {"b": np.arange(4)}).rows(1, 3)
    x, y = batch.spec.unflatten(batch.leaves)
    assert (x.image[0].tolist(), x.image[1]["a"].tolist(), y["b"].tolist()) == ([1, 2], [1, 2], [1, 2])


@pytest.mark.parametrize(
    ("y_shape", "weight_shape"),
    [((4,), (4,)), ((4,), (4, 1)), ((4, 1), (4,)), ((4, 5, 6), (4, 5)), ((4, 5, 6), (4, 1, 6))],
)
def test_weights_of_examples_and_of_parts(y_shape, weight_shape):
    assert arrays_of(X, np.ones(y_shape), np.ones(weight_shape)).num_examples == 4


def test_weights_by_output():
    y = {"a": np.ones((4, 3)), "b": np.ones(4)}
    assert arrays_of(X, y, np.ones(4)).num_examples == 4
    assert arrays_of(X, y, {"a": np.ones((4, 3)), "b": None}).num_examples == 4
    with pytest.raises(ValueError, match=re.escape("fit(sample_weight=...)['b'] must hold one number")):
        arrays_of(X, y, {"a": np.ones(4), "b": np.ones((4, 3))})


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        ((X, X[:3]), ["same length", "fit(x=...) has 4, fit(y=...) has 3", "first dimension"]),
        ((X, X, X[:2, 0]), ["fit(x=...) has 4, fit(y=...) has 4, fit(sample_weight=...) has 2"]),
        (([X, {"a": X[1:]}],), ["fit(x=...)[0] has 4, fit(x=...)[1]['a'] has 3"]),
        ((Inputs(X, X[1:]),), ["fit(x=...).image has 4, fit(x=...).text has 3"]),
        ((X, np.array(["a"] * 4)), ["fit(y=...) has dtype <U1: it holds no numbers", "astype('float32')"]),
        ((np.array([[1], [1, 2]], object),), ["fit(x=...) has dtype object: it holds Python objects"]),
        ((Frame(np.array([b"a", None], object)),), ["fit(x=...) has dtype object"]),
        ((np.array(["2020-01-01"], "M8[D]"),), ["fit(x=...) has dtype datetime64[D]"]),
        ((np.ones(3, np.longdouble),), ["which torch doesn't have", "astype('float32')"]),
        ((np.float32(3),), ["fit(x=...) must have a first dimension", "Received a scalar"]),
        ((torch.tensor(3),), ["fit(x=...) must have a first dimension"]),
        ((X, X[:0]), ["fit(y=...) has no examples: its shape is (0, 2)"]),
        (
            (X, X[:, 0], np.ones((4, 3))),
            ["fit(sample_weight=...) must hold one number", "(4, 3)", "fit(y=...) has shape (4,)"],
        ),
        ((X, X, np.ones(4) * 1j), ["fit(sample_weight=...) must hold one number"]),
        (({"a": None},), ["fit(x=...) holds no arrays"]),
    ],
)
def test_wrong_values(arguments, messages):
    with pytest.raises(ValueError, match=re.escape(messages[0])) as error:
        arrays_of(*arguments)
    assert all(message in str(error.value) for message in messages)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((X, [0, 1, 0, 1]), "fit(y=...)[0] is an int, not a numpy array or a tensor. Lists of numbers are not taken"),
        (({"a": "text"},), "fit(x=...)['a'] is a str, not a numpy array or a tensor. Models take numbers: encode"),
        ((X, X, object()), "fit(sample_weight=...) is an object, not a numpy array or a tensor. Convert it, or pass"),
        ((torch.ones(4).to_sparse(),), "fit(x=...) is a sparse or nested tensor"),
        ((torch.nested.nested_tensor([torch.ones(1)] * 4, layout=torch.jagged),), "fit(x=...) is a sparse or nested"),
    ],
)
def test_wrong_types(arguments, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        arrays_of(*arguments)
