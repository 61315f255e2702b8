"""Objects of registered types are cut by their splitters."""

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence
from torch.utils.data import DataLoader

import torchstrategy as ts
from torchstrategy.data import split


class Graphs:
    """A batch of graphs: all nodes in one tensor, and how many nodes each graph has."""

    def __init__(self, nodes, sizes):
        self.nodes = nodes
        self.sizes = sizes

    @classmethod
    def of(cls, graphs):
        return cls(torch.cat([torch.zeros(0), *graphs]), [len(graph) for graph in graphs])

    def graphs(self):
        return list(self.nodes.split(self.sizes))


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
    monkeypatch.setattr(split, "_splitters", dict(split._splitters))


def register():
    ts.data.register_splitter(
        Graphs, lambda b, start, stop: Graphs.of(b.graphs()[start:stop]), length=lambda b: len(b.sizes)
    )


def two():
    return ts.MirroredStrategy(["cpu:0", "cpu:1"])


GRAPHS = [torch.arange(i + 1.0) for i in range(5)]


def test_an_unknown_type_is_refused_with_the_way_out():
    with pytest.raises(IndexError, match=r"of type Graphs.*register_splitter"):
        list(two().experimental_distribute_dataset([Graphs.of(GRAPHS)]))


def test_a_registered_type_is_cut_by_example():
    register()
    loader = DataLoader(GRAPHS, batch_size=3, collate_fn=lambda batch: (Graphs.of(batch), torch.arange(len(batch))))
    sizes = [[graphs.sizes for graphs in batch[0].values] for batch in two().experimental_distribute_dataset(loader)]
    assert sizes == [[[1, 2], [3]], [[4], [5]]]


def test_an_empty_share():
    register()
    [batch] = two().experimental_distribute_dataset([Graphs.of(GRAPHS[:1])])
    assert [graphs.sizes for graphs in batch.values] == [[1], []]


def test_a_subclass_counts_as_its_base():
    class Large(Graphs):
        pass

    register()
    [batch] = two().experimental_distribute_dataset([Large.of(GRAPHS)])
    assert [graphs.sizes for graphs in batch.values] == [[1, 2, 3], [4, 5]]


def test_another_number_of_examples_than_the_rest_is_refused():
    register()
    with pytest.raises(ts.errors.InvalidArgumentError, match=r"have \[5, 4\] examples"):
        list(two().experimental_distribute_dataset([(Graphs.of(GRAPHS), torch.arange(4))]))


def test_a_splitter_that_gives_another_number_is_named():
    ts.data.register_splitter(Graphs, lambda b, start, stop: b, length=lambda b: len(b.sizes))
    with pytest.raises(ValueError, match=r"splitter of Graphs gave 5 examples where 3"):
        list(two().experimental_distribute_dataset([Graphs.of(GRAPHS)]))


@pytest.mark.parametrize("cls", [list, dict, object, "Graphs", 3])
def test_types_that_can_not_be_registered(cls):
    with pytest.raises(TypeError, match="takes a type"):
        ts.data.register_splitter(cls, lambda b, start, stop: b)


def test_what_is_no_function():
    with pytest.raises(TypeError, match="must be functions"):
        ts.data.register_splitter(Graphs, None)


@pytest.mark.parametrize("enforce_sorted", [True, False])
@pytest.mark.parametrize("replicas", [2, 3])
def test_packed_sequences(enforce_sorted, replicas):
    lengths = [4, 3, 3, 1] if enforce_sorted else [3, 1, 4, 2]
    sequences = [torch.randn(length, 2) for length in lengths]
    torch.manual_seed(0)
    lstm = torch.nn.LSTM(2, 3)
    whole, _ = pad_packed_sequence(lstm(pack_sequence(sequences, enforce_sorted=enforce_sorted))[0])
    strategy = ts.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])
    loader = DataLoader(
        sequences, batch_size=4, collate_fn=lambda batch: pack_sequence(batch, enforce_sorted=enforce_sorted)
    )
    if replicas == 3:  # chunks of two leave the third one without
        with pytest.raises(ValueError, match="no example of a PackedSequence of 4"):
            list(strategy.experimental_distribute_dataset(loader))
        return
    [batch] = strategy.experimental_distribute_dataset(loader)
    position = 0
    for part in batch.values:
        assert isinstance(part, PackedSequence)
        rows, sizes = pad_packed_sequence(lstm(part)[0])
        for row in range(len(sizes)):
            torch.testing.assert_close(rows[: sizes[row], row], whole[: lengths[position], position])
            position += 1
    assert position == 4


def test_moved_to_the_device_of_its_replica():
    register()

    class Movable(Graphs):
        device = "cpu"

        def to(self, device):
            moved = Movable(self.nodes, self.sizes)
            moved.device = device
            return moved

    part = split.as_splittable(Movable.of(GRAPHS))
    assert part.to("meta").value.device == "meta"
    assert split.as_splittable(Graphs.of(GRAPHS)).to("meta").value.sizes == [1, 2, 3, 4, 5]
