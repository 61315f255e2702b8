import pytest
import torch

from torchstrategy.ps.partitioning import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    Partitioner,
)


def test_base_class_decides_nothing():
    with pytest.raises(NotImplementedError):
        Partitioner()([4], torch.float32)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: MinSizePartitioner(min_shard_bytes=0), "min_shard_bytes"),
        (lambda: MinSizePartitioner(max_shards=0), "max_shards"),
        (lambda: MinSizePartitioner(bytes_per_string=0), "bytes_per_string"),
        (lambda: MaxSizePartitioner(0), "max_shard_bytes"),
        (lambda: MaxSizePartitioner(4, max_shards=-1), "max_shards"),
        (lambda: MaxSizePartitioner(4, bytes_per_string=-2), "bytes_per_string"),
    ],
)
def test_arguments_are_positive(make, name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1"):
        make()


@pytest.mark.parametrize("shape", [[0, 3], [3, 0]])
def test_variables_without_elements(shape):  # TF divides by zero for two of these
    assert MinSizePartitioner(4, 4)(shape, torch.float32) == [1, 1]
    assert MaxSizePartitioner(4)(shape, torch.float32) == [1, 1]


def test_another_axis():
    assert FixedShardsPartitioner(2)([4, 3], torch.float32, axis=-1) == [1, 2]
    assert MinSizePartitioner(4, 4)([4, 3], torch.float32, axis=-1) == [1, 3]
    assert MaxSizePartitioner(4)([4, 3], torch.float32, axis=-1) == [1, 3]
    with pytest.raises(ValueError, match="no axis 2"):
        MinSizePartitioner()([4, 3], torch.float32, axis=2)
