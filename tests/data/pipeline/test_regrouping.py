"""What several elements become together, and what is taken of several datasets, as in tf."""

import pytest
import torch

import torchstrategy as ts

Dataset = ts.data.Dataset


def plain(dataset):
    return [element.tolist() for element in dataset]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((3,), [[0, 1, 2], [3, 4, 5], [6]]),
        ((3, 1), [[0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5], [4, 5, 6], [5, 6], [6]]),
        ((3, None, 2), [[0, 2, 4], [3, 5], [6]]),
        ((3, 1, 2), [[0, 2, 4], [1, 3, 5], [2, 4, 6], [3, 5], [4, 6], [5], [6]]),
        ((2, 4), [[0, 1], [4, 5]]),
        ((3, None, 1, True), [[0, 1, 2], [3, 4, 5]]),
        ((3, 1, 2, True), [[0, 2, 4], [1, 3, 5], [2, 4, 6]]),
        ((2, 5, 3), [[0, 3], [5]]),
    ],
)
def test_window_as_in_tf(arguments, expected):
    windows = Dataset.range(7).window(*arguments)
    assert [plain(window) for window in windows] == expected
    assert windows.cardinality() == len(expected)
    assert [plain(window) for window in windows.repeat(2)] == expected * 2


def test_windows_of_components_are_datasets_of_each():
    pairs = Dataset.zip(Dataset.range(3), Dataset.range(4, 7)).window(2)
    assert [(plain(a), plain(b)) for a, b in pairs] == [([0, 1], [4, 5]), ([2], [6])]
    assert [plain(x["a"]) for x in Dataset.from_tensor_slices({"a": [1, 2, 3]}).window(2)] == [[1, 2], [3]]
    zipped = pairs.flat_map(lambda a, b: Dataset.zip(a.batch(2), b.batch(2)))
    assert [(a.tolist(), b.tolist()) for a, b in zipped] == [([0, 1], [4, 5]), ([2], [6])]


def test_windows_do_not_share_elements():
    first, second = Dataset.range(3).map(lambda x: x.reshape(1)).window(2, 1, drop_remainder=True)
    for element in first:
        element.fill_(7)
    assert (plain(first), plain(second)) == ([[0], [1]], [[1], [2]])


def test_a_state_of_windows_holds_no_elements():
    windows = Dataset.range(100).filter(lambda x: True).window(50, 1)
    elements = iter(windows)
    next(elements)
    assert "tensor" not in repr(windows.state_dict())
    assert windows.state_dict()["position"]["source"] != {}


def test_choose_from_datasets_as_in_tf():
    a, b, choices = Dataset.range(5), Dataset.range(100, 103), Dataset.from_tensor_slices([0, 1, 1, 0, 1, 1, 0])
    assert plain(Dataset.choose_from_datasets([a, b], choices)) == [0, 100, 101, 1, 102]
    assert plain(Dataset.choose_from_datasets([a, b], choices, False).repeat(2)) == [0, 100, 101, 1, 102, 2] * 2
    assert Dataset.choose_from_datasets([a, b], choices).cardinality() == ts.data.UNKNOWN_CARDINALITY
    assert Dataset.choose_from_datasets([a.batch(2), b.batch(2)], choices).batch_size == 2
    assert Dataset.choose_from_datasets([a.batch(2), b.batch(3)], choices).batch_size is None


@pytest.mark.parametrize("changes", [None, True])
def test_sample_from_datasets_as_in_tf(changes):
    a, b = Dataset.range(5), Dataset.range(100, 103)
    mixed = Dataset.sample_from_datasets([a.repeat(), b.repeat()], None, 3, rerandomize_each_iteration=changes)
    assert mixed.cardinality() == ts.data.INFINITE_CARDINALITY
    first, second, repeated = (plain(d) for d in (mixed.take(20), mixed.take(20), mixed.take(20).repeat(2)))
    assert (first == second == repeated[:20] == repeated[20:]) is not bool(changes)
    assert [x for x in first if x < 100] == [i % 5 for i in range(len([x for x in first if x < 100]))]


def test_sample_from_datasets_until_one_or_all_are_empty():
    a, b = Dataset.range(5), Dataset.range(100, 103)
    assert sorted(plain(Dataset.sample_from_datasets([a, b], seed=3))) == [0, 1, 2, 3, 4, 100, 101, 102]
    assert plain(Dataset.sample_from_datasets([a, b], [1.0, 0.0])) == [0, 1, 2, 3, 4]
    assert len(plain(Dataset.sample_from_datasets([a, b], [0.001, 0.999], 3, True))) == 3
    zeros, ones = Dataset.counter(0, 0), Dataset.counter(1, 0)
    share = torch.stack(list(Dataset.sample_from_datasets([zeros, ones], [1, 3], 2).take(2000))).double().mean()
    assert abs(share - 0.75) < 0.05


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda d: d.window(0), ValueError, "size must be at least 1"),
        (lambda d: d.window(2, 0), ValueError, "shift must be at least 1"),
        (lambda d: d.window(2, 1, 0), ValueError, "stride must be at least 1"),
        (lambda d: Dataset.choose_from_datasets([], d), ValueError, "must not be empty"),
        (lambda d: Dataset.choose_from_datasets([d, 3], d), TypeError, "must be ts.data.Datasets. Received: 3"),
        (lambda d: list(Dataset.choose_from_datasets([d, d], Dataset.range(7, 9))), ValueError, "from 0 to 1.*r.7"),
        (
            lambda d: list(Dataset.choose_from_datasets([d], d.map(float))),
            ValueError,
            "0.",
        ),
        (lambda d: Dataset.sample_from_datasets([]), ValueError, "must not be empty"),
        (lambda d: Dataset.sample_from_datasets([d, d], [1.0]), ValueError, "weights must have 2 numbers"),
        (lambda d: Dataset.sample_from_datasets([d, d], [-1.0, 2.0]), ValueError, "at least 0, not all 0"),
        (lambda d: Dataset.sample_from_datasets([d, d], [0.0, 0.0]), ValueError, "at least 0, not all 0"),
        (lambda d: Dataset.sample_from_datasets([d, d], d), TypeError, "weights must be a list of numbers"),
    ],
)
def test_arguments_that_do_not_fit(make, error, text):
    with pytest.raises(error, match=text):
        make(Dataset.range(4))
