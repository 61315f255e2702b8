"""What a dataset says about itself: cardinality, specs, options, files, hints."""

import pytest
import torch

import torchstrategy as ts

Dataset = ts.data.Dataset
INFINITE, UNKNOWN = ts.data.INFINITE_CARDINALITY, ts.data.UNKNOWN_CARDINALITY


@pytest.mark.parametrize(
    ("dataset", "cardinality"),
    [
        (Dataset.range(10).batch(4), 3),
        (Dataset.range(10).batch(4, drop_remainder=True), 2),
        (Dataset.range(10).repeat(), INFINITE),
        (Dataset.range(0).repeat(), 0),
        (Dataset.range(10).repeat().batch(3).take(5), 5),
        (Dataset.range(10).take(3).repeat(2), 6),
        (Dataset.range(10).skip(20), 0),
        (Dataset.range(10).shard(3, 1), 3),
        (Dataset.range(10).shuffle(3).cache().prefetch(1).map(len), 10),
        (Dataset.range(10).filter(bool), UNKNOWN),
        (Dataset.range(10).filter(bool).repeat(0), 0),
        (Dataset.range(10).flat_map(Dataset.range), UNKNOWN),
        (Dataset.range(10).take_while(bool), UNKNOWN),
        (Dataset.range(10).unique(), UNKNOWN),
        (Dataset.range(10).scan(0, lambda s, x: (s, x)), 10),
        (Dataset.from_generator(lambda: []), UNKNOWN),
        (Dataset.zip(Dataset.range(4), Dataset.range(9).repeat()), 4),
        (Dataset.zip(Dataset.range(4).repeat(), Dataset.range(9).repeat()), INFINITE),
        (Dataset.range(4).concatenate(Dataset.range(3)), 7),
        (Dataset.range(4).concatenate(Dataset.range(3).repeat()), INFINITE),
    ],
)
def test_cardinality(dataset, cardinality):
    assert dataset.cardinality() == cardinality == ts.data.experimental.cardinality(dataset)
    assert dataset
    if cardinality >= 0:
        assert len(dataset) == cardinality
    else:
        with pytest.raises(TypeError, match="infinite" if cardinality == INFINITE else "not known"):
            len(dataset)


def test_cardinality_of_something_else():
    with pytest.raises(TypeError, match=r"takes a ts\.data\.Dataset"):
        ts.data.experimental.cardinality([1])


def test_element_spec_leaves_no_trace():
    dataset = Dataset.range(10).map(lambda x: (x, torch.rand(2))).shuffle(5).batch(4).prefetch(2)
    torch.manual_seed(3)
    expected = [x.tolist() for x, _ in dataset]
    torch.manual_seed(3)
    again = Dataset.range(10).map(lambda x: (x, torch.rand(2))).shuffle(5).batch(4).prefetch(2)
    assert again.element_spec == (
        ts.data.TensorSpec((None,), torch.int64),
        ts.data.TensorSpec((None, 2), torch.float32),
    )
    assert [x.tolist() for x, _ in again] == expected


def test_peek_does_not_count_as_an_iteration():
    dataset, other = (Dataset.range(10).shuffle(10, seed=1).cache() for _ in range(2))
    dataset.peek()
    assert list(dataset) == list(other)
    with pytest.raises(ValueError, match="is empty"):
        Dataset.range(0).peek()


def test_element_spec_of_single_elements():
    dataset = Dataset.from_tensor_slices({"x": torch.zeros(4, 3), "s": ["a", "b", "c", "d"]})
    assert dataset.element_spec == {
        "x": ts.data.TensorSpec((3,), torch.float32),
        "s": ts.data.TensorSpec((), str),
    }
    assert dataset.batch(2).element_spec["s"] == ts.data.TensorSpec((None,), str)


def test_batch_size():
    batches = Dataset.range(10).batch(4)
    kept = batches.map(len).filter(bool).take(2).skip(1).prefetch(1).repeat().cache().shuffle(3).shard(2, 0)
    assert kept.batch_size == 4
    assert batches.batch(2).batch_size == 2
    assert batches.unbatch().batch_size is None
    assert batches.enumerate().batch_size is None
    assert Dataset.range(3).batch_size is None
    assert Dataset.zip(batches, batches).batch_size == 4
    assert Dataset.zip(batches, batches.batch(2)).batch_size is None
    assert batches.padded_batch(3).batch_size == 3


def test_files():
    files = Dataset.from_files(["a", "b"], len)
    assert files.map(len).batch(3).repeat().num_files == 2
    assert files.map(len).files == ("a", "b")
    assert files.splits_by_file
    for changed in (
        files.take(1),
        files.skip(1),
        files.enumerate(),
        files.shard(2, 0),
        files.batch(2, True),
        files.unique(),
        files.bucket_by_sequence_length(len, [3], [2, 2]),
        files.window(2).flat_map(lambda window: window),
    ):
        assert changed.num_files == 2
        assert not changed.splits_by_file
    assert Dataset.zip(files, files).num_files is None
    assert Dataset.range(3).num_files is Dataset.range(3).files is None


def test_options_are_copied_and_merged():
    options = ts.data.Options()
    options.experimental_distribute.auto_shard_policy = ts.data.AutoShardPolicy.FILE
    dataset = Dataset.range(3).with_options(options).batch(2)
    options.experimental_distribute.auto_shard_policy = ts.data.AutoShardPolicy.OFF
    other = ts.data.Options()
    other.deterministic = True
    merged = dataset.with_options(other).map(len).options()
    assert merged.experimental_distribute.auto_shard_policy is ts.data.AutoShardPolicy.FILE
    assert merged.deterministic is True
    assert dataset.options().deterministic is None
    zipped = Dataset.zip(Dataset.range(2), dataset)
    assert zipped.options().experimental_distribute.auto_shard_policy is ts.data.AutoShardPolicy.FILE
    appended = Dataset.range(2).concatenate(dataset)
    assert appended.options().experimental_distribute.auto_shard_policy is ts.data.AutoShardPolicy.FILE


def test_wrong_options():
    options = ts.data.Options()
    with pytest.raises(TypeError, match="AutoShardPolicy"):
        options.experimental_distribute.auto_shard_policy = "FILE"
    with pytest.raises(AttributeError, match="no option 'threading'"):
        options.threading = 1
    with pytest.raises(AttributeError, match="no option 'experimental_deterministic': it is 'deterministic' now"):
        options.experimental_deterministic = True
    with pytest.raises(AttributeError, match="no option 'num_devices'"):
        options.experimental_distribute.num_devices = 1
    with pytest.raises(TypeError, match="DistributeOptions"):
        options.experimental_distribute = None
    with pytest.raises(TypeError, match="bool or None"):
        options.deterministic = 1


def test_shard_hint():
    dataset = Dataset.range(7).shard(ts.data.SHARD_HINT, ts.data.SHARD_HINT).batch(2)
    assert dataset.has_shard_hint
    assert dataset.element_spec == ts.data.TensorSpec((None,), torch.int64)
    with pytest.raises(RuntimeError, match=r"AutoShardPolicy\.HINT"):
        iter(dataset)
    parts = [dataset.shard_by_hint(2, i) for i in range(2)]
    assert [[x.tolist() for x in part] for part in parts] == [[[0, 2], [4, 6]], [[1, 3], [5]]]
    assert not parts[0].has_shard_hint
    with pytest.raises(ts.errors.InvalidArgumentError, match="index"):
        dataset.shard_by_hint(2, 2)


def test_repr():
    dataset = Dataset.range(7).shuffle(3, seed=1).batch(2, drop_remainder=True)
    assert repr(dataset) == "Dataset.range(7).shuffle(3).batch(2, drop_remainder=True)"
