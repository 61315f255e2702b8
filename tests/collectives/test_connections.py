"""Strangers at the doors of a group: many, silent, dripping, sending garbage."""

import contextlib
import functools
import os
import resource
import socket
import threading
import time

import pytest
from torch.distributed import HashStore

from torchstrategy.collectives import connections, joining
from torchstrategy.collectives.control import ControlPlane
from torchstrategy.collectives.joining import Roll, _rest_of_key, connect_ranks

KEY = b"k" * 32
NUM = 60


def until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"


@contextlib.contextmanager
def strangers(address, num=NUM):
    """Connect before anybody else; a third is silent, a third drips, a third has sent garbage."""
    with contextlib.ExitStack() as stack:
        callers = [stack.enter_context(socket.create_connection(address, timeout=20)) for _ in range(num)]
        for caller in callers[::3]:
            caller.sendall(os.urandom(100))
        ended = threading.Event()

        def drip():
            while not ended.wait(0.05):
                for caller in callers[1::3]:
                    with contextlib.suppress(OSError):
                        caller.send(b"\1")

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            yield callers
        finally:
            ended.set()
            thread.join()


def test_channels_are_made_while_strangers_drip():
    """One after the other they would take half a second each, and longer if they drip."""
    made = {}
    with socket.create_server(("127.0.0.1", 0), backlog=connections.BACKLOG) as listener:
        address = listener.getsockname()
        connect = functools.partial(connect_ranks, key=KEY, timeout_s=20.0, check=lambda: None)

        def answer():
            made[0] = connect(listener, 0, {}, [1, 2])

        with strangers(address):
            thread = threading.Thread(target=answer)
            thread.start()
            begin = time.monotonic()
            for rank in (2, 1):
                call = functools.partial(socket.create_connection, address)
                with socket.create_server(("127.0.0.1", 0)) as own:
                    made[rank] = connect(own, rank, {0: call}, [])
            thread.join(timeout=20)
            assert time.monotonic() - begin < 8.0
        made[1][0].send(b"of 1", lambda: None)
        made[2][0].send(b"of 2", lambda: None)
        assert made[0][1].receive(4, lambda: None) == b"of 1"
        assert made[0][2].receive(4, lambda: None) == b"of 2"
        for channel in [channel for channels in made.values() for channel in channels.values()]:
            channel.close()


def test_the_control_plane_is_made_while_strangers_drip():
    store, planes = HashStore(), {}

    def join(rank):
        nothing = {"on_message": lambda *_: None, "on_lost": lambda *_, **__: None, "on_back": lambda _: None}
        planes[rank] = ControlPlane(store, rank, (0, 0), "127.0.0.1", timeout_s=30.0, **nothing)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in (0, 1)]
    threads[0].start()
    host, port = store.get("address/0").decode().split()
    begin = time.monotonic()
    with strangers((host, int(port))):
        threads[1].start()
        for thread in threads:
            thread.join(timeout=30)
        assert time.monotonic() - begin < 8.0
    assert sorted(planes) == [0, 1]
    for plane in planes.values():
        plane.close()


def test_the_roll_is_kept_while_strangers_drip():
    store = HashStore()
    keeper, other = Roll(0, 2), Roll(1, 2)
    keeper.join(store, "127.0.0.1")
    host, port = str(store.get("roll/keeper").decode()).split('"')[1].split()
    with strangers((host, int(port))):
        other.join(store, "127.0.0.1")
        other.fail(OSError("no disk"))
        assert keeper.wait_for_failure(8.0)["rank"] == 1
        other.leave()
        keeper.leave()
        keeper._thread.join(timeout=20)


def rest_of_three(connection, first, said):
    return 3 - len(said)


@pytest.fixture
def door():
    listener = socket.create_server(("127.0.0.1", 0), backlog=connections.BACKLOG)
    with connections.Door(listener, rest_of_three, lambda: b"?") as door:
        door.call = lambda: socket.create_connection(listener.getsockname(), timeout=20)
        yield door


def test_a_greeting_may_come_in_parts(door):
    with door.call() as caller:
        assert caller.recv(1) == b"?" if door.wait(0.2) == [] else None
        caller.sendall(b"a")
        assert door.wait(0.2) == []
        caller.sendall(b"bcd")
        ((connection, greeting),) = door.wait(20.0)
        with connection:
            assert greeting == b"abc"
            connection.settimeout(20)
            assert connection.recv(8) == b"d"  # belongs to what follows


def test_who_has_waited_longest_makes_room(door, monkeypatch, caplog):
    monkeypatch.setattr(connections, "_MOST_CALLERS", 4)
    with contextlib.ExitStack() as stack:
        callers = [stack.enter_context(door.call()) for _ in range(6)]
        door.wait(0.2)
        assert len(door._callers) == 4
        assert [caller.recv(2) for caller in callers[:2]] == [b"?", b"?"]
        assert [caller.recv(2) for caller in callers[:2]] == [b"", b""]
        callers[5].sendall(b"abc")
        ((connection, _),) = door.wait(20.0)
        connection.close()
    assert sum("too many callers" in message for message in caplog.messages) == 2


def test_a_caller_that_says_nothing_is_let_go(door, monkeypatch):
    monkeypatch.setattr(connections, "_GREETING_S", 0.1)
    with door.call() as caller:
        door.wait(0.5)
        assert not door._callers
        assert caller.recv(2) + caller.recv(2) == b"?"


def test_without_files_the_door_goes_on(door):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        callers = [stack.enter_context(door.call()) for _ in range(8)]
        door.wait(0.2)
        late = stack.enter_context(door.call())
        used = max(caller.fileno() for caller in [*callers, late, *door._callers])
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1, hard))
        try:
            late.sendall(b"abc")
            ((connection, greeting),) = door.wait(20.0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        connection.close()
        assert greeting == b"abc"


@pytest.mark.parametrize("kind", ["signed", "channels"])
def test_strangers_that_are_put_out_while_they_hang_up_are_nobody(kind):
    """Their sockets were closed in the middle of a look at all of them, and then given out as watched ones."""
    with socket.create_server(("127.0.0.1", 0), backlog=connections.BACKLOG) as listener:
        address = listener.getsockname()
        if kind == "signed":
            door = connections.signed_door(listener, KEY, {1, 2})
        else:
            door = connections.Door(listener, functools.partial(_rest_of_key, KEY, {1}))
        with door, contextlib.ExitStack() as stack:
            old = [socket.create_connection(address, timeout=20) for _ in range(connections._MOST_CALLERS)]
            until(lambda: door.wait(0.01) == [] and len(door._callers) == len(old))
            for _ in range(20):
                stack.enter_context(socket.create_connection(address, timeout=20))
            for caller in old:
                caller.close()
            assert [found for _ in range(5) for found in door.wait(0.05)] == []


def test_a_rank_that_the_keeper_of_the_roll_answers_too_late_is_not_dead(monkeypatch):
    monkeypatch.setattr(joining, "_CALL_S", 0.3)
    listen, slept = connections.Door._listen, []

    def slow(self, connection):
        if not slept:
            slept.append(time.sleep(0.8))  # native code keeps the keeper's interpreter
        return listen(self, connection)

    monkeypatch.setattr(connections.Door, "_listen", slow)
    store = HashStore()
    keeper, late = Roll(0, 2), Roll(1, 2)
    keeper.join(store, "127.0.0.1")
    late.join(store, "127.0.0.1")
    assert keeper.wait_for_failure(2.0) is None
    assert slept
    late.leave()
    keeper.leave()
