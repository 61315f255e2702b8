"""The part of the arrays that ``fit`` validates with."""

import re
from collections import UserDict

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.fit.input_data import Examples, Frame
from torchstrategy.fit.validation import split_arrays


@pytest.mark.parametrize(
    ("num_examples", "fraction", "num_left"),
    [(10, 0.3, 7), (10, 0.25, 7), (3, 0.5, 1), (100, 0.01, 99), (2, 0.9, 0), (1000, 0.29, 710)],
)
def test_the_last_part(num_examples, fraction, num_left):
    x = np.arange(num_examples)
    if num_left == 0:
        with pytest.raises(ValueError, match="leaves none of the 2 examples to train on"):
            split_arrays(x, None, None, fraction)
        return
    train, validation = split_arrays(x, -x, x * 2, fraction)
    assert [part.tolist() for part in train] == [part[:num_left].tolist() for part in (x, -x, x * 2)]
    assert [part.tolist() for part in validation] == [part[num_left:].tolist() for part in (x, -x, x * 2)]
    assert np.shares_memory(train[0], x)


def test_structures():
    x = {"a": [torch.arange(4), Frame(np.arange(4))]}
    (train_x, train_y, train_weight), (x, y, weight) = split_arrays(UserDict(x), (torch.ones(4), None), None, 0.5)
    assert [leaf.tolist() for leaf in train_x["a"]] == [[0, 1]] * 2
    assert [leaf.tolist() for leaf in x["a"]] == [[2, 3]] * 2
    assert len(train_y[0]) == len(y[0]) == 2
    assert train_y[1] is y[1] is train_weight is weight is None


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 1.5, "half", None, True, float("nan")])
def test_wrong_fractions(fraction):
    message = "fit(validation_split=...) must be a fraction between 0 and 1"
    with pytest.raises(ValueError, match=re.escape(message)):
        split_arrays(np.ones(10), None, None, fraction)


@pytest.mark.parametrize("data", [DataLoader(Examples(4)), Examples(4), iter([1])])
def test_only_arrays(data):
    message = f"fit(validation_split=...) is only for arrays and tensors; fit(x=...) is a {type(data).__name__}"
    with pytest.raises(ValueError, match=re.escape(message)):
        split_arrays(data, None, None, 0.5)


def test_arrays_that_do_not_fit():
    with pytest.raises(ValueError, match=re.escape("fit(x=...) has 4, fit(y=...) has 3")):
        split_arrays(np.ones(4), np.ones(3), None, 0.5)
    with pytest.raises(TypeError, match=re.escape("fit(x=...)[0] is a float")):
        split_arrays([1.0, 2.0], None, None, 0.5)
