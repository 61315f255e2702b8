import functools
import itertools

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import torchstrategy as ts
from torchstrategy.estimator.model_fn import as_dataset, call_input_fn, parse_element

CONTEXT = ts.InputContext(2, 1, 4)
X, Y = torch.arange(4.0), torch.ones(4)


def call(input_fn, context=None):
    return call_input_fn(input_fn, "train", {"lr": 0.1}, "config", context)


def test_known_arguments_come_by_name():
    assert call(lambda: 5) == 5
    assert call(lambda params, mode: (mode, params)) == ("train", {"lr": 0.1})
    assert call(lambda *, config: config) == "config"
    assert call(lambda other=3: other) == 3
    assert call(functools.partial(lambda mode, params: (mode, params), params="mine")) == ("train", "mine")


def test_input_context_comes_from_a_strategy_only():
    assert call(lambda input_context: input_context, CONTEXT) is CONTEXT
    assert call(lambda input_context=None: input_context) is None
    with pytest.raises(TypeError, match="input_context"):
        call(lambda input_context: input_context)


def test_other_arguments_are_not_filled():
    with pytest.raises(TypeError, match="features"):
        call(lambda features: features)


def test_data_itself_is_no_function():
    with pytest.raises(TypeError, match="input_fn must be a function"):
        call([(X, Y)])


@pytest.mark.parametrize(
    "batch",
    [
        (X, Y),
        (X.numpy(), Y.numpy()),
        ({"x": X, "name": ["a", "b", "c", "d"]}, Y),
        ({"x": X.numpy()}, None),
        {"x": X},
        X,
        X.numpy(),
    ],
    ids=range(7),
)
def test_one_batch_never_ends(batch):
    first, second, third = itertools.islice(as_dataset(batch), 3)
    assert first is second is third is batch


@pytest.mark.parametrize(
    "data",
    [
        DataLoader(TensorDataset(X, Y), batch_size=2),
        ts.data.Dataset.from_tensor_slices((X, Y)).batch(2),
        [(X[:2], Y[:2]), (X[2:], Y[2:])],
        [X[:2], X[2:]],
    ],
    ids=["loader", "dataset", "list of pairs", "list of features"],
)
def test_data_stays_what_it_is(data):
    assert as_dataset(data) is data
    assert len(list(data)) == 2


def test_elements():
    features, labels = {"x": X}, Y
    assert parse_element((features, labels)) == (features, labels)
    assert parse_element([features, labels]) == (features, labels)
    assert parse_element(features) == (features, None)
    assert parse_element([features]) == (features, None)  # a loader's element for a dataset of one tensor


@pytest.mark.parametrize("element", [(X, Y, Y), [X, Y, Y], (X,), ()])
def test_elements_of_other_lengths(element):
    with pytest.raises(ValueError, match="len 2"):
        parse_element(element)


def test_a_ready_tuple_of_another_length():
    with pytest.raises(ValueError, match="len 2"):
        as_dataset((X, Y, Y))


@pytest.mark.parametrize("once", [iter([X]), (x for x in [X]), zip([X], [Y], strict=True)])
def test_what_can_be_read_once_is_refused(once):
    with pytest.raises(TypeError, match="only once"):
        as_dataset(once)


@pytest.mark.parametrize("nothing", [None, 3, "text", np.float32])
def test_no_data(nothing):
    with pytest.raises(TypeError, match="iterable of batches"):
        as_dataset(nothing)
