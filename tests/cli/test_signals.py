"""A signal ends a launcher wherever it finds it; torch's handler is looked up as torch does when it starts workers."""

import contextlib
import multiprocessing
import signal
import time

import pytest
from torch.distributed.elastic.multiprocessing import SignalException, api

from torchstrategy.cli.launch import SignalReceived, until_signal


def register():
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, api._terminate_process_handler)


def replaced():
    try:
        signal.raise_signal(signal.SIGTERM)
    finally:
        raise UnboundLocalError("start")


def caught():
    with contextlib.suppress(Exception):
        signal.raise_signal(signal.SIGTERM)
    time.sleep(60)


def twice():
    try:
        signal.raise_signal(signal.SIGTERM)
    except SignalException as error:
        signal.raise_signal(signal.SIGINT)  # the workers are being ended
        raise RuntimeError("ended") from error


def at_the_end():
    with contextlib.suppress(SignalException):
        signal.raise_signal(signal.SIGTERM)
    return "result"


def starting():
    # Not a fork of this process, which may have threads that hold locks.
    multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(60,)).start()
    signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("launch", [replaced, caught, twice, at_the_end, starting])
def test_a_signal_ends_the_launcher(launch):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)]
    torch_handler = api._terminate_process_handler

    def run():
        register()
        return launch()

    children = multiprocessing.active_children()
    has_timer = signal.getitimer(signal.ITIMER_REAL)[0] > 0  # pytest-timeout's
    with pytest.raises(SignalReceived) as raised:
        until_signal(run)
    assert raised.value.number == signal.SIGTERM
    assert set(multiprocessing.active_children()) == set(children)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)] == before
    assert api._terminate_process_handler is torch_handler
    assert (signal.getitimer(signal.ITIMER_REAL)[0] > 0) == has_timer


def test_ctrl_c_before_torch_has_registered_its_handler():
    def launch():
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            raise UnboundLocalError("start")

    with pytest.raises(SignalReceived) as raised:
        until_signal(launch)
    assert raised.value.number == signal.SIGINT


def test_without_a_signal():
    assert until_signal(lambda: "result") == "result"
    with pytest.raises(ValueError, match="wrong"):
        until_signal(lambda: int("wrong"))
