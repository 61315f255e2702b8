"""Parameter servers behind real listeners, in threads or processes, and clients of them."""

import contextlib
import multiprocessing
import threading

from torchstrategy.ps.client import ParameterClient
from torchstrategy.ps.service import ParameterService
from torchstrategy.ps.transport.channel import TensorChannel
from torchstrategy.ps.transport.control_loop import ControlLoop
from torchstrategy.ps.transport.listener import Listener

DEADLINE_S = 60


class _Handler:
    def __init__(self):
        self.is_ready = threading.Event()
        self.is_lost = threading.Event()

    def ready(self, peer, welcome):
        self.is_ready.set()

    def lost(self, peer, reason):
        self.is_lost.set()

    def refused(self, peer, reason):
        self.is_lost.set()

    def message(self, peer, message):
        pass


@contextlib.contextmanager
def clients(addresses, num_clients=1, incarnation=1):
    """Give clients with connections of their own."""
    loop = ControlLoop()
    try:
        made = []
        for rank in range(num_clients):
            hello = {"role": "worker" if rank else "coordinator", "incarnation": incarnation}
            handlers = [_Handler() for _ in addresses]
            peers = [loop.connect(a, hello, handler) for a, handler in zip(addresses, handlers, strict=True)]
            assert all(handler.is_ready.wait(DEADLINE_S) for handler in handlers)
            made.append(ParameterClient([TensorChannel(peer) for peer in peers]))
            made[-1].handlers = handlers
        yield made
    finally:
        loop.close()


@contextlib.contextmanager
def thread_servers(num_ps):
    """Give the addresses of servers in threads of this process, and their services."""
    services = [ParameterService() for _ in range(num_ps)]
    listeners = [Listener("127.0.0.1:0", service) for service in services]
    for listener in listeners:
        listener.start()
    try:
        yield [listener.address for listener in listeners], services
    finally:
        for listener in listeners:
            listener.stop()


@contextlib.contextmanager
def process_servers(num_ps):
    """Give the addresses of servers in processes, and these."""
    context = multiprocessing.get_context("spawn")
    started = []
    try:
        for _ in range(num_ps):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            started.append((process, ours))
        for _, pipe in started:
            assert pipe.poll(DEADLINE_S)
        yield [pipe.recv() for _, pipe in started], [process for process, _ in started]
    finally:
        for process, pipe in started:
            pipe.close()
            process.join(DEADLINE_S)


def _serve(pipe):
    listener = Listener("127.0.0.1:0", ParameterService())
    listener.start()
    pipe.send(listener.address)
    with contextlib.suppress(EOFError):
        pipe.recv()
    listener.stop()
