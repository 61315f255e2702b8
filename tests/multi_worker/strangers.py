"""Programs that connect to every port of a job and say nothing, drip, or send garbage."""

import contextlib
import os
import socket
import threading
from pathlib import Path

EACH = 40  # connections of each kind to a port
KINDS = ("silent", "drip", "garbage")


def ports_of(pids):
    """Return the TCP ports and the abstract names at which processes listen."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inodes.add(os.readlink(fd).removeprefix("socket:[").removesuffix("]"))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ports = {("127.0.0.1", int(row[1].split(":")[1], 16)) for row in rows if row[3] == "0A" and row[9] in inodes}
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    names = {row[7] for row in rows if len(row) == 8 and row[6] in inodes and row[7].startswith("@torchstrategy")}
    return ports | {f"\0{name[1:]}" for name in names}


class Strangers:
    """Attack the processes as soon as they listen, until the end of the block; then ``seen`` has what was attacked."""

    def __init__(self, pids):
        self.seen = set()
        self._pids = pids
        self._connections = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._attack)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        self._thread.join()
        for connection, _ in self._connections:
            connection.close()

    def _attack(self):
        while not self._ended.wait(0.002):
            for address in ports_of(self._pids) - self.seen:
                self.seen.add(address)
                for kind in KINDS * EACH:
                    self._connect(address, kind)
            self._drip()

    def _connect(self, address, kind):
        connection = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
        connection.settimeout(0.2)
        try:
            connection.connect(address)
            if kind == "garbage":
                connection.send(os.urandom(200))
        except OSError:
            connection.close()
        else:
            self._connections.append((connection, kind))

    def _drip(self):
        for connection, kind in self._connections:
            if kind == "drip":
                with contextlib.suppress(OSError):
                    connection.send(b"\1", socket.MSG_DONTWAIT)
