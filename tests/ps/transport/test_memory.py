import gc

import torch

from torchstrategy.ps.transport.messages import BufferPool

MIB = 1 << 20


def test_memory_is_used_again_when_the_last_tensor_over_it_is_gone():
    pool = BufferPool()
    tensor = pool.empty(2 * MIB)
    where = tensor.data_ptr()
    view = tensor.view(torch.float32)[5:].reshape(-1)
    del tensor
    gc.collect()
    assert pool.idle_bytes == 0
    other = pool.empty(2 * MIB)
    assert other.data_ptr() != where
    del view
    assert pool.idle_bytes == 2 * MIB
    assert pool.empty(2 * MIB).data_ptr() == where


def test_only_the_same_size_is_used_again():
    pool = BufferPool()
    pool.empty(2 * MIB)
    other = pool.empty(3 * MIB)
    assert (pool.idle_bytes, other.numel()) == (2 * MIB, 3 * MIB)


def test_no_more_is_kept_than_allowed():
    pool = BufferPool(max_idle_bytes=5 * MIB)
    held = [pool.empty(2 * MIB) for _ in range(4)]
    del held
    assert pool.idle_bytes == 4 * MIB
    pool.empty(6 * MIB)
    assert pool.idle_bytes == 0


def test_small_memory_is_not_kept():
    pool = BufferPool()
    assert pool.empty(100).shape == (100,)
    assert pool.empty(0).shape == (0,)
    assert pool.idle_bytes == 0


def test_memory_outlives_the_pool():
    tensor = BufferPool().empty(2 * MIB).fill_(7)
    gc.collect()
    assert tensor.sum() == 14 * MIB
