"""What the operations do; the numbers are those of tf.data's documentation."""

import collections
import threading
import time

import numpy as np
import pytest
import torch

import torchstrategy as ts
from torchstrategy.data.pipeline.batches import collate as ts_collate

Dataset = ts.data.Dataset
InvalidArgument = ts.errors.InvalidArgumentError


def plain(dataset):
    return [element.tolist() for element in dataset]


def fail_at_seven(x):
    if x == 7:
        raise KeyError("seven")
    return x


def test_tuples_are_unpacked_and_dicts_are_not():
    pairs = Dataset.from_tensor_slices(([1, 2], [3, 4]))
    assert plain(pairs.map(lambda a, b: a * b)) == [3, 8]
    assert [a.item() for a, _ in pairs.filter(lambda a, b: a > 1)] == [2]
    assert plain(Dataset.from_tensor_slices({"a": [1, 2]}).map(lambda x: x["a"])) == [1, 2]
    assert plain(Dataset.from_tensor_slices(Named([1, 2])).map(lambda x: x.a)) == [1, 2]  # only plain tuples are


def test_interleave_as_in_tf():
    dataset = Dataset.range(1, 6).interleave(lambda x: Dataset.from_tensors(x).repeat(6), 2, 4)
    assert plain(dataset) == [1] * 4 + [2] * 4 + [1] * 2 + [2] * 2 + [3] * 4 + [4] * 4 + [3] * 2 + [4] * 2 + [5] * 6


def test_take_while_scan_and_unique_as_in_tf():
    assert plain(Dataset.from_tensor_slices([1, 2, 5, 1, 0]).take_while(lambda x: x < 4).repeat(2)) == [1, 2, 1, 2]
    totals = Dataset.range(1, 6).scan(10, lambda total, x: (total + x, total * x)).repeat(2)
    assert plain(totals) == [10, 22, 39, 64, 100] * 2
    pairs = Dataset.zip(Dataset.range(3), Dataset.range(3))
    fibonacci = pairs.scan((0, 1), lambda s, pair: ((s[1], s[0] + s[1]), (s[0], pair[1])))
    assert [(int(a), int(b)) for a, b in fibonacci] == [(0, 0), (1, 1), (1, 2)]
    assert plain(Dataset.from_tensor_slices([1, 37, 2, 37, 2, 1]).unique().repeat(2)) == [1, 37, 2] * 2
    assert plain(Dataset.from_tensor_slices([[1, 2], [1, 2], [2, 1]]).unique()) == [[1, 2], [2, 1]]
    assert list(Dataset.from_tensor_slices(["b", "a", "b"]).unique().as_numpy_iterator()) == ["b", "a"]


def test_a_state_that_a_function_of_scan_changes_in_place():
    counted = Dataset.range(3).scan(torch.zeros(()), lambda count, x: (count.add_(1), count.clone()))
    elements = iter(counted)
    next(elements)
    state = counted.state_dict()
    assert plain(elements) == [2, 3]
    counted.load_state_dict(state)
    assert plain(counted) == [2, 3]
    assert plain(counted) == [1, 2, 3]


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Dataset.range(2).take_while(lambda x: None), r"take_while\(\) must return one truth value"),
        (Dataset.range(2).scan(0, lambda s, x: x), "the new state and an element. Received: int64"),
        (Dataset.range(2).scan(0, lambda s, x: (s * 1.5, x)), "Expected: int64.*Received: float32"),
        (Dataset.range(2).scan((0, 1), lambda s, x: (x, x)), "structure and dtypes of initial_state"),
        (Dataset.from_tensor_slices([1.0]).unique(), "one tensor of integers, or a string. Received: float32"),
        (Dataset.zip(Dataset.range(2), Dataset.range(2)).unique(), "one tensor of integers"),
    ],
)
def test_functions_and_elements_that_do_not_fit(dataset, message):
    with pytest.raises(TypeError, match=message):
        list(dataset)


def test_flat_map_of_empty_datasets():
    assert plain(Dataset.range(4).flat_map(lambda n: Dataset.range(int(n) % 2))) == [0, 0]
    assert plain(Dataset.range(3).interleave(lambda n: Dataset.range(0), 2)) == []


def test_batches_go_on_across_repetitions():
    assert plain(Dataset.range(3).repeat(2).batch(4)) == [[0, 1, 2, 0], [1, 2]]
    assert plain(Dataset.range(5).batch(2, drop_remainder=True)) == [[0, 1], [2, 3]]
    assert plain(Dataset.range(5).batch(2).repeat(2)) == [[0, 1], [2, 3], [4]] * 2


@pytest.mark.timeout(20)
def test_an_empty_dataset_is_not_repeated_for_ever():
    nothing = Dataset.range(3).filter(lambda x: False)
    for dataset in (Dataset.range(0), nothing, Dataset.from_generator(lambda: []), Dataset.range(3).take(0)):
        assert list(dataset.repeat()) == []
        assert list(dataset.repeat().batch(2).repeat(3)) == []


def test_nested_batches_and_unbatch():
    assert plain(Dataset.range(5).batch(2).batch(2, drop_remainder=True)) == [[[0, 1], [2, 3]]]
    assert plain(Dataset.range(5).batch(2).unbatch()) == list(range(5))
    assert list(Dataset.from_tensors(["a", "b"]).unbatch()) == ["a", "b"]


def test_padded_batch():
    ragged = Dataset.range(1, 4).map(lambda n: (torch.full((int(n),), int(n)), n))
    first, _ = ragged.padded_batch(2)
    assert first[0].tolist() == [[1, 0], [2, 2]]
    assert first[1].tolist() == [1, 2]
    (x, _), _ = ragged.padded_batch(2, padded_shapes=([4], []), padding_values=(-1, 0))
    assert x.tolist() == [[1, -1, -1, -1], [2, 2, -1, -1]]
    assert len(list(ragged.padded_batch(2, drop_remainder=True))) == 1
    with pytest.raises(InvalidArgument, match="larger than its padded shape"):
        list(ragged.padded_batch(3, padded_shapes=([2], [])))
    with pytest.raises(InvalidArgument, match="one number of dimensions"):
        list(Dataset.range(2).map(lambda n: torch.zeros([1] * int(n))).padded_batch(2))


def test_zip_structures():
    a, b = Dataset.range(3), Dataset.range(10, 12)
    assert [tuple(map(int, pair)) for pair in Dataset.zip(a, b)] == [(0, 10), (1, 11)]
    assert [tuple(map(int, pair)) for pair in Dataset.zip((a, b))] == [(0, 10), (1, 11)]
    assert [int(e["x"][0]) for e in Dataset.zip({"x": (b, a)})] == [10, 11]


def test_skipped_and_foreign_elements_are_not_read():
    calls = []

    def fn(x):
        calls.append(int(x))
        return x

    dataset = Dataset.range(10).map(fn)
    assert plain(dataset.skip(7)) == plain(dataset.shard(10, 7).concatenate(dataset.skip(8)))
    assert calls == [7, 8, 9, 7, 8, 9]


def test_cache_computes_once():
    for source in (Dataset.range(4), Dataset.from_generator(lambda: range(4)).shuffle(2)):
        calls = []
        dataset = source.map(lambda x, calls=calls: calls.append(1) or x).cache()
        epochs = [plain(dataset), plain(dataset), plain(dataset.repeat(2))]
        assert epochs[0] * 2 == epochs[1] * 2 == epochs[2]
        assert len(calls) == 4


def test_a_shuffle_before_a_cache_keeps_its_order():
    for source in (Dataset.range(20), Dataset.from_generator(lambda: range(20))):
        dataset = source.shuffle(20).cache()
        assert plain(dataset) == plain(dataset)
        assert plain(dataset.repeat(2)) == plain(dataset) * 2


def test_a_cache_that_was_read_in_part():
    dataset = Dataset.from_generator(lambda: range(5)).cache()
    first, second = iter(dataset), iter(dataset)
    assert [int(next(first)) for _ in range(3)] == [0, 1, 2]
    assert [int(next(second)) for _ in range(4)] == [0, 1, 2, 3]
    assert [int(x) for x in first] == [3, 4]
    assert plain(dataset) == list(range(5))


def test_reduce_apply_and_single_element():
    assert Dataset.range(5).reduce(0, lambda a, b: a + b) == 10
    assert plain(Dataset.range(3).apply(lambda d: d.map(lambda x: x + 1))) == [1, 2, 3]
    with pytest.raises(TypeError, match=r"apply\(\) must return"):
        Dataset.range(3).apply(list)
    for size in (0, 2):
        with pytest.raises(InvalidArgument, match="Expected one element"):
            Dataset.range(size).get_single_element()


def test_datasets_are_immutable():
    dataset = Dataset.range(4)
    dataset.batch(2)
    dataset.shuffle(2)
    assert plain(dataset) == [0, 1, 2, 3]


def test_parallel_calls_keep_the_order():
    def slow_first(x):
        time.sleep(0.02 * (int(x) == 0))
        return x + 1

    for source in (Dataset.range(8), Dataset.from_generator(lambda: range(8))):
        for calls in (3, ts.data.AUTOTUNE):
            dataset = source.map(slow_first, num_parallel_calls=calls, deterministic=False)
            assert plain(dataset.batch(4)) == [[1, 2, 3, 4], [5, 6, 7, 8]]


def test_parallel_calls_use_one_core_each_and_leave_other_threads_alone():
    def num_threads_of_another_thread():
        found = []
        thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        return found[0]

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        dataset = Dataset.range(8).map(lambda x: torch.get_num_threads(), num_parallel_calls=2)
        assert plain(dataset) == [1] * 8
        assert torch.get_num_threads() == num_threads_of_another_thread() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "dataset",
    [
        Dataset.range(10).map(fail_at_seven),
        Dataset.range(10).map(fail_at_seven).shuffle(20).batch(3),
        Dataset.range(10).map(fail_at_seven, num_parallel_calls=2).batch(3),
        Dataset.range(10).map(fail_at_seven).prefetch(2),
        Dataset.from_generator(lambda: range(10)).map(fail_at_seven),
        Dataset.from_generator(lambda: range(10)).map(fail_at_seven, num_parallel_calls=2).prefetch(2),
    ],
)
def test_errors_keep_their_type_and_say_where(dataset):
    elements = iter(dataset)
    with pytest.raises(KeyError, match="seven") as caught:
        list(elements)
    notes = getattr(caught.value, "__notes__", None)  # from Python 3.11 on
    assert notes is None or "map(fail_at_seven) for element 7" in notes[0]
    with pytest.raises(RuntimeError, match="ended with an error"):
        next(elements)
    with pytest.raises(RuntimeError, match="position is not known"):
        dataset.state_dict()
    del elements
    with pytest.raises(RuntimeError, match="position is not known"):
        dataset.state_dict()


@pytest.mark.parametrize("num_parallel_calls", [None, 2])
def test_stop_iteration_in_a_function_does_not_end_the_data(num_parallel_calls):
    def fn(x):
        raise StopIteration

    for source in (Dataset.range(3), Dataset.from_generator(lambda: range(3))):
        with pytest.raises(RuntimeError, match="raised StopIteration"):
            list(source.map(fn, num_parallel_calls))
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        list(Dataset.range(3).filter(fn))


def test_errors_of_sources_and_predicates_say_where():
    def generate():
        yield from range(3)
        raise KeyError("three")

    def read(name):
        raise OSError("unreadable")

    for dataset, error, text in [
        (Dataset.from_generator(generate), KeyError, "from_generator(generate) for element 3"),
        (Dataset.from_files(["a"], read), OSError, "from_files(read) for example 0 of a"),
        (Dataset.range(9).filter(fail_at_seven), KeyError, "filter(fail_at_seven) for element 7"),
        (Dataset.range(9).flat_map(fail_at_seven), TypeError, None),
    ]:
        with pytest.raises(error) as caught:
            list(dataset)
        if text and hasattr(caught.value, "__notes__"):
            assert text in caught.value.__notes__[0]
    with pytest.raises(TypeError, match=r"one truth value.*\.all\(\)"):
        list(Dataset.range(4).batch(2).filter(lambda x: x > 1))
    for answer in (None, "no", [True]):
        with pytest.raises(TypeError, match="one truth value"):
            list(Dataset.range(4).filter(lambda x, answer=answer: answer))


def test_a_function_that_raises_stop_iteration_does_not_end_the_dataset():
    for dataset in (
        Dataset.from_generator(lambda: next(iter(()))),
        Dataset.from_files(["a"], lambda _: next(iter(()))),
    ):
        with pytest.raises(RuntimeError, match="raised StopIteration"):
            list(dataset)


def test_a_prefetch_that_begins_anew_waits_for_its_thread():
    running, most = [], []

    def slow(x):
        running.append(x)
        most.append(len(running))
        time.sleep(0.3 if x == 1 else 0)
        running.remove(x)
        return x

    assert plain(Dataset.range(5).map(slow).prefetch(3).take(1).repeat(2)) == [0, 0]
    assert max(most) == 1


@pytest.mark.parametrize(("dtype", "value"), [(torch.int64, 0.5), (torch.uint8, -1), (torch.bool, 2)])
def test_a_padding_value_that_does_not_fit(dtype, value):
    dataset = Dataset.range(1, 3).map(lambda n: torch.ones(int(n), dtype=dtype))
    with pytest.raises(InvalidArgument, match=r"does not fit tensors of torch\."):
        list(dataset.padded_batch(2, padding_values=value))


def test_raw_elements_become_the_same_batches_as_tensors():
    rows = [
        {"x": torch.ones(2), "i": 2**40, "f": 0.5, "b": True, "s": "a", "n": None, "p": (np.float64(1), b"q")},
        {"x": torch.zeros(2), "i": -1, "f": 1.5, "b": False, "s": "b", "n": None, "p": (np.float64(2), b"r")},
    ]
    raw = Dataset.from_generator(lambda: rows).batch(2).get_single_element()
    single = Dataset.from_generator(lambda: rows)
    expected = ts_collate(list(single))
    assert repr(raw) == repr(expected)
    assert [raw[key].dtype for key in "xifb"] == [torch.float32, torch.int64, torch.float32, torch.bool]
    assert raw["p"][0].dtype == torch.float64
    assert raw["n"] is None


def test_what_a_generator_refills_is_kept():
    def refill():
        array, example = np.zeros(2), {}
        for i in range(4):
            array[:] = i
            example.update(array=array, number=i)
            yield example

    batch = Dataset.from_generator(refill).shuffle(4).batch(4).get_single_element()
    assert batch["array"][:, 0].tolist() == batch["number"].tolist()
    assert sorted(batch["number"].tolist()) == [0, 1, 2, 3]


Named = collections.namedtuple("Named", ["a"])


@pytest.mark.parametrize(
    ("elements", "text"),
    [
        ([{"a": 1}, {"a": 1}, {"b": 1}], "element 2 is {'b': int64"),
        ([(1, 2), (1, 2), [1, 2]], "element 2 is int64"),
        ([[1], [2], [3, 4]], r"element 2 is int64\[2\]"),
        ([1, 2, 3.5], "element 2 is float32"),
        (["a", "b", 3], "element 2 is int64"),
        ([(1,), (2,), Named(3)], "element 2 is Named"),
    ],
)
def test_a_change_of_structure_is_an_error_at_batch(elements, text):
    with pytest.raises(InvalidArgument, match=text):
        list(Dataset.from_generator(lambda: elements).batch(3))


def test_the_element_number_counts_all_batches():
    elements = [1, 2, 3, 4, "x"]
    with pytest.raises(InvalidArgument, match="element 4 is str"):
        list(Dataset.from_generator(lambda: [*elements[:3], 4, "x", 5]).batch(3))


def test_objects_can_not_be_batched():
    with pytest.raises(TypeError, match=r"component \['x'\] of type object"):
        list(Dataset.range(2).map(lambda _: {"x": object()}).batch(2))


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda d: d.batch(0), InvalidArgument, "batch_size must be at least 1"),
        (lambda d: d.batch(True), TypeError, "batch_size must be an integer"),
        (lambda d: d.batch("2"), TypeError, "batch_size must be an integer"),
        (lambda d: d.shuffle(0), InvalidArgument, "buffer_size must be at least 1"),
        (lambda d: d.shuffle(2, seed=1.5), TypeError, "seed must be an integer"),
        (lambda d: d.shard(0, 0), InvalidArgument, "num_shards must be at least 1"),
        (lambda d: d.shard(2, 2), InvalidArgument, r"\[0, 2\)"),
        (lambda d: d.shard(2, -1), InvalidArgument, r"\[0, 2\)"),
        (lambda d: d.take(-2), InvalidArgument, "count must be at least -1"),
        (lambda d: d.skip(-2), InvalidArgument, "count must be at least -1"),
        (lambda d: d.repeat(-2), InvalidArgument, "count must be at least -1"),
        (lambda d: d.prefetch(-2), InvalidArgument, "buffer_size"),
        (lambda d: d.map(3), TypeError, "map_func must be a function"),
        (lambda d: d.map(len, num_parallel_calls=0), InvalidArgument, "num_parallel_calls"),
        (lambda d: d.filter(None), TypeError, "predicate must be a function"),
        (lambda d: d.interleave(len, cycle_length=0), InvalidArgument, "cycle_length"),
        (lambda d: d.concatenate([1]), TypeError, "takes a ts.data.Dataset"),
        (lambda d: d.with_options({}), TypeError, "takes a ts.data.Options"),
        (lambda d: d.cache("file"), NotImplementedError, "in memory only"),
        (lambda d: list(d.flat_map(lambda x: [x])), TypeError, "must return a ts.data.Dataset"),
        (lambda d: list(d.unbatch()), InvalidArgument, "first dimension"),
        (lambda d: list(d.map(lambda x: ([1, 2], [1])).unbatch()), InvalidArgument, "one length"),
    ],
)
def test_bad_arguments(make, error, text):
    with pytest.raises(error, match=text):
        make(Dataset.range(5))


def test_special_counts():
    dataset = Dataset.range(3)
    assert plain(dataset.take(-1)) == [0, 1, 2]
    assert plain(dataset.skip(-1)) == []
    assert plain(dataset.prefetch(0)) == plain(dataset.prefetch(ts.data.AUTOTUNE)) == [0, 1, 2]
    assert plain(dataset.repeat(-1).take(4)) == [0, 1, 2, 0]
    assert plain(dataset.batch(torch.tensor(2))) == [[0, 1], [2]]
