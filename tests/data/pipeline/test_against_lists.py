"""Random chains of operations against plain Python lists, and resumed at random places."""

import io
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchstrategy as ts

AT_MOST = 60  # elements that are read of an infinite dataset

small = st.integers(0, 7)
positive = st.integers(1, 7)


def is_kept(element):
    return int(total(element)) % 3 != 1


def total(element):
    if isinstance(element, tuple):
        return sum(total(part) for part in element)
    return element.sum() if isinstance(element, torch.Tensor) else element


def plus_one(*parts):
    return parts[0] + 1 if len(parts) == 1 else tuple(part + 1 for part in parts)


def running_total(before, number):
    return before + number, before + number


def shifted(*parts):
    return ts.data.Dataset.from_tensors(parts[0] if len(parts) == 1 else parts).repeat(2)


def itself(window):
    return window


def parity(number):
    return number % 2


def windows(elements, size, shift, stride, drop):
    found = [elements[i : i + (size - 1) * stride + 1 : stride] for i in range(0, len(elements), shift)]
    return [window for window in found if len(window) == size or not drop]


def remainder(number):
    return number % 3


def second(first, second):
    return second


def is_number(element):
    return True


def fail_at_multiples_of_5(element):
    if int(total(element)) % 5 == 0:
        raise ValueError("a multiple of 5")
    return element


def remainder_of(element):
    return int(total(element)) % 3


def groups(elements, size):
    found, waiting = [], {}
    for element in elements:
        waiting.setdefault(element % 3, []).append(element)
        if len(waiting[element % 3]) == size:
            found.append(waiting.pop(element % 3))
    return found + [waiting[key] for key in sorted(waiting)]


# Each operation: how a dataset does it, and how a list does it. Elements of lists are ints, lists of them for batches.
EXACT = {
    "map": (st.tuples(), lambda d: d.map(plus_one), lambda x: [add(e, 1) for e in x]),
    "parallel_map": (
        st.tuples(),
        lambda d: d.map(plus_one, num_parallel_calls=2),
        lambda x: [add(e, 1) for e in x],
    ),
    "filter": (st.tuples(), lambda d: d.filter(is_kept), lambda x: [e for e in x if plain_total(e) % 3 != 1]),
    "take_while": (
        st.tuples(small),
        lambda d, n: d.take_while(lambda x: x < n),
        lambda x, n: list(itertools.takewhile(lambda e: e < n, x)),
    ),
    "scan": (st.tuples(), lambda d: d.scan(0, running_total), lambda x: list(itertools.accumulate(x))),
    "unique": (st.tuples(), lambda d: d.unique(), lambda x: list(dict.fromkeys(x))),
    "take": (st.tuples(small), lambda d, n: d.take(n), lambda x, n: x[:n]),
    "skip": (st.tuples(small), lambda d, n: d.skip(n), lambda x, n: x[n:]),
    "shard": (
        st.tuples(st.integers(1, 3), st.integers(0, 2)),
        lambda d, n, i: d.shard(n, i % n),
        lambda x, n, i: x[i % n :: n],
    ),
    "repeat": (st.tuples(st.integers(0, 3)), lambda d, n: d.repeat(n), lambda x, n: x * n),
    "cache": (st.tuples(), lambda d: d.cache(), lambda x: x),
    "prefetch": (st.tuples(positive), lambda d, n: d.prefetch(n), lambda x, n: x),
    "concatenate": (st.tuples(), lambda d: d.concatenate(d.take(2)), lambda x: x + x[:2]),
    "flat_map": (st.tuples(), lambda d: d.flat_map(shifted), lambda x: [e for e in x for _ in range(2)]),
    "rebatch": (
        st.tuples(positive, st.booleans()),
        lambda d, n, drop: d.batch(n, drop).unbatch(),
        lambda x, n, drop: x[: len(x) // n * n] if drop else x,
    ),
    "window": (
        st.tuples(positive, positive, positive, st.booleans()),
        lambda d, *args: d.window(*args).flat_map(itself),
        lambda x, *args: [e for window in windows(x, *args) for e in window],
    ),
    "sizes": (
        st.tuples(positive, st.lists(positive, min_size=1, max_size=3)),
        lambda d, n, sizes: d.batch(n).rebatch(sizes).unbatch(),
        lambda x, n, sizes: x,
    ),
    "ignore_errors": (
        st.tuples(),
        lambda d: d.map(fail_at_multiples_of_5).ignore_errors(),
        lambda x: [e for e in x if e % 5],
    ),
    "ignore_errors_later": (
        st.tuples(st.sampled_from([None, 2]), positive),
        lambda d, threads, n: d.filter(is_number).map(fail_at_multiples_of_5, threads).prefetch(n).ignore_errors(),
        lambda x, threads, n: [e for e in x if e % 5],
    ),
    "group": (
        st.tuples(positive),
        lambda d, n: d.group_by_window(remainder, lambda key, window: window.map(plus_one), n),
        lambda x, n: [e + 1 for group in groups(x, n) for e in group],
    ),
    "choose": (
        st.tuples(),
        lambda d: ts.data.Dataset.choose_from_datasets([d, d.take(2)], ts.data.Dataset.counter().map(parity), False),
        lambda x: [e for i, first in enumerate(x) for e in [first, *x[i : i + 1][: i < 2]]],
    ),
    "zip": (st.tuples(), lambda d: ts.data.Dataset.zip(d, d.skip(1)).map(first), lambda x: x[: max(0, len(x) - 1)]),
}
RANDOM = {
    "shuffle": (
        st.tuples(positive, st.one_of(st.none(), st.integers(-3, 3)), st.sampled_from([None, False])),
        lambda d, n, seed, each: d.shuffle(n, seed, each),
        None,
    ),
    "interleave": (
        st.tuples(st.integers(1, 3), st.integers(1, 3)),
        lambda d, n, k: d.interleave(lambda *e: shifted(*e).shuffle(3), n, k),
        None,
    ),
    "repeat": (st.tuples(), lambda d: d.repeat(), None),
    "group": (
        st.tuples(positive),
        lambda d, n: d.group_by_window(remainder_of, lambda k, w: w.shuffle(3), window_size_func=lambda k: k + n),
        None,
    ),
    "ignore_errors_of_shuffled": (
        st.tuples(positive),
        lambda d, n: d.filter(is_number).map(fail_at_multiples_of_5).shuffle(n).ignore_errors(),
        None,
    ),
    "rejection_resample": (
        st.tuples(st.sampled_from([None, [1, 1, 1]]), st.integers(-3, 3)),
        lambda d, initial, seed: d.rejection_resample(remainder_of, [3, 1, 0], initial, seed).map(second),
        None,
    ),
    "sample": (
        st.tuples(st.one_of(st.none(), st.integers(-3, 3)), st.booleans(), st.booleans()),
        lambda d, *args: ts.data.Dataset.sample_from_datasets([d, d.map(plus_one)], [1, 2], *args),
        None,
    ),
    "random": (
        st.tuples(st.one_of(st.none(), st.integers(-3, 3)), st.booleans()),
        lambda d, seed, each: ts.data.Dataset.zip(d, ts.data.Dataset.random(seed, each)).map(
            lambda e, x: add(e, x % 5)
        ),
        None,
    ),
}


def first(a, b):
    return a


def add(element, number):
    return [add(part, number) for part in element] if isinstance(element, list) else element + number


def plain_total(element):
    return sum(map(plain_total, element)) if isinstance(element, list) else element


def chain_of(*tables):
    table = [(name, entry) for one in tables for name, entry in one.items()]
    operation = st.sampled_from(table).flatmap(
        lambda pair: pair[1][0].map(lambda args: (pair[0], pair[1][1], pair[1][2], args))
    )
    return st.lists(operation, max_size=5)


def generated(size):
    yield from range(size)


SOURCES = {
    "counter": lambda size: ts.data.Dataset.counter().take(size),
    "range": lambda size: ts.data.Dataset.range(size),
    "slices": lambda size: ts.data.Dataset.from_tensor_slices(torch.arange(size)),
    "generator": lambda size: ts.data.Dataset.from_generator(generated, args=(size,)),
    "files": lambda size: ts.data.Dataset.from_files(
        [f"{i}" for i in range(-(-size // 3))], lambda name: range(3 * int(name), min(size, 3 * int(name) + 3))
    ),
}
sources = st.sampled_from(sorted(SOURCES))


def make(source, size, chain, batch):
    dataset = SOURCES[source](size)
    for _, apply, _, args in chain:
        dataset = apply(dataset, *args)
    return dataset.batch(batch) if batch else dataset


def read(elements):
    return [element.tolist() for element in itertools.islice(elements, AT_MOST)]


def through_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(sources, st.integers(0, 14), chain_of(EXACT), st.integers(0, 4))
def test_elements_are_those_of_a_list(source, size, chain, batch):
    dataset = make(source, size, chain, batch)
    expected = list(range(size))
    for _, _, model, args in chain:
        expected = model(expected, *args)
    if batch:
        expected = [expected[i : i + batch] for i in range(0, len(expected), batch)]
    assert read(dataset) == expected[:AT_MOST]
    assert read(dataset) == expected[:AT_MOST]
    if dataset.cardinality() != ts.data.UNKNOWN_CARDINALITY:
        assert dataset.cardinality() == len(expected)


@pytest.mark.end_to_end
@settings(deadline=None, derandomize=True, max_examples=150)
@given(sources, st.integers(0, 14), chain_of(EXACT, RANDOM), st.integers(0, 4), st.integers(0, 20), st.integers(0, 1))
def test_a_resumed_dataset_gives_exactly_the_rest(source, size, chain, batch, stop, num_epochs_before):
    torch.manual_seed(7)
    dataset = make(source, size, chain, batch)
    for _ in range(num_epochs_before):
        read(dataset)
    elements = iter(dataset)
    given = list(itertools.islice(elements, stop))
    random_state = torch.get_rng_state()
    state = through_file(dataset.state_dict())
    assert state["is_finished"] == (len(given) < stop)
    rest = read(elements) if not state["is_finished"] else read(dataset)

    torch.set_rng_state(random_state)
    resumed = make(source, size, chain, batch)
    resumed.load_state_dict(state)
    assert read(resumed) == rest


@settings(deadline=None, derandomize=True, max_examples=60)
@given(sources, st.integers(0, 14), st.integers(1, 20), st.integers(0, 40))
def test_the_epochs_after_are_the_same_with_a_seed(source, size, buffer_size, stop):
    def build():
        return SOURCES[source](size).shuffle(buffer_size, seed=5).repeat(2).batch(3)

    dataset = build()
    elements = iter(dataset)
    for _ in itertools.islice(elements, stop):
        pass
    resumed = build()
    state = through_file(dataset.state_dict())
    resumed.load_state_dict(state)
    if not state["is_finished"]:
        assert read(elements) == read(resumed)
    assert [read(dataset) for _ in range(3)] == [read(resumed) for _ in range(3)]


@settings(deadline=None, derandomize=True, max_examples=60)
@given(sources, st.integers(0, 30), st.integers(1, 40), st.integers(1, 2))
def test_shuffling_only_moves_elements(source, size, buffer_size, repetitions):
    dataset = SOURCES[source](size).shuffle(buffer_size).repeat(repetitions)
    numbers = read(dataset)
    assert sorted(numbers) == sorted(list(range(size)) * repetitions)
    # an element can't come before the buffer has reached it
    assert all(number < position + buffer_size for position, number in enumerate(numbers[:size]))
