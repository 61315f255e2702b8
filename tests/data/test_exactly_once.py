"""Every example reaches exactly one replica, in the right batch, whatever the source, the hosting and the loader."""

import functools
from itertools import accumulate, chain, cycle, pairwise, zip_longest

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchstrategy as ts
from tests.data.data_sets import (
    KINDS,
    LOADERS,
    WITH_BATCH_SIZE,
    Data,
    Step,
    chunks,
    distributor,
    features_in,
    joined,
    numbers_of,
    read_epoch,
)
from tests.data.fake_workers import run_ranks
from tests.data.profiles import quick, thorough, unshrunk
from tests.programs import cpu_devices
from torchstrategy.base.values import get_shares
from torchstrategy.data.data_order import known_length

LAYOUTS = [(p, n) for p in range(1, 6) for n in range(1, 6) if p * n <= 5]  # processes, replicas in each
FORKS = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


@st.composite
def data_sets(draw, kinds=KINDS, max_workers=0, max_examples=200):
    kind = draw(st.sampled_from(kinds))
    is_fixed = kind in WITH_BATCH_SIZE  # such data is read from front to back, to its end
    return Data(
        kind,
        draw(st.integers(0, max_examples)),
        draw(st.integers(1, 32)),
        drop_remainder=not is_fixed and draw(st.booleans()),
        shuffle=not is_fixed and draw(st.booleans()),
        num_workers=draw(st.integers(min(1, max_workers), max_workers)) if kind in LOADERS else 0,
        seed=draw(st.integers(0, 2**31)),
    )


# What has to hold


def check_epochs(data, epochs, num_replicas):
    """Check two epochs, each with the numbers of every replica for every step."""
    plain = data.plain_epochs()
    for batches in plain:
        check_partition(data, batches)
    assert epochs == [[chunks(batch, num_replicas) for batch in batches] for batches in plain]
    if data.shuffle and data.num_examples > 50 and len(plain[0]) > 2:
        assert plain[0] != plain[1], "two shuffled epochs have the same order"


def check_partition(data, batches):
    """Each number is in one batch; what is missing is the remainder that was to be dropped."""
    found = sorted(chain(*batches))
    per_worker = data.kind == "stream loader" and data.num_workers > 1  # each worker has a remainder
    if data.drop_remainder:
        assert {len(batch) for batch in batches} <= {data.batch_size}
        assert len(set(found)) == len(found)
        assert set(found) <= set(range(data.num_examples))
        num_missing = data.num_examples - len(found)
        assert num_missing <= (data.batch_size - 1) * max(1, data.num_workers)
        if not per_worker:
            assert num_missing == data.num_examples % data.batch_size
    else:
        assert found == list(range(data.num_examples))
        if not per_worker:
            sizes = [len(batch) for batch in batches]
            assert all(size == data.batch_size for size in sizes[:-1])


# How it is read


@functools.cache
def mirrored(num_replicas):
    return ts.MirroredStrategy(cpu_devices(num_replicas))


def two_epochs(distribute, data, rank=0):
    """What a rank gets; only the chief has the seed that counts."""
    torch.manual_seed(data.seed if rank == 0 else rank)
    dataset, arguments = data.make()
    distributed = distribute(dataset, **arguments)
    length = known_length(distributed)
    epochs = [read_epoch(distributed, rank), read_epoch(distributed, rank)]
    assert length is None or [len(epoch) for epoch in epochs] == [length] * 2
    return epochs


def in_one_process(data, num_replicas):
    epochs = two_epochs(mirrored(num_replicas).experimental_distribute_dataset, data)
    return [joined([epoch]) for epoch in epochs]


def over_ranks(data, num_processes, num_local):
    """Ranks that are threads."""

    def read(placement, workers):
        return two_epochs(distributor(placement, workers), data, workers.rank)

    ranks = run_ranks(num_processes, read, num_local, data.seed)
    return [joined(list(epochs)) for epochs in zip(*ranks, strict=True)]


def on_a_rank(datas, num_local):
    """What one process of a pool reads of every data set, and what it predicts."""
    strategy = ts.MirroredStrategy(cpu_devices(num_local) if num_local > 1 else None)
    rank = strategy.workers.rank
    read = [two_epochs(strategy.experimental_distribute_dataset, data, rank) for data in datas]
    return read, [predictions(strategy, data, rank) for data in datas]


def over_processes(pool, datas, num_local):
    """Real processes: for each data set the epochs, and every rank's predictions."""
    ranks = pool.run(on_a_rank, datas, num_local)
    epochs = [
        [joined(list(parts)) for parts in zip(*(read[i] for read, _ in ranks), strict=True)] for i in range(len(datas))
    ]
    return epochs, [predicted for _, predicted in ranks]


def predictions(strategy, data, rank=0):
    """Predict every example and gather what the replicas found."""

    def predict(batch):
        return features_in(batch)[:, 1:] * -1.0 if len(numbers_of(batch)) else torch.empty(0, 1)

    torch.manual_seed(data.seed if rank == 0 else rank)
    dataset, arguments = data.make()
    distributed = strategy.experimental_distribute_dataset(dataset, **arguments)
    gathered = [strategy.gather(strategy.run(predict, args=(element,)), axis=0) for element in distributed]
    return torch.cat([torch.empty(0, 1), *gathered]).flatten().tolist()


def in_data_order(data):
    (batches,) = data.plain_epochs(1)
    return [float(number) for number in chain(*batches)]


def check_in_one_process(data, num_replicas):
    epochs = in_one_process(data, num_replicas)
    check_epochs(data, epochs, num_replicas)
    assert in_one_process(data, num_replicas) == epochs, "one seed, two results"
    assert predictions(mirrored(num_replicas), data) == in_data_order(data)


def check_over_ranks(data, layout):
    num_processes, num_local = layout
    num_replicas = num_processes * num_local
    epochs = over_ranks(data, num_processes, num_local)
    check_epochs(data, epochs, num_replicas)
    assert epochs == in_one_process(data, num_replicas), "the hosting matters"


def check_over_processes(pool, datas, num_local):
    num_replicas = pool.size * num_local
    all_epochs, predicted = over_processes(pool, datas, num_local)
    for i, (data, epochs) in enumerate(zip(datas, all_epochs, strict=True)):
        check_epochs(data, epochs, num_replicas)
        assert epochs == in_one_process(data, num_replicas), "the hosting matters"
        assert all(of_rank[i] == in_data_order(data) for of_rank in predicted)


def check_loader_workers(data, layout):
    """Worker processes of the loader change nothing; of a stream they change which batches there are."""
    check_over_ranks(data, layout)
    if data.kind == "loader":
        without = Data(**{**vars(data), "num_workers": 0})
        assert over_ranks(data, *layout) == over_ranks(without, *layout)


# Streams of each process


def read_numbers(name):
    """A file of this name holds the numbers from the first to before the second."""
    return iter(range(*map(int, str(name).split("-"))))


@st.composite
def own_streams(draw, max_examples=80):
    """Files of any size, a global batch size, and the policy."""
    sizes = draw(st.lists(st.integers(0, max_examples // 5), min_size=5, max_size=9))
    bounds = [0, *accumulate(sizes)]
    names = [f"{start}-{stop}" for start, stop in pairwise(bounds)]
    return names, draw(st.integers(1, 32)), draw(st.sampled_from(["FILE", "OFF", "HINT"]))


def minibatches(streams, batch_size, num_local):
    """Cut the streams of the processes as tf does, and add what is missing for equal numbers of steps."""
    num_replicas = len(streams) * num_local
    floor, more = divmod(batch_size, num_replicas)
    sizes = [floor + 1] * more + [floor] * (num_replicas - more)
    steps = []
    for p, stream in enumerate(streams):
        upcoming = cycle(sizes[p * num_local :] + sizes[: p * num_local])
        left, own = list(stream), []
        while left:
            own.append([])
            for _ in range(num_local):
                size = next(upcoming)
                own[-1].append(left[:size])
                left = left[size:]
        steps.append(own)
    rounds = zip_longest(*steps, fillvalue=[[]] * num_local)
    return [list(chain(*parts)) for parts in rounds]


def check_own_streams(names, batch_size, policy, layout):
    num_processes, num_local = layout
    total = int(names[-1].split("-")[1])
    dataset = {
        "FILE": lambda: ts.data.Dataset.from_files(names, read_numbers),
        "OFF": lambda: ts.data.Dataset.range(total),
        "HINT": lambda: ts.data.Dataset.range(total).shard(ts.data.SHARD_HINT, ts.data.SHARD_HINT),
    }[policy]
    streams = {
        "FILE": [chain(*map(read_numbers, names[p::num_processes])) for p in range(num_processes)],
        "OFF": [range(total)] * num_processes,
        "HINT": [range(p, total, num_processes) for p in range(num_processes)],
    }[policy]

    def read(placement, workers):
        distribute = distributor(placement, workers if num_processes > 1 else None)
        distributed = distribute(dataset().batch(batch_size), auto_shard_policy=ts.data.AutoShardPolicy[policy])
        return [read_numbers_of(element) for element in distributed]

    ranks = run_ranks(num_processes, read, num_local)
    assert joined(ranks) == minibatches(streams, batch_size, num_local)


def read_numbers_of(element):
    leaves = element.values if isinstance(element, ts.PerReplica) else (element,)
    return Step([leaf.tolist() for leaf in leaves], get_shares(element).shares)


# Few examples in each run of the suite


EDGES = [
    Data("loader", 0, 1, shuffle=True),
    Data("loader", 1, 32, drop_remainder=True),
    Data("stream loader", 5, 4, drop_remainder=True),
    Data("arrays", 0, 3),
    Data("dicts", 0, 3),
    Data("dataclasses", 7, 4, shuffle=True, seed=3),
    Data("pipeline", 0, 2, shuffle=True),
    Data("pipeline", 70, 4, shuffle=True, seed=5),
]


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 5])
@pytest.mark.parametrize("data", EDGES, ids=lambda data: data.kind)
def test_edges_in_one_process(data, num_replicas):
    check_in_one_process(data, num_replicas)


@pytest.mark.parametrize("layout", [(1, 2), (2, 1), (2, 2), (5, 1)], ids=str)
@pytest.mark.parametrize("data", EDGES, ids=lambda data: data.kind)
def test_edges_over_ranks(data, layout):
    check_over_ranks(data, layout)


@pytest.mark.end_to_end
@given(data=data_sets(), num_replicas=st.integers(1, 5))
@quick(60)
def test_in_one_process(data, num_replicas):
    check_in_one_process(data, num_replicas)


@pytest.mark.end_to_end
@given(data=data_sets(), layout=st.sampled_from(LAYOUTS))
@quick(40)
def test_over_ranks(data, layout):
    check_over_ranks(data, layout)


@given(case=own_streams(), layout=st.sampled_from(LAYOUTS))
@quick(60)
def test_streams_of_each_process(case, layout):
    check_own_streams(*case, layout)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "num_local"), [(2, 1), (3, 1), (2, 2)])
def test_over_processes(size, num_local, process_pool):
    @given(datas=st.lists(data_sets(max_examples=60), min_size=8, max_size=8))
    @unshrunk(quick(2))
    def check(datas):
        check_over_processes(process_pool(size), [*EDGES, *datas], num_local)

    check()


@pytest.mark.slow
@FORKS
@given(data=data_sets(LOADERS, max_workers=2, max_examples=40), layout=st.sampled_from([(1, 2), (2, 1), (2, 2)]))
@quick(5)
def test_with_loader_workers(data, layout):
    check_loader_workers(data, layout)


# More of them, in the slow tests


@pytest.mark.slow
@pytest.mark.timeout(600)
@given(data=data_sets(), num_replicas=st.integers(1, 5))
@thorough(500)
def test_in_one_process_thoroughly(data, num_replicas):
    check_in_one_process(data, num_replicas)


@pytest.mark.slow
@pytest.mark.timeout(600)
@given(data=data_sets(), layout=st.sampled_from(LAYOUTS))
@thorough(250)
def test_over_ranks_thoroughly(data, layout):
    check_over_ranks(data, layout)


@pytest.mark.slow
@pytest.mark.timeout(600)
@given(case=own_streams(200), layout=st.sampled_from(LAYOUTS))
@thorough(250)
def test_streams_of_each_process_thoroughly(case, layout):
    check_own_streams(*case, layout)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("size", "num_local"), [(2, 1), (2, 2), (4, 1), (5, 1)])
def test_over_processes_thoroughly(size, num_local, process_pool):
    @given(datas=st.lists(data_sets(), min_size=30, max_size=30))
    @unshrunk(thorough(5))
    def check(datas):
        check_over_processes(process_pool(size), datas, num_local)

    check()


@pytest.mark.slow
@pytest.mark.timeout(600)
@FORKS
@given(data=data_sets(LOADERS, max_workers=2), layout=st.sampled_from(LAYOUTS))
@thorough(30)
def test_with_loader_workers_thoroughly(data, layout):
    check_loader_workers(data, layout)
