import gc
import threading
import time

import pytest
import torch

from torchstrategy.errors import InvalidArgumentError, NotFoundError
from torchstrategy.ps.store import SCATTER_METHODS, Key, ParameterStore

LARGE = 100_000  # elements: such parts are lent, small ones copied
W = Key(0, 0)


def make_store(value, *, trainable=True):
    store = ParameterStore()
    store.create(W, "w", value, trainable=trainable)
    return store


def read(store, key=W):
    return store.pull([key], [-1])[0][1]


def pointer(store):
    return store.find(W).parameter.data_ptr()


def as_bytes(value):
    return value.reshape(-1).view(torch.uint8)


DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5,), (7, 3), (LARGE,)], ids=str)
def test_every_dtype_and_shape_is_stored_and_lent(dtype, shape):
    value = torch.arange(max(1, LARGE))[: torch.Size(shape).numel()].reshape(shape).remainder(5).to(dtype)
    store = make_store(value)
    pulled = read(store)
    assert pulled.dtype == dtype
    assert torch.equal(as_bytes(pulled), as_bytes(value))
    store.update([(W, "assign", torch.zeros(shape).to(dtype))])
    assert not as_bytes(read(store)).any()


def test_only_trainable_fractions_get_gradients():
    assert make_store(torch.zeros(2)).find(W).parameter.requires_grad
    assert make_store(torch.zeros(2, dtype=torch.complex64)).find(W).parameter.requires_grad
    assert not make_store(torch.zeros(2, dtype=torch.int64)).find(W).parameter.requires_grad
    assert not make_store(torch.zeros(2), trainable=False).find(W).parameter.requires_grad


def test_the_store_owns_its_memory():
    value = torch.zeros(LARGE)
    store = make_store(value)
    value += 1
    assert not read(store).any()
    store.update([(W, "assign", value)])
    value += 1
    assert (read(store) == 1).all()


def test_versions_count_changes():
    store = make_store(torch.zeros(3))
    assert store.pull([W], [-1])[0][0] == 1
    assert store.pull([W], [1]) == [(1, None)]
    assert store.update([(W, "assign_add", torch.ones(3))]) == [2]
    assert store.scatter("scatter_add", [(W, torch.tensor([0]), torch.ones(1))]) == [3]
    assert store.write(W, 1, torch.ones(2)) == 4
    version, value = store.pull([W], [1])[0]
    assert version == 4
    assert value.tolist() == [2.0, 1.0, 1.0]


@pytest.mark.parametrize("change", ["assign", "assign_add", "scatter", "write"])
def test_what_is_lent_does_not_change(change):
    store = make_store(torch.zeros(LARGE))
    before = pointer(store)
    lent = read(store)
    assert lent.data_ptr() == before  # no copy
    part_of_it = lent[5:10].view(-1)
    del lent
    gc.collect()
    ones = torch.ones(LARGE)
    if change == "scatter":
        store.scatter("scatter_update", [(W, torch.arange(LARGE), ones)])
    elif change == "write":
        store.write(W, 0, ones)
    else:
        store.update([(W, change, ones)])
    assert part_of_it.tolist() == [0] * 5
    assert read(store).all()
    assert pointer(store) != before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool], ids=str)
def test_memory_that_nobody_reads_is_used_again(dtype):
    store = make_store(torch.zeros(LARGE, dtype=dtype))
    before = pointer(store)
    for _ in range(3):
        lent = read(store)
        assert lent.data_ptr() == before
        frame = memoryview(lent.view(torch.uint8).numpy())  # what a message on its way holds
        del lent
        assert store.find(W)._is_lent()
        del frame
        store.update([(W, "assign_add", torch.ones(LARGE, dtype=dtype))])
        assert pointer(store) == before


def test_many_pulls_without_updates_keep_no_account():
    store = make_store(torch.zeros(LARGE))
    for _ in range(100):
        read(store)
    assert len(store.find(W)._lent) <= 1


def test_updates():
    store = make_store(torch.tensor([1, 2, 3]))
    store.update([(W, "assign_sub", torch.tensor([1, 1, 1])), (W, "assign_add", torch.tensor([0, 0, 5]))])
    assert read(store).tolist() == [0, 1, 7]


SCATTERED = {
    "scatter_add": [[12.0, 24.0], [3.0, 4.0], [9.0, 10.0]],
    "scatter_sub": [[-10.0, -20.0], [3.0, 4.0], [1.0, 2.0]],
    "scatter_update": [[9.0, 18.0], [3.0, 4.0], [4.0, 4.0]],
    "scatter_min": [[1.0, 2.0], [3.0, 4.0], [4.0, 4.0]],
    "scatter_max": [[9.0, 18.0], [3.0, 4.0], [5.0, 6.0]],
    "scatter_mul": [[18.0, 144.0], [3.0, 4.0], [20.0, 24.0]],
    "scatter_div": [[1 / 18, 2 / 72], [3.0, 4.0], [5 / 4, 6 / 4]],
}


@pytest.mark.parametrize("method", SCATTER_METHODS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_scatter_takes_every_value_of_a_row(method, dtype):
    store = make_store(torch.tensor([[1, 2], [3, 4], [5, 6]], dtype=dtype))
    indices = torch.tensor([0, 2, 0])
    values = torch.tensor([[2, 4], [4, 4], [9, 18]], dtype=dtype)
    if dtype.is_complex and method in ("scatter_min", "scatter_max"):
        with pytest.raises(InvalidArgumentError, match=f"{method} is not defined for variable 'w'"):
            store.scatter(method, [(W, indices, values)])
        return
    store.scatter(method, [(W, indices, values)])
    torch.testing.assert_close(read(store), torch.tensor(SCATTERED[method]).to(dtype))


def test_scatter_of_integers():
    store = make_store(torch.tensor([-7, 8, 9]))
    store.scatter("scatter_div", [(W, torch.tensor([0, 1, 1]), torch.tensor([2, 3, 2]))])
    assert read(store).tolist() == [-3, 1, 9]
    with pytest.raises(InvalidArgumentError, match="divided by 0"):
        store.scatter("scatter_div", [(W, torch.tensor([0, 1]), torch.tensor([2, 0]))])
    store.scatter("scatter_add", [(W, torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.int64))])
    assert read(store).tolist() == [-3, 1, 9]


def test_rows():
    value = torch.randn(10, 4)
    store = make_store(value)
    indices = torch.tensor([9, 0, 9])
    (rows,) = store.rows([(W, indices)])
    store.update([(W, "assign", torch.zeros(10, 4))])
    assert torch.equal(rows, value[indices])
    assert store.rows([(W, torch.tensor([], dtype=torch.int64))])[0].shape == (0, 4)


def unfitting():
    rows, ones = torch.tensor([0]), torch.ones(1, 2)
    return {
        "shape": (lambda s: s.update([(W, "assign", torch.ones(2, 3))]), InvalidArgumentError, r"shape \[3, 2\]"),
        "dtype": (lambda s: s.update([(W, "assign", torch.ones(3, 2).half())]), InvalidArgumentError, "float16"),
        "layout": (lambda s: s.update([(W, "assign", torch.ones(3, 2).to_sparse())]), InvalidArgumentError, "sparse"),
        "method": (lambda s: s.update([(W, "assign_mul", torch.ones(3, 2))]), InvalidArgumentError, "assign_mul"),
        "second": (
            lambda s: s.update([(W, "assign", torch.ones(3, 2)), (W, "assign", ones)]),
            InvalidArgumentError,
            "'w' takes values",
        ),
        "row": (lambda s: s.rows([(W, torch.tensor([0, 3]))]), IndexError, "'w' has rows 0 to 2. Received: index 3"),
        "negative": (lambda s: s.rows([(W, torch.tensor([-1]))]), IndexError, "index -1"),
        "int32": (lambda s: s.rows([(W, torch.tensor([0], dtype=torch.int32))]), InvalidArgumentError, "int32"),
        "matrix": (lambda s: s.rows([(W, torch.tensor([[0]]))]), InvalidArgumentError, "vector of int64"),
        "scatter row": (lambda s: s.scatter("scatter_add", [(W, torch.tensor([7]), ones)]), IndexError, "index 7"),
        "scatter shape": (
            lambda s: s.scatter("scatter_add", [(W, rows, torch.ones(2, 2))]),
            InvalidArgumentError,
            r"shape \[1, 2\]",
        ),
        "scatter method": (lambda s: s.scatter("x", [(W, rows, ones)]), InvalidArgumentError, "scatter_add, .*'x'"),
        "scatter second": (
            lambda s: s.scatter("scatter_add", [(W, rows, ones), (W, torch.tensor([3]), ones)]),
            IndexError,
            "index 3",
        ),
        "write behind": (lambda s: s.write(W, 5, torch.ones(2)), InvalidArgumentError, "6 elements.*2 from number 5"),
        "write before": (lambda s: s.write(W, -1, torch.ones(2)), InvalidArgumentError, "from number -1"),
        "write shape": (lambda s: s.write(W, 0, torch.ones(1, 2)), InvalidArgumentError, "'w' takes values"),
        "again": (lambda s: s.create(W, "v", torch.ones(1), trainable=True), ValueError, "'v' can't be made.*'w'"),
        "unknown": (lambda s: s.update([(Key(0, 1), "assign", ones)]), NotFoundError, "no part 1 of a variable 0"),
        "unknown pull": (lambda s: s.pull([W, Key(5, 0)], [-1, -1]), NotFoundError, "variable 5"),
    }


@pytest.mark.parametrize("case", unfitting())
def test_errors_name_the_variable_and_change_nothing(case):
    act, kind, message = unfitting()[case]
    store = make_store(torch.zeros(3, 2))
    with pytest.raises(kind, match=message):
        act(store)
    assert store.pull([W], [-1])[0][0] == 1
    assert not read(store).any()


def test_bools_have_no_difference():
    store = make_store(torch.zeros(3, dtype=torch.bool))
    value = torch.ones(3, dtype=torch.bool)
    with pytest.raises(InvalidArgumentError, match="assign_sub is not defined for variable 'w' of torch"):
        store.update([(W, "assign_sub", value)])
    with pytest.raises(InvalidArgumentError, match="scatter_sub is not defined for variable 'w' of torch"):
        store.scatter("scatter_sub", [(W, torch.arange(3), value)])


def test_scalars_have_no_rows():
    store = make_store(torch.tensor(1.0))
    with pytest.raises(InvalidArgumentError, match="'w' is a scalar"):
        store.rows([(W, torch.tensor([0]))])


@pytest.mark.slow
def test_no_torn_reads():
    store = make_store(torch.zeros(LARGE))
    stop = threading.Event()
    torn = []

    def write():
        while not stop.is_set():
            store.update([(W, "assign_add", torch.ones(LARGE))])

    def pull():
        while not stop.is_set():
            value = read(store)
            if value.min() != value.max():
                torn.append(value)

    threads = [threading.Thread(target=target) for target in (write, write, pull, pull)]
    for thread in threads:
        thread.start()
    time.sleep(1)
    stop.set()
    for thread in threads:
        thread.join()
    assert not torn
    version, value = store.pull([W], [-1])[0]
    assert (value == version - 1).all()  # nothing was lost either
    assert version > 10


def test_parts_do_not_wait_for_each_other():
    store = make_store(torch.zeros(3))
    store.create(Key(1, 0), "v", torch.zeros(3), trainable=True)
    with store.find(W).lock:  # someone is busy with w
        done = threading.Thread(target=lambda: store.update([(Key(1, 0), "assign", torch.ones(3))]))
        done.start()
        done.join(30)
        assert not done.is_alive()
    assert read(store, Key(1, 0)).all()


def test_parts_of_a_variable_come_in_order():
    store = ParameterStore()
    for part in (2, 0, 1):
        store.create(Key(4, part), f"w/part_{part}", torch.zeros(1), trainable=True)
    store.create(Key(5, 0), "v", torch.zeros(1), trainable=True)
    assert [key.part for key, _ in store.parts_of(4)] == [0, 1, 2]


def test_a_snapshot_stays_what_it_is():
    store = make_store(torch.zeros(4, LARGE))
    snapshot = store.snapshot(W)
    store.update([(W, "assign_add", torch.ones(4, LARGE))])
    assert snapshot.shape == (4 * LARGE,)
    assert not snapshot.any()
