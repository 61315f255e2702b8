"""Where elements come from, and what they become."""

import collections
import dataclasses

import numpy as np
import pytest
import torch

import torchstrategy as ts
from torchstrategy.data.pipeline import access

Dataset = ts.data.Dataset
Pair = collections.namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass(frozen=True)
class Example:
    image: object
    label: object


def test_the_guides_pipeline():
    dataset = Dataset.from_tensors(([1.0], [1.0])).repeat(100).batch(10)
    assert len(dataset) == 10
    for x, y in dataset:
        assert torch.equal(x, torch.ones(10, 1))
        assert torch.equal(y, torch.ones(10, 1))
        assert x.dtype == torch.float32


def test_the_tutorials_pipeline():
    images, labels = np.random.default_rng(0).random((70, 4, 4, 1), np.float32), np.arange(70)
    dataset = Dataset.from_tensor_slices((images, labels)).shuffle(70).batch(16)
    seen = torch.cat([y for _, y in dataset])
    assert sorted(seen.tolist()) == list(range(70))
    for x, y in dataset:
        assert np.array_equal(x.numpy(), images[y.numpy()])


def test_the_estimator_guides_structure():
    (features, label) = next(iter(Dataset.from_tensors(({"feats": [1.0]}, [1.0])).repeat(4).batch(2)))
    assert features["feats"].shape == label.shape == (2, 1)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (np.zeros(3), torch.float64),
        (np.zeros(3, np.uint8), torch.uint8),
        ([1, 2, 3], torch.int64),
        ([1.0, 2, 3], torch.float32),
        ([True, False], torch.bool),
        (np.arange(3, dtype=">i4"), torch.int32),
        (np.arange(6)[::-2], torch.int64),
        ([np.float32(1), np.float32(2)], torch.float32),
        ([(1, 2), (3, 4)], torch.int64),
    ],
)
def test_columns_become_tensors(value, dtype):
    elements = list(Dataset.from_tensor_slices(value))
    assert [element.dtype for element in elements] == [dtype] * len(value)
    assert torch.stack(elements).tolist() == np.asarray(value).tolist()


def test_elements_of_a_map_become_tensors():
    def fn(x):
        return {"int": 1, "float": 2.5, "array": np.ones(2, np.float16), "list": [1, 2], "text": "a", "none": None}

    (element,) = Dataset.range(1).map(fn)
    assert element["int"].dtype == torch.int64
    assert element["float"].dtype == torch.float32
    assert element["array"].dtype == torch.float16
    assert element["list"].tolist() == [1, 2]
    assert (element["text"], element["none"]) == ("a", None)


def test_default_dtype_is_torchs():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert next(iter(Dataset.from_tensors(1.5))).dtype == torch.float64
    finally:
        torch.set_default_dtype(before)


def test_elements_are_made_on_the_cpu():
    dataset = Dataset.range(2000).map(lambda x: (x, 1.5, [1])).enumerate().batch(2)
    shuffled = Dataset.from_tensor_slices(np.arange(3000)).shuffle(10)
    with torch.device("meta"):  # as in the scope of a strategy on an accelerator
        assert next(iter(dataset))[1][1].tolist() == [1.5, 1.5]
        elements = iter(shuffled)
        assert all(next(elements).device.type == "cpu" for _ in range(2500))
        shuffled.load_state_dict(shuffled.state_dict())
        assert len(list(shuffled)) == 500


def test_structures_are_kept():
    data = Example(Pair(np.arange(3), ["a", "b", "c"]), {"y": torch.arange(3.0)})
    first, *_ = Dataset.from_tensor_slices(data)
    assert first == Example(Pair(torch.tensor(0), "a"), {"y": torch.tensor(0.0)})
    (batch,) = Dataset.from_tensor_slices(data).batch(5)
    assert batch.image.right == ["a", "b", "c"]
    assert batch.label["y"].tolist() == [0.0, 1.0, 2.0]
    assert [e.image.left.item() for e in Dataset.from_tensor_slices(data).batch(2).unbatch()] == [0, 1, 2]


def test_a_data_frames_columns():
    class Column:  # as a pandas.Series
        def __array__(self, dtype=None, copy=None):
            return np.arange(3.0)

    assert [x["a"].item() for x in Dataset.from_tensor_slices({"a": Column()})] == [0.0, 1.0, 2.0]


def test_users_arrays_are_not_copied_and_not_written(tmp_path):
    np.memmap(tmp_path / "a", np.float32, "w+", shape=(10, 2)).flush()
    array = np.memmap(tmp_path / "a", np.float32, "r", shape=(10, 2))
    tensor = torch.zeros(10, 2)
    for source in (array, tensor):
        dataset = Dataset.from_tensor_slices(source)
        for pipeline in (dataset, dataset.batch(3), dataset.shuffle(10).batch(3), dataset.map(lambda x: x)):
            for element in pipeline:
                element.add_(1)
            assert all(torch.equal(element, torch.zeros_like(element)) for element in pipeline)
    tensor[4] = 7  # the dataset looks at the user's memory
    assert list(Dataset.from_tensor_slices(tensor))[4].tolist() == [7, 7]


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.uint64, np.bool_, np.complex64])
def test_dtypes_that_torch_can_not_index(dtype):
    numbers = np.arange(60).astype(dtype)
    dataset = Dataset.from_tensor_slices(numbers)
    for pipeline in (dataset.shuffle(60, seed=1).batch(7), dataset.map(lambda x: x).batch(7).shuffle(3)):
        found = np.concatenate([batch.numpy() for batch in pipeline])
        assert found.dtype == dtype
        assert np.array_equal(np.sort(found), numbers)


def test_batches_of_slices_are_gathered_at_once(monkeypatch):
    def get(self, position):
        raise AssertionError("an example was read by itself")

    monkeypatch.setattr(access.Columns, "get", get)
    dataset = Dataset.from_tensor_slices(torch.arange(50))
    pipeline = dataset.skip(2).shuffle(9).repeat(2).shard(2, 1).take(30).batch(7).prefetch(1)
    assert sum(len(batch) for batch in pipeline) == 30


def test_cached_elements_are_not_written():
    for dataset in (Dataset.range(3), Dataset.range(3).shuffle(2), Dataset.from_generator(lambda: range(3))):
        cached = dataset.map(lambda x: x * 0).cache()
        for _ in range(3):
            for element in cached:
                assert element == 0
                element.add_(1)


def test_a_generators_array_may_be_refilled():
    def generate():
        buffer = np.zeros(1)
        for i in range(4):
            buffer[0] = i
            yield buffer

    assert [batch.tolist() for batch in Dataset.from_generator(generate).batch(2)] == [[[0], [1]], [[2], [3]]]


def test_a_generator_is_called_for_each_iteration():
    calls = []

    def generate(stop):
        calls.append(stop)
        yield from range(stop)

    dataset = Dataset.from_generator(generate, args=(3,))
    assert calls == []
    assert [list(map(int, dataset)) for _ in range(2)] == [[0, 1, 2]] * 2
    assert calls == [3, 3]


def test_a_one_shot_iterator_is_refused():
    with pytest.raises(TypeError, match="Pass the function that makes it"):
        Dataset.from_generator(i for i in range(3))
    once = (i for i in range(3))
    dataset = Dataset.from_generator(lambda: once)
    assert list(map(int, dataset)) == [0, 1, 2]
    with pytest.raises(TypeError, match="returned the same iterator again"):
        list(dataset)
    with pytest.raises(TypeError, match="must return an iterable"):
        list(Dataset.from_generator(lambda: 3))


def test_output_signature_converts_and_checks():
    spec = (ts.data.TensorSpec((None,), torch.float32), {"id": ts.data.TensorSpec((), torch.int32)})
    dataset = Dataset.from_generator(lambda: [([1, 2], {"id": 3})], output_signature=spec)
    ((x, y),) = dataset
    assert x.dtype == torch.float32
    assert y["id"].dtype == torch.int32
    for item in [([1, 2], {"other": 3}), ([[1, 2]], {"id": 3}), 5, ([1], {"id": [3]})]:
        with pytest.raises(ts.errors.InvalidArgumentError, match="does not fit its output_signature"):
            list(Dataset.from_generator(lambda item=item: [item], output_signature=spec))
    with pytest.raises(TypeError, match="TensorSpec for each tensor"):
        Dataset.from_generator(lambda: [], output_signature=torch.float32)


def numbers_of(name):
    return range(10 * int(name), 10 * int(name) + 4)


def test_files_are_read_in_turn_and_shared_out():
    dataset = Dataset.from_files(["0", "1", "2"], numbers_of)
    assert list(map(int, dataset)) == [0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22, 23]
    batches = dataset.map(lambda x: x + 1).batch(2)
    parts = [batches.shard_files(2, i) for i in range(2)]
    assert [part.num_files for part in parts] == [2, 1]
    assert [[x.tolist() for x in part] for part in parts] == [
        [[1, 2], [3, 4], [21, 22], [23, 24]],
        [[11, 12], [13, 14]],
    ]
    assert list(dataset.shard_files(5, 4)) == []
    with pytest.raises(ts.errors.InvalidArgumentError, match="no single source of files"):
        Dataset.range(3).shard_files(2, 0)


def test_shards_of_a_cached_dataset_have_caches_of_their_own():
    dataset = Dataset.from_files(["0", "1"], numbers_of).cache()
    assert [int(next(iter(dataset.shard_files(2, i)))) for i in (0, 1, 0)] == [0, 10, 0]


def test_list_files(tmp_path):
    for name in ("b", "a", "c"):
        (tmp_path / f"{name}.txt").write_text(f"{name}1\n{name}2\n")
    (tmp_path / "folder.txt").mkdir()
    names = Dataset.list_files(f"{tmp_path}/*.txt", shuffle=False)
    assert [name[-5] for name in names] == ["a", "b", "c"]
    lines = names.interleave(ts.data.TextLineDataset, cycle_length=2)
    assert list(lines) == ["a1", "b1", "a2", "b2", "c1", "c2"]
    assert lines.num_files == 3
    assert list(lines.shard_files(2, 1)) == ["b1", "b2"]
    assert list(lines.shard_files(4, 3)) == []
    shuffled = Dataset.list_files([f"{tmp_path}/a*", f"{tmp_path}/b*"], seed=1)
    assert sorted(shuffled) == [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]
    assert sorted(ts.data.TextLineDataset(shuffled)) == ["a1", "a2", "b1", "b2"]
    with pytest.raises(ts.errors.InvalidArgumentError, match="No files match"):
        Dataset.list_files(f"{tmp_path}/*.csv")


def test_text_lines(tmp_path):
    (tmp_path / "a").write_text("one\ntwo")
    dataset = ts.data.TextLineDataset([tmp_path / "a", tmp_path / "a"])
    assert isinstance(dataset, Dataset)
    assert list(dataset) == ["one", "two", "one", "two"]
    assert dataset.num_files == 2
    assert list(dataset.batch(3)) == [["one", "two", "one"], ["two"]]


def test_range():
    assert [int(x) for x in Dataset.range(5, 1, -2)] == [5, 3]
    assert next(iter(Dataset.range(3, output_type=torch.float32))).dtype == torch.float32
    assert list(Dataset.range(3, 3)) == []
    assert [x.tolist() for x in Dataset.range(1, 10, 3).shuffle(1).batch(2)] == [[1, 4], [7]]


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: Dataset.range(), ValueError, "1 to 3 numbers"),
        (lambda: Dataset.range(1, 2, 0), ValueError, "step"),
        (lambda: Dataset.range(1.5), TypeError, "integer"),
        (lambda: Dataset.from_tensor_slices((np.zeros(3), np.zeros(4))), ValueError, "has 3, component .1. has 4"),
        (lambda: Dataset.from_tensor_slices({"a": np.zeros(3), "b": 1}), ValueError, "'b'.* is a scalar"),
        (lambda: Dataset.from_tensor_slices({}), ValueError, "no tensors"),
        (lambda: Dataset.from_tensor_slices({1, 2}), TypeError, "Can't slice a set"),
        (lambda: Dataset.from_tensors([1, [2, 3]]), ValueError, "Use a tuple or a dict"),
        (lambda: Dataset.from_generator([1, 2]), TypeError, "generator must be a function"),
        (lambda: Dataset.from_files(["a"], None), TypeError, "reader must be a function"),
        (lambda: Dataset.from_files([3], len), TypeError, "must be a path"),
        (lambda: Dataset.from_files(3, len), TypeError, "list of file names"),
        (lambda: Dataset.zip(), TypeError, "takes datasets"),
        (lambda: Dataset.zip([1]), TypeError, "takes datasets"),
    ],
)
def test_bad_arguments(make, error, text):
    with pytest.raises(error, match=text):
        make()


def test_a_range_that_does_not_fit_its_dtype():
    assert Dataset.range(128, output_type=torch.int8).batch(128).get_single_element().max() == 127
    with pytest.raises(ts.errors.InvalidArgumentError, match=r"don't fit into torch\.int8"):
        Dataset.range(129, output_type=torch.int8)


def plain(dataset):
    return [element.tolist() for element in dataset]


def test_counter_as_in_tf():
    assert plain(Dataset.counter(10, -2).take(3)) == [10, 8, 6]
    assert plain(Dataset.counter(5, 0).take(2)) == [5, 5]
    assert plain(Dataset.counter(0.5, 0.25, dtype=torch.float32).take(2)) == [0.5, 0.75]
    for wrapped in (Dataset.counter(126, dtype=torch.int8).take(3), Dataset.counter(126, dtype=torch.int8).batch(3)):
        assert torch.cat([x.reshape(-1) for x in wrapped.take(3)])[:3].tolist() == [126, 127, -128]
    assert Dataset.counter().cardinality() == ts.data.INFINITE_CARDINALITY
    shuffled = plain(Dataset.counter().shuffle(5, seed=1).skip(3).take(20))
    assert len({*shuffled}) == 20
    with pytest.raises(TypeError, match="integer"):
        Dataset.counter("a")
    with pytest.raises(TypeError, match=r"torch\.dtype"):
        Dataset.counter(dtype=int)


@pytest.mark.parametrize("seed", [None, 4])
@pytest.mark.parametrize("changes", [None, False, True])
def test_random_as_in_tf(seed, changes):
    numbers = Dataset.random(seed, changes).take(3)
    first, second, repeated = plain(numbers), plain(numbers), plain(numbers.repeat(2))
    assert len({*first, *second, *repeated}) == (12 if changes else 3)
    assert (first == second == repeated[:3] == repeated[3:]) is not bool(changes)
    assert numbers.element_spec == ts.data.TensorSpec((), torch.int64)


def test_random_numbers_are_of_32_bits_and_evenly_spread():
    dataset = Dataset.random(seed=1)
    assert dataset.cardinality() == ts.data.INFINITE_CARDINALITY
    numbers = next(iter(dataset.batch(4000))).double() / 2**32
    assert 0 <= numbers.min() < 0.01 < 0.99 < numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.03
    assert plain(Dataset.random(1).skip(7).take(2)) == plain(Dataset.random(1).take(9))[7:]
    with pytest.raises(TypeError, match="seed must be an integer"):
        Dataset.random("a")


def test_experimental_names():
    experimental = ts.data.experimental
    assert plain(experimental.Counter(2).take(2)) == [2, 3]
    assert plain(experimental.RandomDataset(seed=1).take(2)) == plain(Dataset.random(1).take(2))
    small = Dataset.from_tensor_slices([1, 1, 2, 9]).apply(experimental.take_while(lambda x: x < 9))
    assert plain(small.apply(experimental.unique())) == [1, 2]
    assert plain(small.apply(experimental.scan(0, lambda total, x: (total + x, total + x)))) == [1, 2, 4]


def test_saved_elements_are_those_that_are_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr("torchstrategy.data.pipeline.dataset_sources._BYTES_PER_FILE", 100)
    dataset = Dataset.range(20).map(lambda x: {"x": torch.full((int(x) % 3,), int(x)), "pair": (str(int(x)), x * 0.5)})
    dataset.save(tmp_path / "new" / "folder")
    loaded = Dataset.load(tmp_path / "new" / "folder")
    assert [(e["x"].tolist(), e["pair"][0], float(e["pair"][1])) for e in loaded] == [
        ([i] * (i % 3), str(i), i / 2) for i in range(20)
    ]
    assert loaded.num_files > 2
    assert loaded.splits_by_file
    shards = [loaded.shard_files(2, i) for i in range(2)]
    assert sum(map(len, shards)) == len(loaded) == 20
    assert sorted(int(e["pair"][0]) for shard in shards for e in shard) == list(range(20))
    elements = iter(loaded)
    first = [next(elements)["pair"][0] for _ in range(7)]
    loaded.load_state_dict(loaded.state_dict())
    assert first + [e["pair"][0] for e in loaded] == [str(i) for i in range(20)]


def test_saving_replaces_and_leaves_nothing_behind(tmp_path):
    path = tmp_path / "saved"
    Dataset.range(3).save(path)
    with pytest.raises(ZeroDivisionError):
        Dataset.range(3).map(lambda x: 1 // int(x)).save(path)
    assert plain(Dataset.load(path)) == [0, 1, 2]
    Dataset.load(path).map(lambda x: x + 1).save(path)
    assert plain(Dataset.load(path)) == [1, 2, 3]
    Dataset.range(0).save(path)
    assert plain(Dataset.load(path)) == []
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]


def test_saving_takes_no_more_than_the_elements(tmp_path):
    Dataset.range(2).map(lambda x: torch.zeros(100000)[:1]).save(tmp_path / "saved")
    assert sum(file.stat().st_size for file in (tmp_path / "saved").iterdir()) < 10000


def test_what_can_not_be_saved_or_loaded(tmp_path):
    with pytest.raises(ts.errors.NotFoundError, match="no dataset that"):
        Dataset.load(tmp_path)
    with pytest.raises(ts.errors.InvalidArgumentError, match="holds no saved dataset"):
        Dataset.range(3).save(tmp_path)
    with pytest.raises(ts.errors.InvalidArgumentError, match=r"tuples and dicts. Received: Pair\(left"):
        Dataset.range(3).map(lambda x: Pair(x, x)).save(tmp_path / "pairs")
    assert not any(tmp_path.iterdir())
