"""Ranks that are threads of this process, with the connections of a group."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

from torch.distributed import HashStore, PrefixStore

from torchstrategy.collectives.records import by_rank, connect_records
from torchstrategy.collectives.shared_memory import share_memory


def no_check():
    return None


def exchange_bodies(records, body):
    """Return every rank's body, given one rank's connections and its own."""
    return by_rank(records.start(body, no_check)(no_check))


def on_ranks(size, fn):
    """Call ``fn(rank)`` in a thread for each rank; return the results in the order of ranks."""
    with ThreadPoolExecutor(size) as threads:
        return [future.result(timeout=60) for future in [threads.submit(fn, rank) for rank in range(size)]]


class Group:
    """Ranks on some hosts, connected by records."""

    def __init__(self, hosts):
        self.hosts = tuple(hosts)
        self.size = len(self.hosts)
        self.store = HashStore()
        store = PrefixStore("records", self.store)
        self.records = on_ranks(
            self.size, lambda rank: connect_records(store, "127.0.0.1", rank, self.size, self.hosts, 20.0, no_check)
        )

    def exchange(self, rank):
        """Return what exchanges a rank's payloads."""

        def exchange(payload):
            bodies = exchange_bodies(self.records[rank], json.dumps(payload).encode())
            return [json.loads(body) for body in bodies]

        return exchange

    def share_memory(self):
        """Return each rank's shared memory."""
        return on_ranks(self.size, lambda rank: share_memory(self.exchange(rank), rank, self.hosts, no_check))

    def close(self):
        for one in self.records:
            for channel in one._channels.values():
                channel.close()


class GoneByNow:
    """A check that raises when it is called, and counts."""

    def __init__(self):
        self.calls = 0
        self._lock = threading.Lock()

    def __call__(self):
        with self._lock:
            self.calls += 1
        raise TimeoutError("enough")
