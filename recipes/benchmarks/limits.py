"""What nothing that moves data on this machine can go below: copying in memory, and one loopback socket."""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

import torch

ECHOES = 15


def time_copy(num_floats: int) -> list[float]:
    """Return the milliseconds of each copy of so many float32 in memory."""
    source, target = torch.ones(num_floats), torch.ones(num_floats)
    return repeat(lambda: target.copy_(source), 10)


def time_there_and_back(sizes: Sequence[int]) -> list[list[float]]:
    """Return, for each number of bytes, the milliseconds of each way to another process and back over one socket."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    echo = context.Process(target=echo_bytes, args=(theirs, sizes), daemon=True)
    echo.start()
    theirs.close()  # so that waiting for its port ends if it fails
    times = []
    with socket.create_connection(("127.0.0.1", ours.recv())) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for size in sizes:
            data = memoryview(bytearray(size))
            times.append(repeat(lambda data=data: send_and_receive(connection, data), ECHOES))
    echo.join()
    return times


def echo_bytes(parent: Connection, sizes: Sequence[int]) -> None:
    """Send back what comes, in a process of its own; each size as often as ``repeat`` calls a function."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        parent.send(server.getsockname()[1])
        connection, _ = server.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for size in sizes:
                data = memoryview(bytearray(size))
                for _ in range(ECHOES + 2):
                    receive(connection, data)
                    connection.sendall(data)


def send_and_receive(connection: socket.socket, data: memoryview) -> None:
    """Send bytes and wait until as many have come back."""
    connection.sendall(data)
    receive(connection, data)


def receive(connection: socket.socket, data: memoryview) -> None:
    """Fill memory from a connection."""
    filled = 0
    while filled < len(data):
        filled += connection.recv_into(data[filled:])


def repeat(function: Callable[[], object], count: int) -> list[float]:
    """Return the milliseconds of each call, after two to warm up."""
    times = []
    for number in range(-2, count):
        started = time.perf_counter()
        function()
        if number >= 0:
            times.append(1000 * (time.perf_counter() - started))
    return times
