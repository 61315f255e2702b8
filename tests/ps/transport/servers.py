"""A service that records what reaches it, and clients for it."""

import contextlib
import os
import queue
import socket
import threading
import time

import pytest
import torch

from torchstrategy.ps.transport.channel import TensorChannel
from torchstrategy.ps.transport.control_loop import ControlLoop
from torchstrategy.ps.transport.listener import Listener
from torchstrategy.ps.transport.messages import Message, RefusedError
from torchstrategy.ps.transport.secret import Secret

SECRET = Secret("00112233445566778899aabbccddeeff")
WAIT_S = 20.0


class RecordingService:
    """Answers every message with what it has brought, and keeps an account."""

    coordinator = None

    def __init__(self):
        self.messages = []
        self.events = queue.Queue()
        self.refuses = None
        self.sessions = []
        self.gate = threading.Event()
        self.value = torch.arange(10.0)

    def superseded(self, incarnation):
        self.events.put(("superseded", incarnation))

    def admit(self, hello):
        if self.refuses:
            raise RefusedError(self.refuses)
        self.events.put(("admit", hello["incarnation"]))
        return {"greeting": "hi"}

    def control(self, session, message):
        self.messages.append(message.kind)
        self.sessions.append(session)
        if message.kind == "fail":
            raise ValueError(message.fields["text"])
        if message.kind == "later":
            return None
        if message.kind == "big":
            return Message("big", {}, (torch.zeros(message.fields["num_bytes"], dtype=torch.uint8),))
        return Message("echo", message.fields, message.tensors, message.blobs)

    def tensor(self, session, message):
        self.messages.append(message.kind)
        if message.kind == "fail":
            raise KeyError(message.fields["text"])
        if message.kind == "wait":
            self.events.put(("waiting", session.incarnation))
            self.gate.wait(WAIT_S)
        if message.kind == "blobs":
            return Message("blobs", {}, (), (b"x",))
        if message.kind == "pull":
            return Message("value", {}, (self.value,))
        return Message("echo", message.fields, message.tensors)

    def lost(self, session):
        self.events.put(("lost", session.incarnation))

    def next_event(self):
        return self.events.get(timeout=WAIT_S)


class RecordingHandler:
    def __init__(self):
        self.events = queue.Queue()

    def ready(self, peer, welcome):
        self.events.put(("ready", welcome))

    def lost(self, peer, reason):
        self.events.put(("lost", reason))

    def refused(self, peer, reason):
        self.events.put(("refused", reason))

    def message(self, peer, message):
        self.events.put(("message", message))

    def next_event(self):
        return self.events.get(timeout=WAIT_S)


@contextlib.contextmanager
def serving(address="127.0.0.1:0", service=None, **options):
    """Yield a started listener and its service."""
    service = service or RecordingService()
    listener = Listener(address, service, secret=options.pop("secret", SECRET), **options)
    listener.start()
    try:
        yield listener, service
    finally:
        service.gate.set()
        listener.stop()


@contextlib.contextmanager
def looping():
    loop = ControlLoop()
    try:
        yield loop
    finally:
        loop.close()


def connect(loop, address, incarnation=1, role="coordinator", **options):
    """Return a peer and its handler, not waiting for anything."""
    handler = RecordingHandler()
    hello = {"role": role, "incarnation": incarnation}
    return loop.connect(address, hello, handler, secret=options.pop("secret", SECRET), **options), handler


def connected(loop, address, incarnation=1, **options):
    """Return a peer that is ready, and its handler."""
    peer, handler = connect(loop, address, incarnation, **options)
    event, what = handler.next_event()
    assert event == "ready", what
    return peer, handler


@contextlib.contextmanager
def channel_to(peer, **tensors):
    """Yield a tensor channel; ``tensors`` change what the server has said of its tensor connections."""
    peer.connection["tensors"].update(tensors)
    channel = TensorChannel(peer)
    try:
        yield channel
    finally:
        channel.close()


def connections_to(port):
    """Yield this process's TCP connections to a port."""
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("There is no list of this process's connections.")
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            connection = socket.socket(fileno=int(descriptor))
            try:
                if connection.family == socket.AF_INET and connection.getpeername()[1] == port:
                    yield connection
            finally:
                connection.detach()


def cut_connections_to(port):
    """Cut them; the control connection, to another port, stands."""
    for connection in connections_to(port):
        connection.shutdown(socket.SHUT_RDWR)


def wait_until(condition):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
