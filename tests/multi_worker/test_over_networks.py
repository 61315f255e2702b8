"""Jobs on several hosts: over slow and lossy links, and over links that are cut."""

import threading
import time
from pathlib import Path

import pytest
import torch

import torchstrategy as ts
from tests.multi_worker import programs
from tests.multi_worker.lost import blamed


def check_same_numbers(found, num_steps, **options):
    losses, weights = programs.train(num_steps, **options)
    for other_losses, other_weights in found:
        assert other_losses == pytest.approx(losses, rel=1e-10)
        torch.testing.assert_close(other_weights, weights, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_training_gives_the_numbers_of_one_process_over_a_slow_and_lossy_link(network):
    hosts = network(2)
    hosts.shape(1, delay_ms=20, rate_mbit=50, loss_percent=1)
    with ts.testing.ProcessPool(2, launcher="TF_CONFIG", network=hosts) as pool:
        check_same_numbers(pool.run(programs.train, 10, width=2000), 10, width=2000)
    assert hosts.traffic(0).bytes > 10 * 8 * 2000  # the gradients went over the link


@pytest.mark.slow
def test_training_goes_on_over_a_very_lossy_link(network):
    hosts = network(2)
    hosts.shape(0, loss_percent=5)
    with ts.testing.ProcessPool(2, launcher="TF_CONFIG", network=hosts) as pool:
        check_same_numbers(pool.run(programs.train, 30), 30)
    assert hosts.traffic(0).lost + hosts.traffic(1).lost > 0


@pytest.mark.slow
@pytest.mark.parametrize(("num_hosts", "num_workers", "num_devices"), [(3, 3, 1), (2, 3, 1), (2, 2, 2)])
def test_layouts_give_the_numbers_of_one_process(network, num_hosts, num_workers, num_devices):
    hosts = network(num_hosts)
    hosts.shape(1, delay_ms=5)
    with ts.testing.ProcessPool(num_workers, launcher="TF_CONFIG", network=hosts) as pool:
        check_same_numbers(pool.run(programs.train, 10, num_devices=num_devices), 10)


@pytest.mark.slow
def test_torchrun_jobs_span_hosts(network):
    hosts = network(2)
    hosts.shape(1, delay_ms=2)
    with ts.testing.ProcessPool(2, network=hosts) as pool:
        check_same_numbers(pool.run(programs.train, 5), 5)


class Cutter:
    """Cuts links as soon as all ranks train."""

    def __init__(self, hosts, cut, folder, restore_after_s=None):
        self._hosts, self._cut, self._folder, self._restore_after_s = hosts, cut, folder, restore_after_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.at = None

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        self._thread.join()

    def _run(self):
        while len(list(self._folder.iterdir())) < self._hosts.num_hosts:
            if self._ended.wait(0.01):
                return
        self.at = time.monotonic()
        for host in self._cut:
            self._hosts.cut(host)
        if self._restore_after_s is not None:
            self._ended.wait(self._restore_after_s)
            for host in self._cut:
                self._hosts.restore(host)


def cut_while_training(hosts, cut, folder, **options):
    """Train until an error comes; check that all processes are gone afterwards."""
    with ts.testing.ProcessPool(hosts.num_hosts, launcher="TF_CONFIG", network=hosts) as pool:
        with Cutter(hosts, cut, folder) as cutter:
            outcomes = pool.outcomes(programs.train, 10**6, here=folder, **options)
        assert max(outcome.at for outcome in outcomes) - cutter.at < 40
    pids = [int(path.read_text()) for path in folder.iterdir()]
    assert len(pids) == hosts.num_hosts
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    return [outcome.error for outcome in outcomes]


@pytest.mark.slow
@pytest.mark.parametrize("cut", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_cut_link_is_noticed_by_the_missing_heartbeat(network, tmp_path, cut):
    errors = cut_while_training(network(3), [cut], tmp_path, heartbeat_s=2.0)
    for rank, error in enumerate(errors):
        assert isinstance(error, ts.errors.ReplicaFailedError), error
        others = {0, 1, 2} - {cut}
        # The host that is cut off can't know that it is not the others who are.
        assert blamed(error), error
        assert blamed(error) <= (others if rank == cut else {cut}), error
        assert "no sign of life for 2 s" in str(error)


@pytest.mark.slow
def test_a_cut_link_is_noticed_by_the_deadline(network, tmp_path):
    errors = cut_while_training(network(3), [2], tmp_path, deadline_s=3.0, heartbeat_s=60.0)
    for rank, error in enumerate(errors):
        assert isinstance(error, ts.errors.DeadlineExceededError), error
        assert "did not complete within 3 s" in str(error)
        assert blamed(error) == ({0, 1} if rank == 2 else {2}), error


@pytest.mark.slow
def test_every_link_can_be_cut(network, tmp_path):
    errors = cut_while_training(network(2), [0, 1], tmp_path, heartbeat_s=2.0)
    assert [blamed(error) for error in errors] == [{1}, {0}]


@pytest.mark.slow
def test_a_short_interruption_is_outlived(network, tmp_path):
    hosts = network(2)
    with (
        ts.testing.ProcessPool(2, launcher="TF_CONFIG", network=hosts) as pool,
        Cutter(hosts, [1], tmp_path, restore_after_s=0.5) as cutter,
    ):
        found = pool.run(programs.train, 2000, here=tmp_path, heartbeat_s=30.0)
    assert cutter.at is not None
    assert hosts.traffic(0).lost + hosts.traffic(1).lost > 0
    check_same_numbers(found, 2000)
