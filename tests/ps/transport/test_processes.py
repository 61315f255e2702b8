"""Death, silence and forks of real processes.

Where a closed connection must be noticed, the heartbeat is far longer than the test: nothing else can notice it.
"""

import contextlib
import gc
import multiprocessing
import os
import signal

import pytest
import torch

from tests.ps.transport.servers import WAIT_S, channel_to, connected, looping, serving, wait_until
from torchstrategy.errors import UnavailableError
from torchstrategy.ps.transport.channel import TensorChannel
from torchstrategy.ps.transport.control_loop import ControlLoop
from torchstrategy.ps.transport.messages import Message

SPAWN = multiprocessing.get_context("spawn")
LONG_S = 1000.0

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and signals"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]


def _fork_a_child():
    """Return the id of a child that only waits, as a loader's worker would."""
    child = os.fork()
    if not child:
        signal.pause()
        os._exit(0)
    return child


def _serve(pipe, address, heartbeat_s, has_child):
    with serving(address, heartbeat_s=heartbeat_s) as (listener, service):
        service.gate.set()
        pipe.send((listener.address, _fork_a_child() if has_child else None))
        pipe.recv()


def _connect(pipe, address, heartbeat_s, has_child):
    with looping() as loop:
        peer, _ = connected(loop, address, heartbeat_seconds=heartbeat_s)
        with channel_to(peer) as channel:
            channel.call(Message("echo", {}))
            pipe.send((address, _fork_a_child() if has_child else None))
            pipe.recv()


@contextlib.contextmanager
def process(target, address, heartbeat_s=LONG_S, has_child=False):
    """Yield a process, its answer and its child."""
    pipe, theirs = SPAWN.Pipe()
    started = SPAWN.Process(target=target, args=(theirs, address, heartbeat_s, has_child))
    started.start()
    theirs.close()
    child = None
    try:
        assert pipe.poll(60), "it did not start"
        answer, child = pipe.recv()
        yield started, answer
    finally:
        for pid in filter(None, (started.pid, child)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        started.join()
        started.close()
        pipe.close()


def stop(process):
    os.kill(process.pid, signal.SIGSTOP)
    assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])


@pytest.fixture
def loop():
    with looping() as loop:
        yield loop


@pytest.mark.slow
def test_a_killed_server_is_noticed_and_its_port_is_free(loop):
    """Although a child of the server, forked while it served, is still there."""
    with process(_serve, "127.0.0.1:0", has_child=True) as (server, address):
        peer, handler = connected(loop, address, heartbeat_seconds=LONG_S)
        with channel_to(peer) as channel, channel_to(peer, unix=None) as encrypted:
            for each in (channel, encrypted):
                each.call(Message("echo", {}))
            os.kill(server.pid, signal.SIGKILL)
            assert handler.next_event()[0] == "lost"
            for each in (channel, encrypted):
                with pytest.raises(UnavailableError, match="lost"):
                    each.call(Message("echo", {}))
        wait_until(lambda: not server.is_alive())  # its child has what `join` waits for; sockets are closed one by one
        with serving(address):
            assert handler.next_event()[0] == "ready"


@pytest.mark.slow
def test_a_killed_client_is_noticed():
    with serving(heartbeat_s=LONG_S) as (listener, service):
        with process(_connect, listener.address, has_child=True) as (client, _):
            assert service.next_event() == ("admit", 1)
            os.kill(client.pid, signal.SIGKILL)
            assert service.next_event() == ("lost", 1)
        wait_until(lambda: not listener._tensors._sessions)


@pytest.mark.slow
def test_a_stopped_server_is_lost_and_comes_back(loop):
    with process(_serve, "127.0.0.1:0", heartbeat_s=1.0) as (server, address):
        peer, handler = connected(loop, address, heartbeat_seconds=1.0)
        channel = TensorChannel(peer)
        stop(server)
        channel.send(Message("echo", {}))
        with pytest.raises(UnavailableError, match="silent for too long"):
            channel.receive()
        assert handler.next_event()[0] == "lost"
        os.kill(server.pid, signal.SIGCONT)
        assert handler.next_event()[0] == "ready"
        with channel_to(peer) as channel:
            assert channel.call(Message("echo", {"a": 1})).fields == {"a": 1}


@pytest.mark.slow
def test_a_stopped_client_is_lost():
    with (
        serving(heartbeat_s=1.0) as (listener, service),
        process(_connect, listener.address, heartbeat_s=1.0) as (client, _),
    ):
        assert service.next_event() == ("admit", 1)
        stop(client)
        assert service.next_event() == ("lost", 1)
        os.kill(client.pid, signal.SIGCONT)
        assert service.next_event() == ("admit", 1)


def test_a_fork_does_not_harm_the_parent(loop):
    with serving() as (listener, _):
        peer, handler = connected(loop, listener.address)
        with channel_to(peer) as plain, channel_to(peer, unix=None) as encrypted:
            for _ in range(3):
                child = os.fork()
                if not child:
                    code = 1
                    with contextlib.suppress(BaseException):
                        code = _use_in_child(loop, peer, (plain, encrypted), listener)
                    os._exit(code)
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            for channel in (plain, encrypted):
                assert torch.equal(
                    channel.call(Message("echo", {}, (torch.ones(100_000),))).tensors[0], torch.ones(100_000)
                )
            assert peer.call(Message("echo", {"a": 1}), WAIT_S).fields == {"a": 1}
            assert handler.events.empty()


def _use_in_child(loop, peer, channels, listener):
    """Everything says that it can't be used, nothing waits, and collecting it closes nothing of the parent's."""
    for channel in channels:
        with pytest.raises(UnavailableError, match="forked"):
            channel.call(Message("echo", {}))
    with pytest.raises(UnavailableError):
        peer.call(Message("echo", {}))
    for channel in channels:
        channel.close()
    peer.close()
    loop.close()
    listener.stop()
    gc.collect()
    return 0


def test_a_new_loop_works_in_a_forked_child():
    with serving() as (listener, _), looping() as loop:
        connected(loop, listener.address)
        child = os.fork()
        if not child:
            code = 1
            with contextlib.suppress(BaseException), looping() as own:
                peer, _ = connected(own, listener.address)
                with channel_to(peer) as channel:
                    code = 0 if channel.call(Message("echo", {"a": 1})).fields == {"a": 1} else 2
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _end_without_closing(address):
    with serving() as (listener, _):
        loop = ControlLoop()
        peer, _ = connected(loop, address)
        channel = TensorChannel(peer)
        channel.call(Message("echo", {}, (torch.ones(1 << 20),)))
        connected(loop, listener.address)
    _left.append((loop, channel))


_left = []


@pytest.mark.slow
def test_a_program_that_closes_nothing_ends():
    with serving() as (listener, _):
        program = SPAWN.Process(target=_end_without_closing, args=(listener.address,))
        program.start()
        program.join(60)
        code = program.exitcode
        if code is None:
            program.kill()
            program.join()
        program.close()
    assert code == 0
