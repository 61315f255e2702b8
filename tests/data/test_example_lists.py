"""Lists of examples are cut by example, lists of components are not, however their sizes coincide."""

import collections
import dataclasses
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import torchstrategy as ts
from tests.data.fake_workers import run_ranks
from torchstrategy.base import tree
from torchstrategy.base.values import PerReplica
from torchstrategy.data.distribute import distribute_dataset

Pair = collections.namedtuple("Pair", ["images", "labels"])


@dataclasses.dataclass
class Batch:
    images: list
    labels: torch.Tensor


def image(i, size=8):
    return torch.full((3, size, size), float(i))


def shares_of(loader, replicas=2):
    """Return every batch's shares, one for each replica."""
    strategy = ts.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])
    rounds = []
    for batch in strategy.experimental_distribute_dataset(loader):
        shares = []

        def note(value, shares=shares):
            shares.append((ts.get_replica_context().replica_id_in_sync_group, value))

        strategy.run(note, args=(batch,))
        rounds.append([value for _, value in sorted(shares, key=lambda share: share[0])])
    return rounds


def numbers(images):
    assert all(picture.shape[0] == 3 for picture in images)
    return [int(picture.flatten()[0]) for picture in images]


LAYOUTS = {
    "tuple of lists": (lambda batch: (list(batch), torch.tensor([int(x[0, 0, 0]) for x in batch])), lambda b: b[0]),
    "tuple of tuples": (lambda batch: (tuple(batch), tuple({"boxes": x[:, 0]} for x in batch)), lambda b: b[0]),
    "dict": (lambda batch: {"images": list(batch), "ids": torch.arange(len(batch))}, lambda b: b["images"]),
    "the list itself": (lambda batch: batch, lambda b: b),
    "named tuple": (lambda batch: Pair(list(batch), torch.arange(len(batch))), lambda b: b.images),
    "dataclass": (lambda batch: Batch(list(batch), torch.arange(len(batch))), lambda b: b.images),
    "in a list": (lambda batch: [[tuple(batch), None], torch.arange(len(batch))], lambda b: b[0][0]),
    "arrays": (lambda batch: ([x.numpy() for x in batch], torch.arange(len(batch))), lambda b: b[0]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch_size", [3, 2, 5])
def test_each_replica_gets_whole_examples(layout, batch_size):
    collate, images = LAYOUTS[layout]
    loader = DataLoader([image(i) for i in range(7)], batch_size=batch_size, collate_fn=collate)
    for k, shares in enumerate(shares_of(loader)):
        count = min(batch_size, 7 - k * batch_size)
        first = list(range(k * batch_size, k * batch_size + count))
        half = -(-count // 2)
        assert [numbers(images(share)) for share in shares] == [first[:half], first[half:]]
        assert all(isinstance(picture, torch.Tensor) for share in shares for picture in images(share))
        assert type(images(shares[0])) is type(images(collate([image(0)])))


def test_images_of_different_sizes():
    loader = DataLoader([image(i, size=4 + i) for i in range(4)], batch_size=4, collate_fn=tuple)
    [[first, second]] = shares_of(loader)
    assert (numbers(first), numbers(second)) == ([0, 1], [2, 3])


def test_lists_of_components_are_cut_along_the_batch():
    def collate(batch):
        rows = torch.stack(batch)
        return [rows, rows + 1, rows + 2]  # three components, in batches of three

    loader = DataLoader([torch.full((3,), float(i)) for i in range(6)], batch_size=3, collate_fn=collate)
    for shares in shares_of(loader):
        assert [[part.shape for part in share] for share in shares] == [[(2, 3)] * 3, [(1, 3)] * 3]


def test_a_single_example_in_the_first_batch():
    loader = DataLoader([image(0)], batch_size=4, collate_fn=lambda batch: (list(batch), torch.arange(len(batch))))
    [[first, second]] = shares_of(loader)
    assert numbers(first[0]) == [0]
    assert second[0] == []
    assert len(second[1]) == 0


def test_examples_that_the_collate_function_leaves_out():
    def collate(batch):
        return [x for x in batch if x[0, 0, 0] % 2 == 0]

    loader = DataLoader([image(i) for i in range(6)], batch_size=6, collate_fn=collate)
    [[first, second]] = shares_of(loader)
    assert (numbers(first), numbers(second)) == ([0, 2], [4])


def test_a_collate_function_that_takes_its_examples_apart():
    def collate(batch):
        return [example.pop("image") for example in batch]

    class Fresh(torch.utils.data.Dataset):
        def __len__(self):
            return 3

        def __getitem__(self, i):
            return {"image": image(i)}

    [[first, second]] = shares_of(DataLoader(Fresh(), batch_size=3, collate_fn=collate))
    assert (numbers(first), numbers(second)) == ([0, 1], [2])


def test_random_numbers_do_not_notice():
    def collate(batch):
        noise = [torch.rand(()) + random.random() + np.random.rand() for _ in batch]
        return list(batch), torch.stack(noise)

    def first_noise(loader):
        return torch.cat([share[1] for share in shares_of(loader)[0]])

    torch.manual_seed(0)
    pictures = [image(i) for i in range(6)]
    expected = first_noise(DataLoader(pictures, batch_size=3, collate_fn=lambda batch: collate(batch)[::1]))
    after = torch.rand(()), random.random()
    torch.manual_seed(0)
    tensors_only = DataLoader(pictures, batch_size=3, collate_fn=lambda batch: (torch.stack(batch), collate(batch)[1]))
    assert torch.equal(first_noise(tensors_only), expected)
    assert torch.rand(()) == after[0]


def test_a_batch_that_can_be_both_is_refused():
    def collate(batch):
        if len(batch) != 3:
            raise RuntimeError("only three")
        return list(batch)

    loader = DataLoader([image(i) for i in range(3)], batch_size=3, collate_fn=collate)
    with pytest.raises(ValueError, match=r"list of 3 entries.*collating 1 example\(s\) raised Runtime.*only three"):
        shares_of(loader)


def test_a_loader_of_a_stream():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([image(i) for i in range(5)])

    rounds = shares_of(DataLoader(Stream(), batch_size=3, collate_fn=tuple))
    assert [[numbers(share) for share in shares] for shares in rounds] == [[[0, 1], [2]], [[3], [4]]]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_loader_workers(num_workers):
    loader = DataLoader([image(i) for i in range(5)], batch_size=3, collate_fn=tuple, num_workers=num_workers)
    rounds = shares_of(loader)
    assert [[numbers(share) for share in shares] for shares in rounds] == [[[0, 1], [2]], [[3], [4]]]


def test_a_loss_of_examples_in_lists_is_that_of_one_replica():
    torch.manual_seed(0)
    pictures = [(torch.randn(3, 4 + i, 4, dtype=torch.float64), torch.randn(i, 4)) for i in range(5)]

    def train(devices):
        strategy = ts.MirroredStrategy(devices)
        with strategy.scope():
            torch.manual_seed(1)
            model = torch.nn.Conv2d(3, 1, 3).double()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(images, boxes):
            optimizer.zero_grad()
            assert len(images) == len(boxes)
            losses = [model(x[None]).square().mean() for x in images] or [model.weight.sum() * 0]
            (torch.stack(losses).sum() / 5).backward()
            optimizer.step()

        loader = DataLoader(pictures, batch_size=5, collate_fn=lambda batch: tuple(zip(*batch, strict=True)))
        for images, boxes in strategy.experimental_distribute_dataset(loader):
            strategy.run(step, args=(images, boxes))
        return model.weight.detach().clone()

    one = train(["cpu:0"])
    for replicas in (2, 3, 6):
        torch.testing.assert_close(train([f"cpu:{i}" for i in range(replicas)]), one, rtol=0, atol=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("topology", [(2, 1), (3, 1), (2, 2)])
def test_processes_read_what_one_process_reads(layout, topology):
    collate, images = LAYOUTS[layout]
    num_processes, num_local = topology

    def read(placement, workers):
        loader = DataLoader([image(i) for i in range(8)], batch_size=3, collate_fn=collate)
        rounds = []
        for batch in distribute_dataset(loader, placement, workers):
            shares = [_of_replica(batch, i) for i in range(num_local)]
            rounds.append([numbers(images(share)) for share in shares])
        return rounds

    ranks = run_ranks(num_processes, read, num_local=num_local)
    together = [[share for part in parts for share in part] for parts in zip(*ranks, strict=True)]
    loader = DataLoader([image(i) for i in range(8)], batch_size=3, collate_fn=collate)
    alone = shares_of(loader, num_processes * num_local)
    assert together == [[numbers(images(share)) for share in shares] for shares in alone]


def _of_replica(batch, local_id):
    return tree.map_leaves(lambda leaf: leaf.values[local_id] if isinstance(leaf, PerReplica) else leaf, batch)
