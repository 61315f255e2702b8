"""Memory that is there once, and views of it that replicas may write to."""

import mmap

import pytest
import torch

from torchstrategy.collectives import host_blocks
from torchstrategy.collectives.host_blocks import PlainBlock, make_block

SIZES = [10, 3 * mmap.PAGESIZE, 100]


def test_views_see_the_memory_and_keep_their_writes():
    block = make_block(SIZES, 2)
    block.memory[1].fill_(3)
    assert [int(view[1].sum()) for view in block.views] == [9 * mmap.PAGESIZE] * 2
    assert block.changed(0) == block.changed(1) == []
    block.views[0][1][-1] = 7
    assert (int(block.memory[1][-1]), int(block.views[1][1][-1])) == (3, 3)
    ((start, stop, _),) = block.stamp()
    assert stop - start == mmap.PAGESIZE
    assert block.changed(1) == []


def test_publishing_and_refreshing():
    block = make_block(SIZES, 2)
    block.views[0][2].fill_(5)
    block.views[1][0].fill_(6)
    block.publish()
    assert block.memory[2].tolist() == [5] * 100
    assert block.memory[0].tolist() == [0] * 10
    for view in range(2):
        block.refresh(view)
        assert block.changed(view) == []
        assert block.views[view][2].tolist() == [5] * 100
        assert block.views[view][0].tolist() == [0] * 10


def test_spreading_reaches_the_other_views_only():
    block = make_block(SIZES, 3)
    block.views[0][0].fill_(4)
    block.spread()
    assert [view[0].tolist() for view in block.views] == [[4] * 10] * 3
    assert block.memory[0].tolist() == [0] * 10


def test_without_flags_of_pages_every_page_may_have_changed(monkeypatch):
    monkeypatch.setattr(host_blocks, "_says_page_flags", lambda: False)
    block = make_block(SIZES, 1)
    block.views[0][0].fill_(4)
    assert block.changed(0) == [slice(0, 4 * mmap.PAGESIZE)]
    block.publish()
    block.refresh(0)
    assert block.memory[0].tolist() == block.views[0][0].tolist() == [4] * 10


def test_tensors_are_saved_alone():
    block = make_block(SIZES, 1)
    assert [part.untyped_storage().nbytes() for part in block.views[0]] == SIZES


def test_plain_block_is_its_own_view():
    block = PlainBlock(SIZES, torch.device("cpu"))
    block.views[0][0].fill_(2)
    block.publish()
    block.spread()
    block.refresh(0)
    assert block.memory[0].tolist() == [2] * 10
    assert block.changed(0) == block.stamp() == []


def test_other_systems_are_told(monkeypatch):
    monkeypatch.setattr(host_blocks.sys, "platform", "darwin")
    with pytest.raises(RuntimeError, match=r"Rank 0: .*needs Linux, and this is darwin.*MirroredStrategy"):
        host_blocks.share_block(lambda card: [card], 0, SIZES, 1)
