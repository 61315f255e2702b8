"""States: what is in them, whose they are, and what a dataset does with them. `test_against_lists` tests the rest."""

import copy
import io
import itertools
import pickle
import subprocess
import sys
import threading
import time

import pytest
import torch
from torchdata import nodes
from torchdata.stateful_dataloader import StatefulDataLoader

import torchstrategy as ts
from torchstrategy.data.pipeline.op import Node
from torchstrategy.data.pipeline.parallel import Prefetch
from torchstrategy.errors import InvalidArgumentError

Dataset = ts.data.Dataset


def plain(dataset):
    return [element.tolist() for element in dataset]


def size_of(state):
    file = io.BytesIO()
    torch.save(state, file)
    return file.tell()


def at(dataset, count):
    elements = iter(dataset)
    for _ in range(count):
        next(elements)
    return elements


def leaves(value):
    if isinstance(value, dict):
        assert all(type(key) is str for key in value)
        return [leaf for part in value.values() for leaf in leaves(part)]
    if type(value) in (list, tuple):
        return [leaf for part in value for leaf in leaves(part)]
    return [value]


def plus_one(x):
    return x + 1


def test_a_state_is_plain_data():
    dataset = Dataset.range(5000).shuffle(40).map(lambda x: (x, str(int(x)))).filter(lambda x, s: True)
    dataset = dataset.shuffle(30, seed=2).repeat().batch(7).prefetch(2)
    elements = at(dataset, 400)
    kinds = {type(leaf) for leaf in leaves(dataset.state_dict())}
    assert kinds <= {int, str, bool, type(None), torch.Tensor}
    del elements


@pytest.mark.parametrize("source", [Dataset.range(60000), Dataset.range(60000).filter(lambda x: x >= 0)])
def test_states_hold_no_elements(source):
    images = source.map(lambda x: torch.zeros(1000)).shuffle(100).batch(10)
    elements = at(images, 100)
    assert size_of(images.state_dict()) < 20_000
    del elements


@pytest.mark.parametrize("buffer_size", [1, 50])
def test_states_do_not_grow(buffer_size):
    dataset = Dataset.range(100).filter(lambda x: x >= 0).repeat().shuffle(buffer_size).batch(100)
    elements = at(dataset, 100)
    assert size_of(dataset.state_dict()) < 20_000
    del elements


def test_a_state_is_not_changed_afterwards():
    dataset = Dataset.from_generator(lambda: range(50)).shuffle(6, seed=1).batch(2).repeat()
    elements = at(dataset, 9)
    state = dataset.state_dict()
    before = repr(state)
    rest = [next(elements).tolist() for _ in range(40)]
    assert repr(state) == before
    for _ in range(2):
        dataset.load_state_dict(state)
        assert [x.tolist() for x in itertools.islice(dataset, 40)] == rest


def test_the_state_of_an_iterator_that_was_dropped():
    dataset = Dataset.range(10).shuffle(10).prefetch(2)
    seen = [int(x) for x in itertools.islice(dataset, 4)]
    state = dataset.state_dict()
    dataset.load_state_dict(state)
    assert sorted(seen + plain(dataset)) == list(range(10))
    assert dataset.state_dict()["is_finished"]


def test_the_latest_iterator_counts():
    dataset = Dataset.range(10)
    first, second = at(dataset, 5), at(dataset, 2)
    assert dataset.state_dict()["position"] == second.state_dict()["position"]
    del second
    del first
    dataset.load_state_dict(dataset.state_dict())
    assert plain(dataset) == list(range(2, 10))


def test_a_loaded_state_counts_before_its_iteration_begins():
    dataset = Dataset.range(6)
    elements = at(dataset, 4)
    state = dataset.state_dict()
    other = Dataset.range(6)
    assert other.state_dict()["position"] is None
    other.load_state_dict(state)
    assert other.state_dict() == state
    iterator = iter(other)
    assert other.state_dict() == state
    assert plain(iterator) == plain(elements) == [4, 5]
    assert plain(other) == list(range(6))


def test_another_pipelines_state():
    dataset = Dataset.range(6).batch(2)
    state = dataset.state_dict()
    for other in (Dataset.range(6).batch(3), Dataset.range(7).batch(2), Dataset.range(6).shuffle(2).batch(2)):
        with pytest.raises(ts.errors.InvalidArgumentError, match="another pipeline"):
            other.load_state_dict(state)
        assert other.state_dict()["pipeline"] != state["pipeline"]
    for wrong in (None, {}, {"position": 3}):
        with pytest.raises(TypeError, match="Expected what state_dict"):
            dataset.load_state_dict(wrong)
    assert plain(dataset) == [[0, 1], [2, 3], [4, 5]]


def test_data_that_has_shrunk():
    size = [10]
    for make in (
        lambda: Dataset.from_generator(lambda: range(size[0])),
        lambda: Dataset.from_generator(lambda: range(size[0])).shuffle(3, seed=1),
        lambda: Dataset.from_files(["a"], lambda name: range(size[0])),
    ):
        size[0] = 10
        dataset = make()
        elements = at(dataset, 6)
        state = dataset.state_dict()
        size[0] = 2
        del elements
        resumed = make()
        resumed.load_state_dict(state)
        with pytest.raises(RuntimeError, match="changed since"):
            list(resumed)


def test_a_finished_epoch_is_followed_by_the_next():
    def make():
        return Dataset.range(20).shuffle(20, seed=3)

    dataset = make()
    plain(dataset)
    state = dataset.state_dict()
    second = plain(dataset)
    resumed = make()
    resumed.load_state_dict(state)
    assert plain(resumed) == second
    assert sorted(second) == list(range(20))


def test_a_cache_in_a_new_process_has_the_old_order():
    def make():
        return Dataset.range(30).shuffle(30).cache().batch(4)

    dataset = make()
    plain(dataset)
    elements = at(dataset, 3)
    resumed = make()
    resumed.load_state_dict(dataset.state_dict())
    assert plain(resumed) == plain(elements)
    assert plain(resumed) == plain(dataset)


def test_a_cache_keeps_its_order_from_a_state_between_epochs():
    def make():
        return Dataset.range(30).shuffle(30).cache().batch(4)

    dataset = make()
    first = plain(dataset)
    elements = iter(dataset)
    resumed = make()
    resumed.load_state_dict(dataset.state_dict())
    assert plain(resumed) == plain(elements) == first


def test_a_cache_of_another_order_is_forgotten():
    dataset = Dataset.from_generator(lambda: range(30)).shuffle(30).cache()
    elements = at(dataset, 10)
    state = dataset.state_dict()
    rest = plain(elements)
    other = Dataset.from_generator(lambda: range(30)).shuffle(30).cache()
    assert plain(other) != plain(dataset)
    other.load_state_dict(state)
    assert plain(other) == rest


def test_a_long_shuffle_is_resumed_from_its_latest_anchor():
    for source in (Dataset.range(40), Dataset.from_generator(lambda: range(40))):
        dataset = source.repeat().shuffle(50, seed=1).batch(10)
        elements = at(dataset, 700)
        state = dataset.state_dict()
        rest = [next(elements).tolist() for _ in range(30)]
        del elements
        dataset.load_state_dict(state)
        assert [x.tolist() for x in itertools.islice(dataset, 30)] == rest


def test_resuming_does_not_read_all_again():
    reads = []

    def numbers():
        for i in itertools.count():
            reads.append(i)
            yield i

    dataset = Dataset.from_files(["a", "b"], lambda name: range(500)).map(lambda x: reads.append(1) or x).shuffle(10)
    elements = at(dataset, 600)
    state = dataset.state_dict()
    del elements
    reads.clear()
    dataset.load_state_dict(state)
    next(iter(dataset))
    assert len(reads) < 200


def test_copies_begin_anew():
    dataset = Dataset.range(10).map(plus_one).shuffle(4, seed=3).cache().batch(2).prefetch(2)
    elements = at(dataset, 2)
    expected = plain(Dataset.range(10).map(plus_one).shuffle(4, seed=3).cache().batch(2).prefetch(2))
    for other in (copy.copy(dataset), copy.deepcopy(dataset), pickle.loads(pickle.dumps(dataset))):
        assert plain(other) == expected
    assert plain(elements) == expected[2:]


def test_dropping_an_iterator_stops_its_threads():
    before = threading.active_count()
    dataset = Dataset.range(1000).map(plus_one, num_parallel_calls=3).prefetch(2)
    elements = at(dataset, 3)
    assert threading.active_count() > before
    del elements
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def check_that_it_goes_on(loader):
    """Check that a loader of torchdata's, over batches of 40 numbers, goes on where another one was."""
    torch.manual_seed(0)
    first = loader()
    elements = iter(first)
    seen = [next(elements).tolist() for _ in range(3)]
    state = first.state_dict()
    rest = plain(elements)
    second = loader()
    second.load_state_dict(state)
    assert plain(second) == rest
    assert sorted(itertools.chain(*seen, *rest)) == list(range(40))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 calls it
@pytest.mark.parametrize("num_workers", [0, 2])
def test_torchdatas_stateful_loader(num_workers):
    def loader():
        return StatefulDataLoader(Dataset.range(40).shuffle(40, seed=1).batch(4), None, num_workers=num_workers)

    check_that_it_goes_on(loader)


LEAVES_EARLY = """
import torch
import torchstrategy as ts
from torchstrategy.data.pipeline.op import Node
from torchstrategy.data.pipeline.parallel import Prefetch
from torchstrategy.errors import InvalidArgumentError

torch.set_num_threads(1)
elements = iter(ts.data.Dataset.range(100).map(lambda x: torch.randn(600, 600) @ torch.randn(600, 600)).prefetch(4))
next(elements)
"""


@pytest.mark.end_to_end
def test_a_program_may_end_while_a_thread_reads_ahead():
    for end in ("", "del elements"):
        assert subprocess.run([sys.executable, "-c", LEAVES_EARLY + end], timeout=100, check=False).returncode == 0


def test_whatever_ends_the_thread_that_reads_ahead_reaches_the_reader():
    def leave(x):
        if x == 3:
            sys.exit("left")
        return x

    elements = iter(Dataset.range(10).map(leave).prefetch(2))
    assert [int(next(elements)) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(SystemExit, match="left"):
        next(elements)


def test_a_prefetch_that_could_not_begin_is_not_an_empty_one():
    class Broken(Node):
        def start(self, state):
            raise OSError("gone")

    node = Prefetch(Broken(), 2)
    with pytest.raises(OSError, match="gone"):
        next(node)
    for ask in (lambda: next(node), node.state_dict):
        with pytest.raises(RuntimeError, match="could not begin"):
            ask()


def test_positions_from_when_torchdata_read_ahead():
    node = Prefetch(CountingNode(), 2)
    node.reset({"ahead": {"snapshot": {"at": 3}, "steps_since_snapshot": 0}})
    assert list(node) == list(range(3, 10))


class CountingNode(Node):
    def start(self, state):
        self.at = 0 if state is None else state["at"]

    def next(self):
        if self.at == 10:
            raise StopIteration
        self.at += 1
        return self.at - 1

    def get_state(self):
        return {"at": self.at}


def test_torchdatas_nodes_read_a_dataset():
    def loader():
        dataset = Dataset.range(40).shuffle(40, seed=1).prefetch(3).batch(4)
        return nodes.Loader(nodes.Prefetcher(nodes.IterableWrapper(dataset), 2))

    check_that_it_goes_on(loader)


def test_torchdatas_nodes_are_distributed():
    def distribute():
        batches = nodes.Batcher(nodes.IterableWrapper(torch.arange(22)), 4, drop_last=False)
        loader = nodes.Loader(nodes.Mapper(batches, torch.stack))
        return ts.MirroredStrategy(["cpu:0", "cpu:1"]).experimental_distribute_dataset(loader)

    expected = [ids(local) for local in distribute()]
    assert list(itertools.chain(*expected)) == list(range(22))
    first = distribute()
    elements = iter(first)
    seen = [ids(next(elements)) for _ in range(2)]
    second = distribute()
    second.load_state_dict(first.state_dict())
    assert seen + [ids(local) for local in second] == expected


def make_global_batches():
    return Dataset.range(50).map(plus_one).shuffle(50).batch(8)


def ids(local):
    parts = local.values if isinstance(local, ts.PerReplica) else (local,)
    return [number for part in parts for number in part.tolist()]


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 3), (1, 5)])
def test_a_distributed_dataset_goes_on_with_other_replicas(before, after):
    def distribute(num_replicas):
        strategy = ts.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
        return strategy.experimental_distribute_dataset(make_global_batches())

    torch.manual_seed(5)
    expected = plain(make_global_batches())
    torch.manual_seed(5)
    first = distribute(before)
    elements = iter(first)
    seen = [ids(next(elements)) for _ in range(3)]
    state = first.state_dict()
    torch.manual_seed(6)
    second = distribute(after)
    second.load_state_dict(state)
    assert seen + [ids(local) for local in second] == expected


def test_an_iterator_goes_on_from_a_checkpoint_as_in_tf(tmp_path):
    dataset = ts.data.Dataset.range(10).shuffle(5, seed=1).batch(3)
    iterator = iter(dataset)
    next(iterator)
    path = ts.train.Checkpoint(iterator=iterator).save(tmp_path / "ckpt")
    rest = [batch.tolist() for batch in iterator]
    other = iter(ts.data.Dataset.range(10).shuffle(5, seed=1).batch(3))
    for _ in range(2):  # wherever it was
        ts.train.Checkpoint(iterator=other).restore(path).assert_consumed()
        assert [batch.tolist() for batch in other] == rest
    with pytest.raises(InvalidArgumentError, match="another pipeline"):
        iter(ts.data.Dataset.range(10)).load_state_dict(other.state_dict())
