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


def in_lists(key, window):
    return window.batch(10)


@pytest.mark.parametrize(
    ("numbers", "divisor", "size", "expected"),
    [
        (range(10), 3, 3, [[0, 3, 6], [1, 4, 7], [2, 5, 8], [9]]),
        (range(12), 2, lambda key: key + 2, [[0, 2], [1, 3, 5], [4, 6], [8, 10], [7, 9, 11]]),
        ([3, 1, 2, 1, 3, 0, 2], 10, 2, [[1, 1], [3, 3], [2, 2], [0]]),
        ([3, 9, 2, 5, 9, 0], 10, 10, [[0], [2], [3], [5], [9, 9]]),
    ],
)
def test_group_by_window_as_in_tf(numbers, divisor, size, expected):
    sizes = {"window_size_func" if callable(size) else "window_size": size}
    dataset = Dataset.from_tensor_slices(list(numbers)).group_by_window(lambda x: x % divisor, in_lists, **sizes)
    assert plain(dataset) == expected
    assert plain(dataset.repeat(2)) == expected * 2
    assert dataset.cardinality() == ts.data.UNKNOWN_CARDINALITY


def test_windows_of_groups_have_whole_elements():
    pairs = Dataset.zip(Dataset.range(4), Dataset.range(10, 14))
    grouped = pairs.group_by_window(lambda x, y: x % 2, lambda key, window: window.map(lambda x, y: (key, x, y)), 2)
    assert [tuple(map(int, e)) for e in grouped] == [(0, 0, 10), (0, 2, 12), (1, 1, 11), (1, 3, 13)]


def test_a_state_of_groups_holds_no_elements_and_few_marks():
    rare = Dataset.range(20000).filter(lambda x: True).group_by_window(lambda x: (x == 0 and 1) or 0, in_lists, 10)
    elements = iter(rare)
    for _ in range(500):
        next(elements)
    state = rare.state_dict()
    assert len(repr(state)) < 3000
    rest = [next(elements).tolist() for _ in range(20)]
    rare.load_state_dict(state)
    again = iter(rare)
    assert [next(again).tolist() for _ in range(20)] == rest


SENTENCES = [[0], [1, 2, 3, 4], [5, 6, 7], [7, 8, 9, 10, 11], [13, 14, 15, 16, 19, 20], [21, 22]]


@pytest.mark.parametrize(
    ("boundaries", "options", "expected"),
    [
        (
            [3, 5],
            {"padding_values": -1},
            [[[1, 2, 3, 4], [5, 6, 7, -1]], [[7, 8, 9, 10, 11, -1], [13, 14, 15, 16, 19, 20]], [[0, -1], [21, 22]]],
        ),
        (
            [3, 5, 8],
            {"pad_to_bucket_boundary": True, "drop_remainder": True},
            [[[1, 2, 3, 4], [5, 6, 7, 0]], [[7, 8, 9, 10, 11, 0, 0], [13, 14, 15, 16, 19, 20, 0]], [[0, 0], [21, 22]]],
        ),
    ],
)
def test_bucket_by_sequence_length_as_in_tf(boundaries, options, expected):
    dataset = Dataset.from_generator(lambda: SENTENCES)
    sizes = [2] * (len(boundaries) + 1)
    assert plain(dataset.bucket_by_sequence_length(len, boundaries, sizes, **options)) == expected


def test_buckets_without_padding_and_of_several_components():
    numbers = Dataset.range(6)
    assert plain(numbers.bucket_by_sequence_length(int, [3], [2, 2], no_padding=True)) == [[0, 1], [3, 4], [2], [5]]
    dropped = numbers.bucket_by_sequence_length(int, [3], [2, 2], no_padding=True, drop_remainder=True)
    assert plain(dropped) == [[0, 1], [3, 4]]
    pairs = numbers.map(lambda n: (torch.ones(int(n)), n))
    padded = pairs.bucket_by_sequence_length(
        lambda x, n: len(x), [3, 7], [3, 3, 3], ([None], []), pad_to_bucket_boundary=True
    )
    assert [(tuple(x.shape), n.tolist()) for x, n in padded] == [((3, 2), [0, 1, 2]), ((3, 6), [3, 4, 5])]


@pytest.mark.parametrize(
    ("size", "drop_remainder", "expected"),
    [
        (4, False, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]),
        (4, True, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ([2, 3], False, [[0, 1], [2, 3, 4], [5, 6], [7, 8, 9]]),
        ((4, 2), True, [[0, 1, 2, 3], [4, 5], [6, 7, 8, 9]]),
        ([8, 3], True, [[0, 1, 2, 3, 4, 5, 6, 7]]),
    ],
)
def test_rebatch_as_in_tf(size, drop_remainder, expected):
    dataset = Dataset.range(10).batch(3).rebatch(size, drop_remainder)
    assert plain(dataset) == expected
    assert plain(dataset.repeat(2)) == expected * 2
    assert dataset.batch_size == (size if size == 4 else None)


def fail_at_2(x):
    if x == 2:
        raise ValueError("two")
    return x


@pytest.mark.parametrize("source", [Dataset.range(6), Dataset.from_generator(range, args=(6,))])
def test_ignore_errors_as_in_tf(source):
    failing = source.map(fail_at_2)
    for kept in (failing, source.map(fail_at_2, 2), failing.prefetch(2), source.map(fail_at_2, 2).prefetch(2)):
        assert plain(kept.ignore_errors()) == [0, 1, 3, 4, 5]
    assert plain(failing.batch(2).ignore_errors()) == [[0, 1], [4, 5]]
    assert plain(failing.batch(4).ignore_errors()) == [[4, 5]]
    assert sorted(plain(failing.shuffle(3).ignore_errors())) == [0, 1, 3, 4, 5]
    for pairs in (Dataset.zip(failing, source), Dataset.zip(source, failing), failing.enumerate()):
        assert [tuple(map(int, pair)) for pair in pairs.ignore_errors()] == [(i, i) for i in (0, 1, 3, 4, 5)]
    with pytest.raises(ValueError, match="two"):
        plain(failing)


def test_ignore_errors_of_sources(tmp_path):
    def one_then_error():
        yield 1
        raise ValueError("no more")

    assert plain(Dataset.from_generator(one_then_error).ignore_errors()) == [1]
    (tmp_path / "there").write_text("line")
    lines = ts.data.TextLineDataset([tmp_path / "missing", tmp_path / "there", tmp_path / "missing"])
    assert list(lines.ignore_errors()) == ["line"]

    def not_even_begun():
        raise ValueError("nothing")

    assert plain(Dataset.from_generator(not_even_begun).ignore_errors()) == []


def test_ignored_errors_are_in_the_log_if_asked_for(caplog):
    for log_warning in (False, True):
        plain(Dataset.range(4).map(fail_at_2).ignore_errors(log_warning))
        assert ("leaves out an element: ValueError('two')" in caplog.text) is log_warning


def test_errors_of_what_does_not_move_on_are_not_ignored_for_ever(monkeypatch):
    def fail(self, count):
        raise ValueError("stuck")

    monkeypatch.setattr("torchstrategy.data.pipeline.element_nodes.Map.read", fail)
    with pytest.raises(ValueError, match="stuck"):
        list(Dataset.from_generator(range, args=(3,)).map(fail_at_2).ignore_errors())


@pytest.mark.parametrize("initial", [None, [0.9, 0.1]])
def test_rejection_resample_as_in_tf(initial):
    rare = Dataset.from_tensor_slices(([int(i % 10 == 3) for i in range(3000)], list(range(3000))))
    balanced = rare.rejection_resample(lambda label, number: label, [0.5, 0.5], initial, 1)
    classes, elements = zip(*balanced, strict=True)
    assert all(
        int(c) == int(label) == int(number % 10 == 3) for c, (label, number) in zip(classes, elements, strict=True)
    )
    numbers = [int(number) for _, number in elements]
    assert numbers == sorted(set(numbers))  # each at most once, in their order
    assert abs(sum(map(int, classes)) / len(classes) - 0.5) < 0.06
    assert sum(map(int, classes)) == 300  # the class that comes too rarely is never left out
    assert [int(number) for _, (_, number) in balanced] != numbers  # in the next iteration


def test_an_absent_experimental_name_says_what_to_use():
    with pytest.raises(AttributeError, match=r"has no attribute 'dense_to_ragged_batch'. Use `Dataset.padded_batch`"):
        _ = ts.data.experimental.dense_to_ragged_batch


def test_rejection_resample_of_a_class_that_shall_not_come_or_does_not():
    numbers = Dataset.range(20).map(lambda x: x % 2)
    assert {int(c) for c, _ in numbers.rejection_resample(int, [1, 0], seed=1)} == {0}
    assert len(list(numbers.rejection_resample(int, [1, 1, 1], seed=1))) > 0


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda d: d.group_by_window(len, in_lists), ValueError, "either window_size or"),
        (lambda d: d.group_by_window(len, in_lists, 1, len), ValueError, "either window_size or"),
        (lambda d: d.group_by_window(len, in_lists, 0), ValueError, "window_size must be at least 1"),
        (lambda d: list(d.group_by_window(float, in_lists, 2)), TypeError, "key_func returns must be an integer"),
        (lambda d: list(d.group_by_window(int, lambda k, w: 3, 1)), TypeError, "of group_by_window must return a ts"),
        (lambda d: list(d.group_by_window(int, in_lists, window_size_func=int)), ValueError, "window_size must be at"),
        (lambda d: d.bucket_by_sequence_length(len, [3, 3], [1, 1, 1]), ValueError, "ascending"),
        (lambda d: d.bucket_by_sequence_length(len, [3], [1]), ValueError, "2 numbers, one more"),
        (
            lambda d: list(d.bucket_by_sequence_length(lambda x: 9, [3], [1, 1], [7], None, True)),
            ValueError,
            "shorter than the last boundary, 3",
        ),
        (lambda d: d.rebatch(0), ValueError, "batch_size must be at least 1"),
        (lambda d: d.rebatch([]), ValueError, "at least one number"),
        (lambda d: d.rebatch([2, 0]), ValueError, "each of batch_size must be at least 1"),
        (lambda d: list(d.rebatch(2)), ValueError, "components with a first dimension"),
        (lambda d: d.rejection_resample(int, [0, 0]), ValueError, "at least 0, not all 0"),
        (lambda d: d.rejection_resample(int, [1, 1], [1]), ValueError, "initial_dist must have 2 numbers"),
        (lambda d: d.rejection_resample(int, [1, 1], [0, 1]), ValueError, "above 0 for each class"),
        (lambda d: list(d.rejection_resample(int, [1, 1])), ValueError, "from 0 to 1.*Received: 2"),
        (lambda d: list(d.rejection_resample(float, [1, 1])), TypeError, "class_func returns must be an integer"),
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
