import contextlib
import functools
import os
import pickle
import secrets
import signal
import threading

import pytest
import torch

from tests.ps.local_channels import LocalChannel, make_servers
from tests.ps.socket_servers import DEADLINE_S, clients, process_servers, thread_servers
from torchstrategy.errors import InvalidArgumentError, NotFoundError, UnavailableError
from torchstrategy.ps.client import ParameterClient
from torchstrategy.ps.layout import Placer
from torchstrategy.ps.partitioning import FixedShardsPartitioner
from torchstrategy.ps.service import ParameterService

LARGE = 300_000


@pytest.fixture(autouse=True, scope="module")
def _secret():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHSTRATEGY_SECRET", secrets.token_hex(32))
        yield


@pytest.fixture(params=["local", "threads"])
def make_client(request):
    """Return what makes a client of some new servers."""
    with contextlib.ExitStack() as stack:

        def make(num_ps):
            if request.param == "local":
                return make_servers(num_ps)[1]
            addresses, _ = stack.enter_context(thread_servers(num_ps))
            return stack.enter_context(clients(addresses))[0]

        yield make


def place(shapes, num_ps=2, num_shards=3, dtype=torch.float32, trainable=True):
    placer = Placer(num_ps, FixedShardsPartitioner(num_shards))
    return [placer.place(index, f"v{index}", shape, dtype, trainable) for index, shape in enumerate(shapes)]


def create(client, specs):
    generator = torch.Generator().manual_seed(0)
    values = [torch.randint(0, 2, spec.shape, generator=generator).to(spec.dtype) for spec in specs]
    for spec, value in zip(specs, values, strict=True):
        client.create(spec, value)
    return values


def define_sgd(client, number, specs, lr=1.0):
    plain = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr)
    group = {name: value for name, value in plain.param_groups[0].items() if name != "params"}
    groups = [{**group, "params": [spec.id for spec in specs]}]
    definition = {"class": torch.optim.SGD, "defaults": plain.defaults, "groups": groups}
    client.define_optimizer(number, pickle.dumps(definition), specs)


def sparse(rows, values, shape):
    return torch.sparse_coo_tensor(torch.tensor([rows]), values, shape, check_invariants=True)


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_come_back(make_client, dtype):
    specs = place([(7, 4), (), (0, 3), (3, 0), (LARGE,), (1, 2), (2,)], dtype=dtype)
    client = make_client(2)
    values = create(client, specs)
    pulled = client.pull(specs, {})
    for spec, value in zip(specs, values, strict=True):
        versions, found = pulled[spec.id]
        assert versions == (1,) * len(spec.parts)
        assert found.dtype == dtype
        assert torch.equal(found, value)


def test_only_what_has_changed_is_pulled(make_client):
    specs = place([(7, 4), (5,), ()])
    client = make_client(2)
    values = create(client, specs)
    known = {number: versions for number, (versions, _) in client.pull(specs, {}).items()}
    assert client.pull(specs, known) == {}
    assert client.update(specs[1], "assign_add", torch.ones(5)) == (2, 2, 2)
    pulled = client.pull(specs, known)
    assert pulled.keys() == {1}
    assert pulled[1][0] == (2, 2, 2)
    assert torch.equal(pulled[1][1], values[1] + 1)
    assert client.pull(specs, {**known, 1: pulled[1][0]}) == {}


def test_a_part_that_has_changed_brings_the_whole_variable(make_client):
    specs = place([(7, 4)])
    client = make_client(2)
    (value,) = create(client, specs)
    known = {0: client.pull(specs, {})[0][0]}
    client.scatter(specs[0], "scatter_update", torch.tensor([6]), torch.full((1, 4), 9.0))
    versions, found = client.pull(specs, known)[0]
    assert versions == (1, 1, 2)
    value[6] = 9
    assert torch.equal(found, value)


def test_what_was_pulled_is_the_callers_own(make_client):
    specs = place([(LARGE,), (5,)], num_shards=1)
    client = make_client(2)
    values = create(client, specs)
    for _, found in client.pull(specs, {}).values():
        found.add_(7)
    for spec, value in zip(specs, values, strict=True):
        assert torch.equal(client.pull([spec], {})[spec.id][1], value)


def test_rows(make_client):
    specs = place([(11, 4), (11,), (11, 2, 3)], num_shards=4)
    client = make_client(2)
    values = create(client, specs)
    for rows in ([3], [10, 0, 10, 5, 5], [], list(range(11))):
        indices = torch.tensor(rows, dtype=torch.int64)
        for spec, value in zip(specs, values, strict=True):
            assert torch.equal(client.pull_rows(spec, indices), value[indices])


def test_updates_of_several_variables(make_client):
    specs = place([(7, 4), (), (3,)])
    client = make_client(2)
    values = create(client, specs)
    new = [torch.full(spec.shape, 2.0) for spec in specs]
    versions = client.update_many(list(zip(specs, ("assign", "assign_add", "assign_sub"), new, strict=True)))
    assert versions == [(2, 2, 2), (2,), (2, 2, 2)]
    found = [client.pull([spec], {})[spec.id][1] for spec in specs]
    for value, expected in zip(found, (new[0], values[1] + 2, values[2] - 2), strict=True):
        assert torch.equal(value, expected)
    assert client.update_many([]) == []


def test_scatter(make_client):
    spec = place([(7, 2)], num_shards=3)[0]
    client = make_client(2)
    (value,) = create(client, [spec])
    indices = torch.tensor([6, 0, 6, 3])
    added = torch.randn(4, 2)
    client.scatter(spec, "scatter_add", indices, added)
    torch.testing.assert_close(client.pull([spec], {})[0][1], value.index_add(0, indices, added))
    client.scatter(spec, "scatter_update", indices, added)
    assert torch.equal(client.pull_rows(spec, torch.tensor([6])), added[2:3])


def test_pushes(make_client):
    specs = place([(7, 4), (), (9, 2)])
    client = make_client(2)
    values = create(client, specs)
    define_sgd(client, 3, specs)
    gradients = {0: torch.randn(7, 4), 1: torch.tensor(2.0), 2: sparse([8, 0, 8], torch.ones(3, 2), (9, 2))}
    assert client.push(3, gradients) == {0: (2, 2, 2), 1: (2,), 2: (2, 2, 2)}
    pulled = client.pull(specs, {})
    for index, value in enumerate(values):
        torch.testing.assert_close(pulled[index][1], value - gradients[index].to_dense())
    assert client.push(3, {}) == {}


def test_sparse_state_is_cut_as_dense_state_is(make_client):
    client = make_client(2)
    (spec,) = place([(5, 2)])
    create(client, [spec])
    define_sgd(client, 0, [spec])
    momentum = torch.arange(10.0).reshape(5, 2)
    client.load_optimizer_state(0, spec, {"momentum_buffer": momentum.to_sparse(1)})
    torch.testing.assert_close(client.optimizer_state(0, spec)["momentum_buffer"], momentum)


def test_pushes_copy_what_is_not_contiguous(make_client):
    specs = place([(4, 6)], num_shards=2)
    client = make_client(2)
    (value,) = create(client, specs)
    define_sgd(client, 3, specs)
    gradient = torch.randn(6, 4).T
    client.push(3, {0: gradient})
    client.push(3, {0: torch.ones(()).expand(4, 6)})
    torch.testing.assert_close(client.pull(specs, {})[0][1], value - gradient - 1)


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("chunk_bytes", [1, 40, 1 << 30])
def test_piece_by_piece(make_client, num_shards, chunk_bytes):
    specs = place([(7, 3), (), (0, 2), (3,)], num_shards=num_shards, dtype=torch.float64)
    client = make_client(2)
    values = create(client, specs)
    for spec, value in zip(specs, values, strict=True):
        out = torch.full(spec.shape, torch.nan, dtype=torch.float64)
        client.read_into(spec, out, chunk_bytes)
        assert torch.equal(out, value)
        client.write_from(spec, value + 1, chunk_bytes)
        assert torch.equal(client.pull([spec], {})[spec.id][1], value + 1)


def test_reading_piece_by_piece_sees_one_moment():
    """The variable changes between the pieces, and what was not finished is begun anew."""
    services, client = make_servers(1)
    (spec,) = place([(10, 4000)], num_ps=1, num_shards=1)
    create(client, [spec])
    client.update(spec, "assign", torch.zeros(10, 4000))
    channel = client._channels[0]
    send = channel.send

    def send_and_change(message):
        send(message)
        services[0].held.store.update([((0, 0), "assign_add", torch.ones(10, 4000))])

    channel.send = send_and_change
    out = torch.full((10, 4000), torch.nan)
    client.read_into(spec, out, 4000 * 4)
    assert not out.any()
    assert not services[0].held.snapshots
    client.read_into(spec, out, 4000 * 4)
    assert (out == 10).all()


def test_sparse_rows_never_become_dense():
    """Both ways, a look-up and a push of some rows of a large table are as large as these rows."""
    services = [ParameterService(), ParameterService()]
    channels = [LocalChannel(service) for service in services]
    client = ParameterClient(channels)
    (spec,) = place([(1_000_000, 2)], num_shards=3)
    client.create(spec, torch.zeros(1_000_000, 2))
    define_sgd(client, 0, [spec])
    before = [channel.num_bytes for channel in channels]
    indices = torch.randperm(1_000_000)[:100]
    rows = client.pull_rows(spec, indices)
    client.push(0, {0: sparse(indices.tolist(), torch.ones(100, 2), spec.shape)})
    sent = sum(channel.num_bytes - start for channel, start in zip(channels, before, strict=True))
    assert sent <= 2 * 100 * (8 + 2 * 4)
    assert not rows.any()
    assert (client.pull_rows(spec, indices) == -1).all()


def test_one_message_for_each_server():
    services = [ParameterService(), ParameterService()]
    channels = [LocalChannel(service) for service in services]
    client = ParameterClient(channels)
    specs = place([(8, 2), (8,), ()], num_shards=4)
    create(client, specs)
    define_sgd(client, 0, specs)
    for act in (
        lambda: client.pull(specs, {}),
        lambda: client.push(0, {spec.id: torch.ones(spec.shape) for spec in specs}),
        lambda: client.update_many([(spec, "assign", torch.ones(spec.shape)) for spec in specs]),
        lambda: client.pull_rows(specs[0], torch.arange(8)),
    ):
        before = [channel.num_messages for channel in channels]
        act()
        assert [channel.num_messages - start for channel, start in zip(channels, before, strict=True)] == [1, 1]


def wrong():
    value, row = torch.zeros(7, 4), torch.zeros(1, 4)
    return {
        "create": (lambda c, s: c.create(s, value[:6]), InvalidArgumentError, r"'v0' takes values of shape \[7, 4\]"),
        "again": (lambda c, s: c.create(s, value), ValueError, "'v0/part_.' can't be made"),
        "update": (lambda c, s: c.update(s, "assign", value.double()), InvalidArgumentError, "'v0'.*float64"),
        "method": (lambda c, s: c.update(s, "assign_mul", value), InvalidArgumentError, "'v0.*'assign_mul'"),
        "rows": (
            lambda c, s: c.pull_rows(s, torch.tensor([7])),
            IndexError,
            r"'v0' has rows 0 to 6\. Received: index 7",
        ),
        "row dtype": (lambda c, s: c.pull_rows(s, torch.tensor([1.0])), InvalidArgumentError, "'v0'.*vector of int64"),
        "scatter": (lambda c, s: c.scatter(s, "scatter_add", torch.tensor([-1]), row), IndexError, "'v0'.*index -1"),
        "scatter shape": (
            lambda c, s: c.scatter(s, "scatter_add", torch.tensor([0, 1]), row),
            InvalidArgumentError,
            r"'v0' takes values of shape \[2, 4\]",
        ),
        "scatter method": (
            lambda c, s: c.scatter(s, "add", torch.tensor([0]), row),
            InvalidArgumentError,
            r"'v0.*'add'",
        ),
        "push": (lambda c, s: c.push(0, {0: value[:3]}), InvalidArgumentError, r"'v0\.grad' takes"),
        "sparse": (
            lambda c, s: c.push(0, {0: sparse([0], torch.ones(1, 4), (6, 4))}),
            InvalidArgumentError,
            r"'v0\.grad' must be sparse along its rows, of shape \[7, 4\]",
        ),
        "optimizer": (lambda c, s: c.push(1, {0: value}), NotFoundError, "no optimizer 1"),
        "out": (lambda c, s: c.read_into(s, value[:2]), InvalidArgumentError, "'v0' takes"),
        "from": (lambda c, s: c.write_from(s, value.half()), InvalidArgumentError, "'v0'.*float16"),
    }


@pytest.mark.parametrize("case", wrong())
def test_errors_name_the_variable_and_change_nothing(make_client, case):
    act, kind, message = wrong()[case]
    (spec,) = place([(7, 4)])
    client = make_client(2)
    (value,) = create(client, [spec])
    define_sgd(client, 0, [spec])
    with pytest.raises(kind, match=message):
        act(client, spec)
    versions, found = client.pull([spec], {})[0]  # the connections are in order, too
    assert versions == (1, 1, 1)
    assert torch.equal(found, value)


def test_unknown_variables(make_client):
    client = make_client(1)
    (spec,) = place([(7, 4)], num_ps=1)
    with pytest.raises(NotFoundError, match=r"no part 0 of a variable 0.*earlier coordinator"):
        client.pull([spec], {})


def test_a_request_that_was_interrupted_is_not_taken_for_the_next(monkeypatch):
    _, client = make_servers(2)
    specs = place([(4,), (4,)], num_shards=1)
    create(client, specs)
    client.update(specs[1], "assign", torch.full((4,), 9.0))
    channel = client._channels[1]
    with monkeypatch.context() as patch:
        patch.setattr(channel, "receive", functools.partial(_raise, KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            client.pull(specs[:1] + specs[1:], {})
    client.update(specs[1], "assign", torch.full((4,), 5.0))
    assert client.pull([specs[1]], {})[1][1].tolist() == [5.0] * 4


def _raise(error, *_):
    raise error


def test_threads_share_a_client(make_client):
    specs = place([(50, 4), (LARGE,)])
    client = make_client(2)
    for spec in specs:
        client.create(spec, torch.zeros(spec.shape))
    failures = []

    def work(number):
        try:
            for _ in range(20):
                client.update(specs[number % 2], "assign_add", torch.ones(specs[number % 2].shape))
                for spec in specs:
                    value = client.pull([spec], {})[spec.id][1]
                    assert value.shape == spec.shape
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert all((client.pull([spec], {})[spec.id][1] == 40).all() for spec in specs)


def train_together(all_clients, num_pushes=15):
    """Several workers push and pull; every part that is pulled is of one moment, and no push is lost."""
    specs = place([(60, 4), (LARGE,), (1000, 8)])
    for spec in specs:
        all_clients[0].create(spec, torch.zeros(spec.shape))
    define_sgd(all_clients[0], 0, specs)
    failures = []

    def work(rank, client):
        try:
            client.know(specs)
            for _ in range(num_pushes):
                gradients = {spec.id: -torch.ones(spec.shape) for spec in specs[:2]}
                gradients[2] = sparse([rank, 999], -torch.ones(2, 8), specs[2].shape)
                client.push(0, gradients)
                for spec in specs[:2]:
                    value = client.pull([spec], {})[spec.id][1]
                    for index in range(len(spec.parts)):
                        part = spec.cut(value, index)
                        assert part.min() == part.max(), "a torn read"
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=work, args=(rank, client)) for rank, client in enumerate(all_clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    total = num_pushes * len(all_clients)
    pulled = all_clients[0].pull(specs, {})
    assert (pulled[0][1] == total).all()
    assert (pulled[1][1] == total).all()
    rows = all_clients[0].pull_rows(specs[2], torch.tensor([0, 999, 500]))
    assert rows[:, 0].tolist() == [num_pushes, total, 0]


def test_workers_together_over_sockets():
    with thread_servers(2) as (addresses, _), clients(addresses, 3) as made:
        train_together(made)


def test_a_new_coordinator_finds_nothing_of_the_old_one():
    with thread_servers(1) as (addresses, _):
        (spec,) = place([(4,)], num_ps=1)
        with clients(addresses) as (old,):
            create(old, [spec])
            with clients(addresses, incarnation=2) as (new,):
                with pytest.raises(NotFoundError, match="no part 0"):
                    new.pull([spec], {})
                new.create(spec, torch.full((4,), 5.0))
                with pytest.raises(UnavailableError, match="/job:ps/task:0"):
                    old.update(spec, "assign", torch.zeros(4))
                assert new.pull([spec], {})[0][1].tolist() == [5.0] * 4


@pytest.mark.slow
def test_processes():
    with thread_servers(1) as (here, _), process_servers(1) as (there, processes):
        addresses = [*here, *there]
        with clients(addresses, 2) as made:
            train_together(made, num_pushes=5)
            client, others = made[0], place([(4,)] * 100, num_shards=1)
            client.create(others[99], torch.zeros(4))
            assert others[99].parts[0].ps == 1
            os.kill(processes[0].pid, signal.SIGKILL)
            for _ in range(2):  # the first may have been sent before the connection is known to be closed
                with pytest.raises(UnavailableError, match=f"/job:ps/task:1 at {addresses[1]}"):
                    client.pull([others[99]], {})
            assert client.handlers[1].is_lost.wait(DEADLINE_S)
            with pytest.raises(UnavailableError, match=f"/job:ps/task:1 at {addresses[1]}"):
                client.set_hyper(0, [{}])
            (first, *_) = place([(60, 4)])
            assert client.pull_rows(first, torch.tensor([0])).tolist() == [[10.0] * 4]  # the other server works on
