import pytest
import torch

from torchstrategy.collectives.summing import (
    as_bytes,
    group_by_layout,
    have_own_memory,
    in_format_of,
    in_memory_order,
    memory_order,
    pack,
    plan_buckets,
    split_into_packs,
    unpack,
    unpack_copies,
)

IMAGES = torch.randn(2, 3, 4, 5)
LAST = IMAGES.to(memory_format=torch.channels_last)


def test_pack_and_unpack():
    tensors = [torch.randn(2, 3), torch.randn(()), torch.randn(0, 4), torch.randn(3, 2).t()]
    for tensor, back in zip(tensors, unpack(pack(tensors), tensors), strict=True):
        assert torch.equal(tensor, back)


def test_buffers_in_the_memory_order_of_others():
    formats = [LAST, torch.zeros(3, 2), LAST, torch.zeros(2, 3).t(), torch.zeros(4, 1, 2, 2)]
    tensors = [torch.randn(like.shape).copy_(torch.randn(like.shape)) for like in formats]
    tensors[0] = tensors[0].to(memory_format=torch.channels_last)
    flat = pack(tensors, formats)
    assert torch.equal(flat[: LAST.numel()], tensors[0].permute(0, 2, 3, 1).flatten())
    for tensor, back, like in zip(tensors, unpack(flat, formats, keep_formats=True), formats, strict=True):
        assert torch.equal(tensor, back)
        assert back.stride() == like.stride()
        assert back.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("tensor", "order"),
    [
        (IMAGES, None),
        (LAST, (0, 2, 3, 1)),
        (torch.zeros(4, 1, 3, 3).to(memory_format=torch.channels_last), None),  # the same in both formats
        (torch.zeros(4, 3, 1, 2).to(memory_format=torch.channels_last), (0, 3, 1, 2)),
        (torch.zeros(2, 3).t(), (1, 0)),
        (torch.zeros(3, 1).expand(3, 2), None),  # overlaps itself
        (torch.zeros(4, 4)[:, ::2], None),  # has gaps
    ],
)
def test_order_of_elements_in_memory(tensor, order):
    assert memory_order(tensor) == order
    if order is not None:
        view = in_memory_order(torch.zeros(tensor.shape), order)
        assert memory_order(view) == order
        assert view.shape == tensor.shape


def test_copies_only_what_has_another_format():
    one_channel = torch.zeros(4, 1, 3, 3)
    same = [
        (IMAGES, IMAGES.clone()),
        (LAST, LAST.clone()),
        (one_channel, one_channel.to(memory_format=torch.channels_last)),
        (IMAGES, torch.zeros(2, 3, 4, 10)[..., ::2]),
    ]
    assert all(in_format_of(tensor, like) is tensor for tensor, like in same)
    for tensor, like in [(IMAGES, LAST), (LAST, IMAGES), (torch.zeros(2, 3, 4, 10)[..., ::2], IMAGES)]:
        result = in_format_of(tensor, like)
        assert torch.equal(result, tensor)
        assert result.stride() == like.stride()


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


def test_copies_have_memory_and_dtype_of_their_own():
    like = [torch.zeros(2, dtype=torch.int16), torch.zeros(1, 2, dtype=torch.int16)]
    flat = torch.arange(4, dtype=torch.int32)
    first, second = unpack_copies(flat, like)
    first += 1
    assert first.tolist() == [1, 2]
    assert second.tolist() == [[2, 3]]
    assert first.dtype == second.dtype == torch.int16
    assert flat.tolist() == [0, 1, 2, 3]
    flat = torch.zeros(3)
    (copy,) = unpack_copies(flat, [torch.zeros(3)])
    copy += 1
    assert not flat.any()


def test_the_bytes_of_a_buffer_are_its_memory():
    flat = torch.zeros(2, dtype=torch.bfloat16)
    as_bytes(flat).fill_(0x40)
    assert flat.tolist() == [3.0, 3.0]


def test_groups_of_one_layout():
    sparse = torch.zeros(2).to_sparse()
    tensors = [torch.zeros(2), torch.zeros(1, dtype=torch.int64), sparse, torch.zeros(3), torch.zeros(1).to_sparse()]
    assert group_by_layout(tensors) == [(torch.float32, [0, 3]), (torch.int64, [1]), (torch.float32, [2, 4])]


def test_memory_that_may_be_written_to():
    buffer = torch.zeros(12)
    own = [torch.empty_strided((3, 2), (1, 3)), torch.zeros(0), torch.zeros(()), LAST.clone()]
    assert have_own_memory(own) == [True] * 4
    assert have_own_memory([own[0], own[0]]) == [False] * 2
    shared = [buffer[:4], buffer[4:8], buffer.view(3, 4), buffer]
    others = [torch.zeros(4)[::2], torch.zeros(3).expand(2, 3), torch.zeros(3, requires_grad=True)]
    others += [torch.zeros(3).to_sparse(), torch.zeros(3, device="meta")]
    assert have_own_memory([*shared, *others]) == [False] * 9
    del shared
    assert have_own_memory([buffer]) == [True]
