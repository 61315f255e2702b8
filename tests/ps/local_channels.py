"""Parameter servers in this very process: every message is encoded, copied and decoded as if it travelled."""

import itertools
import threading
from types import SimpleNamespace

from torchstrategy.ps.client import ParameterClient
from torchstrategy.ps.service import ParameterService
from torchstrategy.ps.transport.limits import Limits
from torchstrategy.ps.transport.messages import decode, encode, error_message, raise_error

_numbers = itertools.count()


def travel(message):
    return decode([bytearray(frame) for frame in encode(message)], Limits())


class LocalPeer:
    def __init__(self, service, address):
        self.address = address
        self._service = service
        self._replies = {}
        self._arrived = threading.Condition()
        self.session = SimpleNamespace(id=str(next(_numbers)), is_valid=True, role="coordinator", reply=self._take)

    def _take(self, number, message):
        with self._arrived:
            self._replies[number] = message
            self._arrived.notify_all()

    def call(self, message, timeout_seconds=60):
        number = next(_numbers)
        try:
            reply = self._service.control(self.session, travel(message)._replace(number=number))
        except Exception as error:  # noqa: BLE001
            raise_error(travel(error_message(error)))
        if reply is not None:
            return travel(reply)
        with self._arrived:
            assert self._arrived.wait_for(lambda: number in self._replies, timeout_seconds)
            return _checked(travel(self._replies.pop(number)))


class LocalChannel:
    def __init__(self, service, address="127.0.0.1:1"):
        self.peer = LocalPeer(service, address)
        self.num_bytes = 0
        self.num_messages = 0
        self._service = service
        self._replies = []

    def send(self, message):
        frames = encode(message)
        self.num_messages += 1
        self.num_bytes += sum(map(len, frames[1:]))
        try:
            reply = self._service.tensor(self.peer.session, travel(message))
        except Exception as error:  # noqa: BLE001
            reply = error_message(error)
        self._replies.append(travel(reply))
        self.num_bytes += sum(map(len, encode(reply)[1:]))

    def discard(self):
        self._replies.pop(0)

    def receive(self, timeout_seconds=None, into=None):
        reply = _checked(self._replies.pop(0))
        if into is not None:
            for own, tensor in zip(into(reply), reply.tensors, strict=True):
                if own is not None:
                    own.copy_(tensor)
        return reply


def _checked(reply):
    if reply.kind == "error":
        raise_error(reply)
    return reply


def connect(services):
    """Return a new client of these services."""
    return ParameterClient([LocalChannel(service, f"127.0.0.1:{i}") for i, service in enumerate(services)])


def make_servers(num_ps):
    """Return services and a client of them."""
    services = [ParameterService() for _ in range(num_ps)]
    return services, connect(services)
