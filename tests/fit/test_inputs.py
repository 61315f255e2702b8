"""What becomes the data of ``fit``, ``evaluate`` and ``predict``."""

import math
import re
from collections import UserDict
from functools import partial
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

import torchstrategy as ts
from tests.data.profiles import quick
from tests.fit.input_data import SHUFFLED, SOURCES, Batches, Examples, Frame, Stream, read, read_epochs, stand_in
from torchstrategy.base.devices import Placement
from torchstrategy.fit.arguments import named_arguments
from torchstrategy.fit.batch_parts import check_first_batch
from torchstrategy.fit.inputs import make_batches, unpack_validation_data

LAYOUTS = [(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (3, 1), (4, 1)]


def default_batches(x, y=None, sample_weight=None, **arguments):
    return make_batches(ts.get_strategy(), x, y, sample_weight, **arguments)


def two_replicas():
    return stand_in(Placement(2, 0, (torch.device("cpu", 0), torch.device("cpu", 1))))


# Every example once


def check_shares(kind, layout, num_examples, batch_size):
    """The replicas' shares together are the data, in batches that are cut by tf's rule."""
    num_replicas = layout[0] * layout[1]
    (steps,) = read_epochs(layout, partial(SOURCES[kind], num_examples, batch_size))
    assert sorted(chain(*chain(*steps))) == list(range(num_examples))
    if kind == "creator":  # which deals batches of replicas
        return
    batches = [list(chain(*replicas)) for replicas in steps]
    assert [len(batch) for batch in batches[:-1]] == [batch_size] * (len(batches) - 1)
    for batch, replicas in zip(batches, steps, strict=True):
        size = math.ceil(len(batch) / num_replicas)
        assert replicas == [batch[i * size : (i + 1) * size] for i in range(num_replicas)]
    if kind not in SHUFFLED:
        assert list(chain(*batches)) == list(range(num_examples))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", SOURCES)
def test_the_replicas_shares_together_are_the_data(kind, layout):
    check_shares(kind, layout, 11, 4)


@pytest.mark.parametrize("kind", SOURCES)
@quick(15)
@given(layout=st.sampled_from(LAYOUTS), num_examples=st.integers(1, 40), batch_size=st.integers(1, 12))
def test_every_size(kind, layout, num_examples, batch_size):
    check_shares(kind, layout, num_examples, batch_size)


@pytest.mark.parametrize("kind", SHUFFLED)
@pytest.mark.parametrize("layout", [(1, 4), (2, 1), (2, 2), (3, 1)])
def test_each_epoch_has_an_order_of_its_own_that_no_number_of_replicas_changes(kind, layout):
    make = partial(SOURCES[kind], 50, 8)
    epochs = [[list(chain(*replicas)) for replicas in steps] for steps in read_epochs(layout, make, 3, seed=5)]
    alone = [[list(chain(*replicas)) for replicas in steps] for steps in read_epochs((1, 1), make, 3, seed=5)]
    assert epochs == alone
    assert len({str(steps) for steps in epochs}) == 3


def test_shuffle_is_for_what_is_cut_here_only():
    loader = default_batches(DataLoader(Examples(20), 5), shuffle=True)
    assert list(chain(*chain(*read(loader.dataset)))) == list(range(20))


# What is known of the data


@pytest.mark.parametrize(
    ("make", "num_batches", "num_examples"),
    [
        (lambda: default_batches(torch.arange(70)), 3, 70),
        (lambda: default_batches(torch.arange(70), batch_size=10), 7, 70),
        (lambda: default_batches(TensorDataset(torch.arange(70))), 3, 70),
        (lambda: default_batches(Examples(70)), 3, 70),
        (lambda: default_batches(DataLoader(Examples(70), 32)), 3, 70),
        (lambda: default_batches(DataLoader(Examples(70), 32, drop_last=True)), 2, 64),
        (lambda: default_batches(DataLoader(Stream(70), 32)), None, None),
        (lambda: default_batches(ts.data.Dataset.range(70).batch(32)), 3, None),
        (lambda: default_batches(Batches(70, 32)), None, None),
        (lambda: default_batches(iter(Batches(70, 32))), None, None),
    ],
)
def test_numbers_of_batches_and_examples(make, num_batches, num_examples):
    batches = make()
    assert (batches.num_batches, batches.num_examples) == (num_batches, num_examples)
    elements = list(batches.dataset)
    assert num_batches in (None, len(elements))


def test_lists_of_a_loader_are_x_and_y():
    element = next(iter(default_batches(DataLoader(Examples(4), 2)).dataset))
    assert isinstance(element, list)
    check_first_batch(element, named_arguments("fit"))
    assert len(ts.utils.unpack_x_y_sample_weight(element)) == 3


@pytest.mark.parametrize(
    ("x", "y", "weight", "element"),
    [
        (np.arange(2), None, None, torch.arange(2)),
        (torch.arange(2), torch.ones(2), None, (torch.arange(2), torch.ones(2))),
        (torch.arange(2), torch.ones(2), torch.ones(2), (torch.arange(2), torch.ones(2), torch.ones(2))),
        (torch.arange(2), None, torch.ones(2), (torch.arange(2), None, torch.ones(2))),
        ([torch.arange(2), torch.ones(2)], None, None, ([torch.arange(2), torch.ones(2)],)),
        ({"a": torch.arange(2)}, {"b": torch.ones(2)}, None, ({"a": torch.arange(2)}, {"b": torch.ones(2)})),
        (UserDict(a=torch.arange(2)), None, None, {"a": torch.arange(2)}),
        (TensorDataset(torch.arange(2)), None, None, torch.arange(2)),
        (ts.get_strategy().make_experimental_numpy_dataset({"a": np.arange(2)}), None, None, {"a": torch.arange(2)}),
    ],
)
def test_structure_of_batches_of_arrays(x, y, weight, element):
    (batch,) = default_batches(x, y, weight).dataset
    assert str(batch) == str(element)


def test_distributed_datasets_pass_through():
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    dataset = strategy.experimental_distribute_dataset(torch.arange(4), batch_size=2)
    assert make_batches(strategy, dataset).dataset is dataset
    assert make_batches(strategy, dataset).num_batches == 2
    with pytest.raises(ValueError, match=r"evaluate\(x=\.\.\.\) was distributed by another strategy"):
        default_batches(dataset, method="evaluate")


def test_a_generator_can_be_iterated_once():
    batches = default_batches(iter(Batches(6, 2)))
    assert batches.is_one_shot
    iterator = iter(batches.dataset)
    assert next(iterator)[0].tolist() == [0, 1]
    assert [x.tolist() for x, _ in batches.dataset] == [[2, 3], [4, 5]], "a new iteration goes on"
    with pytest.raises(ValueError, match=r"fit\(x=\.\.\.\) is a generator .* only once.*steps_per_epoch"):
        next(iter(batches.dataset))


def test_nothing_of_a_generator_is_read_ahead():
    """An iteration that is dropped on an accelerator leaves the other batches to the next one."""
    batches = make_batches(stand_in(Placement(1, 0, (torch.device("meta"),))), iter(Batches(6, 1)))
    iterator = iter(batches.dataset)
    assert next(iterator)[0].device.type == "meta"
    assert len(list(batches.dataset)) == 5


def test_an_empty_generator_has_no_batches():
    assert list(default_batches(iter([])).dataset) == []


def test_a_dataset_of_a_creator_is_for_one_replica():
    def dataset_fn(context):
        return ts.data.Dataset.range(8).batch(context.get_per_replica_batch_size(4))

    creator = ts.utils.DatasetCreator(dataset_fn)
    assert [len(batch) for batch in creator(ts.InputContext(1, 0, 2))] == [2, 2, 2, 2]
    elements = list(make_batches(two_replicas(), creator).dataset)
    assert [[part.tolist() for part in element.values] for element in elements] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def test_the_options_of_a_creator():
    options = ts.InputOptions(experimental_replication_mode=ts.InputReplicationMode.PER_REPLICA)
    called_with = []

    def dataset_fn(context):
        called_with.append(context.input_pipeline_id)
        return ts.data.Dataset.range(8).batch(4)

    make_batches(two_replicas(), ts.utils.DatasetCreator(dataset_fn, options))
    assert called_with == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((3,), "dataset_fn must be a function"), ((len, {}), "input_options must be a ts.InputOptions")],
)
def test_wrong_arguments_of_a_creator(arguments, message):
    with pytest.raises(TypeError, match=message):
        ts.utils.DatasetCreator(*arguments)


def test_a_batch_smaller_than_the_number_of_replicas_is_noted(caplog):
    caplog.set_level("WARNING", "torchstrategy")
    seven = stand_in(Placement(7, 0, tuple(torch.device("cpu", i) for i in range(7))))
    make_batches(seven, torch.arange(5), batch_size=6)
    assert "batch size 6 is smaller than the number of replicas, 7" in caplog.text


# Errors


def fails(message, fn, error=ValueError):
    with pytest.raises(error, match=re.escape(message)):
        fn()


X, Y = np.ones((4, 2), np.float32), np.ones(4, np.float32)
LOADER = DataLoader(Examples(4), 2)


@pytest.mark.parametrize("source", [LOADER, Examples(4), ts.data.Dataset.range(4).batch(2), Batches(4, 2), iter([X])])
def test_data_of_batches_comes_alone(source):
    name = type(source).__name__
    fails("fit(y=...) is for arrays. fit(x=...) is", lambda: default_batches(source, Y))
    fails(name, lambda: default_batches(source, Y))
    fails("evaluate(sample_weight=...) is for", lambda: default_batches(source, None, Y, method="evaluate"))


@pytest.mark.parametrize(
    "source",
    [LOADER, ts.data.Dataset.range(4).batch(2), Batches(4, 2), iter([X]), ts.utils.DatasetCreator(lambda _: [X])],
)
def test_a_batch_size_for_data_with_batches(source):
    fails("fit(batch_size=...) is for arrays", lambda: default_batches(source, batch_size=2))
    fails("leave fit(batch_size=...) out", lambda: default_batches(source, batch_size=2))


@pytest.mark.parametrize("batch_size", [0, -1, 2.0, True, "8"])
def test_a_wrong_batch_size(batch_size):
    fails(
        f"predict(batch_size=...) must be a positive integer, the examples of a batch over all replicas. Received: "
        f"{batch_size!r}",
        lambda: default_batches(X, batch_size=batch_size, method="predict"),
    )


@pytest.mark.parametrize(
    ("x", "message", "error"),
    [
        (None, "fit(x=...) is missing. Pass arrays or tensors", ValueError),
        (3, "fit(x=...) is an int, not a numpy array", TypeError),
        ("text", "fit(x=...) is a str, not a numpy array", TypeError),
        (object(), "fit(x=...) is an object, which is no data. Pass arrays", TypeError),
        ([1.0, 2.0], "fit(x=...)[0] is a float, not a numpy array or a tensor. Lists of numbers", TypeError),
        ([[1, 2], [3, 4]], "convert them with numpy.array(...) or torch.tensor(...)", TypeError),
        ([], "fit(x=...) holds no arrays. Received: []", ValueError),
        ({"a": DataLoader([])}, "fit(x=...)['a'] is a DataLoader", TypeError),
        (np.ones((0, 2)), "fit(x=...) has no examples: its shape is (0, 2)", ValueError),
        (Examples(0), "fit(x=...) has no examples: the Examples is empty", ValueError),
        (
            DataLoader(Examples(3), 4, drop_last=True),
            "fit(x=...) gives no batches: the DataLoader is empty",
            ValueError,
        ),
        (ts.data.Dataset.range(3).batch(4, drop_remainder=True), "drops it (drop_last, drop_remainder)", ValueError),
        (TensorDataset(*[torch.ones(2)] * 4), "fit(x=...) is a TensorDataset of something else: A batch", ValueError),
    ],
)
def test_what_is_no_data(x, message, error):
    fails(message, lambda: default_batches(x), error)


def test_data_that_never_ends_needs_a_number_of_steps():
    endless = ts.data.Dataset.range(4).batch(2).repeat()
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    for data in (endless, strategy.experimental_distribute_dataset(endless)):
        with pytest.raises(ValueError, match=r"fit\(x=...\) never ends: the dataset is repeated without a number"):
            make_batches(strategy, data)
        assert make_batches(strategy, data, steps=2).num_batches is None
    assert make_batches(strategy, ts.data.Dataset.range(4).batch(2).repeat(3)).num_batches == 6


def test_shuffle_is_a_truth_value():
    fails(
        "fit(shuffle=...) must be True or False. Received: 'batch'",
        lambda: default_batches(X, shuffle="batch"),
        TypeError,
    )


@pytest.mark.parametrize("single", [(torch.arange(4), torch.arange(4)), (torch.ones(4, 3), torch.arange(4))])
def test_single_examples_instead_of_batches(single):
    element = next(iter(default_batches(ts.data.Dataset.from_tensor_slices(single)).dataset))
    fails("fit(x=...) must give batches", lambda: check_first_batch(element, named_arguments("fit")))
    fails("or fit(batch_size=32) for", lambda: check_first_batch(element, named_arguments("fit")))


def test_batches_of_too_many_parts():
    element = next(iter(default_batches([(X, X, X, X)]).dataset))
    fails(
        "evaluate(x=...) gives something else than batches",
        lambda: check_first_batch(element, named_arguments("evaluate")),
    )


# Validation data


@pytest.mark.parametrize(
    ("data", "sizes", "expected"),
    [
        ((X, Y), (None, 2), 2),
        ((X, Y, Y), (1, 2), 4),
        ([X, Y], (None, None), 1),
        (X, (None, 3), 2),
        (Frame(X), (None, 3), 2),
        ({"a": X}, (3, None), 2),
        (Examples(4), (None, 3), 2),
        (LOADER, (None, 3), 2),
        (list(Batches(4, 2)), (None, 3), None),
    ],
)
def test_forms_of_validation_data(data, sizes, expected):
    batches = default_batches(**unpack_validation_data(data, *sizes))
    assert len(list(batches.dataset)) == (expected or 2)


def test_wrong_validation_data():
    def validate(*arguments):
        return default_batches(**unpack_validation_data(*arguments))

    fails("fit(validation_data=...)[1] has 3", lambda: validate((X, Y[:3])))
    fails("fit(validation_data=...)[0] has 4", lambda: validate((X, Y[:3])))
    fails("fit(validation_data=...)[2] has dtype", lambda: validate((X, Y, np.array(["a"] * 4))))
    fails("fit(validation_data=...) must be (x, y)", lambda: validate((X, Y, Y, Y)))
    fails("fit(validation_batch_size=...) is for arrays", lambda: validate(LOADER, 3))
    fails("fit(validation_data=...) is an object", lambda: validate(object()), TypeError)
