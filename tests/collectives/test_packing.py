import pytest
import torch

from torchstrategy.collectives.packing import pack, plan_buckets, split_into_packs, unpack


def test_pack_and_unpack():
    tensors = [torch.randn(2, 3), torch.randn(()), torch.randn(0, 4), torch.randn(3, 2).t()]
    for tensor, back in zip(tensors, unpack(pack(tensors), tensors), strict=True):
        assert torch.equal(tensor, back)


@pytest.mark.parametrize("bucket_bytes", [1, 40, 10**6])
def test_plan_holds_each_tensor_once_within_the_size(bucket_bytes):
    sizes = [3, 100, 1, 1, 1, 7, 2]
    tensors = [torch.zeros(n, dtype=torch.float64 if n % 2 else torch.float32) for n in sizes]
    buckets = plan_buckets(tensors, bucket_bytes)
    assert sorted(i for bucket in buckets for i in bucket) == list(range(len(sizes)))
    for bucket in buckets:
        assert len({tensors[i].dtype for i in bucket}) == 1
        total = sum(tensors[i].numel() * tensors[i].element_size() for i in bucket)
        assert len(bucket) == 1 or total <= bucket_bytes


@pytest.mark.parametrize(("count", "packs"), [(5, 2), (3, 7), (1, 1), (8, 3)])
def test_packs_are_consecutive_and_even(count, packs):
    parts = split_into_packs(count, packs)
    assert [i for part in parts for i in part] == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert len(parts) == min(packs, count)
